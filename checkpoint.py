"""Saves and loads checkpoints: a crash loses no checkpoint, and no run trains on a damaged one.

    python checkpoint.py ls runs/llama3                           # steps, sizes, layouts; quick: reads manifests only
    python checkpoint.py verify runs/llama3                       # reads all bytes; exit status 0: every file is undamaged
    python checkpoint.py diff STEP_FOLDER STEP_FOLDER             # number of different tensors, with the largest differences
    python checkpoint.py average runs/llama3 OUT --last 2         # the mean of the weights of the newest steps, to sample from
    python checkpoint.py to_hf runs/llama3 OUT                    # a run's newest checkpoint in Hugging Face's format
    python checkpoint.py to_hf runs/lora OUT --adapter            # the adapters of a run with --lora_rank, in peft's format
    python checkpoint.py from_hf HUGGING_FACE_FOLDER runs/theirs  # and back

torch's distributed checkpoint (DCP) writes the tensors, every rank its shards, and any layout reads
them. But a process may be killed at any moment, and a disk may return other bytes than were
written. Therefore checkpoint.py adds:
  - a save goes to step-N.tmp-x and is renamed to step-N at the end, so a folder named step-N is always complete;
  - manifest.json lists size and crc32 of every file; DCP by itself loads a flipped bit in a tensor without an error;
  - keys, shapes and dtypes are compared before a tensor is touched; DCP overwrites in place while reading, and casts;
  - nothing is unpickled, for a pickle can run any code: in place of DCP's pickle there is plain JSON, tensors.json.
storage/writer.py writes step folders, storage/run_tensors.py names a run's tensors, and
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

import flags.interrupt  # noqa: F401  Ctrl-C ends in one line, from here on

import math
import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from corpus.tokenizer import tokenizer_and_beside
from distributed.agree import Failed, fail_together, gather, new_gloo_group, on_rank_0, rank_in
from flags.config import Need, flag, given_flags, own_rank
from flags.files import json_bytes, matches, read_json, step_folders
from storage.newest import resume_source, saved_state
from storage.optimizer_numbers import OptimizerNumbers, find_copies, merge_numbers, sum_copies
from storage.provenance import check_machines, code_roots, git_commit, local_code, summarize_code
from storage.run_tensors import RunTensors
from storage.source_tokenizer import has_new_ids, ids_of_run
from storage.unsaved import Unsaved
from storage.writer import Writer, describe_room, layout_in_manifest

# Conditions without which a flag has no effect: see flags/config.py
INIT = Need("without --init_from", lambda c: c.init_from)
LOADING = Need(
    "without --init_from or a checkpoint in --out", lambda c: c.init_from or step_folders(c.out)
)
SAVING = Need("with --load_only", lambda c: not c.load_only)
EVER = Need("with --checkpoint_every 0", lambda c: c.checkpoint_every)
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
    # of the export, as of checkpoint.py to_hf; float32 rounds nothing
    export_dtype: Literal["float32", "bfloat16", "float16"] = flag("float32", EXPORT)


# --- The contents of a checkpoint ---
def loaded_later(cfg: CheckpointConfig, out: str) -> Callable[[str], bool]:
    """A function: fqn -> whether Checkpoints.load will overwrite the parameter.
    parallel.init_weights need not draw those."""
    ours = resume_source(out, cfg.init_from, cfg.load_step)
    # files of Hugging Face may lack multi-token prediction
    hf_folder = cfg.init_from if ours is None else ""
    kept = [name.removeprefix("model.") for name in cfg.exclude_from_loading]
    if hf_folder:
        kept.append("mtp")
    return lambda fqn: bool(ours or hf_folder) and not matches(kept, f"model.{fqn}")


class Checkpoints:
    """Saves and loads one run. Build last, when the weights exist and the optimizer holds the
    parameters.

    modules: this rank's part of the model (several with interleaved pipeline stages), under the
    full model's fqns.
    optimizer: one optimizer, or a list of several; those that share a parameter give their states
    different names. identity:
    {"model": ..., "data": ..., "optimizer": ...}; a continued run must not change these values.
    load_base: with --lora_rank a function load_base(own, group); a checkpoint then holds only the
    adapters. The function fills the frozen weights and returns the entry "base" of state.json, which
    names these weights. own: where this run's own checkpoint is, None for a new run; group: this
    class's process group.
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
        self.flags = config
        # for the model card of an export
        self.made_by = {
            "recipe": os.path.basename(sys.argv[0]),
            "data": config.get("data") or config.get("env"),
            "given": given_flags(cfg) if is_dataclass(cfg) else {},
        }
        self.out = out
        self.modules = modules
        self.identity = identity
        self.tokenizer_file = tokenizer_file
        self.load_base = load_base
        self.base = None
        self.loaded = None  # the step folder that load() continued
        self.has_trained = False  # in this start
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self.run = RunTensors(modules, optimizers, only_trained=bool(load_base))
        self.numbers = OptimizerNumbers(optimizers, self.run.names)
        self.unsaved = Unsaved(modules)
        self.group = new_gloo_group("checkpoint") if dist.is_initialized() else None
        self.rank = rank_in(self.group)
        self.copies = find_copies(
            self.run.params | self.run.buffers(), partial(gather, group=self.group)
        )
        # read now: later edits of a file are not the running code
        self.code = {}
        if source and own_rank("LOCAL_RANK") == 0:
            self.code = local_code()
        saves = config.get("checkpoint_every") and not cfg.load_only
        check_machines(self.code, out if saves else "", partial(gather, group=self.group))
        git = {}
        if self.code:
            git = git_commit(code_roots()[0], [*self.code])
        self.made_from = summarize_code(git, self.code)  # for config.json
        # of the run, from its step 0 on: a step folder of another run must not be continued in silence
        self.id = run_id(out) or uuid.uuid4().hex[:12]
        self.made_from["id"] = self.id
        beside = self.read_tokenizer(learnt)
        beside |= {"config.json": json_bytes(config), "recipe.py": source.encode()}
        if self.code:
            beside["code.json"] = json_bytes(self.code)
        if git:
            beside["provenance.json"] = json_bytes(git)
        layout = layout_in_manifest(config)
        self.writer = Writer(
            out,
            self.group,
            beside,
            layout,
            self.say,
            in_process=cfg.checkpoint_async == "process",
            keep_latest_k=cfg.keep_latest_k,
            after_save=cfg.after_save,
            load_only=cfg.load_only,
        )
        if saves and config.get("steps"):
            room = describe_room(
                out, self.size(optimizers), self.saves_to_come(), cfg.keep_latest_k
            )
            if room:
                self.say(room)
        for optimizer in optimizers:
            # No weight may change during a copy. The optimizer waits by itself, so no training loop
            # has to.
            optimizer.register_step_pre_hook(self.before_step)

    def size(self, optimizers: list) -> float:
        """Bytes of a checkpoint, about: the weights that it holds, and a moment or two of those that
        are trained. Of all pipeline stages, each of which is on equally many ranks."""
        n_bytes = sum(p.numel() * p.itemsize for p in self.run.params.values())
        for optimizer in optimizers:
            moments = 1
            if "betas" in optimizer.defaults:
                moments = 2
            for group in optimizer.param_groups:
                for p in group["params"]:
                    dtype = optimizer.defaults.get("moment_dtype", p.dtype)
                    n_bytes += moments * p.numel() * dtype.itemsize
        total = sum(gather(n_bytes, self.group)) * self.flags.get("pp", 1)
        return total / self.writer.world_size + self.writer.size_beside()

    def saves_to_come(self) -> int:
        done = max((step for step, _ in step_folders(self.out)), default=0)
        return math.ceil(max(self.flags["steps"] - done, 0) / self.flags["checkpoint_every"])

    def before_step(self, *_) -> None:
        self.has_trained = True
        self.writer.wait_staged()

    def read_tokenizer(self, learnt) -> dict[str, bytes]:
        """The files of the tokenizer on rank 0, for every checkpoint, and its special ids. Read
        before training, so that errors in these files appear before."""
        file = None  # read by rank 0, in a run that saves
        if self.rank == 0 and self.tokenizer_file and not self.cfg.load_only:
            file = self.tokenizer_file
        beside = fail_together(lambda: tokenizer_and_beside(file) if file else {}, self.group)
        new_ids = has_new_ids(self.cfg.exclude_from_loading)
        self.begins, self.generation, new = on_rank_0(
            lambda: ids_of_run(
                self.out, self.cfg.init_from, self.cfg.load_step, new_ids, file, learnt
            ),
            self.group,
        )
        if self.generation is not None and file:
            beside["generation_config.json"] = json_bytes(self.generation)
        if new and self.tokenizer_file:
            from storage.other_tokenizer import describe_ends

            self.say(describe_ends(self.tokenizer_file, new))
        if file and self.begins:
            from storage.other_tokenizer import describe_beginning

            line = describe_beginning(file)
            if line:
                self.say(line)
        return beside

    # --- save ---
    def save(
        self,
        step: int,
        state: dict,
        last: bool = False,
        model_only: bool = False,
        files: dict[str, bytes] | None = None,
    ) -> bool:
        """Writes checkpoints/step-<step>; every rank calls. state: JSON values, returned by a later
        load(). files: {name: bytes}, given by rank 0 alone, to be written beside state.json. Large
        contents belong there, because load() sends the whole state to every rank.

        False: nothing was saved, one line has said why, and older checkpoints are untouched; the
        last save of a run raises
        Failed instead. With checkpoint_async save() returns as soon as the copy to CPU memory
        has begun.
        """
        if self.cfg.load_only:
            return False
        self.writer.finish_flight()
        # Turned into text now, because the loop may change `state` while the background thread
        # writes.
        about = {"state.json": json_bytes(self.describe_state(step, state, model_only))}
        about |= files or {}
        if last or self.cfg.checkpoint_async == "off":  # the last save has nothing to overlap with
            saved = self.writer.write(
                step, about, lambda: self.run.named(not model_only, saving=True)
            )
            if last and not saved:
                raise Failed(
                    f"the last checkpoint, step {step}, could not be saved to {self.out}: "
                    f"{self.writer.why_not}"
                )
            return saved
        tensors = self.run.named(not model_only, saving=True)
        # of buffers a copy at once: the next forward may change them while the other copy is under
        # way
        for fqn in self.run.buffers():
            if f"model.{fqn}" in tensors:
                tensors[f"model.{fqn}"] = tensors[f"model.{fqn}"].clone()
        self.writer.stage(tensors, step, about)
        return True

    def describe_state(self, step: int, state: dict, model_only: bool) -> dict:
        """state.json of a save. Raises Failed on all ranks for what no checkpoint can hold; rank 0
        names what a checkpoint does not hold."""
        if self.begins:  # a run from a folder begins texts as the folder does
            state = state | {"bos": True}
        about = dict(
            step=step, model_only=model_only, identity=self.identity, state=state, run=self.id
        )
        own = fail_together(lambda: self.own_numbers(model_only), self.group)
        about |= on_rank_0(merge_numbers, self.group, value=own)
        names = self.unsaved.names()
        for text in on_rank_0(self.unsaved.sentences, self.group, value=names):
            self.say(text)
        if self.base:
            about["base"] = self.base
        return about | {"made_by": self.made_by}

    def own_numbers(self, model_only: bool) -> tuple[dict, dict, list]:
        """What merge_numbers() takes of each rank."""
        sums = sum_copies(self.copies)
        if model_only:
            return {}, sums, []
        return self.numbers.changed(), sums, self.numbers.late()

    def close(self, export: bool = False) -> None:
        """Waits for the running save, and raises the save's error. export: then write --export_hf,
        if given."""
        self.writer.close()
        if not export or not self.cfg.export_hf:
            return
        from storage.hf_write import save_hf
        from storage.model_card import card_of_step, write_card

        if self.loaded and not self.has_trained:  # the flags of this start have trained nothing
            card = card_of_step(self.loaded, self.cfg.export_dtype)
        else:
            about = {"identity": self.identity, "made_by": self.made_by}
            metrics = os.path.join(self.out, "metrics.jsonl")
            card = write_card(about, self.made_from, metrics, self.cfg.export_dtype)
        try:
            save_hf(
                self.modules,
                self.cfg.export_hf,
                getattr(torch, self.cfg.export_dtype),
                tokenizer_file=self.tokenizer_file,
                generation=self.generation,
                card=card,
            )
        except Failed as error:
            raise RuntimeError(f"--export_hf {self.cfg.export_hf}: {error}") from None
        self.say(
            "the export was not compared with transformers: python checkpoint.py to_hf "
            f"{self.out} OUT makes another, and compares it"
        )

    # --- load ---
    def load(self) -> dict | None:
        """Continues the run, or starts it from --init_from: weights and optimizer state in place,
        on every rank.

        Returns the state given to save(); None when this run starts at step 0. Raises ValueError,
        the same on all ranks, before a tensor is touched.
        """
        cfg = self.cfg
        start = on_rank_0(
            lambda: resume_source(self.out, cfg.init_from, cfg.load_step, cfg.init_model_only),
            self.group,
        )
        if self.load_base:
            own = None
            if start is not None and start.folder == self.out:
                own = start
            self.base = self.load_base(own, self.group)
            if own is None:
                return None
        if start is None:
            self.load_hf()
            return None
        if cfg.init_from and start.folder == self.out and not self.base:
            self.say(
                f"--init_from {cfg.init_from} is IGNORED: {self.out} has checkpoints of its own"
            )
        from storage.changes import compare_start

        # only runs that begin with saved weights need the file
        from storage.loading import choose_step, describe_load, put_into_run, set_newer_aside

        folder, manifest, damaged = choose_step(start.folder, start.step, self.group, self.say)
        if start.folder == self.out and not cfg.load_only:
            # Rename only after a good checkpoint was found; otherwise the next start would silently
            # begin at step 0.
            on_rank_0(
                lambda: set_newer_aside(self.out, manifest["step"], damaged, self.say), self.group
            )

        differ = on_rank_0(
            lambda: compare_start(
                folder,
                start,
                start.folder == self.out,
                self.identity,
                cfg.exclude_from_loading,
                self.flags,
            ),
            self.group,
        )
        put_into_run(
            self.run,
            self.numbers,
            folder,
            manifest,
            everything=start.everything,
            excluded=self.excluded(),
            group=self.group,
        )
        excluded = self.excluded()
        for line in describe_load(folder, manifest, start.everything, differ, self.code, excluded):
            self.say(line)
        # weights and optimizer state of another run, but other data or schedule: from step 0
        if not start.everything or differ:
            return None
        self.loaded = folder
        self.has_trained = False  # the optimizers made their state in a step of zero gradients
        if start.folder == self.out:
            on_rank_0(lambda: self.keep_id(folder), self.group)
        return on_rank_0(lambda: saved_state(folder), self.group)

    def keep_id(self, folder: str) -> None:
        """The id of the run that is continued; a line if the step folder has another id than the
        run folder. Checkpoints of before 0.11 have no id."""
        there = read_json(folder, "state.json").get("run")
        here = run_id(self.out)
        if there and here and there != here:
            self.say(
                f"{folder} is of ANOTHER RUN, {there}, and {self.out} of the run {here}: the curve "
                f"of {self.out}/metrics.jsonl joins the two; if nobody put the step there on "
                "purpose, remove it and start again"
            )
        if there and not here:
            self.id = there
            self.made_from["id"] = there

    def excluded(self) -> list[str]:
        """Names of --exclude_from_loading, as fqns and patterns."""
        return [name.removeprefix("model.") for name in self.cfg.exclude_from_loading]

    def load_hf(self) -> None:
        """The weights of --init_from, if it is a Hugging Face folder."""
        if not self.cfg.init_from:
            return
        from storage.loading import check_excluded

        check_excluded(self.excluded(), self.modules, self.group)
        from storage.hf import load_hf

        load_hf(self.modules, self.cfg.init_from, self.excluded(), self.group)
        self.say(f"step 0, with the weights of {self.cfg.init_from} (Hugging Face)")

    def say(self, text):
        if self.rank == 0:
            print(f"checkpoint: {text}", flush=True)


def run_id(out: str) -> str:
    """The id of the run whose checkpoints are in a run folder; "" for a new run."""
    if not step_folders(out):
        return ""
    try:
        return str(read_json(out, "config.json")["_run"]["id"])
    except (OSError, ValueError, KeyError, TypeError):  # a run of before 0.11, or no config.json
        return ""


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
