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
rl/rollouts.py, rl/decoding.py, models/loss.py. Refusals and output are in rl/messages.py.
"""

import hashlib
import math
import os
import random
import string
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

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
from distributed.layout import ExpertConfig, ParallelConfig, local_tensor, reshard
from distributed.pipeline import embeds_at_both_ends
from distributed.refusals import check_layout
from flags.config import Need, flag
from flags.files import step_folders
from lora.lora import LORA, LoraConfig, base_model, lora_counts
from parallel import clip_grad_norm, make_mesh, next_backward, reduce_loss
from rl import engines, messages, packing, rollouts
from rl.datasets import DatasetConfig, Text, open_task
from rl.engines import find_server
from rl.environments import draw_task, held_out_tasks, leave_out_long, supervised_sample
from rl.policy import FLAVORS, backward_of_pipeline, build_policy, forward, keep_reference, model_of
from rl.rewards import RewardConfig, held_out_numbers
from sft.base import load_base
from storage.adapters import is_frozen
from storage.prompt import open_chat
from storage.resume import lock_run, wait_for_run
from tools.run import run
from training.metrics import Metrics, MetricsConfig
from training.optim import set_lr

# --clip_low and --clip_high as published
CLIP = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
# Needs of flags: see flags/config.py
DENSE = Need(
    "with experts: they multiply as many rows as tokens chose them",
    lambda c: not c.n_experts,
)
NEW_MODEL = Need("with --init_from, which brings a trained model", lambda c: not c.init_from)
SERVER = Need("without --engine", lambda c: c.engine)
TIS = Need("without --tis", lambda c: c.tis)
# as TRL names them
TisMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
IN_PLACE = Need(
    "with --engine: the server samples, and its kernels round as they do", lambda c: not c.engine
)
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
    ChatConfig,
):
    # not in --help: rl/messages.py says why
    REFUSED = ("loss_parallel", "load_only", "exclude_from_loading")
    # --pp in grpo.py: a stage per rank, and the forwards of an update are the micro-batches
    pp_schedule, pp_schedule_csv, pp_microbatch_size, pp_layers_per_stage = "1F1B", "", 1, None
    pp_first_stage_less_layers, pp_last_stage_less_layers, pp_stage_fqns = 1, 1, ""
    # a small Llama 3, or Qwen3 with experts
    flavor: Literal[tuple(FLAVORS)] = flag("debug", NEW_MODEL)
    model_args: str = ""  # fields of the flavor to change: "n_layers=4,dim=128"
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
    # see policy_loss in grpo.py
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "dr_grpo"
    std_norm: bool = False  # divide advantages by the standard deviation of the group's rewards
    # clip ratios below 1 - clip_low; none = as published for the loss
    clip_low: float | None = None
    # clip ratios above 1 + clip_high; none = as published for the loss
    clip_high: float | None = None
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
    # vLLM or SGLang at this address samples, e.g. http://127.0.0.1:8000; "" = the processes of this
    # run do
    engine: str = ""
    # a folder, with the same path for the server; "" = <out>/engine; or nccl
    engine_weights: str = flag("", SERVER)
    # send adapters alone to vLLM, which has the weights of --init_from
    engine_adapters: bool = flag(False, LORA, SERVER)
    # vLLM draws by seeds of our own: the same samples again, but one kernel per sample
    engine_seed: bool = flag(False, SERVER)
    # the last ranks only sample, each with a whole model; 0 = all ranks sample, in place
    gen_ranks: int = flag(0, IN_PLACE)
    # a rank that waits longer for others' samples, tools or rewards ends the run
    rollout_timeout_s: int = 7200
    # sampling and training agree to the last bit (CPU, one thread, no tp)
    batch_invariant: bool = flag(False, DENSE, IN_PLACE)
    # stop if generator and trainer differ by more, as k3 divergence; 0 = never
    abort_k3: float = 0.05
    # share of the samples without a gradient that are compared, too, drawn by chance; at least one
    proof_share: float = 0.1
    # for comparison: no updates, or rewards by a coin
    control: Literal["none", "frozen", "random"] = "none"
    # steps of supervised warm-up on answers, at most, for a model without --init_from
    sft_steps: int = 200
    # the warm-up ends below this loss per token: most is left to learn
    sft_loss: float = flag(0.25, NEW_MODEL)
    sft_lr: float = flag(1e-3, NEW_MODEL)  # learning rate of the warm-up, whatever --lr is
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
    rollout_rows: int = 512  # samples that one rank runs at once, or with --engine its server
    seed: int = 0  # of the initial weights, prompts and samples
    # steps between evaluations, also before the first step and at the end; 0 = never
    eval_every: int = 100
    eval_n: int = -1  # held-out prompts, all different; -1 = all of --eval_data, else up to 1024
    eval_k: int = 4  # samples per held-out prompt, for pass@k; a greedy one comes on top
    # steps between printed lines and between samples in samples.jsonl; metrics.jsonl has every step
    log_every: int = 10
    log_samples: int = 4  # samples per logged step in samples.jsonl; 0 = none
    checkpoint_every: int = 100  # steps between checkpoints (and one at the end); 0 = never
    # prompts in the chat template of --init_from, if any; --no-chat: bare, for base models
    chat: bool = True

    def __post_init__(self):
        MetricsConfig.__post_init__(self)
        # the new model is small; its learning rate would destroy a trained model within a few steps
        if self.lr is None:
            self.lr = 5e-4 if not self.init_from else 1e-5 if self.lora_rank else 1e-6
        messages.check_flags(self)


# ---------------------------------------------------------------- the algorithm
def policy_loss(
    kind,
    lp,
    old,
    mu,
    advantage,
    mask,
    n,
    clip,
    tis,
    sequence_sum,
):
    """(-objective of each token, 1.0 for each token without gradient due to the clip), (B, T) each.
    Sum, then divide by Z.

    lp: log pi(y_t) of the trained policy. mu: the sampler's. old: denominator of the ratio, mu's
    unless --tis. mask (B, T):
    sampled tokens, with EOS. n (B, T): sampled tokens of the token's whole sample. tis: --tis,
    --tis_mode. sequence_sum: for each token the sum over its whole sample, which may share its row
    with others (--pack_tokens) and go on on other ranks (--cp). Equations: GRPO 2402.03300 (3), Dr.
    GRPO 2503.20783, DAPO 2503.14476 (8), GSPO 2507.18071 (5-7), CISPO 2506.13585 (4-5).
    """
    if kind == "sft":
        return -lp * mask, torch.zeros_like(mask)
    low, high = clip
    log_ratio = (lp - old) * mask
    # one ratio per sequence, the geometric mean; lp - lp.detach() gives each token a gradient
    # (GSPO-token)
    if kind == "gspo":
        log_ratio = sequence_sum(log_ratio.detach()) / n + (lp - lp.detach())
    ratio = log_ratio.exp()
    if kind == "cispo":  # the weight is clipped, and no token loses its gradient
        objective = ratio.detach().clamp(1 - low, 1 + high) * advantage * lp
        clipped = (ratio > 1 + high) & (advantage != 0)
    else:
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        clipped = torch.where(advantage > 0, ratio > 1 + high, ratio < 1 - low) & (advantage != 0)
    cap, mode = tis
    if cap:
        excess = ((old - mu) * mask).detach()
        factor = (sequence_sum(excess) if mode.startswith("sequence") else excess).exp()
        objective = objective * torch.where(
            factor > cap, 0.0 if mode.endswith("mask") else cap, factor
        )
    # a mean per sequence, or every token counts the same
    weight = mask / n if kind in ("grpo", "gspo") else mask
    return -objective * weight, clipped * mask


def compare_policies(lp, entropy, b):
    """Compare the trainer's log-probabilities with the generator's, over the sampled tokens of a
    micro-batch: (sums of k3, of ratios outside 1 +- 0.1, of the entropy and of 1; the largest
    difference). In fp64, because k3, about d^2 / 2, is below fp32's rounding of 1."""
    d = ((lp - b["mu"]) * b["sampled"]).double()
    sums = [
        x.sum().double()
        for x in (d.expm1() - d, d.expm1().abs() > 0.1, entropy * b["sampled"], b["sampled"])
    ]
    return torch.stack([*sums, d.abs().max()])


def weighted_mean(parts: list[dict], name: str, weight: str) -> float:
    """Weighted mean of parts[i][name] over the updates of a step."""
    return sum(part[name] * part[weight] for part in parts) / max(
        sum(part[weight] for part in parts), 1
    )


def loss_denominator(kind: str, samples: list[dict], max_new_tokens: int) -> float:
    """Z of some samples, the divisor of the summed loss. Ranks, micro-batches and calls add their
    parts of Z. A sample without a trained token (--mask_truncated) counts 0 in every loss."""
    samples = [s for s in samples if any(s["mask"])]
    if kind in ("grpo", "gspo"):
        return len(samples)
    return (
        len(samples) * max_new_tokens if kind == "dr_grpo" else sum(sum(s["mask"]) for s in samples)
    )


def advantages(rewards: list[float], std_norm: bool) -> list[float]:
    """(4) of one group: reward minus the group's mean; exactly 0 for equal rewards, also in a group
    of one."""
    mean = sum(rewards) / len(rewards)
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + 1e-6 if std_norm else 1.0) for r in rewards]


def overlong_penalty(n: int, longest: int, buffer: int) -> float:
    """DAPO (13): 0 up to longest - buffer tokens, then falling to -1 at longest."""
    return -min(max(n - (longest - buffer), 0) / buffer, 1.0) if buffer else 0.0


def set_advantages(group: list[dict], cfg: Config):
    """(4) for the samples of one prompt."""
    scores = [
        s["reward"] + overlong_penalty(len(s["ids"]), cfg.max_new_tokens, cfg.overlong_tokens)
        for s in group
    ]
    for s, advantage in zip(group, advantages(scores, cfg.std_norm)):
        s["advantage"] = advantage
        if cfg.mask_truncated and s["truncated"]:
            s["advantage"], s["sampled"], s["mask"] = 0.0, s["mask"], [0.0] * len(s["ids"])


class Trainer:
    """The training half, in few calls, for any loop with rewarded samples.

    A sample is a dict: prompt, ids (token ids), logprobs (mu's, one per id), mask (1.0 for each
    trained id), advantage; and sampled (1.0 for each id chosen by the model), if not equal to the
    mask. Every rank gets the same list and takes its share.
    """

    rewarded = True  # False: the reference teaches, whatever the rewards (forks/train_distill.py)

    def __init__(self, cfg: Config, layout, model, reference=None):
        self.cfg, self.layout, self.model, self.reference = cfg, layout, model, reference
        self.policy_version, self.denominator = 0, 0.0
        # with the reference: then every sample has a gradient
        self.compares = cfg.kl_coef > 0 or not self.rewarded
        self.new_optimizer()

    def new_optimizer(self):
        # a group, because torch refuses an empty list: under LoRA a pipeline's last stage may train
        # nothing
        cfg, groups = (
            self.cfg,
            [{"params": [p for p in self.model.parameters() if p.requires_grad]}],
        )
        self.optimizer = torch.optim.AdamW(
            groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, cfg.weight_decay, fused=True
        )

    def microbatches(self, samples):
        """This data rank's share: (samples, tensors) of each forward, as rl/packing.py plans them."""
        return packing.forwards_of(samples, self.cfg, self.layout)

    @torch.no_grad()
    def reference_logprobs(self, b):
        """Log-probabilities of the reference. Of --kl_coef: the initial policy; with LoRA the model
        without adapters, so no second copy is needed."""
        if self.reference is not None:
            return forward(self.reference, b, self.layout)[0]
        with base_model(self.model):
            return forward(self.model, b, self.layout)[0]

    def divergence(self, d):
        """KL divergence of the policy from the reference, per token, estimated from d =
        log(reference / policy): k3, 2402.03300 (4)."""
        return d.exp() - d - 1

    @torch.no_grad()
    def score(self, samples) -> dict:
        """The proof, see compare_policies(), for samples outside of training. With --tis and
        several updates per step the samples also get their log-probabilities: the ratios of all
        updates are against the policy before the first."""
        found, n = [], [len(s["ids"]) for s in samples]
        # the last number is for prompts and padding
        old = torch.zeros(sum(n) + 1, device=self.layout.device)
        for _, b in self.microbatches(samples):
            lp, entropy = forward(self.model, b, self.layout)
            found.append(compare_policies(lp, entropy, b))
            old[b["at"]] = lp
        reshard(self.model)
        if self.cfg.tis and self.cfg.minibatches > 1:
            if self.layout.coordinate("tp"):  # all tp ranks have the same numbers
                old.zero_()
            # the rank that trains a sample may not be the rank that scored it; cp ranks share a
            # sample
            dist.all_reduce(old)
            for s, logprobs in zip(samples, old[:-1].split(n)):
                s["old"] = logprobs.tolist()
        return self.proof(found)

    def proof(self, found) -> dict:
        """Results of compare_policies() for the micro-batches of all ranks, as means over `tokens`
        sampled tokens."""
        # (micro-batches, 5); a row of zeros, because a pipeline's first stages compare nothing
        table = torch.stack(
            [torch.zeros(5, dtype=torch.float64, device=self.layout.device), *found]
        )
        sums, worst = table[:, :4].sum(0), table[:, 4].max()
        dist.all_reduce(sums)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        *sums, tokens = sums.tolist()
        means = {
            name: x / max(tokens, 1)
            for name, x in zip(("logprob_k3", "ratio_outside", "entropy"), sums)
        }
        return means | dict(logprob_max_diff=worst.item(), tokens=tokens)

    def sequence_sum(self, x, segment):
        """For each token (B, T/cp) the sum over its whole sample. In fp64, so that the order of
        summands does not show."""
        # more than the number of samples
        sums = x.new_zeros(x.numel() * self.layout.cp + 1, dtype=torch.float64)
        sums.index_add_(0, segment.flatten(), x.flatten().double())
        if self.layout.cp > 1:
            dist.all_reduce(sums, group=self.layout.group("cp"))
        return sums[segment].float()

    def train_on(self, samples, loss: str = "", counted=None) -> dict:
        """(5) Add the gradient of the summed loss. N calls are one call on the union: optim_step()
        divides, once.

        counted: all samples of the denominator, if `samples` leaves out some without a gradient.
        Returns means over the
        samples, and the proof.
        """
        cfg, layout, model, kind = self.cfg, self.layout, self.model, loss or self.cfg.loss
        usual = CLIP.get(kind, (0.0, 0.0))
        clip = [
            default if given is None else given
            for given, default in zip((cfg.clip_low, cfg.clip_high), usual)
        ]
        tis, kl_coef = ((0.0, ""), 0.0) if kind == "sft" else ((cfg.tis, cfg.tis_mode), cfg.kl_coef)
        parts, batches = zip(*self.microbatches(samples))
        # the reference first, because with LoRA the reference is the same model
        refs = [
            self.reference_logprobs(b) if self.compares and kind != "sft" else None for b in batches
        ]
        reshard(self.reference or model)  # before the backward takes its memory
        sums, found = torch.zeros(4, dtype=torch.float64, device=layout.device), []

        def summed_loss(i, lp, entropy):
            b, ref = batches[i], refs[i]
            assert lp.dtype == torch.float32, lp.dtype
            mask, mu, old = (
                b["mask"],
                b["mu"],
                lp.detach() if tis[0] and cfg.minibatches == 1 else b["old"],
            )
            of_sample = partial(self.sequence_sum, segment=b["segment"])
            per_token, clipped = policy_loss(
                kind, lp, old, mu, b["advantage"], mask, b["n"], clip, tis, of_sample
            )
            kl = torch.zeros_like(lp)
            if ref is not None:  # with the weights of the loss
                kl = self.divergence(ref - lp) * mask
                per_token = per_token + kl_coef * kl / (b["n"] if kind in ("grpo", "gspo") else 1)
            sums.add_(
                torch.stack(
                    [
                        x.detach().sum().double()
                        for x in (per_token, clipped, torch.ones_like(clipped), kl)
                    ]
                )
            )
            found.append(compare_policies(lp.detach(), entropy.detach(), b))
            return per_token.sum()

        if layout.pp > 1:
            backward_of_pipeline(model, batches, summed_loss, layout)
        else:
            for i, b in enumerate(batches):
                next_backward(model, i == len(batches) - 1, layout)
                summed_loss(i, *forward(model, b, layout)).backward()
        z = loss_denominator(kind, counted or samples, cfg.max_new_tokens)
        self.denominator += z
        mine = loss_denominator(kind, sum(parts, []), cfg.max_new_tokens)
        total, loss_max = reduce_loss(
            torch.stack([sums[0], sums[0] / max(mine, 1)]) / layout.tp, layout
        )
        dist.all_reduce(sums)
        proof, fed = self.proof(found), sums[2].item() / layout.tp
        return proof | dict(
            loss=total.item() / max(z, 1),
            loss_max=loss_max.item(),
            denominator=z,
            clip_share=sums[1].item() / max(proof["tokens"], 1),
            kl=sums[3].item() / max(proof["tokens"], 1),
            fed=fed,
            padding=1 - sum(map(packing.n_read, samples)) / max(fed, 1),
        )

    def optim_step(self, lr: float, update=True) -> dict:
        """(6) One update with the gradients of all calls since the last update, then zero_grad; (7)
        the next version."""
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
        self.denominator, self.policy_version = 0.0, self.policy_version + 1
        return {"grad_norm": norm.item(), "policy_version": self.policy_version}


def prove(proofs: list[dict], abort_k3: float) -> dict:
    """The proof of a whole step, from its parts. Raises RuntimeError if the generator samples from
    another policy."""
    proof = {
        name: weighted_mean(proofs, name, "tokens")
        for name in ("logprob_k3", "ratio_outside", "entropy")
    }
    if abort_k3 and proof["logprob_k3"] > abort_k3:
        raise RuntimeError(
            f"logprob_k3 {proof['logprob_k3']:.3g} is above --abort_k3 {abort_k3}: the generator "
            "does not "
            "sample from the policy that is trained; with --engine_adapters, see that the server "
            "has "
            "the weights of --init_from"
        )
    return proof | {"logprob_max_diff": max(p["logprob_max_diff"] for p in proofs)}


def n_sampled(samples: list[dict]) -> float:
    """Number of tokens that the model chose."""
    return sum(sum(s.get("sampled", s["mask"])) for s in samples)


def update_policy(trainer: Trainer, groups: list[list[dict]], lr: float) -> dict:
    """(5) and (6) of one step: an update for each of --minibatches parts of the groups. Returns
    numbers of the step."""
    cfg, size = trainer.cfg, len(groups) // trainer.cfg.minibatches
    parts = [sum(groups[i : i + size], []) for i in range(0, len(groups), size)]
    # Groups of equal rewards have no gradient and need no backward, but stay in the denominator.
    kept = [
        part
        if trainer.compares
        else [s for s in part if s["advantage"] != 0] or part[: cfg.group_size]
        for part in parts
    ]
    # The proof comes before the first update changes the policy, and covers all samples with a
    # gradient and a draw of the rest.
    late, with_gradient, updates = sum(kept[1:], []), {id(s) for part in kept for s in part}, []
    rest = [s for part in parts for s in part if id(s) not in with_gradient]
    n_drawn = min(len(rest), max(1, round(len(rest) * cfg.proof_share)))
    drawn = random.Random(f"{cfg.seed}/{trainer.policy_version}").sample(rest, n_drawn)
    proofs = [trainer.score(some) for some in (late, drawn) if some]
    proven = 1 - (n_sampled(rest) - n_sampled(drawn)) / n_sampled(sum(groups, []))
    if drawn:  # the drawn samples stand for all of the rest
        proofs[-1]["tokens"] *= n_sampled(rest) / n_sampled(drawn)
    if cfg.tis and cfg.minibatches > 1:
        trainer.score(kept[0])
    for part, some in zip(parts, kept):
        found = trainer.train_on(some, counted=part)
        if not updates:
            proof = prove([*proofs, found], cfg.abort_k3)
        updates.append(found | trainer.optim_step(lr, update=cfg.control != "frozen"))
    n_tokens = sum(p["tokens"] for p in [*proofs, updates[0]])
    return proof | dict(
        proven=proven,
        loss=weighted_mean(updates, "loss", "denominator"),
        loss_max=max(u["loss_max"] for u in updates),
        grad_norm=sum(u["grad_norm"] for u in updates) / len(updates),
        padding=weighted_mean(updates, "padding", "fed"),
        **{"kl": weighted_mean(updates, "kl", "tokens")} if trainer.compares else {},
        clip_share=sum(u["clip_share"] * u["tokens"] for u in updates) / n_tokens,
        policy_version=trainer.policy_version,
    )


# ---------------------------------------------------------------- warm-up, evaluation
def warm_up(trainer: Trainer, env, text, stop: StopSignal) -> bool:
    """Train random weights on some answers: GRPO has no gradient until some samples earn a reward.
    Returns whether a signal has ended it."""
    cfg, recent, step = trainer.cfg, [], -1
    speaks, said = trainer.layout.rank == 0, time.monotonic()
    for step in range(cfg.sft_steps):
        tasks = [
            draw_task(
                env, f"sft/{cfg.seed}", 128 * step + i, partial(text.fits, seq_len=cfg.seq_len)
            )
            for i in range(128)
        ]
        samples = [supervised_sample(env, text, *task, cfg.reward_timeout_s) for task in tasks]
        found = trainer.train_on(samples, "sft")
        recent = [*recent[-3:], found["loss"]]
        trainer.optim_step(cfg.sft_lr * min(1, (step + 1) / 10))
        if stop.agreed(trainer.layout):
            if speaks:
                print("stopped in the supervised warm-up: the same command begins again")
            return True
        if sum(recent) / len(recent) < cfg.sft_loss:
            break
        if speaks and time.monotonic() - said > 5:
            said = time.monotonic()
            print(
                f"supervised warm-up: step {step + 1} of at most {cfg.sft_steps}, loss "
                f"{recent[-1]:.3f} (ends below {cfg.sft_loss:g})",
                flush=True,
            )
    trainer.new_optimizer()
    trainer.policy_version = 0
    if speaks:
        print(
            f"supervised warm-up: {step + 1} steps, loss {recent[-1]:.3f}"
            if recent
            else "no supervised warm-up",
            flush=True,
        )
    return False


def evaluate_policy(
    trainer: Trainer, engine, text, held_out: dict[str, str], metrics: Metrics, step: int
):
    """Evaluate held-out prompts, log held_out_numbers() and print a line."""
    cfg = trainer.cfg
    tasks = [(f"eval/{i}", *task) for i, task in enumerate(held_out.items())]
    samples, greedy = (
        engine.evaluate(tasks, cfg.eval_k, cfg.temperature),
        engine.evaluate(tasks, 1, 0.0),
    )
    line = held_out_numbers(samples, greedy, cfg.eval_k)
    if trainer.layout.rank == 0:
        metrics.write({"step": step} | line)
        messages.show_evaluation(cfg, step, line)
        messages.keep_samples(cfg, step, greedy, text, evaluation=True)


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
    text = Text(
        cfg.init_from,
        cfg.out,
        getattr(env, "ALPHABET", string.printable),
        open_chat(cfg.init_from, cfg),
        env,
    )
    Model, model_config = model_of(cfg, text.tokenizer.get_vocab_size())
    left_out = leave_out_long(env, text, cfg.seq_len, cfg.max_new_tokens)
    held_out = (
        held_out_tasks(env, cfg.eval_n, partial(text.fits, seq_len=cfg.seq_len))
        if cfg.eval_every
        else []
    )
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if (n_trainers := world_size - cfg.gen_ranks) < 1:
        raise ValueError(
            f"--gen_ranks {cfg.gen_ranks} must leave a process to train: {world_size} were "
            "started, use torchrun "
            "--nproc_per_node"
        )
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
    identity = messages.check_own_run(cfg, Model, model_config, lr_at)
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
    bridge = (
        engines.open_bridge(cfg, 0, layout.device) if cfg.gen_ranks and layout.rank == 0 else None
    )
    set_timeouts(layout, cfg.init_timeout_s)
    stop = StopSignal()

    # 3. model, 4. parallelism, 5. optimizer
    with torch.device("meta"):
        plain = Model(model_config)
    n_params = sum(p.numel() for p in plain.parameters())
    adapters, more_flops = lora_counts(plain, cfg) if cfg.lora_rank else ("", 0)
    flops_per_token = plain.flops_per_token(cfg.seq_len) + more_flops
    unknown = text.unknown_ids(model_config.vocab_size, layout.device)
    build = partial(build_policy, cfg, layout, Model, model_config, unknown)
    model = build(is_frozen if cfg.lora_rank else loaded_later(cfg, cfg.out))
    # filled by keep_reference
    reference = build(lambda fqn: True) if cfg.kl_coef and not cfg.lora_rank else None
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
    base = partial(load_base, [model], cfg.init_from) if cfg.lora_rank else None
    checkpoints = Checkpoints(
        cfg, cfg.out, modules=[model], optimizer=trainer.optimizer, load_base=base, **about
    )
    state = checkpoints.load() or {"step": 0, "cursor": 0, "tokens": 0, "policy_version": 0}
    trainer.policy_version, first = state["policy_version"], state["step"] + 1
    if reference is not None:
        keep_reference(trainer, is_new, about)
    check_replicas([model], layout, flags=asdict(cfg))
    if layout.rank == 0:
        about_run, size = identity | checkpoints.made_from, f"{n_params:,} parameters{adapters}"
        messages.introduce(
            cfg, layout, model.reduces_always, about_run, size, left_out, state["step"]
        )

    # 7. loop
    ready, stopping = (
        rollouts.reuse_batches(state, checkpoints.loaded, cfg, layout.rank == 0),
        False,
    )
    engine = engines.open_engine(
        trainer, env, text, ready[-1]["cursor"] if ready else state["cursor"], bridge
    )
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
    if cfg.eval_every and first == 1:
        evaluate_policy(trainer, engine, text, held_out, metrics, 0)
    for step in range(first, cfg.steps + 1):
        # (1) prompts, (2) rollouts, (3) rewards
        batch = metrics.start_step(ahead.take())
        # sampled by the current policy during training
        ahead.fill(min(cfg.async_steps, cfg.steps - step))
        samples, age, trained_from = (
            batch["samples"],
            engines.staleness(batch, trainer.policy_version, cfg),
            time.time(),
        )

        # (4) advantages
        groups = [samples[i : i + cfg.group_size] for i in range(0, len(samples), cfg.group_size)]
        for group in groups:
            set_advantages(group, cfg)

        # (5) loss, (6) optimizer
        lr = cfg.lr * lr_at(step, cfg)
        found = update_policy(trainer, groups, lr)
        balance = balance_experts([model], layout, "none", 0.0) if model_config.n_experts else {}

        # (7) the next version of the policy: log, evaluate, save
        trained_until = time.time()
        metrics.end_step(sum(len(s["prompt"]) + len(s["ids"]) for s in samples))
        line = (
            messages.sample_numbers(groups, batch)
            | found
            | balance
            | age
            | dict(
                train_s=trained_until - trained_from,
                train_began=trained_from,
                train_ended=trained_until,
            )
        )
        tokens_hash = hashlib.sha256(b" ".join(s["ids"] for s in samples)).hexdigest()[:16]
        metrics.log(
            step,
            loss=line["loss"],
            loss_max=line["loss_max"],
            grad_norm=line["grad_norm"],
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
        if cfg.checkpoint_every and (
            step % cfg.checkpoint_every == 0 or last or step == 1 and cfg.checkpoint_first_step
        ):
            state["ahead"] = len(batches := ahead.all())
            files = rollouts.pack_batches(batches, cfg) if layout.rank == 0 else {}
            checkpoints.save(
                step, state, last, cfg.last_save_model_only and step == cfg.steps, files
            )
        if cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps):
            evaluate_policy(trainer, engine, text, held_out, metrics, step)
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
