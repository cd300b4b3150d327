"""checkpoint.py source: the code and the flags of a checkpoint, in a new folder to run them again."""
import json
import os
import re
import shlex
from pathlib import Path

from storage.manifest import newest_readable
from support.files import check_local, read_json, write_file


def check_code(path: str, code) -> None:
    """Raises ValueError unless every name in code.json stays inside of the folder: strangers may have written code.json."""
    for name, text in code.items() if isinstance(code, dict) else [("", None)]:
        parts = name.split("/")
        inside = not {"", ".", ".."} & set(parts) and not set("\\:") & set(name) and name.isprintable()
        if not isinstance(text, str) or not name.endswith(".py") or not inside:
            raise ValueError(f"{path}/code.json: {name!r} is no source file of a run; nothing is written")


def write_sources(folder: str, out: str):
    """`checkpoint.py source`: writes the recipe, the modules and the flags of a step folder, or of a run folder's newest
    checkpoint, to a new folder `out`. Runs nothing. Raises ValueError."""
    check_local(out, "to write to")
    if os.path.lexists(out):
        raise ValueError(f"{out} is there already; give a new folder")
    path = newest_readable(folder, names=("code.json", "recipe.py", "config.json", "provenance.json"), say=print)
    manifest = read_json(path, "manifest.json")
    if "code.json" not in manifest["files"]:
        raise ValueError(f"{path} holds no sources: the weights come from elsewhere")
    code, recipe = read_json(path, "code.json"), Path(path, "recipe.py").read_text("utf-8")
    check_code(path, code)
    name = next((file for file, text in code.items() if text == recipe and "/" not in file), "recipe.py")
    config = json.dumps(read_json(path, "config.json"), indent=1)
    try:
        for file, text in (code | {name: recipe, "config.json": config}).items():
            Path(out, file).parent.mkdir(parents=True, exist_ok=True)
            write_file(Path(out, file), text.encode())
    except OSError as error:  # "a.py" and "a.py/b.py"
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    state = read_json(path, "provenance.json") if "provenance.json" in manifest["files"] else {}
    known = isinstance(state, dict) and re.fullmatch("[0-9a-f]{40,64}", str(state.get("commit")))
    about = f", commit {state['commit'][:12]}" + " with changes" * (state.get("diff") != "") if known else ""
    # The command is for the old working folder, because --data and other flags may name relative files
    recipe, config, runs = (shlex.quote(os.path.join(out, file)) for file in (name, "config.json", "runs/again"))
    n, repeat = manifest["world_size"], f"{recipe} --config {config} --out {runs}"
    start = f"torchrun --nproc_per_node {n} {repeat}" if n > 1 else f"python {repeat}"
    print(f"{out}: {len(code)} sources of {path}{about}; run them again, where the run was started: {start}")
