"""The flag that somebody meant who typed an unknown flag: a name of an earlier version, of nanoGPT,
nanochat, torchtitan, TRL, Hugging Face's Trainer or torchrun, or a name with a slip.

config.py imports this file when a name is unknown. other_names.json has two tables:
elsewhere   our flag -> names elsewhere. If a name is in two rows, the first row with a flag of the program counts.
sentences   names -> an answer, if no row above has an answer and the program has the first flag of the sentence
"""

import difflib
import re
from pathlib import Path

from support.config import usage_error
from support.files import read_json

ELSEWHERE, SENTENCES = read_json(Path(__file__).with_suffix(".json")).values()


def suggest_flag(name: str, flags) -> str:
    """The answer to an unknown flag, or "". flags: all flags of the program.

    torchtitan writes a section before the name, training.seq_len, disable_x for no-x, and enable_x
    for x; others write use_x. A row with the section counts first: compile.enable.
    """
    leaf = name.rpartition(".")[2]
    if leaf.startswith("disable_") and leaf[8:] in flags:
        return f"did you mean --no-{leaf[8:]}?"
    for word in (name, leaf, re.sub("^(use|enable)_", "", leaf)):
        for flag in (word, *(flag for flag, names in ELSEWHERE.items() if word in names.split())):
            if flag in flags:
                return f"did you mean --{flag}?"
        for names, sentence in SENTENCES.items():
            if word in names.split() and all(
                flag in flags for flag in re.findall(r"--(\w+)", sentence)[:1]
            ):
                return sentence
    return ""


def did_you_mean(name: str, helps: dict, dashes: str) -> str:
    """ "did you mean --steps? " or "". Tries the name in our spelling, other projects' names, the
    words in a help text, then similar letters."""
    wanted = name.lstrip("-").lower().replace("-", "_")
    if wanted not in helps and dashes and (answer := suggest_flag(wanted, helps)):
        return answer + ("; ", " ")[answer.endswith("?")]
    wanted = re.sub(r"\W", "_", wanted)
    words = wanted.replace("_", " ").split()
    found = [n for n in helps if n == wanted]
    found += sorted(
        (n for n in helps if len(words) > 1 and " ".join(words) in helps[n].lower()), key=len
    )
    found += difflib.get_close_matches(wanted, helps, n=1) + [
        word for word in words if word in helps
    ]
    return f"did you mean {dashes}{found[0]}? " if found else ""


def refuse_unknown(word: str, kinds: dict, helps: dict):
    """End with a usage error for the first unknown word of the command line."""
    if word.startswith("-"):
        flag, negated = (
            word.split("=")[0],
            {f"no-{name}": "" for name in kinds if kinds[name] is bool},
        )
        usage_error(
            f"unknown flag {flag}; "
            f"{did_you_mean(flag, helps | negated | {'config': ''}, '--')}--help lists all flags"
        )
    wish = f"did you mean --checkpoint {word}? " if "checkpoint" in helps else ""
    usage_error(f"unexpected argument {word!r}; {wish}flags are written --name value, see --help")
