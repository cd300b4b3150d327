"""Tokens that have chosen other experts on a layout than on one process, and by what margin.

A router chooses the k highest scores. If two scores are almost equal, rounding decides between the
two experts. The gradients of the token then differ altogether, although nothing is wrong."""

from collections import defaultdict
from dataclasses import dataclass

import torch

from tools.parity.compare import Step
from tools.parity.where import Piece, compare_rows

# relative to the size of the scores: a larger margin does not come of rounding
MARGIN = 1e-3


@dataclass
class Moved:
    """n of `of` tokens of a layer have chosen other experts. margin: the largest difference between
    the score of an expert chosen on one process and of an expert chosen on the layout, relative to
    the scores."""

    layer: str
    n: int
    of: int
    margin: float

    def sentence(self) -> str:
        return (
            f"{self.n} of {self.of:,} tokens chose other experts in {self.layer}: margin "
            f"{self.margin:.0e}"
        )


def pieces_by_layer(step: Step) -> dict[str, list[Piece]]:
    found = defaultdict(list)
    for about in step.ranks:
        for layer, rows, both in about["choices"]:
            found[layer].append(Piece(about["rank"], rows, None, both))
    return found


def knows_choices(step: Step) -> bool:
    """Whether the choices of the tokens were recorded: not for a router without
    models.moe.Balance, and not inside of compiled blocks."""
    return any(about["choices"] for about in step.ranks)


def moved_tokens(one: Step, layout: Step) -> list[Moved]:
    """The layers in which tokens moved, in the order of execution. one: of a single process."""
    found = []
    theirs = pieces_by_layer(layout)
    degrees = layout.ranks[0]["degrees"]
    for layer, pieces in pieces_by_layer(one).items():
        if layer not in theirs:
            continue
        T = pieces[0].tensor.shape[0] // len(pieces[0].rows)
        compared = compare_rows(pieces, theirs[layer], degrees, T, is_gradient=False)
        if compared is None:
            continue
        n = 0
        of = 0
        margin = 0.0
        for got, want in compared[1]:
            moved, largest = compare_choices(got, want)
            n += moved
            of += want[..., 0].numel()
            margin = max(margin, largest)
        if n:
            # tp or ep ranks may hold copies of the same tokens, which count once
            copies = max(1, of // sum(piece.tensor.shape[0] for piece in pieces))
            found.append(Moved(layer, max(1, n // copies), of // copies, margin))
    return found


def compare_choices(got: torch.Tensor, want: torch.Tensor) -> tuple[int, float]:
    """(tokens with other experts, largest margin) of (rows, T, 2E): scores and choices."""
    scores, chosen = want.chunk(2, -1)
    others = got.chunk(2, -1)[1]
    moved = (chosen != others).any(-1)
    if not moved.any():
        return 0, 0.0
    infinite = torch.full_like(scores, torch.inf)
    lowest = torch.where(chosen > 0, scores, infinite).amin(-1)
    lowest_there = torch.where(others > 0, scores, infinite).amin(-1)
    size = torch.where(chosen > 0, scores.abs(), torch.zeros_like(scores)).amax(-1)
    margins = (lowest - lowest_there).abs() / size.clamp(min=1e-12)
    return int(moved.sum()), margins[moved].max().item()
