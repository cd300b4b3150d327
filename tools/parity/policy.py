"""--check_parity of grpo.py and its forks: however the samples of an update are cut, the gradient
must be the same, and after the optimizer's step the next gradient, too.

A cut is a way to spread the samples: over forwards, over ranks (samples or their tokens), over the
updates of --minibatches. A loss with a mean over one part, a count of one part, or a sum over a row
of several samples trains another policy in every cut, without an error.
"""

import contextlib
import os
import random
import shlex
import socket
import sys
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from distributed.launch import usable_cores
from distributed.layout import AXES
from flags.config import given_flags, spell
from flags.progress import Progress
from tools.parity import original
from tools.parity.compare_policy import (
    compare_cut,
    describe_difference,
    effect_of_edit,
    norm_of,
    read_cut,
    say_verdict,
)
from tools.parity.policy_half import MOVED, run_rank

STEPS = 2
PROMPTS = 6  # per step, at least
GROUP = 4  # samples of a prompt, at most
LEAST_RATE = 1e-4  # of the update, far above the rounding of a weight
# AdamW divides by the gradient's own size, and would blow rounding up to a full step; this eps is
# above the rounding of a gradient
LEAST_EPS = 1e-6
WAIT_S = 60  # a collective that waits longer ends the cut: the ranks do different things
ODD_BATCH = 5  # samples of a forward, if --local_batch_size holds all samples in one forward
# Flags that decide where or how fast a number is computed. Only the cut of the command line keeps
# its values; all other cuts have these.
PLAIN = dict(ep=1, etp=1, ac="none", compile=False, cpu_offload=False, batch_invariant=False)


class Cut(NamedTuple):
    name: str
    flags: dict
    ranks: int = 1
    # the layout of the command line, so a refusal ends the command; another layout is only left out
    typed: bool = False


# ---------------------------------------------------------------- which cuts
def flags_known_to(cfg: Any, flags: dict) -> dict:
    """`flags` without the flags that the recipe lacks."""
    names = {field.name for field in fields(cfg)}
    return {name: value for name, value in flags.items() if name in names}


def common_flags(cfg: Any, parts: int) -> dict:
    """Flags of all cuts: a small step on the CPU in fp32, without checkpoints and evaluations.
    parts: --minibatches of one cut; the prompts of a step are a multiple of this number."""
    flags = dict(
        steps=STEPS,
        prompts_per_step=-(-PROMPTS // parts) * parts,
        warmup_steps=1,
        lr=max(cfg.lr, LEAST_RATE),
        eps=max(cfg.eps, LEAST_EPS),
        sft_steps=0,
        minibatches=1,
        dynamic_sampling=0,
        async_steps=0,
        gen_ranks=0,
        engine="",
        engine_weights="",
        engine_adapters=False,
        engine_seed=False,
        control="none",
        abort_k3=0.0,
        eval_every=0,
        val_pairs=0,
        checkpoint_every=0,
        export_hf="",
        log_every=1,
        init_timeout_s=WAIT_S,
        train_timeout_s=WAIT_S,
        tensorboard=False,
        wandb="",
        profile="",
        memory_snapshot=False,
        device="cpu",
        compute_dtype="float32",
        param_dtype="float32",
        reduce_dtype="float32",
    )
    given = vars(cfg)
    if "group_size" in given:
        flags["group_size"] = min(cfg.group_size, GROUP)
    if "pairs_per_step" in given:
        flags["pairs_per_step"] = min(cfg.pairs_per_step, 2 * GROUP)
    return flags_known_to(cfg, flags)


def count_samples(common: dict) -> int:
    """Samples of a step. A pair of train_dpo.py has two."""
    if "pairs_per_step" in common:
        return 2 * common["pairs_per_step"]
    return common["prompts_per_step"] * common["group_size"]


def name_of(flags: dict) -> str:
    return " ".join(f"--{name} {spell(value)}" for name, value in flags.items())


def one_process(cfg: Any) -> dict:
    """Flags of a plain process with a row for each sample."""
    return flags_known_to(cfg, PLAIN | dict.fromkeys(AXES, 1) | {"pack_tokens": 0})


def layout_cuts(cfg: Any) -> list[Cut]:
    """The layout of the command line; without one, two ranks of dp_shard, of tp and of cp."""
    degrees = {axis: max(getattr(cfg, axis), 1) for axis in AXES}
    ranks = 1
    for degree in degrees.values():
        ranks *= degree
    flags = dict(degrees)
    if degrees["pp"] > 1:
        # grpo.py has no pipeline for its own rollouts, and nothing is sampled here
        flags["engine"] = "any"
    shown = {axis: n for axis, n in degrees.items() if n > 1}
    for name, value in given_flags(cfg).items():
        if name in PLAIN and value != PLAIN[name]:
            shown[name] = value
    cuts = []
    if shown:
        cuts.append(Cut(name_of(shown), flags_known_to(cfg, flags), ranks, typed=True))
    if ranks == 1:
        for axis in ("dp_shard", "tp", "cp"):
            cuts.append(Cut(name_of({axis: 2}), one_process(cfg) | {axis: 2}, 2))
    return cuts


def one_process_cuts(cfg: Any, common: dict, longest: int) -> list[Cut]:
    """The same samples on one process, in other forwards. longest: input tokens of the longest
    sample."""
    n = count_samples(common)
    one = one_process(cfg)
    size = cfg.local_batch_size
    if size >= n:
        size = min(ODD_BATCH, -(-n // 2))
    room = max(2 * longest, cfg.seq_len)
    if cfg.pack_tokens:
        room = min(room, cfg.pack_tokens)
    cuts = [
        Cut(f"--local_batch_size {size}", one | {"local_batch_size": size}),
        Cut(f"--pack_tokens {room}", one | {"pack_tokens": room}),
    ]
    if "minibatches" in one | common:
        parts = max(cfg.minibatches, 2)
        frozen = {"minibatches": parts, "control": "frozen", "steps": 1, "local_batch_size": n}
        cuts.append(Cut(f"--minibatches {parts}, added up", one | frozen))
    return cuts


# ---------------------------------------------------------------- processes
def free_port() -> int:
    """A port below the range from which the system takes ports for its own connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


class Running:
    """The processes of a cut, forked from this process. A fork is safe, and fast: torch and the
    recipe are loaded, and nothing has been computed."""

    def __init__(self, main, cfg, cut: Cut, common: dict, folder: str, number: int):
        self.cut = cut
        self.number = number
        self.out = os.path.join(folder, f"cut-{number}")
        self.pids = {}  # rank: process
        self.error = ""
        self.status = 0
        try:
            half = replace(cfg, **common | cut.flags | {"out": self.out})
        except ValueError as error:  # the recipe's own refusals
            self.error = " ".join(str(error).split())
            self.status = 2
            return
        port = free_port()
        samples = os.path.join(folder, "samples")
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(cut.ranks):
            pid = os.fork()
            if pid == 0:
                run_rank(main, half, cfg, samples, rank, cut.ranks, port)
            self.pids[rank] = pid

    def has_ended(self) -> bool:
        """Whether all processes have ended. A failed rank leaves the other ranks waiting in a
        collective, so the first failure stops the whole cut."""
        for rank, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self.pids[rank]
            code = os.waitstatus_to_exitcode(status)
            if code and not self.status:
                self.status = code if code == 2 else 1
                self.error = error_of(f"{self.out}-{rank}", code)
                self.stop()
        return not self.pids

    def stop(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, 9)


def error_of(beginning: str, code: int) -> str:
    """One line on a failed rank: its error, else its last output."""
    file = Path(f"{beginning}.error")
    if file.exists():
        return file.read_text()
    said = Path(f"{beginning}.txt").read_text().splitlines()
    if said:
        return said[-1]
    return f"its process ended with {code}"


def run_cuts(
    main: FunctionType, cfg: Any, cuts: list[Cut], common: dict, folder: str, first: int
) -> list[Running]:
    """Run the cuts, as many at once as there are cores for their processes."""
    cores = max(usable_cores(), 2)
    waiting = list(enumerate(cuts, first))
    running = []
    done = []
    try:
        while waiting or running:
            busy = sum(each.cut.ranks for each in running)
            if waiting and (not running or busy + waiting[0][1].ranks <= cores):
                number, cut = waiting.pop(0)
                running.append(Running(main, cfg, cut, common, folder, number))
                continue
            time.sleep(0.01)
            for each in [each for each in running if each.has_ended()]:
                running.remove(each)
                if "EADDRINUSE" in each.error:  # another program was faster: once more
                    waiting.insert(0, (each.number, each.cut))
                else:
                    done.append(each)
    finally:
        for each in running:  # after an error here, or Ctrl-C
            each.stop()
            while not each.has_ended():
                time.sleep(0.01)
    return sorted(done, key=lambda each: cuts.index(each.cut))


# ---------------------------------------------------------------- the command
def check_policy(main: FunctionType, cfg: Any) -> int:
    """Run the update in all cuts, compare, print, and return the exit status."""
    began = time.monotonic()
    common = common_flags(cfg, max(cfg.minibatches, 2))
    n = count_samples(common)
    # the base: the edited recipe draws the samples, and trains on all of them in one forward
    plain = one_process(cfg) | {"local_batch_size": n}
    with tempfile.TemporaryDirectory() as folder:
        with Progress(f"check_parity: {n} samples in one forward"):
            [whole] = run_cuts(main, cfg, [Cut("one forward", plain)], common, folder, 0)
        if whole.status:
            print(f"error: {whole.error}", file=sys.stderr)
            return whole.status
        base = read_cut(whole.out)
        beside = original.start(sys.argv[0], given_flags(cfg), common | plain, folder)
        try:
            cuts = one_process_cuts(cfg, common, base.longest) + layout_cuts(cfg)
            if base.has_experts and not any(cut.typed for cut in cuts):
                flags = one_process(cfg) | {"dp_shard": 2, "ep": 2}
                cuts.append(Cut("--dp_shard 2 --ep 2", flags, 2))
            with Progress(f"check_parity: {len(cuts)} other cuts"):
                found = run_cuts(main, cfg, cuts, common, folder, 1)
            for each in found:
                if each.status == 2 and each.cut.typed:
                    print(f"error: {each.error}", file=sys.stderr)
                    return 2
            words = shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
            sampled = os.path.exists(os.path.join(folder, "samples"))
            moved = ""
            if sampled:
                moved = f" of the task, their log-probabilities moved by {MOVED:g}"
            print(f"{words}: {n} samples{moved}")
            status = compare_all(base, found)
            say_effect(base, beside)
            print(f"{time.monotonic() - began:.0f} seconds")
            return status
        finally:
            beside.stop()


def compare_all(base, found: list[Running]) -> int:
    """Print the table and the verdict. Returns the exit status."""
    print(f"{'cut':<32} {'loss':>14} {'|gradient|':>14}  {'update':>8}  worst gradient")
    print(f"{'one forward':<32} {base.losses[0]:>14.8f} {norm_of(base.gradients[0]):>14.8f}")
    differs = []
    failed = []
    compared = 1
    for each in found:
        if each.status == 2:  # an axis that this model or recipe cannot have
            print(f"{each.cut.name:<32} not compared: {each.error}")
            continue
        if each.status:
            print(f"{each.cut.name:<32} fails: {each.error}")
            failed.append(f"{each.cut.name} fails: {each.error}")
            continue
        compared += 1
        adds_up = each.cut.flags.get("control") == "frozen"
        difference = compare_cut(each.cut.name, base, read_cut(each.out), adds_up)
        print(describe_difference(difference))
        if difference.problems:
            differs.append(difference)
    return say_verdict(base, differs, compared, failed)


def say_effect(base, beside) -> None:
    """Print how the edited recipe differs from the original on the same samples. beside: the
    process that runs the original."""
    reason = beside.wait()
    if reason:
        print(reason)
        return
    effect = effect_of_edit(base, read_cut(beside.out))
    print(f"in one forward, compared with {beside.name}, your edit {effect}")
