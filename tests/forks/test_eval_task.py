"""forks/eval_task.py, by the lines of docs/fork_me.md: the numbers of evaluate.py, in every layout,
and training as without."""

import json

import pytest
from guide import FLAGS, write_copy
from runs import ENV, MODEL, REPO, as_json_lines, column, having, launch, metrics, run, train_lines


@pytest.mark.slow
def test_a_task_in_training_has_the_numbers_of_evaluate(tmp_path):
    lines = []
    for i in range(7):
        lines.append({"question": f"{i} + {i}?", "choices": [str(2 * i), "no"], "answer": i % 2})
    (tmp_path / "task.jsonl").write_text(as_json_lines(lines))
    write_copy(tmp_path / "copy.py", "A benchmark in training")
    flags = [
        *FLAGS[:-2],
        "--steps",
        4,
        "--model_args",
        MODEL.replace("n_layers=2", "n_layers=4"),
        "--val_every",
        2,
        "--val_batches",
        1,
        "--checkpoint_every",
        2,
    ]

    def call(processes, *argv):
        run(launch(processes, *argv), tmp_path, env=ENV | {"PYTHONPATH": str(REPO)})

    found = []
    losses = []
    for layout, *task in [
        ("",),
        ("", 1),
        ("--tp 2", 1),
        ("--pp 2 --pp_schedule Interleaved1F1B", 1),
    ]:
        out = f"{layout}{len(task)}"
        call(
            1 + bool(layout),
            tmp_path / ("copy.py" if task else REPO / "train_llama3.py"),
            *flags,
            "--out",
            out,
            *layout.split(),
            *["--eval_task", "task.jsonl"] * len(task),
        )
        losses.append(column(train_lines(tmp_path / out), "loss"))
        found += [having(metrics(tmp_path / out), "eval_acc")] * len(task)
    assert losses[0] == losses[1]
    for of_layout in losses[2:]:
        assert losses[0] == pytest.approx(of_layout, rel=1e-5)
    for step, *numbers in zip((2, 4), *found, strict=True):
        call(
            1,
            REPO / "evaluate.py",
            "--checkpoint",
            f"1/checkpoints/step-{step}",
            "--task",
            "task.jsonl",
            "--out",
            f"{step}.jsonl",
            "--compute_dtype",
            "float32",
            "--device",
            "cpu",
        )
        want = json.loads((tmp_path / f"{step}.jsonl").read_text().splitlines()[-1])["summary"] | {
            "step": step
        }
        for line in numbers:
            assert line == pytest.approx({name: want[name.removeprefix("eval_")] for name in line})
