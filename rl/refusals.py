"""Refusals of grpo.py: wrong flags, and runs that cannot be continued. One line each, before anything is built."""
import math
import os
from dataclasses import asdict

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
    check_range(cfg, 0, 1, "beta1", "beta2", "min_lr_ratio")
    step = max(pieces(cfg), 1)
    n = int(os.environ.get("WORLD_SIZE", 1))
    for wrong, message in [
        (max(cfg.beta1, cfg.beta2) == 1, f"--beta1 {cfg.beta1} and --beta2 {cfg.beta2} must be below 1: a mean that "
         "never moves"),
        (cfg.pp > 1, f"--pp {cfg.pp}: a new token needs all layers, so a pipeline would idle; use --tp, --dp_shard or "
         "--cp"),
        (not cfg.loss_parallel, "--no-loss_parallel: under tp the log-probabilities of a token are always split over the "
         "vocabulary; leave it out"),
        (cfg.load_only, "--load_only: grpo.py writes no checkpoint with --checkpoint_every 0; use that flag"),
        (cfg.exclude_from_loading, f"--exclude_from_loading {','.join(cfg.exclude_from_loading)}: a policy needs all of its "
         "weights; for a new optimizer start a new run from them, with --init_from"),
        (cfg.compile and cfg.batch_invariant, "--batch_invariant with --compile: compiled blocks round differently from those "
         "of rollouts, which are not compiled; leave one of them out"),
        (cfg.compile and not cfg.pack_tokens, "--compile needs --pack_tokens: packed sequences have one length, rows of "
         f"samples another in every forward; add --pack_tokens {-(-8 * cfg.seq_len // step) * step}, or leave it out"),
        (cfg.temperature <= 0, f"--temperature {cfg.temperature} must be above 0: greedy samples are all the same"),
        (cfg.prompts_per_step % cfg.minibatches,
         f"--minibatches {cfg.minibatches} does not divide --prompts_per_step {cfg.prompts_per_step}"),
        (cfg.group_size == 1, "--group_size 1: an advantage is a reward compared with others of the same prompt, so it "
         "would be 0; use 2 or more"),
        (cfg.max_new_tokens >= cfg.seq_len, f"--max_new_tokens {cfg.max_new_tokens} leaves no room for a prompt in "
         f"--seq_len {cfg.seq_len}, which holds both; raise --seq_len or lower --max_new_tokens"),
        (cfg.batch_invariant and (cfg.tp > 1 or cfg.cp > 1), "--batch_invariant: sums over tp or cp ranks round differently in "
         "decoding and in training; leave these out"),
        (cfg.pack_tokens and cfg.batch_invariant, f"--batch_invariant with --pack_tokens {cfg.pack_tokens}: samples "
         "in one sequence are not computed as they were sampled; leave one of them out"),
        (0 < cfg.pack_tokens < cfg.seq_len, f"--pack_tokens {cfg.pack_tokens} has no room for a sample of --seq_len "
         f"{cfg.seq_len}; use --pack_tokens {-(-cfg.seq_len // step) * step} or more"),
        (cfg.pack_tokens % step, f"--pack_tokens {cfg.pack_tokens} is not a multiple of {step}, the pieces into which --tp "
         f"{cfg.tp} and --cp {cfg.cp} cut a sequence; use --pack_tokens {-(-cfg.pack_tokens // step) * step}"),
        (cfg.eval_n == 0, "--eval_n 0: evaluate on one prompt or more, or never, with --eval_every 0"),
        (cfg.gen_ranks and not 0 < cfg.gen_ranks < n, f"--gen_ranks {cfg.gen_ranks} must leave a process to train: "
         f"{n} were started, use torchrun --nproc_per_node"),
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
        raise ValueError(f"--kl_coef {cfg.kl_coef}: {cfg.out} has not kept its initial policy: it was begun without this "
                         "flag, or by an older grpo.py; leave it out, or use --out NEW")
    if cfg.export_hf and all(step < cfg.steps for step, _ in step_folders(cfg.out)):
        check_export(cfg.export_hf, Model, model_config)
    return identity
