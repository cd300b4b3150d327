"""README.md of an export: says what the run and its files say, in --export_hf and in to_hf alike."""

import json

from runs import REPO, launch, run

from flags import VERSION
from storage.model_card import write_card

DATA = {"data_sha256": "ab12", "n_tokens": 34091, "tokenizer_sha256": "cd34"}
ABOUT = {"step": 12, "identity": {"model": {"class": "Llama3"}, "data": DATA}}


def test_an_edited_metrics_file_makes_no_export_fail(tmp_path):
    """Before, a line that is no object failed the export at the end of a training."""
    file = tmp_path / "metrics.jsonl"
    lines = ["[1]", '"x"', '{"step": 2, "loss": "x"}', '{"step": 1, "loss": 2.5}', '{"step": 2,']
    file.write_bytes("\n".join(lines).encode() + b"\xff\n")
    assert "- training loss, last logged step: 2.5000" in write_card(
        ABOUT, {}, str(file), "float32"
    )


def test_both_exports_of_a_run(tmp_path):
    (tmp_path / "book.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    out = tmp_path / "run"
    command = f"--data {tmp_path}/book.txt --cache_dir {tmp_path}/cache --out {out} --steps 2 "
    command += "--model_args dim=32,n_layers=1,n_heads=2,n_kv_heads=2 --seq_len 32 --val_every 2"
    recipe = launch(1, "train_llama3.py", *command.split())
    run([*recipe, "--export_hf", tmp_path / "last"])
    run(launch(1, "checkpoint.py", "to_hf", out, tmp_path / "later"))
    # the run is finished: this start trains nothing, and its flags have trained nothing
    said = run([*recipe, "--export_hf", tmp_path / "again", "--lr", 0.7, "--log_every", 7])
    assert "loss" not in said
    last = (tmp_path / "last/README.md").read_text()
    for other in ("later", "again"):
        assert (tmp_path / other / "README.md").read_text() == last, other

    state = json.loads((out / "checkpoints/step-2/state.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    data = state["identity"]["data"]
    known = [
        "trained by `train_llama3.py`",
        f"- trained on: `{tmp_path}/book.txt`",
        f"{data['n_tokens']:,} tokens, sha256 `{data['data_sha256']}`",
        f"- tokens trained on: {state['state']['tokens']:,}",
        f"- validation loss, last: {lines[-1]['val_loss']:.4f}",
        f"- training loss, last logged step: {lines[-2]['loss']:.4f}",
        "--seq_len 32\n",
        f"- version: {VERSION}\n",
    ]
    for text in known:
        assert text in last, text
    for text in ("--out", "--cache_dir", "--export_hf", "--lr", str(REPO)):
        assert text not in last, text


def test_a_card_says_nothing_that_is_not_known(tmp_path):
    card = write_card(ABOUT, {"version": "0.11.0"}, str(tmp_path / "metrics.jsonl"), "bfloat16")
    for text in ("loss", "Flags", "commit", "trained by", "None", "null"):
        assert text not in card, text
    assert "34,091 tokens, sha256 `ab12`" in card


def test_parts_of_a_mixture_and_rewards(tmp_path):
    part = {"weight": "3/10", "n_tokens": 1000, "data_sha256": "ef56"}
    identity = ABOUT["identity"] | {"data": {"parts": {"web": part}}}
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 4, "reward_mean": 0.25}\n{"step": 14, "reward_mean": 0.9}\n{"st')
    card = write_card(ABOUT | {"identity": identity}, {}, str(metrics), "bfloat16", adapter=True)
    assert "- data, part web: weight 3/10, 1,000 tokens, sha256 `ef56`" in card
    assert "mean reward, last logged step: 0.2500" in card  # of this step, not of step 14
    assert "Adapters (LoRA).\n" in card and "bfloat16" not in card
