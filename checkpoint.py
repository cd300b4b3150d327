"""Saves and loads checkpoints: a crash loses no checkpoint, and no run trains on a damaged one.

    python checkpoint.py ls runs/llama3                           # steps, sizes, layouts; quick: reads manifests only
    python checkpoint.py verify runs/llama3                       # reads all bytes; exit status 0: every file is undamaged
    python checkpoint.py diff STEP_FOLDER STEP_FOLDER             # number of different tensors, with the largest differences
    python checkpoint.py average runs/llama3 OUT --last 2         # the mean of the weights of the newest steps, to sample from
    python checkpoint.py to_hf runs/llama3 OUT --dtype bfloat16   # a run's newest checkpoint in Hugging Face's format
    python checkpoint.py to_hf runs/lora OUT --adapter            # the adapters of a run with --lora_rank, in peft's format
    python checkpoint.py from_hf HUGGING_FACE_FOLDER runs/theirs  # and back

torch's distributed checkpoint (DCP) writes the tensors, every rank its shards, and any layout reads
them. But a process may be killed at any moment, and a disk may return other bytes than were
written. Therefore checkpoint.py adds:
  - a save goes to step-N.tmp-x and is renamed to step-N at the end, so a folder named step-N is always complete;
  - manifest.json lists size and crc32 of every file; DCP by itself loads a flipped bit in a tensor without an error;
  - keys, shapes and dtypes are compared before a tensor is touched; DCP overwrites in place while reading, and casts;
  - nothing is unpickled, for a pickle can run any code: in place of DCP's pickle there is plain JSON, tensors.json.
storage/resume.py checks an earlier run in --out at a start.

<run>/checkpoints/step-100/
    __0_0.distcp ...             tensors, "model.<fqn>" and "optimizer.<fqn>.<state name>", one file per rank
    tensors.json                 dtype and shape of every tensor, and the places of all shards in the .distcp files
    state.json                   step, data cursor ... from the recipe, and the identity of model, data and optimizer. With
                                 --lora_rank the tensors are the adapters, and state.json names the frozen weights
    config.json  recipe.py  code.json  tokenizer.json   to repeat the run and to sample from the model; code.json holds the
                                 source of every local module imported by the recipe
    provenance.json              the git commit: see storage/provenance.py
    tokenizer_config.json  chat_template.jinja ...   if the tokenizer comes from a Hugging Face folder
    __batches.json               of grpo.py --async_steps: samples for the next steps, see rl/rollouts.py
    manifest.json                size and crc32 of all other files, and a hash of the manifest
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from corpus.tokenizer import tokenizer_and_beside
from distributed.agree import Failed, fail_together, gather, new_gloo_group, on_rank_0, rank_in
from distributed.layout import AXES, named_tensors
from flags.config import Need, flag, own_rank
from flags.files import json_bytes, matches, read_json, step_folders
from storage.dcp import (
    SavePlan,
    import_dcp,
    read_table,
    read_tensors,
    write_tensors,
    writer_process,
)
from storage.manifest import Damaged, checksums, read_manifest
from storage.newest import resume_source, saved_state
from storage.optimizer_numbers import OptimizerNumbers, find_copies, merge_numbers, sum_copies
from storage.provenance import (
    changed_code,
    check_machines,
    code_roots,
    git_commit,
    local_code,
    summarize_code,
)
from storage.saved import check_excluded, check_fit, choose_step, commit_step, split_twins
from storage.source_tokenizer import describe_beginning, describe_ends, ids_of_run
from storage.unsaved import Unsaved

# folders left by a process killed while saving or deleting
LEFTOVER = re.compile(r"step-\d+\.tmp-.*|trash-.*")
# Conditions without which a flag has no effect: see flags/config.py
INIT = Need("without --init_from", lambda c: c.init_from)
LOADING = Need(
    "without --init_from or a checkpoint in --out", lambda c: c.init_from or step_folders(c.out)
)
SAVING = Need("with --load_only", lambda c: not c.load_only)
EVER = Need("with --checkpoint_every 0", lambda c: getattr(c, "checkpoint_every", 1))
EXPORT = Need("without --export_hf", lambda c: c.export_hf)


@dataclass(kw_only=True)
class CheckpointConfig:
    # start from this run folder's newest checkpoint, one step folder, or a Hugging Face folder
    init_from: str = ""
    # only the weights; else all: to go on, or, with other data or lr, a new phase
    init_model_only: bool = flag(True, INIT)
    # continue from this step; newer ones are set aside as abandoned-N (-1 = the newest)
    load_step: int = -1
    # do not load: optimizer, or parameters (head,blocks.0.*)
    exclude_from_loading: list[str] = flag([], LOADING)
    # who writes while training goes on
    checkpoint_async: Literal["off", "thread", "process"] = flag("off", SAVING, EVER)
    # number of newest checkpoints to keep; older ones are deleted (0 = keep all)
    keep_latest_k: int = flag(10, SAVING)
    # save after the first step, too: tests saving at once
    checkpoint_first_step: bool = flag(False, SAVING, EVER)
    # command run by rank 0 after each checkpoint, {} = the folder; see cluster.md
    after_save: str = flag("", SAVING, EVER)
    load_only: bool = False  # read checkpoints, never write one
    # the last checkpoint has only weights: smaller, cannot be continued
    last_save_model_only: bool = flag(False, SAVING, EVER)
    export_hf: str = ""  # new folder for the final weights in Hugging Face's format
    # of the export; checkpoints never round
    export_dtype: Literal["float32", "bfloat16", "float16"] = flag("float32", EXPORT)


# --- The contents of a checkpoint ---
def loaded_later(cfg):
    """A function: fqn -> whether Checkpoints.load will overwrite the parameter.
    parallel.init_weights need not draw those."""
    ours = resume_source(cfg.out, cfg)
    # a Hugging Face folder, whose files may lack multi-token prediction
    others = cfg.init_from if ours is None else ""
    kept = [name.removeprefix("model.") for name in cfg.exclude_from_loading] + ["mtp"] * bool(
        others
    )
    return lambda fqn: bool(ours or others) and not matches(kept, f"model.{fqn}")


def run_after_save(command: str, folder: str):
    """Runs --after_save in a shell, while training goes on. A failure prints one line: the
    checkpoint itself is complete."""
    done = subprocess.run(
        command.replace("{}", shlex.quote(folder)),
        shell=True,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        said = (
            (done.stderr.strip() or done.stdout.strip() or "it said nothing")
            .splitlines()[-1]
            .strip()
        )
        print(
            f"checkpoint: --after_save FAILED for {folder}, status {done.returncode}: {said[:200]}",
            flush=True,
        )


class Checkpoints:
    """Saves and loads one run. Build last, when the weights exist and the optimizer holds the
    parameters.

    modules: this rank's part of the model (several with interleaved pipeline stages), under the
    full model's fqns.
    optimizer: one optimizer, or a list of several; those that share a parameter give their states
    different names. identity:
    {"model": ..., "data": ..., "optimizer": ...}; a continued run must not change these values.
    load_base: for LoRA: a function of this class's process group, which fills the frozen weights
    and returns the entry "base" of state.json; no checkpoint holds frozen weights.
    With several ranks the class makes a separate gloo group for the background thread: two threads
    on one gloo group crash.
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        out: str,
        *,
        modules: list[nn.Module],
        optimizer,
        identity: dict,
        config: dict,
        source: str,
        tokenizer_file: str | None = None,
        load_base=None,
        learnt: list[int] | None = None,
    ):
        """learnt: the ids that end a text in the data; None: the token between documents."""
        self.cfg = cfg
        self.out = out
        self.modules = modules
        self.identity = identity
        # loaded: the step folder that load() continued
        self.tokenizer_file = tokenizer_file
        self.load_base = load_base
        self.base = None
        self.loaded = None
        self.config = config
        self.source = source
        self.optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        # Collected once, while FSDP holds the parameters sharded: after an evaluation
        # module.parameters() may be gathered copies, not the shards updated by the optimizer.
        self.params, self.twins = split_twins(modules)
        known = {id(p): fqn for fqn, p in [*self.params.items(), *self.twins.items()]}
        for optimizer in self.optimizers:
            held = [
                param for param_group in optimizer.param_groups for param in param_group["params"]
            ]
            assert all(id(param) in known for param in held), (
                "build the optimizer after fully_shard"
            )
            # No weight may change during a copy. The optimizer waits by itself, so no training loop
            # has to.
            optimizer.register_step_pre_hook(lambda *_: self.wait_staged())
        group = new_gloo_group("checkpoint") if dist.is_initialized() else None
        self.group, self.rank, self.world_size = (
            group,
            rank_in(group),
            dist.get_world_size(group) if group else 1,
        )
        self.gather, self.together = (
            partial(gather, group=group),
            partial(fail_together, group=group),
        )
        self.on_rank_0, self.plan = partial(on_rank_0, group=group), SavePlan()
        # read now: later edits of a file are not the running code
        self.code = local_code() if source and own_rank("LOCAL_RANK") == 0 else {}
        check_machines(
            self.code,
            out if config.get("checkpoint_every") and not cfg.load_only else "",
            self.gather,
        )
        self.git = git_commit(code_roots()[0], [*self.code]) if self.code else {}
        self.made_from = summarize_code(self.git, self.code)  # for config.json
        # Read now, so that errors in these files appear before training.
        reads = self.rank == 0 and tokenizer_file and not cfg.load_only
        self.tokenizer = self.together(
            lambda: tokenizer_and_beside(tokenizer_file) if reads else {}
        )
        self.begins, self.generation, new = self.on_rank_0(
            lambda: ids_of_run(out, cfg, tokenizer_file if reads else None, learnt)
        )
        if self.generation is not None and reads:
            self.tokenizer["generation_config.json"] = json_bytes(self.generation)
        if new:
            self.say(describe_ends(tokenizer_file, new))
        if reads and self.begins and (line := describe_beginning(tokenizer_file)):
            self.say(line)
        self.numbers = OptimizerNumbers(self.optimizers, known)
        buffers = {
            fqn: t
            for m in modules
            for fqn, t in named_tensors(m).items()
            if not isinstance(t, nn.Parameter)
        }
        self.copies = find_copies(self.params | buffers, self.gather)
        self.unsaved = Unsaved(modules)
        self.pool = ThreadPoolExecutor(1)
        self.stager = None
        self.staged = None
        self.flight = None
        # --after_save: {folder: its command}
        self.commands = ThreadPoolExecutor(1)
        self.copying = {}
        self.process = (
            writer_process() if cfg.checkpoint_async == "process" and not cfg.load_only else None
        )
        if self.rank == 0 and not cfg.load_only and os.path.isdir(os.path.join(out, "checkpoints")):
            for name in filter(LEFTOVER.fullmatch, os.listdir(os.path.join(out, "checkpoints"))):
                shutil.rmtree(os.path.join(out, "checkpoints", name), ignore_errors=True)

    def save(
        self,
        step: int,
        state: dict,
        last=False,
        model_only=False,
        files: dict[str, bytes] | None = None,
    ) -> bool:
        """Writes checkpoints/step-<step>; every rank calls. state: JSON values, returned by a later
        load(). files: of rank 0, for what is large, because every rank of a start reads the state.

        False: nothing was saved, one line has said why, and older checkpoints are untouched; the
        last save of a run raises
        RuntimeError instead. With checkpoint_async save() returns as soon as the copy to CPU memory
        has begun.
        """
        if self.cfg.load_only:
            return False
        self.finish_flight()
        # Turned into text now, because the loop may change `state` while the background thread
        # writes.
        if self.begins:  # a run from a folder begins texts as the folder does
            state = state | {"bos": True}
        about = dict(step=step, model_only=model_only, identity=self.identity, state=state)
        about |= self.on_rank_0(
            merge_numbers,
            value=self.together(
                lambda: (
                    self.numbers.changed() if not model_only else {},
                    sum_copies(self.copies),
                    self.numbers.late() if not model_only else [],
                )
            ),
        )
        for text in self.on_rank_0(self.unsaved.sentences, value=self.unsaved.names()):
            self.say(text)
        about = {"state.json": json_bytes(about | ({"base": self.base} if self.base else {}))} | (
            files or {}
        )
        if last or self.cfg.checkpoint_async == "off":  # the last save has nothing to overlap with
            saved = self.write(step, about, lambda: self.tensors(not model_only, saving=True))
            if last and not saved:
                raise RuntimeError(
                    f"the last checkpoint, step {step}, could not be saved to {self.out}"
                )
            return saved
        # before 2.13 a stager works only once
        if self.stager is not None and torch.__version__ < "2.13":
            self.stager.close()
            self.stager = None
        if self.stager is None:
            staging = import_dcp().staging
            cuda = torch.cuda.is_available()
            self.stager = staging.DefaultStager(
                staging.StagingOptions(
                    use_pinned_memory=cuda,
                    use_non_blocking_copy=cuda,
                    use_shared_memory=self.process is not None,
                )
            )
        tensors = self.tensors(not model_only, saving=True)
        # of buffers a copy at once: the next forward may change them while the other copy is under
        # way
        tensors |= {
            key: t.clone()
            for key, t in tensors.items()
            if key.startswith("model.") and key.removeprefix("model.") not in self.params
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the stager's own stream does not wait for the optimizer's
        self.staged = self.stager.stage(tensors)
        self.flight = self.pool.submit(self.write, step, about, self.staged.result, staged=True)
        return True

    def wait_staged(self):
        """Returns when the weights may change; every optimizer calls this before a step."""
        if self.staged is not None:
            wait([self.staged])  # write() reports an error of the copy
            self.staged = None

    def close(self, export=False):
        """Waits for the running save, and raises the save's error. export: then write --export_hf,
        if given."""
        self.finish_flight()
        self.pool.shutdown()
        self.commands.shutdown()
        if self.stager is not None:
            self.stager.close()
        if self.process is not None:
            self.process.shutdown()
        if export and self.cfg.export_hf:
            from storage.hf import save_hf

            try:
                save_hf(
                    self.modules,
                    self.cfg.export_hf,
                    getattr(torch, self.cfg.export_dtype),
                    tokenizer_file=self.tokenizer_file,
                    generation=self.generation,
                )
            except Failed as error:
                raise RuntimeError(f"--export_hf {self.cfg.export_hf}: {error}") from None
            self.say(
                "the export was not compared with transformers: python checkpoint.py to_hf "
                f"{self.out} OUT makes another, and compares it"
            )

    def finish_flight(self):
        """Waits for the running save. At most one runs, so the background threads of all ranks save
        in the same order."""
        self.wait_staged()
        flight = self.flight
        self.flight = None
        if flight is not None and not flight.result() and self.process is not None:
            self.process.shutdown()
            self.process = self.stager = None  # the same on all ranks: all agreed on the result
            self.say("from now on a thread saves, for a writer process may have died")

    def write(self, step, about, get_tensors, staged=False) -> bool:
        """The whole save, in the training thread or in the background. All ranks run the same
        collectives in the same order."""
        began = time.perf_counter()
        folder = None
        try:
            folder = self.on_rank_0(lambda: self.begin(step))
            if folder is None:
                return True
            # an error inside DCP's collectives would leave the peers waiting
            tensors = self.together(get_tensors)
            names = write_tensors(
                tensors, folder, self.group, self.plan, staged, self.process if staged else None
            )
            own = self.together(lambda: checksums(folder, names, sync=True))
            size = self.on_rank_0(lambda ranks: self.commit(step, folder, about, ranks), value=own)
        except Failed as error:
            if self.rank == 0 and folder:
                shutil.rmtree(folder, ignore_errors=True)  # or the leftovers would fill the disk
            newest = step_folders(self.out)[:1]
            self.say(
                f"{self.path(step)} is NOT SAVED: {error}; the newest is "
                f"{newest[0][1] if newest else 'none yet'}"
            )
            return False
        if self.cfg.after_save and self.rank == 0:
            self.copying[self.path(step)] = self.commands.submit(
                run_after_save, self.cfg.after_save, self.path(step)
            )
        self.purge(step)
        self.say(
            f"saved {self.path(step)} ({size / 1e6:.1f} MB in {time.perf_counter() - began:.2f} s)"
        )
        return True

    def begin(self, step) -> str | None:
        """Makes the folder to write to (rank 0). None: this step is saved already."""
        if os.path.isdir(self.path(step)):
            try:
                read_manifest(self.path(step))
                return None
            except Damaged as error:
                self.set_aside(self.path(step), f"damaged: {error}")
        folder = f"{self.path(step)}.tmp-{uuid.uuid4().hex[:8]}"
        os.makedirs(folder)
        return folder

    def commit(self, step, folder, about, ranks) -> int:
        """Completes the folder and renames it to step-<step> (rank 0). ranks: of each rank
        checksums(). Returns the size in bytes."""
        listed = {name: entry for own in ranks for name, entry in own.items()}
        # by stat: listings are cached on network file systems
        for name, (size, _) in listed.items():
            if (
                not os.path.isfile(os.path.join(folder, name))
                or os.path.getsize(os.path.join(folder, name)) != size
            ):
                raise OSError(
                    f"rank 0 does not see {name}: {self.out} must be on a file system that all "
                    "machines share"
                )
        contents = about | self.tokenizer
        contents |= {"config.json": json_bytes(self.config), "recipe.py": self.source.encode()}
        if self.code:
            contents["code.json"] = json_bytes(self.code)
        if self.git:
            contents["provenance.json"] = json_bytes(self.git)
        layout = {
            axis: self.config[axis]
            for axis in (*AXES, "ep")
            if self.config.get(axis, 1) not in (1, -1)
        }
        return commit_step(
            folder,
            self.path(step),
            contents,
            listed,
            step=step,
            model_only=json.loads(about["state.json"])["model_only"],
            layout=layout,
            world_size=self.world_size,
        )

    def purge(self, step):
        """Deletes all but the newest keep_latest_k, after `step` is complete. The next start
        deletes leftovers of a kill."""
        if self.rank == 0 and self.cfg.keep_latest_k:
            for n, path in [entry for entry in step_folders(self.out) if entry[0] < step][
                self.cfg.keep_latest_k - 1 :
            ]:
                if path in self.copying and not self.copying[path].done():
                    continue  # the next save deletes the folder
                trash = os.path.join(os.path.dirname(path), f"trash-{n}-{uuid.uuid4().hex[:8]}")
                try:
                    os.rename(path, trash)
                    self.pool.submit(shutil.rmtree, trash, ignore_errors=True)
                except OSError as error:
                    self.say(f"{path} could not be deleted: {error.strerror}")

    def load(self) -> dict | None:
        """Continues the run, or starts it from --init_from: weights and optimizer state in place,
        on every rank.

        Returns the state given to save(); None when this run starts at step 0. Raises ValueError,
        the same on all ranks, before a tensor is touched.
        """
        start = self.on_rank_0(lambda: resume_source(self.out, self.cfg))
        excluded = [name.removeprefix("model.") for name in self.cfg.exclude_from_loading]
        if self.load_base:
            self.base = self.load_base(self.group)
            if start is None or start.folder != self.out:
                return None
        if start is None:
            if self.cfg.init_from:
                check_excluded(excluded, self.modules, self.group)
                from storage.hf import load_hf

                load_hf(self.modules, self.cfg.init_from, excluded, self.group)
                self.say(f"step 0, with the weights of {self.cfg.init_from} (Hugging Face)")
            return None
        source = start.folder
        everything = start.everything
        if self.cfg.init_from and source == self.out and not self.base:
            self.say(
                f"--init_from {self.cfg.init_from} is IGNORED: {self.out} has checkpoints of its "
                "own"
            )
        folder, manifest = self.choose_checkpoint(source, start.step)
        from storage.changes import compare_start, describe_changes

        differ = self.on_rank_0(
            lambda: compare_start(folder, start, source == self.out, self.identity, self.cfg)
        )
        # weights and optimizer state of another run, but other data or schedule: from step 0
        phase = everything and differ
        table = self.together(lambda: read_table(folder, manifest["files"]))
        check_excluded(excluded, self.modules, self.group)
        if with_optimizer := everything and "optimizer" not in excluded:
            keys = [
                key for key in table if key.startswith("optimizer.") and not matches(excluded, key)
            ]
            with_state = {key.removeprefix("optimizer.").rpartition(".")[0] for key in keys}
            self.together(lambda: self.create_optimizer_state(with_state))
            about_state = read_json(folder, "state.json")
            self.create_late_state({key: table[key] for key in keys}, about_state.get("late", []))
        tensors = {
            key: t for key, t in self.tensors(with_optimizer).items() if not matches(excluded, key)
        }
        wanted = {
            key: saved
            for key, saved in table.items()
            if not matches(excluded, key) and (with_optimizer or key.startswith("model."))
        }
        check_fit(tensors, wanted, folder, everything, self.group)
        self.together(lambda: read_tensors(tensors, folder, table))
        self.fill_twins()
        if with_optimizer:
            self.numbers.restore(about_state.get("optimizer", {}))
        what = "continuing from" if everything else "step 0, with the weights of"
        what = "step 0, with the weights and the optimizer state of" if phase else what
        changed = f"; {describe_changes(differ)}" if differ and not phase else ""
        self.say(f"{what} {folder} (written by {manifest['world_size']} rank(s)){changed}")
        if self.code and (text := changed_code(folder, self.code)):
            self.say(text)
        self.loaded = folder if everything and not phase else None
        return self.loaded and self.on_rank_0(lambda: saved_state(folder))

    def choose_checkpoint(self, source, step) -> tuple[str, dict]:
        """(folder, manifest) of the newest undamaged checkpoint: one decision for all ranks; each
        rank checks a share of the files."""
        folder, manifest, damaged = choose_step(source, step, self.group, self.say)
        if source == self.out and not self.cfg.load_only:
            # Rename only after a good checkpoint was found; otherwise the next start would silently
            # begin at step 0.
            self.on_rank_0(
                lambda: [
                    self.set_aside(path, "damaged" if path in damaged else "abandoned")
                    for newer, path in step_folders(source)
                    if newer > manifest["step"]
                ]
            )
        return folder, manifest

    def create_optimizer_state(self, fqns: set[str]):
        """Lets torch create the state of these parameters: a step with zero gradients and lr 0
        changes no weight.

        Parameters outside of `fqns` get no state: excluded, or never had a gradient.
        """
        for fqn, param in [*self.params.items(), *self.twins.items()]:
            param.grad = torch.zeros_like(param) if fqn in fqns else None
        for optimizer in self.optimizers:
            lrs = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0  # a float, or a tensor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for group, lr in zip(optimizer.param_groups, lrs):
                group["lr"] = lr

    def create_late_state(self, table: dict, late: list[str]):
        """Creates state that the optimizer makes in a later step than its first, for
        read_tensors() to fill. table: of the checkpoint; late: names of such state."""
        for key, saved in table.items():
            fqn, _, name = key.removeprefix("optimizer.").rpartition(".")
            for param in (self.params.get(fqn), self.twins.get(fqn)):
                if param is None or name not in late or name in self.state_of(param):
                    continue
                # a number of its own, or a tensor like the parameter
                like = param if saved.size == param.shape else torch.zeros((), device=param.device)
                owner = next(o for o in self.optimizers if param in o.state)
                owner.state[param][name] = torch.zeros_like(like.detach(), dtype=saved.dtype)

    def fill_twins(self):
        """Copies weights and optimizer state from each parameter to the twin of the same name."""
        for fqn, twin in self.twins.items():
            twin.detach().copy_(self.params[fqn].detach())
            for name, t in self.state_of(twin).items():
                t.copy_(self.state_of(self.params[fqn])[name])

    def tensors(self, with_optimizer, saving=False) -> dict[str, Tensor]:
        """The flat dict for DCP to write, or to read into in place. saving: a number of the
        optimizer's, such as AdamW's step, is in the dict of one rank only, and behind the shards of
        that rank."""
        every = {
            fqn: tensor for module in self.modules for fqn, tensor in named_tensors(module).items()
        } | self.params
        if self.load_base:
            every = {fqn: tensor for fqn, tensor in every.items() if tensor.requires_grad}
        found = {f"model.{fqn}": tensor.detach() for fqn, tensor in every.items()}
        for fqn, param in self.params.items() if with_optimizer else ():
            writes = not (
                saving and isinstance(param, DTensor) and any(param.device_mesh.get_coordinate())
            )
            for name, t in self.state_of(param).items():
                if not isinstance(t, Tensor):
                    raise ValueError(
                        f"optimizer state {name} of {fqn} is a {type(t).__name__}: make it a tensor"
                    )
                if t.numel() > 1 and hasattr(param, "placements") and not hasattr(t, "placements"):
                    raise ValueError(
                        f"optimizer state {name} of {fqn} is no DTensor: DCP would save one "
                        "rank's only"
                    )
                if t.dim() > 0 or writes:
                    found[f"optimizer.{fqn}.{name}"] = t.detach()
        return dict(sorted(found.items(), key=lambda item: item[1].dim() == 0))

    def state_of(self, param) -> dict:
        return {
            name: x
            for optimizer in self.optimizers
            for name, x in optimizer.state.get(param, {}).items()
        }

    def set_aside(self, path, why):
        """Renames a step folder to damaged-N-x or abandoned-N-x: later starts ignore the folder,
        and the user may delete it."""
        name = f"{why.split(':')[0]}-{os.path.basename(path).removeprefix('step-')}-{uuid.uuid4().hex[:4]}"
        target = os.path.join(os.path.dirname(path), name)
        os.rename(path, target)
        self.say(f"{path} is now {target} ({why})")

    def path(self, step) -> str:
        return os.path.join(self.out, "checkpoints", f"step-{step}")

    def say(self, text):
        if self.rank == 0:
            print(f"checkpoint: {text}", flush=True)


def __getattr__(name: str):
    """load_hf and save_hf, for a copy of a recipe and for a notebook. A run without a Hugging Face
    folder never loads their file."""
    if name not in ("load_hf", "save_hf"):
        raise AttributeError(f"module 'checkpoint' has no attribute {name!r}")
    from storage import hf

    return getattr(hf, name)


if __name__ == "__main__":
    from storage.commands import main

    sys.exit(main(sys.argv[1:], __doc__))
