"""The check of exercise 16: the four cases of the clip, three losses' denominators, and the trainer
of grpo.py on two ranks."""

import math

import hand16
import policy
import torch
from feedback import Wrong, alone, on_ranks

import grpo
from rl.sample import Sample

LOW = 0.2
HIGH = 0.28
CASES = [  # ratio, advantage, objective, gradient of the objective by lp, the case in words
    (1.0, 1.0, 1.0, 1.0, "the sampler and the model are equal"),
    (1.5, 1.0, 1 + HIGH, 0.0, "a good token that is likely enough already"),
    (0.5, 1.0, 0.5, 0.5, "a good token that became unlikely must come back"),
    (
        1.5,
        -1.0,
        -1.5,
        -1.5,
        "a bad token that became likelier must go down: the min of the two objectives is the "
        "unclipped "
        "one",
    ),
    (0.5, -1.0, LOW - 1, 0.0, "a bad token that is unlikely enough already"),
    (1.1, -2.0, -2.2, -2.2, "nothing is clipped"),
]


def token_losses(lp, old, advantages, mask):
    """(token_losses() on this process, whether it has a gradient, the gradient by lp)."""
    lp = lp.clone().requires_grad_()
    out = hand16.token_losses(lp, old, advantages, mask, LOW, HIGH)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.sum().backward()
    return (
        (out.detach(), out.requires_grad, lp.grad)
        if isinstance(out, torch.Tensor)
        else (out, False, None)
    )


def denominators(divisor: str, samples: list) -> list[float]:
    """loss_denominator() of all samples, and of each by itself."""
    return [
        float(grpo.loss_denominator(divisor, some, 10))
        for some in (samples, *([s] for s in samples))
    ]


def losses(ratios, advantages, mask):
    """(losses, gradient by lp) for ratios (B, T)."""
    old = torch.full_like(ratios, -1.5)
    lp = old + ratios.log()
    out, has_gradient, grad = alone(token_losses, lp, old, advantages, mask)
    if not isinstance(out, torch.Tensor) or out.shape != lp.shape:
        raise Wrong(
            f"token_losses gives {getattr(out, 'shape', out)} for lp of {tuple(lp.shape)}: the "
            "loss of each token, "
            "not yet their sum or mean"
        )
    if not has_gradient:
        raise Wrong(
            "what token_losses gives has no gradient: the ratio must be computed from lp by "
            "autograd, without detach()"
        )
    return out, grad


def check_cases():
    for ratio, advantage, objective, gradient, said in CASES:
        loss, grad = losses(torch.tensor([[ratio]]), torch.tensor([[advantage]]), torch.ones(1, 1))
        case = f"ratio {ratio}, advantage {advantage:+.0f} ({said})"
        clipped = -min(max(ratio, 1 - LOW), 1 + HIGH) * advantage
        if abs(loss.item() + objective) > 1e-5:
            guess = ""
            if abs(loss.item() - objective) < 1e-5:
                guess = ". The sign: a loss is minus the objective"
            elif advantage > 0 and abs(loss.item() - clipped) < 1e-5:
                guess = (
                    ". That is the clipped ratio alone. min(ratio * A, clip(ratio) * A) = "
                    f"min({ratio * advantage:.2f}, "
                    f"{-clipped:.2f})"
                )
            elif abs(loss.item() + max(ratio * advantage, -clipped)) < 1e-5:
                guess = (
                    f". That is the max of the two objectives {ratio * advantage:.2f} and "
                    f"{-clipped:.2f}: for a "
                    "negative A the smaller one has the larger ratio. Multiply by A first, then "
                    "take the min"
                )
            raise Wrong(
                f"{case}: the loss is {loss.item():.3f} and should be {-objective:.3f}{guess}"
            )
        if abs(grad.item() + gradient) > 1e-5:
            raise Wrong(
                f"{case}: the loss is right, and its gradient by lp is {grad.item():.3f} and "
                f"should be {-gradient:.3f}"
            )


def check_rows():
    """Several tokens and samples: every sampled token has a ratio of its own, the others have none."""
    g = torch.Generator().manual_seed(0)
    ratios = 0.5 + torch.rand(3, 5, generator=g)
    A = torch.tensor([[1.0], [-1.0], [0.5]])
    mask = torch.tensor([[1.0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 1, 1, 1, 0]])
    want = -torch.minimum(ratios * A, ratios.clamp(1 - LOW, 1 + HIGH) * A) * mask
    loss, _ = losses(ratios, A, mask)
    if not torch.allclose(loss, want, atol=1e-5):
        b, t = (loss - want).abs().gt(1e-5).nonzero()[0].tolist()
        said = f"sample {b} of 3, token {t} of 5: the loss is {loss[b, t]:.3f} and should be {want[b, t]:.3f}"
        log = (ratios.log() * mask).sum(1) / mask.sum(1)
        together = (
            -torch.minimum(log.exp()[:, None] * A, log.exp()[:, None].clamp(1 - LOW, 1 + HIGH) * A)
            * mask
        )
        share = loss.sum(1) / want.sum(1)
        if mask[b, t] == 0:
            raise Wrong(f"{said}. The model did not sample this token: mask is 0")
        if torch.allclose(share, 1 / mask.sum(1), atol=1e-4):
            raise Wrong(
                f"{said}. Each sample's losses are divided by its own "
                f"{mask.sum(1).int().tolist()} tokens here. The "
                "division comes once, by Z, for all samples of the step: a mean of means is "
                "another number"
            )
        if torch.allclose(loss[0], together[0], atol=1e-4) or loss[0].std() < 1e-6:
            raise Wrong(
                f"{said}. All tokens of a sample have the same loss: yours is a ratio of "
                "sequences or of means, and "
                "each token has its own ratio exp(lp - old)"
            )
        raise Wrong(said)
    lp = torch.tensor([[-1.0, -math.inf, -math.inf]])
    old, mask = torch.tensor([[-1.0, -math.inf, -1.0], [1.0, 0, 0]]).unsqueeze(1)
    out, _, grad = alone(token_losses, lp, old, torch.ones(1, 1), mask)
    if out.isnan().any() or grad.isnan().any():
        what = "loss" if out.isnan().any() else "gradient"
        raise Wrong(
            f"the {what} is nan when a token that was not sampled has log-probability -inf: inf - "
            "inf is nan, and "
            "nan * 0 as well. Choose with torch.where(mask > 0, ..., 0) before you compute"
        )


def check_denominator():
    masks = [[1.0] * 3, [0.0] * 4, [1.0, 0.0, 1.0, 1.0, 1.0]]
    samples = [Sample(mask=mask, ids=[1] * len(mask), prompt=[1], advantage=0.5) for mask in masks]
    said = "3 samples with 3, 0 and 4 trained tokens, max_new_tokens 10"
    for divisor, want in (
        ("samples", 2),
        ("max_new_tokens", 20),
        ("tokens", 7),
    ):
        got, *each = alone(denominators, divisor, samples)
        if abs(got - want) > 1e-6:
            guess = next(
                (
                    text
                    for values, text in (
                        (
                            (3, 30),
                            "a sample without a trained token counts for nothing: it has no loss",
                        ),
                        (
                            (12,),
                            "ids that are not trained (mask 0) have no loss: they must not be "
                            "counted",
                        ),
                        (
                            (3.5, 7 / 3),
                            "a mean cannot be added up over ranks and micro-batches: return the "
                            "sum",
                        ),
                    )
                    if any(abs(got - v) < 1e-6 for v in values)
                ),
                "count again what this loss divides by",
            )
            raise Wrong(
                f"loss_denominator('{divisor}', ...) gives {got:g} for {said}, and should give "
                f"{want}: {guess}"
            )
        parts = sum(each)
        if abs(parts - want) > 1e-6:
            raise Wrong(
                f"loss_denominator('{divisor}', ...) gives {want} for {said}, and {parts:g} when "
                "they are given one by "
                "one and added up, as ranks and micro-batches do: it must be a sum over samples"
            )


def trained(micro: int) -> dict:
    """Gradients of grpo.py's trainer with the student's two functions, on this process. micro:
    local_batch_size."""

    def objective(t, low, high):
        losses = hand16.token_losses(t.lp, t.old, t.advantage[:, :1], t.mask, low, high)
        return -losses, torch.zeros_like(t.mask)

    usual = grpo.LOSSES["dapo"]
    grpo.LOSSES["dapo"] = usual._replace(objective=objective)
    try:
        trainer = policy.trainer_of(loss="dapo", local_batch_size=micro)
        trainer.train_on(samples())
        scale = 1 / trainer.denominator
        return {fqn: g * scale for fqn, g in policy.gradients(trainer).items()}
    finally:
        grpo.LOSSES["dapo"] = usual


def samples():
    # the sampler's weights differ from the trained model's
    found = policy.samples_of(policy.sharp_model(seed=1))
    for i, s in enumerate(found):
        s.mask = [0.0 if i % 3 == 0 and t % 4 == 3 else x for t, x in enumerate(s.mask)]
    return found


def check_trainer():
    """Compare a whole step with plain torch: sample after sample, no micro-batches, no ranks."""
    model = policy.sharp_model()
    low = grpo.LOSSES["dapo"].low
    high = grpo.LOSSES["dapo"].high
    assert low is not None and high is not None  # dapo clips
    total = 0.0
    tokens = 0.0
    for s in samples():
        lp = policy.full_logprobs(model, s)
        mask = torch.tensor(s.mask)
        A = s.advantage
        ratio = (lp - torch.tensor(s.logprobs)).exp()
        total = total - (torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A) * mask).sum()
        tokens += mask.sum()
    (total / tokens).backward()
    for micro in (64, 2):
        for got in on_ranks(2, trained, micro):
            for fqn, p in model.named_parameters():
                if not (got[fqn] - p.grad).norm() < 1e-4 * p.grad.norm():
                    raise Wrong(
                        f"the gradient of {fqn} on 2 data ranks with micro-batches of "
                        f"{min(micro, 6)} samples is "
                        f"{(got[fqn].norm() / p.grad.norm()).item():.3f} times as long as that of "
                        "one process"
                    )


def check():
    check_cases()
    check_rows()
    check_denominator()
    check_trainer()
