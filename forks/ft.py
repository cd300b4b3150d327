"""Replica groups that may die and come back, with torchft: who is alive, the sum of gradients
between them, and healing.

    pip install torchft
    torchft_lighthouse --bind "[::]:29510" --min_replicas 1 --heartbeat_timeout_ms 1000  # one for all groups: knows who lives

Each group is a torchrun job of its own, and all have one layout. Rank r of a group talks to rank r
of the others only, with gloo, in host memory: gradients of GPUs are copied there. So a group that
dies breaks a sum and nothing else, and what is inside of a group (FSDP, tp, pp) need not know of
the others.

A step in which a group dies is not taken: nobody has changed a weight by then, and who is left does
it again. What a step trains on follows from how many samples all steps before it have used
(state["samples"]) and from the groups that are alive.
"""

import datetime
import importlib.util
import logging
import os
import socket
import sys
import threading
import time
import warnings
import zlib
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.layout import Layout, local_tensor
from flags.config import own_rank
from flags.files import step_folders
from models.loss import IGNORE
from storage.loading import create_optimizer_state, fill_twins, restore_numbers

START = 'torchft_lighthouse --bind "[::]:29510" --min_replicas 1 --heartbeat_timeout_ms 1000'
# in which groups may differ
OWN_FLAGS = ("out", "ft_group", "ft_lighthouse", "checkpoint_every", "export_hf", "export_dtype")
SAME_FLAGS = f"start all groups with the same flags, but for --{', --'.join(OWN_FLAGS)}"
BUCKET = 2**24  # numbers that travel in one sum: 64 MiB


def check_groups(cfg) -> None:
    """Raises ValueError where torchft or the lighthouse is missing, and for what replica groups
    cannot do."""
    if cfg.optimizer not in ("adamw", "muon"):
        raise ValueError(
            "replica groups need the same rounding in each group, and moments to send: use "
            "--optimizer adamw, "
            f"not {cfg.optimizer}"
        )
    look_beside(cfg)
    if importlib.util.find_spec("torchft") is None:
        raise ValueError("replica groups need a package that is not installed: pip install torchft")
    if error := cannot_reach(cfg.ft_lighthouse):
        raise ValueError(
            f"no lighthouse at --ft_lighthouse {cfg.ft_lighthouse} ({error}); start one: {START}"
        )


def look_beside(cfg) -> None:
    """A group that comes back when the others have done the last step would find nobody, and train
    the whole run again, alone. Ends the process with status 0 then; says so where their newest
    checkpoint is ahead of this group's."""
    newest = {
        int(path.name[6:]): found[0]
        for path in Path(cfg.out).glob("group-*")
        if path.name[6:].isdigit() and (found := step_folders(str(path)))
    }
    mine, _ = newest.pop(cfg.ft_group, (0, ""))
    group = max(newest, key=lambda n: newest[n][0], default=None)
    if group is None or newest[group][0] <= mine:
        return
    step, path = newest[group]
    if own_rank() == 0:
        done = (
            "the run is finished, and nothing is trained: use a larger --steps, or --out NEW"
            if step >= cfg.steps
            else (
                f"this group has step {mine}: if no group is alive, start group {group} first, "
                "and this one goes on from there"
            )
        )
        print(f"group {group} has done step {step} ({path}); {done}", flush=True)
    if step >= cfg.steps:
        raise SystemExit(0)


def cannot_reach(lighthouse: str) -> str:
    """Why nobody answers at this address, "" if somebody does."""
    try:
        address = urlsplit(lighthouse)
        socket.create_connection((address.hostname, address.port or 80), timeout=10).close()
        return ""
    except (OSError, ValueError) as error:
        return str(error)


class ReplicaGroups:
    """This group among the others. place and n: its number among the live groups, and how many
    these are."""

    def __init__(self, cfg, layout: Layout, checkpoints, state: dict):
        # its Rust half would print several lines per step
        os.environ.setdefault("RUST_LOG", "error")
        from torchft import Manager, ProcessGroupGloo

        # of what goes wrong, this file says one line
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        # weights that came: only read
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        self.cfg = cfg
        self.layout = layout
        self.checkpoints = checkpoints
        self.state = state
        self.flags = {name: value for name, value in asdict(cfg).items() if name not in OWN_FLAGS}
        self.place = self.n = 0
        self.has_met = self.has_stepped = self.has_left = False
        self.reader = self.next = None
        # A store of its own: torchrun's outlives a restart, and holds the address of the process
        # that died.
        host = socket.gethostname()
        is_first = layout.rank == 0
        self.store = (
            dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if is_first else None
        )
        where = [host, self.store and self.store.port]
        dist.broadcast_object_list(where, src=0)
        seconds = datetime.timedelta(seconds=cfg.ft_timeout_s)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=seconds),
            min_replica_size=1,
            use_async_quorum=False,
            rank=layout.rank,
            world_size=layout.world_size,
            store_addr=where[0],
            store_port=where[1],
            lighthouse_addr=cfg.ft_lighthouse,
            replica_id=f"group-{cfg.ft_group}",
            load_state_dict=self.take_over,
            state_dict=self.hand_over,
            # one rank may learn of a death a whole timeout later than its neighbours
            timeout=2 * seconds,
            # a newcomer waits for the end of the others' step
            quorum_timeout=datetime.timedelta(seconds=cfg.init_timeout_s),
        )
        self.manager.load_state_dict({"step": state["step"], "batches_committed": 0})

        if is_first:
            threading.Thread(target=self.watch_lighthouse, daemon=True).start()

    def watch_lighthouse(self) -> None:
        """End this process, and so its group, when the lighthouse is gone: torchft would wait for
        it as for a slow peer."""
        misses = 0
        while misses < 3 and not self.has_left:
            time.sleep(1)
            error = cannot_reach(self.cfg.ft_lighthouse)
            misses = misses + 1 if error else 0
        if not self.has_left:
            print(
                f"error: the lighthouse at {self.cfg.ft_lighthouse} is gone, after step "
                f"{self.state['step']} ({error}); "
                f"start it again ({START}), then the groups: they go on from their checkpoints",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    # ---------------------------------------------------------------- healing
    def hand_over(self) -> dict:
        """What a group that is behind gets from this rank: its part of weights and moments, and the
        cursor."""
        tensors = {
            key: local_tensor(tensor) for key, tensor in self.checkpoints.run.named(True).items()
        }
        numbers = self.checkpoints.numbers.changed()
        return {
            "tensors": tensors,
            "state": dict(self.state),
            "flags": self.flags,
            "numbers": numbers,
        }

    def take_over(self, theirs: dict) -> None:
        """The other side: weights, moments and cursor become those of the peer. Raises ValueError
        where its flags differ."""
        if differ := [
            name for name, value in self.flags.items() if value != theirs["flags"].get(name)
        ]:
            name = differ[0]
            there = theirs["flags"].get(differ[0])
            raise ValueError(
                f"--{name} is {self.flags[name]} here and {there} in the groups that are "
                f"training; {SAME_FLAGS}"
            )
        moments = [key for key in theirs["tensors"] if key.startswith("optimizer.")]
        if moments:
            fqns = {key.removeprefix("optimizer.").rpartition(".")[0] for key in moments}
            create_optimizer_state(self.checkpoints.run, fqns)
        ours = self.checkpoints.run.named(bool(moments))
        assert ours.keys() == theirs["tensors"].keys(), "the same flags make the same tensors"
        for key, tensor in ours.items():
            local_tensor(tensor).copy_(theirs["tensors"][key])
        fill_twins(self.checkpoints.run)
        restore_numbers(self.checkpoints.numbers, theirs["numbers"])
        self.state.update(theirs["state"])

    def meet(self) -> None:
        """Who takes part in the next step? Returns when all who are alive have asked. A group that
        is behind is healed in here.

        A second call before a step changes nothing: a newcomer is healed before the loop, and the
        loop meets before each step.
        """
        if self.has_met:
            return
        while not self.has_met:
            try:
                self.manager.start_quorum()
            except (RuntimeError, TimeoutError) as error:
                # where the lighthouse has died, rank 0 says so meanwhile, and ends the group
                time.sleep(10)
                if self.layout.rank > 0:  # one line is enough
                    raise SystemExit(1) from None
                raise ValueError(
                    f"step {self.state['step'] + 1}: the lighthouse at {self.cfg.ft_lighthouse} "
                    "named no groups "
                    f"within --init_timeout_s {self.cfg.init_timeout_s} ({error})"
                ) from None
            # Where a peer dies while it heals us, one rank may be healed and another not: then all
            # of them ask again.
            step = self.state["step"]
            spread = torch.tensor([step, -step, -bool(self.manager.errored())])
            dist.all_reduce(spread, op=dist.ReduceOp.MIN)
            if spread[0] == -spread[1] and spread[2] == 0:
                self.has_met = True
            else:
                self.manager.report_error(RuntimeError("not healed"))
                self.agreed_to_step("a peer was lost while it healed this group")
                self.manager.load_state_dict({"step": int(spread[0]), "batches_committed": 0})
        found = self.manager.participating_rank(), self.manager.num_participants()
        if found != (self.place, self.n) and self.layout.rank == 0:
            sequences = found[1] * self.layout.global_batch_size
            print(
                f"step {self.state['step'] + 1}: {found[1]} live group{'s' * (found[1] > 1)}, "
                f"{sequences} sequences per step",
                flush=True,
            )
        self.place, self.n = found

    # ---------------------------------------------------------------- data
    def batches(self, data):
        """Iterator of this rank's batches from the cursor on: its part of this group's part of the
        live global batch."""
        layout = self.layout
        samples = self.state["samples"]
        size = self.n * self.layout.global_batch_size
        # someone died or came, or a step is done again
        if self.next != (samples, self.place, self.n):
            if self.reader is not None:
                self.reader.close()
            mine = (
                self.place * layout.data_ranks + layout.data_rank,
                self.n * layout.data_ranks,
                layout.device,
            )
            self.reader = data.batches(samples, size, layout.local_batch_size, *mine)
        self.next = samples + size, self.place, self.n
        return self.reader

    # ---------------------------------------------------------------- the sum
    def sum(self, tensor: Tensor) -> Tensor:
        """Over the live groups; what comes back is of no use if a group has died meanwhile, which
        should_commit tells."""
        self.manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
        return tensor

    @torch.no_grad()
    def sum_gradients(self, stages, loss: Tensor, batch) -> bool:
        """Gradients and loss of this group's batch become those of the live global batch. False: a
        group has died meanwhile, no weight may change, and the step must be done again.

        forward_backward has divided by the tokens of the group's batch; a weighted sum, group's
        tokens / all tokens, makes that the tokens of all. Every rank sums the parts that it holds
        after FSDP's reduce-scatter, so each number travels once. loss[1], for the largest mean of
        one data rank, stays that of this group. batch.hash becomes a sum, too.
        """
        tokens = (batch.labels != IGNORE).sum()
        dist.all_reduce(tokens)
        mine = torch.tensor(
            [
                int(tokens) // (self.layout.world_size // self.layout.data_ranks),
                int(batch.hash, 16),
                zlib.crc32(repr(self.flags).encode()),
            ]
        )
        total = self.sum(mine.clone())
        if not self.manager.errored() and total[2] != mine[2] * self.n:
            if not self.has_stepped:  # the newcomer leaves, and the others do this step again
                raise ValueError(f"the other groups have other flags; {SAME_FLAGS}")
            self.manager.report_error(RuntimeError("a group with other flags came"))
        batch.hash = f"{int(total[1]) % 2**48:012x}"
        share = (mine[0] / total[0].clamp(min=1)).item()
        grads = [
            local_tensor(p.grad)
            for stage in stages
            for p in stage.parameters()
            if p.grad is not None
        ] + [loss[:1]]
        while grads:
            bucket = [grads.pop(0)]
            n = 0
            while grads and (n := n + bucket[-1].numel()) < BUCKET:
                bucket.append(grads.pop(0))
            flat = self.sum(torch.cat([grad.flatten().float().cpu() for grad in bucket]) * share)
            for grad, part in zip(
                bucket, flat.split([grad.numel() for grad in bucket]), strict=True
            ):
                grad.copy_(part.view_as(grad))
        return self.agreed_to_step("a group was lost")

    def agreed_to_step(self, why: str) -> bool:
        """Whether all ranks of this group have their sums. If not, all of them do the step again,
        and rank 0 says so."""
        if self.manager.errored():
            # or groups that still wait for this one in a sum would do so until their timeout
            self.manager._pg.abort()
        agreed = self.manager.should_commit()
        if not agreed and self.layout.rank == 0:
            print(f"step {self.state['step'] + 1}: {why}; the step is done again", flush=True)
        self.has_met = False
        self.has_stepped = self.has_stepped or agreed
        return agreed

    def leave(self) -> None:
        """The others then go on at once, and do not wait until the lighthouse misses this group."""
        self.has_left = True
        self.reader.close()
        self.manager.shutdown()
