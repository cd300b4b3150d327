"""The engines of grpo.py: an engine samples the prompts of a step.

    wait = engine.submit()  # start a batch with the current policy; its prompts follow those of the previous batch
    batch = wait()          # the finished batch: {"samples": [...], "cursor": of the next prompts, "version": of the policy}
    samples = engine.evaluate(tasks, group_size, temperature)  # of (name, prompt) pairs, with rewards, by the current policy
    engine.close()          # at the end of the run, after a wait() for every submit()

The training loop makes no other calls. InPlace (rl/rollouts.py) samples on the trainer's ranks with the trainer's weights;
Generators, below, sends the weights to ranks for sampling only (--gen_ranks), each with a whole model; HTTPEngine
(rl/http_engine.py) sends the weights to a server.
"""
import os
import pickle
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.agree import on_rank_0, reason
from distributed.launch import StopSignal, agree_on_attempt, own_gpu
from distributed.layout import Layout, dtype_of_compute, whole_tensor
from distributed.refusals import runs_on_cuda
from rl.http_engine import HTTPEngine
from rl.rollouts import InPlace, make_batch, patient_group
from sft.lora import add_adapters, is_adapter, lora_names

END = -1  # in place of a cursor: leave


def open_engine(trainer, env, text, cursor: int, bridge):
    """The engine for these flags, on a trainer's rank. cursor: number of the first prompt without a batch. bridge: to the
    generators, on rank 0."""
    cfg, layout = trainer.cfg, trainer.layout
    if cfg.engine:
        return HTTPEngine(trainer, env, text, cursor)
    in_place = InPlace(trainer, cursor, cfg, env, text, layout)
    return Generators(trainer, in_place, bridge) if cfg.gen_ranks else in_place


class Ahead:
    """The batches of the next steps, the oldest first, finished or in flight: for each a function that waits for the batch."""

    def __init__(self, engine, ready: list[dict]):
        """ready: batches of a checkpoint."""
        self.engine, self.waits = engine, deque(partial(dict, batch) for batch in ready)

    def fill(self, n: int):
        """Submit until there are n batches; the current policy samples the new ones."""
        while len(self.waits) < n:
            self.waits.append(cache(self.engine.submit()))  # cache: wait once, although all() and take() both ask

    def take(self):
        """Yield the batch of this step; sample a batch now if none was submitted before."""
        self.fill(1)
        yield self.waits.popleft()()

    def all(self) -> list[dict]:
        """Wait for all batches in flight; a checkpoint saves them."""
        return [wait() for wait in self.waits]


def staleness(batch: dict, policy_version: int, cfg) -> dict:
    """Age of a batch in policy versions. Raises RuntimeError."""
    age = policy_version - batch["version"]
    if age > cfg.async_steps * cfg.minibatches:
        raise RuntimeError(f"the samples are {age} policy versions old, more than --async_steps {cfg.async_steps} x "
                           f"--minibatches {cfg.minibatches}: the engine has mixed up its batches")
    return {"staleness": age}


# ---------------------------------------------------------------- --gen_ranks
def list_weights(model, compute_dtype: torch.dtype, again=False) -> list[tuple[Tensor, torch.dtype]]:
    """All parameters and buffers, sorted by name, with the dtype of each tensor in the trainer's forward: FSDP casts all
    parameters and no buffers. A generator with other dtypes would compute other numbers: with an expert's selection bias in
    bf16, for instance, tokens would go to other experts. again: only tensors that training changes; with LoRA, the adapters."""
    found = {fqn: (p, compute_dtype) for fqn, p in model.named_parameters()} | {
        fqn: (b, b.dtype) for fqn, b in model.named_buffers()}
    names = sorted(found)
    if again and any(map(is_adapter, names)):
        names = filter(is_adapter, names)
    return [found[fqn] for fqn in names]


@torch.no_grad()
def pack_weights(tensors: list[tuple[Tensor, torch.dtype]], keep: bool) -> list[Tensor]:
    """Copy the tensors of list_weights() to the host. All trainer ranks call this function, because gathering a tensor is
    collective; ranks without `keep` return nothing."""
    gathered = ((whole_tensor(t), dtype) for t, dtype in tensors)  # one after the other
    # page-locked, so that the courier copies to the device without the CPU
    return [torch.empty(t.shape, dtype=dtype, pin_memory=t.is_cuda).copy_(t) for t, dtype in gathered if keep]


class Bridge(NamedTuple):
    """Connection of trainer rank 0 with all generators; the trainer has rank 0 in both groups."""

    store: dist.Store  # of this attempt of torchrun
    talk: dist.ProcessGroup  # gloo: headers, batches
    weights: dist.ProcessGroup  # NCCL, from GPU to GPU; without GPUs the same as `talk`
    device: torch.device

    def broadcast(self, weight: Tensor):
        """Broadcast a tensor from rank 0, where the tensor is on the host. Generators receive into their tensor."""
        self.weights.broadcast(weight.to(self.device, non_blocking=True), 0).wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self):
        if self.weights is not self.talk:
            self.weights.shutdown()


def open_bridge(cfg, rank: int, device: torch.device) -> Bridge:
    """Trainers and generators are two worlds for torch.distributed, each with ranks from 0 on, so the groups between both
    worlds are made by hand. rank: in these groups. All meet here at the start, so that a missing one is noticed within
    --init_timeout_s; a batch may take --rollout_timeout_s."""
    env = os.environ
    timeout = timedelta(seconds=cfg.rollout_timeout_s)  # one side waits while the other does its part of a step
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), timeout=timedelta(seconds=cfg.init_timeout_s))
    store = dist.PrefixStore("rollouts", store)
    store = dist.PrefixStore(agree_on_attempt(store, Layout(dp_shard=cfg.gen_ranks + 1, rank=rank), cfg.init_timeout_s), store)
    talk = weights = dist.ProcessGroupGloo(dist.PrefixStore("bridge", store), rank, cfg.gen_ranks + 1, timeout)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        weights = dist.ProcessGroupNCCL(dist.PrefixStore("weights", store), rank, cfg.gen_ranks + 1, options)
    return Bridge(store, talk, weights, device)


def use_own_stream(device: torch.device):
    """For the courier's thread: waiting for copies must not wait for the trainer's kernels."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())


def fetch_batch(bridge: Bridge, cursor: int, version: int, weights: list[Tensor]) -> dict:
    """The generators' batch by these weights, on trainer rank 0. cursor: of the first batch; the generators know the next."""
    try:
        bridge.talk.broadcast(torch.tensor((cursor, version)), 0).wait()
        for weight in weights:
            bridge.broadcast(weight)
        weights.clear()
        size = torch.zeros(1, dtype=torch.long)
        bridge.talk.recv([size], 1, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        bridge.talk.recv([data], 1, 0).wait()
    except Exception as error:
        raise ValueError(f"--gen_ranks {bridge.talk.size() - 1}: no samples came from them: {reason(error)}") from None
    batch = pickle.loads(data.numpy().tobytes())  # from our own generators, over our own connection
    if "error" in batch:
        raise ValueError(batch["error"])
    return batch


class Generators:
    """The engine on a trainer's rank. submit() gives the weights to the courier, a thread of rank 0, and returns while the
    generators sample. bridge: None except on trainer rank 0."""

    def __init__(self, trainer, in_place, bridge: Bridge | None):
        self.trainer, self.bridge, self.cursor, self.again = trainer, bridge, in_place.cursor, False
        self.evaluate = in_place.evaluate  # the trainer's ranks have the current weights
        self.courier = ThreadPoolExecutor(1, "courier", use_own_stream, (trainer.layout.device,))
        self.group = patient_group(dist.group.WORLD, trainer.cfg.rollout_timeout_s)  # the generators may need long

    def submit(self):
        tensors, batch = list_weights(self.trainer.model, self.trainer.layout.compute_dtype, self.again), None
        sent, self.again = pack_weights(tensors, keep=self.bridge is not None), True
        if self.bridge is not None:
            batch = self.courier.submit(fetch_batch, self.bridge, self.cursor, self.trainer.policy_version, sent)
        return lambda: on_rank_0(lambda: batch.result(), self.group)

    def close(self):
        self.courier.shutdown()
        if self.bridge is not None:
            self.bridge.talk.broadcast(torch.tensor((END, 0)), 0).wait()  # the generators may go
            self.bridge.close()


def generate_forever(cfg, env, text, Model, model_config, n_trainers: int):
    """Run a generator rank: weights in, samples out, until END.

    A signal does not end this rank (StopSignal only records the signal): the trainers need the samples to finish their step,
    and then send END. If the trainers die, the connection breaks and this rank fails.
    """
    rank, n = int(os.environ["RANK"]) - n_trainers, cfg.gen_ranks
    on_cuda = runs_on_cuda(cfg.device)
    device = own_gpu() if on_cuda else torch.device("cpu")
    layout = Layout(dp_shard=n, global_batch_size=n, device=device, rank=rank)  # whole models, different prompts
    bridge = open_bridge(cfg, rank + 1, device)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", bridge.store), rank=rank, world_size=n)
    dist.barrier()  # connects the pairs of the barriers in disconnect(), when trainer rank 0 and its store may be gone
    StopSignal()  # the trainers need samples to finish their step
    dtype = dtype_of_compute(cfg, on_cuda)
    with torch.device("meta"):  # the first weights come before the first rollout
        model = Model(model_config)
        if cfg.lora_rank:
            add_adapters(model, lora_names(model, cfg.lora_on), cfg.lora_rank, cfg.lora_alpha)
        for t, as_multiplied in list_weights(model, dtype):
            t.data = t.data.to(as_multiplied)
    model.to_empty(device=device)
    model.unknown_ids = text.unknown_ids(model_config.vocab_size, device)
    batch = {}
    while "error" not in batch:
        bridge.talk.broadcast(header := torch.zeros(2, dtype=torch.long), 0).wait()
        cursor, version = header.tolist()
        if cursor == END:
            return bridge.close()
        for weight, _ in list_weights(model, dtype, again=len(batch) > 0):
            bridge.broadcast(weight.data)
        try:
            batch = make_batch(cfg, env, text, layout, model, batch.get("cursor", cursor), version)
        except ValueError as error:  # the same on all generators; the trainers end the run
            batch = {"error": str(error)}
        if rank == 0:
            data = torch.frombuffer(bytearray(pickle.dumps(batch)), dtype=torch.uint8)
            bridge.talk.send([torch.tensor([len(data)])], 0, 0).wait()
            bridge.talk.send([data], 0, 0).wait()
