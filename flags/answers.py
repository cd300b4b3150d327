"""What a name of another project is answered with where no flag has its meaning: another unit, several
flags, or no counterpart, with the reason. answers_rl.py has those of reinforcement learning.

other_names.py reads this table. Only mistakes load it.
"""

from typing import NamedTuple


class Answer(NamedTuple):
    names: str  # elsewhere
    text: str
    needs: str = ""  # a flag that the program must have; "": the first flag in the text, if any


# the first row that fits the program counts
ANSWERS = [
    Answer(
        "model model_name",
        "did you mean --init_from? It takes the weights of a Hugging Face folder or of a run, and "
        "with them the size of the model",
        needs="init_from",
    ),
    Answer(
        "batch_size device_batch_size micro_batch_size per_device_train_batch_size "
        "train_batch_size ppo_micro_batch_size_per_gpu",
        "did you mean --local_batch_size? It is what one data rank runs at once; "
        "--global_batch_size is a whole step",
        needs="global_batch_size",
    ),
    Answer(
        "detect_anomaly autograd_detect_anomaly",
        "no counterpart: --on_nan says what follows a NaN gradient; "
        "torch.autograd.set_detect_anomaly(True) is a line at the top of the recipe",
        needs="on_nan",
    ),
    Answer(
        "validation.seq_len validation.local_batch_size validator.seq_len eval_batch_size "
        "per_device_eval_batch_size eval_accumulation_steps",
        "nothing to type: validation has the --seq_len and the --local_batch_size of training",
        needs="val_every",
    ),
    Answer(
        "embedding_lr unembedding_lr matrix_lr scalar_lr muon_lr adam_lr",
        "no counterpart: one --lr serves all parameters, and both optimizers of --optimizer muon",
        needs="optimizer",
    ),
    Answer(
        "do_train do_eval do_predict",
        "nothing to type: a recipe trains, and validates as --val_every says; evaluate.py scores "
        "a checkpoint",
        needs="val_every",
    ),
    Answer(
        "moe_grouped_gemm moe_use_grouped_mm use_grouped_mm grouped_mm",
        "nothing to type: experts are one grouped matmul in this program",
        needs="ep",
    ),
    Answer(
        "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend "
        "expert_parallel_comm_backend ep_comm_backend",
        "no counterpart: --ep sends tokens by one all-to-all of torch",
        needs="ep",
    ),
    Answer(
        "grad_accum grad_accum_steps gradient_accumulation_steps accumulation_steps "
        "total_batch_size n_grad_accum accumulate_grad_batches",
        "--global_batch_size is the size of a step, in sequences; what exceeds --local_batch_size "
        "is accumulated",
    ),
    Answer(
        "epochs num_epochs num_train_epochs total_epochs",
        "--steps counts optimizer steps; an epoch has tokens / (global_batch_size x seq_len)",
    ),
    Answer(
        "resume resume_from resume_from_checkpoint auto_resume resume_step resume_mode",
        "nothing to type: the same --out continues where it stopped",
    ),
    Answer(
        "overwrite_output_dir force restart",
        "use --out NEW to begin anew, or delete the old folder",
    ),
    Answer(
        "n_layer n_layers num_layers depth n_head n_heads n_embd d_model hidden_size dim "
        "vocab_size rope_theta",
        "fields of the model are in --model_args: --model_args n_layers=4,dim=512",
    ),
    Answer(
        "text_column dataset_text_field",
        '--data reads "text"; of another name: python data.py prepare --input FILE --text_column '
        "NAME ..., then --data FOLDER",
    ),
    Answer(
        "dropout attention_dropout hidden_dropout disable_dropout",
        "these models have no dropout; --model_args changes the fields that they have",
    ),
    Answer(
        "dtype",
        "did you mean --compute_dtype, of matmuls and activations, or --param_dtype, of weights?",
    ),
    Answer("no_cuda cpu", "did you mean --device cpu?"),
    Answer(
        "nproc_per_node nproc nnodes node_rank master_addr master_port rdzv_endpoint rdzv_backend "
        "standalone gpus num_gpus n_gpus_per_node num_processes num_gpus_per_node "
        "local_world_size num_nodes num_machines",
        "--device is cpu or cuda; torchrun takes the number of processes, before the script: "
        "torchrun --nproc_per_node 2 FILE",
    ),
    Answer("num_samples", "give --prompt several times, or another --seed"),
    Answer(
        "lora peft lora_rank lora_alpha lora_on lora_target_modules target_modules",
        "adapters (LoRA) are trained by finetune.py",
    ),
    Answer("stochastic_rounding", "--optimizer adamw_sr rounds by chance"),
    Answer(
        "float8_experts", "--float8 changes linears; the stacked experts stay in the compute dtype"
    ),
    Answer(
        "flight_recorder trace_buf_size save_traces_folder",
        "nothing to type: with NCCL the last collectives are always kept, and written to the "
        "trace folder of the run when one times out",
    ),
    Answer(
        "attention use_flash_attn attn_implementation attention_backend flash_attn "
        "use_flash_attention attn attn_backend",
        "nothing to type: cuDNN's kernel is tried first on H100, H200 and B200, flash on others",
    ),
    Answer(
        "moe_load_per_layer",
        "metrics.jsonl has moe_load_max_over_mean; loads of each layer: the table in "
        "balance_experts",
    ),
    Answer(
        "reduce_grads fsdp_defer_gradient_reduction",
        "nothing to type: gradients are reduced after each micro-batch where whole ones take too "
        "much memory",
    ),
    Answer(
        "create_seed_checkpoint",
        "nothing to type: --seed gives the same initial weights in every layout",
    ),
    Answer(
        "ep etp expert_parallel_degree expert_tensor_parallel_degree debug_moe_force_load_balance "
        "expert_model_parallel_size expert_tensor_parallel_size moe_force_load_balance "
        "moe_aux_loss_coeff moe_grouped_gemm moe_token_dispatcher_type",
        "experts are in train_qwen3.py, train_deepseek.py and finetune.py; this model has none",
    ),
    Answer(
        "name description",
        "--out names a run, --flavor a size, --optimizer an optimizer; another model is another "
        "recipe, such as train_qwen3.py",
    ),
    Answer(
        "model.name",
        "--flavor is a size of this model; another model is another recipe, such as train_qwen3.py",
    ),
    Answer(
        "print_config print_args",
        "nothing to type: a start prints the flags that differ from their defaults, and "
        "config.json has all",
    ),
    Answer(
        "custom_config_module custom_import",
        "nothing is registered: copy the recipe, and add a field to its Config, see "
        "docs/fork_me.md",
    ),
    Answer(
        "initial_load_in_hf initial_load_in_hf_quantized",
        "nothing to type: --init_from tells a Hugging Face folder by its files, and fp8 by its "
        "scales",
    ),
    Answer(
        "converters",
        "--float8 is a flag of its own; any other change of the model is a line in section 4 of "
        "the recipe",
    ),
    Answer("implementation", "nothing to type: --optimizer adamw takes torch's fused kernel"),
    Answer(
        "early_step_in_backward optimizer_in_backward",
        "there is no step in the backward; --ac, --cpu_offload and --param_dtype bfloat16 save "
        "memory",
    ),
    Answer(
        "gc_debug",
        "--memory_snapshot shows what holds memory on a GPU; --gc_every collects on all ranks at "
        "once",
    ),
    Answer(
        "compiled_autograd", "torch has given compiled autograd up; --compile compiles every block"
    ),
    Answer(
        "checkpoint.enable",
        "nothing to type: checkpoints are saved; --checkpoint_every 0 saves none",
    ),
    Answer(
        "enable",
        "enable what? --compile, --profile or --dry_run; checkpoints are saved without a flag",
    ),
    Answer(
        "ft_dataloader_checkpoints fault_tolerance.enable",
        "replica groups are trained by forks/train_llama3_ft.py, whose checkpoints know every "
        "group's data",
    ),
    Answer(
        "sequence_parallel enable_sequence_parallel",
        "nothing to type: --tp always splits the sequence between its matmuls, too",
    ),
    Answer(
        "context_parallel_rotate_method",
        "did you mean --cp_method? Its alltoall is another algorithm than torchtitan's: here "
        "heads are traded for sequence (Ulysses), there keys go round a ring",
    ),
    Answer(
        "ulysses_sequence_parallel_size ulysses_degree sequence_parallel_size",
        "--cp N --cp_method alltoall is Ulysses",
    ),
    Answer(
        "context_parallel_load_balancer context_parallel_ptrr_mask_key",
        "nothing to type: --cp gives every rank an early and a late part of the sequence, so all "
        "have the same causal work",
    ),
    Answer(
        "num_pp_microbatches num_microbatches",
        "did you mean --pp_microbatch_size? Their number is --local_batch_size / "
        "--pp_microbatch_size",
    ),
    Answer(
        "num_virtual_stages_per_pipeline_rank virtual_pipeline_model_parallel_size",
        "--pp_schedule Interleaved1F1B puts several stages on a rank; --pp_layers_per_stage sets "
        "their size",
    ),
    Answer(
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
        "--pp_first_stage_less_layers and --pp_last_stage_less_layers count how many fewer; "
        "--pp_stage_fqns names every module",
    ),
    Answer(
        "pipeline_parallel_max_outstanding_sends pp_num_unshard_lookahead_factor",
        "no counterpart: torch's schedules decide when --pp sends and gathers",
    ),
    Answer(
        "pp_max_unsharded_active_stages",
        "--reshard_after_forward always frees gathered weights after each use; the default keeps "
        "them with pp",
    ),
    Answer(
        "use_distributed_optimizer data_parallel_sharding_strategy sharding_strategy "
        "zero_optimization",
        "--dp_shard splits parameters, gradients and optimizer state; --reshard_after_forward "
        "never keeps gathered weights for the backward",
    ),
    Answer(
        "fsdp_config fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap "
        "auto_wrap_policy",
        "nothing to type: with --dp_shard every block is gathered as a unit",
    ),
    Answer(
        "overlap_grad_reduce overlap_param_gather ddp_bucket_size ddp_bucket_cap_mb",
        "nothing to type: --dp_shard gathers the next block and reduces the last one while a "
        "block computes",
    ),
    Answer(
        "ddp_find_unused_parameters find_unused_parameters",
        "no counterpart: every parameter of these models has a gradient in every step",
    ),
    Answer(
        "enable_fsdp_symm_mem fsdp_symm_mem fsdp_symm_mem_scope use_nccl_ub nccl_ub",
        "no counterpart: collectives take NCCL's usual buffers, not symmetric memory",
    ),
    Answer(
        "full_dtensor spmd_backend",
        "no counterpart: --tp makes DTensors of the parameters, --dp_shard shards them; there is "
        "one way",
    ),
    Answer(
        "comm.mode fake_backend",
        "did you mean --dry_run? It computes a layout's needs under a fake process group",
    ),
    Answer(
        "distributed_timeout_minutes ddp_timeout nccl_timeout dist_timeout",
        "there are two: --init_timeout_s before and in the first step, --train_timeout_s after it",
    ),
    Answer(
        "distributed_backend ddp_backend dist_backend backend.name",
        "nothing to type: NCCL on GPUs, gloo on CPUs",
    ),
    Answer(
        "recompute_num_layers",
        "--ac selective --ac_every 2 checkpoints every second block, --ac full every block",
    ),
    Answer(
        "per_op_sac_force_recompute_mm_shapes_by_fqns early_stop preserve_rng_state "
        "determinism_check",
        "no counterpart: --ac op has one list of operations that are kept, in parallel.py",
    ),
    Answer(
        "activation_offloading cpu_offloading ac_offloading offload_activations "
        "enable_activation_offload",
        "no counterpart: activations stay on the GPU; --ac recomputes them, --cpu_offload moves "
        "parameters and optimizer state",
    ),
    Answer(
        "fp16 half fp16_full_eval loss_scale initial_loss_scale",
        "no float16: --compute_dtype is bfloat16 or float32, and needs no loss scale",
    ),
    Answer(
        "tf32", "no counterpart: matmuls of --compute_dtype float32 are torch's default, full fp32"
    ),
    Answer(
        "exp_avg_dtype exp_avg_sq_dtype use_precision_aware_optimizer main_params_dtype "
        "state_dtype",
        "--optimizer adamw_bf16_moments keeps moments in bfloat16; else they have the dtype of the "
        "weights, --param_dtype",
    ),
    Answer(
        "cross_entropy_loss_fusion use_liger_kernel use_liger use_fused_kernels "
        "masked_softmax_fusion bias_swiglu_fusion bias_gelu_fusion gradient_accumulation_fusion "
        "fused_lm_head_chunk_size",
        "no counterpart: kernels are torch's; --compile fuses a block",
    ),
    Answer(
        "transformer_impl use_te use_mcore_models impl",
        "no counterpart: the models are plain torch, in models/",
    ),
    Answer(
        "torch_compile_backend torch_compile_mode compile_mode",
        "no such choice: --compile takes torch's inductor",
    ),
    Answer(
        "disable_cuda_graphs enable_cuda_graph cuda_graph_impl external_cuda_graph",
        "no counterpart: a training step is not captured in a CUDA graph",
    ),
    Answer(
        "batch_invariant",
        "only sampling needs it: it is a flag of grpo.py; --deterministic makes kernels repeat "
        "their bits",
    ),
    Answer(
        "warmup_ratio lr_warmup_fraction lr_warmup_steps_ratio warmup_proportion",
        "--warmup_steps counts steps: the share x the steps of the run",
    ),
    Answer("lr_warmup_samples", "--warmup_steps counts steps: samples / --global_batch_size"),
    Answer(
        "decay_steps lr_wsd_decay_iters lr_wsd_decay_steps cooldown_steps",
        "did you mean --decay_ratio? It is a share of the steps, at the end",
    ),
    Answer("train_samples", "--steps x --global_batch_size is the number of sequences"),
    Answer(
        "num_tokens_per_train_step global_batch_size_tokens tokens_per_step",
        "did you mean --global_batch_size? It counts sequences: tokens / --seq_len",
    ),
    Answer(
        "num_tokens_per_microbatch_per_dp_rank tokens_per_microbatch",
        "did you mean --local_batch_size? It counts sequences: tokens / --seq_len",
    ),
    Answer(
        "target_param_data_ratio target_flops",
        "no counterpart: --steps is the length; --dry_run prints the FLOPs of a step",
    ),
    Answer(
        "lr_multipliers layerwise_lr_decay llrd decoupled_lr",
        "no counterpart: one --lr serves all parameters; groups are made in build_optimizers of "
        "the recipe",
    ),
    Answer(
        "save_only_model",
        "did you mean --last_save_model_only? It is of the last checkpoint; the others can be "
        "continued",
    ),
    Answer(
        "load_best_model_at_end metric_for_best_model greater_is_better save_best "
        "early_stopping_patience",
        "no counterpart: metrics.jsonl has the loss of every validation, and --keep_latest_k 0 "
        "keeps all checkpoints",
    ),
    Answer(
        "keep_interval",
        "no counterpart: --keep_latest_k keeps the newest; --after_save can copy a step away",
    ),
    Answer("save_safetensors save_format", "nothing to type: --export_hf writes safetensors"),
    Answer(
        "ckpt_format dist_ckpt_format",
        "no such choice: a checkpoint is torch's DCP; --export_hf writes Hugging Face's format",
    ),
    Answer(
        "load",
        "the same --out continues its run; --init_from starts another run from a checkpoint or a "
        "Hugging Face folder",
    ),
    Answer(
        "exit_interval",
        "--steps is where this run ends, --schedule_steps the length of its schedule",
    ),
    Answer(
        "exit_duration_in_mins exit_signal_handler max_time",
        "no counterpart: --out goes on after a signal; send SIGUSR1 before the time is up, see "
        "docs/cluster.md",
    ),
    Answer(
        "num_workers dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
        "prefetch_factor dataloader_persistent_workers",
        "nothing to type: the next batch of --data is made in a thread while a step runs",
    ),
    Answer(
        "dataloader_drop_last drop_last",
        "nothing to type: sequences of --data follow each other without an end",
    ),
    Answer(
        "packing sample_packing group_by_length padding_free pad_to_max_length eval_packing",
        "nothing to type: texts of --data follow each other in full sequences; --doc_mask keeps "
        "them from seeing each other",
    ),
    Answer(
        "packing_strategy dataset_num_proc preprocessing_num_workers overwrite_cache "
        "dataset_kwargs",
        "no counterpart: --data is tokenized once and kept in --cache_dir",
    ),
    Answer(
        "streaming use_streaming",
        "no counterpart: --data is on the disk, so that a step is the same on any layout; python "
        "data.py prepare makes token shards",
    ),
    Answer(
        "dataset_config_name dataset_config subset dataset_split_name",
        "no counterpart: --data is a file or a folder; hf download NAME --repo-type dataset "
        "--local-dir FOLDER brings a set of the Hub",
    ),
    Answer(
        "split validation_split_percentage test_size train_test_split val_split",
        "nothing to type: a part of --data is kept for validation; --val_data names another text",
    ),
    Answer(
        "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt mask_prompt "
        "response_template",
        "nothing to type: in conversations of --data only the assistant's words have a loss",
    ),
    Answer(
        "remove_unused_columns label_names input_features length_column_name",
        "nothing to type: a line of --data is read by its keys, text or messages",
    ),
    Answer(
        "shuffle shuffle_dataset dataloader_shuffle",
        "nothing to type: --data_seed chooses the order",
    ),
    Answer(
        "vocab_file merge_file tokenizer_type tokenizer_class",
        "--tokenizer takes a tokenizer.json, or a Hugging Face folder with one",
    ),
    Answer(
        "label_smoothing label_smoothing_factor z_loss z_loss_coef neftune_noise_alpha",
        "no counterpart: the loss is the mean over tokens; another one is a line in a copy of the "
        "recipe and its model",
    ),
    Answer(
        "disable_tqdm progress_bar enable_progress_bar disable_color_printing color",
        "no counterpart: --log_every is the distance of the lines",
    ),
    Answer(
        "logging_first_step", "nothing to type: the first step is logged, then every --log_every-th"
    ),
    Answer("logging_strategy", "--log_every counts steps"),
    Answer(
        "log_level verbosity verbose logging_level",
        "no counterpart: a run prints a line per --log_every steps, and what went wrong",
    ),
    Answer(
        "save_for_all_ranks log_on_each_node",
        "no counterpart: rank 0 writes --out; losses and times are of all ranks",
    ),
    Answer(
        "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo",
        "no counterpart: --export_hf FOLDER at the end, then: hf upload NAME FOLDER",
    ),
    Answer(
        "run run_name wandb_run_name wandb_exp_name experiment_name exp_name trial_name job_name "
        "model_tag wandb.name",
        "did you mean --out? The folder names the run, also for --wandb PROJECT",
    ),
    Answer(
        "logger loggers",
        "--wandb PROJECT and --tensorboard send the numbers of metrics.jsonl elsewhere",
    ),
    Answer(
        "trust_remote_code",
        "no counterpart: code of a model's folder is never run; --init_from reads its config and "
        "its weights",
    ),
    Answer(
        "low_cpu_mem_usage device_map use_meta_device_init",
        "nothing to type: models are made without memory, and --init_from fills each rank's part",
    ),
    Answer(
        "load_in_4bit load_in_8bit quantization_config use_4bit bnb_4bit_quant_type",
        "no counterpart: frozen weights are not quantized; --ac and --cpu_offload save memory",
    ),
    Answer(
        "lora_dropout lora.dropout use_dora use_rslora modules_to_save lora_bias",
        "no counterpart: adapters are two matrices of --lora_rank, scaled by --lora_alpha / "
        "--lora_rank",
    ),
    Answer(
        "module job.module",
        "no counterpart: the recipe is the file that you start, train_llama3.py; --flavor is its "
        "size",
    ),
    Answer(
        "save_parallelism_file print_rank_layout",
        "--explain prints the layout of every rank; the start says its axes",
    ),
    Answer(
        "local_rank rank world_size",
        "nothing to type: torchrun tells every process its rank; --device is cpu or cuda",
    ),
    Answer(
        "init_method_std init_std initializer_range",
        "no counterpart: initial weights are in the model's file; --seed draws others",
    ),
    Answer(
        "swiglu normalization disable_bias_linear position_embedding_type "
        "untie_embeddings_and_output_weights use_rotary_position_embeddings add_qkv_bias "
        "qk_layernorm group_query_attention no_rope_fusion",
        "no such choice: the architecture is the file in models/; --model_args changes its sizes",
    ),
    Answer(
        "num_attention_heads num_query_groups num_key_value_heads num_hidden_layers "
        "ffn_hidden_size intermediate_size kv_channels rotary_base norm_epsilon mtp_num_layers "
        "num_experts moe_router_topk moe_ffn_hidden_size",
        "fields of the model are in --model_args: --model_args n_layers=4,dim=512",
    ),
    Answer(
        "output_router_logits",
        "metrics.jsonl has the loads of the experts; --moe_balance says how they are kept equal",
    ),
    Answer(
        "sample_every core_metric_every eval_accuracy compute_metrics",
        "no counterpart: a run ends with a sample; evaluate.py scores a checkpoint, --after_save "
        "can call it",
    ),
    Answer(
        "auto_find_batch_size",
        "no counterpart: --dry_run prints the memory of a --local_batch_size",
    ),
    Answer(
        "torch_empty_cache_steps skip_memory_metrics",
        "nothing to type: metrics.jsonl has the memory of every line; --gc_every collects garbage",
    ),
    Answer(
        "batch_size device_batch_size micro_batch_size ppo_micro_batch_size_per_gpu "
        "per_device_eval_batch_size",
        "did you mean --local_batch_size?",
    ),
]
