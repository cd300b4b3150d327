"""Muon with Polar Express: the best polynomial for each step of the iteration (arXiv:2505.16932),
in place of Newton-Schulz's same one for all steps. docs/fork_me.md has the lines for a recipe.

The five equal steps of Muon map singular values in [0.01, 1] to 0.68 to 1.13, and smaller ones down
to 0.001 to 0.47 to 1.2. Polar Express is the composition of five polynomials that comes closest to
1 on all of [0.001, 1]: with the margin below, 0.84 to 1.12, at the same price. Each polynomial is
the best one on the interval onto which the polynomials before map.
"""

import torch

from training.muon import Muon

# (a, b, c) of a x + b x^3 + c x^5: the paper's numbers for l = 1e-3, cushion 0.024
SCHEDULE = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
# bf16 may round a singular value to above 1, where the polynomials explode: the paper shrinks x a
# little
SAFETY = 1.01


class PolarExpress(Muon):
    def orthogonalize(self, update, group):
        x = update.to(self.dtype)
        # the products below are then of the shorter side
        x = x.mT if update.shape[-2] > update.shape[-1] else x
        x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) * SAFETY + group["eps"])
        for a, b, c in SCHEDULE:
            gram = x @ x.mT
            x = a / SAFETY * x + (b / SAFETY**3 * gram + c / SAFETY**5 * gram @ gram) @ x
        return x.mT if update.shape[-2] > update.shape[-1] else x
