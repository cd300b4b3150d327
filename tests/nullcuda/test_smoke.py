"""Each recipe runs on the null device, with each flag and pair of flags that takes another way there: two steps, status 0. Runs
with --compile are in test_compile.py. A row has several flags at once where they do not touch each other. What test_waiting.py,
test_order.py or test_failures.py run as well is not here."""
import pytest
from rows import rows, run

ONE = """
  qwen3 1
  moe 1 --ac op --val_every 1 --val_batches 1
  tied 1 --ac full --global_batch_size 4 --memory_snapshot
  llama3 1 --ac selective --doc_mask --checkpoint_every 1 --checkpoint_async thread
  llama3 1 --ac op --doc_mask --on_nan skip --checkpoint_every 1 --checkpoint_async process
  llama3 1 --checkpoint_every 1
  mtp 1 --ac full --optimizer muon
- mtp 1 --global_batch_size 4
- mtp 1 --doc_mask --moe_balance none
  llama3 1 --deterministic --reduce_dtype bfloat16
  llama3 1 --compute_dtype float32 --profile 1-2
- moe 1 --compute_dtype float32
- deepseek 1 --compute_dtype float32
- llama3 1 --param_dtype bfloat16 --optimizer adamw_sr
- llama3 1 --param_dtype bfloat16
  moe 1 --cpu_offload --ac op
  moe 1 --optimizer muon --moe_balance aux
- moe 1 --moe_force_balance --moe_balance none
- llama3 1 --optimizer adamw_8bit
- llama3 1 --float8 rowwise_with_gw_hp
  lora 1 --ac full
- lora_moe 1
- moe 1 --float8 rowwise
- mtp 1 --float8 rowwise
  gpt_oss 1 --ac full --doc_mask
- llama4 1 --doc_mask --optimizer muon
"""
TWO = """
- mtp 2 --doc_mask
  llama3 2 --global_batch_size 8 --optimizer muon
- llama3 2 --global_batch_size 8 --reshard_after_forward always
- llama3 2 --reshard_after_forward never --reduce_dtype bfloat16 --param_dtype bfloat16
  llama3 2 --dp_replicate 2 --checkpoint_every 1 --checkpoint_async thread
- llama3 2 --cpu_offload --doc_mask
  llama3 2 --tp 2 --doc_mask --optimizer muon
- llama3 2 --tp 2 --no-loss_parallel --optimizer adamw_8bit --ac op
- llama3 2 --tp 2 --cpu_offload --val_every 1 --val_batches 1
- qwen3 2 --tp 2 --ac full --checkpoint_every 1 --checkpoint_async thread
- moe 2 --tp 2
- mtp 2 --tp 2 --etp 2
- llama3 2 --tp 2 --float8 tensorwise
- llama3 2 --float8 tensorwise
- llama3 2 --float8 rowwise
  lora 2
- lora_moe 2 --tp 2 --ep 2
- lora 2 --tp 2
- llama3 2 --cp 2 --doc_mask
- llama3 2 --cp 2 --cp_method alltoall --doc_mask
- qwen3 2 --cp 2
- moe 2 --cp 2 --ep 2
- mtp 2 --cp 2
- mtp 2 --cp 2 --cp_method alltoall
- llama3 2 --pp 2 --pp_schedule GPipe --ac full
- llama3 2 --pp 2 --pp_schedule Interleaved1F1B --doc_mask
- llama3 2 --pp 2 --pp_schedule LoopedBFS --ac op
- llama3 2 --pp 2 --float8 rowwise
- moe 2 --pp 2
- mtp 2 --pp 2
- mtp 2 --pp 2 --pp_schedule DualPipeV
- moe 2 --ep 2 --ac full --global_batch_size 8
- moe 2 --ep 2 --ac op --optimizer muon
- moe 2 --ep 2 --cpu_offload
- mtp 2 --ep 2 --moe_force_balance --checkpoint_every 1
- gpt_oss 2 --cp 2 --doc_mask
- gpt_oss 2 --ep 2 --tp 2
- llama4 2 --cp 2 --cp_method alltoall
- llama3 2 --checkpoint_every 1 --checkpoint_async process --profile 2
- llama3 2 --deterministic --memory_snapshot
"""
TRAINING_HALF = """
  grpo 1
- grpo 1 --flavor debug_moe
- grpo 1 --loss grpo --kl_coef 0.1 --ac full
- grpo 1 --loss gspo --minibatches 2 --compute_dtype bfloat16
- grpo 1 --cpu_offload
- grpo 1 --pack_tokens 256 --local_batch_size 64 --loss gspo
- grpo 1 --async_steps 1
- grpo 2 --checkpoint_every 1
- grpo 2 --tp 2
- grpo 2 --cp 2
- grpo 2 --flavor debug_moe --ep 2
- grpo 2 --dp_replicate 2
"""
BLACKWELL = """
  llama3 1
  llama3 1 --float8 mxfp8
- moe 1 --float8 mxfp8
- llama3 2 --float8 mxfp8
"""


@pytest.mark.parametrize("row", rows(ONE + TWO + TRAINING_HALF))
def test_it_runs_on_hopper(device, tmp_path, row):
    run(device, tmp_path, row, log=False, timeout=200)


@pytest.mark.parametrize("row", rows(BLACKWELL))
def test_it_runs_on_blackwell(device, tmp_path, row):
    run(device, tmp_path, row, major=10, log=False, timeout=500)
