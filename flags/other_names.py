"""The flag that somebody meant who typed an unknown flag: a name of an earlier version, of nanoGPT,
nanochat, torchtitan, Megatron-LM, TRL, verl, prime-rl, Hugging Face's Trainer or torchrun, or a name
with a slip.

config.py imports this file when a name is unknown. other_names.json is a table: our flag -> its
names elsewhere. If a name is in two rows, the first row with a flag of the program counts. answers.py
has the names that no flag can answer. A name of either table never gets a flag with similar letters.
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from flags.answers import ANSWERS
from flags.answers_rl import OF_DPO, OF_GRPO
from flags.files import read_json
from flags.gone import tell_gone

ELSEWHERE = read_json(Path(__file__).with_suffix(".json"))


def sentence_for(word: str, flags: Iterable[str]) -> str:
    """The text of the first answer to a name whose flag the program has; else ""."""
    for answer in ANSWERS:
        needed = answer.needs
        named = re.search(r"--(\w+)", answer.text)
        if named and not needed:
            needed = named[1]
        fits = not needed or needed in flags
        if fits and word in answer.names.split():
            return answer.text
    return ""


def flags_called(word: str) -> list[str]:
    """Our flags for a name elsewhere."""
    return [flag for flag, names in ELSEWHERE.items() if word in names.split()]


def ways_to_write(name: str) -> list[str]:
    """The ways in which a name may stand in the tables, the most special first. torchtitan and verl
    write sections before a name, training.seq_len, and enable_x for x; others write use_x."""
    parts = name.split(".")
    leaf = parts[-1]
    words = [name, ".".join(parts[-2:]), leaf, re.sub("^(use|enable)_", "", leaf)]
    return list(dict.fromkeys(words))


def suggest_flag(name: str, flags: Iterable[str]) -> str:
    """The answer to an unknown flag, or "". flags: all flags of the program."""
    special = []
    if "group_size" in flags:
        special = OF_GRPO
    elif "pairs_per_step" in flags:
        special = OF_DPO
    leaf = name.rpartition(".")[2]
    positive = leaf.removeprefix("disable_")
    if leaf != positive and positive in flags:
        return f"did you mean --no-{positive}?"
    elsewhere = []
    for word in ways_to_write(name):
        for answer in special:
            if word in answer.names.split():
                return answer.text
        ours = flags_called(word)
        for flag in (word, *ours):
            if flag in flags:
                return f"did you mean --{flag}?"
        answer = sentence_for(word, flags)
        if answer:
            return answer
        elsewhere += ours
    if elsewhere:
        return f"other programs of this project call it {elsewhere[0]}; this one has no such flag"
    for answer in ANSWERS + OF_GRPO + OF_DPO:
        if leaf in answer.names.split():
            return "a name of other projects, without a counterpart in this program"
    return ""


def did_you_mean(name: str, helps: dict, dashes: str) -> str:
    """ "did you mean --steps? " or "". Tries the name in our spelling, other projects' names, the
    words in a help text, then similar letters."""
    wanted = name.lstrip("-").lower().replace("-", "_")
    gone = tell_gone(wanted.removeprefix("no_"), helps)
    if gone:
        return f"{gone}; "
    if wanted not in helps and dashes:
        answer = suggest_flag(wanted, helps)
        if answer.endswith("?"):
            return f"{answer} "
        if answer:
            return f"{answer}; "
    wanted = re.sub(r"\W", "_", wanted)
    words = wanted.replace("_", " ").split()
    found = [name for name in helps if name == wanted]
    if len(words) > 1:
        phrase = " ".join(words)
        found += sorted((name for name in helps if phrase in helps[name].lower()), key=len)
    found += difflib.get_close_matches(wanted, helps, n=1)
    found += [word for word in words if word in helps]
    if found:
        return f"did you mean {dashes}{found[0]}? "
    return ""


def refuse_word(word: str, kinds: dict, helps: dict) -> str:
    """The usage error for an unknown word of the command line. kinds: {flag: type}."""
    if word.startswith("-"):
        flag = word.split("=")[0]
        negated = {f"no-{name}": "" for name in kinds if kinds[name] is bool}
        wish = did_you_mean(flag, helps | negated | {"config": ""}, "--")
        return f"unknown flag {flag}; {wish}--help lists all flags"
    wish = ""
    name, equals, _ = word.lstrip("+").partition("=")  # Hydra's: trainer.save_freq=20
    if "checkpoint" in helps:
        wish = f"did you mean --checkpoint {word}? "
    if "prompt" in helps and "/" not in word and not Path(word).exists():
        wish = f"did you mean --prompt {word!r}? "
    if equals and re.fullmatch(r"[\w.]+", name):
        wish = did_you_mean(name, helps | {"config": ""}, "--")
    return f"unexpected argument {word!r}; {wish}flags are written --name value, see --help"


def refuse_keys(path: str, unknown: dict, helps: dict) -> str:
    """The usage error for the unknown keys of a config.json. "" if all are flags of an earlier version
    that were switched off (false, 0, none or empty)."""
    for name in unknown:
        if not tell_gone(name, helps):
            wish = did_you_mean(name, helps, "")
            return f"{path}: unknown key {name!r}; {wish}--help lists all names"
    if not any(unknown.values()):
        return ""
    reasons = [f"{name} is {tell_gone(name, helps)}" for name in unknown]
    return (
        f"{path}: {', '.join(unknown)}: no flags of this version; {'; '.join(reasons)}; to go on, "
        "delete these keys from a copy of the file, and give that copy to --config"
    )
