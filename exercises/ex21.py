"""The check of exercise 21: all functions at once, on layouts of four ranks against plain torch,
and a run that speaks."""

import contextlib
import io
import tempfile
from pathlib import Path
from unittest import mock

from course import HOUSE
from feedback import Wrong, compare, on_ranks

EXPERTS = dict(model="qwen3", n_experts=8, top_k=2, moe_ffn_dim=32)
LAYOUTS = [  # processes, flags, batch and model, the exercises whose functions meet here
    (4, dict(pp=2, tp=2), dict(n=4, b=4, tie_embeddings=True), "1, 2, 5, 6, 11 and 13"),
    (4, dict(cp=2), dict(n=8, b=2, doc=True), "7 and 8"),
    (4, dict(cp=2, tp=2, cp_method="alltoall"), dict(n=4, b=2), "7 and 9"),
    (4, dict(ep=2, tp=2), dict(n=4, b=1, **EXPERTS), "12"),
]
STEPS, FLAGS = (
    20,
    dict(
        tp=2,
        pp=2,
        pp_microbatch_size=2,
        seq_len=64,
        local_batch_size=4,
        steps=20,
        warmup_steps=2,
        lr=2e-2,
        log_every=5,
        val_every=0,
        checkpoint_every=20,
        device="cpu",
        compute_dtype="float32",
        model_args="n_layers=2,dim=32,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64",
    ),
)


def train_and_speak(out: str) -> str:
    """The recipe itself on this rank. Returns what it prints; its last lines are a sample of the
    trained model."""
    import train_llama3

    said = io.StringIO()
    kept = dict(connect=lambda layout, *args, **kwargs: layout, disconnect=lambda: None)
    cfg = train_llama3.Config(
        **FLAGS, out=f"{out}/run", cache_dir=out, data=str(HOUSE / "docs" / "course.md")
    )
    with mock.patch.multiple(train_llama3, **kept), contextlib.redirect_stdout(said):
        train_llama3.main(cfg)
    return said.getvalue()


def check():
    for processes, flags, problem, exercises in LAYOUTS:
        if difference := compare(processes, flags, problem):
            raise Wrong(
                f"on {processes} processes with {flags}: {difference}. The functions of exercises "
                f"{exercises} meet "
                "here; the check of each exercise says more than this one"
            )
    with tempfile.TemporaryDirectory() as out:
        said = on_ranks(4, train_and_speak, out)[0]
        from training.metrics import read_lines

        losses = [
            line["loss"]
            for line in read_lines(str(Path(out, "run", "metrics.jsonl")))
            if "loss" in line
        ]
    if len(losses) < 3 or not losses[-1] < losses[0] - 1:
        raise Wrong(
            f"train_llama3.py --tp 2 --pp 2 does not learn in {STEPS} steps: its losses are "
            f"{losses}"
        )
    if "sample (for others" not in said:
        raise Wrong(f"the run ends without a sample: {said.strip().splitlines()[-1]}")
    print(said[said.index("sample (for others") :], flush=True)
