"""What to type for a folder or a file of Hugging Face that is not there, and for numbers with units.
Only mistakes load this file."""

import os
import re
from shlex import quote


def hub_hint(path: str, kind: str = "model") -> str:
    """The download command for a missing path that looks like a name on the Hugging Face Hub; else
    ''. kind: "model" or "dataset"."""
    owner, _, name = path.rpartition("/")
    looks = (
        re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", path)
        and not path.endswith((".json", ".txt"))
        and owner != "runs"
    )
    if not looks or os.path.lexists(path) or owner and os.path.isdir(owner):
        return ""
    of = " --repo-type dataset" * (kind == "dataset")
    return f"; a {kind} of the Hugging Face Hub must be on the disk first: hf download {path}{of} --local-dir {name}"


def tokenizer_hint(folder: str) -> str:
    """The command for a tokenizer.json of a folder that has a tokenizer in other files; else ''."""
    others = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
    there = [name for name in others if os.path.isfile(os.path.join(folder, name))]
    if not there:
        return ""
    return (
        f"; {there[0]} is there, and transformers makes a tokenizer.json of it: python -c 'import "
        "sys; from transformers import AutoTokenizer as T; T.from_pretrained(sys.argv[1])"
        f".save_pretrained(sys.argv[1])' {quote(folder)}"
    )


def number_hint(text: str, kind: type) -> str:
    """How a number with a unit, a percent sign or commas is written for a flag of this kind; else ''."""
    with_unit = re.fullmatch(r"(\d+)([kKmMgGbB])", text)
    if with_unit and kind is int:
        power = {"k": 1, "m": 2, "g": 3, "b": 3}[with_unit[2].lower()]
        n = int(with_unit[1])
        return f"; write the number out, {n * 1000**power} or {n * 1024**power}"
    if re.fullmatch(r"\d{1,3}(,\d{3})+", text) and kind is int:
        return f"; write it without commas, {text.replace(',', '')}"
    if re.fullmatch(r"\d+(\.\d+)?%", text) and kind is float:
        return f"; write the fraction, {float(text[:-1]) / 100:g}"
    if re.fullmatch(r"\d+,\d+", text) and kind is float:
        return f"; write it with a point, {text.replace(',', '.')}"
    return ""
