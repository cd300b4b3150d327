"""Refusals of grpo.py: wrong flags, and runs that cannot be continued. One line each, before anything is built."""
import math
import os
from dataclasses import asdict

from rl.datasets import HINTS
from rl.packing import pieces
from sft.base import claim_adapters
from storage.hf import check_export
from storage.manifest import step_folders
from storage.resume import check_run
from support.config import check_range


def check_flags(cfg):
    """Raises ValueError for flags that do not work in grpo.py. check_layout compares flags with the model."""
    check_range(cfg, 1, math.inf, "steps", "prompts_per_step", "group_size", "minibatches", "max_new_tokens",
                "local_batch_size", "rollout_rows", "rollout_timeout_s", "eval_k")
    check_range(cfg, 0, math.inf, "lr", "sft_lr", "eps", "weight_decay", "max_norm", "kl_coef", "tis", "clip_low",
                "clip_high", "async_steps")
    check_range(cfg, 0, 1e9, "reward_timeout_s")
    check_range(cfg, 1, 10_000, "reward_threads")
    check_range(cfg, 0, 1, "beta1", "beta2", "min_lr_ratio")
    step = max(pieces(cfg), 1)
    n = int(os.environ.get("WORLD_SIZE", 1))
    n_pack, tokens = cfg.pack_tokens, cfg.seq_len
    for wrong, message in [
        (cfg.env in HINTS and not cfg.env_data, f"--env {cfg.env} needs --env_data FILE.jsonl, its problems"),
        (not math.isfinite(cfg.failed_reward or 0), f"--failed_reward {cfg.failed_reward} must be a finite number, or none"),
        (max(cfg.beta1, cfg.beta2) == 1, f"--beta1 {cfg.beta1} and --beta2 {cfg.beta2} must be below 1: 1 never moves"),
        (cfg.pp > 1, f"--pp {cfg.pp}: a new token needs all layers, so a pipeline would idle; use --tp, --dp_shard or --cp"),
        (not cfg.loss_parallel, "--no-loss_parallel: under tp log-probabilities are split over the vocabulary; leave it out"),
        (cfg.load_only, "--load_only: grpo.py writes no checkpoint with --checkpoint_every 0; use that flag"),
        (cfg.exclude_from_loading, f"--exclude_from_loading {','.join(cfg.exclude_from_loading)}: a policy needs all of its "
         "weights; for a new optimizer start a new run from them, with --init_from"),
        (cfg.batch_invariant and (cfg.compile or n_pack or cfg.tp * cfg.cp > 1),
         "--batch_invariant: --compile, --pack_tokens, --tp and --cp round otherwise than decoding does; leave them out"),
        (cfg.compile and not n_pack, "--compile needs --pack_tokens: packed sequences have one length, rows another in each "
         f"forward; add --pack_tokens {-(-8 * tokens // step) * step}, or leave it out"),
        (cfg.temperature <= 0, f"--temperature {cfg.temperature} must be above 0: greedy samples are all the same"),
        (cfg.prompts_per_step % cfg.minibatches,
         f"--minibatches {cfg.minibatches} does not divide --prompts_per_step {cfg.prompts_per_step}"),
        (cfg.group_size == 1, "--group_size 1: an advantage is a reward compared with others of its prompt; use 2 or more"),
        (cfg.max_new_tokens >= tokens, f"--max_new_tokens {cfg.max_new_tokens} leaves no room for a prompt in --seq_len "
         f"{tokens}; raise --seq_len or lower --max_new_tokens"),
        (0 < n_pack < tokens, f"--pack_tokens {n_pack} has no room for a sample of --seq_len {tokens}; use --pack_tokens "
         f"{-(-tokens // step) * step} or more"),
        (n_pack % step, f"--pack_tokens {n_pack} is not a multiple of {step}, the pieces into which --tp {cfg.tp} and --cp "
         f"{cfg.cp} cut a sequence; use --pack_tokens {-(-n_pack // step) * step}"),
        (cfg.eval_n == 0, "--eval_n 0: evaluate on one prompt or more, or never, with --eval_every 0"),
        (cfg.gen_ranks and not 0 < cfg.gen_ranks < n, f"--gen_ranks {cfg.gen_ranks} must leave a process to train: {n} were "
         "started, use torchrun --nproc_per_node"),
    ]:
        if wrong:
            raise ValueError(message)


def check_own_run(cfg, Model, model_config, lr_at) -> dict:
    """Raises ValueError if --out cannot be continued, or --export_hf cannot be written. Returns the identity of the run, equal
    in every continued run. lr_at: the schedule, as a function of (step, cfg)."""
    model = {"module": Model.__module__, "class": Model.__name__, **asdict(model_config)}
    identity = {"model": model, "data": {"env": cfg.env, "seed": cfg.seed}, "optimizer": {"name": "adamw"}}
    identity |= {"lora": claim_adapters(cfg, Model, model_config)} if cfg.lora_rank else {}
    check_run(cfg.out, identity, cfg, lr_at)
    if cfg.kl_coef and not cfg.lora_rank and step_folders(cfg.out) and not step_folders(f"{cfg.out}/reference"):
        raise ValueError(f"--kl_coef: {cfg.out} has not kept its initial policy: it was begun without this flag; leave it out")
    if cfg.export_hf and all(step < cfg.steps for step, _ in step_folders(cfg.out)):
        check_export(cfg.export_hf, Model, model_config)
    return identity
