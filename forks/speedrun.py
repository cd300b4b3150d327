"""Qwen3 for a speedrun: what makes a small model learn from little text in few CPU seconds.
docs/speedrun.md has the gains.

Against models/llama3.py: a norm of each head's queries and keys, which is Qwen3's; an FFN of two
matrices with a squared ReLU, where SwiGLU has three; the head begins at 0, and so do the matrices
that write into the residual stream. The learning rates are in train_speedrun.py, all else is
inherited.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F

from models import qwen3


@dataclass(kw_only=True)
class SpeedrunConfig(qwen3.Qwen3Config):
    dim: int = 128
    n_layers: int = 2
    n_heads: int = 4
    # the slowest pair turns once in 4,000 tokens; sequences are short here
    rope_theta: float = 1000.0
    n_experts: ClassVar[int] = 0  # dense; a ClassVar is no field, so no flag can set it

    @classmethod
    def from_hf(cls, config_json: dict):
        raise ValueError(
            "a Hugging Face folder has another FFN: leave --init_from out, or give a run of "
            "train_speedrun.py"
        )


FLAVORS = {"debug": SpeedrunConfig()}


# differs from qwen3: ReLU squared (arXiv:2109.08668), which needs no third matrix and fewer passes
# over memory
class FeedForward(qwen3.FeedForward):
    """w2(relu(w1 x)^2)."""

    def forward(self, x):
        return self.w2(F.relu(self.w1(x)).square())  # (B, T/cp, F/tp) inside


class Speedrun(qwen3.Qwen3):
    def __init__(self, config: SpeedrunConfig):
        super().__init__(config)
        for block in self.blocks.values():
            block.ffn = FeedForward(config.dim, config.ffn_dim)
            del block.ffn.w3

    def init_constants(self) -> dict[str, float]:
        # each block begins as the identity
        return {"head.weight": 0.0, "blocks.*.wo.weight": 0.0, "blocks.*.w2.weight": 0.0}

    def tp_plan(self) -> dict[str, str]:
        return {
            pattern: style
            for pattern, style in super().tp_plan().items()
            if not pattern.endswith("w3")
        }
