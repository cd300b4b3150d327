"""--check_parity: the user compares a layout with a single process; against tools/parity/check_parity.py."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import REPO

import tools.parity.halves as halves_of
import train_llama3
from distributed.refusals import check_layout
from flags.config import Need, flag, parse_config
from models.llama3 import FLAVORS, Llama3, Llama3Config
from tools.parity import check_parity as parity
from tools.parity import loop_state
from tools.parity.check_parity import check_parity
from tools.parity.compare import (
    LATER,
    OTHERS,
    Run,
    Step,
    compare_step,
    compare_validation,
    distance,
    has_validation,
    limits_of,
    read_run,
)
from tools.parity.steps import casts
from tools.reports.options import with_report_flags

MODEL = Llama3Config(
    n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, ffn_dim=512, max_seq_len=8192
)


@dataclass(kw_only=True)
class Fork(train_llama3.Config):
    # own flag
    wide: bool = flag(
        False, Need("without --tp 2 or more and dim 32", lambda c: c.tp > 1 and c.dim == 32)
    )


def test_both_halves_of_check_parity_are_given_no_flag_in_vain(tmp_path, monkeypatch):
    """Flags that need the layout get their default on a single process; with a feature also its
    details are off."""
    argv = (
        "--tp 2 --pp 2 --no-loss_parallel --pp_schedule GPipe --wide --ac selective --ac_every 3 "
        "--export_hf new --export_dtype bfloat16 --exclude_from_loading head --load_step 3 "
        "--model_args dim=32"
    ).split()
    cfg = parse_config(Fork, argv)
    halves = []
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    cfg.out = str(tmp_path)  # with a checkpoint, so that --exclude_from_loading has an effect

    def started(command, **kwargs):
        file = command[command.index("--runs") + 1]
        for run in json.loads(Path(file).read_text()):
            given = command[command.index("recipe.py") + 1 :] + run["flags"]
            halves.append(parse_config(with_report_flags(Fork), given))
            Path(run["record"] + ".status").write_text("0")
            for name in ("out", "err"):
                Path(f"{run['record']}.{name}").write_text("")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sys, "argv", ["recipe.py", *argv])
    monkeypatch.setattr(halves_of, "subprocess", SimpleNamespace(run=started))
    nothing_compared(monkeypatch)
    cfg.checkpoint_every = 0  # nothing is continued
    assert check_parity(train_llama3.main, cfg) == 0
    one, layout = halves
    for half, size in (one, 1), (layout, 4):
        check_layout(
            half,
            replace(MODEL, dim=32),
            seq_len=64,
            local_batch_size=4,
            global_batch_size=4,
            device="cpu",
            world_size=size,
        )
        assert (half.export_dtype, half.exclude_from_loading) == ("float32", [])
    named = ("tp", "loss_parallel", "pp_schedule", "wide", "ac", "ac_every")
    assert [getattr(one, name) for name in named] == [1, True, "1F1B", False, "none", 2]
    assert [getattr(layout, name) for name in named] == [2, False, "GPipe", True, "selective", 3]
    # before anything is started
    with pytest.raises(ValueError, match="--cp_method alltoall has no effect without --cp 2"):
        cfg.cp_method = "alltoall"
        check_parity(train_llama3.main, cfg)
    assert len(halves) == 2


def nothing_compared(monkeypatch):
    """No half runs: what they would record is empty, and the comparison finds no difference."""
    monkeypatch.setattr(parity, "read_run", lambda out: Run({1: Step(1.0, 1.0, "")}))
    monkeypatch.setattr(parity, "print_comparison", lambda one, layout, later: "")


@pytest.mark.parametrize(
    "n, flags, size",
    [
        # as many forwards as one process with --local_batch_size 2: another cut on both sides
        (4, dict(local_batch_size=2, dp_shard=2), 1),
        (8, dict(local_batch_size=8), 4),
        (8, dict(local_batch_size=4, tp=2), 8),
        (1, dict(local_batch_size=1), 1),
    ],
)
def test_one_half_always_accumulates(n, flags, size):
    """What counts the forwards of a step would count one on both sides."""
    cfg = train_llama3.Config(**flags)
    data_ranks = max(cfg.dp_shard, 1) * cfg.dp_replicate
    assert halves_of.choose_another_cut(cfg, n, data_ranks) == size
    assert n == 1 or n // size > 1 or n // (cfg.local_batch_size * data_ranks) > 1


def steps_of(**differences) -> Run:
    """A run of three steps of one weight, with other values in the last two."""
    weight = {"w": torch.ones(2)}
    steps = {n: Step(1.0, 1.0, "0", weight, weight, {}, {}, {"w"}) for n in (1, 2, 3)}
    about = dict(has_experts=False, rounds=False, choices=[])
    for n, step in steps.items():
        step.ranks = [about]
        if n > 1:
            step.update = weight
        for name, value in differences.items():
            if n > 1:
                setattr(step, name, {"w": torch.full((2,), float(value[n - 2]))})
    return Run(steps)


@pytest.mark.parametrize(
    "optimizer, layout, equal",
    [
        ("lion", dict(gradient=(1.04, 1.08)), True),
        ("lion", dict(gradient=(1.4, 1.8)), False),
        ("lion", dict(update=(0, 0)), False),
        ("adamw", dict(gradient=(1.04, 1.08)), False),
        ("adamw", {}, True),
    ],
)
def test_check_parity_of_an_optimizer_that_it_does_not_know(optimizer, layout, equal):
    """After the first update the limit of rounding is unknown, but below the size of a mistake."""
    later = LATER.get(optimizer, OTHERS)
    assert (parity.print_comparison(steps_of(), steps_of(**layout), later) == "") == equal


def test_a_first_gradient_of_an_unknown_optimizer_has_the_usual_limit():
    off = steps_of()
    off.steps[1].gradient = {"w": torch.full((2,), 1.04)}
    assert "step 1 differs first in the gradient of w" in parity.print_comparison(
        steps_of(), off, OTHERS
    )


def test_the_error_of_a_part_is_measured_by_its_share_of_the_whole():
    """A quarter of a tensor of equal elements has half of its norm."""
    whole = torch.ones(4)
    assert distance(torch.tensor([1.5]), whole[:1], whole) == pytest.approx(0.5)
    assert distance(torch.full((4,), 1.5), whole, whole) == pytest.approx(0.5)


def test_an_update_that_is_off_in_most_elements_is_no_rounding():
    """A hundredth of the small elements, beside one that is a hundred times as large: the norm of
    the difference is nothing beside that of the whole, but rounding would not meet them all. A
    gradient has no such limit: what is small in it may be rounding of what is large."""
    updates = [torch.tensor([100.0] + [small] * 8) for small in (1.0, 1.01)]
    one, off = steps_of().steps[2], steps_of().steps[2]
    one.update = {"w": updates[0]}
    off.update = {"w": updates[1]}
    problems, _ = compare_step(one, off, limits_of(2, LATER["adamw"]))
    assert [problem.split(" by ")[0] for problem in problems] == ["the update of w"]
    assert compare_step(one, off, limits_of(3, LATER["adamw"]))[0] == []
    one.gradient = one.update
    off.gradient = off.update
    off.update = one.update
    assert compare_step(one, off, limits_of(2, LATER["adamw"]))[0] == []


@pytest.mark.parametrize("n", [1, 2, 3, 9])
@pytest.mark.parametrize(
    "kind, says",
    [("loss", "the loss"), ("norm", "the gradient norm"), ("gradient", "w by 1.0e-02")],
)
def test_a_hundredth_is_no_rounding_in_any_step(n, kind, says):
    one, off = steps_of().steps[2], steps_of().steps[2]
    if kind == "gradient":
        one.gradient = {"w": torch.ones(4)}
        off.gradient = {"w": torch.full((4,), 1.01)}
    else:
        setattr(off, kind, 1.01 * getattr(one, kind))
    problems, _ = compare_step(one, off, limits_of(n, LATER["adamw"]))
    assert says in "; ".join(problems), f"1 % of a {kind} in step {n}"


@pytest.mark.parametrize(
    "device, error, equal",
    [("cpu", 1e-6, True), ("cpu", 1e-4, False), ("cuda", 1e-4, True), ("cuda", 1e-2, False)],
)
def test_a_continued_run_repeats_its_gradients_on_a_cpu_and_nearly_on_a_gpu(
    device, error, equal, monkeypatch
):
    """Step 3 of a run that was continued from step 2."""
    straight = steps_of()
    for step in straight.steps.values():
        step.ranks[0]["state"] = {}
    continued = steps_of(gradient=(1.0, 1.0 + error))
    continued.steps = {3: continued.steps[3]}
    continued.steps[3].ranks[0]["state"] = {}
    monkeypatch.setattr(parity, "read_run", lambda out: continued)
    half = halves_of.Half("continued", dict(out="", device=device))
    said = parity.judge_continued(half, 2, 0, straight, straight, None)
    assert (said == "") == equal, said
    assert equal or "is another run: step 3: the gradient of w" in said


def test_a_model_that_rounds_by_hand_is_seen_in_its_graph():
    """Its limits are wider; those of any other model must not be."""
    w = torch.ones(2, 2, requires_grad=True)
    assert not casts((w @ w).sum())
    for dtype in torch.bfloat16, torch.float16:
        assert casts((w @ w.to(dtype).float()).sum())


def choices(scores: list[list[float]]) -> dict:
    """What a rank records of a layer in which each token takes the one expert with the highest
    score: two sequences of two tokens."""
    scores = torch.tensor(scores)
    chosen = (scores == scores.amax(-1, keepdim=True)).float()
    both = torch.cat([scores, chosen], -1)
    return dict(
        rank=0,
        degrees=dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1),
        has_experts=True,
        rounds=False,
        choices=[("blocks.1", ["a", "b"], both)],
    )


@pytest.mark.parametrize("gap, equal", [(1e-6, True), (0.1, False)])
def test_a_token_that_chose_another_expert_is_told_and_judged_by_its_margin(gap, equal, capsys):
    one = steps_of()
    layout = steps_of()
    for n in one.steps:
        one.steps[n].ranks = [choices([[1, 0], [0, 1], [1, 1 - gap], [1, 0]])]
        layout.steps[n].ranks = [choices([[1, 0], [0, 1], [1 - gap, 1], [1, 0]])]
    first = parity.print_comparison(one, layout, LATER["adamw"])
    sentence = "step 1: 1 of 4 tokens chose other experts in blocks.1: margin"
    assert sentence in capsys.readouterr().out
    if equal:
        assert first == ""
    else:
        assert first.startswith(sentence)
        assert first.endswith("more than rounding")


@pytest.mark.parametrize(
    "text, layouts",
    [
        ("dp_shard=2;tp=2, cp=2", [{"dp_shard": 2}, {"tp": 2, "cp": 2}]),
        ("tp=1;cp=2", [{"tp": 1}, {"cp": 2}]),
        ("", []),
        ("same", []),
        ("tp", None),
        ("fsdp=2", None),
        ("tp=0", None),
        ("tp=2;", None),
    ],
)
def test_layouts_of_through(text, layouts):
    if layouts is None:
        with pytest.raises(ValueError, match="is no axis and degree; write layouts like"):
            parity.read_layouts(text)
    else:
        assert parity.read_layouts(text) == layouts


# --------------------------------------------------------- tools/parity/half.py: the recording half
PARALLEL = '''
def clip_grad_norm(stages, max_norm, layout, scale=0.5):
    """Of this fork, and not the house's."""
    for stage in stages:
        for p in stage.parameters():
            p.grad *= scale
    return "the norm"
'''
RECIPE = '''
"""A recipe."""
import json, sys, types
import torch, parallel
from neighbour import name
from parallel import clip_grad_norm

class Config: "so that its source can be read"

if __name__ == "__main__":
    import inspect
    stage, layout = torch.nn.Linear(1, 2, bias=False), types.SimpleNamespace(rank=0, world_size=1, pp=1, degrees={})
    norms = []
    for step in range(4):
        stage.weight.data.fill_(step)
        stage.weight.grad = torch.full((2, 1), float(step))
        if step < 2:
            norms.append(clip_grad_norm([stage], 1.0, layout))
        else:
            norms.append(parallel.clip_grad_norm(layout=layout, max_norm=1.0, stages=[stage], scale=2))
    print(json.dumps({"argv": sys.argv, "path": sys.path[0], "file": __file__, "own source": open(__file__).read()[:15],
                      "doc": sys.modules["__main__"].__doc__, "source": inspect.getsource(Config), "neighbour": name,
                      "norms": norms, "gradient": stage.weight.grad.tolist(), "what it is": parallel.clip_grad_norm.__doc__}))
    raise SystemExit(7)
'''


@pytest.fixture
def fork(tmp_path) -> Path:
    folder = tmp_path / "a fork"
    folder.mkdir()
    for name, text in {
        "mine.py": RECIPE,
        "parallel.py": PARALLEL,
        "neighbour.py": "name = 'mine'\n",
    }.items():
        (folder / name).write_text(text)
    return folder


def test_a_recipe_runs_as_if_started_by_python_and_is_recorded(fork, tmp_path):
    """From any folder, with imports from the recipe's folder; for every way to call clip_grad_norm,
    gradients are unscaled."""
    commands = []
    for before in ([], [REPO / "tools" / "parity" / "half.py", tmp_path / "record"]):
        commands.append([sys.executable, *before, fork / "mine.py", "--flag", "x"])
    pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    both = [subprocess.Popen(command, cwd=tmp_path, **pipes) for command in commands]
    (plain, _), (recorded, errors) = (process.communicate(timeout=100) for process in both)
    assert [process.returncode for process in both] == [7, 7], errors
    assert recorded == plain, errors
    said = json.loads(plain)
    assert said["path"] == str(fork)
    assert said["argv"] == [str(fork / "mine.py"), "--flag", "x"]
    assert said["neighbour"] == "mine"
    assert said["gradient"] == [[6.0], [6.0]]
    assert sorted(file.name for file in (tmp_path / "record").iterdir()) == [
        f"{step}-0.pt" for step in range(4)
    ]
    for step in range(4):
        part = torch.load(tmp_path / "record" / f"{step}-0.pt")
        for kind in "gradient", "weight":
            assert part[kind].keys() == {"weight"}
            assert part[kind]["weight"].tolist() == [
                [step],
                [step],
            ]


def test_a_recipe_without_clip_grad_norm_has_nothing_to_compare(tmp_path):
    (tmp_path / "out").mkdir()
    line = '{"step": 1, "loss": 1.0, "grad_norm": 1.0, "tokens_hash": ""}'
    (tmp_path / "out" / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(RuntimeError, match="calls parallel.clip_grad_norm nowhere"):
        read_run(str(tmp_path / "out"))


def test_state_that_the_recipe_saves_is_not_called_lost(monkeypatch):
    """A continued run finds more in `state` than the loop put there: Checkpoints.save adds to it."""

    def state_at(step: int, **saved) -> dict:
        variables = {"state": {"step": step} | saved, "seen": [0.5] * step}
        main = SimpleNamespace(f_locals=variables, f_code=SimpleNamespace(co_name="main"))
        monkeypatch.setattr(loop_state, "frame_of_main", lambda: main)
        return loop_state.state_of_loop([])

    continued = state_at(0) | state_at(2, bos=True)
    continued["seen, a variable of main"] = state_at(0)["seen, a variable of main"]
    lost = loop_state.lost_state(state_at(0), state_at(2), continued)
    assert lost == ["seen, a variable of main"]


def test_state_that_holds_itself_has_a_digest():
    state = [1.0]
    state.append(state)
    before = loop_state.digest(state)
    state[0] = 2.0
    assert loop_state.digest(state) != before
    deep = [[[[[1.0]]]]]
    before = loop_state.digest(deep)
    deep[0][0][0][0][0] = 2.0
    assert loop_state.digest(deep) == before  # deeper than it looks


@pytest.mark.parametrize(
    "one, layout, equal",
    [
        (2.0, 2.0, True),
        (2.0, 2.1, False),
        (2.0, math.nan, False),
        (math.nan, 2.0, False),
        (2.0, None, False),
        (math.nan, math.nan, True),  # no token has a loss, and the verdict says "no validation"
        (None, None, True),
    ],
)
def test_a_validation_that_one_side_lacks_is_no_equal_one(one, layout, equal):
    found = compare_validation(Run({}, one), Run({}, layout), 1e-4)
    assert (found == []) == equal
    assert has_validation(Run({}, one)) == (one == 2.0)


def test_a_validation_loss_of_null_is_not_a_number(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "val_loss": null}\n')
    assert math.isnan(read_run(str(tmp_path)).val_loss)


def test_a_plan_is_doubted_before_the_half_on_one_process(monkeypatch):
    """Which would train for minutes, with a large model, before the layout refuses its plan."""
    assert parity.model_class(train_llama3.main) is Llama3
    assert parity.doubt_of_plan(Llama3, FLAVORS["debug"]) == ""
    plan = Llama3.tp_plan

    def without_wo(model):
        return {pattern: s for pattern, s in plan(model).items() if pattern != "blocks.*.attn.wo"}

    monkeypatch.setattr(Llama3, "tp_plan", without_wo)
    doubt = parity.doubt_of_plan(Llama3, FLAVORS["debug"])
    assert "blocks.0.attn.wo.weight has no style in tp_plan" in doubt
