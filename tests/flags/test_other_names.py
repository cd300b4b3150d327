"""Names that users of torchtitan, Megatron-LM, Hugging Face, TRL, verl, prime-rl and nanochat type, and
the right answer to each: the flag of the same meaning, or a sentence, and never a flag that only looks
alike.
"""

import dataclasses
import importlib

import pytest

from flags.config import make_parser
from flags.other_names import refuse_word
from tools.reports.options import ReportConfig

# "typed = right answer": a flag, which must be the first that the answer names, or words of it.
# "no:" and words: nothing has this meaning, so the answer asks for no other flag.
TORCHTITAN = """
validator.steps = --val_batches
validator.freq = --val_every
validator.enable = --val_every
parallelism.num_pp_microbatches = --pp_microbatch_size
comm.mode = --dry_run
training.max_context_length = --seq_len
training.num_tokens_per_train_step = --global_batch_size
training.num_tokens_per_microbatch_per_dp_rank = --local_batch_size
training.disable_cuda_graphs = no: not captured
training.enable_cpu_offload = --cpu_offload
training.gc_freq = --gc_every
training.dtype = --compute_dtype
training.mixed_precision_reduce = --reduce_dtype
training.steps = --steps
parallelism.enable_fsdp_symm_mem = no: symmetric memory
parallelism.fsdp_symm_mem_scope = no: symmetric memory
parallelism.data_parallel_shard_degree = --dp_shard
parallelism.data_parallel_replicate_degree = --dp_replicate
parallelism.tensor_parallel_degree = --tp
parallelism.pipeline_parallel_degree = --pp
parallelism.context_parallel_degree = --cp
parallelism.expert_parallel_degree = experts are in train_qwen3.py
parallelism.context_parallel_rotate_method = another algorithm than torchtitan's
parallelism.context_parallel_load_balancer = nothing to type
parallelism.enable_sequence_parallel = nothing to type
parallelism.enable_async_tensor_parallel = --async_tp
parallelism.disable_loss_parallel = --no-loss_parallel
parallelism.fsdp_reshard_after_forward = --reshard_after_forward
parallelism.fsdp_defer_gradient_reduction = nothing to type
parallelism.pipeline_parallel_module_fqns_per_model_part = --pp_stage_fqns
parallelism.module_fqns_per_model_part = --pp_stage_fqns
parallelism.pipeline_parallel_schedule = --pp_schedule
parallelism.pipeline_parallel_max_outstanding_sends = no: torch's schedules
parallelism.pp_max_unsharded_active_stages = --reshard_after_forward
parallelism.full_dtensor = no: there is one way
parallelism.save_parallelism_file = --explain
debug.detect_anomaly = no: torch.autograd.set_detect_anomaly
debug.batch_invariant = grpo.py
debug.deterministic = --deterministic
debug.print_config = nothing to type
debug.moe_force_load_balance = experts are in train_qwen3.py
activation_checkpoint.mode = --ac
activation_checkpoint.memory_budget = --ac_budget
activation_checkpoint.early_stop = no: one list of operations
checkpoint.interval = --checkpoint_every
checkpoint.initial_load_path = --init_from
checkpoint.last_save_in_hf = --export_hf
checkpoint.async_mode = --checkpoint_async
checkpoint.create_seed_checkpoint = nothing to type
compile.enable = --compile
lr_scheduler.warmup_steps = --warmup_steps
lr_scheduler.min_lr_factor = --min_lr_ratio
lr_scheduler.total_steps = --schedule_steps
metrics.enable_wandb = --wandb
metrics.log_freq = --log_every
metrics.save_for_all_ranks = no: rank 0 writes
profiling.enable_memory_snapshot = --memory_snapshot
module = no: the recipe is the file
comm.init_timeout_seconds = --init_timeout_s
optimizer.name = --optimizer
optimizer.implementation = nothing to type
"""
MEGATRON = """
tensor-model-parallel-size = --tp
pipeline-model-parallel-size = --pp
context-parallel-size = --cp
expert-model-parallel-size = experts are in train_qwen3.py
num-layers-per-virtual-pipeline-stage = --pp_layers_per_stage
sequence-parallel = nothing to type
micro-batch-size = --local_batch_size
train-iters = --steps
train-samples = --steps
seq-length = --seq_len
max-position-embeddings = --seq_len
num-layers = fields of the model
hidden-size = fields of the model
num-attention-heads = fields of the model
ffn-hidden-size = fields of the model
num-query-groups = fields of the model
swiglu = no: the architecture
untie-embeddings-and-output-weights = no: the architecture
lr-decay-style = --decay_type
lr-warmup-iters = --warmup_steps
lr-warmup-fraction = --warmup_steps
lr-decay-iters = --schedule_steps
lr-wsd-decay-iters = --decay_ratio
min-lr = --min_lr_ratio
clip-grad = --max_norm
adam-beta1 = --beta1
adam-beta2 = --beta2
adam-eps = --eps
init-method-std = no: initial weights
save = --out
load = the same --out continues
save-interval = --checkpoint_every
eval-interval = --val_every
eval-iters = --val_batches
log-interval = --log_every
exit-interval = --steps
exit-duration-in-mins = no: SIGUSR1
recompute-granularity = --ac
recompute-num-layers = --ac
recompute-activations = --ac
use-distributed-optimizer = --dp_shard
use-torch-fsdp2 = --dp_shard
overlap-grad-reduce = nothing to type
tp-comm-overlap = --async_tp
bf16 = --compute_dtype
fp16 = no float16
fp8-format = --float8
transformer-impl = no: plain torch
attention-backend = nothing to type
use-flash-attn = nothing to type
cross-entropy-loss-fusion = no: kernels are torch's
accumulate-allreduce-grads-in-fp32 = --reduce_dtype
optimizer-cpu-offload = --cpu_offload
data-path = --data
split = nothing to type
tokenizer-model = --tokenizer
tokenizer-type = --tokenizer
vocab-file = --tokenizer
finetune = --init_model_only
no-load-optim = --init_model_only
async-save = --checkpoint_async
ckpt-format = no such choice
distributed-timeout-minutes = --init_timeout_s
distributed-backend = nothing to type
tensorboard-dir = --tensorboard
wandb-exp-name = --out
manual-gc-interval = --gc_every
profile-step-start = --profile
check-for-nan-in-loss-and-grad = --on_nan
num-workers = nothing to type
attention-dropout = no dropout
deterministic-mode = --deterministic
"""
TRAINER = """
output_dir = --out
overwrite_output_dir = use --out NEW
num_train_epochs = --steps
max_steps = --steps
per_device_train_batch_size = --local_batch_size
per_device_eval_batch_size = nothing to type
gradient_accumulation_steps = --global_batch_size
learning_rate = --lr
lr_scheduler_type = --decay_type
warmup_ratio = --warmup_steps
adam_beta1 = --beta1
adam_epsilon = --eps
max_grad_norm = --max_norm
logging_steps = --log_every
logging_dir = --tensorboard
logging_first_step = nothing to type
logging_strategy = --log_every
log_level = no: a run prints
save_steps = --checkpoint_every
save_strategy = --checkpoint_every
save_total_limit = --keep_latest_k
save_only_model = --last_save_model_only
save_safetensors = nothing to type
eval_strategy = --val_every
evaluation_strategy = --val_every
eval_steps = --val_every
do_train = nothing to type
load_best_model_at_end = no: metrics.jsonl
metric_for_best_model = no: metrics.jsonl
report_to = --wandb
run_name = --out
push_to_hub = no: hf upload
hub_model_id = no: hf upload
gradient_checkpointing = --ac
torch_compile = --compile
optim = --optimizer
fsdp = --dp_shard
fsdp_config = nothing to type
deepspeed = --dp_shard
ddp_timeout = --init_timeout_s
ddp_find_unused_parameters = no: every parameter
dataloader_num_workers = nothing to type
dataloader_drop_last = nothing to type
remove_unused_columns = nothing to type
group_by_length = nothing to type
label_smoothing_factor = no: the mean over tokens
resume_from_checkpoint = nothing to type
full_determinism = --deterministic
tf32 = no: full fp32
local_rank = nothing to type
disable_tqdm = no: the distance of the lines
use_cpu = --device
auto_find_batch_size = no: prints the memory
streaming = no: on the disk
trust_remote_code = no: never run
run = --out
depth = fields of the model
device_batch_size = --local_batch_size
total_batch_size = --global_batch_size
embedding_lr = no: one --lr
"""
# TRL's SFTConfig, peft and LLaMA-Factory
SFT = """
packing = nothing to type
padding_free = nothing to type
max_length = --seq_len
cutoff_len = --seq_len
assistant_only_loss = nothing to type
completion_only_loss = nothing to type
train_on_inputs = nothing to type
dataset_text_field = "text"
dataset_num_proc = no: tokenized once
model_name_or_path = --init_from
model = --init_from
lora_r = --lora_rank
lora.rank = --lora_rank
lora_dropout = no: two matrices
lora_target_modules = --lora_on
adapter_name_or_path = --lora_from
modules_to_save = no: two matrices
load_in_4bit = no: not quantized
activation_offloading = no: stay on the GPU
use_liger_kernel = no: kernels are torch's
neftune_noise_alpha = no: the mean over tokens
lr_warmup_steps_ratio = --warmup_steps
"""
GRPO = """
float8 = no: grpo.py trains without float8
optimizer = no such choice: GRPO updates with AdamW only
num_generations = --group_size
actor_rollout_ref.rollout.n = --group_size
orchestrator.rollouts_per_example = --group_size
max_completion_length = --max_new_tokens
data.max_response_length = --max_new_tokens
data.max_prompt_length = --seq_len
data.train_batch_size = --prompts_per_step
data.train_files = --env_data
data.val_files = --eval_data
actor_rollout_ref.actor.ppo_mini_batch_size = --minibatches
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = --local_batch_size
actor_rollout_ref.actor.ppo_epochs = every sample is trained on once
num_iterations = every sample is trained on once
actor_rollout_ref.actor.kl_loss_coef = --kl_coef
actor_rollout_ref.actor.kl_loss_type = no such choice
actor_rollout_ref.actor.entropy_coeff = no: entropy bonus
actor_rollout_ref.actor.clip_ratio_high = --clip_high
actor_rollout_ref.actor.clip_ratio_c = no: a second bound
actor_rollout_ref.actor.loss_agg_mode = --loss
actor_rollout_ref.actor.use_dynamic_bsz = --pack_tokens
actor_rollout_ref.actor.optim.lr = --lr
actor_rollout_ref.rollout.tensor_model_parallel_size = no: --tp splits training and sampling
actor_rollout_ref.rollout.gpu_memory_utilization = no: option of the server
actor_rollout_ref.rollout.name = --engine
actor_rollout_ref.model.path = --init_from
algorithm.adv_estimator = relative to the group
algorithm.norm_adv_by_std_in_grpo = --std_norm
algorithm.gamma = no: there is no critic
algorithm.use_kl_in_reward = no: in the loss
critic.optim.lr = no: there is no critic
reward_model.enable = no: rewards are functions
custom_reward_function.path = --reward
trainer.test_freq = --eval_every
trainer.save_freq = --checkpoint_every
trainer.total_epochs = --steps
trainer.n_gpus_per_node = torchrun
trainer.project_name = --wandb
trainer.experiment_name = --out
trainer.val_before_train = nothing to type
beta = --kl_coef
epsilon = --clip_low
epsilon_high = --clip_high
delta = no: a second bound
scale_rewards = --std_norm
loss_type = --loss
importance_sampling_level = --loss
vllm_importance_sampling_cap = --tis
mask_truncated_completions = --mask_truncated
use_vllm = --engine
vllm_server_base_url = --engine
vllm_gpu_memory_utilization = no: option of the server
reward_weights = no: weighted sum
reward_funcs = --reward
sync_ref_model = no: the initial policy
log_completions = --log_samples
top_p = no: whole distribution
per_device_train_batch_size = --local_batch_size
generation_batch_size = --prompts_per_step
lr_scheduler_type = no such choice
max_async_level = --async_steps
filter_groups.enable = --dynamic_sampling
eval_strategy = --eval_every
env.id = --env
"""
QWEN3 = """
expert-model-parallel-size = --ep
expert-tensor-parallel-size = --etp
moe-aux-loss-coeff = --moe_aux_coef
moe-router-load-balancing-type = --moe_balance
moe-grouped-gemm = nothing to type
moe-token-dispatcher-type = no: all-to-all
num-experts = fields of the model
"""
DPO = """
optim = no such choice: DPO updates with AdamW only
gradient_accumulation_steps = --pairs_per_step
"""
GENERATE = """
max_tokens = --max_new_tokens
model = --checkpoint
start = --prompt
output_dir = no: this one has no such flag
resume_from_checkpoint = no: without a counterpart
"""
EVALUATE = """
tasks = --task
num_fewshot = --shots
batch_size = --local_batch_size
apply_chat_template = --chat
output_path = --out
"""
TABLES = [
    ("train_llama3", TORCHTITAN),
    ("train_llama3", MEGATRON),
    ("train_llama3", TRAINER),
    ("finetune", SFT),
    ("grpo", GRPO),
    ("train_qwen3", QWEN3),
    ("forks.train_dpo", DPO),
    ("generate", GENERATE),
    ("evaluate", EVALUATE),
]


def rows(table: str) -> list[tuple[str, str]]:
    found = []
    for line in table.strip().splitlines():
        typed, _, right = line.partition(" = ")
        found.append((typed, right))
    return found


def test_the_tables_have_200_names():
    assert sum(len(rows(table)) for _, table in TABLES) >= 200


def flags_of(program: str) -> tuple[dict, dict]:
    """({flag: type}, {flag: help text}) of a program, with the reports that tools/run.py adds."""
    config = importlib.import_module(program).Config
    if program not in ("generate", "evaluate"):
        config = dataclasses.make_dataclass("Config", [], bases=(config, ReportConfig))
    kinds = {field.name: field.type for field in dataclasses.fields(config)}
    _, helps = make_parser(config, kinds)
    return kinds, helps


@pytest.mark.parametrize("program, table", TABLES)
def test_right_answers(program, table):
    kinds, helps = flags_of(program)
    wrong = []
    for typed, right in rows(table):
        line = refuse_word(f"--{typed}", kinds, helps)
        answer = line.partition("; ")[2].removesuffix("--help lists all flags")
        if right.startswith("--"):
            first = answer[answer.find("--") :].split()[0].strip("?;:,.")
            good = "--" in answer and first == right
        else:
            good = right.removeprefix("no: ") in answer and (
                "did you mean" not in answer or not right.startswith("no:")
            )
        if not good:
            wrong.append(f"{typed}: {answer or 'no answer'}, not {right}")
    assert not wrong, "\n".join(wrong)


def test_hydra_style_and_words():
    kinds, helps = flags_of("grpo")
    assert "did you mean --prompts_per_step?" in refuse_word(
        "data.train_batch_size=1024", kinds, helps
    )
    kinds, helps = flags_of("generate")
    assert "did you mean --prompt 'def '?" in refuse_word("def ", kinds, helps)
    assert "did you mean --checkpoint runs/x?" in refuse_word("runs/x", kinds, helps)


def test_slips_of_the_pen_still_get_the_nearest_flag():
    kinds, helps = flags_of("train_llama3")
    assert "did you mean --steps?" in refuse_word("--stpes", kinds, helps)
