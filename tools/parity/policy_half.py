"""One rank of a cut of --check_parity for grpo.py and its forks (tools/parity/policy.py has the
cuts): run the recipe's main on samples of a file, and record gradients and weights.

    python tools/parity/policy_half.py SPEC.json   # the recipe as committed, see tools/parity/original.py

The recipe needs no change. Before main starts, the functions that sample, draw weights and clip are
replaced, in every module that has imported them, by functions that call the real functions.
"""

import contextlib
import importlib.util
import inspect
import json
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

if __name__ == "__main__":
    # import from the checkout of this file, whatever the folder of the recipe
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
from torch import nn

import distributed.initial
import parallel
from distributed import refusals
from distributed.checks import bits_sum
from distributed.launcher import watch_launcher
from distributed.layout import AXES, local_tensor, named_tensors, whole_tensor
from flags.config import default_of, no_effect, unmet_needs
from rl import engines, policy, rollouts
from rl.sample import Sample, n_read

MOVED = 0.1  # standard deviation of the noise on the samplers' log-probabilities
# Initial weights are multiplied by this number: otherwise a new model gives all tokens nearly equal
# probabilities, and ratios, entropies and gradients are too much alike to show a mistake
SHARPER = 4.0
REFERENCE = 0.8  # the reference's weights are multiplied by this number, to differ from the policy


# ---------------------------------------------------------------- samples
def shorten(s: Sample, n: int) -> None:
    s.ids = s.ids[:n]
    s.logprobs = s.logprobs[:n]
    s.mask = s.mask[:n]


def prepare_samples(samples: list[Sample]) -> None:
    """Let every part of a loss show in these samples: unlike lengths, ratios beside 1 and some that
    clip, rewards that differ within a group, tokens of a tool. The task's own stay where they do
    that."""
    rng = random.Random("check_parity")
    if len({len(s.ids) for s in samples}) <= len(samples) // 3:
        for number, s in enumerate(samples):
            shorten(s, rng.randint(min(2, len(s.ids)), len(s.ids)))
            s.truncated = number % 4 == 0
    # an odd length has padding where tp and cp cut it, and none on one process
    longest = max(n_read(s) for s in samples)
    for s in samples:
        if n_read(s) == longest and longest % 2 == 0 and len(s.ids) > 1:
            shorten(s, len(s.ids) - 1)
    for s in samples:
        for t in range(len(s.ids)):
            moved = rng.gauss(0, MOVED)
            if t % 7 == 3:  # some ratios clip
                moved *= 4
            s.logprobs[t] += moved
    groups = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s)
    for number, group in groups.items():
        # the last one may keep equal rewards, and has no gradient then
        if number < len(groups) - 1 and len({s.reward for s in group}) == 1:
            for s in group:
                s.reward = round(rng.random(), 2)
    if all(all(s.mask) for s in samples):
        for s in samples[::3]:
            for t in range(1, min(3, len(s.mask))):
                s.mask[t] = 0.0


class GivenSamples:
    """An engine for grpo.py's loop: every step gets the samples of a file. The base cut, on one
    process, finds no file, so it draws the samples and writes the file."""

    def __init__(self, file: str, trainer, env, text, cursor: int, bridge):
        self.file = file
        self.trainer = trainer
        if not os.path.exists(file):
            engine = rollouts.InPlace(trainer, cursor, trainer.cfg, env, text, trainer.layout)
            batch = engine.submit()()
            prepare_samples(batch["samples"])
            Path(f"{file}.new").write_bytes(pickle.dumps(batch))
            os.rename(f"{file}.new", file)

    def submit(self):
        batch = pickle.loads(Path(self.file).read_bytes())
        batch["version"] = self.trainer.policy_version
        return lambda: batch

    def close(self):
        pass


# ---------------------------------------------------------------- records
def modules() -> list[ModuleType]:
    """All loaded modules."""
    return [module for module in sys.modules.values() if isinstance(module, ModuleType)]


def replace_everywhere(real: Callable, stand_in: Callable) -> None:
    """Replace the function `real` by stand_in in every module, under any name."""
    for module in modules():
        names = [name for name, value in vars(module).items() if value is real]
        for name in names:
            setattr(module, name, stand_in)


def trainer_classes() -> list[type]:
    """Every class with an optim_step of its own: grpo.Trainer, and the trainers of forks."""
    found = {}
    for module in modules():
        for value in list(vars(module).values()):
            if isinstance(value, type) and "optim_step" in vars(value):
                found[id(value)] = value
    return list(found.values())


def record_updates(folder: str) -> None:
    """From now on each call of clip_grad_norm writes FOLDER/<call>-<rank>.pt: gradients and weights,
    whole, on the first rank of each pipeline stage; their divisor, the lengths of the samples, and
    on every rank a checksum of the weights."""
    real = parallel.clip_grad_norm
    about = {"calls": 0, "denominator": 1.0, "lengths": []}

    def watch(trainer_class):
        optim_step = trainer_class.optim_step
        train_on = trainer_class.train_on

        @wraps(optim_step)
        def step(trainer, *args, **kwargs):
            about["denominator"] = 1.0
            if hasattr(trainer, "denominator"):
                about["denominator"] = max(float(trainer.denominator), 1.0)
            return optim_step(trainer, *args, **kwargs)

        @wraps(train_on)
        def train(trainer, samples, *args, **kwargs):
            about["lengths"] = [n_read(s) for s in samples]
            return train_on(trainer, samples, *args, **kwargs)

        trainer_class.optim_step = step
        trainer_class.train_on = train

    @wraps(real)
    def record_and_clip(*args, **kwargs):
        given = inspect.signature(real).bind(*args, **kwargs).arguments
        layout = given["layout"]
        found = dict(gradient={}, weight={}, sums={}, **about)
        for stage in given["stages"]:
            for fqn, p in named_tensors(stage).items():
                if not isinstance(p, nn.Parameter) or not p.requires_grad:
                    continue
                weight = whole_tensor(p).detach()
                found["sums"][fqn] = bits_sum(weight)
                found["weight"][fqn] = weight.cpu().clone()
                if p.grad is not None:
                    found["gradient"][fqn] = whole_tensor(p.grad).detach().cpu().clone()
        if layout.rank % (layout.world_size // layout.pp):
            found |= dict(gradient={}, weight={})
        torch.save(found, os.path.join(folder, f"{about['calls']}-{layout.rank}.pt"))
        about["calls"] += 1
        return real(*args, **kwargs)

    os.makedirs(folder, exist_ok=True)
    for trainer_class in trainer_classes():
        watch(trainer_class)
    replace_everywhere(real, record_and_clip)


def replace_beginnings(typed: Any, samples: str) -> None:
    """Replace the functions of a start: sharper weights, another reference, samples of a file. And a
    flag of the command line that only this cut makes ineffective is not refused. typed: the flags of
    the command line."""
    init_weights = parallel.init_weights
    keep_reference = policy.keep_reference
    check_layout = refusals.check_layout

    @torch.no_grad()
    def draw_sharper(stage, *args, **kwargs):
        init_weights(stage, *args, **kwargs)
        for p in stage.parameters():
            if p.dim() > 1:
                local_tensor(p.data).mul_(SHARPER)

    @torch.no_grad()
    def keep_another(trainer, *args, **kwargs):
        keep_reference(trainer, *args, **kwargs)
        for p in trainer.reference.parameters():
            local_tensor(p.data).mul_(REFERENCE)

    def check(cfg, model_config, **given):
        degrees = {axis: max(getattr(typed, axis), 1) for axis in AXES}
        on_cuda = refusals.runs_on_cuda(typed.device)
        facts = refusals.collect_facts(typed, model_config, degrees, on_cuda)
        refusals.refuse([(True, text) for text in no_effect(typed, facts)])
        while True:  # a default may make another flag ineffective
            degrees = {axis: getattr(cfg, axis) for axis in AXES}
            unmet = unmet_needs(cfg, refusals.collect_facts(cfg, model_config, degrees, False))
            if not unmet:
                return check_layout(cfg, model_config, **given)
            for field in fields(cfg):
                if field.name in unmet:
                    setattr(cfg, field.name, default_of(field))

    # a weight of 0 hides gradients: LoRA's B at 0 makes the gradient of A 0
    distributed.initial.ZERO = 0.01
    replace_everywhere(init_weights, draw_sharper)
    replace_everywhere(keep_reference, keep_another)
    replace_everywhere(check_layout, check)
    replace_everywhere(engines.find_server, lambda cfg: None)
    replace_everywhere(engines.open_engine, lambda *task: GivenSamples(samples, *task))


# ---------------------------------------------------------------- a rank
def say_error(error: BaseException, file: str) -> int:
    """Write the error's one line to the file, and return the exit status: 2 for a refusal, before
    the processes are connected, 1 for a failure."""
    refused = isinstance(error, ValueError) and not dist.is_initialized()
    text = " ".join(str(error).split())
    if not refused:
        traceback.print_exception(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {text} ({os.path.basename(last.filename)}:{last.lineno})"
    Path(file).write_text(text)
    return 2 if refused else 1


def run_rank(
    main: FunctionType, cfg: Any, typed: Any, samples: str, rank: int, ranks: int, port: int
) -> None:
    """Run main(cfg) as one rank of a cut, and end this process. Output goes to <out>-<rank>.txt, the
    line of an error to <out>-<rank>.error."""
    status = 1
    try:
        with open(f"{cfg.out}-{rank}.txt", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if ranks > 1:
            os.environ |= dict(
                RANK=str(rank),
                WORLD_SIZE=str(ranks),
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        watch_launcher()
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        replace_beginnings(typed, samples)
        record_updates(f"{cfg.out}_record")
        status = main(cfg) or 0
    except BaseException as error:
        status = say_error(error, f"{cfg.out}-{rank}.error")
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def not_a_choice(Config: type, name: str, value: Any) -> bool:
    """Whether a flag has named choices, and this is none of them: a loss that only the edit has."""
    kind = get_type_hints(Config)[name]
    return get_origin(kind) is Literal and value not in get_args(kind)


def main() -> None:
    """Run the recipe as committed, on the samples that the edited recipe has drawn."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.argv = [spec["recipe"]]
    about = importlib.util.spec_from_file_location("original_recipe", spec["recipe"])
    recipe = importlib.util.module_from_spec(about)
    sys.modules["original_recipe"] = recipe
    about.loader.exec_module(recipe)
    known = {field.name for field in fields(recipe.Config)}
    given = {name: x for name, x in spec["given"].items() if name in known}
    flags = {name: x for name, x in spec["flags"].items() if name in known}
    for name, value in (given | flags).items():
        if not_a_choice(recipe.Config, name, value):
            error = f"it has no --{name} {value} to compare with"
            Path(f"{flags['out']}-0.error").write_text(error)
            sys.exit(1)
    typed = recipe.Config(**given)
    cfg = recipe.Config(**given | flags)
    run_rank(recipe.main, cfg, typed, spec["samples"], 0, 1, 0)


if __name__ == "__main__":
    main()
