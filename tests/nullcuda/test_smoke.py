"""Each recipe runs on the null device, with each flag and pair of flags that takes another way
there: two steps, status 0. Runs with --compile are in test_compile.py. A row has several flags at
once where they do not touch each other. What test_waiting.py, test_order.py or test_failures.py run
as well is not here."""

import pytest
from rows import run, slow

# model, processes, flags
HOPPER = [
    "qwen3 1",
    "moe 1 --ac op --val_every 1 --val_batches 1",
    "tied 1 --ac full --global_batch_size 4 --memory_snapshot",
    "llama3 1 --ac selective --doc_mask --checkpoint_every 1 --checkpoint_async thread",
    "llama3 1 --ac op --doc_mask --on_nan skip --checkpoint_every 1 --checkpoint_async process",
    "llama3 1 --checkpoint_every 1",
    "mtp 1 --ac full --optimizer muon",
    slow("mtp 1 --global_batch_size 4"),
    slow("mtp 1 --doc_mask --moe_balance none"),
    "llama3 1 --deterministic --reduce_dtype bfloat16",
    "llama3 1 --compute_dtype float32 --profile 1-2",
    slow("moe 1 --compute_dtype float32"),
    slow("deepseek 1 --compute_dtype float32"),
    slow("llama3 1 --param_dtype bfloat16 --optimizer adamw_sr"),
    slow("llama3 1 --param_dtype bfloat16"),
    "moe 1 --cpu_offload --ac op",
    "moe 1 --optimizer muon --moe_balance aux",
    slow("moe 1 --moe_force_balance --moe_balance none"),
    slow("llama3 1 --float8 rowwise_with_gw_hp"),
    "lora 1 --ac full",
    slow("lora_moe 1"),
    slow("moe 1 --float8 rowwise"),
    slow("mtp 1 --float8 rowwise"),
    "gpt_oss 1 --ac full --doc_mask",
    slow("llama4 1 --doc_mask --optimizer muon"),
    slow("mtp 2 --doc_mask"),
    "llama3 2 --global_batch_size 8 --optimizer muon",
    slow("llama3 2 --global_batch_size 8 --reshard_after_forward always"),
    slow("llama3 2 --reshard_after_forward never --reduce_dtype bfloat16 --param_dtype bfloat16"),
    "llama3 2 --dp_replicate 2 --checkpoint_every 1 --checkpoint_async thread",
    slow("llama3 2 --cpu_offload --doc_mask"),
    "llama3 2 --tp 2 --doc_mask --optimizer muon",
    slow("llama3 2 --tp 2 --no-loss_parallel --ac op"),
    slow("llama3 2 --tp 2 --cpu_offload --val_every 1 --val_batches 1"),
    slow("qwen3 2 --tp 2 --ac full --checkpoint_every 1 --checkpoint_async thread"),
    slow("moe 2 --tp 2"),
    slow("mtp 2 --tp 2 --etp 2"),
    slow("llama3 2 --tp 2 --float8 tensorwise"),
    slow("llama3 2 --float8 tensorwise"),
    slow("llama3 2 --float8 rowwise"),
    "lora 2",
    slow("lora_moe 2 --tp 2 --ep 2"),
    slow("lora 2 --tp 2"),
    slow("llama3 2 --cp 2 --doc_mask"),
    slow("llama3 2 --cp 2 --cp_method alltoall --doc_mask"),
    slow("qwen3 2 --cp 2"),
    slow("moe 2 --cp 2 --ep 2"),
    slow("mtp 2 --cp 2"),
    slow("mtp 2 --cp 2 --cp_method alltoall"),
    slow("llama3 2 --pp 2 --pp_schedule GPipe --ac full"),
    slow("llama3 2 --pp 2 --pp_schedule Interleaved1F1B --doc_mask"),
    slow("llama3 2 --pp 2 --pp_schedule LoopedBFS --ac op"),
    slow("llama3 2 --pp 2 --float8 rowwise"),
    slow("moe 2 --pp 2"),
    slow("mtp 2 --pp 2"),
    slow("mtp 2 --pp 2 --pp_schedule DualPipeV"),
    slow("moe 2 --ep 2 --ac full --global_batch_size 8"),
    slow("moe 2 --ep 2 --ac op --optimizer muon"),
    slow("moe 2 --ep 2 --cpu_offload"),
    slow("mtp 2 --ep 2 --moe_force_balance --checkpoint_every 1"),
    slow("gpt_oss 2 --cp 2 --doc_mask"),
    slow("gpt_oss 2 --ep 2 --tp 2"),
    slow("llama4 2 --cp 2 --cp_method alltoall"),
    slow("llama3 2 --checkpoint_every 1 --checkpoint_async process --profile 2"),
    slow("llama3 2 --deterministic --memory_snapshot"),
    "grpo 1",
    slow("grpo 1 --flavor debug_moe"),
    slow("grpo 1 --loss grpo --kl_coef 0.1 --ac full"),
    slow("grpo 1 --loss gspo --minibatches 2 --compute_dtype bfloat16"),
    slow("grpo 1 --cpu_offload"),
    slow("grpo 1 --pack_tokens 256 --local_batch_size 64 --loss gspo"),
    slow("grpo 1 --async_steps 1"),
    slow("grpo 2 --checkpoint_every 1"),
    slow("grpo 2 --tp 2"),
    slow("grpo 2 --cp 2"),
    slow("grpo 2 --flavor debug_moe --ep 2"),
    slow("grpo 2 --dp_replicate 2"),
]
BLACKWELL = [
    "llama3 1",
    "llama3 1 --float8 rowwise",
    slow("moe 1"),
    slow("llama3 2 --float8 rowwise"),
]


@pytest.mark.parametrize("row", HOPPER)
def test_it_runs_on_hopper(device, tmp_path, row):
    run(device, tmp_path, row, log=False, timeout=200)


@pytest.mark.parametrize("row", BLACKWELL)
def test_it_runs_on_blackwell(device, tmp_path, row):
    run(device, tmp_path, row, major=10, log=False, timeout=500)


def test_texts_and_answers_of_a_model(device, tmp_path):
    (tmp_path / "task.jsonl").write_text('{"question": "What is it?", "answer": "a test"}\n')
    done = run(device, tmp_path, "generate 1", "--prompt", "def ", "--max_new_tokens", 4)
    # a kernel that takes masks, and needs no plan: for the prompt, and for a token that is
    # launched, captured, then replayed
    attention = [line for line in done.logs[0] if "fmha_cutlassF" in line]
    assert len(attention) == 3 * 9
    for line in done.logs[0]:
        assert "mark kernel cudnn" not in line
    (tmp_path / "evaluate").mkdir()
    run(
        device,
        tmp_path / "evaluate",
        "evaluate 1",
        "--task",
        tmp_path / "task.jsonl",
        "--max_new_tokens",
        4,
    )
    (tmp_path / "base/chat_template.jinja").write_text("{{ messages[0].content }}")
    chat = ("--prompt", "Who are you?", "--chat", "--max_new_tokens", 4)
    device.run(
        tmp_path, "generate.py", "--checkpoint", tmp_path / "base", *chat, brief=[], log=False
    )


def test_generators_sample_on_their_own_gpu(device, tmp_path):
    trainer, generator = run(device, tmp_path, "grpo 2 --gen_ranks 1").logs
    assert generator.count("mark generator on 1") == 2
    # segments that expand, as the trainer's
    assert any(line.startswith("map ") for line in generator)


def test_experts_on_an_older_gpu_say_what_is_slow(device, tmp_path):
    assert (
        "capability 8.0: torch multiplies them one after the other"
        in run(device, tmp_path, "moe 1", major=8).texts[0]
    )


def test_each_process_may_see_one_gpu_of_its_own(device, tmp_path):
    run(device, tmp_path, "llama3 2", devices=1, log=False)
