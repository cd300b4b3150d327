"""Names of flags in earlier versions, in nanoGPT, nanochat, torchtitan, TRL, Hugging Face's Trainer and torchrun, and the
flags to type instead.

config.py imports this file when a command line has an unknown flag.
"""
import re

# our flag -> names elsewhere. If a name is in two rows, the first row with a flag of the program counts.
ELSEWHERE = {
    "steps": "max_iters max_steps num_iterations num_steps iters train_steps training_steps",
    "seq_len": "block_size context_length max_seq_len max_seq_length max_length sequence_length",
    "out": "out_dir output_dir save_dir dump_folder folder",
    "data": "dataset dataset_path data_dir data_path train_data train_file input_bin",
    "flavor": "model model_name model_size model_type arch",
    "init_from": "model_name_or_path pretrained checkpoint_path load_from ckpt hf_assets_path initial_load_path",
    "lr": "learning_rate peak_lr max_lr",
    "min_lr_ratio": "min_lr lr_min min_lr_factor",
    "warmup_steps": "warmup warmup_iters lr_warmup_steps num_warmup_steps",
    "schedule_steps": "lr_decay_iters lr_decay_steps",
    "decay_type": "lr_scheduler_type lr_schedule decay_lr",
    "eps": "adam_eps adam_epsilon",
    "max_norm": "grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip_val",
    "checkpoint_every": "save_every save_steps save_interval save_freq ckpt_every checkpoint_interval interval",
    "keep_latest_k": "save_total_limit keep_last",
    "val_every": "eval_every eval_interval eval_steps val_interval eval_strategy validation_freq",
    "eval_every": "eval_interval eval_steps",
    "val_batches": "eval_iters val_steps eval_batches",
    "log_every": "log_interval logging_steps log_freq log_steps",
    "ac": "gradient_checkpointing activation_checkpointing recompute mode",
    "ac_every": "selective_ac_option",
    "lora_rank": "lora peft lora_r lora_dim",
    "lora_on": "lora_target_modules target_modules lora_attn_modules",
    "dp_shard": "fsdp zero zero_stage zero3 deepspeed data_parallel_shard_degree",
    "dp_replicate": "ddp dp dp_size data_parallel_size data_parallel_replicate_degree",
    "tp": "tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree",
    "pp": "pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree",
    "cp": "cp_size context_parallel context_parallel_size context_parallel_degree",
    "ep": "ep_size expert_parallel expert_parallel_size expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
    "async_tp": "async_tensor_parallel",
    "cp_method": "context_parallel_rotate_method",
    "pp_schedule": "pipeline_parallel_schedule",
    "pp_stage_fqns": "module_fqns_per_model_part",
    "compute_dtype": "torch_dtype precision mixed_precision amp_dtype mixed_precision_param bf16 fp16 amp half",
    "reduce_dtype": "mixed_precision_reduce",
    "wandb": "wandb_log wandb_project report_to",
    "tensorboard": "save_tb_folder",
    "gc_every": "gc_freq",
    "checkpoint_async": "async_mode",
    "checkpoint_first_step": "first_step_checkpoint",
    "export_hf": "last_save_in_hf",
    "rollout_rows": "engine_requests",
    "prompt": "start",
    "max_new_tokens": "max_tokens max_length length num_tokens max_completion_length max_response_length",
    "group_size": "num_generations rollouts n_samples",
    "kl_coef": "beta kl_beta",
}
# names -> a sentence, if no row above has an answer and the program has the first flag of the sentence
SENTENCES = {
    "batch_size device_batch_size micro_batch_size per_device_train_batch_size train_batch_size":
        "did you mean --local_batch_size? It is what one data rank runs at once; --global_batch_size is a whole step",
    "grad_accum grad_accum_steps gradient_accumulation_steps accumulation_steps total_batch_size":
        "--global_batch_size is the size of a step, in sequences; what exceeds --local_batch_size is accumulated",
    "epochs num_epochs num_train_epochs": "--steps counts optimizer steps; an epoch has tokens / (global_batch_size x seq_len)",
    "resume resume_from resume_from_checkpoint auto_resume": "nothing to type: the same --out continues where it stopped",
    "overwrite_output_dir force restart": "use --out NEW to begin anew, or delete the old folder",
    "n_layer n_layers num_layers depth n_head n_heads n_embd d_model hidden_size dim vocab_size rope_theta":
        "fields of the model are in --model_args: --model_args n_layers=4,dim=512",
    "text_column dataset_text_field":
        '--data reads "text"; of another name: python data.py prepare --input FILE --text_column NAME ..., then --data FOLDER',
    "dropout attention_dropout": "these models have no dropout; --model_args changes the fields that they have",
    "dtype": "did you mean --compute_dtype, of matmuls and activations, or --param_dtype, of weights?",
    "no_cuda cpu": "did you mean --device cpu?",
    "nproc_per_node nproc nnodes node_rank master_addr master_port rdzv_endpoint rdzv_backend standalone gpus num_gpus":
        "--device is cpu or cuda; torchrun takes the number of processes, before the script: torchrun --nproc_per_node 2 FILE",
    "num_samples": "give --prompt several times, or another --seed",
    "lora peft lora_rank lora_alpha lora_on lora_target_modules target_modules": "adapters (LoRA) are trained by finetune.py",
    "ep etp expert_parallel_degree": "experts are in train_qwen3.py, train_deepseek.py and finetune.py; this model has none",
    "adamw_moments": "--optimizer adamw_8bit, adamw_4bit or adamw_fp8",
    "stochastic_rounding": "--optimizer adamw_sr rounds by chance",
    "float8_experts": "--float8 rowwise_experts or mxfp8_experts",
    "flight_recorder trace_buf_size save_traces_folder": "nothing to type: with NCCL the last collectives are always kept, and "
        "written to the trace folder of the run when one times out",
    "attention": "nothing to type: cuDNN's kernel is tried first, then flash",
    "moe_load_per_layer": "metrics.jsonl has moe_load_max_over_mean; loads of each layer: the table in balance_experts",
    "reduce_grads": "nothing to type: gradients are reduced after each micro-batch where whole ones take too much memory",
    "create_seed_checkpoint": "nothing to type: --seed gives the same initial weights in every layout",
}
# Keys of earlier versions' config.json that change no training, whatever their value
FREE = set("""
    plot dry_run plan machine nvlink_gb_s network_gb_s devices_per_node explain html check_parity where against certify
    attention flight_recorder reduce_grads moe_load_per_layer engine_requests lora_alpha lora_on lora_base
""".split())
# Keys that change training, and the value without an effect
AT_REST = {"text_column": "text", "lora_rank": 0, "lora_nf4": False, "float8_experts": False, "ep": 1, "etp": 1,
           "optimizer_in_backward": False, "adamw_moments": "param", "stochastic_rounding": False, "routing_replay": False}


def is_gone(name: str, value) -> bool:
    """Whether a key of a saved config.json is a flag of an earlier version, and can be left out without another training."""
    return name in FREE or name in AT_REST and value == AT_REST[name]


def suggest_flag(name: str, flags) -> str:
    """The answer to an unknown flag, or "". flags: all flags of the program.

    torchtitan writes a section before the name, training.seq_len; nanoGPT and others write use_x and enable_x for x.
    """
    leaf = re.sub("^(use|enable)_", "", name.rpartition(".")[2])
    for flag in (leaf, *(flag for flag, names in ELSEWHERE.items() if leaf in names.split())):
        if flag in flags:
            return f"did you mean --{flag}?"
    for names, sentence in SENTENCES.items():
        if leaf in names.split() and all(flag in flags for flag in re.findall(r"--(\w+)", sentence)[:1]):
            return sentence
    return ""
