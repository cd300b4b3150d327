"""Llama 3 in the maximal update parametrization, muP (arXiv:2203.03466, tables 3 and 8): what is
right for a small width is right for a large one, the learning rate above all.

m = dim / base_dim. Against models/llama3.py, which is the case m = 1:

    weights                       initial deviation   learning rate (AdamW)   multiplier
    embedding, norms              as there            lr                      1
    matrices of the blocks        / sqrt(m)           lr / m                  1
    head                          0                   lr                      1 / m

A model grows by more heads of the same size, so the attention's 1 / sqrt(head_dim) stays; the
matrices between heads, FFN and residual stream then all have a fan-in that grows with m. The
learning rates are in train_llama3_mup.py, all else is here.
"""

import math
from dataclasses import asdict, dataclass

from models import llama3
from models.layers import RMSNorm
from models.llama3 import Llama3, Llama3Config


@dataclass(kw_only=True)
class MupLlama3Config(Llama3Config):
    # the width at which nothing changes: that of the model whose learning rate is to be carried
    # over
    base_dim: int = 64

    def __post_init__(self):
        super().__post_init__()
        if self.base_dim < 1 or self.tie_embeddings:
            raise ValueError(
                f"base_dim {self.base_dim}, tie_embeddings {self.tie_embeddings}: muP needs a "
                "base_dim of 1 or "
                "more, and tie_embeddings=False, because an embedding and a head begin differently"
            )

    @property
    def width(self) -> float:
        """m: how many times as wide as the base."""
        return self.dim / self.base_dim

    @classmethod
    def from_hf(cls, config_json: dict):
        raise ValueError(
            "muP's multiplier of the head is in no Hugging Face model: this fork reads and writes "
            "only its own "
            "checkpoints; leave --init_from out, or give a run of train_llama3_mup.py"
        )

    def to_hf(self) -> dict:
        raise ValueError(
            "muP's multiplier of the head is in no Hugging Face model; leave --export_hf out"
        )


FLAVORS = {
    name: MupLlama3Config(**asdict(c) | {"tie_embeddings": False})
    for name, c in llama3.FLAVORS.items()
}


class OutputNorm(RMSNorm):
    """The last norm, with the head's multiplier after it, so that no code that calls the head
    needs to know of it."""

    def __init__(self, config):
        super().__init__(config.dim, eps=config.norm_eps)
        self.multiplier = 1 / config.width

    def forward(self, x):
        return super().forward(x) * self.multiplier


class MupLlama3(Llama3):
    def __init__(self, config: MupLlama3Config):
        super().__init__(config)
        self.norm = OutputNorm(config)

    def init_std(self, fqn: str) -> float | None:
        std = super().init_std(fqn)
        return std / math.sqrt(self.config.width) if fqn.startswith("blocks.") and std else std

    def init_constants(self) -> dict[str, float]:
        # equal logits at every width; after the first step the blocks have gradients
        return {"head.weight": 0.0}
