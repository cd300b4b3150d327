"""The decoder of generate.py and grpo.py: samples of each prompt, with a cache of keys and values.

P prompts, G samples of each, R rows (samples that run at once), T new tokens of a row in one forward, V vocab

rollout() keeps R rows busy: it reads some prompts, copies each to the rows of its G samples, adds one token to all rows until
some samples have ended, and gives their rows to the next prompts.
"""
import hashlib
from collections import deque
from functools import partial
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from distributed.layout import AllGather
from models.attention import sdpa
from models.loss import NEVER, log_normalizer
from parallel import whole_vocab

PREFILL_CHUNK = 512  # prompt tokens per forward: activations of a whole long prompt would need more memory than its cache
KEY_BUCKET = 128  # attention is over a multiple of so many keys: a new shape at every token would cost a GPU a plan each
FEWEST = 8  # --batch_invariant: with at least 8 rows in every matrix product its rounding did not depend on their number


class RowCache:
    """Keys and values of R rows in every block, so that a new token costs one token and not the whole sequence.

    Models take it as `cache`. place() comes before each forward and says where its tokens belong. Memory is taken at the first
    forward, when the shapes are known (under TP they are local).
    """

    def __init__(self, rows: int, max_len: int, fixed_shapes=False):
        """fixed_shapes: attend with at least FEWEST queries to all max_len keys, for --batch_invariant."""
        self.rows, self.max_len, self.fixed_shapes = rows, max_len, fixed_shapes
        self.kept = {}  # (block, n-th call of attend in it): keys and values, each (rows, kv heads, max_len, head dim)

    def place(self, at: Tensor, rows: Tensor | None = None):
        """The tokens of the next forward are at positions at (R, T) of these rows (R,); None: of all rows."""
        n = self.max_len if self.fixed_shapes else min(-(-(int(at.max()) + 1) // KEY_BUCKET) * KEY_BUCKET, self.max_len)
        self.at, self.mask = at, (torch.arange(n, device=at.device) <= at[:, :, None])[:, None]  # (R, 1, T, n keys)
        self.chosen = slice(None) if rows is None else rows
        self.row = torch.arange(self.rows, device=at.device)[self.chosen, None]  # (R, 1)

    def attend(self, block: str):
        """The attend of one block in one forward. A block may call it several times (differential attention): the n-th call has
        keys and values of its own, and goes on with those of the n-th call in the forward before."""
        calls = count()
        return lambda q, k, v, scale=None: self.append((block, next(calls)), q, k, v, scale)

    def append(self, call, q: Tensor, k: Tensor, v: Tensor | None, scale) -> Tensor:
        """Store k, v (R, kv heads, T, head dim) and attend from q (R, heads, T, head dim) to all that its row has up to there.
        v None: the keys are the values, as in DeepSeek's latents."""
        new = [x for x in (k, v) if x is not None]
        if call not in self.kept:
            self.kept[call] = [x.new_zeros(self.rows, x.shape[1], self.max_len, x.shape[3]) for x in new]
        for kept, x in zip(self.kept[call], new):
            kept[self.row, :, self.at] = x.transpose(1, 2)
        keys, values = (self.kept[call][i][self.chosen, :, : self.mask.shape[-1]] for i in (0, -1))
        T, mask = q.shape[2], self.mask
        if self.fixed_shapes and T < FEWEST:  # copies of the last query, which nobody reads
            q, mask = (torch.cat([x, x[:, :, -1:].expand(-1, -1, FEWEST - T, -1)], 2) for x in (q, mask))
        return sdpa(q, keys, values, mask, scale=scale)[:, :, :T]

    def copy_first(self, slots: Tensor, T: int):
        """Give all rows of slots (n, G) the first T positions of the first row beside them."""
        for kept in sum(self.kept.values(), []):
            kept[slots, :, :T] = kept[slots[:, :1], :, :T]

    def keep(self, rows: Tensor):
        """Go on with these rows only, in this order."""
        self.rows, self.kept = len(rows), {call: [x[rows] for x in kept] for call, kept in self.kept.items()}


def uniform_noise(name: str, *shape: int) -> Tensor:
    """Numbers in [0, 1) that depend on the name alone: not on the device, or on how many there were before."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.rand(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))


def column_logits(h: Tensor, weight: Tensor, *, column: Tensor, mesh=None) -> Tensor:
    """fp32 logits (R, V) at one column of each row: h (R, T/tp, D), column (R,). Nobody needs the other columns."""
    row = torch.arange(h.shape[0], device=h.device)
    if mesh is None:
        return F.linear(h[row, column], weight).float()
    h = AllGather.apply(h, 1, mesh.get_group())  # (R, T, D)
    return whole_vocab(F.linear(h[row, column], weight.to_local()).float(), weight.shape[0], mesh)


def next_logits(model, cache: RowCache, tokens: Tensor, at: Tensor, column: Tensor, mesh=None, rows=None) -> Tensor:
    """Run tokens (R, T) at positions at (R, T) of these rows (R,), None: of all; logits (R, V) of one column (R,) of each."""
    usual_logits = model.logits
    cache.place(at, rows)
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
        found = next_logits(model, cache, tokens[:, piece], at[:, piece], column, mesh, rows)
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
    logits = logits / (temperature or 1.0)
    logits = logits - log_normalizer(logits)[:, None]
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        allowed = truncate(logits, top_k, top_p) if top_k > 0 or top_p < 1 else logits
        cdf = allowed.double().exp().cumsum(-1)  # in fp32 a sum over V words would round the rare ones away
        # the first token whose share goes beyond u; a token of probability 0 adds no share, so it is never the first
        token = torch.searchsorted(cdf, u.double()[:, None] * cdf[:, -1:], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return token, logits.gather(-1, token[:, None])[:, 0]


@torch.no_grad()
def rollout(
    model, prompts: list[list[int]], noise: Tensor, temperature: float, eot: int | list[int], *, max_len: int, rows=512,
    top_k=0, top_p=1.0, on_token=None, tool=None, stop=None, tp_mesh=None, batch_invariant=False,
    agree=lambda *numbers: numbers,
) -> list[dict]:
    """G samples of each of P prompts, as dicts(ids, logprobs, mask, truncated), those of a prompt next to each other.

    noise (P, G, max_new_tokens): uniform numbers, one per token, so that a sample depends on the weights, its prompt and its
    noise, and not on the row that it is in, its neighbours, or the number of processes. At most `rows` samples run at once;
    rows that have ended are given to the next prompt, which is read once for its G samples. A sample ends with `eot`, or any
    of several, which is part of it, or is truncated: at max_new_tokens, or when prompt and sample have max_len tokens.

    on_token(sample, id) is called for every new token.
    tool(ids so far) -> ids to go on with: they are fed as if sampled, with mask 0 (the model did not choose them). The tool is
    asked after a token of the model, never after its own words.
    stop(ids so far) -> whether the sample ends here, without eot.
    model.unknown_ids, where there are any: ids that are never sampled.
    tp_mesh: the model is tensor parallel, and its ranks, given the same arguments, sample the same.
    batch_invariant: every matrix product has shapes whose rounding does not depend on the batch, for exact equality with a
    training forward over max_len tokens (docs/grpo.md says where that was tested).
    agree(*numbers): the largest of each over the ranks that must run every forward together; see lockstep() in rl/rollouts.py.
    """
    P, G, max_new = noise.shape
    NONE, device = P * G, next(model.parameters()).device
    width = tp_mesh.size() if tp_mesh else 1  # under TP activations are cut along the sequence: a column for each rank
    fewest = FEWEST if batch_invariant else 0
    n_rows = max(G, min(rows // G, P) * G, fewest)
    cache = RowCache(n_rows, max_len + width, batch_invariant)  # behind the last token there is room for the other columns
    waiting, unknown = deque(range(P)), getattr(model, "unknown_ids", None)
    ends = torch.tensor([eot] if isinstance(eot, int) else eot, dtype=torch.long, device=device)
    # What is known of each sample. The last entry, NONE, is of no sample: rows that have nothing to do work on it.
    prompt_len = torch.tensor([len(p) for p in prompts for _ in range(G)] + [0], device=device)
    n_new = torch.zeros_like(prompt_len)
    ids = torch.full((NONE + 1, max_new), -1, device=device)  # -1: not known yet. What a tool says is known before it is fed
    logprobs, mask = torch.zeros(ids.shape, device=device), torch.ones(ids.shape, device=device)
    u = torch.cat([noise.view(NONE, max_new), torch.zeros(1, max_new)]).to(device)
    # What is known of each row: the sample that it works on, and the logits of its next token
    sample = torch.full((n_rows,), NONE, device=device)
    logits = torch.zeros(n_rows, model.config.vocab_size, device=device)
    while True:
        # Refill the rows of whole groups, and of several at once, because each refill is a forward of its own.
        free = (sample == NONE).nonzero()[:, 0]
        n = min(len(free) // G, len(waiting))
        n = n if n >= min(len(waiting), max(1, n_rows // G // 4)) else 0
        group = [waiting.popleft() for _ in range(n)]
        longest, running = agree(max((len(prompts[p]) for p in group), default=0), n > 0 or len(free) < len(sample))
        if not running:
            break
        if longest:
            slots = free[: n * G].view(n, G)
            first = read_prompts(model, cache, [prompts[p] for p in group], slots[:, 0], longest, width, tp_mesh)
            cache.copy_first(slots, longest)
            logits[slots] = first[:, None]
            sample[slots] = torch.tensor(group, dtype=torch.long, device=device)[:, None] * G + torch.arange(G, device=device)

        # one more token for every row: a drawn one, or the next one of what the tool said
        n_new[NONE] = 0
        at = sample, n_new[sample]
        if unknown is not None:
            logits.index_fill_(1, unknown, NEVER)
        token, logprob = draw(logits, u[at], temperature, top_k, top_p)
        said = ids[at] >= 0
        token, logprob = torch.where(said, ids[at], token), logprob.masked_fill(said, 0.0)
        ids[at], logprobs[at] = token, logprob
        n_new[sample] += 1
        if on_token is not None:
            busy = sample < NONE
            for s, t in zip(sample[busy].tolist(), token[busy].tolist()):
                on_token(s, t)

        # which samples end here, and which get an answer from the tool
        chosen = mask[at] > 0
        ended = torch.isin(token, ends) & chosen | (n_new[sample] == max_new) | (prompt_len[sample] + n_new[sample] >= max_len)
        if stop is not None:
            lengths = zip(sample.tolist(), n_new[sample].tolist(), ids[sample].tolist())
            ended |= torch.tensor([s < NONE and stop(row[:n]) for s, n, row in lengths], device=device)
        for s in sample[~ended & chosen & (sample < NONE)].tolist() if tool is not None else ():
            k = int(n_new[s])
            answer = torch.tensor(tool(ids[s, :k].tolist())[: max_new - k], dtype=torch.long, device=device)
            ids[s, k : k + len(answer)], mask[s, k : k + len(answer)] = answer, 0.0
        sample = sample.masked_fill(ended, NONE)

        # feed these tokens; when few rows are left, and no prompts for the others, go on with those few
        left = (sample < NONE).nonzero()[:, 0]
        if not waiting and 8 < len(sample) and max(len(left), fewest) <= len(sample) // 2:
            left = torch.cat([left, (sample == NONE).nonzero()[: max(0, 8 - len(left)), 0]])
            sample, token, logits = sample[left], token[left], logits[left]  # logits: where no forward follows
            cache.keep(left)
        if agree(0, bool((sample < NONE).any()))[1]:
            at = (prompt_len + n_new)[sample][:, None] - 1 + torch.arange(width, device=device)
            tokens = F.pad(token[:, None], (0, width - 1))
            logits = next_logits(model, cache, tokens, at.clamp(min=0), torch.zeros_like(sample), tp_mesh)
    n_new, ids, logprobs, mask = n_new.tolist(), ids.cpu(), logprobs.cpu(), mask.cpu()
    samples = [dict(ids=ids[s, :k], logprobs=logprobs[s, :k], mask=mask[s, :k]) for s, k in enumerate(n_new[:NONE])]
    samples = [{name: x.tolist() for name, x in s.items()} for s in samples]
    return [s | dict(truncated=not (s["ids"][-1] in ends.tolist() and s["mask"][-1])) for s in samples]
