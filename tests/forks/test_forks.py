"""The forks as programs: from the project's root, and from anywhere else, without any environment
variable."""

import pytest
from runs import REPO, column, launch, run, train_lines

SMALL = [
    "--steps",
    4,
    "--local_batch_size",
    2,
    "--seq_len",
    32,
    "--log_every",
    1,
    "--val_batches",
    1,
    "--compute_dtype",
    "float32",
    "--warmup_steps",
    1,
    "--lr",
    "2e-2",
]
SIZES = "n_layers=2,dim=32,n_heads=4,n_kv_heads=2,head_dim=8,vocab_size=4096"
EXPERTS = SIZES + ",n_experts=4,moe_ffn_dim=32"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fork, sizes, layout",
    [
        ("train_gpt_oss", EXPERTS + ",sliding_window=8", ["--ep", 2]),
        ("train_qwen3_next", EXPERTS, ["--ep", 2]),
        ("train_olmo3", SIZES + ",ffn_dim=64,sliding_window=8", ["--tp", 2]),
        (
            "train_llama4",
            EXPERTS + ",ffn_dim=64,chunk_size=8,moe_every=2,nope_every=2",
            ["--tp", 2],
        ),
    ],
)
def test_a_fork_trains_exports_continues_and_speaks(tmp_path, fork, sizes, layout):
    from transformers import AutoModelForCausalLM

    script = REPO / f"forks/{fork}.py"
    out = tmp_path / "run"
    common = [*SMALL, "--model_args", sizes, "--out", out]
    said = run(launch(2, script, *common, *layout, "--export_hf", tmp_path / "hf"), tmp_path)
    assert "sample (" in said
    losses = column(train_lines(out), "loss")
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    # a later flag wins
    run(launch(1, script, *common, "--steps", 5, "--global_batch_size", 4), tmp_path)
    assert len(train_lines(out)) == 5
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.hidden_size == 32
    assert run(
        launch(
            1,
            REPO / "generate.py",
            "--checkpoint",
            tmp_path / "hf",
            "--prompt",
            "def ",
            "--max_new_tokens",
            4,
            "--device",
            "cpu",
        ),
        tmp_path,
    ).startswith("def ")
