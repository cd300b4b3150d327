"""The engines of grpo.py: an engine samples the prompts of a step.

    wait = engine.submit()  # start a batch with the current policy; its prompts follow those of the previous batch
    batch = wait()          # the finished batch: {"samples": [...], "cursor": of the next prompts, "version": of the policy}
    samples = engine.evaluate(tasks, group_size, temperature)  # of (name, prompt) pairs, with rewards, by the current policy
    engine.close()          # at the end of the run, after a wait() for every submit()

The training loop makes no other calls. InPlace (rl/rollouts.py) samples on the trainer's ranks with
the trainer's weights; Generators, below, sends the weights to ranks for sampling only
(--gen_ranks), each with a whole model; HTTPEngine (rl/http_engine.py) sends the weights to a
server. With the latter two a trainer needs no whole model, so --pp may split it.
"""

import os
import pickle
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.agree import reason
from distributed.launch import StopSignal, own_gpu
from distributed.launcher import agree_on_attempt
from distributed.layout import Layout, dtype_of_compute, n_experts_of
from distributed.refusals import runs_on_cuda
from flags.config import Need, flag
from lora.lora import LORA, add_adapters
from rl import http_engine
from rl.datasets import Text
from rl.policy import list_weights, pack_weights
from rl.rollouts import InPlace, Remote, nccl_group, try_sampling, use_own_stream
from storage.adapters import lora_names

# Needs of flags: see flags/config.py
SERVER = Need("without --engine", lambda c: c.engine)
IN_PLACE = Need(
    "with --engine: the server samples, and its kernels round as they do", lambda c: not c.engine
)


DENSE = Need(
    "with experts: they multiply as many rows as tokens chose them",
    lambda c: not n_experts_of(c),
)


@dataclass(kw_only=True)
class EngineConfig:
    rollout_rows: int = 512  # samples that one rank runs at once, or with --engine its server
    # sampling and training agree to the last bit (CPU, one thread, no tp)
    batch_invariant: bool = flag(False, DENSE, IN_PLACE)
    # vLLM or SGLang at this address samples, e.g. http://127.0.0.1:8000; "" = the processes of this
    # run do
    engine: str = ""
    # a folder, with the same path for the server; "" = <out>/engine; or nccl
    engine_weights: str = flag("", SERVER)
    # send adapters alone to vLLM, which has the weights of --init_from
    engine_adapters: bool = flag(False, LORA, SERVER)
    # vLLM draws by seeds of our own: the same samples again, but one kernel per sample
    engine_seed: bool = flag(False, SERVER)
    # the last ranks only sample, each with a whole model; 0 = all ranks sample, in place
    gen_ranks: int = flag(0, IN_PLACE)
    # a rank that waits longer for others' samples, tools or rewards ends the run
    rollout_timeout_s: int = 7200


def find_server(cfg: Any) -> None:
    """Check that the server of --engine can serve this run. Raises ValueError before anything is
    built."""
    if cfg.engine_weights == "nccl":
        from rl.nccl_engine import check_nccl

        check_nccl(cfg)
    http_engine.check_server(cfg)


def open_engine(trainer, env: Any, text: Text, cursor: int, bridge):
    """The engine for these flags, on a trainer's rank. cursor: number of the first prompt without a
    batch. bridge: to the generators, on rank 0."""
    cfg = trainer.cfg
    layout = trainer.layout
    if cfg.engine_weights == "nccl":
        from rl.nccl_engine import NCCLEngine

        return NCCLEngine(trainer, env, text, cursor)
    if cfg.engine:
        return http_engine.HTTPEngine(trainer, env, text, cursor)
    if cfg.gen_ranks:
        return Generators(trainer, cursor, bridge)
    return InPlace(trainer, cursor, cfg, env, text, layout)


class Ahead:
    """The batches of the next steps, the oldest first, finished or in flight: for each a function
    that waits for the batch."""

    def __init__(self, engine, ready: list[dict]):
        """ready: batches of a checkpoint."""
        self.engine = engine
        self.waits = deque(partial(dict, batch) for batch in ready)

    def fill(self, n: int):
        """Submit until there are n batches; the current policy samples the new ones."""
        while len(self.waits) < n:
            # cache: wait once, although all() and take() both ask
            self.waits.append(cache(self.engine.submit()))

    def take(self):
        """Yield the batch of this step; sample a batch now if none was submitted before."""
        self.fill(1)
        yield self.waits.popleft()()

    def all(self) -> list[dict]:
        """Wait for all batches in flight; a checkpoint saves them."""
        return [wait() for wait in self.waits]


def staleness(batch: dict, policy_version: int, cfg: Any) -> dict:
    """Age of a batch in policy versions. Raises RuntimeError."""
    age = policy_version - batch["version"]
    if age > cfg.async_steps * cfg.minibatches:
        raise RuntimeError(
            f"the samples are {age} policy versions old, more than --async_steps "
            f"{cfg.async_steps} x "
            f"--minibatches {cfg.minibatches}: the engine has mixed up its batches"
        )
    return {"staleness": age}


# ---------------------------------------------------------------- --gen_ranks
def ranks_that_train(gen_ranks: int) -> int:
    """All ranks but the last --gen_ranks. Raises ValueError if none is left."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size <= gen_ranks:
        raise ValueError(
            f"--gen_ranks {gen_ranks} must leave a process to train: {world_size} were started, "
            "use torchrun --nproc_per_node"
        )
    return world_size - gen_ranks


class Bridge(NamedTuple):
    """Connection of trainer rank 0 with all generators; the trainer has rank 0 in both groups."""

    store: dist.Store  # of this attempt of torchrun
    talk: dist.ProcessGroup  # gloo: headers, batches
    weights: dist.ProcessGroup  # NCCL, from GPU to GPU; without GPUs the same as `talk`
    device: torch.device

    def share(self, root: int, value=None):
        """Broadcast an object from this rank; returns the object on all ranks. It is from our own
        processes."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        self.talk.broadcast(size, root).wait()
        if self.talk.rank() != root:
            data = torch.empty(int(size), dtype=torch.uint8)
        self.talk.broadcast(data, root).wait()
        return pickle.loads(data.numpy().tobytes())

    def broadcast(self, weight: Tensor):
        """Broadcast a tensor from rank 0, where the tensor is on the host. Generators receive into
        their tensor."""
        self.weights.broadcast(weight.to(self.device, non_blocking=True), 0).wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self):
        if self.weights is not self.talk:
            self.weights.shutdown()


def open_bridge(cfg: Any, rank: int, device: torch.device) -> Bridge:
    """Trainers and generators are two worlds for torch.distributed, each with ranks from 0 on, so
    the groups between both worlds are made by hand. rank: in these groups. All meet here at the
    start, so that a missing one is noticed within --init_timeout_s; a batch may take
    --rollout_timeout_s."""
    env = os.environ
    # one side waits while the other does its part of a step
    timeout = timedelta(seconds=cfg.rollout_timeout_s)
    store = dist.TCPStore(
        env["MASTER_ADDR"], int(env["MASTER_PORT"]), timeout=timedelta(seconds=cfg.init_timeout_s)
    )
    store = dist.PrefixStore("rollouts", store)
    store = dist.PrefixStore(
        agree_on_attempt(store, Layout(dp_shard=cfg.gen_ranks + 1, rank=rank), cfg.init_timeout_s),
        store,
    )
    talk = weights = dist.ProcessGroupGloo(
        dist.PrefixStore("bridge", store), rank, cfg.gen_ranks + 1, timeout
    )
    if device.type == "cuda":
        weights = nccl_group(
            dist.PrefixStore("weights", store), rank, cfg.gen_ranks + 1, cfg.rollout_timeout_s
        )
    bridge = Bridge(store, talk, weights, device)
    # gloo connects two ranks when they first exchange something (allow_many_ranks), and only a
    # broken connection tells of a death. Connect now: before the first weights the trainers build
    # the model, load it and warm it up.
    bridge.share(0)
    bridge.share(1)
    return bridge


class Generators(Remote):
    """The engine on a trainer's rank. bridge: None except on rank 0, whose thread is the courier of
    weights and samples."""

    def __init__(self, trainer, cursor: int, bridge: Bridge | None):
        super().__init__(
            trainer,
            cursor,
            trainer.cfg.rollout_timeout_s,
            "courier",
            use_own_stream,
            (trainer.layout.device,),
        )
        self.bridge = bridge

    def weights(self) -> dict[str, Tensor]:
        """All tensors, from the second time on only those that training changes; with LoRA, the
        adapters."""
        cfg = self.trainer.cfg
        layout = self.trainer.layout
        found = list_weights(
            self.trainer.model, layout.compute_dtype, cfg.lora_rank > 0 and self.sent is not None
        )
        return pack_weights(found, layout, self.group)

    def run(self, weights: dict[str, Tensor] | None, work, *args):
        weights = weights or {}
        try:
            self.bridge.share(0, ([*weights], work, args))
            for weight in weights.values():
                self.bridge.broadcast(weight)
            weights.clear()
            answer = self.bridge.share(1)
        except Exception as error:
            raise ValueError(
                f"--gen_ranks {self.trainer.cfg.gen_ranks}: no samples came from them: "
                f"{reason(error)}"
            ) from None
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def close(self):
        self.thread.shutdown()
        if self.bridge:
            self.bridge.share(0)  # the generators may go
            self.bridge.close()


def generate_forever(
    cfg: Any, env: Any, text: Text, Model: type, model_config: Any, n_trainers: int
) -> None:
    """Run a generator rank: weights in, samples out, until the trainers ask for nothing more.

    A signal does not end this rank (StopSignal only records the signal): the trainers need the
    samples to finish their step. If the trainers die, the connection breaks and this rank fails.
    """
    rank = int(os.environ["RANK"]) - n_trainers
    n = cfg.gen_ranks
    on_cuda = runs_on_cuda(cfg.device)
    if on_cuda:
        device = own_gpu()
    else:
        device = torch.device("cpu")
    # whole models, different prompts
    layout = Layout(dp_shard=n, global_batch_size=n, device=device, rank=rank)
    bridge = open_bridge(cfg, rank + 1, device)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("world", bridge.store), rank=rank, world_size=n
    )
    # connects the pairs of the barriers in disconnect(), when trainer rank 0 and its store may be
    # gone
    dist.barrier()
    StopSignal()  # the trainers need samples to finish their step
    dtype = dtype_of_compute(cfg, on_cuda)
    with torch.device("meta"):  # the first weights come before the first rollout
        model = Model(model_config)
        if cfg.lora_rank:
            add_adapters(model, lora_names(model, cfg.lora_on), cfg.lora_rank, cfg.lora_alpha)
        for t, as_multiplied in list_weights(model, dtype).values():
            t.data = t.data.to(as_multiplied)
    model.to_empty(device=device)
    model.unknown_ids = text.unknown_ids(model_config.vocab_size, device)
    if on_cuda:
        try_sampling(model, layout)
    weights = list_weights(model, dtype)
    while asked := bridge.share(0):
        names, work, args = asked
        for fqn in names:
            bridge.broadcast(weights[fqn][0].data)
        try:
            # as in whole_weights(): only rl/replay.py compiles, for the graph of a token
            with torch.compiler.set_stance("force_eager"):
                answer = work(cfg, env, text, layout, model, *args)
        except ValueError as error:  # the same on all generators; the trainers end the run
            answer = error
        if rank != 0:
            answer = None
        bridge.share(1, answer)
        if isinstance(answer, ValueError):
            return
    bridge.close()
