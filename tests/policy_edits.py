"""Edits of grpo.py and its forks, as people make them: some train another policy in every layout,
some do not. For tests of --check_parity."""

from pathlib import Path
from typing import NamedTuple

from runs import REPO


class Edit(NamedTuple):
    differs: str  # a cut of --check_parity that must differ, "" for an edit that is right
    flags: str
    changes: list[tuple[str, str]]  # text of the file, what takes its place
    no_effect: bool = False


RETURN = "        return per_token, clipped * mask, kl\n"
TOKENS = '        tokens = Tokens(lp, old, b["advantage"], mask, b["n"], sequence_sum)\n'
WEIGHT = "        per_token = -objective * (mask / n)\n"
Z = "        z = loss_denominator(loss.divisor, counted or samples, cfg.max_new_tokens)\n"
SCORES = "        scores.append(s.reward + penalty)\n"


def weight_is(text: str) -> tuple[str, str]:
    return WEIGHT, f"        per_token = -objective * ({text})\n"


def before_return(*lines: str) -> tuple[str, str]:
    return RETURN, "".join(f"        {line}\n" for line in lines) + RETURN


GRPO = {
    "mean_of_the_forward": Edit("--local_batch_size", "", [weight_is("mask / mask.sum()")]),
    "whitened_in_the_loss": Edit(
        "--pack_tokens",
        "",
        [
            (
                TOKENS,
                '        a = b["advantage"]\n'
                + "        a = (a - a.mean()) / (a.std() + 1e-6)\n"
                + TOKENS.replace('b["advantage"]', "a"),
            )
        ],
    ),
    "weight_by_mean_length": Edit(
        "--local_batch_size", "", [weight_is('mask * b["n"] / b["n"].mean()')]
    ),
    "mask_shifted": Edit(
        "--cp",
        "",
        [(TOKENS, "        mask = torch.nn.functional.pad(mask[:, 1:], (0, 1))\n" + TOKENS)],
    ),
    "denominator_of_a_rank": Edit(
        "--dp_shard", "", [(Z, Z.replace("counted or samples", "share"))]
    ),
    "padded_length": Edit("--pack_tokens", "", [weight_is("mask / mask.shape[1]")]),
    "most_uncertain_tokens": Edit(
        "--local_batch_size",
        "",
        [
            before_return(
                'some = entropy.detach()[b["mask"] > 0]',
                "limit = some.quantile(0.8) if len(some) else 0.0",
                "per_token = per_token * (entropy.detach() >= limit)",
            )
        ],
    ),
    "sum_of_a_row": Edit(
        "--cp",
        "--loss gspo",
        [("t.sequence_sum(log_ratio.detach())", "log_ratio.detach().sum(1, keepdim=True)")],
    ),
    "discount_along_the_row": Edit(
        "--pack_tokens",
        "",
        [weight_is("mask * 0.9 ** torch.arange(mask.shape[1])")],
    ),
    "denominator_over_ranks": Edit(
        "--tp",
        "",
        [("self.denominator += z\n", "self.denominator += z / self.layout.world_size\n")],
    ),
    "std_of_the_step": Edit(
        "",
        "",
        [
            (
                "        # (5) loss, (6) optimizer\n",
                "        std = torch.tensor([s.advantage for s in samples]).std().item()\n"
                "        for s in samples:\n"
                "            s.advantage /= std + 1e-6\n\n"
                "        # (5) loss, (6) optimizer\n",
            )
        ],
    ),
    "length_in_the_reward": Edit(
        "", "", [(SCORES, SCORES.replace("penalty", "penalty - 0.05 * len(s.ids)"))]
    ),
    "token_k2": Edit(
        "", "", [before_return("per_token = per_token + 0.05 * (lp - mu) ** 2 * mask")]
    ),
    "entropy_of_samples": Edit(
        "", "", [before_return("per_token = per_token + 0.1 * lp.detach() * lp * mask")]
    ),
    "tool_tokens_too": Edit("", "", [(TOKENS, '        mask = (b["at"] >= 0).float()\n' + TOKENS)]),
    "entropy_bonus": Edit("", "", [before_return("per_token = per_token - 0.5 * entropy * mask")]),
    "detached_bonus": Edit(
        "", "", [before_return("per_token = per_token - 0.5 * lp.detach() * mask")], True
    ),
}

SCORED = """\
        table[0, b["at"]] = forward(trainer.model, b, layout)[0]
        table[1, b["at"]] = trainer.reference_logprobs(b)
"""


def scored_over(count: str) -> str:
    """The same lines, with all log-probabilities divided by a count."""
    return SCORED.replace("layout)[0]", f"layout)[0] / {count}").replace(
        "logprobs(b)", f"logprobs(b) / {count}"
    )


DPO = {
    "mean_per_answer": Edit("", "", [(SCORED, scored_over('b["n"]'))]),
    "denominator_of_a_rank": Edit(
        "--dp_shard",
        "",
        [
            (
                "    trainer.denominator = len(pairs)\n",
                "    trainer.denominator = len(pairs) / trainer.layout.data_ranks\n",
            )
        ],
    ),
    "smoothed_labels": Edit(
        "",
        "",
        [("beta * torch.sigmoid(-margin)", "beta * (torch.sigmoid(-margin) - 0.1)")],
    ),
    "mean_per_row": Edit(
        "--pack_tokens",
        "",
        [(SCORED, scored_over('b["mask"].sum(1, keepdim=True)'))],
    ),
}

ADVANTAGE = '        b["advantage"] = logprobs - b["mu"]\n'


ADVANTAGE_LINE = '        a = logprobs - b["mu"]\n'


def advantage_is(text: str) -> tuple[str, str]:
    return ADVANTAGE, f'{ADVANTAGE_LINE}        b["advantage"] = {text}\n'


DISTILL = {
    "whitened": Edit("--local_batch_size", "", [advantage_is("(a - a.mean()) / (a.std() + 1e-6)")]),
    "largest_gaps": Edit(
        "--dp_shard",
        "",
        [
            advantage_is("a * (a.abs() >= limit)"),
            (
                ADVANTAGE_LINE,
                ADVANTAGE_LINE + '        seen = a[b["mask"] > 0].abs()\n'
                "        limit = seen.quantile(0.5) if len(seen) else 0.0\n",
            ),
        ],
    ),
    "mean_of_a_row": Edit(
        "--pack_tokens", "", [advantage_is('(a * b["mask"]).sum(1, keepdim=True) / b["n"]')]
    ),
    "clamped": Edit("", "", [advantage_is("a.clamp(-0.05, 0.05)")]),
}
EDITS = {"grpo.py": GRPO, "forks/train_dpo.py": DPO, "forks/train_distill.py": DISTILL}


def write_edit(program: str, name: str, folder) -> Path:
    """A copy of the program with this edit, in the folder."""
    text = (REPO / program).read_text()
    for old, new in EDITS[program][name].changes:
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    file = Path(folder) / f"my_{Path(program).name}"
    file.write_text(text)
    return file
