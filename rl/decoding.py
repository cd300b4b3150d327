"""The decoder of generate.py and grpo.py: samples of each prompt, with a cache of keys and values.

P prompts, G samples of each, R rows (samples that run at once), T new tokens of a row in one forward, V vocab

rollout() keeps R rows busy: it reads some prompts, copies each to the rows of its G samples, adds a few tokens to all rows, and
gives the rows of samples that have ended to the next prompts. The host knows the samples, and the device works on rows: the
host sends it what it needs for the next few tokens, and reads them all at once.
"""
import hashlib
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count, islice

import torch
import torch.nn.functional as F
from torch import Tensor

from distributed.layout import AllGather
from models.attention import sdpa
from models.loss import NEVER, log_normalizer
from parallel import whole_vocab

PREFILL_CHUNK = 512  # prompt tokens per forward: activations of a whole long prompt would need more memory than its cache
# Attention is over a multiple of so many keys. On a GPU each is a shape that costs a plan; on a CPU a shape costs nothing,
# but keys that nobody sees do: with 128 a token of the small model of benchmarks/rollout.py takes 1.1 x as long.
KEY_BUCKET = {"cuda": 128, "cpu": 32}
AHEAD = 8  # tokens that every row goes on by before the host looks at them: until then the device never waits for it
FEWEST = 8  # --batch_invariant: with at least 8 rows in every matrix product its rounding did not depend on their number


class RowCache:
    """Keys and values of R rows in every block, so that a new token costs one token and not the whole sequence.

    Models take it as `cache`. place() comes before each forward and says where its tokens belong. Memory is taken at the first
    forward, when the shapes are known (under TP they are local).
    """

    def __init__(self, rows: int, max_len: int, fixed_shapes=False, device="cpu"):
        """fixed_shapes: attend with at least FEWEST queries to all max_len keys, for --batch_invariant. device: of the model;
        another one only means buckets of another size."""
        self.rows, self.max_len, self.fixed_shapes = rows, max_len, fixed_shapes
        self.key_bucket = KEY_BUCKET.get(torch.device(device).type, 128)
        self.kept = {}  # (block, n-th call of attend in it): keys and values, each (rows, max_len, kv heads, head dim)
        self.most_rows, self.numbers = rows, None  # of rows and positions: 0, 1, 2, ...
        self.n, self.views = 0, {}  # of keys and values, what the last forward attended to: (rows, kv heads, n, head dim)

    def place(self, at: Tensor, rows: Tensor | None = None, keys: int | None = None):
        """The tokens of the next forward are at positions at (R, T) of these rows (R,); None: of all rows. keys: how many
        positions the longest row has by then; None asks the device, which makes the host wait for it."""
        keys = int(at.max()) + 1 if keys is None else keys
        if self.numbers is None:
            self.numbers = torch.arange(max(self.rows, self.max_len), device=at.device)
        if not self.views or self.bucket(keys) != self.n:
            self.n, self.views = self.bucket(keys), {}
            self.all_rows, self.columns = self.numbers[: self.rows], self.numbers[: self.n]
        self.at, self.chosen, self.masks = at, rows, {}
        self.row = (self.all_rows if rows is None else rows)[:, None]  # (R, 1)

    def bucket(self, keys: int) -> int:
        """How many positions are attended to where `keys` of them are needed."""
        return self.max_len if self.fixed_shapes else min(-(-keys // self.key_bucket) * self.key_bucket, self.max_len)

    def attend(self, block: str, reach: Tensor | None = None):
        """The attend of one block in one forward. A block may call it several times (differential attention): the n-th call has
        keys and values of its own, and goes on with those of the n-th call in the forward before. reach, sinks: see
        models.attention.causal_attention."""
        calls = count()
        return lambda q, k, v, scale=None, sinks=None: self.append((block, next(calls)), q, k, v, scale, reach, sinks)

    def append(self, call, q: Tensor, k: Tensor, v: Tensor | None, scale, reach=None, sinks=None) -> Tensor:
        """Store k, v (R, kv heads, T, head dim) and attend from q (R, heads, T, head dim) to all that its row has up to there,
        or to the last ones of reach (R or 1, T). v None: the keys are the values, as in DeepSeek's latents."""
        self.store(call, *(x.transpose(1, 2) for x in (k, v) if x is not None))
        if call not in self.views:
            self.views[call] = [self.kept[call][i][: self.rows, : self.n].transpose(1, 2) for i in (0, -1)]
        keys, values = self.views[call]
        if self.chosen is not None:
            keys, values = keys[self.chosen], values[self.chosen]
        if (kind := (q.dtype, id(reach))) not in self.masks:  # once per forward: with a boolean one sdpa does it in each block
            at = self.at[:, None, :, None]
            hidden = self.columns > at  # (R, 1, T, n)
            if reach is not None:
                hidden = hidden | (self.columns <= at - reach[:, None, :, None])
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
            self.masks[kind] = mask, reach  # reach, so that no other one gets its id
        (R, H, T, K), (mask, _) = q.shape, self.masks[kind]
        if self.fixed_shapes and T < FEWEST:  # copies of the last query, which nobody reads
            q, mask = (torch.cat([x, x[:, :, -1:].expand(-1, -1, FEWEST - T, -1)], 2) for x in (q, mask))
        elif T == 1 and sinks is None and not self.fixed_shapes:
            # heads that share their keys become queries of one head, so that these keys are read once for all
            q = q.reshape(R, keys.shape[1], -1, K)
        out = sdpa(q, keys, values, mask, scale=scale, sinks=sinks)
        return out[:, :, :T] if self.fixed_shapes else out.reshape(R, H, T, -1)

    def store(self, call, *new: Tensor):
        """Keep each of new (R, T, heads, head dim) at the places of its tokens."""
        if call not in self.kept:
            self.kept[call] = [x.new_zeros(self.most_rows, self.max_len, *x.shape[-2:]) for x in new]
        for kept, x in zip(self.kept[call], new):
            kept[self.row, self.at] = x

    def copy_first(self, slots: Tensor, T: int):
        """Give all rows of slots (n, G) the first T positions of the first row beside them."""
        for kept in sum(self.kept.values(), []):
            kept[slots, :T] = kept[slots[:, :1], :T]

    def keep(self, rows: Tensor):
        """Go on with these rows only, in this order."""
        self.rows, self.views = len(rows), {}
        for kept in sum(self.kept.values(), []):
            kept[: len(rows)] = kept[rows]


def noise_seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


def uniform_noise(name: str, *shape: int) -> Tensor:
    """Numbers in [0, 1) that depend on the name alone: not on the device, or on how many there were before."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(noise_seed(name)))


def column_logits(h: Tensor, weight: Tensor, *, column: Tensor, mesh=None) -> Tensor:
    """fp32 logits (R, V) at one column of each row: h (R, T/tp, D), column (R,). Nobody needs the other columns."""
    row = torch.arange(h.shape[0], device=h.device)
    if mesh is None:
        return F.linear(h[row, column], weight).float()
    h = AllGather.apply(h, 1, mesh.get_group())  # (R, T, D)
    return whole_vocab(F.linear(h[row, column], weight.to_local()).float(), weight.shape[0], mesh)


def next_logits(model, cache: RowCache, tokens: Tensor, at: Tensor, column: Tensor, keys: int, mesh=None, rows=None) -> Tensor:
    """Run tokens (R, T) at positions at (R, T), all below `keys`, of these rows (R,), None: of all; logits (R, V) of one column
    (R,) of each."""
    usual_logits = model.logits
    cache.place(at, rows, keys)
    model.logits = partial(column_logits, column=column, mesh=mesh)
    try:
        return model(tokens, positions=at, cache=cache)
    finally:
        model.logits = usual_logits


def read_prompts(model, cache: RowCache, prompts: list[list[int]], rows: Tensor, T: int, width: int, mesh=None) -> Tensor:
    """Read n prompts into these rows (n,) of the cache; logits (n, V) after their last tokens. T: tokens of the longest prompt
    on any rank that must run the same forwards. width: columns come in multiples of this."""
    n, device = len(prompts), rows.device
    T = -(-T // width) * width
    at = torch.arange(T, device=device).expand(max(n, 1), -1)
    if n == 0:  # only other ranks have prompts: take part, and write where nobody looks, at the end of the first row
        prompts, rows, at = [[0]], torch.zeros(1, dtype=torch.long, device=device), torch.full_like(at, cache.max_len - 1)
    again = [*range(len(prompts)), *[0] * (FEWEST - len(prompts) if cache.fixed_shapes else 0)]  # the first one several times
    tokens = torch.tensor([[*prompts[i], *[0] * (T - len(prompts[i]))] for i in again], device=device)  # padded on the right
    last = torch.tensor([len(prompts[i]) - 1 for i in again], device=device)
    rows, at, logits, size = rows[again], at[again], 0.0, PREFILL_CHUNK // width * width
    for begin in range(0, T, size):
        piece = slice(begin, begin + size)
        column = (last - begin).clamp(0, at[:, piece].shape[1] - 1)
        keys = min(begin + size, T) if n else cache.max_len
        found = next_logits(model, cache, tokens[:, piece], at[:, piece], column, keys, mesh, rows)
        logits = torch.where((last >= begin)[:, None], found, logits)  # what stays is of the piece in which the prompt ends
    return logits[:n]


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """logits (R, V) with -inf for all but the top_k likeliest tokens and the fewest that reach probability top_p."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    drop = torch.zeros_like(ranked, dtype=torch.bool)
    if top_k > 0:
        drop[:, top_k:] = True
    if top_p < 1:
        p = ranked.softmax(dim=-1)
        drop |= p.cumsum(dim=-1) - p >= top_p  # the tokens before it reach top_p already; never true of the first
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def draw(logits: Tensor, u: Tensor, temperature: float, top_k=0, top_p=1.0) -> tuple[Tensor, Tensor]:
    """logits (R, V) fp32 and one uniform number per row (R,) -> tokens (R,) and their log-probabilities at the temperature.

    The log-probability is that before top_k and top_p cut anything off: a training forward over the same tokens gives the same.
    Temperature 0 takes the likeliest token, and reports its log-probability at temperature 1.
    """
    logits = logits if temperature in (0, 1) else logits / temperature
    logits = logits - log_normalizer(logits)[:, None]
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:
        allowed = truncate(logits, top_k, top_p) if top_k > 0 or top_p < 1 else logits
        cdf = allowed.double().exp().cumsum(-1)  # in fp32 a sum over V words would round the rare ones away
        # the first token whose share goes beyond u; a token of probability 0 adds no share, so it is never the first
        token = torch.searchsorted(cdf, u.double()[:, None] * cdf[:, -1:], right=True).clamp_(max=logits.shape[1] - 1)
    return token[:, 0], logits.gather(-1, token)[:, 0]


def extend(s: dict, tokens: list[int], logprobs: list[float], room: int, ends: set, tool, stop, heard: Callable) -> bool:
    """Add the next tokens of a row to its sample (ids, logprobs, mask, said) until it ends or its tool answers, after which the
    row's other tokens are void: it goes on with what the tool said. Returns whether the sample goes on."""
    ids = s["ids"]
    for token, logprob in zip(tokens, logprobs):
        chosen = not s["said"]  # by the model: else the token is the next one of what the tool said
        ids.append(token if chosen else s["said"].popleft())
        s["logprobs"].append(logprob if chosen else 0.0)
        s["mask"].append(float(chosen))
        heard(ids[-1])
        if chosen and token in ends or len(ids) == room or stop is not None and stop(ids):
            return False
        if chosen and tool is not None and (answer := tool([*ids])):
            s["said"].extend(answer)
            return True
    return True


@torch.no_grad()
def rollout(
    model, prompts: list[list[int]], noise: Tensor, temperature: float, eot: int | list[int], *, max_len: int, rows=512,
    top_k=0, top_p=1.0, on_token=None, tool=None, stop=None, tp_mesh=None, batch_invariant=False,
    agree=lambda *numbers: numbers, ahead=AHEAD,
) -> list[dict]:
    """G samples of each of P prompts, as dicts(ids, logprobs, mask, truncated), those of a prompt next to each other.

    noise (P, G, max_new_tokens), on the host: uniform numbers, one per token, so that a sample depends on the weights, its
    prompt and its noise, and not on the row that it is in, its neighbours, or the number of processes. At most `rows` samples
    run at once; rows that have ended are given to the next prompt, which is read once for its G samples. A sample ends with
    `eot`, or any of several, which is part of it, or is truncated: at max_new_tokens, or when prompt and sample have max_len
    tokens.

    on_token(sample, id) is called for every new token, up to `ahead` tokens late; with ahead=1 at once.
    tool(ids so far) -> ids to go on with: they are fed as if sampled, with mask 0 (the model did not choose them). The tool is
    asked after a token of the model, never after its own words. By then the device has gone on without its answer: those
    tokens are void, and the answer's keys take the places of theirs.
    stop(ids so far) -> whether the sample ends here, without eot.
    model.unknown_ids, where there are any: ids that are never sampled.
    tp_mesh: the model is tensor parallel, and its ranks, given the same arguments, sample the same.
    batch_invariant: every matrix product has shapes whose rounding does not depend on the batch, for exact equality with a
    training forward over max_len tokens (docs/grpo.md says where that was tested).
    agree(*numbers): the largest of each over the ranks that must run every forward together; see lockstep() in rl/rollouts.py.
    ahead: tokens between two looks of the host. A row that has ended idles until then.
    """
    P, G, max_new = noise.shape
    device, ends = next(model.parameters()).device, {eot} if isinstance(eot, int) else set(eot)
    width = tp_mesh.size() if tp_mesh else 1  # under TP activations are cut along the sequence: a column for each rank
    n_rows = max(G, min(rows // G, P) * G, FEWEST if batch_invariant else 0)
    cache = RowCache(n_rows, max_len + width, batch_invariant, device)
    waiting = deque(range(P))
    noise = noise.reshape(P * G, max_new)
    samples = [dict(ids=[], logprobs=[], mask=[], said=deque(), prompt=prompt) for prompt in prompts for _ in range(G)]
    room = [max(1, min(max_new, max_len - len(s["prompt"]))) for s in samples]  # new tokens of each sample, at most
    sample: list[int | None] = [None] * n_rows  # that each row works on; None: nothing, and what it computes is not read

    def forward(token, at, keys):
        """Logits (R, V) behind the last token of each row (R,), which is at position at (R,)."""
        tokens, at = F.pad(token[:, None], (0, width - 1)), at[:, None] + torch.arange(width, device=device)
        return next_logits(model, cache, tokens, at, torch.zeros_like(token), keys, tp_mesh)

    def choose(logits, u, said):
        if (unknown := getattr(model, "unknown_ids", None)) is not None:
            logits.index_fill_(1, unknown, NEVER)
        token, logprob = draw(logits, u, temperature, top_k, top_p)
        return torch.where(said < 0, token, said), logprob

    while True:
        # Refill the rows of whole groups, and of several at once, because each refill is a forward of its own.
        busy = [row for row, s in enumerate(sample) if s is not None]
        free = [row for row, s in enumerate(sample) if s is None]
        n = min(len(free) // G, len(waiting))
        n = n if n >= min(len(waiting), max(1, n_rows // G // 4)) else 0
        group = [waiting.popleft() for _ in range(n)]
        size = len(sample)
        while not waiting and not group and size > FEWEST and len(busy) <= size // 2:  # go on with the few that are left
            size = max(size // 2, FEWEST)
        if size < len(sample):
            kept = [*busy, *free[: size - len(busy)]]
            sample = [sample[row] for row in kept]
            cache.keep(torch.tensor(kept, device=device))
        slots = torch.tensor(free[: n * G], dtype=torch.long, device=device).view(n, G)
        for i, row in enumerate(free[: n * G]):
            sample[row] = group[i // G] * G + i % G
        steps = min(ahead, max((room[s] - len(samples[s]["ids"]) for s in sample if s is not None), default=0))
        longest, feeds, steps = agree(max((len(prompts[p]) for p in group), default=0), len(busy) > 0, steps)
        if not steps:
            break

        # What the device needs to know for the next steps: all (steps, R) but the last token of each row, (R,)
        at, given, last, index = [], [], [], []
        for s in sample:
            ids, prompt, said = ([], [0], ()) if s is None else (samples[s][name] for name in ("ids", "prompt", "said"))
            at.append(len(prompt) + len(ids) - 1)  # the position of its last token
            last.append((ids or prompt)[-1])
            given.append([*islice(said, steps), *[-1] * (steps - len(said))])
            index.append((s or 0) * max_new + len(ids))
        keys, step = max(at) + 1, torch.arange(steps)[:, None]
        u = noise.flatten()[(torch.tensor(index) + step).clamp(max=P * G * max_new - 1)].double().to(device).unbind()
        at = (torch.tensor(at) + step).clamp(max=max_len - 1).to(device).unbind()
        said = torch.tensor(given, device=device).T.unbind()
        token, found = torch.tensor(last, device=device), []
        for i in range(steps):
            n = cache.bucket(min(keys + i, max_len))
            if i == 0 and (longest or not feeds):
                logits = forward(token, at[i], n) if feeds else torch.zeros(len(sample), model.config.vocab_size, device=device)
                if longest:
                    first = read_prompts(model, cache, [prompts[p] for p in group], slots[:, 0], longest, width, tp_mesh)
                    cache.copy_first(slots, longest)
                    logits[slots] = first[:, None]
            else:
                logits = forward(token, at[i], n)
            token, logprob = choose(logits, u[i], said[i])
            found.append((token, logprob))

        # the host looks: which samples have ended, and which get an answer from the tool
        found = torch.stack([torch.stack(x).double() for x in zip(*found)], 2).permute(1, 2, 0).tolist()  # exact: in one read
        for row, s in enumerate(sample):
            if s is not None:
                ask = tool and (lambda ids: tool(ids)[: max_new - len(ids)])
                heard = (lambda token, s=s: on_token(s, token)) if on_token else (lambda token: None)
                tokens, logprobs = found[row]
                if not extend(samples[s], [*map(int, tokens)], logprobs, room[s], ends, ask, stop, heard):
                    sample[row] = None
    return [
        dict(ids=s["ids"], logprobs=s["logprobs"], mask=s["mask"], truncated=not (s["ids"][-1] in ends and s["mask"][-1]))
        for s in samples]
