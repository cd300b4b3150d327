"""Names that flags have in nanoGPT, nanochat, torchtitan, TRL, Hugging Face's Trainer and torchrun; what to type instead."""
import re

# {names: answer}. An answer is given only where the Config has the flag that it names first, so two rows may share a name.
# A name like device=mps is a value of one of our own flags.
ELSEWHERE = {
    "dtype torch_dtype precision mixed_precision amp_dtype": "did you mean --compute_dtype?",
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
    "device=mps device=metal": "--device knows cpu and cuda: torch.distributed has no mps; use cpu",
    "device=gpu device=cuda:0 device=0": "--device cuda, and torchrun gives each process a GPU of its own",
}


def hint(name: str, flags) -> str:
    """The answer to somebody who types this name, "" if there is none. flags: those of the Config."""
    answers = [text for names, text in ELSEWHERE.items() if name in names.split()]
    return next((text for text in answers if re.search(r"--(\w+)", text)[1] in flags), "")
