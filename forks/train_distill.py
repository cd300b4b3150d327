"""On-policy distillation (arXiv:2306.13649): grpo.py with a teacher in place of the rewards.

    python forks/train_distill.py --teacher LARGE_FOLDER --init_from SMALL_FOLDER --env dataset --env_data prompts.jsonl
    torchrun --nproc_per_node 4 forks/train_distill.py --teacher LARGE_FOLDER --init_from SMALL_FOLDER --env my_env.py --tp 2

The policy samples, and the teacher says how likely each sampled token is. The reverse KL divergence
of policy pi and teacher q, KL(pi | q) = E_pi[log pi(y_t) - log q(y_t)] per token, falls with a
policy gradient whose advantages are

    A_t = log q(y_t) - log mu(y_t)

so a token has an advantage of its own, positive where the teacher likes it better than the sampler
mu. No answer and no reward is needed; rewards are still computed, logged and evaluated, and so are
their advantages. `kl` of metrics.jsonl is KL(pi | q) per token, the mean of log pi(y_t) - log
q(y_t).

This file is the difference from grpo.py, and takes all the rest from there: sampling, losses,
layouts, --gen_ranks, --engine, --async_steps, --lora_rank. A comment that begins with "distill:"
says where a part differs from the part of grpo.py with the same name. A run writes runs/distill/,
with the files of grpo.py.
"""

import os
import sys
from dataclasses import dataclass, replace

# distill: beside the folder of the rest
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grpo
from distributed.refusals import check_layout
from flags.config import given_flags
from rl.datasets import Text, open_task
from rl.environments import alphabet_of
from rl.policy import build_policy, model_of
from storage.loading import load_weights
from tools.run import run

# distill: flags about advantages that come from rewards, and about another reference
OF_REWARDS = ("kl_coef", "std_norm", "dynamic_sampling", "overlong_tokens")


@dataclass(kw_only=True)
class Config(grpo.Config):
    REFUSED = (*grpo.Config.REFUSED, *OF_REWARDS)
    teacher: str = ""  # a Hugging Face, run or step folder; with the policy's tokenizer
    # folder for all files of the run; the same folder again continues the run
    out: str = "runs/distill"

    def __post_init__(self):
        super().__post_init__()
        for name in given_flags(self).keys() & OF_REWARDS:
            raise ValueError(
                f"--{name}: advantages come from the teacher, not from rewards; leave it out"
            )


# differs from grpo: the reference is the teacher, and teaches
class Trainer(grpo.Trainer):
    rewarded = False

    def __init__(self, cfg, layout, model, reference=None):
        about = replace(cfg, init_from=cfg.teacher, model_args="", lora_rank=0)
        Model, config = model_of(about, 0)
        check_layout(
            cfg,
            config,
            seq_len=cfg.seq_len,
            local_batch_size=cfg.local_batch_size * cfg.pp,
            global_batch_size=-1,
            device=cfg.device,
            world_size=layout.world_size,
        )
        unknown = Text(cfg.teacher).unknown_ids(config.vocab_size, layout.device)
        teacher = build_policy(about, layout, Model, config, unknown, lambda fqn: True)
        load_weights([teacher], cfg.teacher)
        super().__init__(cfg, layout, model, teacher)

    def reference_logprobs(self, b):  # before the loss: each token gets an advantage of its own
        logprobs = super().reference_logprobs(b)
        b["advantage"] = logprobs - b["mu"]
        return logprobs

    # k1: the exponential of k3 is huge where the teacher is sure and the policy is not
    def divergence(self, d):
        return -d


# differs from grpo: the teacher must read the policy's tokens
def main(cfg: Config):
    if not cfg.teacher:
        raise ValueError("distillation needs a teacher: --teacher FOLDER")
    alphabet = alphabet_of(open_task(cfg))
    ours = Text(cfg.init_from, cfg.out, alphabet).tokenizer.get_vocab()
    theirs = Text(cfg.teacher, cfg.out, alphabet).tokenizer.get_vocab()
    if ours != theirs:
        raise ValueError(
            f"--teacher {cfg.teacher} has another vocabulary, {len(theirs):,} tokens, than the "
            f"policy, {len(ours):,}: a token's number would mean another text; choose a teacher "
            "with the same tokenizer"
        )
    return grpo.main(cfg, Trainer)


if __name__ == "__main__":
    run(main, Config)
