"""Names that flags have in nanoGPT, nanochat, torchtitan, TRL, Hugging Face's Trainer and torchrun; what to type instead."""
import re

# {names: answer}. An answer is given only where the Config has the flag that it names first, so two rows may share a name.
# A name like device=mps is a value of one of our own flags.
ELSEWHERE = {
    "dtype training.dtype": "did you mean --param_dtype? It is of the weights; --compute_dtype is of matmuls and activations",
    "dtype torch_dtype precision mixed_precision amp_dtype mixed_precision_param": "did you mean --compute_dtype?",
    "bf16 fp16 amp half": "use --compute_dtype bfloat16, which is the default on GPUs; there is no float16",
    "save_every save_steps save_interval save_freq ckpt_every checkpoint_interval": "did you mean --checkpoint_every?",
    "save_total_limit keep_last": "did you mean --keep_latest_k?",
    "eval_every eval_interval eval_steps val_interval eval_strategy validation_freq": "did you mean --val_every?",
    "eval_interval eval_steps": "did you mean --eval_every?",
    "eval_iters val_steps eval_batches": "did you mean --val_batches?",
    "log_interval logging_steps log_freq log_steps": "did you mean --log_every?",
    "max_iters max_steps num_iterations num_steps iters train_steps training_steps": "did you mean --steps?",
    "epochs num_epochs num_train_epochs": "--steps counts optimizer steps; an epoch has tokens / (global_batch_size x seq_len)",
    "grad_accum grad_accum_steps gradient_accumulation_steps accumulation_steps":
        "use --global_batch_size: what --local_batch_size on every data rank does not reach is accumulated",
    "total_batch_size": "--global_batch_size is the size of a step, in sequences (not tokens)",
    "batch_size device_batch_size micro_batch_size per_device_train_batch_size train_batch_size":
        "did you mean --local_batch_size? It is what one data rank runs at once; --global_batch_size is a whole step",
    "block_size context_length max_seq_len max_seq_length max_length sequence_length": "did you mean --seq_len?",
    "resume resume_from resume_from_checkpoint auto_resume": "nothing to type: the same --out continues where it stopped",
    "overwrite_output_dir force restart": "use --out NEW to begin anew, or delete the old folder",
    "out_dir output_dir save_dir dump_folder": "did you mean --out?",
    "learning_rate peak_lr max_lr": "did you mean --lr?",
    "min_lr lr_min": "did you mean --min_lr_ratio? It is a share of --lr",
    "warmup warmup_iters warmup_ratio lr_warmup_steps num_warmup_steps": "did you mean --warmup_steps?",
    "lr_decay_iters lr_decay_steps": "did you mean --schedule_steps?",
    "lr_scheduler_type lr_schedule decay_lr": "did you mean --decay_type?",
    "grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip_val": "did you mean --max_norm?",
    "adam_beta1": "did you mean --beta1?",
    "adam_beta2": "did you mean --beta2?",
    "adam_eps adam_epsilon": "did you mean --eps?",
    "optim optimizer_name": "did you mean --optimizer?",
    "n_layer n_layers num_layers depth n_head n_heads n_embd d_model hidden_size dim vocab_size rope_theta":
        "fields of the model are in --model_args: --model_args n_layers=4,dim=512",
    "dropout attention_dropout": "these models have no dropout; --model_args changes the fields that they have",
    "dataset dataset_path data_dir data_path train_data train_file input_bin": "did you mean --data?",
    "model model_name model_size model_type arch": "did you mean --flavor?",
    "model_name_or_path pretrained checkpoint_path load_from ckpt": "did you mean --init_from?",
    "gradient_checkpointing activation_checkpointing recompute": "did you mean --ac full?",
    "lora use_lora peft use_peft lora_r lora_dim": "did you mean --lora_rank?",
    "lora_target_modules target_modules lora_attn_modules": "did you mean --lora_on?",
    "fsdp zero zero_stage zero3 deepspeed data_parallel_shard_degree": "did you mean --dp_shard?",
    "ddp dp dp_size data_parallel_size data_parallel_replicate_degree": "did you mean --dp_replicate?",
    "tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree": "did you mean --tp?",
    "pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree": "did you mean --pp?",
    "cp_size context_parallel context_parallel_size context_parallel_degree": "did you mean --cp?",
    "ep_size expert_parallel expert_parallel_size expert_parallel_degree": "did you mean --ep?",
    "torch_compile": "did you mean --compile?",
    "use_wandb wandb_log wandb_project report_to": "did you mean --wandb PROJECT?",
    "no_cuda cpu use_cpu": "did you mean --device cpu?",
    "nproc_per_node nproc nnodes node_rank master_addr master_port rdzv_endpoint rdzv_backend standalone gpus num_gpus":
        "--device is cpu or cuda; how many processes run is for torchrun, before the script: torchrun --nproc_per_node 2 FILE",
    "start": "did you mean --prompt?",
    "max_tokens max_length length num_tokens": "did you mean --max_new_tokens?",
    "num_samples": "give --prompt several times, or another --seed",
    "num_generations rollouts n_samples": "did you mean --group_size?",
    "max_completion_length max_response_length": "did you mean --max_new_tokens?",
    "float8 fp8": "GRPO (--group_size) computes in --compute_dtype bfloat16 at least: what float8 rounds away would be "
        "another policy in training than in rollouts",
    "beta kl_beta": "did you mean --kl_coef?",
    # torchtitan's configuration, where a name above does not say it; "section.name" where the section matters
    "config_file": "did you mean --config?",
    "name description": "--out names a run, --flavor a size, --optimizer an optimizer; a model is a recipe's file",
    "model.name": "--flavor is a size of the model; another model is another recipe, such as train_qwen3.py",
    "optimizer.name": "did you mean --optimizer?",
    "print_config print_args": "nothing to type: a run prints the flags that you gave, and --out has all in config.json",
    "custom_config_module custom_import": "copy the recipe and add a field to its Config: docs/fork_me.md",
    "hf_assets_path initial_load_path": "did you mean --init_from?",
    "initial_load_in_hf initial_load_in_hf_quantized": "--init_from tells a Hugging Face folder by its contents",
    "initial_load_model_only": "did you mean --init_model_only?",
    "tokenizer_path": "did you mean --tokenizer?",
    "converters": "--float8 and --lora_rank are flags of their own; another one is a line in section 4 of the recipe",
    "print_after_conversion": "did you mean --explain? It shows a block as it is trained",
    "implementation": "nothing to type: --optimizer adamw is torch's fused kernel",
    "early_step_in_backward": "did you mean --optimizer_in_backward?",
    "min_lr_factor": "did you mean --min_lr_ratio?",
    "mixed_precision_reduce": "did you mean --reduce_dtype?",
    "gc_freq": "did you mean --gc_every?",
    "gc_debug": "--memory_snapshot shows what holds memory",
    "moe_force_load_balance debug_moe_force_load_balance": "did you mean --moe_force_balance?",
    "debug_moe_force_load_balance moe_force_load_balance": "experts are in train_qwen3.py and train_deepseek.py",
    "fsdp_reshard_after_forward": "did you mean --reshard_after_forward?",
    "compiled_autograd": "torch has given compiled autograd up; --compile compiles every block",
    "async_tensor_parallel": "did you mean --async_tp?",
    "module_fqns_per_model_part": "did you mean --pp_stage_fqns?",
    "pipeline_parallel_first_stage_less_layers": "did you mean --pp_first_stage_less_layers?",
    "pipeline_parallel_last_stage_less_layers": "did you mean --pp_last_stage_less_layers?",
    "pipeline_parallel_layers_per_stage": "did you mean --pp_layers_per_stage?",
    "pipeline_parallel_schedule": "did you mean --pp_schedule?",
    "pipeline_parallel_schedule_csv": "did you mean --pp_schedule_csv?",
    "pipeline_parallel_microbatch_size": "did you mean --pp_microbatch_size?",
    "context_parallel_rotate_method": "did you mean --cp_method? Its alltoall is Ulysses: heads for sequence, no rotation",
    "expert_tensor_parallel_degree": "did you mean --etp?",
    "checkpoint.enable": "nothing to type: checkpoints are on, and --checkpoint_every 0 turns them off",
    "compile.enable components backend": "did you mean --compile?",
    "memory_estimation.enable disable_fake_mode": "did you mean --dry_run?",
    "enable": "of what? --compile, --dry_run, or --checkpoint_every 0 for none",
    "folder checkpoint.folder": "--out is the folder of a run; its checkpoints are in OUT/checkpoints",
    "interval checkpoint.interval": "did you mean --checkpoint_every?",
    "last_save_in_hf": "did you mean --export_hf FOLDER?",
    "async_mode": "did you mean --checkpoint_async?",
    "first_step_checkpoint": "did you mean --checkpoint_first_step?",
    "create_seed_checkpoint": "nothing to type: --seed gives the same initial weights in every layout",
    "ft_dataloader_checkpoints": "forks/train_llama3_ft.py keeps where each group's data is",
    "init_timeout_seconds": "did you mean --init_timeout_s?",
    "train_timeout_seconds": "did you mean --train_timeout_s?",
    "trace_buf_size save_traces_folder": "did you mean --flight_recorder? It writes to OUT/trace",
    "activation_checkpoint.mode mode": "did you mean --ac?",
    "selective_ac_option": "did you mean --ac_every? It belongs to --ac selective; --ac op chooses by operator",
    "memory_budget": "did you mean --ac_budget? It belongs to --ac budget",
    "per_op_sac_force_recompute_mm_shapes_by_fqns": "nothing to type: --ac op always computes routers again",
    "fsdp_float8_all_gather": "did you mean --float8_all_gather?",
    "recipe_name": "did you mean --float8?",
    "filter_fqns": "did you mean --float8_filter?",
    "precompute_float8_dynamic_scale_for_fsdp": "nothing to type: --float8 tensorwise does it once per step",
    "profiling profile_freq": "did you mean --profile?",
    "save_tb_folder": "did you mean --tensorboard?",
    "device=mps device=metal": "--device knows cpu and cuda: torch.distributed has no mps; use cpu",
    "device=gpu device=cuda:0 device=0": "--device cuda, and torchrun gives each process a GPU of its own",
}


def hint(name: str, flags) -> str:
    """The answer to somebody who types this name, "" if there is none. flags: those of the Config. A name may have a section
    before it, training.seq_len; enable_x and disable_x are --x and --no-x."""
    leaf = name.rpartition(".")[2]
    for wanted in dict.fromkeys((name, leaf)):
        answers = [text for names, text in ELSEWHERE.items() if wanted in names.split()]
        named = ((text, re.search(r"--(\w+)", text)) for text in answers)
        if answer := next((text for text, flag in named if not flag or flag[1] in flags or flag[1] == "config"), ""):
            return answer
    verb, _, rest = leaf.partition("_")
    if verb not in ("enable", "disable", "use"):
        return f"did you mean --{leaf}?" if leaf != name and leaf in flags else ""
    if rest in flags:
        return f"did you mean --{'no-' * (verb == 'disable')}{rest}?"
    return hint(rest, flags) if verb != "disable" else ""
