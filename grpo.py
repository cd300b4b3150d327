"""Reinforcement learning with verifiable rewards: GRPO and its descendants, trainer and generator
in one program.

    python grpo.py                                                                           # reverses digits, on a CPU
    python grpo.py --env calculator --max_new_tokens 40 --seq_len 64 --out runs/calculator   # several turns, with a tool
    torchrun --nproc_per_node 4 grpo.py --dp_shard 2 --tp 2 --out runs/grpo-4                # the same samples, losses, rewards
    torchrun --nproc_per_node 4 grpo.py --gen_ranks 2 --async_steps 1 --out runs/grpo-async  # two ranks sample while two train
    python grpo.py --env dataset --env_data questions.jsonl --eval_data test.jsonl --out runs/dataset   # problems in files
    python grpo.py --init_from HUGGING_FACE_FOLDER --env sum_digits --lr 1e-6 --max_new_tokens 64 --seq_len 256 --out runs/hf

One step of the algorithm, numbered as in the code below:

    (1) prompts     x, a pure function of (seed, cursor); an eighth of all prompts is held out for evaluation
    (2) rollouts    G samples y_i ~ mu(.|x) of each prompt, mu = the current policy at the sampling temperature
    (3) rewards     R_i = reward(x, y_i)
    (4) advantages  A_i = R_i - mean_G(R), divided by std_G(R) with --std_norm; groups of equal rewards carry no gradient
    (5) loss        - sum_it min(r_it A_i, clip(r_it) A_i) / Z with r_it = pi(y_it) / mu(y_it), or as --loss says
    (6) optimizer   one division by Z, the count over all ranks and micro-batches; clip the norm; AdamW
    (7) version     the policy is one version on, and the next rollouts use it

The same command again continues the run. A run writes runs/grpo/{config.json, metrics.jsonl,
samples.jsonl, checkpoints/}, and with --kl_coef the initial policy, reference/ (not with
--lora_rank: the model without adapters is the initial policy). Own tasks: --env dataset, see
rl/datasets.py, or --env my_env.py, see rl/environments.py. Read next: rl/policy.py (the model),
rl/rollouts.py, rl/decoding.py, models/loss.py. Refusals are in rl/refusals.py, output is in
rl/messages.py.
"""

import flags.interrupt  # noqa: F401  Ctrl-C ends in one line, from here on

import hashlib
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import CheckpointConfig, Checkpoints, loaded_later
from corpus.tokenizer import ChatConfig
from distributed.checks import check_replicas
from distributed.experts import balance_experts
from distributed.launch import (
    UNFINISHED,
    LaunchConfig,
    StopSignal,
    connect,
    disconnect,
    set_timeouts,
)
from distributed.layout import ExpertConfig, ParallelConfig, local_tensor, n_experts_of, reshard
from distributed.pipeline import embeds_at_both_ends
from distributed.refusals import check_layout
from flags.config import Need, flag
from flags.files import step_folders
from lora.lora import LoraConfig, base_model, lora_counts
from parallel import clip_grad_norm, make_mesh, next_backward, reduce_loss
from rl import agreement, engines, messages, packing, refusals, rollouts
from rl.datasets import DatasetConfig, Text, open_task
from rl.engines import EngineConfig, find_server
from rl.environments import alphabet_of, held_out_tasks, leave_out_long
from rl.evaluation import EvaluationConfig, evaluate_policy
from rl.policy import (
    PolicyConfig,
    backward_of_pipeline,
    build_policy,
    forward,
    keep_reference,
    model_of,
)
from rl.rewards import RewardConfig
from rl.sample import Sample, n_read
from rl.warm_up import WarmUpConfig, warm_up
from sft.base import load_base
from storage.adapters import is_frozen
from storage.prompt import open_chat
from storage.resume import lock_run, wait_for_run
from tools.run import run
from training.metrics import Metrics, MetricsConfig
from training.optim import set_lr


# ---------------------------------------------------------------- (5) the losses
class Tokens(NamedTuple):
    """What a loss knows of the tokens of a forward, (B, T/cp) each."""

    lp: Tensor  # log pi(y_t): of the policy that is trained
    old: Tensor  # log-probability in the denominator of the ratio: mu's, unless --tis
    advantage: Tensor
    mask: Tensor  # 1.0 for each trained token, EOS included
    n: Tensor  # trained tokens of the token's whole sample
    # sequence_sum(x): each token gets the sum of x over the token's whole sample. x.sum(1) would be
    # wrong: a row may hold several samples (--pack_tokens), a rank only a part of one (--cp).
    # x without a gradient: the sum over ranks would not carry it
    sequence_sum: Callable[[Tensor], Tensor]


def clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(objective, whether the clip took its gradient) of each token: PPO, 1707.06347 (7)."""
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    is_clipped = torch.where(advantage > 0, ratio > 1 + high, ratio < 1 - low)
    return objective, is_clipped & (advantage != 0)


def token_objective(t: Tokens, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Each token has a ratio of its own, r_t = pi(y_t) / mu(y_t): GRPO, 2402.03300 (3)."""
    ratio = ((t.lp - t.old) * t.mask).exp()
    return clip(ratio, t.advantage, low, high)


def sequence_objective(t: Tokens, low: float, high: float) -> tuple[Tensor, Tensor]:
    """One ratio per sequence, the geometric mean of its tokens' ratios: GSPO, 2507.18071 (5-7).
    lp - lp.detach() is 0 and gives each token a gradient (GSPO-token)."""
    log_ratio = (t.lp - t.old) * t.mask
    of_sequence = t.sequence_sum(log_ratio.detach()) / t.n
    ratio = (of_sequence + (t.lp - t.lp.detach())).exp()
    return clip(ratio, t.advantage, low, high)


def weight_objective(t: Tokens, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The ratio is a weight, which is clipped, and no token loses its gradient: CISPO, 2506.13585
    (4-5)."""
    ratio = ((t.lp - t.old) * t.mask).exp()
    weight = ratio.detach().clamp(1 - low, 1 + high)
    return weight * t.advantage * t.lp, (ratio > 1 + high) & (t.advantage != 0)


def log_likelihood(t: Tokens, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Supervised: the answer as it stands."""
    return t.lp, torch.zeros_like(t.mask)


class Loss(NamedTuple):
    """A loss is minus the sum of its objective over all trained tokens, divided by Z."""

    objective: Callable[[Tokens, float, float], tuple[Tensor, Tensor]]
    # --clip_low and --clip_high as published; None: the loss clips nothing
    low: float | None
    high: float | None
    # what Z counts, see loss_denominator. Divided by samples, a loss is a mean over each sample's
    # tokens, then over samples; else every token counts the same.
    divisor: Literal["samples", "max_new_tokens", "tokens"]


LOSSES = {  # --loss. Another loss is another function like those above, and a line here
    "grpo": Loss(token_objective, 0.2, 0.2, "samples"),  # 2402.03300 (3)
    # 2503.20783: divided by a constant, so that a wrong answer does not gain by being long
    "dr_grpo": Loss(token_objective, 0.2, 0.2, "max_new_tokens"),
    "dapo": Loss(token_objective, 0.2, 0.28, "tokens"),  # 2503.14476 (8)
    "gspo": Loss(sequence_objective, 3e-4, 4e-4, "samples"),
    "cispo": Loss(weight_objective, 1.0, 4.0, "tokens"),
}
SUPERVISED = Loss(log_likelihood, None, None, "tokens")  # of the warm-up


def loss_denominator(divisor: str, samples: list[Sample], max_new_tokens: int) -> float:
    """Z of some samples, the divisor of the summed loss. Ranks, micro-batches and calls add their
    parts of Z. A sample without a trained token (--mask_truncated) counts 0 in every loss."""
    trained = [s for s in samples if any(s.mask)]
    if divisor == "samples":
        return len(trained)
    if divisor == "max_new_tokens":
        return len(trained) * max_new_tokens
    return sum(sum(s.mask) for s in trained)


def tis_weight(t: Tokens, mu: Tensor, cap: float, mode: str) -> Tensor:
    """--tis: truncated importance sampling, pi_old / mu of each token or of its whole sample, at
    most `cap`; masked: 0 above the cap. Without a gradient."""
    log_weight = ((t.old - mu) * t.mask).detach()
    if mode.startswith("sequence"):
        log_weight = t.sequence_sum(log_weight)
    weight = log_weight.exp()
    above = cap
    if mode.endswith("mask"):
        above = 0.0
    return torch.where(weight > cap, above, weight)


# ---------------------------------------------------------------- flags
# Needs of flags: see flags/config.py
TIS = Need("without --tis", lambda c: c.tis)
CLIP = Need("with a --loss that clips nothing", lambda c: LOSSES[c.loss].low is not None)
# as TRL names them
TisMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
ROWS = Need("with --pack_tokens: a forward is one packed sequence", lambda c: not c.pack_tokens)


@dataclass(kw_only=True)
class Config(
    ParallelConfig,
    ExpertConfig,
    LaunchConfig,
    LoraConfig,
    CheckpointConfig,
    MetricsConfig,
    DatasetConfig,
    RewardConfig,
    PolicyConfig,
    EngineConfig,
    EvaluationConfig,
    agreement.AgreementConfig,
    WarmUpConfig,
    ChatConfig,
):
    # not in --help: rl/refusals.py says why
    REFUSED = ("loss_parallel", "load_only", "exclude_from_loading")
    # folder for all files of the run; the same folder again continues the run
    out: str = "runs/grpo"
    # the task: reverse, sum_digits, calculator, dataset, gsm8k, or a file of your own
    env: str = "reverse"
    steps: int = 300  # optimizer steps
    prompts_per_step: int = 32  # prompts per step, over all ranks
    group_size: int = 8  # G, samples per prompt
    minibatches: int = 1  # optimizer updates per step, on equal parts of its groups
    max_new_tokens: int = 16  # longer samples are truncated
    seq_len: int = 32  # prompt and sample together, in tokens, at most
    temperature: float = 1.0  # of sampling, and of the log-probabilities that are trained
    # see LOSSES in grpo.py
    loss: Literal[tuple(LOSSES)] = "dr_grpo"
    std_norm: bool = False  # divide advantages by the standard deviation of the group's rewards
    # clip ratios below 1 - clip_low; none = as published for the loss
    clip_low: float | None = flag(None, CLIP)
    # clip ratios above 1 + clip_high; none = as published for the loss
    clip_high: float | None = flag(None, CLIP)
    # truncated importance sampling: cap of pi_old / mu, e.g. 2; 0 = off, the ratio is against mu
    # itself
    tis: float = 0.0
    # pi_old / mu of a token, or of a sequence; mask: above the cap it is 0
    tis_mode: TisMode = flag("token_truncate", TIS)
    kl_coef: float = 0.0  # weight of the KL divergence (k3) from the initial policy
    # rounds of further prompts to replace groups of equal rewards (DAPO uses it); 0 = off
    dynamic_sampling: int = 0
    # reward falls by up to 1 over this many tokens before max_new_tokens (DAPO eq. 13); 0 = off
    overlong_tokens: int = 0
    mask_truncated: bool = False  # leave truncated samples out of the loss and of its denominator
    # batches sampled ahead, so that rollouts and training overlap; samples are so many updates old
    async_steps: int = 0
    # for comparison: no updates, or rewards by a coin
    control: Literal["none", "frozen", "random"] = "none"
    # peak learning rate, reached after warmup_steps; none = 5e-4; with --init_from 1e-6, LoRA 1e-5
    lr: float | None = None
    min_lr_ratio: float = 0.1  # the learning rate falls linearly to this share of the peak
    warmup_steps: int = 30  # steps of linear warmup
    beta1: float = 0.9  # AdamW: decay of the gradient's mean
    beta2: float = 0.95  # AdamW: decay of the squared gradient's mean
    eps: float = 1e-8  # AdamW: added to the root of the squared gradient's mean
    weight_decay: float = 0.0  # AdamW: weight decay, decoupled from the gradient
    max_norm: float = 1.0  # gradients are scaled down to this norm; 0 = never
    local_batch_size: int = flag(64, ROWS)  # sequences per forward of a data rank
    # pack samples into sequences of up to this many tokens, one per forward; 0 = a row for each
    # sample
    pack_tokens: int = 0
    seed: int = 0  # of the initial weights, prompts and samples
    # steps between printed lines and between samples in samples.jsonl; metrics.jsonl has every step
    log_every: int = 10
    log_samples: int = 4  # samples per logged step in samples.jsonl; 0 = none
    checkpoint_every: int = 100  # steps between checkpoints (and one at the end); 0 = never
    # prompts in the chat template of --init_from, if any; --no-chat: bare, for base models
    chat: bool = True

    def __post_init__(self):
        MetricsConfig.__post_init__(self)
        # the new model is small; its learning rate would destroy a trained model within a few steps
        if self.lr is None and not self.init_from:
            self.lr = 5e-4
        elif self.lr is None and self.lora_rank:
            self.lr = 1e-5
        elif self.lr is None:
            self.lr = 1e-6
        refusals.check_flags(self)


# ---------------------------------------------------------------- (4) the advantages
def advantages(rewards: list[float], std_norm: bool) -> list[float]:
    """Of one group: reward minus the group's mean; exactly 0 for equal rewards, also in a group of
    one."""
    mean = sum(rewards) / len(rewards)
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    scale = 1.0
    if std_norm:
        variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
        scale = math.sqrt(variance) + 1e-6
    return [(reward - mean) / scale for reward in rewards]


def overlong_penalty(n: int, longest: int, buffer: int) -> float:
    """DAPO (13): 0 up to longest - buffer tokens, then falling to -1 at longest."""
    if buffer == 0:
        return 0.0
    return -min(max(n - (longest - buffer), 0) / buffer, 1.0)


def set_advantages(group: list[Sample], cfg: Config) -> None:
    """For the samples of one prompt."""
    scores = []
    for s in group:
        penalty = overlong_penalty(len(s.ids), cfg.max_new_tokens, cfg.overlong_tokens)
        scores.append(s.reward + penalty)
    for s, advantage in zip(group, advantages(scores, cfg.std_norm)):
        s.advantage = advantage
        if cfg.mask_truncated and s.truncated:
            s.advantage = 0.0
            s.sampled = s.mask
            s.mask = [0.0] * len(s.ids)


# ---------------------------------------------------------------- (5), (6) one update
@dataclass(kw_only=True)
class Trained(agreement.Agreement):
    """Of the samples of one call of train_on(); means over their tokens, and the agreement of
    trainer and generator."""

    loss: float  # the sum, divided by Z
    loss_max: float  # the largest loss of a rank
    denominator: float  # Z
    clip_share: float  # of tokens without a gradient due to the clip
    kl: float  # divergence from the reference
    fed: float  # tokens of all forwards, padding included
    padding: float  # share of these without a sample


class Trainer:
    """The training half, in few calls, for any loop with rewarded samples. Every rank gets the same
    list of samples and takes its share."""

    rewarded = True  # False: the reference teaches, whatever the rewards (forks/train_distill.py)

    def __init__(self, cfg: Config, layout, model, reference=None):
        self.cfg = cfg
        self.layout = layout
        self.model = model
        self.reference = reference
        self.policy_version = 0
        self.denominator = 0.0  # Z of the calls of train_on() since the last update
        # whether a loss needs the reference's log-probabilities; the divergence from the reference
        # then gives a gradient to every sample, also to one with advantage 0
        self.compares = cfg.kl_coef > 0 or not self.rewarded
        self.new_optimizer()

    def new_optimizer(self):
        cfg = self.cfg
        trained = [p for p in self.model.parameters() if p.requires_grad]
        # a group, because torch refuses an empty list: under LoRA a pipeline's last stage may train
        # nothing
        groups = [{"params": trained}]
        self.optimizer = torch.optim.AdamW(
            groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, cfg.weight_decay, fused=True
        )

    def microbatches(self, samples: list[Sample]):
        """This data rank's share: (samples, tensors) of each forward, as rl/packing.py plans them."""
        return packing.forwards_of(samples, self.cfg, self.layout)

    @torch.no_grad()
    def reference_logprobs(self, b: dict[str, Tensor]) -> Tensor:
        """Log-probabilities of the reference. Of --kl_coef: the initial policy; with LoRA the model
        without adapters, so no second copy is needed."""
        if self.reference is not None:
            return forward(self.reference, b, self.layout)[0]
        with base_model(self.model):
            return forward(self.model, b, self.layout)[0]

    def divergence(self, d: Tensor) -> Tensor:
        """KL divergence of the policy from the reference, per token, estimated from d =
        log(reference / policy): k3, 2402.03300 (4)."""
        return d.exp() - d - 1

    def loss_of_tokens(
        self, loss: Loss, b: dict[str, Tensor], ref: Tensor | None, lp: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, 1.0 where the clip took the gradient, divergence from the reference) of each
        token, (B, T/cp). Sum the loss, then divide by Z.

        lp, entropy: of the policy, with a gradient; no loss here uses the entropy. ref:
        log-probabilities of the reference."""
        cfg = self.cfg
        mask = b["mask"]
        mu = b["mu"]
        old = b["old"]
        if cfg.tis and cfg.minibatches == 1:
            old = lp.detach()  # the policy of the only update
        sequence_sum = partial(packing.sum_of_samples, segment=b["segment"], layout=self.layout)
        tokens = Tokens(lp, old, b["advantage"], mask, b["n"], sequence_sum)
        low = loss.low if cfg.clip_low is None else cfg.clip_low
        high = loss.high if cfg.clip_high is None else cfg.clip_high
        objective, clipped = loss.objective(tokens, low or 0.0, high or 0.0)
        if cfg.tis and loss is not SUPERVISED:
            objective = objective * tis_weight(tokens, mu, cfg.tis, cfg.tis_mode)
        n = 1
        if loss.divisor == "samples":
            n = b["n"]
        per_token = -objective * (mask / n)
        kl = torch.zeros_like(lp)
        if ref is not None:  # with the weights of the loss
            kl = self.divergence(ref - lp) * mask
            per_token = per_token + cfg.kl_coef * kl / n
        return per_token, clipped * mask, kl

    def train_on(
        self,
        samples: list[Sample],
        loss: Loss | None = None,
        counted: list[Sample] | None = None,
    ) -> Trained:
        """(5) Add the gradient of the summed loss. N calls are one call on the union: optim_step()
        divides, once.

        counted: all samples of the denominator, if `samples` leaves out some without a gradient."""
        cfg = self.cfg
        layout = self.layout
        loss = loss or LOSSES[cfg.loss]
        share = []  # this data rank's samples
        batches = []
        for some, b in self.microbatches(samples):
            share += some
            batches.append(b)
        refs = [None] * len(batches)
        if self.compares and loss is not SUPERVISED:
            # before the loss, because with LoRA the reference is the same model
            refs = [self.reference_logprobs(b) for b in batches]
        reshard(self.reference or self.model)  # before the backward takes its memory
        # four sums over all forwards: loss, number of clipped tokens, number of all tokens (padding
        # included), divergence
        sums = torch.zeros(4, dtype=torch.float64, device=layout.device)
        rows = []

        def summed_loss(i: int, lp: Tensor, entropy: Tensor) -> Tensor:
            assert lp.dtype == torch.float32, lp.dtype
            per_token, clipped, kl = self.loss_of_tokens(loss, batches[i], refs[i], lp, entropy)
            for k, x in enumerate((per_token, clipped, torch.ones_like(clipped), kl)):
                sums[k] += x.detach().sum().double()
            rows.append(agreement.compare_policies(lp.detach(), entropy.detach(), batches[i]))
            return per_token.sum()

        if layout.pp > 1:
            backward_of_pipeline(self.model, batches, summed_loss, layout)
        else:
            for i, b in enumerate(batches):
                next_backward(self.model, i == len(batches) - 1, layout)
                summed_loss(i, *forward(self.model, b, layout)).backward()
        z = loss_denominator(loss.divisor, counted or samples, cfg.max_new_tokens)
        self.denominator += z
        z_of_rank = loss_denominator(loss.divisor, share, cfg.max_new_tokens)
        both = torch.stack([sums[0], sums[0] / max(z_of_rank, 1)])
        total, loss_max = reduce_loss(both / layout.tp, layout)
        dist.all_reduce(sums)
        compared = agreement.agreement_of(rows, layout.device)
        fed = sums[2].item() / layout.tp
        return Trained(
            loss=total.item() / max(z, 1),
            loss_max=loss_max.item(),
            denominator=z,
            clip_share=sums[1].item() / max(compared.tokens, 1),
            kl=sums[3].item() / max(compared.tokens, 1),
            fed=fed,
            padding=1 - sum(map(n_read, samples)) / max(fed, 1),
            **vars(compared),
        )

    def train_supervised(self, samples: list[Sample]) -> float:
        """Add the gradient of the supervised loss. Returns the loss, per token."""
        return self.train_on(samples, SUPERVISED).loss

    def optim_step(self, lr: float, update=True) -> float:
        """(6) One update with the gradients of all calls since the last update, then zero_grad; (7)
        the next version. Returns the norm of the gradient before it is clipped."""
        if self.layout.pp > 1 and embeds_at_both_ends(self.model.config):
            from distributed.schedule import sum_tied_gradients

            sum_tied_gradients([self.model], self.layout)
        grads = [local_tensor(p.grad) for p in self.model.parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, 1 / max(self.denominator, 1))
        norm = clip_grad_norm([self.model], self.cfg.max_norm, self.layout)
        if not norm.isfinite():
            raise RuntimeError(
                f"gradient norm {norm.item()} at policy version {self.policy_version}; weights "
                "unchanged"
            )
        if update:
            set_lr([self.optimizer], lr)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.denominator = 0.0
        self.policy_version += 1
        return norm.item()


@dataclass(kw_only=True)
class StepNumbers(agreement.Agreement):
    """Of the updates of one step, for metrics.jsonl: see docs/grpo.md."""

    loss: float
    loss_max: float
    grad_norm: float
    clip_share: float
    kl: float | None  # None: without a reference
    padding: float
    proven: float  # share of the sampled tokens that trainer and generator were compared on
    policy_version: int

    def for_metrics(self) -> dict:
        return {name: x for name, x in vars(self).items() if name != "tokens" and x is not None}


def samples_to_train(part: list[Sample], trainer: Trainer) -> list[Sample]:
    """The samples that have a gradient. A sample with advantage 0 has none (a group of equal
    rewards), so no forward is spent on it, but Z counts the sample. If all advantages are 0: the
    first group_size samples, because a forward needs at least one."""
    if trainer.compares:
        return part
    return [s for s in part if s.advantage != 0] or part[: trainer.cfg.group_size]


def update_policy(trainer: Trainer, groups: list[list[Sample]], lr: float) -> StepNumbers:
    """(5) and (6) of one step: an update for each of --minibatches parts of the groups."""
    cfg = trainer.cfg
    size = len(groups) // cfg.minibatches
    parts = [sum(groups[i : i + size], []) for i in range(0, len(groups), size)]
    trained = [samples_to_train(part, trainer) for part in parts]
    # before the first update changes the policy
    compared, proven = agreement.compare_others(
        trainer, sum(groups, []), trained, cfg.proof_share, cfg.seed
    )
    if cfg.tis and cfg.minibatches > 1:
        agreement.compare_samples(trainer, trained[0])
    updates = []
    norms = []
    for part, some in zip(parts, trained):
        found = trainer.train_on(some, counted=part)
        if not updates:
            together = agreement.joined([*compared, found])
            agreement.check_agreement(together, cfg.abort_k3)
        updates.append(found)
        norms.append(trainer.optim_step(lr, update=cfg.control != "frozen"))
    kl = None
    if trainer.compares:
        kl = agreement.weighted_mean([u.kl for u in updates], [u.tokens for u in updates])
    return StepNumbers(
        loss=agreement.weighted_mean([u.loss for u in updates], [u.denominator for u in updates]),
        loss_max=max(u.loss_max for u in updates),
        grad_norm=sum(norms) / len(norms),
        clip_share=sum(u.clip_share * u.tokens for u in updates) / together.tokens,
        kl=kl,
        padding=agreement.weighted_mean([u.padding for u in updates], [u.fed for u in updates]),
        proven=proven,
        policy_version=trainer.policy_version,
        **vars(together),
    )


# ---------------------------------------------------------------- the run
def lr_at(step: int, cfg: Config) -> float:
    """Share of the peak learning rate at a step (from 1): linear warmup, then linear decay."""
    decay = 1 - (step - 1) / cfg.steps * (1 - cfg.min_lr_ratio)
    return min(step / max(cfg.warmup_steps, 1), 1.0) * decay


def main(cfg: Config, Trainer=Trainer):
    # 1. task, model and devices: all wrong flags are found before anything is built
    if cfg.compute_dtype == "auto" and (cfg.device == "cpu" or not torch.cuda.is_available()):
        cfg = replace(cfg, compute_dtype="float32")  # trainer and generator agree in more digits
    env = open_task(cfg)
    text = Text(cfg.init_from, cfg.out, alphabet_of(env), open_chat(cfg.init_from, cfg), env)
    Model, model_config = model_of(cfg, text.tokenizer.get_vocab_size())
    left_out = leave_out_long(env, text, cfg.seq_len, cfg.max_new_tokens)
    held_out = {}
    if cfg.eval_every:
        held_out = held_out_tasks(env, cfg.eval_n, partial(text.fits, seq_len=cfg.seq_len))
    n_trainers = engines.ranks_that_train(cfg.gen_ranks)
    layout = check_layout(
        cfg,
        model_config,
        seq_len=cfg.seq_len,
        local_batch_size=cfg.local_batch_size * cfg.pp,
        global_batch_size=-1,
        device=cfg.device,
        world_size=n_trainers,
    )
    if cfg.batch_invariant or "OMP_NUM_THREADS" not in os.environ and model_config.dim < 512:
        # several threads slow down so small a model: they mostly wait
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    wait_for_run(cfg.out)
    identity = refusals.check_own_run(cfg, Model, model_config, lr_at)
    if cfg.engine and layout.rank == 0:
        find_server(cfg)

    # 2. two kinds of ranks: the last --gen_ranks only sample, and stay in generate_forever() until
    #    the run ends
    if layout.rank >= n_trainers:
        return engines.generate_forever(cfg, env, text, Model, model_config, n_trainers)
    lock_run(cfg.out)
    os.makedirs(cfg.out, exist_ok=True)
    if layout.rank == 0:
        text.save()
    layout = make_mesh(connect(layout, cfg, cfg.device, cfg.seed, trace=f"{cfg.out}/trace"))
    bridge = None
    if cfg.gen_ranks and layout.rank == 0:
        bridge = engines.open_bridge(cfg, 0, layout.device)
    set_timeouts(layout, cfg.init_timeout_s)
    stop = StopSignal(cfg)

    # 3. model, 4. parallelism, 5. optimizer
    with torch.device("meta"):
        plain = Model(model_config)
    n_params = sum(p.numel() for p in plain.parameters())
    adapters = ""
    flops_per_token = plain.flops_per_token(cfg.seq_len)
    if cfg.lora_rank:
        adapters, more_flops = lora_counts(plain, cfg)
        flops_per_token += more_flops
    unknown = text.unknown_ids(model_config.vocab_size, layout.device)
    build = partial(build_policy, cfg, layout, Model, model_config, unknown)
    model = build(is_frozen if cfg.lora_rank else loaded_later(cfg, cfg.out))
    reference = None
    if cfg.kl_coef and not cfg.lora_rank:
        reference = build(lambda fqn: True)  # filled by keep_reference
    trainer = Trainer(cfg, layout, model, reference)
    if layout.device.type == "cuda" and not cfg.engine and not cfg.gen_ranks:
        rollouts.try_sampling(model, layout)

    # 6. checkpoint: of this run, else --init_from's weights, else the warm-up
    is_new = not step_folders(cfg.out)
    if not cfg.init_from and is_new and warm_up(trainer, env, text, stop):
        disconnect()
        return UNFINISHED
    about = dict(
        identity=identity,
        config=asdict(cfg),
        source=open(__file__).read(),
        tokenizer_file=text.file,
    )
    base = None
    if cfg.lora_rank:
        base = partial(load_base, [model], cfg.init_from, lora_from=cfg.lora_from)
    checkpoints = Checkpoints(
        cfg, cfg.out, modules=[model], optimizer=trainer.optimizer, load_base=base, **about
    )
    state = checkpoints.load() or {"step": 0, "cursor": 0, "tokens": 0, "policy_version": 0}
    trainer.policy_version = state["policy_version"]
    first = state["step"] + 1
    if reference is not None:
        keep_reference(trainer, is_new, about)
    check_replicas([model], layout, flags=asdict(cfg))
    if layout.rank == 0:
        about_run = identity | checkpoints.made_from
        size = f"{n_params:,} parameters{adapters}"
        messages.introduce(
            cfg, layout, model.reduces_always, about_run, size, left_out, state["step"]
        )

    # 7. loop
    ready = rollouts.reuse_batches(state, checkpoints.loaded, cfg, layout.rank == 0)
    cursor = ready[-1]["cursor"] if ready else state["cursor"]
    engine = engines.open_engine(trainer, env, text, cursor, bridge)
    ahead = engines.Ahead(engine, ready)
    metrics = Metrics(
        cfg.out,
        cfg,
        layout,
        flops_per_token,
        first_step=first,
        steps=cfg.steps,
        tokens=state["tokens"],
    )
    recent = deque(maxlen=messages.FEW)  # the last lines, to notice that nothing is learned
    stopping = False
    if cfg.eval_every and first == 1:
        evaluate_policy(trainer, engine, text, held_out, metrics, 0)
    for step in range(first, cfg.steps + 1):
        # (1) prompts, (2) rollouts, (3) rewards
        batch = metrics.start_step(ahead.take())
        # sampled by the current policy during training
        ahead.fill(min(cfg.async_steps, cfg.steps - step))
        age = engines.staleness(batch, trainer.policy_version, cfg)
        began = time.time()

        # (4) advantages
        samples = batch["samples"]
        groups = [samples[i : i + cfg.group_size] for i in range(0, len(samples), cfg.group_size)]
        for group in groups:
            set_advantages(group, cfg)

        # (5) loss, (6) optimizer
        lr = cfg.lr * lr_at(step, cfg)
        numbers = update_policy(trainer, groups, lr)
        balance = {}
        if n_experts_of(model_config):
            balance = balance_experts([model], layout, "none", 0.0)

        # (7) the next version of the policy: log, evaluate, save
        ended = time.time()
        metrics.end_step(sum(len(s.prompt) + len(s.ids) for s in samples))
        line = messages.sample_numbers(groups, batch)
        line |= numbers.for_metrics()
        line |= balance | age
        line |= dict(train_s=ended - began, train_began=began, train_ended=ended)
        tokens_hash = hashlib.sha256(b" ".join(s.ids for s in samples)).hexdigest()[:16]
        metrics.log(
            step,
            loss=numbers.loss,
            loss_max=numbers.loss_max,
            grad_norm=numbers.grad_norm,
            lr=lr,
            tokens_hash=tokens_hash,
            extra=line,
            show=False,
        )
        recent.append(line)
        if layout.rank == 0 and trainer.rewarded:
            messages.warn_of_equal_rewards(recent)
        if layout.rank == 0 and metrics.due(step):
            messages.show_step(cfg, step, line)
            # not always the first: --dynamic_sampling puts groups with a gradient first
            at = step % len(groups)
            messages.keep_samples(cfg, step, sum(groups[at:] + groups[:at], []), text)
        state = {
            "step": step,
            "cursor": batch["cursor"],
            "tokens": metrics.tokens,
            "policy_version": trainer.policy_version,
            "bos": text.bos,
        }
        if step == first:
            set_timeouts(layout, cfg.train_timeout_s)
        stopping = stop.agreed(layout) and step < cfg.steps
        last = step == cfg.steps or stopping
        saving = cfg.checkpoint_every and (
            step % cfg.checkpoint_every == 0 or last or step == 1 and cfg.checkpoint_first_step
        )
        evaluating = cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps)
        if saving:
            rollouts.save_step(checkpoints, ahead, layout, cfg, step, state, last)
        if evaluating:
            evaluate_policy(trainer, engine, text, held_out, metrics, step)
        if (saving or evaluating) and not stopping and step < cfg.steps:
            # a signal that came meanwhile: no other step is trained, and none is saved twice
            stopping = stop.agreed_now(layout)
            if stopping and cfg.checkpoint_every and not saving:
                rollouts.save_step(checkpoints, ahead, layout, cfg, step, state, last=True)
        if stopping:
            break
    ahead.all()  # a generator ends only after its samples were fetched
    engine.close()
    checkpoints.close(export=not stopping and not os.path.exists(cfg.export_hf))
    metrics.close()
    disconnect()
    if stopping:
        return stop.report(step, layout)


if __name__ == "__main__":
    run(main, Config)
