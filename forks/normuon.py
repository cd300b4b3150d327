"""NorMuon: Muon whose rows (neurons) all move about equally far (arXiv:2510.05491, algorithm 1). docs/fork_me.md has the lines
for a recipe.

Newton-Schulz makes the singular values of an update equal, but not the lengths of its rows, so some neurons learn faster than
others. NorMuon keeps a mean of each row's squares, divides the row by the root, and gives the matrix back the norm that it had.
Here we follow the authors' code; their algorithm sets the norm to sqrt(out * in). With the norm kept, Muon's learning rates
carry over.
"""
import torch

from distributed.layout import local_tensor
from support.muon import Muon

BETA2 = 0.95  # decay of the mean of a row's squares


class NorMuon(Muon):
    """State beside Muon's: row_squares, a number per row in fp32. A matrix has all of its numbers on every rank: each rank has
    exchanged the whole update, and computes the same numbers from the same bits. A stack of experts is sharded over whole
    matrices, and its numbers (E, out) likewise.
    """

    def rescale(self, p, result, first=0):
        state, update = self.state[p], result.float()
        if "row_squares" not in state:  # new_zeros of a DTensor is whole on every rank, zeros_like is sharded as before
            rows = p.detach().float()[..., 0]
            state["row_squares"] = torch.zeros_like(rows) if p.dim() == 3 else p.detach().new_zeros(len(p), dtype=rows.dtype)
        squares = local_tensor(state["row_squares"])[first : first + len(result)]
        moves = 1.0 if self.found_inf is None else 1.0 - self.found_inf  # 0 in a step that is skipped
        squares.lerp_(update.square().mean(-1), (1 - BETA2) * moves)
        scaled = update / (squares.sqrt() + 1e-10)[..., None]
        before, after = (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (update, scaled))
        return scaled * (before / (after + 1e-10))
