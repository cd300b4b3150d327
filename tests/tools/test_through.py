"""--check_parity looks at a run that is continued, at a validation, at experts in later steps and at
the copies on all ranks: copies of recipes with a few lines more, as researchers write them. The edits
are in the loop; what they keep in the model or the optimizer is in tests/storage/test_unsaved.py."""

import re
import sys
from dataclasses import dataclass

import pytest
import runs
from programs import REPO, run_program

ENV = runs.ENV | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
LLAMA = "--model_args dim=32,n_layers=2,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64"
EXPERTS = (
    "--flavor debug_moe --model_args dim=32,n_layers=2,n_heads=4,n_kv_heads=2,head_dim=8,"
    "moe_ffn_dim=32,n_experts=4,top_k=2"
)
RUN = (
    "--seq_len 64 --global_batch_size 4 --local_batch_size 2 --warmup_steps 2 "
    "--schedule_steps 8 --device cpu --check_parity"
)
# places of a recipe's loop: a line, and whether the new lines come before it
BEFORE_LOOP = ("    for step in range(first, cfg.steps + 1):\n", True)
GRADIENTS = ("        grad_norm = parallel.clip_grad_norm(stages, cfg.max_norm, layout)\n", True)
UPDATED = ("        metrics.end_step(layout.global_batch_size * cfg.seq_len)\n", True)
BATCH = ("        batch = metrics.start_step(batches)\n", False)
WEIGHTS = "[item for stage in stages for item in stage.named_parameters()]"


@dataclass
class Fork:
    lines: dict  # {place: lines to put there}
    says: str
    recipe: str = "train_llama3.py"
    model: str = LLAMA
    flags: str = ""
    equal: bool = False


FORKS = dict(
    slow_gradients=Fork(
        {
            BEFORE_LOOP: "    slow = {}\n",
            GRADIENTS: f"""        for fqn, p in {WEIGHTS}:
            slow[fqn] = slow[fqn].lerp(p.grad, 0.2) if fqn in slow else p.grad.clone()
            p.grad.add_(slow[fqn], alpha=2.0)
""",
        },
        "continued from step 2 is another run: step 3.*not in the checkpoint: slow, a variable of main",
    ),
    lookahead=Fork(  # every second step: equal from step 2, and not from step 3
        {
            BEFORE_LOOP: f"    slow = {{fqn: p.detach().clone() for fqn, p in {WEIGHTS}}}\n",
            UPDATED: f"""        for fqn, p in {WEIGHTS} if step % 2 == 0 else ():
            slow[fqn].lerp_(p.detach(), 0.5)
            p.data.copy_(slow[fqn])
""",
        },
        "continued from step 3 is another run",
    ),
    carried_gradients=Fork(
        {
            UPDATED: f"""        for fqn, p in {WEIGHTS} if step % 2 else ():
            p.grad = p.detach().clone()
"""
        },
        "a gradient of .* is carried over this save.*continued from step 3 is another run",
    ),
    generator=Fork(
        {
            BEFORE_LOOP: "    import random\n\n    dice = random.Random(cfg.seed)\n",
            GRADIENTS: "        set_lr(optimizers, lr * dice.random())\n",
        },
        "not in the checkpoint: dice, a variable of main",
    ),
    a_list_that_nothing_reads=Fork(
        {BEFORE_LOOP: "    losses = []\n", UPDATED: "        losses.append(float(loss[0]))\n"},
        "losses, a variable of main begins anew .* do not depend on it.*check_parity: equal in 4 steps",
        equal=True,
    ),
    plain=Fork({}, "check_parity: equal in 4 steps from step 1, one validation", equal=True),
    through_layouts=Fork(
        {},
        "check_parity: equal in 6 steps from step 1, one validation, 2 saves .after steps 2 and 4",
        flags="--through dp_shard=2;tp=2",
        equal=True,
    ),
    validation=Fork(
        {
            BEFORE_LOOP: """    usual = stages[0].token_loss
    stages[0].token_loss = lambda h, w, labels, denom: usual(
        h if stages[0].training else 9 * h / h.abs().max(), w, labels, denom
    )
"""
        },
        "after step 4 the runs differ first in the validation loss",
    ),
    late=Fork(  # the last step's update
        {
            UPDATED: f"""        for fqn, p in {WEIGHTS} if step == 4 else ():
            p.data.mul_(1 + cfg.local_batch_size / 1000)
"""
        },
        "after step 4 the runs differ first in the update of",
    ),
    own_rate_with_experts=Fork(
        {GRADIENTS: "        set_lr(optimizers, lr * loss[1].item() / 8)\n"},
        "step 2 differs first in the weight .*, whose copies on the ranks are not equal",
        recipe="train_qwen3.py",
        model=EXPERTS,
        flags="--dp_replicate 2",
    ),
    muon_with_experts=Fork(  # in bf16 the worst gradient of step 4 differs by percents
        {},
        r" 4 +\S+ +\S+ +\S+ +\S+ +\S+e-0[5-9] .*check_parity: equal in 4 steps from step 1",
        recipe="train_qwen3.py",
        model=EXPERTS,
        flags="--optimizer muon --dp_shard 2 --tp 2 --ep 2",
        equal=True,
    ),
    penalty_with_experts=Fork(  # a mean over a micro-batch, warmed up from 0
        {
            BEFORE_LOOP: "    usual = stages[0].token_loss\n",
            BATCH: """        stages[0].token_loss = lambda h, w, labels, denom: (
            usual(h, w, labels, denom) + 0.05 * (step - 1) * h.float().square().mean()
        )
""",
        },
        "step 2 differs first in the gradient of",
        recipe="train_qwen3.py",
        model=EXPERTS,
    ),
)
QUICK = ("slow_gradients",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FORKS]
)
def test_a_fork_is_another_run_or_equal(name, tmp_path):
    fork = FORKS[name]
    text = (REPO / fork.recipe).read_text()
    for (line, is_before), lines in fork.lines.items():
        assert text.count(line) == 1
        text = text.replace(line, lines + line if is_before else line + lines)
    (tmp_path / "mine.py").write_text(text)
    words = f"{fork.model} {RUN} {fork.flags}".split()
    done = run_program([sys.executable, "mine.py", *words], cwd=tmp_path, env=ENV)
    said = (done.stdout + done.stderr).replace("\n", " ")
    assert re.search(fork.says, said), done.stdout[-3000:] + done.stderr[-2000:]
    assert (done.returncode == 0) == fork.equal
