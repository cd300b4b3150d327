"""A tp style for a norm over all heads: each rank has some of the heads, and the norm needs the
squares of all."""

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from distributed.layout import AllGather, local_tensor


class NormOverHeads(ParallelStyle):
    """RMSNorm of (B, T, H/tp * K) after a colwise linear, with this rank's H/tp * K numbers of the
    weight.

    A norm of the rank's own heads would train without any error, as another model. So the ranks
    exchange one number per token: the sum of the squares of a rank's heads. The gradient of that
    number comes back from all ranks, because all ranks use the sum. Every rank sees all T tokens,
    so the gradient of a rank's part of the weight is complete.
    """

    def _apply(self, module, mesh):
        module.weight = nn.Parameter(
            distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
        )

        def forward(x):
            squares = x.float().square().sum(-1, keepdim=True)  # (B, T, 1) of this rank's heads
            # of all heads
            squares = AllGather.apply(squares, 2, mesh.get_group()).sum(-1, keepdim=True)
            r = torch.rsqrt(squares / module.weight.shape[0] + module.eps)
            return (x.float() * r * local_tensor(module.weight)).to(x.dtype)

        module.forward = forward
        return module
