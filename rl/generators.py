"""--gen_ranks: ranks that only sample, each with a whole model, and what connects them with the ranks that train."""
import os
import pickle
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distributed.layout import AXES, Layout, ParallelConfig
from distributed.lora import add_adapters, is_adapter, lora_names
from rl.rollouts import make_batch, patient_group, unknown_ids


def multiplied(model, compute_dtype: torch.dtype, again=False) -> list[tuple[Tensor, torch.dtype]]:
    """All parameters and buffers in the order of their names, each with the dtype in which the trainer's forward uses it: FSDP
    casts all parameters, and no buffers. A generator must use the same dtypes to compute the same: an expert's selection bias
    in bf16, for instance, would send tokens to other experts. again: only what may have changed since the first time, which
    with LoRA are the adapters."""
    parameters = [(fqn, p, compute_dtype) for fqn, p in model.named_parameters()]
    buffers = [(fqn, b, b.dtype) for fqn, b in model.named_buffers()]
    if again and any(is_adapter(fqn) for fqn, _, _ in parameters):
        parameters, buffers = [entry for entry in parameters if is_adapter(entry[0])], []
    return [(t, dtype) for _, t, dtype in sorted(parameters + buffers, key=lambda entry: entry[0])]


class Generators:
    """The engine on a trainer's rank, see rl/engines.py. submit() sends the weights and returns while the generators sample;
    collect() waits for their samples. bridge: on trainer rank 0, the group that connects it with the generators."""

    def __init__(self, trainer, in_place, bridge):
        self.trainer, self.bridge, self.again = trainer, bridge, False
        self.evaluate = in_place.evaluate  # the trainer's ranks have the weights of now

    def submit(self, cursor: int):
        model, layout = self.trainer.model, self.trainer.layout
        self.send(torch.tensor([cursor, self.trainer.policy_version]))
        for t, dtype in multiplied(model, layout.compute_dtype, self.again):
            t = t.full_tensor() if isinstance(t, DTensor) else t  # collective among the trainer's ranks
            self.send(t.to("cpu", dtype).contiguous())
        self.again = True

    def send(self, t: Tensor):
        if self.bridge is not None:
            self.bridge.broadcast(t, 0).wait()

    def collect(self) -> dict:
        box = [None]
        if self.bridge is not None:
            size = torch.zeros(1, dtype=torch.long)
            self.bridge.recv([size], 1, 0).wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            self.bridge.recv([data], 1, 0).wait()
            box = [pickle.loads(data.numpy().tobytes())]  # from our own generators, over our own connection
        # the other trainers wait here for as long as the generators need
        dist.broadcast_object_list(box, 0, group=patient_group(dist.group.WORLD, self.trainer.cfg.rollout_timeout_s))
        if "error" in box[0]:
            raise ValueError(box[0]["error"])
        return box[0]

    def close(self):
        self.send(torch.tensor([-1, 0]))  # the generators may go


def open_bridge(cfg, n_trainers: int):
    """(store, group of trainer rank 0 and all generators) of this attempt of torchrun. Trainers and generators are two worlds
    for torch.distributed, each with its own ranks from 0 on, so the group that connects them is made by hand."""
    env, rank = os.environ, int(os.environ["RANK"])
    timeout = timedelta(seconds=cfg.rollout_timeout_s)  # while one side does its part of a step, the other waits
    connecting = timedelta(seconds=cfg.init_timeout_s)
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), None, False, timeout=connecting)
    store = dist.PrefixStore(f"rollouts/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    group = dist.PrefixStore("bridge", store)
    return store, dist.ProcessGroupGloo(group, max(0, rank - n_trainers + 1), cfg.gen_ranks + 1, timeout)


def generate_forever(cfg, env, text, Model, model_config, n_trainers: int):
    """The whole life of a generator rank: weights in, samples out, until a negative cursor.

    A signal does not end it (StopSignal only notes it): the trainers need its samples to finish their step, and then send the
    negative cursor. If they die, the connection breaks and this rank fails.
    """
    rank, n = int(os.environ["RANK"]) - n_trainers, cfg.gen_ranks
    on_cuda = cfg.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_cuda else torch.device("cpu")
    degrees = dict.fromkeys(AXES, 1) | {"dp_shard": n}  # each has a whole model, and prompts of its own
    layout = Layout(ParallelConfig(dp_shard=n), degrees, n, local_batch_size=1, global_batch_size=n, device=device, rank=rank)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    store, bridge = open_bridge(cfg, n_trainers)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=n)
    dtype = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}[cfg.compute_dtype]
    model = Model(model_config).to(layout.device)
    add_adapters(model, lora_names(model, cfg), cfg.lora_rank, cfg.lora_alpha)
    model.unknown_ids = unknown_ids(text, model_config, layout.device)
    for t, as_multiplied in multiplied(model, dtype):
        t.data = t.data.to(as_multiplied)
    again = False
    while True:
        bridge.broadcast(header := torch.zeros(2, dtype=torch.long), 0).wait()
        cursor, version = header.tolist()
        if cursor < 0:
            return
        for t, _ in multiplied(model, dtype, again):
            bridge.broadcast(received := torch.empty(t.shape, dtype=t.dtype), 0).wait()
            t.data.copy_(received)
        again = True
        try:
            batch = make_batch(cfg, env, text, layout, model, cursor, version)
        except ValueError as error:  # the same on all generators; the trainers end the run
            batch = {"error": str(error)}
        if rank == 0:
            data = torch.frombuffer(bytearray(pickle.dumps(batch)), dtype=torch.uint8)
            bridge.send([torch.tensor([len(data)])], 0, 0).wait()
            bridge.send([data], 0, 0).wait()
        if "error" in batch:
            return
