"""DPO beside TRL: the loss, gradient, margin and accuracy of forks/train_dpo.py against TRL's own
_compute_loss, on one batch.

    pip install trl && python benchmarks/trl_dpo.py
"""

import contextlib
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch

REPO = Path(__file__).parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests"), str(REPO / "tests/forks")]

from policy import samples_of, sharp_model  # noqa: E402
from test_dpo import ours  # noqa: E402

BETA = 0.3  # as in test_dpo.ours


class Fused(torch.nn.Module):
    """Our model with the outputs that TRL asks of a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, labels, **options):
        # (B, T - 1, V), (B, T - 1)
        logits = self.model(input_ids)[:, :-1].float()
        labels = labels[:, 1:]
        logprobs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (
            labels != -100
        )
        nothing = torch.zeros_like(logprobs)  # for numbers of TRL's log only
        return SimpleNamespace(
            log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
        )


def theirs(pairs, policy, reference):
    """(loss, numbers of TRL's log), with gradients in the policy."""
    try:
        import trl.trainer.dpo_trainer as dpo
    except ImportError as error:
        sys.exit(f"{error}; install it: pip install trl")
    dpo.disable_gradient_checkpointing = lambda *args, **options: contextlib.nullcontext()
    rows = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    ids = torch.zeros(len(rows), max(len(s.prompt) + len(s.ids) for s in rows), dtype=torch.long)
    attended = torch.zeros_like(ids)
    completion = torch.zeros_like(ids)
    for row, s in enumerate(rows):
        n = len(s.prompt)
        end = len(s.prompt) + len(s.ids)
        ids[row, :end], attended[row, :end], completion[row, n:end] = (
            torch.tensor(s.prompt + s.ids),
            1,
            1,
        )
    alone = SimpleNamespace(device=ids.device, gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=Fused(policy),
        ref_model=Fused(reference),
        accelerator=alone,
        aux_loss_enabled=False,
        ld_alpha=None,
        beta=BETA,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        label_smoothing=0.0,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = dict(input_ids=ids, attention_mask=attended, completion_mask=completion)
    loss = dpo.DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    loss.backward()
    return loss.item(), {name: values[0] for name, values in trainer._metrics["train"].items()}


def main():
    samples = samples_of(sharp_model(), n_prompts=5, group_size=2)
    pairs = [samples[i : i + 2] for i in range(0, len(samples), 2)]
    policy = sharp_model()
    loss, log = theirs(pairs, policy, sharp_model(seed=1))
    want = {fqn: p.grad for fqn, p in policy.named_parameters()}
    for flags in ({}, dict(pack_tokens=64)):
        found, grads = ours(flags, pairs)
        off = max(((grads[fqn] - want[fqn]).norm() / want[fqn].norm()).item() for fqn in want)
        print(
            f"{flags or 'rows'}: loss {found['loss']:.7f}, TRL {loss:.7f}; gradients differ by "
            f"{off:.1e} at most; margin "
            f"{found['margin']:.6f}, TRL {log['rewards/margins']:.6f}; accuracy "
            f"{found['accuracy']:.2f}, TRL "
            f"{log['rewards/accuracies']:.2f}"
        )


if __name__ == "__main__":
    main()
