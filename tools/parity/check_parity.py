"""--check_parity: does the recipe train the same model on one process and on a layout, with every
gradient and weight compared; and does a run that is saved and continued go on as the same run?"""

import os
import sys
import tempfile

from distributed.agree import brief
from distributed.layout import AXES
from tools.parity.compare import (
    BF16,
    LATER,
    MOVED,
    SAME_LAYOUT,
    Limits,
    Run,
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
# Relative errors of rounding to 8 bits and to bfloat16, and below
HAND_ROUNDED = (2**-12, 2**-6)


def check_parity(main, cfg, through: str = "") -> int:
    """Train some steps of the running recipe on one process and on the layout, in fp32, and part of
    them once more from checkpoints; compare; return the exit status.

    Works for any copy of a recipe: tools/parity/half.py runs the recipe, with flags appended, and
    records the arguments of functions of parallel.py.
    through: see --through.
    """
    layouts = read_layouts(through)
    parts = max(2, len(layouts) + 1)
    steps = cfg.steps if is_typed("steps") else PART * parts
    save_at = steps_to_save(cfg, steps, parts, through)
    common = dict(steps=steps, checkpoint_every=0, val_every=0)
    if save_at:
        common["checkpoint_every"] = 1  # tools/parity/steps.py leaves the others out
    if hasattr(cfg, "val_every") and cfg.val_every:
        common["val_every"] = steps
    halves = Halves(main, cfg, **common)
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


def steps_to_save(cfg, steps: int, parts: int, through: str) -> list[int]:
    """After which steps the runs are saved, to be continued. Without --through there are two, one
    after an odd number of steps and one after an even: what a loop does every second step would
    begin anew just in time. [] for a run that saves nothing."""
    part = steps // parts
    every = cfg.checkpoint_every if hasattr(cfg, "checkpoint_every") else 1
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


def continue_half(saved: Half, step: int, flags=None, save_at=()) -> Half:
    """The run that continues another from its checkpoint of a step. flags: of its layout, if it is
    another."""
    flags = dict(flags or saved.flags)
    flags["out"] += f"_from_{step}"
    flags["load_step"] = -1
    source = os.path.join(saved.flags["out"], "checkpoints", f"step-{step}")
    target = os.path.join(flags["out"], "checkpoints", f"step-{step}")
    name = f"{saved.name}, continued from step {step}"
    return Half(name, flags, list(save_at), [source, target])


def print_verdict(one: Run, layout: Run, save_at: list[int]) -> int:
    """Print that all is equal, and how far that reaches; or which parameters were not compared.
    Returns the exit status."""
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
    reach = [
        f"{n} step{'s' * (n > 1)} from step 1",
        "one validation" if has_validation(one) else "no validation",
        describe_saves(save_at),
    ]
    rounded = " to the precision of bfloat16, to which the model rounds," * rounds(one)
    print(f"check_parity: equal{rounded} in {', '.join(reach)}")
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
    """Whether the model itself rounds to bfloat16 or float16, though the run computes in fp32."""
    return any(about["rounds"] for step in run.steps.values() for about in step.ranks)


def print_comparison(one: Run, layout: Run, later: float) -> str:
    """Print the table of two runs; return a sentence on the first difference that rounding does not
    explain, or "". later: see LATER."""
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
        problems = compare_end(one, layout, limits)
        if problems:
            first = f"after step {max(one.steps)} the runs differ first in {problems[0]}"
    return first


def limits_between(a, b, count: int, later: float, moved: bool, rounded: bool) -> Limits:
    """Limits of the nth compared step of two layouts. moved: rounding has sent tokens to other
    experts, in this step or before. rounded: the model rounds to bfloat16 by itself."""
    limits = limits_of(count, later)
    has_experts = any(about["has_experts"] for about in a.ranks)
    is_unknown = has_experts and count > 1 and not (knows_choices(a) and knows_choices(b))
    if moved or is_unknown:
        widen(limits, MOVED)
        limits.buffer = None
    if rounded:
        widen(limits, BF16 if count == 1 else MOVED)
    return limits


def hint_of_rounding(worst: dict, a, b) -> str:
    """A hint if the largest error is about that of rounding, and the losses are equal."""
    largest = max((error for _, error in worst.values()), default=0.0)
    low, high = HAND_ROUNDED
    if low <= largest <= high and abs(a.loss - b.loss) <= 1e-4 * max(1.0, abs(a.loss)):
        return (
            f"; {largest:.0e} is about what rounding to bfloat16 or 8 bits does: does the model "
            "round or cast by hand?"
        )
    return ""


def judge_continued(half: Half, step: int, status: int, straight: Run, own: Run, later) -> str:
    """ "" or a sentence on a run that was continued from a step.

    straight: the run to compare with; where later is given, on one process. own: the run that was
    saved, for its state. later: None if continued on the same layout, so that rounding is the same.
    """
    if status:
        return f"the run cannot be continued from step {step}"
    continued = read_run(half.flags["out"])
    if min(continued.steps) != step + 1:
        return f"step {step} was not saved, and the run began again"
    limits = SAME_LAYOUT
    if half.flags["device"] == "cuda":  # kernels that add in any order, and AdamW enlarges it
        limits = limits_of(3, LATER["adamw"])
    problem = ""
    moved = False
    for n, b in continued.steps.items():
        a = straight.steps[n]
        if later is not None:
            moved = moved or knows_choices(a) and knows_choices(b) and bool(moved_tokens(a, b))
            limits = limits_between(a, b, n, later, moved, rounds(straight))
        problems, _ = compare_step(a, b, limits)
        if problems:
            problem = f"step {n}: {problems[0]}"
            break
    else:
        problems = compare_end(straight, continued, limits)
        if problems:
            problem = f"at the end, {problems[0]}"
    lost = what_is_lost(own, continued, step)
    if problem:
        where = (
            f"not in the checkpoint: {brief(lost)}" if lost else "what is not in the checkpoint?"
        )
        return f"a run continued from step {step} is another run: {problem}; {where}"
    if lost:
        print(
            f"{brief(lost)} begins anew in a continued run, for no checkpoint holds it; these "
            "steps do not depend on it"
        )
    return ""


def what_is_lost(own: Run, continued: Run, step: int) -> list[str]:
    """The names of what the run keeps and its checkpoint does not, as far as they can be named."""
    first = own.steps[min(own.steps)].ranks[0]["state"]
    later = own.steps[step + 1].ranks[0]["state"]
    return lost_state(first, later, continued.steps[step + 1].ranks[0]["state"])
