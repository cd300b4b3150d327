"""The model's part of evaluate.py, in any layout: log-probabilities of texts, and written answers to prompts.

N requests, B sequences of a forward, T tokens, D dim, V vocab

A request is (context, continuation), two lists of token ids; its score is the log-probability of the continuation after the
context. Every rank gets the same requests and returns all scores. Data ranks share the requests; the pp, cp and tp ranks of a
data rank work together on the same requests.
"""
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel
from checkpoint import has_adapters, load_model, load_weights, saved_model
from distributed.agree import gather
from distributed.checks import check_tp_plan
from distributed.experts import expert_parallel
from distributed.launch import LaunchConfig
from distributed.layout import ExpertConfig, Layout, ParallelConfig
from distributed.pipeline import PipelineConfig, pipeline_forward, pipeline_stages
from distributed.refusals import check_layout, runs_on_cuda
from models.loss import IGNORE, TokenLogprobs, log_normalizer, no_reduce
from rl.decoding import draw_noise, rollout
from rl.packing import lay_out, pieces
from rl.rollouts import lockstep, one_of_each_model, patient_group, whole_weights
from rl.text import Text
from sft.adapters import base_of
from storage.hf import class_of, load_hf_model, read_hf_config
from storage.manifest import is_hf_folder, newest_readable
from support.config import Need, check_range, default_of, flag, spell_flag

NOTHING = ([0], [IGNORE])  # a request of one token without a score
PROGRESS_S = 5  # seconds between the progress lines of a long evaluation

WRITING = Need("where nothing is written: see --task", lambda c: c.kind == "answer")  # see support/config.py
# Inherited flags that are for training only
TRAINING = ("reduce_dtype", "param_dtype", "loss_parallel", "async_tp", "ac", "ac_every", "ac_budget",
            "compile", "cpu_offload", "train_timeout_s", "pp_schedule",
            "pp_schedule_csv")


@dataclass(kw_only=True)
class ScoringConfig(ParallelConfig, ExpertConfig, LaunchConfig, PipelineConfig):
    REFUSED = TRAINING
    checkpoint: str = "runs/llama3"  # a run folder (its newest checkpoint), a checkpoints/step-N, or a Hugging Face folder
    seq_len: int = -1  # tokens of a forward, at most; -1 = the model's max_seq_len, for texts the length of its training
    local_batch_size: int = 16  # sequences per forward of a data rank
    rollout_timeout_s: int = flag(7200, WRITING)  # a rank that waits longer for the others' answers ends the run
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = a GPU, else the CPU

    def __post_init__(self):
        check_range(self, 1, math.inf, "local_batch_size", "rollout_timeout_s")


# ---------------------------------------------------------------- the model
def read_checkpoint(folder: str, chat=None) -> tuple[Text, type, object, str]:
    """(tokenizer, model class, model config, folder of the weights) of a run, step or Hugging Face folder; for a run the folder
    of its newest step. chat: from open_chat(). Reads only small files. Raises ValueError."""
    if is_hf_folder(folder):
        config = read_hf_config(folder)
        if hasattr(config, "mtp_depth"):
            config = replace(config, mtp_depth=0)  # a second prediction is for training only
        return Text(folder, chat=chat), class_of(config), config, folder
    folder = newest_readable(folder)
    if has_adapters(folder):
        base_of(folder)  # raises if the frozen weights are gone
    return Text(folder, chat=chat), *saved_model(folder), folder


def plan_layout(cfg: ScoringConfig, kind: str, model_config, longest: int) -> tuple[ScoringConfig, Layout]:
    """The flags with their dtypes resolved, and the Layout. kind: of the task. longest: most tokens of a forward. Raises
    ValueError for flags that cannot work."""
    values = {f.name: getattr(cfg, f.name) for f in fields(cfg) if getattr(cfg, f.name) != default_of(f)}
    if given := [spell_flag(name, values[name]) for name in TRAINING if name in values]:
        raise ValueError(f"{', '.join(given)}: nothing is trained here; leave it out")
    dtype = cfg.compute_dtype
    if dtype == "auto":
        dtype = "bfloat16" if runs_on_cuda(cfg.device) else "float32"
    # Without an optimizer, nothing needs more digits than the matmuls. Any number of micro-batches works with GPipe.
    cfg = replace(cfg, compute_dtype=dtype, param_dtype=dtype, pp_schedule="GPipe" if cfg.pp > 1 else cfg.pp_schedule)
    cfg.kind = kind  # not a flag, but flags need it, see WRITING
    step = pieces(cfg)
    return cfg, check_layout(cfg, model_config, seq_len=max(longest // max(step, 1), 1) * step,
                             local_batch_size=cfg.local_batch_size, global_batch_size=-1, device=cfg.device)


def open_model(folder: str, layout: Layout, cfg, Model, model_config) -> list[nn.Module]:
    """This rank's stages (one stage without --pp) with the weights of a run, step or Hugging Face folder, ready for score() and
    complete(). Raises the same ValueError on all ranks."""
    if layout.world_size == 1:
        load = load_hf_model if is_hf_folder(folder) else load_model
        stages = [load(folder, layout.device, layout.compute_dtype)[0]]
    else:
        with torch.device("meta"):
            model = Model(model_config)
        check_tp_plan(model, parallel.TP_STYLES)  # not check_model, because check_model counts gradients
        stages = pipeline_stages(model, layout, cfg) if cfg.pp > 1 else [model]
        for stage in stages:
            if cfg.tp > 1:
                parallel.tensor_parallel(stage, layout, cfg)
            if layout.has_experts:
                expert_parallel(stage, layout)
            if cfg.cp > 1:
                parallel.context_parallel(stage, layout, cfg)
            parallel.shard(stage, layout, cfg)
            parallel.init_weights(stage, layout, 0, skip=lambda fqn: True)
        load_weights(stages, folder)
    for stage in stages:
        stage.reshards = layout.reshards
    return stages


# ---------------------------------------------------------------- text -> requests
def opening_ids(text: Text, string: str) -> list[int]:
    """Ids of a text without context: with the tokenizer's first token, unless already in the text, as in chat prompts."""
    markers_are_tokens = not text.tokenizer.encode_special_tokens
    begins = text.chat or markers_are_tokens and string.startswith(text.tokenizer.id_to_token(text.first))
    return text.ids(string, text.bos and not begins)


def encode_pair(text: Text, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Both texts as token ids, cut as in lm-eval: spaces at the end of the context belong to the continuation; the context
    alone has n tokens, and the first n tokens of both together are the context. Without a context, text.first is the context.
    Raises ValueError if no token is left to be scored."""
    before = context.rstrip()
    after = context[len(before) :] + continuation
    if not before:
        head, tail = [], text.ids(after)
    else:
        head, whole = opening_ids(text, before), opening_ids(text, before + after)
        tail = whole[len(head) :]
        if not tail and whole != head:  # both share a token; the shared token is scored
            head, tail = whole[:-1], whole[-1:]
    if not tail:
        raise ValueError(f"{after!r} has no tokens")
    return head or [text.first], tail


def rolling_windows(ids: list[int], first: int, longest: int, stride: int) -> list[tuple[list[int], list[int]]]:
    """Requests that score each token of a text once, beginning after the token `first`. A forward has at most `longest` tokens;
    each window after the first scores `stride` tokens, with as much context as fits."""
    whole, windows, done = [first, *ids], [], 0
    while done < len(ids):
        end = min(done + (stride if done else longest), len(ids))
        windows.append((whole[max(0, end - longest) : done + 1], whole[done + 1 : end + 1]))
        done = end
    return windows


def check_requests(requests, room: int, vocab_size: int) -> int:
    """Number of requests above `room` tokens; their contexts lose the beginning. Raises ValueError for a continuation that
    leaves no room for a context, and for ids outside of the model's vocabulary."""
    for context, continuation in requests:
        if len(continuation) >= room:
            raise ValueError(f"{len(continuation):,} tokens are to be scored as a whole, but there is room for {room - 1:,}")
        if (last := max(context + continuation)) >= vocab_size:
            raise ValueError(f"token id {last} in a text, but the model's vocab_size is {vocab_size}: wrong tokenizer?")
    return sum(len(context) + len(continuation) > room for context, continuation in requests)


def check_finite(logprobs: list[float]) -> None:
    if n := len(logprobs) - sum(map(math.isfinite, logprobs)):
        raise ValueError(f"{n:,} of {len(logprobs):,} log-probabilities are no numbers: the model has diverged, or is damaged")


# ---------------------------------------------------------------- requests -> scores
def label_scores(h: Tensor, weight: Tensor, labels: Tensor, denom=None, all_reduce=no_reduce, vocab_start=0) -> Tensor:
    """(2, ...) in fp32: the log-probability of each label (...), and 1.0 if the label is the likeliest token; 0 for labels
    IGNORE. h (..., D), weight (V/tp, D); vocab parallelism as in models.loss.linear_cross_entropy."""
    wanted = labels != IGNORE  # the head is a large part of a forward, so we leave out the contexts
    found = h.new_zeros(2, int(wanted.sum()), dtype=torch.float32)
    for rows, logits, index, mine in TokenLogprobs.chunks(h[wanted], weight, labels[wanted], 1.0, vocab_start, None):
        target = all_reduce(torch.where(mine, logits.gather(1, index)[:, 0], 0.0), "sum")
        top, place = logits.max(1)
        is_best = all_reduce(top.clone(), "max") == top
        # the first of equally likely tokens, as in argmax
        best = -all_reduce(torch.where(is_best, -(place + vocab_start), -(2**40)), "max")
        found[:, rows] = torch.stack([target - log_normalizer(logits, all_reduce), (best == labels[wanted][rows]).float()])
    scores = h.new_zeros(2, *labels.shape, dtype=torch.float32)
    scores[:, wanted] = found
    return scores


def keep_scores(stages: list[nn.Module], layout: Layout) -> list[Tensor]:
    """Make the last stage's forward append label_scores() of its labels to the returned list."""
    kept, scores = [], label_scores
    if layout.tp > 1:
        scores = partial(parallel.vocab_parallel_loss, mesh=layout.mesh["tp"], loss=label_scores)

    def token_loss(h, weight, labels, denom):
        kept.append(scores(h, weight, labels, denom))
        return h.new_zeros(())  # a loss, not used

    for stage in stages:
        stage.token_loss = token_loss
    return kept


def pack_requests(requests, longest: int, layout: Layout) -> dict[str, Tensor]:
    """The model's arguments, (B, T/cp) each. Label t is the token after input t; a context that is too long loses its
    beginning. Padding is on the right, invisible to all tokens."""
    rows = []
    for context, continuation in requests:
        ids = (context + continuation)[-longest - 1 :]
        labels = [IGNORE] * (len(ids) - 1 - len(continuation)) + continuation
        rows.append([dict(tokens=torch.tensor(ids[:-1]), labels=torch.tensor(labels), positions=torch.arange(len(labels)))])
    T = max(len(row["tokens"]) for (row,) in rows)
    return lay_out(rows, -(-T // pieces(layout)) * pieces(layout), layout, {"labels": IGNORE})


@torch.no_grad()
def score(stages: list[nn.Module], layout: Layout, requests: list[tuple], longest: int) -> list[tuple[float, bool]]:
    """(log-probability of the continuation in nats, whether greedy decoding gives the continuation) of each request, on every
    rank. longest: most tokens of a forward. Raises ValueError on every rank for a log-probability of nan or inf."""
    kept, report = keep_scores(stages, layout), progress("scored", len(requests), layout)
    sums = torch.zeros(2, len(requests), dtype=torch.float64, device=layout.device)
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i][0]) - len(requests[i][1]))  # like lengths together
    size, multiple = layout.local_batch_size * layout.data_ranks, layout.microbatch_size if layout.pp > 1 else 1
    for begin in range(0, len(order), size):
        batch = order[begin : begin + size]
        mine = batch[layout.data_rank :: layout.data_ranks]
        # All data ranks run equally many forwards and micro-batches, because the collectives inside need all ranks.
        rows = -(-len(batch) // (layout.data_ranks * multiple)) * multiple
        kwargs = pack_requests([requests[i] for i in mine] + [NOTHING] * (rows - len(mine)), longest, layout)
        if layout.pp > 1:
            pipeline_forward(stages, kwargs, layout)
        else:
            stages[0](**kwargs)
        if kept and mine and layout.coordinate("tp") == 0:  # all tp ranks have the same scores, cp ranks a part each
            sums[:, mine] = torch.cat(kept, 1).sum(2, dtype=torch.float64)[:, : len(mine)]
        kept.clear()
        report(begin + size)
    dist.all_reduce(sums)
    check_finite(sums[0].tolist())
    return [(total, hits == len(request[1])) for total, hits, request in zip(*sums.tolist(), requests)]


# ---------------------------------------------------------------- prompts -> texts
@torch.no_grad()
def complete(
    model, layout: Layout, timeout_s: int, text: Text, prompts: list[list[int]], max_new_tokens: int, temperature=0.0, seed=0,
    stop: list[str] = (), **options,
) -> list[dict]:
    """The model's answer to each prompt: dicts(ids, logprobs, text, truncated), on every rank. An answer ends before its first
    `stop` string, or with an id of text.ends, or is truncated. options: top_k and top_p of rollout(). Raises ValueError on
    every rank if the model gives no probabilities."""
    group = patient_group(dist.group.WORLD, timeout_s) if layout.world_size > 1 else None
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    mine = order[layout.data_rank :: layout.data_ranks]
    noise = draw_noise([f"{seed}/{i}" for i in mine], 1, max_new_tokens)
    report, begun = progress("answered", len(prompts), layout), set()

    def on_token(sample, token):
        begun.add(sample)
        report(max(0, len(begun) - layout.local_batch_size) * layout.data_ranks)  # the rest may be unfinished

    with whole_weights(model):
        samples = rollout(
            model, [prompts[i] for i in mine], noise, temperature, text.ends,
            max_len=max(map(len, prompts), default=0) + max_new_tokens, rows=layout.local_batch_size, on_token=on_token,
            stop=ends_with_stop(text, stop) if stop else None, agree=lockstep(layout, timeout_s),
            tp_mesh=layout.mesh["tp"] if layout.tp > 1 else None, **options)
    for i, s in zip(mine, samples):
        s["index"], s["text"] = i, text.decode(s["ids"])
        if found := [place for string in stop if (place := s["text"].find(string)) >= 0]:
            s["text"], s["truncated"] = s["text"][: min(found)], False
    whole = sum(one_of_each_model(gather(samples, group), layout), [])
    check_finite([logprob for s in whole for logprob in s["logprobs"]])
    return sorted(whole, key=lambda s: s["index"])


def ends_with_stop(text: Text, stop: list[str]) -> Callable:
    """A function ids so far -> whether a stop string has just been completed. Only the last tokens are decoded: a token has at
    least one byte of text."""
    tail = max(len(string.encode()) for string in stop) + 8
    return lambda ids: any(string in text.decode(ids[-tail:]) for string in stop)


def progress(what: str, total: int, layout: Layout) -> Callable:
    """A function report(done) that may be called often: rank 0 prints a line every few seconds."""
    began = said = time.monotonic()

    def report(done: int):
        nonlocal said
        now, done = time.monotonic(), min(done, total)
        if layout.rank == 0 and now - said > PROGRESS_S:
            said = now
            left = f", {(now - began) / done * (total - done):.0f} s left" if done else ""
            print(f"{what} {done:,} of {total:,}{left}", flush=True)

    return report
