"""Rollouts for grpo.py: from tasks to samples with rewards, on the ranks chosen by rl/engines.py."""

import functools
import hashlib
import json
import os
import random
import time
import zlib
from array import array
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from corpus.tokenizer import ChatConfig
from distributed.agree import gather, on_rank_0
from distributed.layout import Layout, reshard
from flags.files import read_json
from rl.answers import opened_by
from rl.datasets import DatasetConfig, Text
from rl.decoding import draw_noise, rollout
from rl.environments import Turns, draw_task
from rl.rewards import Paid, Payments, RewardConfig
from rl.sample import Sample

# values per token of a sample: the kinds of their arrays
NUMBERS = {"prompt": "i", "ids": "i", "logprobs": "f", "mask": "f"}
# in a step folder; a start reads no file of this name before its tensors
BATCHES = "__batches.json"


def others(hooks: OrderedDict) -> OrderedDict:
    """Without the hooks of FSDP and of distributed/cast.py. Those of tensor parallelism stay."""
    kept = OrderedDict()
    for number, hook in hooks.items():
        is_method = hasattr(hook, "__self__")
        if not is_method or type(hook.__self__).__name__ not in ("FSDPState", "CastUnit"):
            kept[number] = hook
    return kept


@contextmanager
def whole_weights(model) -> Iterator[None]:
    """Gather the whole weights on each rank, in the dtype of training's matmuls, so that decoding
    needs no collectives. Blocks run uncompiled inside, because the shapes of rollouts change at
    almost every token; rl/replay.py compiles some parts again. The hooks that gather and free
    weights around each forward are off inside:
    at every token they would keep the host from launching kernels."""
    # FSDP's, or those of distributed/cast.py
    units = [module for module in model.modules() if hasattr(module, "reshard")]
    hooks = [(unit._forward_pre_hooks, unit._forward_hooks) for unit in units]
    for unit in units:
        unit.unshard()
        unit._forward_pre_hooks = others(unit._forward_pre_hooks)
        unit._forward_hooks = others(unit._forward_hooks)
    with torch.compiler.set_stance("force_eager"):
        yield
    for unit, (before, after) in zip(units, hooks):
        unit._forward_pre_hooks = before
        unit._forward_hooks = after
    reshard(model)


def try_sampling(model: nn.Module, layout) -> None:
    """Sample two tokens before anything is trained, whatever the weights: kernels that this GPU
    lacks end the run here. Raises ValueError."""
    mesh = None
    if layout.tp > 1:
        mesh = layout.mesh["tp"]
    try:
        with whole_weights(model):
            rollout(model, [[0]], torch.zeros(1, 1, 2), 0.0, [], max_len=3, tp_mesh=mesh)
    except RuntimeError as error:
        raise ValueError(
            f"this GPU cannot sample ({str(error).splitlines()[0]}): use --engine"
        ) from error


@functools.cache
def patient_group(world: dist.ProcessGroup | None, timeout_s: int) -> dist.ProcessGroup:
    """A group of all processes of `world` with a long timeout, for waiting on other ranks' samples,
    tools and rewards. A slow tool is no failure; in training, however, a late rank hangs, and
    --train_timeout_s is short."""
    return dist.new_group(
        backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="rollouts"
    )


def lockstep(layout: Layout, timeout_s: int, tool: Any = None) -> Callable | None:
    """The `agree` of rollout(). With experts on several ranks every forward is collective, so all
    ranks must run equally many
    forwards: they refill and end together. Otherwise a rank samples without waiting for others.

    Under tp every forward is collective too, but all ranks have the same samples and act alike.
    Only a slow tool may delay a rank; then the others wait in this patient group, and not in a
    collective of the forward."""
    if layout.ep == 1 and not (layout.tp > 1 and tool):
        return None
    group = patient_group(dist.group.WORLD, timeout_s)

    def agree(*numbers):
        numbers = torch.tensor([int(number) for number in numbers])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        return numbers.tolist()

    return agree


def draw_samples(
    cfg: Any,
    env: Any,
    text: Text,
    layout,
    model: nn.Module,
    tasks: list[tuple],
    prompts: list[list[int]],
    group_size: int,
    temperature: float,
    ended: Callable[..., None] | None,
) -> tuple:
    """(2) on this rank, with whole weights: (group_size samples of each of this rank's prompts,
    failures). ended: see rollout()."""
    noise = draw_noise([f"{cfg.seed}/{name}" for name, *_ in tasks], group_size, cfg.max_new_tokens)
    of_samples = []
    for _, task, _ in tasks:
        of_samples += [task] * group_size
    tp_mesh = None
    if layout.tp > 1:
        tp_mesh = layout.mesh["tp"]
    turns = Turns(env, text, of_samples, cfg.reward_threads, cfg.reward_timeout_s)
    samples = rollout(
        model,
        prompts,
        noise,
        temperature,
        text.ends,
        max_len=cfg.seq_len,
        rows=cfg.rollout_rows,
        reply=turns.reply,
        ended=ended,
        tp_mesh=tp_mesh,
        batch_invariant=cfg.batch_invariant,
        compiled=cfg.compile,
        agree=lockstep(layout, cfg.rollout_timeout_s, turns.reply),
    )
    return turns.close(samples), turns.failed


def sample_groups(
    cfg, env, text, layout, model, tasks: list[tuple], group_size, temperature, draw=draw_samples
) -> list:
    """(2), (3): group_size samples for each (name, task, answer), with rewards; the whole list on
    every rank, in the tasks' order.

    draw: function that samples, with this rank's model or another engine. Raises ValueError on all
    ranks if a reward or a tool
    fails on any rank.
    """
    # before sampling, because all ranks must create the group at the same place
    group = None
    if layout.world_size > 1:
        group = patient_group(dist.group.WORLD, cfg.rollout_timeout_s)
    mine = range(len(tasks))[layout.data_rank :: layout.data_ranks]
    prompts = [text.prompt(tasks[i][1]) for i in mine]
    # (3) rewards: the environment sees text. Training uses the sampled ids, because encoding the
    # text may give other ids.
    # samples that are paid together, when the last of them has ended
    size = 1
    if hasattr(env, "group_reward"):
        size = group_size
    pays = hasattr(env, "reward") or hasattr(env, "group_reward")
    texts = {}
    cut = {}
    n_payments = 0
    if pays:
        n_payments = len(mine) * group_size // size
    payments = Payments(env, n_payments, cfg)

    def ended(j: int, ids: list[int], truncated: bool) -> None:
        texts[j] = text.decode(ids)
        cut[j] = truncated
        together = range(j - j % size, j - j % size + size)
        if pays and all(i in texts for i in together):
            ids = prompts[j // group_size]
            name = tasks[mine[j // group_size]][1]
            said = [texts[i] for i in together]
            ends_early = [cut[i] for i in together]
            payments.add(j // size, (name, said, ends_early, opened_by(text, ids)))

    # A tool, a step and a reward are never called at once beyond --reward_threads: with tools and
    # steps, rewards come after sampling.
    beside = ended
    if hasattr(env, "tool") or hasattr(env, "step"):
        beside = later
    samples, failed = draw(
        cfg,
        env,
        text,
        layout,
        model,
        [tasks[i] for i in mine],
        prompts,
        group_size,
        temperature,
        beside,
    )
    for j, s in enumerate(samples):
        if j not in texts:
            ended(j, s.ids, s.truncated)
        s.group = mine[j // group_size]
        s.prompt = prompts[j // group_size]
        s.text = texts[j]
        _, s.task, s.answer = tasks[s.group]
    if pays:
        paid = payments.wait()
    else:
        paid = [Paid(s.earned) for s in samples]
    for j, (s, (reward, failure, parts)) in enumerate(zip(samples, paid)):
        name = tasks[s.group][0]
        s.failed = failure
        s.reward = reward
        if failure:
            s.reward = cfg.failed_reward
        s.parts = parts
        if failure and cfg.failed_reward is None:
            failed.append(failure)
        if cfg.control == "random" and not name.startswith("eval/"):
            s.reward = float(random.Random(f"{cfg.seed}/{name}/{j % group_size}").random() < 0.5)
    reasons = sum(gather(failed, group), [])
    if reasons:
        raise ValueError(f"--env {cfg.env}: {reasons[0]}")
    # sorted() is stable, so samples keep their order within a group
    samples = sorted(gather_samples(samples, layout, group), key=lambda s: s.group)
    unpaid = [s.failed for s in samples if s.failed]
    if unpaid and layout.rank == 0:
        print(
            f"{len(unpaid)} of {len(samples)} rewards failed and count as --failed_reward "
            f"{cfg.failed_reward:g}, the "
            f"first one: {unpaid[0]}",
            flush=True,
        )
    return samples


def later(index: int, ids: list[int], truncated: bool) -> None:
    """In place of `ended`, where samples are paid when all have ended."""


def gather_samples(
    samples: list[Sample], layout: Layout, group: dist.ProcessGroup | None
) -> list[Sample]:
    """The samples of all data ranks, in arrays, on every rank. cp and tp ranks share a model, and
    must have sampled the same: all send a hash of their ids, and the first of them sends the
    samples. Raises RuntimeError."""
    samples = [*map(as_arrays, samples)]
    copies = layout.cp * layout.tp
    hashed = zlib.crc32(b" ".join(s.ids for s in samples))
    if layout.rank % copies:
        samples = []
    everyone = gather((hashed, samples), group)
    for rank, (theirs, _) in enumerate(everyone):
        if theirs != everyone[rank - rank % copies][0]:
            raise RuntimeError(
                f"ranks {rank - rank % copies} and {rank} share one model but sampled different "
                "tokens"
            )
    return sum((of_rank for _, of_rank in everyone), [])


def make_batch(
    cfg: Any,
    env: Any,
    text: Text,
    layout: Layout,
    model: nn.Module,
    cursor: int,
    version: int,
    draw: Callable[..., tuple] = draw_samples,
) -> dict:
    """(1)-(3) of a step. --dynamic_sampling: in up to so many further rounds, groups of new prompts
    replace groups of equal rewards, because equal rewards have no gradient. A round draws as many
    prompts as are missing, divided by the share of prompts that were useful so far."""
    began = time.time()
    size = cfg.prompts_per_step
    groups = []
    too_long = []

    def fits(prompt) -> bool:
        if text.fits(prompt, cfg.seq_len):
            return True
        too_long.append(prompt)
        return False

    n = size
    for _ in range(1 + cfg.dynamic_sampling):
        # (1) prompts
        split = f"train/{cfg.seed}"
        tasks = []
        for i in range(cursor, cursor + n):
            tasks.append((f"{split}/{i}", *draw_task(env, split, i, fits)))
        samples = sample_groups(
            cfg, env, text, layout, model, tasks, cfg.group_size, cfg.temperature, draw
        )
        cursor += n
        groups += [samples[i : i + cfg.group_size] for i in range(0, len(samples), cfg.group_size)]
        groups.sort(key=has_equal_rewards)  # groups with a gradient first, else as drawn
        useful = sum(not has_equal_rewards(group) for group in groups)
        if useful >= size:
            break
        n = min(size, -(-(size - useful) * len(groups) // max(useful, 1)))
    return dict(
        samples=sum(groups[:size], []),
        cursor=cursor,
        version=version,
        drawn=len(groups),
        too_long=len(too_long),
        began=began,
        ended=time.time(),
    )


def has_equal_rewards(group: list[Sample]) -> bool:
    """Whether a group teaches nothing: all its advantages are 0."""
    return len({s.reward for s in group}) == 1


def batch_flags(cfg: Any) -> dict:
    """All flags and files that determine a batch, apart from the weights. A checkpoint saves them
    with its batches."""
    names = (
        "env",
        "env_data",
        "seed",
        "prompts_per_step",
        "group_size",
        "minibatches",
        "max_new_tokens",
        "seq_len",
        "temperature",
        "dynamic_sampling",
        "control",
        "async_steps",
    )
    flags = {f"--{name}": getattr(cfg, name) for name in names}
    for group in (DatasetConfig, RewardConfig, ChatConfig):
        for field in fields(group):
            flags[f"--{field.name}"] = getattr(cfg, field.name)
    for name in ("env", "env_data", "eval_data", "reward"):
        path = getattr(cfg, name)
        if os.path.isfile(path):
            sha256 = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            flags[f"the content of --{name}"] = sha256[:8]
    return flags


def as_arrays(sample: Sample) -> Sample:
    """With an array in place of each list of numbers, 12 bytes per token in place of 100; or of its
    text in a checkpoint."""
    arrays = {}
    for name, kind in NUMBERS.items():
        numbers = getattr(sample, name)
        if isinstance(numbers, str):
            numbers = b64decode(numbers)
        arrays[name] = array(kind, numbers)
    return replace(sample, **arrays)


def save_step(
    checkpoints, ahead, layout: Layout, cfg: Any, step: int, state: dict, last: bool
) -> None:
    """Save the step of a run, and beside it the batches that are sampled already: a continued run
    trains on them. checkpoints: checkpoint.Checkpoints; ahead: rl.engines.Ahead."""
    batches = ahead.all()
    state["ahead"] = len(batches)
    files = {}
    if layout.rank == 0:
        files = pack_batches(batches, cfg)
    weights_only = cfg.last_save_model_only and step == cfg.steps
    checkpoints.save(step, state, last, weights_only, files)


def pack_batches(batches: list[dict], cfg: Any) -> dict[str, bytes]:
    """The file of a checkpoint with the batches that were sampled ahead: JSON, with each array as
    base64."""
    if not batches:
        return {}
    content = {"made_with": batch_flags(cfg), "batch": batches}
    return {BATCHES: json.dumps(content, default=as_json).encode()}


def as_json(value: Sample | array) -> dict | str:
    if isinstance(value, Sample):
        return vars(value)
    return b64encode(value).decode()


def read_sample(values: dict, folder: str) -> Sample:
    """A sample of a checkpoint's batches. Raises ValueError if a Sample has other fields now, or had
    others in the run that saved it."""
    try:
        return as_arrays(Sample(**values))
    except TypeError as error:
        raise ValueError(
            f"{folder}/{BATCHES}: {error}; rl/sample.py has other fields than in the run that saved "
            "it: give it the fields of then, or begin again with --out NEW"
        ) from None


def reuse_batches(state: dict, folder: str, cfg: Any, rank0: bool) -> list[dict]:
    """The batches of a step folder if this run's flags would sample the same; else none, and the
    prompts are sampled again."""
    saved = {"batch": [], "made_with": {}}
    if state.get("ahead"):
        saved = read_json(folder, BATCHES)
    for batch in saved["batch"]:
        batch["samples"] = [read_sample(values, folder) for values in batch["samples"]]
    old = saved["made_with"]
    new = batch_flags(cfg)
    differ = []
    for name in new | old:
        if old.get(name) != new.get(name):
            differ.append(f"{name} {old.get(name)} -> {new.get(name)}")
    if saved["batch"] and differ and rank0:
        print(
            f"the batch in the checkpoint was made with other flags ({', '.join(differ)}): its "
            "prompts are sampled again"
        )
    if differ:
        return []
    return saved["batch"]


class InPlace:
    """The trainer's own ranks sample. submit() does all the work."""

    def __init__(self, trainer, cursor: int, *task):
        self.trainer = trainer
        self.cursor = cursor
        self.task = task

    def submit(self):
        with whole_weights(self.trainer.model):
            batch = make_batch(
                *self.task, self.trainer.model, self.cursor, self.trainer.policy_version
            )
        self.cursor = batch["cursor"]
        return lambda: batch

    def evaluate(self, tasks: list[tuple], group_size: int, temperature: float) -> list[Sample]:
        with whole_weights(self.trainer.model):
            return sample_groups(*self.task, self.trainer.model, tasks, group_size, temperature)

    def close(self):
        pass


def use_own_stream(device: torch.device) -> None:
    """For a thread that sends weights: waiting for copies must not wait for the trainer's kernels."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())


def nccl_group(store: dist.Store, rank: int, ranks: int, timeout_s: float):
    """A group beside those of torch.distributed. It connects with its first collective, for which
    rank 0 writes NCCL's unique id into the store, under "0"."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, ranks, options)


class Remote:
    """An engine that samples elsewhere, while the trainer trains. Its class adds

        weights()                  the current policy, for rank 0; all ranks call this method, once for each version
        run(weights, work, *args)  work(cfg, env, text, layout, model, *args) elsewhere, where these weights, if any, go first

    A thread of rank 0 calls run() for one thing after the other; all ranks get the results."""

    def __init__(self, trainer, cursor: int, patience_s: int, *of_thread):
        self.trainer = trainer
        self.cursor = cursor
        self.thread = ThreadPoolExecutor(1, *of_thread)
        self.sent = None  # the version of the last weights
        self.group = patient_group(dist.group.WORLD, patience_s)

    def submit(self):
        return self.in_thread(self.make, self.trainer.policy_version)

    def evaluate(self, *asked) -> list[Sample]:
        return self.in_thread(self.run, sample_groups, *asked)()

    def in_thread(self, call, *args):
        """Start call(weights, *args). Returns a function that waits for the result, on all ranks."""
        weights = None
        if self.sent != self.trainer.policy_version:
            weights = self.weights()
        self.sent = self.trainer.policy_version
        result = None
        if self.trainer.layout.rank == 0:
            result = self.thread.submit(call, weights, *args)
        return functools.partial(on_rank_0, lambda: result.result(), self.group)

    def make(self, weights, version: int) -> dict:
        batch = self.run(weights, make_batch, self.cursor, version)
        self.cursor = batch["cursor"]
        return batch
