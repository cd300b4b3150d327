"""Names of flags in earlier versions, in nanoGPT, nanochat, torchtitan, TRL, Hugging Face's Trainer and torchrun, and the
flags to type instead.

config.py imports this file when a command line has an unknown flag. other_names.json has four tables:
elsewhere   our flag -> names elsewhere. If a name is in two rows, the first row with a flag of the program counts.
sentences   names -> an answer, if no row above has an answer and the program has the first flag of the sentence
free        keys of earlier versions' config.json that change no training, whatever their value
at_rest     keys that change training, and the value without an effect
"""
import re
from pathlib import Path

from support.files import read_json

ELSEWHERE, SENTENCES, FREE, AT_REST = read_json(Path(__file__).with_suffix(".json")).values()


def is_gone(name: str, value) -> bool:
    """Whether a key of a saved config.json is a flag of an earlier version, and can be left out without another training."""
    return name in FREE.split() or name in AT_REST and value == AT_REST[name]


def suggest_flag(name: str, flags) -> str:
    """The answer to an unknown flag, or "". flags: all flags of the program.

    torchtitan writes a section before the name, training.seq_len; nanoGPT and others write use_x and enable_x for x.
    """
    leaf = re.sub("^(use|enable)_", "", name.rpartition(".")[2])
    for flag in (leaf, *(flag for flag, names in ELSEWHERE.items() if leaf in names.split())):
        if flag in flags:
            return f"did you mean --{flag}?"
    for names, sentence in SENTENCES.items():
        if leaf in names.split() and all(flag in flags for flag in re.findall(r"--(\w+)", sentence)[:1]):
            return sentence
    return ""
