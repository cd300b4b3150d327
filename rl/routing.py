"""--routing_replay: the trainer sends each token to the experts that the generator sent it to (arXiv:2510.11370).

B samples, T tokens, L layers with experts, k experts per token

A router takes the k best of its scores. Where two of them are close, another rounding or another version of the weights takes
another expert, which computes something else, and all later tokens see it: generator and trainer then differ by more than the
update between them. With replay the choice is the generator's, for the tokens of the prompt as well, because later ones attend
to them. How much of each expert is still for the trainer's router to say, from scores of its own, so that it gets its gradient.
The reference of --kl_coef chooses for itself: nobody sampled from it.

    with recorded_experts(model):                       # the generator: rollout() returns samples with `experts`
        samples = rollout(model, ...)
    with replayed_experts(model, experts, layout):      # the trainer, until its backward is done
        model(...)

A model needs nothing for this but to let Balance.choose (models/moe.py) choose.
"""
import base64
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from distributed.layout import EXPERTS, AllGather, Layout
from models.moe import Balance
from support.config import flag


@dataclass(kw_only=True)
class RoutingConfig:
    routing_replay: bool = flag(False, EXPERTS)  # train each token with the experts that the generator took for it


def routers(model) -> list[Balance]:
    """What chooses the experts, of each layer that has some."""
    return [module for module in model.modules() if isinstance(module, Balance)]


def id_dtype(routers: list[Balance]) -> torch.dtype:
    return torch.uint8 if routers[0].n_experts <= 256 else torch.int16


@contextmanager
def recorded_experts(model, wanted=True):
    """Inside, rollout() returns samples with their `experts`, if wanted."""
    for router in routers(model):
        router.keeps = wanted
    try:
        yield
    finally:
        for router in routers(model):
            router.keeps, router.taken = False, None


def chosen_experts(routers: list[Balance], tokens: Tensor, mesh=None) -> Tensor:
    """What the last forward took for tokens (B, T) or (B,): (B, T, L, k) or (B, L, k). mesh: of tp, whose ranks choose for T/tp
    of the tokens each (with --etp for all of them)."""
    ids = torch.stack([router.taken for router in routers], 1).to(id_dtype(routers))  # (B * T/tp, L, k)
    if tokens.dim() == 1:
        return ids
    ids = ids.unflatten(0, (len(tokens), -1))
    return AllGather.apply(ids, 1, mesh.get_group()) if ids.shape[1] < tokens.shape[1] else ids


def n_read(sample: dict) -> int:
    """Tokens of a sample that the model has read: all but the last."""
    return len(sample["prompt"]) + len(sample["ids"]) - 1


def read_experts(kept: Tensor, ended: dict[int, dict]):
    """Give the samples that have ended in these rows {row: sample} their experts, out of what was kept (rows, max_len, L, k).
    As base64 of (T, L, k), because a checkpoint keeps samples as JSON."""
    longest = max(map(n_read, ended.values()))
    found = kept[torch.tensor([*ended], device=kept.device), :longest].cpu()  # one read for all
    for ids, sample in zip(found, ended.values()):
        sample["experts"] = base64.b64encode(ids[: n_read(sample)].contiguous().numpy().tobytes()).decode()


def experts_of(sample: dict, model) -> Tensor:
    """(n_read, L, k) int16: the experts of the sample's tokens. Where -1 takes their place, the router chooses."""
    of = routers(model)
    ids = torch.frombuffer(bytearray(base64.b64decode(sample["experts"])), dtype=id_dtype(of))
    return ids.view(n_read(sample), len(of), model.config.top_k).to(torch.int16)


@contextmanager
def replayed_experts(model, experts: Tensor | None, layout: Layout):
    """Inside, the model sends its tokens to these experts (B, T/cp, L, k), also where a backward computes a forward again; or
    with None to those that it chooses."""
    if experts is not None:
        if layout.tp > 1 and layout.cfg.etp == 1:  # a tp rank routes its T/cp/tp tokens; with --etp all of T/cp
            experts = experts.chunk(layout.tp, 1)[layout.coordinate("tp")]
        for router, ids in zip(routers(model), experts.unbind(2), strict=True):
            router.replayed = ids.flatten(0, 1)
    try:
        yield
    finally:
        for router in routers(model):
            router.replayed = None
