"""--gen_ranks: ranks for sampling only, each with a whole model, and their connection with the training ranks."""
import os
import pickle
import queue
import threading
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distributed.agree import reason
from distributed.launch import StopSignal
from distributed.layout import Layout, dtype_of_compute
from distributed.refusals import runs_on_cuda
from rl.rollouts import make_batch, patient_group, unknown_ids
from sft.lora import add_adapters, is_adapter, lora_names

BUCKET_BYTES = 512 << 20  # of a message with weights, unless a single tensor is larger
END, GO_ON = -1, -2  # in place of a cursor: leave; continue after the previous batch


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


def plan_buckets(tensors: list[tuple[Tensor, torch.dtype]], max_bytes: int) -> list[tuple[torch.dtype, list[Tensor]]]:
    """Group the tensors into few messages, each of one dtype. A message has at most max_bytes, or is a single larger tensor."""
    buckets, filling = [], {}  # filling: dtype -> [bytes so far, tensors] of the last bucket with this dtype
    for t, dtype in tensors:
        size = t.numel() * dtype.itemsize
        if dtype not in filling or filling[dtype][0] + size > max_bytes:
            filling[dtype] = [0, []]
            buckets.append((dtype, filling[dtype][1]))
        filling[dtype][0] += size
        filling[dtype][1].append(t)
    return buckets


@torch.no_grad()
def pack_weights(tensors: list[tuple[Tensor, torch.dtype]], keep: bool, max_bytes=BUCKET_BYTES) -> list[Tensor]:
    """Copy the tensors of list_weights() into buckets on the host. All trainer ranks call this function, because gathering a
    tensor is collective; ranks without `keep` return nothing."""
    packed = []
    for dtype, group in plan_buckets(tensors, max_bytes):
        parts = []
        for t in group:
            whole = t.full_tensor() if isinstance(t, DTensor) else t  # a collective of the trainer's ranks
            if keep:
                parts.append(whole.flatten().to(dtype))
        if keep:
            bucket = torch.cat(parts)
            # page-locked, so that the courier copies to the device without the CPU
            packed.append(torch.empty(len(bucket), dtype=dtype, pin_memory=bucket.is_cuda).copy_(bucket))
    return packed


@torch.no_grad()
def unpack_weights(tensors: list[tuple[Tensor, torch.dtype]], receive, max_bytes=BUCKET_BYTES):
    """Fill the tensors of list_weights(). receive(bucket) fills a bucket with the next message."""
    for dtype, group in plan_buckets(tensors, max_bytes):
        sizes = [t.numel() for t in group]
        bucket = torch.empty(sum(sizes), dtype=dtype, device=group[0].device)
        receive(bucket)
        for t, part in zip(group, bucket.split(sizes)):
            t.data.view(-1).copy_(part)


class Bridge(NamedTuple):
    """Connection of trainer rank 0 with all generators; the trainer has rank 0 in both groups."""

    store: dist.Store  # of this attempt of torchrun
    talk: dist.ProcessGroup  # gloo: headers, batches
    weights: dist.ProcessGroup  # NCCL, from GPU to GPU; without GPUs the same as `talk`
    device: torch.device

    def broadcast(self, bucket: Tensor):
        """Broadcast a bucket from rank 0. On rank 0 the bucket is on the host, on generators on the device."""
        self.weights.broadcast(bucket.to(self.device, non_blocking=True), 0).wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self):
        if self.weights is not self.talk:
            self.weights.shutdown()


def open_bridge(cfg, n_trainers: int, device: torch.device) -> Bridge:
    """Trainers and generators are two worlds for torch.distributed, each with ranks from 0 on, so the groups between both
    worlds are made by hand."""
    env, rank = os.environ, max(0, int(os.environ["RANK"]) - n_trainers + 1)
    timeout = timedelta(seconds=cfg.rollout_timeout_s)  # one side waits while the other does its part of a step
    connecting = timedelta(seconds=cfg.init_timeout_s)
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), None, False, timeout=connecting)
    store = dist.PrefixStore(f"rollouts/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    talk = weights = dist.ProcessGroupGloo(dist.PrefixStore("bridge", store), rank, cfg.gen_ranks + 1, timeout)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        weights = dist.ProcessGroupNCCL(dist.PrefixStore("weights", store), rank, cfg.gen_ranks + 1, options)
    return Bridge(store, talk, weights, device)


def run_courier(bridge: Bridge, jobs: queue.SimpleQueue, batches: queue.SimpleQueue):
    """The courier, a thread on trainer rank 0: sends the weights of a job, receives the batch, takes the next job, all while
    the trainer trains. A job is a header (cursor, version) and buckets."""
    try:
        if bridge.device.type == "cuda":  # a stream of its own, to wait for copies and not for the trainer's kernels
            torch.cuda.set_device(bridge.device)
            torch.cuda.set_stream(torch.cuda.Stream())
        while True:
            header, buckets = jobs.get()
            bridge.talk.broadcast(torch.tensor(header), 0).wait()
            if header[0] == END:
                return bridge.close()
            for bucket in buckets:
                bridge.broadcast(bucket)
            del buckets
            size = torch.zeros(1, dtype=torch.long)
            bridge.talk.recv([size], 1, 0).wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            bridge.talk.recv([data], 1, 0).wait()
            batches.put(pickle.loads(data.numpy().tobytes()))  # from our own generators, over our own connection
    except Exception as error:
        batches.put({"error": f"--gen_ranks {bridge.talk.size() - 1}: no samples came from them: {reason(error)}"})


class Generators:
    """The engine on a trainer's rank, see rl/engines.py. submit() gives the weights to the courier and returns while the
    generators sample; collect() waits for their samples. bridge: None except on trainer rank 0."""

    def __init__(self, trainer, in_place, bridge: Bridge | None):
        self.trainer, self.bridge, self.again = trainer, bridge, False
        self.evaluate = in_place.evaluate  # the trainer's ranks have the current weights
        self.jobs, self.batches = queue.SimpleQueue(), queue.SimpleQueue()
        self.courier = threading.Thread(target=run_courier, args=(bridge, self.jobs, self.batches), daemon=True)
        if bridge is not None:
            self.courier.start()

    def submit(self, cursor: int | None):
        tensors = list_weights(self.trainer.model, self.trainer.layout.compute_dtype, self.again)
        buckets = pack_weights(tensors, keep=self.bridge is not None)
        if self.bridge is not None:
            self.jobs.put(((GO_ON if cursor is None else cursor, self.trainer.policy_version), buckets))
        self.again = True

    def collect(self) -> dict:
        box = [self.batches.get() if self.bridge is not None else None]
        # the other trainers wait here as long as the generators sample
        dist.broadcast_object_list(box, 0, group=patient_group(dist.group.WORLD, self.trainer.cfg.rollout_timeout_s))
        if "error" in box[0]:
            raise ValueError(box[0]["error"])
        return box[0]

    def close(self):
        if self.bridge is not None:
            self.jobs.put(((END, 0), []))  # the generators may go
            self.courier.join()


def generate_forever(cfg, env, text, Model, model_config, n_trainers: int):
    """Run a generator rank: weights in, samples out, until END.

    A signal does not end this rank (StopSignal only records the signal): the trainers need the samples to finish their step,
    and then send END. If the trainers die, the connection breaks and this rank fails.
    """
    rank, n = int(os.environ["RANK"]) - n_trainers, cfg.gen_ranks
    on_cuda = runs_on_cuda(cfg.device)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_cuda else torch.device("cpu")
    layout = Layout(dp_shard=n, global_batch_size=n, device=device, rank=rank)  # whole models, different prompts
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    bridge = open_bridge(cfg, n_trainers, device)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", bridge.store), rank=rank, world_size=n)
    StopSignal()  # the trainers need samples to finish their step
    dtype = dtype_of_compute(cfg, on_cuda)
    model = Model(model_config).to(layout.device)
    if cfg.lora_rank:
        add_adapters(model, lora_names(model, cfg.lora_on), cfg.lora_rank, cfg.lora_alpha)
    model.unknown_ids = unknown_ids(text, model_config, layout.device)
    for t, as_multiplied in list_weights(model, dtype):
        t.data = t.data.to(as_multiplied)
    again, batch = False, {}
    while True:
        bridge.talk.broadcast(header := torch.zeros(2, dtype=torch.long), 0).wait()
        cursor, version = header.tolist()
        if cursor == END:
            return bridge.close()
        unpack_weights(list_weights(model, dtype, again), bridge.broadcast)
        again, cursor = True, batch["cursor"] if cursor == GO_ON else cursor
        try:
            batch = make_batch(cfg, env, text, layout, model, cursor, version)
        except ValueError as error:  # the same on all generators; the trainers end the run
            batch = {"error": str(error)}
        if rank == 0:
            data = torch.frombuffer(bytearray(pickle.dumps(batch)), dtype=torch.uint8)
            bridge.talk.send([torch.tensor([len(data)])], 0, 0).wait()
            bridge.talk.send([data], 0, 0).wait()
        if "error" in batch:
            return
