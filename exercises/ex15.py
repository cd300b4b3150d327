"""The check of exercise 15: parts out of pieces in several layouts, files read and memory used,
then two real layouts."""

import itertools

import hand15
import layouts
import torch
from feedback import Traffic, Wrong, alone, on_ranks
from torch.utils._pytree import tree_leaves

from distributed.layout import local_slice, local_tensor


def grid(shape, *cuts) -> list[tuple[tuple, tuple]]:
    """(offset, shape) of each piece of a tensor. cuts: number of parts along each dimension."""
    ranges = []
    for n, k in zip(shape, cuts):
        step = -(-n // k)
        ranges.append([(i * step, min(step, n - i * step)) for i in range(k) if i * step < n])
    return [tuple(zip(*place)) for place in itertools.product(*ranges)]


ROWS = grid((8, 6), 4, 1)
# the case in words, shape of the whole, saved pieces in the order of the ranks, parts to load
CASES = [
    ("FSDP on 4 ranks, loaded on 2", (8, 6), ROWS, grid((8, 6), 2, 1)),
    (
        "FSDP on 2 ranks, loaded on 3 (3, 3 and 2 rows)",
        (8, 6),
        grid((8, 6), 2, 1),
        grid((8, 6), 3, 1),
    ),
    (
        "fsdp 2 x tp 2, a matrix that tp cuts into columns, loaded by FSDP on 3",
        (8, 6),
        grid((8, 6), 2, 2),
        grid((8, 6), 3, 1),
    ),
    (
        "fsdp 2 x tp 2, a matrix that tp cuts into rows (so rank 1 has rows 4 and 5), loaded on 2",
        (8, 6),
        [ROWS[i] for i in (0, 2, 1, 3)],
        grid((8, 6), 2, 1),
    ),
    ("tp 3 (columns), loaded by FSDP on 2", (8, 6), grid((8, 6), 1, 3), grid((8, 6), 2, 1)),
    (
        "two copies of FSDP on 2: each piece was saved twice",
        (8, 6),
        grid((8, 6), 2, 1) * 2,
        grid((8, 6), 4, 1),
    ),
    ("a vector", (7,), grid((7,), 3), grid((7,), 2)),
    (
        "a stack of experts, ep 2 x fsdp 2, loaded by ep 4",
        (4, 6, 2),
        grid((4, 6, 2), 2, 2, 1),
        grid((4, 6, 2), 4, 1, 1),
    ),
]


def cut(x, place):
    offset, shape = place
    return x[tuple(slice(o, o + n) for o, n in zip(offset, shape))].clone()


def overlaps(a, b) -> bool:
    return all(max(o, p) < min(o + n, p + m) for o, n, p, m in zip(*a, *b))


def why(got, want, whole, files, pieces) -> str:
    if got.shape != want.shape:
        if got.numel() == whole.numel():
            return f"it has the shape of the whole, {tuple(got.shape)}, and the part is {tuple(want.shape)}"
        return f"its shape is {tuple(got.shape)}, and should be {tuple(want.shape)}"
    if (got == 2 * want).any():
        return "some numbers are twice what they should be: where pieces overlap, they are equal, and nothing is to be added up"
    at = (got != want).nonzero()[0].tolist()
    place = (whole == got[tuple(at)]).nonzero()
    right = (whole == want[tuple(at)]).nonzero()[0].tolist()
    wrong = (
        f"is {place[0].tolist()}"
        if len(place)
        else "is in no piece: it was never written, or computed"
    )
    return (
        f"what stands at {at} of the part {wrong} of the whole, and should be {right}. Only a "
        "piece's offset says where "
        "it belongs, not its place in the list"
    )


def loaded(pieces, files: dict, part) -> tuple:
    """(load_part() on this process or the ValueError's text, files read, numbers of the largest
    floating tensor made)."""
    reads = []

    def read(file):
        reads.append(file)
        return files[file].clone()

    with Floats() as floats:
        try:
            got = hand15.load_part(pieces, read, *part)
        except ValueError as e:
            got = f"ValueError: {e}"
    return got.detach().clone() if isinstance(got, torch.Tensor) else got, reads, floats.largest


class Floats(Traffic):
    """Counts no tensor of bool or int: an account of what was written may be as large as the part."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.largest
        out = super().__torch_dispatch__(func, types, args, kwargs)
        made = [
            t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
        self.largest = max(
            [before, *(t.untyped_storage().nbytes() // t.element_size() for t in made)]
        )
        return out


def check_case(said, shape, places, parts):
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    pieces = [(f"rank{i}.pt", *place) for i, place in enumerate(places)]
    files = {file: cut(whole, place) for (file, *_), place in zip(pieces, places)}
    for order in (pieces, pieces[::-1]):
        for part in parts:
            here = f"{said}: the part at {part[0]} of shape {part[1]}"
            want = cut(whole, part)
            got, reads, largest = alone(loaded, list(order), files, part)
            if (
                not isinstance(got, torch.Tensor)
                or got.shape != want.shape
                or not torch.equal(got, want)
            ):
                raise Wrong(
                    f"{here}: "
                    + (
                        why(got, want, whole, files, order)
                        if isinstance(got, torch.Tensor)
                        else f"load_part returns {type(got).__name__}, no tensor"
                    )
                )
            if len(set(reads)) < len(reads):
                raise Wrong(f"{here} is right, but a file was read twice: {reads}")
            if idle := [
                file for file, *place in pieces if file in reads and not overlaps(place, part)
            ]:
                raise Wrong(
                    f"{here} is right, but {len(reads)} of {len(pieces)} files were read, and "
                    f"{', '.join(idle)} hold "
                    "nothing of it: look at offset and shape before you read"
                )
            if largest >= whole.numel():
                raise Wrong(
                    f"{here} is right, but a tensor of {largest} elements was made on the way, "
                    "and the whole has "
                    f"{whole.numel()}: copy each overlap directly into the part"
                )


def check_missing():
    whole = torch.arange(48.0).view(8, 6)
    places = grid((8, 6), 2, 2)
    pieces = [(str(i), *place) for i, place in enumerate(places)][:3]  # the piece at (4, 3) is lost
    got, *_ = alone(
        loaded,
        pieces,
        {file: cut(whole, places[int(file)]) for file, *_ in pieces},
        ((2, 0), (4, 6)),
    )
    if not str(got).startswith("ValueError"):
        raise Wrong(
            f"one of four pieces is missing, and load_part returns a tensor {tuple(got.shape)} "
            "all the same: whatever "
            "was in memory there. Keep account of what was written, and raise ValueError if "
            "something was not"
        )


def held(flags: dict) -> dict:
    """fqn -> (offset, shape, this rank's part, shape of the whole tensor)."""
    stages, _ = layouts.build(layouts.config(), flags, 4, 2)
    found = {}
    for fqn, p in stages[0].named_parameters():
        shape, offset = local_slice(p)
        found[fqn] = (offset, shape, local_tensor(p.detach()).clone(), tuple(p.shape))
    return found


def check_layouts():
    """Load the parts of a real model under tp 2 into FSDP on 2 ranks."""
    saved = on_ranks(2, held, dict(tp=2))
    wanted = on_ranks(2, held, {})
    for fqn in wanted[0]:
        pieces = [(str(rank), ranks[fqn][0], ranks[fqn][1]) for rank, ranks in enumerate(saved)]
        for rank, (offset, shape, part, _) in enumerate(parts[fqn] for parts in wanted):
            files = {str(i): ranks[fqn][2] for i, ranks in enumerate(saved)}
            got, *_ = alone(loaded, pieces, files, (offset, shape))
            if not isinstance(got, torch.Tensor) or not torch.equal(got, part):
                raise Wrong(
                    f"a model, saved under tp 2 and loaded by FSDP on 2: {fqn} on rank {rank} is "
                    "not what it was"
                )


def check():
    for case in CASES:
        check_case(*case)
    check_missing()
    check_layouts()
