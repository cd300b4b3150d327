"""grpo.py --engine URL --engine_weights nccl: rank 0 sends the policy from its GPU to the GPUs of a
vLLM server, over NCCL. rl/http_engine.py would write a folder.

vLLM's side is its weight transfer engine (the paths below; vLLM 0.32 has them), ours a group of
torch: vLLM itself need not be installed here, but both sides need an NCCL of the same version.
"""

import base64
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.agree import brief, fail_together
from distributed.refusals import runs_on_cuda
from rl.http_engine import HTTPEngine, Server
from rl.policy import list_weights, pack_weights
from rl.rollouts import nccl_group, use_own_stream
from storage.hf import check_same_model, class_of

JOIN = "/init_weight_transfer_engine"
START = """VLLM_SERVER_DEV_MODE=1 vllm serve ... --weight-transfer-config '{"backend": "nccl"}'"""


def check_nccl(cfg: Any) -> None:
    """Raises ValueError before anything is built."""
    if cfg.lora_rank or not runs_on_cuda(cfg.device):
        why = "sends from a GPU, and this run has none"
        if cfg.lora_rank:
            why = "sends no adapters"
        raise ValueError(
            f"--engine_weights nccl {why}; name a folder instead, or leave the flag out"
        )
    server = Server(cfg.engine, cfg.init_timeout_s)
    if server.kind != "vllm" or server.call(JOIN, optional=True) is None:
        server.fail(f"--engine_weights nccl needs vLLM, 0.32 or newer: {START}")
    # it always knows the path, so ask for what no group can be: only an engine for NCCL says that
    # it cannot
    try:
        server.call(JOIN, {"init_info": {}}, None)
    except ValueError as error:
        if "NCCLWeightTransfer" not in str(error):
            raise ValueError(f"{error}; start it with {START}") from None


class NCCLEngine(HTTPEngine):
    """The engine on a trainer's rank. Rank 0 and the server's workers, which have the ranks after
    it, are a group of NCCL."""

    def connect(self):
        self.folder = f"{self.cfg.out}/engine"  # nothing is written there
        server, start = super().connect()
        # weights travel faster than samples are drawn
        self.sender = Server(self.cfg.engine, self.cfg.init_timeout_s)
        self.device = self.trainer.layout.device
        store = dist.HashStore()
        self.nccl = ThreadPoolExecutor(1, "nccl", use_own_stream, (self.device,))
        self.http = ThreadPoolExecutor(1)
        ranks = 1 + self.sender.call(
            "/get_world_size", take=lambda answer: int(answer["world_size"])
        )

        def join():
            # the server's answer is waited for less
            self.workers = nccl_group(store, 0, ranks, 2 * self.cfg.init_timeout_s)
            # as vLLM's workers do, to begin with
            self.workers.allreduce(torch.zeros(1, device=self.device)).wait()

        self.sender.call("/shutdown_weight_transfer_engine", {}, None)  # of a run before
        joined = self.nccl.submit(join)
        joined.add_done_callback(lambda _: store.check(["0"]) or store.set("0", ""))
        name = store.get("0")  # NCCL's unique id; empty where joining failed, and meet() says why
        about = dict(
            rank_offset=1, world_size=ranks, nccl_unique_id_b64=base64.b64encode(name).decode()
        )
        self.meet(joined, JOIN, {"init_info": about})
        return server, start

    def meet(self, ours, path: str, body: dict):
        """Make the workers do their part of a collective, while a thread does `ours`. If one side
        fails, the other may wait for
        ever: the run ends, and the threads with it."""
        theirs = self.http.submit(self.sender.call, path, body, None)
        done, waiting = wait([ours, theirs], 2 * self.sender.timeout, FIRST_EXCEPTION)
        error = None
        if ours in done:
            error = ours.exception()
        if theirs in done and not error:
            theirs.result()
        if error or waiting:
            self.sender.fail(f"NCCL failed beside {path}: {error or 'it does not end'}")

    def weights(self) -> tuple[str, dict[str, Tensor]]:
        """(name of the version, {name in Hugging Face's format: whole tensor on the host of rank
        0}). A stack of experts is sent as its parts, a buffer without a name not at all."""
        model = self.trainer.model
        layout = self.trainer.layout
        found = {}
        names = model.hf_keys()

        def check():  # as save_hf does
            check_same_model(class_of(model.config), model.config)
            unnamed = [fqn for fqn, _ in model.named_parameters() if fqn not in names]
            if unnamed:
                raise ValueError(
                    f"hf_keys() of {type(model).__name__} has no name for {brief(unnamed)}"
                )

        fail_together(check, self.group)
        for fqn, t in pack_weights(
            list_weights(model, layout.compute_dtype), layout, self.group
        ).items():
            theirs = names.get(fqn, ())
            if isinstance(theirs, str):
                found[theirs] = t
            else:  # a tensor for each of a layer's experts
                found |= dict(zip(theirs, t))
        return f"{self.mine}-{self.start}-{self.trainer.policy_version}", found

    def run(self, weights: tuple | None, work, *args):
        if weights:
            self.send(*weights)
        return super().run(None, work, *args)

    def send(self, version: str, weights: dict[str, Tensor]):
        """Broadcast the tensors to the workers, one after the other."""

        def broadcast():
            for t in weights.values():
                self.workers.broadcast(t.to(self.device, non_blocking=True), 0).wait()

        about = {"names": [*weights], "dtype_names": [], "shapes": []}
        for t in weights.values():
            about["dtype_names"].append(str(t.dtype)[6:])
            about["shapes"].append([*t.shape])
        self.sender.call("/start_weight_update", {}, None)
        self.meet(self.nccl.submit(broadcast), "/update_weights", {"update_info": about})
        weights.clear()
        self.sender.call("/finish_weight_update", {}, None)
        self.server.commit(version)
