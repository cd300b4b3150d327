"""Makes the pictures of docs/parallelism.md: python docs/pictures.py [name ...]

Nothing is drawn by hand: the parts come from the recipe's DTensors under a fake process group, the
bytes from the dry run, the schedules from the running code. tests/exercises/test_lessons.py makes
the pictures again and compares.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch

import train_llama3
import train_qwen3
from distributed.pipeline import stage_ids
from distributed.stages import split_stages
from models.loss import IGNORE
from parallel import replicas, sequence_index
from tools.reports import svg
from tools.reports.dryrun import dry_world, format_bytes, make_report
from tools.reports.explain import count_block, list_collectives
from tools.reports.parts import axis_groups, held_part, place_of, shown_parameters, tokens_of
from tools.reports.schedule import bubble, rows_of, simulate
from tools.reports.svg import arrow, document, label, legend, lines, rect

HERE = Path(__file__).parent / "pictures"
# width of a picture, left edge of the first rank's column
WIDTH = 860
LEFT = 170
LETTERS = "ABCD"


def config(recipe=train_llama3, **flags):
    """Llama 3 8B with four layers, enough for a picture, and a sequence of 8,192 tokens per device."""
    return recipe.Config(
        **dict(flavor="8B", model_args="n_layers=4", seq_len=8192, local_batch_size=1, dp_shard=1)
        | flags
    )


def built(cfg, recipe=train_llama3):
    """(stages, layout) of the first device, made by the recipe's own main."""
    with dry_world(recipe.main, cfg, 0) as (stages, _, layout):
        pass
    return stages, layout


# ---------------------------------------------------------------- the collectives
MEANING = {
    "all-gather": "each has one piece; then all have all pieces",
    "reduce-scatter": "each has addends of all pieces; then each has the sum of one piece",
    "all-reduce": "each has addends of all pieces; then all have the sums of all pieces",
    "all-to-all": "each has a piece for everyone; then each has a piece from everyone",
}


def before(operation: str) -> list[list[str]]:
    """The pieces of four ranks: A2 is made by rank 0, and is piece 2. In an all-gather each rank
    made a single piece."""
    return [
        [f"{letter}{i}" for i in range(4) if i == r or operation != "all-gather"]
        for r, letter in enumerate(LETTERS)
    ]


def after(operation: str, rows: list[list[str]]) -> list[list[str]]:
    if operation == "all-gather":
        return [[piece for row in rows for piece in row]] * 4
    if operation == "all-to-all":
        return [[row[r] for row in rows] for r in range(4)]
    sums = [f"Σ{i}" for i in range(4)]
    return [[s] for s in sums] if operation == "reduce-scatter" else [sums] * 4


def pieces(x, y, row, rank, width=150) -> str:
    """A rank's pieces, coloured by the maker's rank; sums are dark. A single piece lies at its
    place in the whole."""
    out = rect(x, y, width, 30, "whole")
    w = width / 4
    for i, piece in enumerate(row):
        place = rank if len(row) == 1 else i
        is_sum = piece[0] == "Σ"
        out += rect(
            x + place * w + 1, y + 1, w - 2, 28, "kept" if is_sum else f"r{LETTERS.index(piece[0])}"
        )
        out += label(
            x + (place + 0.5) * w, y + 20, piece, f"bold {'on' if is_sum else 'dark'}", "middle"
        )
    return out


def collectives() -> str:
    out = ""
    y = 20
    for operation, meaning in MEANING.items():
        out += label(10, y, operation, "title") + label(140, y, meaning)
        out += label(10, y + 44, "before") + label(10, y + 102, "after")
        had = before(operation)
        for r, (a, b) in enumerate(zip(had, after(operation, had), strict=True)):
            x = 95 + r * 190
            out += (
                label(x, y + 19, f"rank {r}", "small soft")
                + pieces(x, y + 24, a, r)
                + pieces(x, y + 82, b, r)
            )
            out += arrow(x + 75, y + 57, x + 75, y + 79)
        y += 148
    return document(WIDTH, y - 20, out, "the four collectives among four ranks, before and after")


# ---------------------------------------------------------------- the mesh
SENT = {
    "tp": "activations, four times per block and direction",
    "cp": "keys and values of every block",
    "fsdp": "weights and gradients of every block (dp_shard x cp)",
}


def mesh() -> str:
    stages, layout = built(config(dp_shard=2, cp=2, tp=2))
    out = ""
    y = 26
    for axis, groups in axis_groups(layout).items():
        out += label(10, y, axis, "title") + label(60, y, f"ranks in a frame exchange {SENT[axis]}")
        x = 60
        for group in groups:
            out += rect(x, y + 10, len(group) * 92 + 4, 54, "frame", rx=6)
            for r in group:
                place = place_of(layout, r)
                out += rect(x + 6, y + 16, 84, 42, "gathered", rx=4) + label(
                    x + 48, y + 34, f"rank {r}", "bold", "middle"
                )
                out += label(
                    x + 48,
                    y + 50,
                    " ".join(str(place[a]) for a in ("dp_shard", "cp", "tp")),
                    "small",
                    "middle",
                )
                x += 92
            x += 12
        y += 104
    out += label(
        60, y - 14, "The three numbers of a rank: its place on dp_shard, cp and tp.", "small soft"
    )
    return document(WIDTH, y, out, "the groups of 8 ranks with dp_shard 2, cp 2, tp 2")


# ---------------------------------------------------------------- counting tokens
def tokens() -> str:
    """Two data ranks with two micro-batches each. The sum over all is divided by the tokens of all;
    a mean of means is not."""
    cfg = config(dp_shard=2, seq_len=24, global_batch_size=4)
    _, layout = built(cfg)
    # tokens with a loss in each sequence, and their losses
    lengths = [24, 4, 10, 2]
    losses = [2.0, 8.0, 3.0, 6.0]
    labels = torch.full((4, 24), IGNORE)
    for i, n in enumerate(lengths):
        labels[i, 24 - n :] = 1
    counts = (labels != IGNORE).sum(1).tolist()
    out = label(
        10,
        22,
        "A global batch of 4 sequences x 24 tokens. Dark: tokens with a loss. Pale: without, "
        "label IGNORE.",
    )
    for rank in range(2):
        first, end = tokens_of(layout, place_of(layout, rank), 24)["sequences"]
        for a, i in enumerate(range(first, end)):
            y = 44 + 34 * i + 14 * rank
            out += label(10, y + 19, f"rank {rank}", "bold") + label(70, y + 19, f"micro-batch {a}")
            for t in range(24):
                out += rect(
                    170 + 14 * t, y, 13, 26, "kept" if labels[i, t] != IGNORE else "gathered"
                )
            out += label(
                520, y + 18, f"{counts[i]} tokens x loss {losses[i]:g} = {counts[i] * losses[i]:g}"
            )
    total = sum(c * x for c, x in zip(counts, losses, strict=True))
    n = sum(counts)
    means = " + ".join(f"{x:g}" for x in losses)
    right = f"sum of all losses / tokens of the global batch = {total:g} / {n} = {total / n:.2f}: the same in every layout"
    wrong = f"mean of the micro-batches' means = ({means}) / 4 = {sum(losses) / 4:.2f}: tokens of a short text count more"
    out += label(10, 222, "right", "bold") + label(70, 222, right)
    out += label(10, 246, "wrong", "warn") + label(70, 246, wrong)
    return document(WIDTH, 262, out, "tokens are counted over the global batch")


# ---------------------------------------------------------------- shards and traffic
def holds(stages, layout, rows, seq_len=8192) -> tuple[str, int]:
    """(SVG, height): a column per rank. rows: (label, name of a parameter or None for the tokens,
    "gathered" or "")."""
    n = layout.world_size
    parameters = shown_parameters(stages)
    y = 44
    step = (WIDTH - LEFT) / n
    out = ""
    longest = max(size for _, name, _ in rows if name for size in parameters[name].shape)
    places = [place_of(layout, r) for r in range(n)]
    for r, place in enumerate(places):
        named = " ".join(
            f"{axis} {place[axis]}" for axis, size in layout.degrees.items() if size > 1
        )
        out += label(LEFT + r * step, 18, f"rank {r}", "title") + label(
            LEFT + r * step, 34, named, "small soft"
        )
    for says, name, gathered in rows:
        p = parameters.get(name)
        w, h = (
            (step - 30, 15 * layout.global_batch_size)
            if p is None
            else svg.box_size(p.shape, longest, 92)
        )
        out += lines(10, y + 14, says[:1], "bold") + lines(10, y + 30, says[1:], "small")
        deepest = 0
        for r, place in enumerate(places):
            x = LEFT + r * step
            if p is None:
                held = tokens_of(layout, place, seq_len)
                shape = (layout.global_batch_size, seq_len)
                out += svg.tokens(x, y, w, h, held, shape)
                first, end = held["sequences"]
                spans = [f"{a:,}-{b - 1:,}" for a, b in held["between"] if b - a < seq_len]
                under = [
                    f"sequence {first}" if end == first + 1 else f"sequences {first}-{end - 1}",
                    *spans,
                ]
            else:
                part = held_part(p, place)
                out += svg.tensor(
                    x, y, w, h, p.shape, part, held_part(p, place, True) if gathered else None
                )
                under = svg.words_for(part, p.shape).split(", ")
            out += lines(x, y + h + 15, under, "small", step=14)
            deepest = max(deepest, len(under))
        y += max(h + 15 + 14 * deepest, 30 + 15 * len(says)) + 16
    return out, y


KEEPS = [
    ("kept", "kept all the time"),
    ("gathered", "gathered while the block runs"),
    ("token", "tokens between blocks"),
    ("tokens", "tokens also in attention, FFN"),
]


def chapter(
    says: str, rows, recipe=train_llama3, halves=("attention", "FFN"), extra=None, **flags
) -> str:
    """A picture of an axis: the shards on each rank, and below the traffic for a block."""
    cfg = config(recipe, **flags)
    stages, layout = built(cfg, recipe)
    out, y = holds(stages, layout, rows)
    shown = [
        "kept",
        "token",
        *["gathered"] * any(g for *_, g in rows),
        *["tokens"] * (layout.tp > 1),
    ]
    out += legend(
        LEFT if len(shown) < 4 else 10, y + 4, [entry for entry in KEEPS if entry[0] in shown]
    )
    y += 24
    if extra:
        drawn, high = extra(layout)
        out = out + f'<g transform="translate(0 {y})">\n{drawn}</g>\n'
        y = y + high
    drawn, high = svg.timeline(
        list_collectives(count_block(recipe.main, cfg)[3]), halves, WIDTH - 20
    )
    return document(
        WIDTH, y + high + 8, f'{out}<g transform="translate(10 {y + 8})">\n{drawn}</g>\n', says
    )


WQ = "block attn.wq.weight"
STATE = ["its gradient, and both", "of AdamW's moments"]
MINE = ["activations", "the global batch: a row", "is a sequence"]


def fsdp() -> str:
    return chapter(
        "FSDP on four ranks",
        [(["weight wq", "4,096 x 4,096"], WQ, "gathered"), (STATE, WQ, ""), (MINE, None, "")],
        dp_shard=4,
    )


def hsdp() -> str:
    return chapter(
        "two copies of the model, each sharded over two ranks",
        [(["weight wq", "4,096 x 4,096"], WQ, "gathered"), (STATE, WQ, ""), (MINE, None, "")],
        dp_replicate=2,
        dp_shard=2,
    )


def tp() -> str:
    return chapter(
        "tensor parallelism on four ranks",
        [
            (["weight wq", "4,096 x 4,096", "split by rows: heads"], WQ, ""),
            (["weight wo", "4,096 x 4,096", "split by columns"], "block attn.wo.weight", ""),
            (["weight of a norm", "4,096, whole"], "block attn_norm.weight", ""),
            (["activations", "one sequence;", "between blocks a part"], None, ""),
        ],
        tp=4,
    )


def causal_work(layout) -> tuple[str, int]:
    """The rank of each part of attention: queries of a chunk with the keys up to the chunk. All
    ranks have equally many."""
    n = 2 * layout.cp
    owner = {int(chunk): r for r in range(layout.cp) for chunk in sequence_index(n, layout.cp, r)}
    out = label(10, 26, "attention", "bold")
    side = 26
    out += lines(
        10,
        42,
        ["8 chunks: queries down,", "keys across; a causal", "model looks back only"],
        "small",
    )
    for q in range(n):
        for k in range(n):
            out += rect(
                LEFT + k * side,
                10 + q * side,
                side - 1,
                side - 1,
                f"r{owner[q]}" if k <= q else "whole",
            )
        out += label(LEFT + n * side + 8, 28 + q * side, f"chunk {q}: rank {owner[q]}", "small")
    work = {r: sum(q + 1 for q in range(n) if owner[q] == r) for r in range(layout.cp)}
    for r in range(layout.cp):
        held = [q for q in range(n) if owner[q] == r]
        text = f"rank {r}: chunks {held[0]} and {held[1]}, {held[0] + 1} + {held[1] + 1} = {work[r]} squares"
        out += rect(LEFT + n * side + 140, 34 + r * 32, 20, 20, f"r{r}") + label(
            LEFT + n * side + 168, 49 + r * 32, text
        )
    return out, n * side + 26


def cp() -> str:
    return chapter(
        "context parallelism on four ranks",
        [
            (["activations", "a sequence in 8 chunks:", "an early and a late one"], None, ""),
            (["weight wq", "FSDP shards over cp, too"], WQ, "gathered"),
        ],
        extra=causal_work,
        cp=4,
    )


def ep() -> str:
    def exchange(layout):
        out = label(10, 26, "tokens", "bold") + lines(
            10, 42, ["sorted by the rank", "of their expert"], "small"
        )
        out += label(10, 92, "exchanged", "bold") + lines(
            10, 108, ["A2: from rank 0,", "for experts of rank 2"], "small"
        )
        had = before("all-to-all")
        step = (WIDTH - LEFT) / 4
        for r, (a, b) in enumerate(zip(had, after("all-to-all", had), strict=True)):
            out += pieces(LEFT + r * step, 12, a, r) + pieces(LEFT + r * step, 80, b, r)
            out += arrow(LEFT + r * step + 75, 46, LEFT + r * step + 75, 76)
        return out, 138

    return chapter(
        "expert parallelism on four ranks",
        [
            (["experts' weight w1", "128 x 768 x 2,048"], "block moe.experts.w1", ""),
            (["weight wq", "not an expert's: FSDP"], WQ, "gathered"),
            (MINE, None, ""),
        ],
        recipe=train_qwen3,
        halves=("attention", "experts"),
        extra=exchange,
        flavor="30B-A3B",
        dp_shard=4,
        ep=4,
    )


# ---------------------------------------------------------------- pipelines
def pp() -> str:
    """The layers of each rank, and the order of the rank's work."""
    cfg = config(pp=4, local_batch_size=8, model_args="")
    stages, layout = built(cfg)
    split = split_stages(cfg, 4, 32)
    step = (WIDTH - 20) / 4
    out = ""
    size = format_bytes(cfg.pp_microbatch_size * cfg.seq_len * stages[0].config.dim * 2)
    for r in range(4):
        names = [name for i in stage_ids(layout, len(split), r) for name in split[i]]
        numbers = [name.split(".")[1] for name in names if name.startswith("blocks.")]
        parts = [name for name in names if not name.startswith("blocks.")]
        x = 10 + r * step
        out += label(x, 20, f"pp rank {r}", "title") + rect(x, 30, step - 72, 74, "kept", rx=6)
        out += label(
            x + (step - 72) / 2, 60, f"layers {numbers[0]}-{numbers[-1]}", "on bold", "middle"
        )
        out += label(
            x + (step - 72) / 2,
            82,
            " ".join(p.replace("tok_embeddings", "embedding") for p in parts),
            "on",
            "middle",
        )
        if r < 3:
            out += arrow(x + step - 68, 52, x + step - 4, 52) + arrow(
                x + step - 4, 88, x + step - 68, 88
            )
            out += label(x + step - 36, 46, size, "small", "middle") + label(
                x + step - 36, 104, size, "small", "middle"
            )
    out += label(
        10,
        128,
        f"Per micro-batch: to the right the activations of {cfg.seq_len:,} tokens, back their "
        "gradients.",
    )
    drawn, high = pictured(cfg, 8, 4)
    return document(
        WIDTH,
        152 + high,
        f'{out}<g transform="translate(10 152)">\n{drawn}</g>\n',
        "a pipeline of four ranks",
    )


def pictured(cfg, n: int, n_stages: int) -> tuple[str, int]:
    """A schedule of n micro-batches on four ranks, with bubble and legend."""
    times = simulate(rows_of(cfg, 4, n, n_stages))
    drawn, high = svg.schedule(times, WIDTH - 20)
    name = label(0, 12, f"{cfg.pp_schedule}: {n} micro-batches, bubble {bubble(times):.1%}", "bold")
    name += (
        label(WIDTH - 20, 12, "thick edge: a rank's second stage", "small soft", "end")
        if n_stages > 4
        else ""
    )
    return (
        f'{name}<g transform="translate(0 '
        f'24)">\n{drawn}</g>\n{svg.schedule_legend(58, high + 46, times)}',
        high + 58,
    )


def schedule(name: str) -> str:
    drawn, high = pictured(
        config(pp=4, local_batch_size=8, pp_schedule=name), 8, 4 if name == "1F1B" else 8
    )
    return document(
        WIDTH,
        high + 16,
        f'<g transform="translate(10 12)">\n{drawn}</g>\n',
        f"the schedule {name} on four ranks",
    )


def in_flight(row) -> list[int]:
    """For each unit of time, the micro-batches whose activations a rank keeps: from a forward's
    begin to its backward's end."""
    begun = {m: start for start, _, kind, _, m in row if kind == "F"}
    ended = {m: end for _, end, kind, _, m in row if kind == "B"}
    return [sum(begun[m] <= t < ended[m] for m in begun) for t in range(max(ended.values()))]


def gpipe() -> str:
    """The schedule of GPipe, and what the first rank keeps under GPipe and under 1F1B."""
    drawn, y = pictured(config(pp=4, local_batch_size=8, pp_schedule="GPipe"), 8, 4)
    out = f'<g transform="translate(10 12)">\n{drawn}</g>\n'
    y = y + 44
    out += label(
        10, y, "Micro-batches whose activations pp rank 0 keeps, over the same time", "bold"
    )
    for name in ("GPipe", "1F1B"):
        kept = in_flight(
            simulate(rows_of(config(pp=4, local_batch_size=8, pp_schedule=name), 4, 8, 4))[0]
        )
        unit = (WIDTH - 80) / len(kept)
        out += label(10, y + 84, name, "bold") + label(10, y + 100, f"at most {max(kept)}", "small")
        for t, n in enumerate(kept):
            out += rect(68 + t * unit, y + 100 - 10 * n, unit - 1, 10 * n, "kept")
        y += 106
    return document(
        WIDTH, y + 16, out, "GPipe on four ranks, and the activations that its first rank keeps"
    )


# ---------------------------------------------------------------- time and memory of a step
# the machine of chapter 11
FLOPS = 989e12
NVLINK = 450e9
NETWORK = 50e9
LATENCY = 5e-6


def one_block(**flags) -> dict:
    """What a block adds to a step on 8 devices: a model of four layers less one of three."""
    three, four = (
        make_report(train_llama3.main, config(model_args=f"n_layers={n}", **flags)).ranks[0].step
        for n in (3, 4)
    )
    return {key: n - three.get(key, 0) for key, n in four.items()}


def seconds_of(block: dict) -> tuple[float, float]:
    """(all, attention's scores and values) of a block's forward, at the peak. Causal attention does
    half of what is counted."""
    attention = block["flops", "attention"] / 3 / 2  # a third of a step's is in the forward
    return (block["flops", "forward"] - attention) / FLOPS, attention / FLOPS


def overlap() -> str:
    """Forward of four blocks: FSDP with a fast and with a slow link, and one block under tp, where
    nothing overlaps."""
    block = one_block(dp_shard=8)
    out = ""
    y = 24
    size = max(
        size
        for _, phase, axis, op, size in (k for k in block if k[0] == "moved")
        if (phase, axis, op) == ("forward", "fsdp", "all_gather")
        and block["moved", phase, axis, op, size]
    )
    # seconds; pixels per second
    compute = seconds_of(block)[0]
    scale = 20e3
    for name, bandwidth in (("450 GB/s", NVLINK), ("50 GB/s", NETWORK)):
        gather = 7 * LATENCY + 7 / 8 * size / bandwidth
        gathered = 0.0
        done = 0.0
        begun = 0.0
        takes = f"a gather takes {gather * 1e3:.2f} ms, a block {compute * 1e3:.2f} ms"
        out += label(10, y, f"dp_shard 8, links of {name}: {takes}", "bold")
        out += label(10, y + 28, "network") + label(10, y + 60, "arithmetic")
        for i in range(4):
            # one block ahead: while block i - 1 is computed, block i is gathered
            start = max(gathered, begun)
            gathered = start + gather
            out += rect(90 + start * scale, y + 10, gather * scale - 1, 26, "sent")
            out += label(
                90 + (start + gather / 2) * scale,
                y + 28,
                f"gather {i}" if gather * scale > 60 else i,
                "small dark",
                "middle",
            )
            begun = max(gathered, done)
            done = begun + compute
            out += rect(90 + begun * scale, y + 42, compute * scale - 1, 26, "F")
            out += label(
                90 + (begun + compute / 2) * scale, y + 60, f"block {i}", "small dark", "middle"
            )
        out += label(90 + done * scale + 8, y + 60, f"{done * 1e3:.1f} ms", "bold")
        y += 100
    forward, attention = seconds_of(one_block(tp=8))
    message = 7 * LATENCY + 7 / 8 * 2 * 8192 * 4096 / NVLINK
    x = 90.0
    scale = 550e3
    out += label(
        10,
        y,
        "tp 8, links of 450 GB/s, one block, drawn larger: a collective takes "
        f"{message * 1e3:.2f} ms, and nothing runs beside it",
        "bold",
    )
    out += label(10, y + 28, "network") + label(10, y + 60, "arithmetic")
    projections = 2 * 8192 * (2 * 4096 * 4096 + 2 * 4096 * 1024) / 8 / FLOPS  # wq, wo; wk, wv
    for name, seconds, travels in (
        ("gather", message, True),
        ("attention", projections + attention, False),
        ("scatter", message, True),
        ("gather", message, True),
        ("FFN", forward - projections - attention, False),
        ("scatter", message, True),
    ):
        out += rect(
            x, y + (10 if travels else 42), seconds * scale - 1, 26, "sent" if travels else "F"
        )
        out += label(
            x + seconds * scale / 2, y + (28 if travels else 60), name, "small dark", "middle"
        )
        x += seconds * scale
    total = forward + 4 * message
    out += label(x + 8, y + 60, f"{total * 1e3:.2f} ms", "bold")
    return document(WIDTH, y + 84, out, "communication beside arithmetic, and in line with it")


def memory() -> str:
    """What one device keeps of 32 blocks over a step, by what is recomputed."""
    out = label(
        10,
        20,
        "Activations of Llama 3 8B on a device, over a step: 32 forwards, then 32 backwards",
        "bold",
    )
    y = 30
    blocks = 32
    whole = None
    for ac in ("none", "op", "full"):
        block = one_block(dp_shard=8, ac=ac)
        kept = block["activations", 0]
        again = block.get(("flops", "recompute"), 0) / block["flops", "forward"]
        whole = whole or kept  # a block's activations without recomputation
        unit = (WIDTH - 110) / (blocks * 4.2)
        x = 96.0
        most = 0
        for i in range(2 * blocks):
            forward = i < blocks
            n = i + 1 if forward else 2 * blocks - i
            # in a backward one block is there whole
            held = n * kept + (0 if forward else whole - kept)
            wide = unit * (1 if forward else 2 + again)
            high = held / whole / blocks * 84
            most = max(most, held)
            out += rect(x, y + 94 - high, wide - 0.6, high, "token" if forward else "kept")
            x += wide
        out += lines(10, y + 66, [f"--ac {ac}"], "bold") + lines(
            10, y + 82, [f"at most {format_bytes(most)}"], "small"
        )
        y += 104
    out += legend(
        96, y + 14, [("token", "forward"), ("kept", "backward, with what it computes again")]
    )
    return document(
        WIDTH, y + 30, out, "activation memory over a step, without and with recomputation"
    )


# ---------------------------------------------------------------- a ring
def ring() -> str:
    """An all-reduce among four ranks, step by step: each rank sends a piece to its neighbour, which
    adds or keeps it."""
    # of each rank, the ranks whose addends are in piece i
    held = [[{letter} for _ in range(4)] for letter in LETTERS]
    says = "Letters: the ranks whose numbers are in a piece; Σ: all four. Framed: the piece that goes to the next rank."
    out = label(10, 20, says)
    y = 34
    for step in range(7):
        sent = [(r - step) % 4 if step < 3 else (r + 1 - (step - 3)) % 4 for r in range(4)]
        says = "begin" if step == 0 else f"after step {step}"
        does = {
            0: ["reduce-scatter:", "add what arrives"],
            3: ["all-gather:", "keep what arrives"],
            6: ["end"],
        }.get(step, [])
        out += label(10, y + 14, says, "bold") + lines(10, y + 29, does, "small")
        for r in range(4):
            x = 130 + r * 182
            if step == 0:
                out += label(x, y + 6, f"rank {r}", "small soft")
            for i, letters in enumerate(held[r]):
                full = len(letters) == 4
                text = "Σ" if full else "".join(sorted(letters))
                out += rect(
                    x + i * 41,
                    y + 12,
                    39,
                    28,
                    "kept" if full else f"r{LETTERS.index(min(letters))}",
                )
                out += label(
                    x + i * 41 + 19.5, y + 31, text, f"bold {'on' if full else 'dark'}", "middle"
                )
                if step < 6 and i == sent[r]:
                    out += rect(x + i * 41, y + 12, 39, 28, "mark")
        held = [
            [
                held[(r - 1) % 4][i] | (held[r][i] if step < 3 else set())
                if i == sent[(r - 1) % 4]
                else held[r][i]
                for i in range(4)
            ]
            for r in range(4)
        ]
        y += 56
    return document(WIDTH, y + 4, out, "an all-reduce as a ring of four ranks")


# ---------------------------------------------------------------- the gradient norm
def norm() -> str:
    """The number of ranks holding each part of a gradient: the part's squares are divided by this
    number."""
    stages, layout = built(config(dp_shard=2, tp=2))
    parameters = shown_parameters(stages)
    out = ""
    y = 44
    for r in range(4):
        place = place_of(layout, r)
        out += label(LEFT + r * 172, 18, f"rank {r}", "title")
        out += label(
            LEFT + r * 172, 34, f"dp_shard {place['dp_shard']} tp {place['tp']}", "small soft"
        )
    for name in (WQ, "block attn.wo.weight", "block attn_norm.weight"):
        p = parameters[name]
        w, h = svg.box_size(p.shape, 4096, 80)
        n = replicas(p, layout)  # a finished gradient has the parameter's placements
        out += lines(10, y + 14, ["gradient of", name.split()[1].removesuffix(".weight")], "bold")
        for r in range(4):
            x = LEFT + r * 172
            out += svg.tensor(x, y, w, h, p.shape, held_part(p, place_of(layout, r)))
            out += lines(
                x + max(w, 20) + 8,
                y + 34,
                [f"squares x 1/{n}", f"held by {n} rank{'s' * (n > 1)}"],
                "small",
            )
        y += h + 22
    out += label(
        10,
        y + 8,
        "One all-reduce adds up the weighted squares of all ranks: each number of a gradient "
        "counts once.",
    )
    return document(WIDTH, y + 24, out, "how the squares of gradients are counted")


PICTURES = dict(
    collectives=collectives,
    mesh=mesh,
    tokens=tokens,
    fsdp=fsdp,
    hsdp=hsdp,
    tp=tp,
    cp=cp,
    pp=pp,
    ep=ep,
    norm=norm,
    interleaved=lambda: schedule("Interleaved1F1B"),
    zbv=lambda: schedule("ZBVZeroBubble"),
    dualpipev=lambda: schedule("DualPipeV"),
    gpipe=gpipe,
    ring=ring,
    overlap=overlap,
    memory=memory,
)

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for each in sys.argv[1:] or PICTURES:
        (HERE / f"{each}.svg").write_text(PICTURES[each]())
        print(HERE / f"{each}.svg")
