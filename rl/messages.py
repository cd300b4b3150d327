"""Messages of grpo.py to its user: refusals of wrong flags, before anything is built; the first
lines of a run; the numbers of a step and of an evaluation; some samples."""

import json
import math
from itertools import chain

import torch

from distributed.refusals import refuse
from flags import VERSION
from flags.config import check_range, save_config
from flags.files import read_json, step_folders
from lora.lora import claim_adapters
from rl.datasets import HINTS
from rl.environments import RENAMED
from rl.packing import pieces
from rl.rollouts import has_equal_rewards
from storage.newest import ABOUT, newest_readable
from storage.resume import identify_run, list_finished
from training.metrics import drop_lines_from

FEW = 20  # steps without much to learn before a line says so


# ---------------------------------------------------------------- refusals
def check_flags(cfg):
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


def check_rules(cfg):
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


def check_own_run(cfg, Model, model_config, lr_at) -> dict:
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


# ---------------------------------------------------------------- output
def introduce(
    cfg, layout, reduces_always: bool, identity: dict, size: str, left_out: list[str], done: int
):
    """Print and write the beginning of a run, on rank 0. done: steps of this run so far."""
    if done < cfg.steps:  # a finished run keeps the config.json of its training
        about = {"version": VERSION, "torch": torch.__version__, "world_size": layout.world_size}
        save_config(cfg, f"{cfg.out}/config.json", about | identity)
    if cfg.gen_ranks:
        sampled_by = f"by {cfg.gen_ranks} generator ranks"
    elif cfg.engine:
        sampled_by = f"by {cfg.engine}"
    else:
        sampled_by = "in place"
    judged = ""
    if cfg.env == "dataset":
        judged = f", judged by {cfg.reward}"
    reduced = ""
    if reduces_always:
        reduced = ", gradients reduced after each micro-batch"
    print(
        f"{cfg.env}{judged}: {size} | {layout} on {layout.device.type}, "
        f"{str(layout.compute_dtype)[6:]} | "
        f"{cfg.prompts_per_step} prompts x {cfg.group_size} samples per step, "
        f"{sampled_by}{reduced}",
        flush=True,
    )
    if cfg.init_from and (cfg.max_new_tokens, cfg.seq_len) == (16, 32):
        left_out.append(
            "--max_new_tokens 16 and --seq_len 32 suit the small model; the model of --init_from "
            "may need more"
        )
    for line in [*left_out, *list_finished(cfg.out, done, cfg.steps, cfg.export_hf)]:
        print(line)
    drop_lines_from(f"{cfg.out}/samples.jsonl", done + 1)


def sample_numbers(groups: list[list[dict]], batch: dict) -> dict:
    """Numbers of metrics.jsonl about the samples of a step."""
    samples = sum(groups, [])
    rewards = torch.tensor([s["reward"] for s in samples])
    advantages = torch.tensor([s["advantage"] for s in samples])
    lengths = torch.tensor([len(s["ids"]) for s in samples]).float()
    equal = []
    n_failed = 0
    for group in groups:
        equal.append(has_equal_rewards(group))
        n_failed += equal[-1] and group[0]["reward"] == 0
    seconds = batch["ended"] - batch["began"]
    return means_of_parts(samples) | dict(
        reward_mean=rewards.mean(),
        reward_std=rewards.std(unbiased=False),
        prompts_drawn=batch["drawn"],
        prompts_too_long=batch["too_long"],
        zero_variance_groups=torch.tensor(equal).float().mean(),
        all_failed_groups=n_failed / len(groups),
        length_mean=lengths.mean(),
        length_max=lengths.max(),
        truncated=sum(s["truncated"] for s in samples) / len(samples),
        failed_rewards=sum(bool(s.get("failed")) for s in samples),
        advantage_mean=advantages.mean(),
        advantage_std=advantages.std(unbiased=False),
        tool_calls=sum(s.get("calls", 0) for s in samples) / len(samples),
        rollout_s=seconds,
        rollout_tokens_per_second=lengths.sum() / max(seconds, 1e-9),
        rollout_began=batch["began"],
        rollout_ended=batch["ended"],
    )


def means_of_parts(samples: list[dict]) -> dict[str, float]:
    """Of rewards with named parts: the mean of each part over all samples."""
    parts = [s.get("parts", {}) for s in samples]
    means = {}
    for name in dict.fromkeys(chain(*parts)):
        means[f"reward_part_{name}"] = sum(part.get(name, 0.0) for part in parts) / len(parts)
    return means


def show_step(cfg, step: int, line: dict):
    """Print the line of a step."""
    long = ""
    if line["prompts_too_long"] > 0:
        long = f"  {line['prompts_too_long']} prompts too long"
    print(
        f"step {step}/{cfg.steps}  reward {line['reward_mean']:.3f}  loss {line['loss']:+.4f}  "
        f"entropy {line['entropy']:.3f}"
        f"  length {line['length_mean']:.1f}  equal {line['zero_variance_groups']:.0%}  k3 "
        f"{line['logprob_k3']:.0e}"
        f"  grad_norm {line['grad_norm']:.3f}  rollout {line['rollout_s']:.2f} s  train "
        f"{line['train_s']:.2f} s{long}",
        flush=True,
    )


def warn_of_equal_rewards(recent):
    """Print one line, and forget `recent`, if in its FEW steps most groups had equal rewards: such
    groups teach nothing."""
    equal = mean_of(recent, "zero_variance_groups")
    failed = mean_of(recent, "all_failed_groups")
    cut = mean_of(recent, "truncated")
    if len(recent) == FEW and equal > 0.7:
        print(
            f"the last {FEW} steps taught little: {equal:.0%} of the groups had equal rewards "
            f"({failed:.0%} all 0), "
            f"{cut:.0%} of the samples were cut; try other prompts, --group_size 16, "
            "--dynamic_sampling 2, more "
            "--sft_steps, or longer --max_new_tokens",
            flush=True,
        )
        recent.clear()


def mean_of(lines, name: str) -> float:
    return sum(float(line[name]) for line in lines) / len(lines)


def keep_samples(cfg, step: int, samples: list[dict], text, evaluation=False):
    """Append the first --log_samples of these to samples.jsonl."""
    with open(f"{cfg.out}/samples.jsonl", "a") as file:
        for s in samples[: cfg.log_samples]:
            # with the special tokens of the chat template, as seen by the model
            prompt = text.tokenizer.decode(s["prompt"], skip_special_tokens=False)
            shown = {
                "step": step,
                "evaluation": evaluation,
                "prompt": prompt,
                "completion": s["text"],
            }
            for name in ("task", "answer", "reward", "advantage", "truncated", "group", "ids"):
                if name in s:
                    shown[name] = s[name]
            file.write(json.dumps(shown, ensure_ascii=False, default=list) + "\n")


def show_evaluation(cfg, step: int, line: dict):
    """Print the line of an evaluation, from the result of held_out_numbers()."""
    shown = []
    for name in ("eval_reward", "eval_pass_at_k"):
        error = line[f"{name}_stderr"]
        if error is None:
            error = math.nan
        shown.append(f"{line[name]:.4f} +- {error:.4f}")
    print(
        f"step {step}/{cfg.steps}  eval_reward {shown[0]}  greedy {line['eval_greedy']:.4f}  "
        f"pass@{cfg.eval_k} {shown[1]}  ({line['eval_n']} held-out prompts)",
        flush=True,
    )
