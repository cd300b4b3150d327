"""README.md of an export: what was trained, on which data, how, and how to load it. It says only what
the checkpoint and metrics.jsonl beside it know. Only exports load this file."""

import os
from pathlib import Path

from flags.config import spell, spell_flag
from flags.files import read_json
from storage.changes import UNTOLD_FLAGS
from training.metrics import is_number, read_lines

# flags that say where a run lies on its machine, or that the card has elsewhere
LEFT_OUT = UNTOLD_FLAGS - {"init_from"}
HEAD = """---
tags:
- nanotitan
---

# {title}

"""


def card_of_step(path: str, dtype: str, adapter: bool = False) -> str:
    """The card of a step folder. adapter: only the adapters are exported."""
    about = read_json(path, "state.json")
    made_from = read_json(path, "manifest.json")
    if os.path.isfile(os.path.join(path, "provenance.json")):
        made_from |= read_json(path, "provenance.json")
    run = Path(path).absolute().parent.parent  # <run>/checkpoints/step-N
    return write_card(about, made_from, str(run / "metrics.jsonl"), dtype, adapter)


def write_card(
    about: dict, made_from: dict, metrics: str, dtype: str, adapter: bool = False
) -> str:
    """The text. about: contents of state.json; made_from: version, torch and commit, where known."""
    name = about["identity"]["model"].get("class", "A model")
    lines = read_metrics(metrics, about.get("step"))
    start = about.get("made_by", {})
    kind = f"Weights in {dtype}"
    if adapter:  # in the dtype of their training
        kind = "Adapters (LoRA)"
    text = HEAD.format(title=f"{name}, trained with nanotitan")
    text += kind
    if "recipe" in start:
        text += f", trained by `{start['recipe']}`"
    text += ".\n\n## Training\n\n"
    for name, value in progress_rows(about, lines):
        text += f"- {name}: {value}\n"
    if start.get("data"):
        text += f"- trained on: `{start['data']}`\n"
    text += data_rows(about["identity"].get("data", {}))
    text += "\n" + flag_rows(start.get("given"))
    text += "\n## Code\n\n"
    for name in ("version", "commit", "torch"):
        if name in made_from:
            text += f"- {name}: {made_from[name]}\n"
    if "commit" in made_from:
        text += (
            "\nChanges since that commit, if any, are in `code.json` of the run's checkpoints.\n"
        )
    return text + loading(adapter)


def read_metrics(path: str, step: int | None) -> list[dict]:
    """The lines up to a step (None: all); [] without the file, as for a step folder that was moved."""
    if not os.path.isfile(path):
        return []
    lines = []
    for line in read_lines(path):
        if step is None or line["step"] <= step:
            lines.append(line)
    return lines


def progress_rows(about: dict, lines: list[dict]) -> list[tuple[str, str]]:
    """(name, value) of the steps, the tokens and the last of each measure."""
    last = {}
    for line in lines:
        for name, value in line.items():
            if is_number(value):
                last[name] = value
    step = about.get("step", last.get("step"))
    tokens = about.get("state", {}).get("tokens", last.get("tokens"))
    rows = []
    if step is not None:
        rows.append(("optimizer steps", f"{step:,}"))
    if tokens:
        rows.append(("tokens trained on", f"{tokens:,}"))
    names = {
        "loss": "training loss, last logged step",
        "val_loss": "validation loss, last",
        "val_bits_per_byte": "validation, bits per byte",
        "reward_mean": "mean reward, last logged step",
        "eval_reward": "reward on held-out prompts, last",
    }
    for name, title in names.items():
        if name in last:
            rows.append((title, f"{last[name]:.4f}"))
    return rows


def data_rows(data: dict) -> str:
    """Lines about the data: hash and tokens of the text, or of each part of a mixture."""
    text = ""
    if "data_sha256" in data:
        text += f"- data: {data.get('n_tokens', 0):,} tokens, sha256 `{data['data_sha256']}`\n"
    for name, part in data.get("parts", {}).items():
        text += (
            f"- data, part {name}: weight {part['weight']}, {part['n_tokens']:,} tokens, sha256 "
            f"`{part['data_sha256']}`\n"
        )
    if "tokenizer_sha256" in data:
        text += f"- tokenizer: sha256 `{data['tokenizer_sha256']}`\n"
    return text


def flag_rows(given: dict | None) -> str:
    """The flags that differ from the recipe's defaults, as typed. None: not known, as of a checkpoint
    of before 0.11.0, or of a mean of several."""
    if given is None:
        return ""
    words = []
    for name, value in given.items():
        if name in LEFT_OUT:
            continue
        if not isinstance(value, bool):
            value = spell(value)
        words.append(spell_flag(name, value))
    if not words:
        return "All flags had their defaults.\n"
    rows = "\n".join(words)
    return f"Flags that differ from the defaults:\n\n```\n{rows}\n```\n"


def loading(adapter: bool) -> str:
    """How to load the folder."""
    if adapter:
        return (
            '\n## Loading\n\n`python generate.py --checkpoint THIS_FOLDER --prompt "..."` of '
            "nanotitan merges the adapters\ninto the weights that `adapter_config.json` names; peft "
            "reads the folder as well.\n"
        )
    return (
        '\n## Loading\n\n```\npython generate.py --checkpoint THIS_FOLDER --prompt "..."\n```\n\n'
        "or, if transformers knows the `model_type` of `config.json`:\n\n```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")\n'
        'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")\n```\n'
    )
