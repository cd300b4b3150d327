"""--check_parity: does the recipe train the same model on one process and on a layout? Every
gradient and every weight is compared. And does a continued run go on as if never stopped?"""

import fnmatch
import os
import sys
import tempfile
from collections.abc import Collection
from types import FunctionType
from typing import Any

import torch
from torch import nn

import parallel
from distributed.agree import brief
from distributed.checks import check_tp_plan
from distributed.layout import AXES
from distributed.tp_check import check_split
from flags.progress import Progress
from tools.parity.compare import (
    BF16,
    LATER,
    MOVED,
    SAME_LAYOUT,
    Limits,
    Run,
    Step,
    compare_end,
    compare_step,
    compared_fqns,
    has_validation,
    limits_of,
    read_run,
    room_after_update,
    widen,
)
from tools.parity.halves import Half, Halves, run_half, run_on_one_process
from tools.parity.loop_state import lost_state
from tools.parity.routing import MARGIN, knows_choices, moved_tokens

STEPS = 4  # unless --steps is given
PART = 2  # steps between two saves of --through
SAME = "same"  # --through without a value: the layout of the command line
# relative errors between these two look like rounding to bfloat16 or to 8 bits
HAND_ROUNDED = (2**-12, 2**-6)


def model_class(main: FunctionType) -> type[nn.Module] | None:
    """The model's class that a recipe names; None if it names none, or several."""
    found = set()
    for value in main.__globals__.values():
        if isinstance(value, type) and issubclass(value, nn.Module) and hasattr(value, "tp_plan"):
            found.add(value)
    if len(found) == 1:
        return found.pop()
    return None


def doubt_of_plan(Model: type[nn.Module], model_config: Any) -> str:
    """What is wrong with tp_plan, as the layout will say: before the half on one process, which takes
    minutes with a large model. A doubt and no refusal, because main may change the model after it
    is built. "": nothing."""
    try:
        with torch.device("meta"):
            model: Any = Model(model_config)
    except TypeError:  # main builds the model with other arguments
        return ""
    names = [name for name, _ in model.named_modules()]
    plan = {}
    for pattern, style in model.tp_plan().items():
        for name in fnmatch.filter(names, pattern):
            plan[name] = style
            for inner, _ in model.get_submodule(name).named_modules():
                plan.setdefault(f"{name}.{inner}", style)  # a style of a fork may split all of it
    try:
        check_tp_plan(model, parallel.TP_STYLES)
        check_split(model, plan)
    except ValueError as error:
        return str(error)
    return ""


def check_parity(main: FunctionType, cfg: Any, through: str = "") -> int:
    """Train a few steps in fp32, on one process and on the layout; train the last steps once more
    from a checkpoint; compare. Returns the exit status.

    This works for any copy of a recipe: tools/parity/half.py runs the recipe with flags appended,
    and records the arguments of functions of parallel.py. through: the flag.
    """
    layouts = read_layouts(through)
    parts = max(2, len(layouts) + 1)
    steps = PART * parts
    if is_typed("steps"):
        steps = cfg.steps
    save_at = steps_to_save(cfg, steps, parts, through)
    common = dict(steps=steps, checkpoint_every=0, val_every=0)
    if save_at:
        common["checkpoint_every"] = (
            1  # tools/parity/steps.py saves only after the steps of save_at
        )
    if hasattr(cfg, "val_every") and cfg.val_every:
        common["val_every"] = steps
    halves = Halves(main, cfg, **common)
    Model = model_class(main)
    if cfg.tp > 1 and Model is not None:
        doubt = doubt_of_plan(Model, halves.model_config)
        if doubt:
            print(
                f"check_parity: the layout will refuse its plan, if main changes nothing: {doubt}"
            )
    told = set()
    with tempfile.TemporaryDirectory() as folder:
        one = Half("one process", halves.one_process(os.path.join(folder, "one_process")))
        layout = Half("layout", halves.layout(os.path.join(folder, "layout")))
        continued = []
        if through:
            layout.save_at = save_at
        else:
            one.save_at = save_at
            continued = [continue_half(one, step) for step in save_at]
        status, *statuses = run_on_one_process([one, *continued], told)
        status = status or run_half(layout, told=told)
        if status:
            return status
        runs = [read_run(half.flags["out"]) for half in (one, layout)]
        later = room_after_update(cfg)
        problem = print_comparison(*runs, later)
        for half, step, status in zip(continued, save_at, statuses):
            problem = problem or judge_continued(half, step, status, *runs[:1] * 2, None)
        if through == SAME and not problem:
            half = continue_half(layout, save_at[0])
            status = run_half(half, told=told)
            problem = judge_continued(half, save_at[0], status, *runs[1:] * 2, None)
        before = layout
        for i, (axes, step) in enumerate(zip(layouts, save_at), 1):
            if problem:
                break
            flags = halves.another_layout(os.path.join(folder, f"layout_{i}"), axes)
            half = continue_half(before, step, flags, save_at[i : i + 1])
            axes_text = ", ".join(f"{axis} {n}" for axis, n in axes.items())
            half.name = f"{axes_text}, continued from step {step}"
            status = run_half(half, told=told)
            problem = judge_continued(half, step, status, runs[0], runs[1], later)
            before = half
        if problem:
            print(f"check_parity: NOT EQUAL: {problem}")
            return 1
        return print_verdict(*runs, save_at)


def steps_to_save(cfg: Any, steps: int, parts: int, through: str) -> list[int]:
    """The steps after which a checkpoint is made, to continue from. [] for a run without
    checkpoints.

    Without --through there are two, after an odd and after an even number of steps. A loop that acts
    every second step, and counts in a variable, would count right after an even number by chance.
    """
    part = steps // parts
    every = 1
    if hasattr(cfg, "checkpoint_every"):
        every = cfg.checkpoint_every
    saves = every and not (hasattr(cfg, "load_only") and cfg.load_only)
    if through and not (part and saves):
        raise ValueError(
            f"--through needs {parts} steps or more, and checkpoints: --steps {steps}, "
            f"--checkpoint_every {every}"
        )
    if not saves:
        return []
    if not through:
        return [step for step in (part, part + 1) if 0 < step < steps]
    return [part * n for n in range(1, parts)]


def continue_half(
    saved: Half, step: int, flags: dict | None = None, save_at: Collection[int] = ()
) -> Half:
    """A run that continues `saved` from the checkpoint of a step. flags: of the new layout, if the
    run continues on another layout."""
    flags = dict(flags or saved.flags)
    flags["out"] += f"_from_{step}"
    flags["load_step"] = -1
    source = os.path.join(saved.flags["out"], "checkpoints", f"step-{step}")
    target = os.path.join(flags["out"], "checkpoints", f"step-{step}")
    name = f"{saved.name}, continued from step {step}"
    return Half(name, flags, list(save_at), [source, target])


def print_verdict(one: Run, layout: Run, save_at: list[int]) -> int:
    """Print "equal", with the number of steps, validations and saves that were compared; or the
    parameters that could not be compared. Returns the exit status."""
    unseen = set()
    for run in (one, layout):
        for step in run.steps.values():
            unseen |= step.trained
    for n, step in one.steps.items():
        unseen -= compared_fqns(step, layout.steps[n])
    if unseen:
        print(
            f"check_parity: NOT COMPARED: {brief(sorted(unseen))}, whose gradient is 0 or missing "
            "on both sides; the rest is equal. "
            "Do not train what is not used (requires_grad_(False)); behind a weight that is 0, "
            "others have no gradient yet"
        )
        return 1
    n = len(one.steps)
    steps = f"{n} steps from step 1"
    if n == 1:
        steps = "1 step from step 1"
    validations = "no validation"
    if has_validation(one):
        validations = "one validation"
    rounded = ""
    if rounds(one):
        rounded = " to the precision of bfloat16, to which the model rounds,"
    saves = describe_saves(save_at)
    print(f"check_parity: equal{rounded} in {steps}, {validations}, {saves}")
    return 0


def describe_saves(save_at: list[int]) -> str:
    if not save_at:
        return "no save"
    if len(save_at) == 1:
        return f"one save (after step {save_at[0]})"
    return f"{len(save_at)} saves (after steps {' and '.join(map(str, save_at))})"


def is_typed(name: str) -> bool:
    """Whether the flag is on the command line."""
    return any(word.split("=")[0] == f"--{name}" for word in sys.argv[1:])


def read_layouts(through: str) -> list[dict[str, int]]:
    """ "dp_shard=2;tp=2,cp=2" -> [{"dp_shard": 2}, {"tp": 2, "cp": 2}]. [] for the command's own
    layout."""
    if through in ("", SAME):
        return []
    found = []
    for layout in through.split(";"):
        axes = {}
        for word in layout.split(","):
            axis, _, n = word.strip().partition("=")
            if axis not in (*AXES, "ep", "etp") or not n.isdigit() or int(n) < 1:
                raise ValueError(
                    f"--through {through!r}: {word.strip()!r} is no axis and degree; write layouts "
                    'like "dp_shard=2;tp=2,cp=2", of '
                    f"{', '.join((*AXES, 'ep', 'etp'))}"
                )
            axes[axis] = int(n)
        found.append(axes)
    return found


def rounds(run: Run) -> bool:
    """Whether the model rounds to bfloat16 or float16 by hand, though the run computes in fp32."""
    return any(about["rounds"] for step in run.steps.values() for about in step.ranks)


def print_comparison(one: Run, layout: Run, later: float) -> str:
    """Print the table of two runs. Returns a sentence on the first difference larger than rounding,
    or "". later: see LATER."""
    head = ["loss, 1 process", "layout", "norm, 1 process", "layout"]
    print(
        "step",
        *(f"{text:>16}" for text in head),
        " worst gradient / worst update by the step before (step 1: worst weight)",
    )
    first = ""
    moved = []
    limits = Limits()
    for count, (n, a) in enumerate(one.steps.items(), 1):
        b = layout.steps[n]
        if knows_choices(a) and knows_choices(b):
            moved += [(n, found) for found in moved_tokens(a, b)]
        limits = limits_between(a, b, count, later, bool(moved), rounds(one))
        with Progress(f"check_parity: comparing step {n}"):
            problems, worst = compare_step(a, b, limits)
        if problems and not first:
            first = f"step {n} differs first in {problems[0]}{hint_of_rounding(worst, a, b)}"
        notes = " / ".join(f"{error:.1e} {fqn}" for fqn, error in worst.values())
        print(f"{n:>4} {a.loss:>16.8f} {b.loss:>16.8f} {a.norm:>16.8f} {b.norm:>16.8f}  {notes}")
    for n, found in moved[:3]:
        print(f"step {n}: {found.sentence()}")
        if not first and found.margin > MARGIN * later:
            first = f"step {n}: {found.sentence()}, more than rounding"
    if not first:
        with Progress("check_parity: comparing the weights after the last step"):
            problems = compare_end(one, layout, limits)
        if problems:
            first = f"after step {max(one.steps)} the runs differ first in {problems[0]}"
    return first


def limits_between(
    a: Step, b: Step, count: int, later: float, moved: bool, rounded: bool
) -> Limits:
    """Limits of step number `count` of two layouts. moved: rounding has sent tokens to other
    experts, in this step or before. rounded: the model rounds to bfloat16 by hand."""
    limits = limits_of(count, later)
    has_experts = any(about["has_experts"] for about in a.ranks)
    is_unknown = has_experts and count > 1 and not (knows_choices(a) and knows_choices(b))
    if moved or is_unknown:
        widen(limits, MOVED)
        limits.buffer = None
    if rounded:
        if count == 1:
            widen(limits, BF16)
        else:
            widen(limits, MOVED)
    return limits


def hint_of_rounding(worst: dict, a: Step, b: Step) -> str:
    """A hint if the losses are equal, and the largest error looks like rounding to few bits."""
    largest = max((error for _, error in worst.values()), default=0.0)
    low, high = HAND_ROUNDED
    if low <= largest <= high and abs(a.loss - b.loss) <= 1e-4 * max(1.0, abs(a.loss)):
        return (
            f"; {largest:.0e} is about the error of rounding to bfloat16 or 8 bits: does the model "
            "round or cast by hand?"
        )
    return ""


def judge_continued(
    half: Half, step: int, status: int, straight: Run, own: Run, later: float | None
) -> str:
    """A sentence on what is wrong with a run that was continued from a step, or "".

    straight: the run that never stopped, to compare with. own: the run that was saved, for the state
    of its loop. later: None if the layout is the same, so that rounding is the same; otherwise
    `straight` is on one process, and see LATER.
    """
    if status:
        return f"the run cannot be continued from step {step}"
    continued = read_run(half.flags["out"])
    if min(continued.steps) != step + 1:
        return f"step {step} was not saved, and the run began again"
    limits = SAME_LAYOUT
    if half.flags["device"] == "cuda":  # kernels add in any order, and AdamW enlarges the rounding
        limits = limits_of(3, LATER["adamw"])
    with Progress(f"check_parity: comparing {half.name}"):
        problem = first_difference(straight, continued, limits, later)
    lost = what_is_lost(own, continued, step)
    if problem:
        where = "is a state of the loop missing in the checkpoint?"
        if lost:
            where = f"not in the checkpoint: {brief(lost)}"
        return f"a run continued from step {step} is another run: {problem}; {where}"
    if lost:
        print(
            f"{brief(lost)} begins anew in a continued run, for no checkpoint holds it; these "
            "steps do not depend on it"
        )
    return ""


def first_difference(straight: Run, continued: Run, limits: Limits, later: float | None) -> str:
    """The first difference between a run that never stopped and a continued one, or "". limits: for
    the same layout, where later is None."""
    moved = False
    for n, b in continued.steps.items():
        a = straight.steps[n]
        if later is not None:
            moved = moved or knows_choices(a) and knows_choices(b) and bool(moved_tokens(a, b))
            limits = limits_between(a, b, n, later, moved, rounds(straight))
        problems, _ = compare_step(a, b, limits)
        if problems:
            return f"step {n}: {problems[0]}"
    problems = compare_end(straight, continued, limits)
    if problems:
        return f"at the end, {problems[0]}"
    return ""


def what_is_lost(own: Run, continued: Run, step: int) -> list[str]:
    """Names of variables that the run keeps and its checkpoint does not hold, as far as they can be
    named."""
    first = own.steps[min(own.steps)].ranks[0]["state"]
    later = own.steps[step + 1].ranks[0]["state"]
    return lost_state(first, later, continued.steps[step + 1].ranks[0]["state"])
