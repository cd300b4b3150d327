"""Does the generator sample from the policy that is trained? Its log-probabilities of the sampled
tokens, beside the trainer's of the same tokens.

Another dtype, a stale weight or another template would train on samples of another policy, and the
rewards would only rise more slowly. So every sample that is trained is compared in the forward that
trains it, and a share of the rest in a forward of its own.
"""

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.layout import reshard
from rl.policy import forward
from rl.sample import Sample, chosen_by_model


@dataclass(kw_only=True)
class AgreementConfig:
    # stop if generator and trainer differ by more, as k3 divergence; 0 = never
    abort_k3: float = 0.05
    # share of the samples without a gradient that are compared, too, drawn by chance; at least one
    proof_share: float = 0.1


@dataclass(kw_only=True)
class Agreement:
    """Of trainer and generator, as means over sampled tokens; d = log-probability of the trainer -
    of the generator."""

    logprob_k3: float  # k3 divergence, exp(d) - d - 1, about d^2 / 2
    ratio_outside: float  # share of the tokens with a ratio exp(d) outside 1 +- 0.1
    entropy: float  # of the trainer, in nats
    logprob_max_diff: float  # largest |d|
    tokens: float  # that were compared, or that these stand for


def compare_policies(lp: Tensor, entropy: Tensor, b: dict[str, Tensor]) -> Tensor:
    """Of one forward, as a row (5,) for agreement_of(): sums of k3, of ratios outside 1 +- 0.1, of
    the entropy and of 1, and the largest difference. lp, entropy: the trainer's, (B, T). In fp64,
    because k3 is below fp32's rounding of 1."""
    sampled = b["sampled"]
    d = ((lp - b["mu"]) * sampled).double()
    return torch.stack(
        [
            (d.expm1() - d).sum(),
            (d.expm1().abs() > 0.1).sum().double(),
            (entropy * sampled).sum().double(),
            sampled.sum().double(),
            d.abs().max(),
        ]
    )


def agreement_of(rows: list[Tensor], device: torch.device) -> Agreement:
    """Of the results of compare_policies() on all ranks."""
    # a row of zeros, because a pipeline's first stages compare nothing
    table = torch.stack([torch.zeros(5, dtype=torch.float64, device=device), *rows])
    sums = table[:, :4].sum(0)
    worst = table[:, 4].max()
    dist.all_reduce(sums)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    k3, outside, entropy, tokens = sums.tolist()
    n = max(tokens, 1)
    return Agreement(
        logprob_k3=k3 / n,
        ratio_outside=outside / n,
        entropy=entropy / n,
        logprob_max_diff=worst.item(),
        tokens=tokens,
    )


@torch.no_grad()
def compare_samples(trainer, samples: list[Sample]) -> Agreement:
    """Compare trainer and generator on samples outside of training. With --tis and several updates
    per step the samples also get their log-probabilities: the ratios of all updates are against the
    policy before the first."""
    layout = trainer.layout
    rows = []
    lengths = [len(s.ids) for s in samples]
    # the last number is for prompts and padding
    old = torch.zeros(sum(lengths) + 1, device=layout.device)
    for _, b in trainer.microbatches(samples):
        lp, entropy = forward(trainer.model, b, layout)
        rows.append(compare_policies(lp, entropy, b))
        old[b["at"]] = lp
    reshard(trainer.model)
    if trainer.cfg.tis and trainer.cfg.minibatches > 1:
        if layout.coordinate("tp"):  # all tp ranks have the same numbers
            old.zero_()
        # the rank that trains a sample may not be the rank that scored it; cp ranks share a sample
        dist.all_reduce(old)
        for s, logprobs in zip(samples, old[:-1].split(lengths)):
            s.old = logprobs.tolist()
    return agreement_of(rows, layout.device)


def weighted_mean(values: list[float], weights: list[float]) -> float:
    """0.0 if all weights are 0."""
    total = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return total / max(sum(weights), 1)


def joined(parts: list[Agreement]) -> Agreement:
    """Of all tokens of these parts."""
    tokens = [part.tokens for part in parts]
    return Agreement(
        logprob_k3=weighted_mean([part.logprob_k3 for part in parts], tokens),
        ratio_outside=weighted_mean([part.ratio_outside for part in parts], tokens),
        entropy=weighted_mean([part.entropy for part in parts], tokens),
        logprob_max_diff=max(part.logprob_max_diff for part in parts),
        tokens=sum(tokens),
    )


def check_agreement(found: Agreement, abort_k3: float) -> None:
    """Raises RuntimeError if the generator samples from another policy. abort_k3: 0 = never."""
    if abort_k3 and found.logprob_k3 > abort_k3:
        raise RuntimeError(
            f"logprob_k3 {found.logprob_k3:.3g} is above --abort_k3 {abort_k3}: the generator does "
            "not sample from the policy that is trained; with --engine_adapters, see that the "
            "server has the weights of --init_from"
        )


def n_sampled(samples: list[Sample]) -> float:
    """Number of tokens that the model chose."""
    return sum(sum(chosen_by_model(s)) for s in samples)


def compare_others(
    trainer, samples: list[Sample], trained: list[list[Sample]], proof_share: float, seed: int
) -> tuple[list[Agreement], float]:
    """Before the first update: (agreements of samples that its forwards do not compare, share of
    the sampled tokens that is compared). samples: of the whole step. trained: those with a
    gradient, for each update. The samples without one are drawn by chance, --proof_share of them,
    and stand for all of their kind."""
    numbers = set()
    for part in trained:
        numbers |= {id(s) for s in part}
    rest = [s for s in samples if id(s) not in numbers]
    n_drawn = min(len(rest), max(1, round(len(rest) * proof_share)))
    drawn = random.Random(f"{seed}/{trainer.policy_version}").sample(rest, n_drawn)
    later = sum(trained[1:], [])  # the first update changes the policy
    agreements = []
    if later:
        agreements.append(compare_samples(trainer, later))
    if drawn:
        of_drawn = compare_samples(trainer, drawn)
        of_drawn.tokens *= n_sampled(rest) / n_sampled(drawn)
        agreements.append(of_drawn)
    compared = 1 - (n_sampled(rest) - n_sampled(drawn)) / n_sampled(samples)
    return agreements, compared
