"""The decoder of generate.py and grpo.py: samples of each prompt, with a cache of keys and values.

P prompts, G samples of each, R rows (samples that run at once), T tokens of a row in one forward, V
vocab

rollout() keeps R rows busy: read some prompts, copy each prompt to the rows of its G samples, add
one token to all rows, and give the rows of finished samples to the next prompts.
"""

import hashlib
import math
from collections import deque
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from functools import partial
from itertools import accumulate, count, groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from distributed.layout import AllGather
from models.attention import sdpa
from models.loss import NEVER, log_normalizer
from parallel import whole_vocab

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


class RowCache:
    """Keys and values of R rows in every block, so that a new token costs one token and not the
    whole sequence.

    Models take this object as `cache`. Call place() before each forward, with the places of the
    tokens. Memory is taken at the first forward, when the shapes are known (local shapes under TP).
    """

    def __init__(self, rows: int, max_len: int, fixed_shapes=False):
        """fixed_shapes: attend with at least FEWEST queries to all max_len keys, for
        --batch_invariant."""
        self.rows, self.max_len, self.fixed_shapes = rows, max_len, fixed_shapes
        # (block, n-th call of attend in the block): [keys, values], each (rows, max_len, kv heads,
        # head dim)
        self.kept = {}

    def place(self, at: Tensor, keys: list[int], rows: Tensor | None = None):
        """Set the places of the next forward: positions at (R, T) of these rows (R,), None: of all
        rows. keys: for each row a number above its positions. Neighbours with about as many keys
        attend together, to no more keys than they need: in a batch of samples of different lengths
        most keys would be those that only the longest sample has."""
        self.at, self.chosen, self.parts, begin = at, rows, [], 0
        # (R, 1)
        self.row = (torch.arange(self.rows, device=at.device) if rows is None else rows)[:, None]
        n_keys = [
            self.max_len
            if self.fixed_shapes
            else min(-(-n // KEY_BUCKET) * KEY_BUCKET, self.max_len)
            for n in keys
        ]
        self.n_keys = max(n_keys)
        for _, part in groupby(n_keys, lambda n: int(2 * math.log2(n))):
            n, end = max(part := [*part]), begin + len(part)
            column = torch.arange(n, device=at.device)
            # mask (rows, 1, T, n)
            self.parts.append((slice(begin, end), column, column <= at[begin:end, None, :, None]))
            begin = end

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
            self.kept[call] = [x.new_zeros(self.rows, self.max_len, *x.shape[2:]) for x in new]
        for kept, x in zip(self.kept[call], new):
            kept[self.row, self.at] = x
        out = [self.attend_part(call, q, part, scale, reach, sinks) for part in self.parts]
        return out[0] if len(out) == 1 else torch.cat(out)

    def attend_part(self, call, q: Tensor, part: tuple, scale, reach, sinks) -> Tensor:
        """The attention of neighbouring rows, see place()."""
        rows, column, mask = part
        (R, H, T, K), places = (
            (q := q[rows]).shape,
            rows if self.chosen is None else self.chosen[rows],
        )
        keys, values = (self.kept[call][i][places, : len(column)].transpose(1, 2) for i in (0, -1))
        if reach is not None:
            reach = reach[rows] if len(reach) > 1 else reach
            mask = mask & (column > (self.at[rows] - reach)[:, None, :, None])
        if self.fixed_shapes and T < FEWEST:  # repeat the last query, and drop the copies below
            q, mask = (
                torch.cat([x, x[:, :, -1:].expand(-1, -1, FEWEST - T, -1)], 2) for x in (q, mask)
            )
        elif T == 1 and sinks is None and not self.fixed_shapes:
            # heads with the same keys become queries of one head, so the keys are read once for all
            # of these heads
            q = q.reshape(R, keys.shape[1], -1, K)
        out = sdpa(q, keys, values, mask, scale=scale, sinks=sinks)
        return out[:, :, :T] if self.fixed_shapes else out.reshape(R, H, T, -1)

    def copy_first(self, slots: Tensor, T: int):
        """slots (n, G): copy the first T positions of row slots[i, 0] to all rows of slots[i]."""
        for kept in sum(self.kept.values(), []):
            kept[slots, :T] = kept[slots[:, :1], :T]

    def keep(self, rows: Tensor):
        """Continue with these rows only, in this order."""
        self.rows = len(rows)
        for kept in sum(self.kept.values(), []):
            kept[: len(rows)] = kept[rows]


def length(sample: dict | None) -> int:
    return len(sample["prompt"]) + len(sample["ids"]) if sample else 0


def noise_seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


def draw_noise(names: list[str], G: int, n: int) -> Tensor:
    """(names, G, n) numbers in [0, 1) for rollout(), a function of the names: neither device,
    number of ranks nor restart changes a sample."""
    generators = (torch.Generator().manual_seed(noise_seed(name)) for name in names)
    return torch.cat(
        [
            torch.empty(0, G, n),
            *(torch.rand(1, G, n, generator=generator) for generator in generators),
        ]
    )


def column_logits(h: Tensor, weight: Tensor, *, column: Tensor, mesh=None) -> Tensor:
    """fp32 logits (R, V) at one column of each row, the only column needed: h (R, T/tp, D), column
    (R,)."""
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
    mesh=None,
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
    model, cache: RowCache, prompts: list[list[int]], rows: Tensor, T: int, width: int, mesh=None
) -> Tensor:
    """Read n prompts into these rows (n,) of the cache; returns the logits (n, V) after their last
    tokens. T: tokens of the longest prompt on all ranks with common forwards. width: the number of
    columns is a multiple of width."""
    n, device = len(prompts), rows.device
    T = -(-T // width) * width
    at = torch.arange(T, device=device).expand(max(n, 1), -1)
    # only other ranks have prompts: take part, and write to the unused end of the first row
    if n == 0:
        prompts, rows, at = (
            [[0]],
            torch.zeros(1, dtype=torch.long, device=device),
            torch.full_like(at, cache.max_len - 1),
        )
    # repeat the first prompt
    again = [*range(len(prompts)), *[0] * (FEWEST - len(prompts) if cache.fixed_shapes else 0)]
    # padded on the right
    tokens = torch.tensor(
        [[*prompts[i], *[0] * (T - len(prompts[i]))] for i in again], device=device
    )
    last = torch.tensor([len(prompts[i]) - 1 for i in again], device=device)
    rows, at, logits, size = rows[again], at[again], 0.0, PREFILL_CHUNK // width * width
    for begin in range(0, T, size):
        piece = slice(begin, begin + size)
        column = (last - begin).clamp(0, at[:, piece].shape[1] - 1)
        keys = min(begin + size, T) if n else cache.max_len
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
    logits: Tensor, u: Tensor, temperature: float, top_k=0, top_p=1.0
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
    logits = logits if temperature in (0, 1) else logits / temperature
    normalizer = log_normalizer(logits)[:, None]
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:
        p = (
            (truncate(logits, top_k, top_p) if top_k > 0 or top_p < 1 else logits)
            .sub(normalizer)
            .exp_()
        )
        # F.pad copies even if nothing is missing
        p = F.pad(p, (0, missing)) if (missing := -p.shape[1] % DRAW_CHUNK) else p
        chunks = p.unflatten(1, (-1, DRAW_CHUNK))  # (R, n, DRAW_CHUNK)
        sums = F.pad(chunks.sum(-1).double().cumsum(-1), (1, 0))  # (R, 1 + n), from 0
        share = u.double()[:, None]
        chunk = first_above(sums, share)  # from 1
        rest = (share * sums[:, -1:] - sums.gather(1, chunk - 1)) / sums.diff().gather(1, chunk - 1)
        of_chunk = (
            chunks[torch.arange(len(chunks), device=u.device), chunk[:, 0] - 1].double().cumsum(-1)
        )
        token = ((chunk - 1) * DRAW_CHUNK + first_above(of_chunk, rest)).clamp_(
            max=logits.shape[1] - 1
        )
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
    rows=512,
    top_k=0,
    top_p=1.0,
    reply=None,
    ended=lambda *s: None,
    tp_mesh=None,
    batch_invariant=False,
    agree=lambda *numbers: numbers,
) -> list[dict]:
    """G samples of each of P prompts, as dicts(ids, logprobs, mask, truncated), samples of a prompt
    next to each other.

    noise (P, G, max_new_tokens), on the host: uniform numbers, one per token. A sample depends only
    on the weights, its prompt and its noise, not on its row, its neighbours or the number of
    processes. At most `rows` samples run at once; the rows of finished samples are given to the
    next prompt, which is read once for its G samples. A sample ends with `eot` (or any of several),
    included in the ids, or is truncated: at max_new_tokens, or when prompt and sample have max_len
    tokens.

    reply(sample) -> ids for the model to read, with mask 0; [] for nothing to read, None to end the
    sample; or a Future of one of these, and other rows go on until it has come. Asked after each
    token of the model, not after tokens of a reply. The sample is a dict with its `index`, its
    `ids` so far, and `begin`, the place of the first id after the last reply. After an `eot` a
    sample goes on only if there is something to read.
    ended(index, ids, truncated): called for each sample at its end, while others go on.
    model.unknown_ids: ids that are never sampled, or None.
    tp_mesh: for a tensor parallel model. All its ranks get the same arguments and sample the same.
    batch_invariant: every matrix product has shapes whose rounding does not depend on the batch,
    for exact equality with a
    training forward over max_len tokens (tested as docs/grpo.md says).
    agree(*numbers): the largest of each number over the ranks with common forwards; see lockstep()
    in rl/rollouts.py.
    """
    P, G, max_new = noise.shape
    device, ends = next(model.parameters()).device, {eot} if isinstance(eot, int) else set(eot)
    # TP cuts activations along the sequence, so each forward has a column per rank
    width = tp_mesh.size() if tp_mesh else 1
    n_rows = max(G, min(rows // G, P) * G, FEWEST if batch_invariant else 0)
    room = max_len + width if batch_invariant else -(-(max_len + width) // KEY_BUCKET) * KEY_BUCKET
    cache = RowCache(n_rows, room, batch_invariant)
    samples = [
        dict(
            prompt=prompts[p],
            ids=[],
            logprobs=[],
            mask=[],
            said=deque(),
            begin=0,
            index=p * G + g,
            reply=None,
            done=False,
            noise=noise[p, g].tolist(),
            room=max(1, min(max_new, max_len - len(prompts[p]))),
        )
        for p in range(P)
        for g in range(G)
    ]
    waiting = deque(range(P))
    # the sample of each row; None: a free row, whose output is ignored
    running: list[dict | None] = [None] * n_rows

    def hear(s: dict, said: list[int] | None):
        s["done"] = said is None or s["ids"][-1] in ends and not said
        if said:
            s["said"].extend(said)
            s["begin"] = len(s["ids"]) + len(said)

    def choose(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        if (unknown := getattr(model, "unknown_ids", None)) is not None:
            logits.index_fill_(1, unknown, NEVER)
        return draw(logits, u, temperature, top_k, top_p)

    def advance(keys: list[int], last: Tensor, at: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """After the last token (R,) of each row, at position at (R,): the next one, and its
        log-probability."""
        places = at[:, None] + torch.arange(width, device=device)
        tokens, column = F.pad(last[:, None], (0, width - 1)), torch.zeros_like(last)
        return choose(next_logits(model, cache, tokens, places, column, keys, tp_mesh), u)

    # top_p asks the device how flat p is
    if device.type == "cuda" and not tp_mesh and not batch_invariant and top_p == 1:
        from rl.replay import Replays

        advance = Replays(advance)

    while True:
        # 1. Hear the replies that have come, and wait for one where no row can go on without. Under
        # tp wait for all, because its ranks must act alike.
        asked = {s["reply"]: s for s in running if s and s["reply"]}
        patient = tp_mesh or len(asked) == sum(s is not None for s in running)
        for future in wait(
            asked, None if patient else 0, ALL_COMPLETED if tp_mesh else FIRST_COMPLETED
        ).done:
            asked[future]["reply"] = None
            hear(asked[future], future.result())

        # 2. Free the rows of ended samples. Give free rows to new prompts, in whole groups, and to
        # several groups at once, because each refill is a forward.
        for row, s in enumerate(running):
            if s and not s["reply"] and (s["done"] or len(s["ids"]) >= s["room"]):
                ended(s["index"], s["ids"], not s["done"])
                running[row] = None
        n_busy = sum(s is not None for s in running)
        n = min((len(running) - n_busy) // G, len(waiting))
        n = n if n >= min(len(waiting), n_rows // G // 4) else 0
        # leave out free rows
        shrinks = not waiting and len(running) > FEWEST and n_busy <= len(running) * 3 // 4
        # free rows come first, and rows of about equal length become neighbours, see RowCache.place
        if n or shrinks:
            order = sorted(range(len(running)), key=lambda row: length(running[row]))[
                -max(n_busy, FEWEST) if shrinks else 0 :
            ]
            running = [running[row] for row in order]
            cache.keep(torch.tensor(order, device=device))
        new = [waiting.popleft() for _ in range(n)]
        running[: n * G] = [samples[p * G + g] for p in new for g in range(G)]
        longest, goes_on = agree(max((len(prompts[p]) for p in new), default=0), n_busy > 0)
        if not longest and not goes_on:
            break

        # 3. The next token of each row: one forward for the busy rows, and one for the new prompts.
        going = [(row, s) for row, s in enumerate(running) if s is not None and not s["reply"]]
        u = torch.zeros(len(running), dtype=torch.float64)
        for row, s in going:
            u[row] = s["noise"][len(s["ids"])]
        u = u.to(device)
        tokens, logprobs = [0] * len(running), [0.0] * len(running)
        if goes_on:
            last = torch.tensor(
                [(s["ids"] or s["prompt"])[-1] if s else 0 for s in running], device=device
            )
            at = [max(length(s) - 1, 0) for s in running]  # position of the last token
            # rows are sorted; a row that has ended is like its neighbour
            keys = [*accumulate((n + 1 for n in at), max)]
            tokens, logprobs = (
                x.tolist() for x in advance(keys, last, torch.tensor(at, device=device), u)
            )
        if longest:
            slots = torch.arange(n * G, device=device).view(n, G)
            first = read_prompts(
                model, cache, [prompts[p] for p in new], slots[:, 0], longest, width, tp_mesh
            )
            cache.copy_first(slots, longest)
            tokens[: n * G], logprobs[: n * G] = (
                x.tolist() for x in choose(first.repeat_interleave(G, 0), u[: n * G])
            )

        # 4. Add the token to the row's sample, unless the sample waits for a reply.
        for row, s in going:
            chosen = not s["said"]
            s["ids"].append(tokens[row] if chosen else s["said"].popleft())
            s["logprobs"].append(logprobs[row] if chosen else 0.0)
            s["mask"].append(float(chosen))
            said = reply(s) if reply is not None and chosen else []
            if isinstance(said, Future):
                s["reply"] = said
            elif chosen:
                hear(s, said)
    return [
        dict(ids=s["ids"], logprobs=s["logprobs"], mask=s["mask"], truncated=not s["done"])
        for s in samples
    ]
