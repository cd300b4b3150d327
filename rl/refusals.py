"""Refusals of grpo.py: flags that do not work, or do not go together, before anything is built."""

import math
from collections.abc import Callable
from typing import Any

from distributed.refusals import refuse
from flags.config import check_range
from flags.files import read_json, step_folders
from lora.lora import claim_adapters
from rl.datasets import HINTS
from rl.environments import RENAMED
from rl.packing import pieces
from storage.newest import ABOUT, newest_readable
from storage.resume import identify_run


def check_flags(cfg: Any) -> None:
    """Raises ValueError for flags that do not work in grpo.py. check_layout compares flags with the
    model."""
    check_range(
        cfg,
        1,
        math.inf,
        "steps",
        "prompts_per_step",
        "minibatches",
        "max_new_tokens",
        "local_batch_size",
        "rollout_rows",
        "rollout_timeout_s",
        "eval_k",
        "reward_threads",
    )
    check_range(
        cfg,
        0,
        math.inf,
        "lr",
        "sft_lr",
        "eps",
        "weight_decay",
        "max_norm",
        "kl_coef",
        "tis",
        "clip_low",
        "clip_high",
        "async_steps",
        "gen_ranks",
    )
    check_range(cfg, 0, 1e9, "reward_timeout_s")
    # an advantage is a reward compared with others of its prompt
    check_range(cfg, 2, math.inf, "group_size")
    check_range(cfg, 0, 1, "beta1", "beta2", "min_lr_ratio", "proof_share")
    check_rules(cfg)
    if cfg.lora_from and cfg.kl_coef:
        raise ValueError(
            f"--kl_coef {cfg.kl_coef:g} with --lora_from: the reference would be the model without "
            f"these adapters; merge them, --init_from {cfg.lora_from}"
        )


def check_rules(cfg: Any) -> None:
    """Raises ValueError for flags that do not go together."""
    step = max(pieces(cfg), 1)
    n_pack = cfg.pack_tokens
    tokens = cfg.seq_len
    refuse(
        [
            (
                cfg.env in HINTS and not cfg.env_data,
                f"--env {cfg.env} needs --env_data FILE.jsonl, its problems",
            ),
            (
                not math.isfinite(cfg.failed_reward or 0),
                f"--failed_reward {cfg.failed_reward} must be a finite number, or none",
            ),
            (
                max(cfg.beta1, cfg.beta2) == 1,
                f"--beta1 {cfg.beta1} and --beta2 {cfg.beta2} must be below 1: 1 never moves",
            ),
            (
                cfg.pp > 1 and not cfg.engine and not cfg.gen_ranks,
                f"--pp {cfg.pp} needs --engine or --gen_ranks: a new token needs all layers; or "
                "use --tp, --cp",
            ),
            (
                not cfg.loss_parallel,
                "--no-loss_parallel: under tp log-probabilities are split over the vocabulary; "
                "leave it out",
            ),
            (
                cfg.load_only or cfg.exclude_from_loading,
                "--load_only, --exclude_from_loading: a run continues whole; leave it out",
            ),
            (
                cfg.batch_invariant and (cfg.compile or n_pack or cfg.tp * cfg.cp > 1),
                "--batch_invariant: --compile, --pack_tokens, --tp and --cp round otherwise than "
                "decoding does; leave them out",
            ),
            (
                cfg.compile and not n_pack,
                "--compile needs --pack_tokens: packed sequences have one length, rows another in "
                "each "
                f"forward; add --pack_tokens {-(-8 * tokens // step) * step}, or leave it out",
            ),
            (
                cfg.temperature < 1e-6,
                f"--temperature {cfg.temperature} must be above 0, at least 0.000001: greedy samples "
                "are all the same",
            ),
            (
                cfg.prompts_per_step % cfg.minibatches,
                f"--minibatches {cfg.minibatches} does not divide --prompts_per_step "
                f"{cfg.prompts_per_step}",
            ),
            (
                cfg.max_new_tokens >= tokens,
                f"--max_new_tokens {cfg.max_new_tokens} leaves no room for a prompt in --seq_len "
                f"{tokens}; raise --seq_len or lower --max_new_tokens",
            ),
            (
                0 < n_pack < tokens,
                f"--pack_tokens {n_pack} has no room for a sample of --seq_len {tokens}; use "
                "--pack_tokens "
                f"{-(-tokens // step) * step} or more",
            ),
            (
                n_pack % step,
                f"--pack_tokens {n_pack} is not a multiple of {step}, the pieces into which --tp "
                f"{cfg.tp} and --cp "
                f"{cfg.cp} cut a sequence; use --pack_tokens {-(-n_pack // step) * step}",
            ),
            (
                cfg.eval_n == 0,
                "--eval_n 0: evaluate on one prompt or more, or never, with --eval_every 0",
            ),
        ]
    )


def check_own_run(
    cfg: Any, Model: type, model_config: Any, lr_at: Callable[[int, Any], float] | None
) -> dict:
    """identify_run() for grpo.py. lr_at: the schedule, as a function of (step, cfg)."""
    lora = None
    if cfg.lora_rank:
        lora = claim_adapters(cfg, Model, model_config)
    needs_reference = cfg.kl_coef and not cfg.lora_rank and step_folders(cfg.out)
    if needs_reference and not step_folders(f"{cfg.out}/reference"):
        raise ValueError(
            f"--kl_coef: {cfg.out} has not kept its initial policy: it was begun without this "
            "flag; leave it out"
        )
    data = {"env": cfg.env, "seed": cfg.seed}
    if step_folders(cfg.out):  # the task may have had another name when the run began
        saved = read_json(newest_readable(cfg.out, names=ABOUT), "state.json")
        known_as = saved.get("identity", {}).get("data", {}).get("env")
        if RENAMED.get(known_as) == cfg.env:
            data["env"] = known_as
    return identify_run(cfg, Model, model_config, data, "adamw", lr_at, lora)
