"""What a candidate of a campaign must pass before its comparison: it asks the same question, it runs,
it trains the same model on every layout, and it does not read the validation text. A gate that
closes returns a sentence; "" lets the candidate pass.

What these gates look at: one run of full length with one seed, the source of the recipe, and the
modules that count and read for it. A recipe that opens the text's file by itself is not found.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from flags.files import read_json
from tools.study.poisoned import MARK
from tools.study.study import folder_of, lines_of, training_of

# answers to --check that make another question, and their names for people
QUESTION = {
    "data": "the data",
    "val_data": "the validation text",
    "val_batches": "the size of the validation",
    "seq_len": "the length of a sequence",
    "steps": "the number of steps",
    "tokens": "the tokens of a step",
}
# the same of config.json
DATA_FLAGS = ("data", "val_data", "tokenizer", "doc_mask", "val_batches", "seq_len", "steps")
# calls of a recipe by which it reads text, counts and is judged
JUDGED = {
    "open_data",
    "source_tokenizer",
    "val_batches",
    "evaluate",
    "log_val",
    "batches",
    "start_step",
    "end_step",
    "reduce_hash",
    "Metrics",
}
# modules that read text, count and judge
JUDGES = re.compile(
    r"data\.py|parallel\.py|corpus/|sft/|storage/|flags/|training/metrics\.py|distributed/schedule\.py|torch$"
)
CLOCKS = {"time", "datetime", "timeit"}


def other_question(best: dict, candidate: dict) -> str:
    """By the answers to --check."""
    for key, name in QUESTION.items():
        if best[key] != candidate[key]:
            return (
                f"another question: {name} is {candidate[key]}, the campaign has {best[key]}; "
                "begin another campaign for it"
            )
    return ""


def judged_calls(source: str) -> list[str]:
    """The calls of a recipe by which it is judged, and what it puts in the place of such functions, in
    order, without the layout of their text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):  # parallel.evaluate = another
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr in JUDGED:
                    found.append(ast.unparse(node))
        if not isinstance(node, ast.Call):
            continue
        name = ""
        if isinstance(node.func, ast.Name):
            name = node.func.id
        elif isinstance(node.func, ast.Attribute):
            name = node.func.attr
        # which weights are judged, such as their mean, is a candidate's to say
        if name == "evaluate":
            node.args = node.args[1:]
        if name in JUDGED:
            found.append(ast.unparse(node))
    return sorted(found)


def imported(source: str) -> set[str]:
    """The packages that a source imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def judges_itself(best: dict, candidate: dict) -> str:
    """By the sources. best, candidate: variants, with their "file" and "files"."""
    before = Path(best["file"]).read_text()
    try:
        after = Path(candidate["file"]).read_text()
        calls = judged_calls(after)
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"does not run: {error}"
    known = judged_calls(before)
    if calls != known:
        changed = [call for call in [*calls, *known] if calls.count(call) != known.count(call)]
        return (
            f"another question: the recipe reads, counts or judges otherwise: {changed[0]}; leave "
            "these calls as they are"
        )
    clocks = CLOCKS & (imported(after) - imported(before))
    if clocks:
        return (
            f"another question: the recipe reads the clock ({', '.join(sorted(clocks))}), so its "
            "result depends on the machine"
        )
    names = {Path(best["file"]).name, Path(candidate["file"]).name}
    for file in sorted(best["files"].keys() | candidate["files"].keys()):
        if file in names or not JUDGES.match(file):
            continue
        if best["files"].get(file) != candidate["files"].get(file):
            return f"another question: {file}, which reads, counts or judges, is changed"
    return ""


def is_equal_code(best: dict, candidate: dict) -> bool:
    """Whether flags, recipe and modules are the same, comments and layout of the recipe aside."""
    if best["flags"] != candidate["flags"]:
        return False
    sources = []
    files = []
    for variant in (best, candidate):
        path = Path(variant["file"])
        # without docstrings' and comments' help an equal tree trains equally
        sources.append(ast.dump(ast.parse(path.read_text())))
        files.append({name: sha for name, sha in variant["files"].items() if name != path.name})
    return sources[0] == sources[1] and files[0] == files[1]


def parity_fails(variant: dict, layouts: str) -> str:
    """--check_parity on each of the layouts, "tp=2;dp_shard=2"."""
    for layout in filter(None, layouts.replace(" ", "").split(";")):
        axes = [f"--{axis}" for axis in layout.split(",")]
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, variant["file"], *variant["flags"], "--steps=3"]
            command += ["--checkpoint_every=0", f"--out={out}", "--check_parity", *axes]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            verdicts = [line for line in said if "check_parity: NOT" in line]
            return f"--check_parity {' '.join(axes)}: {(verdicts or said or ['ended'])[-1]}"
    return ""


def other_text(folder, seed: int) -> str:
    """Whether the gate's runs of full length, best and candidate, saw the same text. By config.json
    and by the hash of each logged batch."""
    configs = []
    hashes = []
    for name in ("best", "candidate"):
        config = read_json(folder_of(folder, name, seed), "config.json")
        found = {key: config.get(key) for key in DATA_FLAGS}
        configs.append(found | config["_run"].get("data", {}))
        lines = lines_of(folder, name, seed)
        hashes.append(
            {
                line["step"]: (line["tokens_hash"], line["tokens"])
                for line in lines
                if "loss" in line
            }
        )
    for key in configs[0]:
        if configs[0][key] != configs[1].get(key):
            return (
                f"another question: {key} is {configs[1].get(key)}, the campaign has "
                f"{configs[0][key]}"
            )
    for step, seen in hashes[0].items():
        if hashes[1].get(step) != seen:
            return f"another question: at step {step} it trains on other tokens than the best"
    return ""


def reads_validation(folder, seed: int) -> str:
    """Whether the training of the candidate differs with another validation text."""
    if not (folder_of(folder, "exchanged", seed) / MARK).exists():
        return "its validation text could not be exchanged: it does not come from data.py's tokens"
    usual = losses_of(lines_of(folder, "candidate", seed))
    exchanged = losses_of(lines_of(folder, "exchanged", seed))
    for step, numbers in usual.items():
        if exchanged.get(step) != numbers:
            return (
                f"it reads the validation split: with another one, training differs by step {step}"
            )
    return ""


def losses_of(lines: list[dict]) -> dict:
    """{step: the numbers of training}, without validation."""
    found = {}
    for (step, is_training), numbers in training_of(lines).items():
        if is_training:
            found[step] = {key: value for key, value in numbers.items() if "val" not in key}
    return found


def is_equal_training(folder, seed: int) -> bool:
    """Whether candidate and best logged the same numbers, to the bit, in every line."""
    best = training_of(lines_of(folder, "best", seed))
    return best == training_of(lines_of(folder, "candidate", seed)) != {}
