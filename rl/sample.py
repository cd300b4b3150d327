"""A sample: what the policy says after a prompt, from its first token to its gradient."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Sample:
    """L = ids of the sample: those of the model, and those of a tool or a game.

    The decoder or a server fills the first part, the environment the second, set_advantages() and
    the trainer of grpo.py the third."""

    prompt: list[int] = field(default_factory=list)  # token ids
    ids: list[int] = field(default_factory=list)  # (L,) token ids
    # (L,) log-probability of each id, in nats, under the policy mu that sampled; 0.0 for an id that
    # the model did not choose
    logprobs: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)  # (L,) 1.0 for each id that is trained
    truncated: bool = False  # cut, at --max_new_tokens or --seq_len
    index: int = 0  # number of this sample among those that are drawn together
    begin: int = 0  # place in ids of the first one after the last reply of a tool or a game
    opened: bool = False  # the prompt has begun a thought

    group: int = 0  # number of its prompt
    task: str = ""  # as the environment knows the prompt
    answer: str = ""
    text: str = ""  # of the ids
    reward: float | None = None  # None: not paid yet, or not at all
    parts: dict[str, float] = field(default_factory=dict)  # of a reward with named parts
    failed: str = ""  # why there is no reward
    calls: int = 0  # of a tool, or steps of a game
    earned: float = 0.0  # rewards of the steps

    advantage: float | None = None
    # (L,) 1.0 for each id that the model chose; None: as mask
    sampled: list[float] | None = None
    # (L,) log-probability of each id under the policy before the step; None: as logprobs
    old: list[float] | None = None


def n_read(sample: Sample) -> int:
    """Input tokens of a sample: all but the last."""
    return len(sample.prompt) + len(sample.ids) - 1


def chosen_by_model(sample: Sample) -> list[float]:
    """(L,) 1.0 for each id that the model chose."""
    if sample.sampled is None:
        return sample.mask
    return sample.sampled
