"""QK-clip: after each step, scale down the queries and keys of heads whose attention logits have
grown too large (MuonClip of Kimi K2, arXiv:2507.20534, sec. 2.1). For latent attention,
models/deepseek.py; docs/fork_me.md has the lines for a recipe.

A model with a norm of queries and keys (models/qwen3.py) has bounded logits, and needs no clip.
"""

import math
from functools import partial

import torch
import torch.distributed as dist

from distributed.layout import AllGather, all_blocks, local_slice, local_tensor, mtp_depth_of

QUERIES = 1024  # at a time: the scores of one head then take 1024 T numbers, not T * T


class QKClip:
    """Build after the optimizer, and call step() after the optimizer's. In the forwards of a step
    the class notes the largest logit S of each head: scale * q . k over all pairs of tokens of a
    sequence, as in the paper, so also over pairs that the mask hides. A forward without gradients
    (a validation) is not noted. The cost: a product of queries and keys per layer, and under cp an
    all-gather of the keys.
    """

    def __init__(self, stages, layout, tau: float = 100.0):
        self.layout = layout
        self.tau = tau
        self.attns = {i: block.attn for stage in stages for i, block in all_blocks(stage).items()}
        config = stages[0].config
        for i, attn in self.attns.items():
            if not hasattr(attn, "wkv_b"):
                raise ValueError(
                    "QKClip knows latent attention (models/deepseek.py) only, and "
                    f"blocks.{i}.attn is another; "
                    "a norm of queries and keys, as in models/qwen3.py, bounds logits as well"
                )
            attn.register_forward_pre_hook(partial(self.watch, i))
        shape = config.n_layers + mtp_depth_of(config), config.n_heads
        # of this step, of the heads of this rank
        self.logits = torch.full(shape, -math.inf, device=layout.device)

    def watch(self, i, attn, args):
        x, cos, sin, attend, *rest = args

        def noting_attend(q, k, v, scale):
            if torch.is_grad_enabled():
                self.note(i, q.detach(), k.detach(), scale)
            return attend(q, k, v, scale=scale)

        return x, cos, sin, noting_attend, *rest

    def note(self, i, q, k, scale):
        """q and k (B, H/tp, T/cp, K)"""
        if self.layout.cp > 1:
            # (B, H/tp, T, K), in another order, which does not matter
            k = AllGather.apply(k, 2, self.layout.group("cp"))
        # (H/tp,)
        heads = self.logits[i].chunk(self.layout.tp)[
            self.layout.coordinate("tp") if self.layout.tp > 1 else 0
        ]
        for some in q.split(QUERIES, 2):
            torch.maximum(heads, (some @ k.mT).amax((0, 2, 3)).float() * scale, out=heads)

    @torch.no_grad()
    def step(self, grad_norm) -> dict:
        """Scale the heads with S > tau by gamma = tau / S; for the log, return the largest S
        before. In a step that is skipped, change nothing."""
        # each head is on some ranks; each of these has seen other tokens
        if self.layout.world_size > 1:
            dist.all_reduce(self.logits, dist.ReduceOp.MAX)
        gammas = torch.where(
            (self.logits > self.tau) & grad_norm.isfinite(), self.tau / self.logits, 1.0
        )
        for i, attn in self.attns.items():
            N, P, U, _ = attn.dims
            # (H, 1)
            gamma = gammas[i, :, None]
            root = gammas[i, :, None].sqrt()
            wq = attn.wq_b if hasattr(attn, "wq_b") else attn.wq
            # a logit is q_nope . k_nope + q_rope . k_rope; all heads share k_rope, so its factor
            # goes to q_rope
            scale_rows(wq.weight, torch.cat([root.expand(-1, N), gamma.expand(-1, P)], 1).flatten())
            scale_rows(
                attn.wkv_b.weight,
                torch.cat([root.expand(-1, N), torch.ones_like(root).expand(-1, U)], 1).flatten(),
            )
        largest = self.logits.max()
        self.logits.fill_(-math.inf)
        return {"max_logit": largest}


def scale_rows(weight, factors):
    """Multiply the rows of a parameter; each rank its own part."""
    (rows, _), (first, _) = local_slice(weight)
    local = local_tensor(weight)
    local.mul_(factors[first : first + rows, None].to(local.device))
