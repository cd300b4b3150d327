"""forks/guarded.py, by the lines of docs/fork_me.md: a spike and a flipped bit are caught, and a
quiet run is as without."""

import re

import pytest
from guide import FLAGS, write_copy
from programs import run_program
from runs import ENV, REPO, column, launch, train_lines

from storage.commands import diff

GUARDS = ["--on_spike", "skip", "--replay_every", 10]
# what is planted, and before which line
SPIKE = (
    "        guard.before_update(",
    "        grad_norm = grad_norm * (30 if step == 20 else 1)\n",
)
FLIP = (
    "        if cfg.replay_every and step",
    """        if step == 10 and layout.rank == 1:
            stages[0].norm.weight.grad.to_local().view(torch.int32)[3] ^= 1
""",
)


@pytest.mark.slow
def test_a_spike_and_a_flipped_bit_are_caught_and_a_quiet_run_is_the_same(tmp_path):
    def train(name, *planted, flags=GUARDS):
        write_copy(tmp_path / f"{name}.py", "Guards for a long run", *planted)
        command = launch(
            2,
            tmp_path / f"{name}.py" if flags else REPO / "train_llama3.py",
            *FLAGS,
            *flags,
            "--out",
            name,
        )
        done = run_program(command, cwd=tmp_path, env=ENV | {"PYTHONPATH": str(REPO)})
        return done.returncode, done.stdout + done.stderr

    status, said = train("quiet")
    assert status == 0, said[-2000:]
    assert "step skipped" not in said, said[-2000:]
    assert train("plain", flags=[])[0] == 0
    losses = [column(train_lines(tmp_path / name), "loss") for name in ("plain", "quiet")]
    steps = [str(tmp_path / name / "checkpoints/step-24") for name in ("plain", "quiet")]
    assert losses[0] == losses[1]
    assert diff(*steps) == 0
    status, said = train("spike", SPIKE)
    assert status == 0, said[-2000:]
    assert said.count("step skipped") == 1, said[-2000:]
    assert re.search(r"step 20: the gradient norm is \S+, above \S+: a spike; step skipped", said)
    status, said = train("flip", FLIP)
    assert status == 1, said[-2000:]
    assert re.search(
        r"step 10, computed twice, differs on 1 of 2 ranks: on rank 1 \(\S+\) in the gradient of "
        "norm.weight and 0 more",
        said,
    ), said[-2000:]
