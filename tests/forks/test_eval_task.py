"""forks/eval_task.py, by the lines of docs/fork_me.md: the numbers of evaluate.py, in every layout, and training as without."""
import json

import pytest
from runs import ENV, REPO, launch, metrics, run_program, train_lines
from test_guarded import FLAGS, SIZES, write_copy


@pytest.mark.slow
@pytest.mark.parametrize("kind, layouts", [
    ("choice", ["--tp 2", "--pp 2 --pp_schedule Interleaved1F1B"]), ("text", ["--cp 2"])])
def test_a_task_in_training_has_the_numbers_of_evaluate(kind, layouts, tmp_path):
    lines = {"text": [{"text": "def f(x):\n    return x + 1\n" * 9}, {"text": "import os"}],
             "choice": [{"question": f"{i} + {i}?", "choices": [str(2 * i), "no"], "answer": i % 2} for i in range(7)]}[kind]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_copy(tmp_path / "copy.py", "A benchmark in training")
    flags = [*FLAGS[:-2], "--steps", 4, "--model_args", SIZES.replace("n_layers=2", "n_layers=4"), "--val_every", 2,
             "--val_batches", 1, "--checkpoint_every", 2, "--out"]

    def call(processes, *argv):
        done = run_program(launch(processes, *argv), cwd=tmp_path, env=ENV | {"PYTHONPATH": str(REPO)})
        assert done.returncode == 0, done.stdout + done.stderr

    call(1, REPO / "train_llama3.py", *flags, "plain")
    found = {}
    for name in ("one", *layouts):
        layout = [] if name == "one" else name.split()
        call(1 + bool(layout), tmp_path / "copy.py", *flags, name, "--eval_task", "task.jsonl", *layout)
        found[name] = [{k: v for k, v in line.items() if k != "step"} for line in metrics(tmp_path / name) if "step" in line
                       and any(key.startswith("eval_") for key in line)]
        assert len(found[name]) == 2 and [line["loss"] for line in train_lines(tmp_path / name)] == pytest.approx(
            [line["loss"] for line in train_lines(tmp_path / "plain")], rel=0 if name == "one" else 1e-5)
    for step, numbers in zip((2, 4), found["one"], strict=True):
        call(1, REPO / "evaluate.py", "--checkpoint", f"one/checkpoints/step-{step}", "--task", "task.jsonl", "--out",
             f"{step}.jsonl", "--compute_dtype", "float32", "--device", "cpu")
        want = json.loads((tmp_path / f"{step}.jsonl").read_text().splitlines()[-1])["summary"]
        assert numbers == pytest.approx({name: want[name.removeprefix("eval_")] for name in numbers}, rel=1e-5)
    for name in layouts:
        assert all(a == pytest.approx(b, rel=1e-4) for a, b in zip(found[name], found["one"], strict=True))
