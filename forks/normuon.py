"""NorMuon: Muon whose rows (neurons) all move about equally far (arXiv:2510.05491, algorithm 1).
docs/fork_me.md has the lines
for a recipe.

Newton-Schulz makes the singular values of an update equal, but not the lengths of its rows, so some
neurons learn faster than others. NorMuon keeps a mean of each row's squares, divides the row by the
root, and gives the matrix back the norm that it had. Here we follow the authors' code; their
algorithm sets the norm to sqrt(out * in). With the norm kept, Muon's learning rates carry over.
"""

import torch

from distributed.layout import local_tensor
from training.muon import Muon

BETA2 = 0.95  # decay of the mean of a row's squares


class NorMuon(Muon):
    """State beside Muon's: row_squares, a number per row in fp32. A matrix has all of its numbers
    on every rank: each rank has exchanged the whole update, and computes the same numbers from the
    same bits. A stack of experts is sharded over whole matrices, and its numbers (E, out) likewise.
    """

    def step_stack(self, p, group):  # every rank makes the state, also a rank without any expert
        if "row_squares" not in self.state[p]:
            self.state[p]["row_squares"] = torch.zeros_like(p.detach()[..., 0], dtype=torch.float32)
        super().step_stack(p, group)

    def rescale(self, p, result, first=0):
        state = self.state[p]
        update = result.float()
        if "row_squares" not in state:  # a matrix; new_zeros of a DTensor is whole on every rank
            state["row_squares"] = p.detach().new_zeros(len(p), dtype=torch.float32)
        squares = local_tensor(state["row_squares"])[first : first + len(result)]
        # 0 in a step that is skipped
        moves = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        squares.lerp_(update.square().mean(-1), (1 - BETA2) * moves)
        scaled = update / (squares.sqrt() + 1e-10)[..., None]
        before = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True)
        after = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
        return scaled * (before / (after + 1e-10))
