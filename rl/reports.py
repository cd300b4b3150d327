"""Output of a run of grpo.py: the first lines, the numbers of a step, and some samples."""
import json
import math
import os

import torch

from support.config import save_config
from support.metrics import drop_lines_from


def introduce(cfg, layout, reduces_always: bool, identity: dict, size: str, left_out: list[str], n_held_out: int, done: int):
    """Print and write the beginning of a run, on rank 0. done: steps of this run so far."""
    if done < cfg.steps:  # a finished run keeps the config.json of its training
        save_config(cfg, f"{cfg.out}/config.json", {"torch": torch.__version__, "world_size": layout.world_size, **identity})
    sampled_by = f"by {cfg.gen_ranks} generator ranks" if cfg.gen_ranks else f"by {cfg.engine}" if cfg.engine else "in place"
    print(f"{cfg.env}: {size} | {layout} on {layout.device.type}, {str(layout.compute_dtype)[6:]} | "
          f"{cfg.prompts_per_step} prompts x {cfg.group_size} samples per step, "
          f"{sampled_by}{', gradients reduced after each micro-batch' * reduces_always}", flush=True)
    for line in left_out:
        print(line)
    if cfg.eval_every and n_held_out < cfg.eval_n:
        print(f"--eval_n {cfg.eval_n}: there are {n_held_out} different held-out prompts, all of which are used")
    if done >= cfg.steps:
        print(f"{cfg.out} is finished: {done} of {cfg.steps} steps are done; use a larger --steps, or --out NEW")
        if cfg.export_hf and os.path.exists(cfg.export_hf):
            print(f"--export_hf {cfg.export_hf} is there already: nothing is exported; give a new folder, or remove it")
    drop_lines_from(f"{cfg.out}/samples.jsonl", done + 1)


def sample_numbers(groups: list[list[dict]], batch: dict) -> dict:
    """Numbers of metrics.jsonl about the samples of a step."""
    samples = sum(groups, [])
    rewards, lengths = torch.tensor([s["reward"] for s in samples]), torch.tensor([len(s["ids"]) for s in samples]).float()
    equal = [len({s["reward"] for s in group}) == 1 for group in groups]
    failed = [flat and group[0]["reward"] == 0 for flat, group in zip(equal, groups)]
    seconds = batch["ended"] - batch["began"]
    return dict(
        reward_mean=rewards.mean(), reward_std=rewards.std(unbiased=False), prompts_drawn=batch["drawn"],
        prompts_too_long=batch["too_long"], zero_variance_groups=torch.tensor(equal).float().mean(),
        all_failed_groups=sum(failed) / len(groups),
        length_mean=lengths.mean(), length_max=lengths.max(), truncated=sum(s["truncated"] for s in samples) / len(samples),
        failed_rewards=sum(bool(s.get("failed")) for s in samples),
        rollout_s=seconds, rollout_tokens_per_second=lengths.sum() / max(seconds, 1e-9), rollout_began=batch["began"],
        rollout_ended=batch["ended"])


def show_step(cfg, step: int, line: dict):
    """Print the line of a step."""
    print(f"step {step}/{cfg.steps}  reward {line['reward_mean']:.3f}  loss {line['loss']:+.4f}  entropy {line['entropy']:.3f}"
          f"  length {line['length_mean']:.1f}  equal {line['zero_variance_groups']:.0%}  k3 {line['logprob_k3']:.0e}"
          f"  grad_norm {line['grad_norm']:.3f}  rollout {line['rollout_s']:.2f} s  train {line['train_s']:.2f} s"
          + f"  {line['prompts_too_long']} prompts too long" * (line["prompts_too_long"] > 0), flush=True)


def keep_samples(cfg, step: int, samples: list[dict], text):
    """Append the first --log_samples of a step to samples.jsonl, samples of one prompt next to each other."""
    with open(f"{cfg.out}/samples.jsonl", "a") as file:
        for s in samples[: cfg.log_samples]:
            # with the special tokens of the chat template, as seen by the model
            prompt = text.tokenizer.decode(s["prompt"], skip_special_tokens=False)
            shown = {"step": step, "prompt": prompt, "completion": s["text"]}
            shown |= {k: s[k] for k in ("reward", "advantage", "truncated")}
            file.write(json.dumps(shown, ensure_ascii=False) + "\n")


def show_evaluation(cfg, step: int, line: dict):
    """Print the line of an evaluation, from the result of held_out_numbers()."""
    names = ("eval_reward", "eval_pass_at_k")
    errors = [math.nan if line[f"{name}_stderr"] is None else line[f"{name}_stderr"] for name in names]
    shown = [f"{line[name]:.4f} +- {error:.4f}" for name, error in zip(names, errors)]
    print(f"step {step}/{cfg.steps}  eval_reward {shown[0]}  greedy {line['eval_greedy']:.4f}  "
          f"pass@{cfg.eval_k} {shown[1]}  ({line['eval_n']} held-out prompts)", flush=True)
