"""The decoder of generate.py and grpo.py: samples of each prompt, with a cache of keys and values.

P prompts, G samples of each, R rows (samples that run at once), T tokens of a row in one forward, V
vocab

rollout() keeps R rows busy: read some prompts, copy each prompt to the rows of its G samples, add
one token to all rows, and give the rows of finished samples to the next prompts.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distributed.layout import AllGather
from models.attention import sdpa
from models.loss import NEVER, log_normalizer
from parallel import whole_vocab
from rl.sample import Sample

# prompt tokens per forward: activations of a whole long prompt would need more memory than its
# cache
PREFILL_CHUNK = 512
# attention runs over a multiple of so many keys: few shapes, and all of them even for a GPU's
# kernels
KEY_BUCKET = 64
DRAW_CHUNK = 64  # tokens of the vocabulary with one sum, see draw()
TINY = 1e-30  # temperature, below which fp32 logits may overflow
# likeliest tokens among which top_p is looked for before the whole vocabulary is sorted
CANDIDATES = 1024
# --batch_invariant: from 8 rows on, the rounding of a matrix product did not depend on the number
# of rows
FEWEST = 8
# devices that compute beside the host, see draw_ahead(); and the most tokens per call of it
RUN_AHEAD = ("cuda",)
AHEAD = 64


class RowCache:
    """Keys and values of R rows in every block, so that a new token costs one token and not the
    whole sequence.

    Models take this object as `cache`. Call place() before each forward, with the places of the
    tokens. Memory is taken at the first forward, when the shapes are known (local shapes under TP).
    """

    def __init__(self, rows: int, max_len: int, fixed_shapes=False):
        """fixed_shapes: attend with at least FEWEST queries to all max_len keys, for
        --batch_invariant."""
        self.rows = rows
        self.max_len = max_len
        self.fixed_shapes = fixed_shapes
        # (block, n-th call of attend in the block): [keys, values], each (rows, kv heads, max_len,
        # head dim)
        self.kept = {}
        self.write = write_places

    def place(self, at: Tensor, keys: list[int], rows: Tensor | None = None):
        """Set the places of the next forward: positions at (R, T) of these rows (R,), None: of all
        rows. keys: for each row a number above its positions. Neighbours with about as many keys
        attend together, to no more keys than they need: in a batch of samples of different lengths
        most keys would be those that only the longest sample has."""
        self.at = at
        self.chosen = rows
        self.parts = []
        self.added = {}  # numbers added to the scores of a part, see mask_of()
        begin = 0
        if rows is None:
            rows = torch.arange(self.rows, device=at.device)
        self.row = rows[:, None]  # (R, 1)
        n_keys = [self.keys_read(n) for n in keys]
        self.n_keys = max(n_keys)
        for _, part in groupby(n_keys, lambda n: int(2 * math.log2(n))):
            part = [*part]
            n = max(part)
            end = begin + len(part)
            column = torch.arange(n, device=at.device)
            # mask (rows, 1, T, n)
            self.parts.append((slice(begin, end), column, column <= at[begin:end, None, :, None]))
            begin = end

    def keys_read(self, n: int) -> int:
        """The keys that a row with n of them attends to: few different numbers."""
        if self.fixed_shapes:
            return self.max_len
        return min(-(-n // KEY_BUCKET) * KEY_BUCKET, self.max_len)

    def attend(self, block: str, reach: Tensor | None = None):
        """The attend of one block in one forward. A block may attend several times (differential
        attention): the n-th call has keys and values of its own, and continues those of the n-th
        call in the previous forward. reach, sinks: see models.attention.causal_attention."""
        calls = count()
        return lambda q, k, v, scale=None, sinks=None: self.append(
            (block, next(calls)), q, k, v, scale, reach, sinks
        )

    def append(
        self, call, q: Tensor, k: Tensor, v: Tensor | None, scale, reach=None, sinks=None
    ) -> Tensor:
        """Store k, v (R, kv heads, T, head dim) and attend from q (R, heads, T, head dim) to all
        earlier tokens of the row, or to the last tokens of reach (R or 1, T). v None: the keys are
        the values, as in DeepSeek's latents."""
        new = [x.transpose(1, 2) for x in (k, v) if x is not None]
        if call not in self.kept:
            self.kept[call] = [
                x.new_zeros(self.rows, x.shape[2], self.max_len, x.shape[3]) for x in new
            ]
        self.write(self.kept[call], new, self.row, self.at)
        numbers = range(len(self.parts))
        out = [self.attend_part(call, q, number, scale, reach, sinks) for number in numbers]
        if len(out) == 1:
            return out[0]
        return torch.cat(out)

    def mask_of(self, number: int, dtype: torch.dtype, heads: int) -> Tensor:
        """The mask of a part, each row for so many heads, as numbers to add to the scores, made
        once per forward: torch would make the same numbers of a boolean mask in every layer, with
        four kernels on a GPU."""
        made = number, heads
        if made not in self.added:
            _, _, seen = self.parts[number]
            R, _, T, n = seen.shape
            added = seen.new_full((R, heads, T, n), -torch.inf, dtype=dtype)
            added.masked_fill_(seen, 0.0)
            self.added[made] = added.view(R * heads, 1, T, n)
        return self.added[made]

    def attend_part(self, call, q: Tensor, number: int, scale, reach, sinks) -> Tensor:
        """The attention of neighbouring rows, see place()."""
        rows, column, seen = self.parts[number]
        q = q[rows]
        R, H, T, K = q.shape
        places = rows
        if self.chosen is not None:
            places = self.chosen[rows]
        kept = self.kept[call]
        keys = kept[0][places, :, : len(column)]  # (R, kv heads, S, head dim)
        values = kept[-1][places, :, : len(column)]
        heads = 1
        if T == 1 and sinks is None and not self.fixed_shapes:
            # heads with the same keys become queries of one head, so the keys are read once for all
            # of these heads. Each kv head is a row of its own: the kernel then writes the heads in
            # their order
            heads = keys.shape[1]
            q = q.reshape(R * heads, 1, -1, K)
            keys = keys.flatten(0, 1)[:, None]  # (R * kv heads, 1, S, head dim)
            values = values.flatten(0, 1)[:, None]
        if reach is None:
            mask = self.mask_of(number, q.dtype, heads)
        else:
            if len(reach) > 1:
                reach = reach[rows]
            mask = seen & (column > (self.at[rows] - reach)[:, None, :, None])
            if heads > 1:
                mask = mask.repeat_interleave(heads, 0)
        if self.fixed_shapes and T < FEWEST:  # repeat the last query, and drop the copies below
            q = repeat_last(q, FEWEST - T)
            mask = repeat_last(mask, FEWEST - T)
        out = sdpa(q, keys, values, mask, scale=scale, sinks=sinks)
        if self.fixed_shapes:
            return out[:, :, :T]
        return out.reshape(R, H, T, -1)

    def copy_first(self, slots: Tensor, T: int):
        """slots (n, G): copy the first T positions of row slots[i, 0] to all rows of slots[i]."""
        for kept in sum(self.kept.values(), []):
            kept[slots, :, :T] = kept[slots[:, :1], :, :T]

    def keep(self, rows: Tensor):
        """Continue with these rows only, in this order."""
        self.rows = len(rows)
        for kept in sum(self.kept.values(), []):
            kept[: len(rows)] = kept[rows]


def write_places(kept: list[Tensor], new: list[Tensor], row: Tensor, at: Tensor) -> None:
    """Write new (R, T, kv heads, head dim) to positions at (R, T) of these rows (R, 1)."""
    for old, x in zip(kept, new):
        old[row, :, at] = x


def repeat_last(x: Tensor, n: int) -> Tensor:
    """x (R, H, T, K) with n more copies of its last query."""
    return torch.cat([x, x[:, :, -1:].expand(-1, -1, n, -1)], 2)


@dataclass
class Row:
    """A sample while it is drawn."""

    sample: Sample
    noise: list[float]  # the uniform number of each token
    room: int  # most ids
    unread: deque[int] = field(default_factory=deque)  # ids of a reply that the model has to read
    reply: Future | None = None  # the sample waits for it
    done: bool = False  # it has ended by itself

    def length(self) -> int:
        return len(self.sample.prompt) + len(self.sample.ids)

    def last_id(self) -> int:
        return (self.sample.ids or self.sample.prompt)[-1]

    def is_over(self) -> bool:
        return self.reply is None and (self.done or len(self.sample.ids) >= self.room)


def length(row: Row | None) -> int:
    """Tokens of a row; 0 for a free row."""
    if row is None:
        return 0
    return row.length()


def noise_seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


def draw_noise(names: list[str], G: int, n: int) -> Tensor:
    """(names, G, n) numbers in [0, 1) for rollout(), a function of the names: neither device,
    number of ranks nor restart changes a sample."""
    noise = [torch.empty(0, G, n)]
    for name in names:
        generator = torch.Generator().manual_seed(noise_seed(name))
        noise.append(torch.rand(1, G, n, generator=generator))
    return torch.cat(noise)


def column_logits(
    h: Tensor, weight: Tensor, *, column: Tensor, mesh: DeviceMesh | None = None
) -> Tensor:
    """fp32 logits (R, V) at one column of each row, the only column needed: h (R, T/tp, D), column
    (R,)."""
    if mesh is None and h.shape[1] == 1:
        return F.linear(h[:, 0], weight).float()
    row = torch.arange(h.shape[0], device=h.device)
    if mesh is None:
        return F.linear(h[row, column], weight).float()
    h = AllGather.apply(h, 1, mesh.get_group())  # (R, T, D)
    return whole_vocab(F.linear(h[row, column], weight.to_local()).float(), weight.shape[0], mesh)


def next_logits(
    model,
    cache: RowCache,
    tokens: Tensor,
    at: Tensor,
    column: Tensor,
    keys: list,
    mesh: DeviceMesh | None = None,
    rows=None,
) -> Tensor:
    """Run tokens (R, T) at positions at (R, T) of these rows (R,), None: of all rows; keys: see
    RowCache.place. Returns the logits (R, V) of one column (R,) of each row."""
    usual_logits = model.logits
    cache.place(at, keys, rows)
    model.logits = partial(column_logits, column=column, mesh=mesh)
    try:
        return model(tokens, positions=at, cache=cache)
    finally:
        model.logits = usual_logits


def read_prompts(
    model: nn.Module,
    cache: RowCache,
    prompts: list[list[int]],
    rows: Tensor,
    T: int,
    width: int,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """Read n prompts into these rows (n,) of the cache; returns the logits (n, V) after their last
    tokens. T: tokens of the longest prompt on all ranks with common forwards. width: the number of
    columns is a multiple of width."""
    n = len(prompts)
    device = rows.device
    T = -(-T // width) * width
    at = torch.arange(T, device=device).expand(max(n, 1), -1)
    # only other ranks have prompts: take part, and write to the unused end of the first row
    if n == 0:
        prompts = [[0]]
        rows = torch.zeros(1, dtype=torch.long, device=device)
        at = torch.full_like(at, cache.max_len - 1)
    again = [*range(len(prompts))]
    if cache.fixed_shapes:  # repeat the first prompt
        again += [0] * (FEWEST - len(prompts))
    prompts = [prompts[i] for i in again]
    padded = [[*prompt, *[0] * (T - len(prompt))] for prompt in prompts]  # on the right
    tokens = torch.tensor(padded, device=device)
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    rows = rows[again]
    at = at[again]
    logits = 0.0
    size = PREFILL_CHUNK // width * width
    for begin in range(0, T, size):
        piece = slice(begin, begin + size)
        column = (last - begin).clamp(0, at[:, piece].shape[1] - 1)
        keys = cache.max_len
        if n:
            keys = min(begin + size, T)
        found = next_logits(
            model, cache, tokens[:, piece], at[:, piece], column, [keys] * len(rows), mesh, rows
        )
        # keep the logits of the piece with the prompt's end
        logits = torch.where((last >= begin)[:, None], found, logits)
    return logits[:n]


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """logits (R, V) with -inf for all but the top_k likeliest tokens, and of these all but the
    fewest with the share top_p of their probability: in this order, as transformers and vLLM do.
    Tokens as likely as number top_k stay, too."""
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        logits = keep_share(logits, top_p, CANDIDATES)
    return logits


def keep_share(logits: Tensor, top_p: float, n: int) -> Tensor:
    """logits (R, V) with -inf for all but the fewest tokens with probability top_p together, looked
    for among the n likeliest."""
    ranked, order = logits.topk(min(n, logits.shape[-1]))
    p = (ranked - ranked[:, :1]).exp().double()
    p = p / (logits - ranked[:, :1]).exp().sum(-1, keepdim=True, dtype=torch.float64)
    # a rare row so flat, or a top_p so near 1
    if n < logits.shape[-1] and (p.sum(-1) < top_p).any():
        return keep_share(logits, top_p, logits.shape[-1])
    # the likelier tokens reach top_p already
    ranked = ranked.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(-1, order, ranked)


def first_above(sums: Tensor, share: Tensor) -> Tensor:
    """sums (R, n): running sums, share (R, 1) below 1 -> for each row the first place with a sum
    above this share of the whole. A place that adds nothing is never taken, also where rounding
    would pass the end."""
    # NaN: check_finite() reports them
    last = torch.searchsorted(sums, sums[:, -1:].contiguous()).clamp_(max=sums.shape[1] - 1)
    return torch.minimum(torch.searchsorted(sums, share * sums[:, -1:], right=True), last)


def draw(
    logits: Tensor, u: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """logits (R, V) fp32 and one uniform number per row (R,) -> tokens (R,) and their
    log-probabilities at the temperature.

    Log-probabilities are from before top_k and top_p, so a training forward over the same tokens
    gives the same numbers. Temperature 0 takes the likeliest token, and reports its log-probability
    at temperature 1.

    The draw has two levels, first a chunk of the vocabulary and then a token of the chunk: sums in
    fp64, without which the rare tokens would be rounded away, are over V / 64 + 64 numbers and not
    over V.
    """
    if 0 < temperature < TINY:
        # the quotient would overflow; only the likeliest token is left anyway
        logits = logits - logits.amax(-1, keepdim=True)
        temperature = TINY
    if temperature not in (0, 1):
        logits = logits / temperature
    normalizer = log_normalizer(logits)[:, None]
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:
        allowed = logits
        if top_k > 0 or top_p < 1:
            allowed = truncate(logits, top_k, top_p)
        p = allowed.sub(normalizer).exp_()
        # F.pad copies even if nothing is missing
        missing = -p.shape[1] % DRAW_CHUNK
        if missing:
            p = F.pad(p, (0, missing))
        chunks = p.unflatten(1, (-1, DRAW_CHUNK))  # (R, n, DRAW_CHUNK)
        sums = F.pad(chunks.sum(-1).double().cumsum(-1), (1, 0))  # (R, 1 + n), from 0
        share = u.double()[:, None]
        chunk = first_above(sums, share)  # from 1
        rest = (share * sums[:, -1:] - sums.gather(1, chunk - 1)) / sums.diff().gather(1, chunk - 1)
        row = torch.arange(len(chunks), device=u.device)
        of_chunk = chunks[row, chunk[:, 0] - 1].double().cumsum(-1)
        token = (chunk - 1) * DRAW_CHUNK + first_above(of_chunk, rest)
        token = token.clamp_(max=logits.shape[1] - 1)
    return token[:, 0], (logits.gather(-1, token) - normalizer)[:, 0]


@torch.no_grad()
def rollout(
    model,
    prompts: list[list[int]],
    noise: Tensor,
    temperature: float,
    eot: int | list[int],
    *,
    max_len: int,
    rows: int = 512,
    top_k: int = 0,
    top_p: float = 1.0,
    reply=None,
    ended=lambda *s: None,
    heard=lambda samples: None,
    tp_mesh: DeviceMesh | None = None,
    batch_invariant: bool = False,
    compiled: bool = False,
    agree=None,
) -> list[Sample]:
    """G samples of each of P prompts, samples of a prompt next to each other.

    noise (P, G, max_new_tokens), on the host: uniform numbers, one per token. A sample depends only
    on the weights, its prompt and its noise, not on its row, its neighbours or the number of
    processes. At most `rows` samples run at once; the rows of finished samples are given to the
    next prompt, which is read once for its G samples. A sample ends with `eot` (or any of several),
    included in the ids, or is truncated: at max_new_tokens, or when prompt and sample have max_len
    tokens.

    reply(sample) -> ids for the model to read, with mask 0; [] for nothing to read, None to end the
    sample; or a Future of one of these, and other rows go on until it has come. Asked after each
    token of the model, not after tokens of a reply. The sample has its ids so far. After an `eot`
    a sample goes on only if there is something to read.
    ended(index, ids, truncated): called for each sample at its end, while others go on.
    heard(samples): called after each new token, with all samples as far as they are drawn.
    model.unknown_ids: ids that are never sampled, or None.
    tp_mesh: for a tensor parallel model. All its ranks get the same arguments and sample the same.
    batch_invariant: every matrix product has shapes whose rounding does not depend on the batch,
    for exact equality with a training forward over max_len tokens (tested as docs/grpo.md says).
    compiled: CUDA graphs are captured from compiled blocks, see rl/replay.py. Elsewhere it changes
    nothing: without a graph, calls of compiled functions cost the host more than they save.
    agree(*numbers): the largest of each number over the ranks with common forwards; None: no rank
    has any. See lockstep() in rl/rollouts.py.
    """
    P, G, _ = noise.shape
    device = next(model.parameters()).device
    ends = as_set(eot)
    width = columns_of(tp_mesh)
    cache = new_cache(max(G, min(rows // G, P) * G), max_len + width, batch_invariant)
    n_rows = cache.rows
    drawn = new_rows(prompts, noise, max_len)
    tell = partial(heard, [row.sample for row in drawn])
    waiting = deque(range(P))
    # None: a free row, whose output is ignored
    running: list[Row | None] = [None] * n_rows

    sampler = sampler_beside(cache, compiled and device.type == "cuda")

    def choose(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(model, "unknown_ids") and model.unknown_ids is not None:
            logits.index_fill_(1, model.unknown_ids, NEVER)
        return sampler(logits, u, temperature, top_k, top_p)

    def advance(keys: list[int], last: Tensor, at: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """After the last token (R,) of each row, at position at (R,): the next one, and its
        log-probability."""
        places = at[:, None]
        tokens = last[:, None]
        if width > 1:
            places = places + torch.arange(width, device=device)
            tokens = F.pad(tokens, (0, width - 1))
        column = torch.zeros_like(last)
        return choose(next_logits(model, cache, tokens, places, column, keys, tp_mesh), u)

    # top_p asks the device how flat p is
    if device.type == "cuda" and not tp_mesh and not batch_invariant and top_p == 1:
        advance = replayed(advance, model, compiled)

    # nobody has a say between two tokens
    runs_ahead = device.type in RUN_AHEAD and not (reply or agree or tp_mesh)

    while True:
        # 1. Hear the replies that have come, and wait for one where no row can go on without. Under
        # tp wait for all, because its ranks must act alike.
        hear_replies(running, ends, wait_for_all=bool(tp_mesh))

        # 2. Free the rows of ended samples. Give free rows to new prompts, in whole groups, and to
        # several groups at once, because each refill is a forward.
        free_rows(running, ended)
        n_busy = sum(row is not None for row in running)
        n = groups_to_begin(len(running) - n_busy, len(waiting), G, n_rows)
        if leaves_out(len(running), n_busy, len(waiting)):
            running = sort_rows(running, cache, max(n_busy, FEWEST), device)
        elif n:
            running = sort_rows(running, cache, len(running), device)
        new_prompts = [prompts[p] for p in begin_groups(running, drawn, waiting, n, G)]
        longest = max(map(len, new_prompts), default=0)
        longest, goes_on = agreed(agree, longest, n_busy > 0)
        if not longest and not goes_on:
            break

        if runs_ahead and not longest:
            is_due = partial(change_is_due, len(running), len(waiting), G, n_rows)
            draw_ahead(advance, running, is_due, ended, tell, ends, cache.max_len, device)
            continue

        # 3. The next token of each row: one forward for the busy rows, and one for the new prompts.
        going = [(i, row) for i, row in enumerate(running) if row is not None and not row.reply]
        u = noise_of_rows(going, len(running), 1)[0].to(device)
        tokens = [0] * len(running)
        logprobs = [0.0] * len(running)
        if goes_on:
            tokens, logprobs = read(*start_reading(advance(*last_tokens(running, device), u)))
        if longest:
            slots = torch.arange(n * G, device=device).view(n, G)
            first = read_prompts(model, cache, new_prompts, slots[:, 0], longest, width, tp_mesh)
            cache.copy_first(slots, longest)
            chosen = choose(first.repeat_interleave(G, 0), u[: n * G])
            tokens[: n * G], logprobs[: n * G] = read(*start_reading(chosen))

        # 4. Add the token to the row's sample, unless the sample waits for a reply.
        for i, row in going:
            add_token(row, tokens[i], logprobs[i], reply, ends)
        tell()
    return finish_rows(drawn)


def agreed(agree, longest: int, goes_on: bool) -> tuple[int, bool]:
    """The longest prompt to read, and whether a row goes on, of all ranks with common forwards."""
    if agree is None:
        return longest, goes_on
    return agree(longest, goes_on)


def columns_of(tp_mesh: DeviceMesh | None) -> int:
    """Tokens of a row in a forward: TP cuts activations along the sequence, a column per rank."""
    if tp_mesh is None:
        return 1
    return tp_mesh.size()


def sampler_beside(cache: RowCache, compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """draw(), compiled as the cache's writing is, if asked for. Where no graph is captured both run
    as they are, for callers sample under torch's stance "force_eager"; compiled_blocks() in
    rl/replay.py lifts it."""
    if not compiled:
        return draw
    cache.write = torch.compile(write_places)
    return torch.compile(draw)


def replayed(advance: Callable[..., Any], model: nn.Module, compiled: bool) -> Callable[..., Any]:
    """advance() of rollout(), as CUDA graphs."""
    from rl.replay import Replays, compiled_blocks

    within = nullcontext
    if compiled:
        within = partial(compiled_blocks, model)
    return Replays(advance, within)


def as_set(eot: int | list[int]) -> set[int]:
    if isinstance(eot, int):
        return {eot}
    return set(eot)


def finish_rows(drawn: list[Row]) -> list[Sample]:
    """The samples, at the end of rollout()."""
    for row in drawn:
        row.sample.truncated = not row.done
    return [row.sample for row in drawn]


def draw_ahead(
    advance: Callable[..., Any],
    running: list[Row | None],
    is_due: Callable[..., bool],
    ended: Callable[..., None],
    tell: Callable[[], None],
    ends: set[int],
    max_len: int,
    device: torch.device,
) -> None:
    """Add up to AHEAD tokens to each row, until is_due(busy rows), see change_is_due(). A forward is launched
    before the host reads the tokens of the forward before, so neither waits for the other. A row
    that has ended draws on meanwhile, and its tokens are dropped. tell(): after new tokens."""
    going = [(i, row) for i, row in enumerate(running) if row is not None]
    n = min(AHEAD, max(row.room - len(row.sample.ids) for _, row in going))
    noise = noise_of_rows(going, len(running), n).to(device)
    keys, last, at = last_tokens(running, device)
    readings: list[tuple] = []  # those that are not read yet: the last one, and one before
    for k in range(n):
        last, scores = advance([so_far + k for so_far in keys], last, at, noise[k])
        readings.append(start_reading((last, scores)))
        at = (at + 1).clamp_(max=max_len - 1)  # the rows that have ended have no place left
        if len(readings) < 2:
            continue
        n_ended = add_tokens(going, *read(*readings.pop(0)), ends)
        tell()
        if n_ended:
            free_rows(running, ended)
            if is_due(sum(row is not None for row in running)):
                break
    add_tokens(going, *read(*readings.pop()), ends)


def start_reading(tensors: tuple[Tensor, Tensor]) -> tuple:
    """(their copies on the host, the event after which they are there), for read(). The copies are
    made while the device goes on."""
    copies = [x.to("cpu", non_blocking=True) for x in tensors]
    arrived = None
    if tensors[0].is_cuda:
        arrived = torch.cuda.Event()
        arrived.record()
    return copies, arrived


def read(copies: list[Tensor], arrived: torch.cuda.Event | None) -> tuple[list[int], list[float]]:
    """The tokens and log-probabilities that start_reading() was given."""
    if arrived is not None:
        arrived.synchronize()
    tokens, logprobs = copies
    return tokens.tolist(), logprobs.tolist()


def add_tokens(going: list[tuple], tokens: list[int], logprobs: list[float], ends: set[int]) -> int:
    """Give the samples that go on their next ids, where nobody replies; returns how many end."""
    n_ended = 0
    for i, row in going:
        if row.is_over():
            continue
        add_token(row, tokens[i], logprobs[i], None, ends)
        n_ended += row.is_over()
    return n_ended


def change_is_due(n_rows: int, n_waiting: int, G: int, most: int, n_busy: int) -> bool:
    """Whether rows should be given to other prompts, or left out. most: rows at the beginning."""
    n = groups_to_begin(n_rows - n_busy, n_waiting, G, most)
    return n > 0 or n_busy == 0 or leaves_out(n_rows, n_busy, n_waiting)


def leaves_out(n_rows: int, n_busy: int, n_waiting: int) -> bool:
    """Whether free rows should be left out of the forwards: no prompt waits for them, and they are
    a quarter."""
    return n_waiting == 0 and n_rows > FEWEST and n_busy <= n_rows * 3 // 4


def groups_to_begin(n_free: int, n_waiting: int, G: int, n_rows: int) -> int:
    """Prompts to read now, each for the G samples of its group: none until a quarter of all groups
    can begin, or the rest."""
    n = min(n_free // G, n_waiting)
    if n < min(n_waiting, n_rows // G // 4):
        return 0
    return n


def begin_groups(
    running: list[Row | None], drawn: list[Row], waiting: deque[int], n: int, G: int
) -> list[int]:
    """Gives the first rows to the groups of the next n prompts; returns the numbers of these
    prompts."""
    new = [waiting.popleft() for _ in range(n)]
    for i, p in enumerate(new):
        running[i * G : (i + 1) * G] = drawn[p * G : (p + 1) * G]
    return new


def new_cache(n_rows: int, n_places: int, batch_invariant: bool) -> RowCache:
    """A cache for so many rows, of at least so many places each: see FEWEST and KEY_BUCKET."""
    if batch_invariant:
        return RowCache(max(n_rows, FEWEST), n_places, True)
    return RowCache(n_rows, -(-n_places // KEY_BUCKET) * KEY_BUCKET)


def new_rows(prompts: list[list[int]], noise: Tensor, max_len: int) -> list[Row]:
    """G samples of each prompt, in which nothing is said yet: see rollout()."""
    P, G, max_new = noise.shape
    rows = []
    for p in range(P):
        room = max(1, min(max_new, max_len - len(prompts[p])))
        for g in range(G):
            sample = Sample(prompt=prompts[p], index=p * G + g)
            rows.append(Row(sample, noise[p, g].tolist(), room))
    return rows


def last_tokens(
    running: list[Row | None], device: torch.device
) -> tuple[list[int], Tensor, Tensor]:
    """(keys of each row, its last token (R,), that token's position (R,)), for advance()."""
    # a free row reads token 0
    last = torch.tensor([row.last_id() if row else 0 for row in running], device=device)
    at = [max(length(row) - 1, 0) for row in running]
    # rows are sorted; a row that has ended is like its neighbour
    keys = [*accumulate((n + 1 for n in at), max)]
    return keys, last, torch.tensor(at, device=device)


def free_rows(running: list[Row | None], ended: Callable[..., None]) -> None:
    for i, row in enumerate(running):
        if row is not None and row.is_over():
            ended(row.sample.index, row.sample.ids, not row.done)
            running[i] = None


def sort_rows(
    running: list[Row | None], cache: RowCache, n_kept: int, device: torch.device
) -> list:
    """The n_kept longest rows: free rows come first, and rows of about equal length become
    neighbours, see RowCache.place."""
    order = sorted(range(len(running)), key=lambda i: length(running[i]))
    order = order[len(running) - n_kept :]
    cache.keep(torch.tensor(order, device=device))
    return [running[i] for i in order]


def noise_of_rows(going: list[tuple], n_rows: int, n: int) -> Tensor:
    """The uniform numbers (n, R) of each row for its next n tokens; 0 where a row has no more."""
    u = [[0.0] * n for _ in range(n_rows)]
    for i, row in going:
        begin = len(row.sample.ids)
        numbers = row.noise[begin : begin + n]
        u[i][: len(numbers)] = numbers
    return torch.tensor(u, dtype=torch.float64).T.contiguous()


def hear_replies(running: list[Row | None], ends: set[int], wait_for_all: bool) -> None:
    """Hear the replies that have come; wait for one if no row can go on without."""
    asked = {row.reply: row for row in running if row is not None and row.reply}
    n_busy = sum(row is not None for row in running)
    timeout = 0
    if wait_for_all or len(asked) == n_busy:
        timeout = None
    until = FIRST_COMPLETED
    if wait_for_all:
        until = ALL_COMPLETED
    for future in wait(asked, timeout, until).done:
        asked[future].reply = None
        hear(asked[future], future.result(), ends)


def hear(row: Row, said: list[int] | None, ends: set[int]) -> None:
    """What comes after a token of the model: see reply in rollout()."""
    ids = row.sample.ids
    row.done = said is None or ids[-1] in ends and not said
    if said:
        row.unread.extend(said)
        row.sample.begin = len(ids) + len(said)


def add_token(
    row: Row, token: int, logprob: float, reply: Callable[..., Any] | None, ends: set[int]
) -> None:
    """Give a sample its next id: that of a reply while one is read, else the model's."""
    sample = row.sample
    if row.unread:
        sample.ids.append(row.unread.popleft())
        sample.logprobs.append(0.0)
        sample.mask.append(0.0)
        return
    sample.ids.append(token)
    sample.logprobs.append(logprob)
    sample.mask.append(1.0)
    said = []
    if reply is not None:
        said = reply(sample)
    if isinstance(said, Future):
        row.reply = said
    else:
        hear(row, said, ends)
