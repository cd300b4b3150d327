"""Messages of grpo.py to its user: the first lines of a run, the numbers of a step and of an
evaluation, some samples."""

import json
import math
import os
from collections.abc import Collection
from contextlib import suppress
from itertools import chain
from typing import Any

import torch

from distributed.layout import Layout
from flags import VERSION
from flags.config import save_config
from rl.datasets import Text
from rl.rollouts import has_equal_rewards
from rl.sample import Sample
from storage.resume import list_finished
from training.metrics import drop_lines_from, set_lines_aside

FEW = 20  # steps without much to learn before a line says so


def introduce(
    cfg: Any,
    layout: Layout,
    reduces_always: bool,
    identity: dict,
    size: str,
    left_out: list[str],
    done: int,
) -> None:
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
    if done:
        drop_lines_from(f"{cfg.out}/samples.jsonl", done + 1)
    else:
        set_lines_aside(f"{cfg.out}/samples.jsonl")


def sample_numbers(groups: list[list[Sample]], batch: dict) -> dict:
    """Numbers of metrics.jsonl about the samples of a step."""
    samples = sum(groups, [])
    rewards = torch.tensor([s.reward for s in samples])
    advantages = torch.tensor([s.advantage for s in samples])
    lengths = torch.tensor([len(s.ids) for s in samples]).float()
    equal = []
    n_failed = 0
    for group in groups:
        equal.append(has_equal_rewards(group))
        n_failed += equal[-1] and group[0].reward == 0
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
        truncated=sum(s.truncated for s in samples) / len(samples),
        failed_rewards=sum(s.failed != "" for s in samples),
        advantage_mean=advantages.mean(),
        advantage_std=advantages.std(unbiased=False),
        tool_calls=sum(s.calls for s in samples) / len(samples),
        rollout_s=seconds,
        rollout_tokens_per_second=lengths.sum() / max(seconds, 1e-9),
        rollout_began=batch["began"],
        rollout_ended=batch["ended"],
    )


def means_of_parts(samples: list[Sample]) -> dict[str, float]:
    """Of rewards with named parts: the mean of each part over all samples."""
    parts = [s.parts for s in samples]
    means = {}
    for name in dict.fromkeys(chain(*parts)):
        means[f"reward_part_{name}"] = sum(part.get(name, 0.0) for part in parts) / len(parts)
    return means


def show_step(cfg: Any, step: int, line: dict) -> None:
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


def warn_of_equal_rewards(recent) -> None:
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


def mean_of(lines: Collection[dict], name: str) -> float:
    return sum(float(line[name]) for line in lines) / len(lines)


def keep_samples(
    cfg: Any, step: int, samples: list[Sample], text: Text, evaluation: bool = False
) -> None:
    """Append the first --log_samples of these to samples.jsonl."""
    lines = ""
    for s in samples[: cfg.log_samples]:
        # with the special tokens of the chat template, as seen by the model
        prompt = text.tokenizer.decode(s.prompt, skip_special_tokens=False)
        shown = {
            "step": step,
            "evaluation": evaluation,
            "prompt": prompt,
            "completion": s.text,
        }
        for name in ("task", "answer", "reward", "advantage", "truncated", "group", "ids"):
            if getattr(s, name) is not None:
                shown[name] = getattr(s, name)
        lines += json.dumps(shown, ensure_ascii=False, default=list) + "\n"
    path = f"{cfg.out}/samples.jsonl"
    size = None
    try:
        with open(path, "a") as file:
            size = file.tell()
            file.write(lines)
    except OSError as error:  # a full disk must not end a run for texts that are there to be read
        if size is not None:
            with suppress(OSError):
                os.truncate(path, size)  # no half line
        print(
            f"step {step}: {path} cannot be written ({error.strerror}): its samples are left out",
            flush=True,
        )


def show_evaluation(cfg: Any, step: int, line: dict) -> None:
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


def show_warm_up(cfg: Any, losses: list[float]) -> None:
    """Print that the supervised warm-up goes on. losses: of its steps so far."""
    print(
        f"supervised warm-up: step {len(losses)} of at most {cfg.sft_steps}, loss "
        f"{losses[-1]:.3f} (ends below {cfg.sft_loss:g})",
        flush=True,
    )


def show_end_of_warm_up(losses: list[float]) -> None:
    line = "no supervised warm-up"
    if losses:
        line = f"supervised warm-up: {len(losses)} steps, loss {losses[-1]:.3f}"
    print(line, flush=True)
