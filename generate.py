"""Text out of a trained model: batched generation with a KV cache, and a command line to sample from any checkpoint.

    python generate.py --checkpoint runs/llama3 --prompt "def "
    python generate.py --checkpoint runs/llama3/checkpoints/step-300 --prompt "class " --prompt "import " --temperature 0
    python generate.py --checkpoint runs/llama3 --prompt "for i in" --top_k 50 --top_p 0.9 --seed 7
    python generate.py --checkpoint HUGGING_FACE_FOLDER --prompt "Who are you?" --chat

B batch (prompts), T tokens, V vocab
"""
import hashlib
import json
import os
import shlex
import sys
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import is_hf_folder, load_model, newest_readable, step_folders
from data import find_tokenizer, load_tokenizer
from distributed.layout import AllGather
from models.attention import PerCall, sdpa
from models.loss import NEVER, log_normalizer
from parallel import whole_vocab
from support.config import Parser, parse_config, usage_error
from support.files import read_json
from support.hf import load_hf_model, read_chat, read_hf_json

PREFILL_CHUNK = 512  # prompt tokens per forward: logits of a whole long prompt are B*T*V numbers that nobody reads


def check_request(config, prompts, max_new_tokens, temperature, top_k, top_p):
    """Raise ValueError, one line, for what the model cannot generate."""
    if not prompts:
        raise ValueError("no prompts: give a list with at least one list of token ids")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: a model continues text, give it at least one token")
        if bad := [t for t in prompt if not 0 <= t < config.vocab_size]:
            raise ValueError(f"prompt {row} has token id {bad[0]}, but vocab_size is {config.vocab_size}, wrong tokenizer?")
        if len(prompt) + max_new_tokens > config.max_seq_len:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens and {max_new_tokens} new ones make {len(prompt) + max_new_tokens}, "
                f"the model's max_seq_len is {config.max_seq_len}: shorten the prompt or lower max_new_tokens"
            )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, needs to be at least 1")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}, needs to be 0 (always the likeliest token) or more")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}, needs to be 0 (all tokens) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}, needs to be above 0 and at most 1 (all tokens)")


def row_generator(seed: int, row: int, device) -> torch.Generator:
    """Each row draws from a stream of its own, so that a sample does not depend on its neighbours in the batch.

    Hashed, so that (seed 0, row 1) and (seed 1, row 0) are not one stream.
    """
    digest = hashlib.sha256(f"{seed}/{row}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """logits (B, V) with -inf for all but the top_k likeliest tokens and the fewest that reach probability top_p."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    drop = torch.zeros_like(ranked, dtype=torch.bool)
    if top_k > 0:
        drop[:, top_k:] = True
    if top_p < 1:
        p = ranked.softmax(dim=-1)
        drop |= p.cumsum(dim=-1) - p >= top_p  # what comes before is already enough; never true of the first
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def sample(logits: Tensor, generators, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """logits (B, V) -> next tokens (B,) and their log-probabilities (B,) in fp32.

    The log-probability is that at the temperature, before top_k and top_p cut anything: the one that a training forward
    over the same tokens gives. Greedy (temperature 0) reports it at temperature 1.
    """
    logits = logits.float() / (temperature or 1.0)
    logprobs = logits.log_softmax(dim=-1)
    if temperature > 0:
        if top_k > 0 or top_p < 1:
            logits = truncate(logits, top_k, top_p)
        # argmax(logits + Gumbel noise) is a draw from softmax(logits), without a sum over V that would round it
        waits = torch.stack([torch.empty_like(logits[0]).exponential_(generator=g) for g in generators])
        logits = logits - waits.log()
    token = logits.argmax(dim=-1)
    return token, logprobs.gather(-1, token[:, None])[:, 0]


@torch.no_grad()
def generate(
    model, prompts: list[list[int]], max_new_tokens: int, temperature=1.0, top_k=0, top_p=1.0, seed=0,
    eot: int | list[int] | None = None, stream=None, logprobs=False,
):
    """Continue each prompt (token ids, any lengths) by up to max_new_tokens; return one list of new ids per prompt.

    A row ends with its first `eot`, or any of several, which is part of the result. Temperature 0 takes the likeliest token.
    What a row gets depends on the model, its prompt, `seed` and its index, not on the rest of the batch (up to rounding).
    stream(row, id) is called for every new token. With logprobs=True returns (ids, logprobs), see sample(). Raises ValueError.
    """
    check_request(model.config, prompts, max_new_tokens, temperature, top_k, top_p)
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    # Padding goes to the left: the last column is then every row's last token, and new tokens are one column for all.
    tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)  # (B, T)
    lengths = torch.tensor([len(p) for p in prompts], device=device)  # (B,)
    start = longest - lengths
    positions = (torch.arange(longest, device=device) - start[:, None]).clamp(min=0)  # (B, T), 0 at the first real token
    cache = model.make_cache(longest + max_new_tokens, start)
    for begin in range(0, longest, PREFILL_CHUNK):
        part = slice(begin, begin + PREFILL_CHUNK)
        logits = model(tokens[:, part], positions=positions[:, part], cache=cache)[:, -1]  # (B, V)

    ends = {eot} if isinstance(eot, int) else set(eot or ())
    generators = [row_generator(seed, row, device) for row in range(len(prompts))]
    new_ids, new_logprobs = [[] for _ in prompts], [[] for _ in prompts]
    running = set(range(len(prompts)))
    for n in range(max_new_tokens):
        token, logprob = sample(logits, generators, temperature, top_k, top_p)  # (B,), (B,)
        ids, values = token.tolist(), logprob.tolist()
        for row in sorted(running):
            new_ids[row].append(ids[row])
            new_logprobs[row].append(values[row])
            if stream is not None:
                stream(row, ids[row])
            if ids[row] in ends:
                running.remove(row)
        if not running or n + 1 == max_new_tokens:
            break
        # rows that have ended go on in the batch, and nobody looks at what they say
        logits = model(token[:, None], positions=(lengths + n)[:, None], cache=cache)[:, -1]  # (B, V)
    return (new_ids, new_logprobs) if logprobs else new_ids


# ---------------------------------------------------------------- rollouts: many samples of each prompt, for grpo.py
class SlotCache(PerCall):
    """Keys and values of one call of attend, for rows of different lengths: a row that has ended is overwritten by the next.

    `view` is shared by all layers and set before each forward: at (R, T), the position of each new token in its row; keys,
    how many of the positions are looked at; mask (R, 1, T, keys); query_rows, see rollout().
    """

    def __init__(self, rows: int, max_len: int, view):
        self.rows, self.max_len, self.view = rows, max_len, view
        self.k = self.v = None  # (R, G, max_len, K)
        self.later = []

    def empty(self) -> "SlotCache":
        return SlotCache(self.rows, self.max_len, self.view)

    def append(self, q: Tensor, k: Tensor, v: Tensor | None, scale=None) -> Tensor:
        """Store k, v (R, G, T, K) at the rows' positions and attend from q (R, H, T, K) to what each row has so far. v None:
        the keys are the values."""
        if self.k is None:
            self.k = k.new_zeros(self.rows, k.shape[1], self.max_len, k.shape[3])
            self.v = None if v is None else torch.zeros_like(self.k)
        row = torch.arange(self.rows, device=q.device)[:, None]
        self.k[row, :, self.view.at] = k.transpose(1, 2)
        if v is not None:
            self.v[row, :, self.view.at] = v.transpose(1, 2)
        T, mask = q.shape[2], self.view.mask
        if T < self.view.query_rows:  # copies of the last query, which nobody reads
            more = self.view.query_rows - T
            q, mask = (torch.cat([x, x[:, :, -1:].expand(-1, -1, more, -1)], 2) for x in (q, mask))
        keys, values = self.view.keys, self.k if v is None else self.v
        return sdpa(q, self.k[:, :, :keys], values[:, :, :keys], mask, scale=scale)[:, :, :T]


def column_logits(h: Tensor, weight: Tensor, *, column: Tensor, mesh=None) -> Tensor:
    """fp32 logits (R, V) at one column of each row: h (R, T/tp, D), column (R,). All others would be computed for nobody."""
    row = torch.arange(h.shape[0], device=h.device)
    if mesh is None:
        return F.linear(h[row, column], weight).float()
    h = AllGather.apply(h, 1, mesh.get_group())  # (R, T, D)
    return whole_vocab(F.linear(h[row, column], weight.to_local()).float(), weight.shape[0], mesh)


def draw(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logits (R, V) fp32 and one uniform number per row (R,) -> tokens (R,) and their log-probabilities at the temperature.

    Temperature 0 takes the likeliest token, and reports its log-probability at temperature 1.
    """
    logits = logits / (temperature or 1.0)
    logits = logits - log_normalizer(logits)[:, None]
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        cdf = logits.double().exp().cumsum(-1)  # in fp32 a sum over V words would round the rare ones away
        # the first token whose share goes beyond u: one of probability 0 never does
        token = torch.searchsorted(cdf, u.double()[:, None] * cdf[:, -1:], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return token, logits.gather(-1, token[:, None])[:, 0]


@torch.no_grad()
def rollout(
    model, prompts: list[list[int]], noise: Tensor, temperature: float, eot: int | list[int], *, max_len: int, rows=512,
    tool=None, tp_mesh=None, batch_invariant=False, agree=lambda *flags: flags,
) -> list[dict]:
    """G samples of each of P prompts, as dicts(ids, logprobs, mask, truncated), those of a prompt next to each other.

    noise (P, G, max_new_tokens): uniform numbers, one per token, so that a sample depends on the weights, its prompt and its
    noise, and not on the row that it is in, its neighbours, or the number of processes. At most `rows` samples run at once;
    rows that have ended are given to the next prompt, which is read once for its G samples. A sample ends with `eot`, or any
    of several, which is part of it, or is truncated: at max_new_tokens, or when prompt and sample have max_len tokens.

    tool(ids so far) -> ids to go on with: they are fed as if sampled, with mask 0 (the model did not choose them). It answers
    the model, never itself.
    model.unknown_ids, where there are any: ids that are never sampled.
    tp_mesh: the model is tensor parallel, and its ranks, given the same arguments, sample the same.
    batch_invariant: every matrix product has shapes whose rounding does not depend on the batch, for exact equality with a
    training forward over max_len tokens (docs/grpo.md says where that was tested).
    agree: see lockstep() in rollouts.py; experts on several ranks need all of them in every forward.
    """
    P, G, max_new = noise.shape
    device = next(model.parameters()).device
    width = tp_mesh.size() if tp_mesh else 1  # under TP activations are cut along the sequence: a column for each rank
    n_rows = max(G, min(rows // G, P) * G, 8 * batch_invariant)
    capacity = max_len + width  # the columns that only fill up `width` may lie behind the last token

    def forward(caches, tokens, at, column):
        """Run tokens (R, T) at positions at (R, T); logits (R, V) of one column of each row."""
        view.at, view.keys = at, capacity if batch_invariant else int(at.max()) + 1
        view.mask = (torch.arange(view.keys, device=device) <= at[:, :, None])[:, None]  # (R, 1, T, keys)
        model.logits = partial(column_logits, column=column, mesh=tp_mesh)
        return model(tokens, positions=at, cache=caches)

    def new_caches(n):
        return [SlotCache(n, capacity, view) for _ in range(model.config.n_layers)]

    def read_prompts(part):
        """(caches, logits after the last token) of some prompts, padded on the right."""
        part = part + part[:1] * (8 * batch_invariant - len(part))
        T = -(-max(len(p) for p in part) // width) * width
        tokens = torch.tensor([p + [0] * (T - len(p)) for p in part], device=device)
        at = torch.arange(T, device=device).expand(len(part), -1)
        caches = new_caches(len(part))
        return caches, forward(caches, tokens, at, torch.tensor([len(p) - 1 for p in part], device=device))

    view = SimpleNamespace(query_rows=8 if batch_invariant else 0)
    ends = torch.tensor([eot] if isinstance(eot, int) else eot, device=device)
    usual_logits, noise, unknown = model.logits, noise.to(device), getattr(model, "unknown_ids", None)
    caches, waiting, results = new_caches(n_rows), deque(range(P)), [None] * (P * G)
    sample = torch.full((n_rows,), -1, device=device)  # which sample a row is at, -1 none
    length, count = torch.zeros_like(sample), torch.zeros_like(sample)  # tokens in the cache; new tokens
    u, ids = torch.zeros(n_rows, max_new, device=device), torch.zeros(n_rows, max_new, dtype=torch.long, device=device)
    logprobs, mask = torch.zeros(n_rows, max_new, device=device), torch.ones(n_rows, max_new, device=device)
    logits, forced = None, {}  # forced: row -> tokens of the tool that are still to be fed
    try:
        while True:
            # refill: whole groups, and not for the sake of a few rows, because each refill is a forward of its own
            free = (sample < 0).nonzero()[:, 0]
            n = min(len(free) // G, len(waiting))
            n = n if n >= min(len(waiting), max(1, n_rows // G // 4)) else 0
            refill, running = agree(n > 0, n > 0 or len(free) < len(sample))
            if not running:
                break
            if refill:
                group = [waiting.popleft() for _ in range(n)]
                read, first = read_prompts([prompts[p] for p in group] or [[0]])
                logits = first.new_zeros(len(sample), first.shape[1]) if logits is None else logits
                for i, p in enumerate(group):
                    slots, T = free[i * G : (i + 1) * G], len(prompts[p])
                    layers = [(layer, one.calls()) for layer, one in zip(caches, read)]
                    for kept, one in (pair for layer, ones in layers for pair in zip(layer.calls(len(ones)), ones)):
                        if kept.k is None:
                            kept.k = one.k.new_zeros(len(sample), *one.k.shape[1:])
                            kept.v = None if one.v is None else torch.zeros_like(kept.k)
                        kept.k[slots, :, :T] = one.k[i, :, :T]
                        if one.v is not None:
                            kept.v[slots, :, :T] = one.v[i, :, :T]
                    logits[slots], length[slots], count[slots] = first[i], T, 0
                    sample[slots], u[slots], mask[slots] = torch.arange(p * G, (p + 1) * G, device=device), noise[p], 1.0
            if logits is None:  # nothing to do here, but other ranks count on this one
                logits = torch.zeros(len(sample), model.config.vocab_size, device=device)

            row = torch.arange(len(sample), device=device)
            at = count.clamp(max=max_new - 1)
            if unknown is not None:
                logits.index_fill_(1, unknown, NEVER)
            token, logprob = draw(logits, u[row, at], temperature)
            for r in list(forced):
                token[r], logprob[r], mask[r, at[r]] = forced[r].pop(0), 0.0, 0.0
                if not forced[r]:
                    del forced[r]
            ids[row, at], logprobs[row, at] = token, logprob
            busy = sample >= 0
            count += busy
            chosen = mask[row, at] > 0
            ended = torch.isin(token, ends) & chosen
            done = busy & (ended | (count == max_new) | (length + 1 >= max_len))
            if tool is not None:
                for r in (busy & chosen & ~done).nonzero()[:, 0].tolist():
                    if r not in forced and (answer := tool(ids[r, : count[r]].tolist())):
                        forced[r] = list(answer)
            if done.any():
                slots = done.nonzero()[:, 0]
                columns = [x[slots].tolist() for x in (sample, count, ids, logprobs, mask, ended)]
                for s, n, *lists, whole in zip(*columns):
                    results[s] = dict(zip(("ids", "logprobs", "mask"), (x[:n] for x in lists)), truncated=not whole)
                sample[slots] = -1
                for r in slots.tolist():
                    forced.pop(r, None)
            # few rows are left, and no prompts for the others: go on with those few
            left = (sample >= 0).nonzero()[:, 0]
            if not waiting and not forced and 8 < len(sample) and max(len(left), 8 * batch_invariant) <= len(sample) // 2:
                left = torch.cat([left, (sample < 0).nonzero()[: max(0, 8 - len(left)), 0]])
                sample, length, count, u, ids, logprobs, mask, token = (
                    x[left] for x in (sample, length, count, u, ids, logprobs, mask, token))
                for kept in (cache for layer in caches for cache in layer.calls()):
                    kept.rows, kept.k = len(left), kept.k[left]
                    kept.v = None if kept.v is None else kept.v[left]
            if not agree(False, bool((sample >= 0).any()))[1]:
                continue  # there may be prompts left
            length.masked_fill_(sample < 0, 0)
            at = length[:, None] + torch.arange(width, device=device)
            tokens = torch.zeros_like(at)
            tokens[:, 0] = token
            logits = forward(caches, tokens, at, torch.zeros_like(length))
            length += sample >= 0
    finally:
        model.logits = usual_logits
    return results


# ---------------------------------------------------------------- text
@dataclass(kw_only=True)
class Config:
    checkpoint: str = "runs/llama3"  # a run folder (its newest checkpoint), a checkpoints/step-N, or a Hugging Face folder
    prompt: str = "def "  # text to continue; give the flag several times for several texts in one batch
    max_new_tokens: int = 200  # tokens to add, at most: a text may end before
    temperature: float = 0.8  # below 1 plays safe, above 1 is bold, 0 always takes the likeliest token
    top_k: int = 0  # choose among this many likeliest tokens only; 0 = all
    top_p: float = 1.0  # choose among the likeliest tokens that together have this probability; 1 = all
    chat: bool = False  # the prompt is a question to a chat model: wrap it in the chat template of its tokenizer
    seed: int = 0  # another seed is another sample
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = a GPU if there is one


def open_checkpoint(folder: str, device="cpu"):
    """(model, tokenizer, eot id, several, or None) of a run, step or Hugging Face folder. Raises ValueError."""
    # bf16 on GPUs: every new token reads all weights once, so half the bytes is twice the speed
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else None
    model, _ = (load_hf_model if is_hf_folder(folder) else load_model)(folder, device, dtype)
    for path in [folder, *(path for _, path in step_folders(folder))]:
        if os.path.isfile(os.path.join(path, "tokenizer.json")):
            try:
                ends = ends_of(path)
            except ValueError:
                ends = [None]  # no name that is known for one: texts run on to max_new_tokens
            return model, load_tokenizer(Path(path, "tokenizer.json")), ends if len(ends) > 1 else ends[0]
    raise ValueError(f"{folder} has no tokenizer.json, its data came without one: call generate.generate with token ids")


def ends_of(folder: str) -> list[int]:
    """The ids that end a text: a Hugging Face folder's eos_token and what its generation_config.json lists; for a checkpoint of
    ours what ended the documents of its training, and the eos_token if its tokenizer came with one. Raises ValueError."""
    eos = read_chat(folder)[1].get("eos_token", "")
    found = [find_tokenizer(folder, name)[1] for name in ([eos] if is_hf_folder(folder) else ["", *[eos] * (eos != "")])]
    if os.path.lexists(os.path.join(folder, "generation_config.json")):
        listed = read_hf_json(folder, "generation_config.json").get("eos_token_id")
        found += [i for i in (listed if isinstance(listed, list) else [listed]) if type(i) is int and i >= 0]
    return list(dict.fromkeys(found))


def has_bos(folder: str) -> bool:
    """Whether texts begin as the tokenizer says: for models from Hugging Face folders, and what grpo.py made of them. The text
    that we train on has no beginning-of-text token."""
    path = step_folders(folder)[0][1] if step_folders(folder) else folder
    about = os.path.join(path, "state.json")
    return is_hf_folder(folder) or os.path.isfile(about) and bool(read_json(about)["state"].get("bos"))


def chat_prompts(folder: str):
    """text -> the prompt with which a chat model is asked it, by the folder's chat template. Raises ValueError."""
    template, special_tokens = read_chat(folder if is_hf_folder(folder) else newest_readable(folder))
    if template is None:
        raise ValueError(f"--chat: {folder} has no chat template (tokenizer_config.json, chat_template.jinja); leave it out")
    try:
        import jinja2.sandbox
    except ImportError:
        raise ValueError("--chat: chat templates are written in jinja2; pip install jinja2") from None

    def fail(message):
        raise jinja2.TemplateError(message)

    # A template is a program, and anyone may have written this one: the sandbox keeps it from Python's objects. The options
    # and names are those that transformers gives it.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals |= dict(raise_exception=fail, strftime_now=lambda text: datetime.now().strftime(text))

    def render(text: str) -> str:
        values = dict(messages=[{"role": "user", "content": text}], tools=None, documents=None, add_generation_prompt=True)
        try:
            return environment.from_string(template).render(**special_tokens, **values)
        except Exception as error:  # whatever the template makes Python raise
            raise ValueError(f"--chat: the chat template of {folder} fails: {error}") from None

    return render


class TextStream:
    """Text from ids one at a time. A character may span several tokens: what is not yet whole UTF-8 is held back."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.begin, self.shown = tokenizer, [], 0, 0

    def push(self, token: int | None) -> str:
        """What can be shown after one more token; None: there are no more, so show what was held back."""
        if token is not None:
            self.ids.append(token)
        # Decoded together with the piece before: some decoders drop the space that a text begins with.
        before = self.tokenizer.decode(self.ids[self.begin : self.shown])
        text = self.tokenizer.decode(self.ids[self.begin :])
        if text.endswith("\ufffd") and token is not None:
            return ""
        self.begin, self.shown = self.shown, len(self.ids)
        return text[len(before) :]


def encode(tokenizer, text: str, bos: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=bos).ids
    except BaseException as error:  # a regular expression of a stranger's tokenizer.json that gives up makes it panic
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer fails on {text[:40]!r}: {error}") from None


def continue_texts(
    model, tokenizer, eot, texts: list[str], max_new_tokens: int, show=None, bos=False, chat=None, **options
) -> list[str]:
    """What the model writes after each text. show(piece) gets the first text and what follows it, as it comes.

    bos: begin as the tokenizer says; False, because our training text has no beginning-of-text token. chat: from
    chat_prompts(); the texts are questions then, and show() gets the answer only.
    """
    prompts = [chat(text) for text in texts] if chat else texts
    ends = eot if isinstance(eot, list) else [eot] * (eot is not None)
    tokenizer.encode_special_tokens = chat is None  # a template's markers are tokens; in any other text they are text
    # an empty text is the beginning of a document, which follows the end of another
    prompts = [encode(tokenizer, text, bos and not chat) or ends[:1] for text in prompts]
    stream = TextStream(tokenizer)

    def on_token(row, token):
        if row == 0 and show is not None:
            show(stream.push(token) if stream.ids or chat else texts[0] + stream.push(token))

    new = generate(model, prompts, max_new_tokens, eot=ends, stream=on_token, **options)
    if show is not None:
        show(stream.push(None))
    return [tokenizer.decode(ids) for ids in new]


def print_sample(run: str, n_params: int, data=None, max_new_tokens=120):
    """Show how the newest checkpoint of a run goes on from the first words of its data (data.TokenData), or from "def ". The
    run is done and saved by now, so nothing here may fail it."""
    try:
        prompt = data.first_words() if data is not None and data.tokenizer_file else "def "
        command = f"python generate.py --checkpoint {run} --prompt {shlex.quote(prompt)}"
        if n_params > 2e9:
            print(f"for a sample: {command}")  # loading it here would keep all devices waiting
            return
        model, tokenizer, eot = open_checkpoint(run, "cuda" if torch.cuda.is_available() else "cpu")
        max_new_tokens = min(max_new_tokens, model.config.max_seq_len // 2)
        (text,) = continue_texts(model, tokenizer, eot, [prompt], max_new_tokens, temperature=0.8, top_p=0.95)
        print(f"checkpoint: {step_folders(run)[0][1]}\nsample (for others: {command}):\n\n{prompt}{text}", flush=True)
    except Exception as error:
        print(f"no sample: {error}", flush=True)


def main(argv: list[str]):
    # --prompt is the one flag that may be repeated, and whose text may hold commas
    repeated = Parser(add_help=False)
    repeated.add_argument("--prompt", action="append")
    given, rest = repeated.parse_known_args(argv)
    if rest and not rest[0].startswith("-"):
        usage_error(f"unexpected argument {rest[0]!r}: the run to sample from is --checkpoint {rest[0]}")
    cfg = parse_config(Config, rest)
    texts = given.prompt or [cfg.prompt]
    options = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, seed=cfg.seed)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
    try:
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU here; use --device cpu")
        options |= dict(bos=has_bos(cfg.checkpoint), chat=chat_prompts(cfg.checkpoint) if cfg.chat else None)
        parts = open_checkpoint(cfg.checkpoint, device)
        if len(texts) == 1:
            continue_texts(*parts, texts, cfg.max_new_tokens, partial(print, end="", flush=True), **options)
            print()
        else:
            for text, new in zip(texts, continue_texts(*parts, texts, cfg.max_new_tokens, **options)):
                print(f"--- {text!r}\n{'' if cfg.chat else text}{new}\n")
    except ValueError as error:
        usage_error(error)


if __name__ == "__main__":
    main(sys.argv[1:])
