"""Checks the types of the rooms with basedpyright (settings: pyproject.toml), for `make lint`.

    .venv/bin/python tests/check_types.py            # exit 1 if a room has more errors than stored
    .venv/bin/python tests/check_types.py --store    # store fewer errors in tests/type_errors.json

The rooms of STRICT have no errors. Every other room has as many errors as tests/type_errors.json
says, and the number may only fall. A fall must be stored, so that the next rise is seen.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "tests" / "type_errors.json"
STRICT = ("models", "flags", "corpus", "storage", "data.py", "checkpoint.py")
STORE = "python tests/check_types.py --store"


def run_checker() -> dict:
    """basedpyright's report. The checker reads the packages of this Python, as the programs do."""
    command = [sys.executable, "-m", "basedpyright", "--outputjson"]
    command += ["--pythonpath", sys.executable]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # 0: no errors, 1: errors; all else is a failure of the checker, such as a wrong setting
    if result.returncode not in (0, 1):
        sys.exit(f"basedpyright failed: {result.stderr or result.stdout}")
    return json.loads(result.stdout)


def errors_by_room(report: dict, root: Path) -> dict[str, list[str]]:
    """{room: ["file:line: rule: message", ...]}, of the rooms with errors."""
    found = defaultdict(list)
    for entry in report["generalDiagnostics"]:
        if entry["severity"] != "error":
            continue
        file = Path(entry["file"]).relative_to(root)
        line = entry["range"]["start"]["line"] + 1
        message = entry["message"].splitlines()[0]
        rule = entry.get("rule", "syntax")
        found[file.parts[0]].append(f"{file}:{line}: {rule}: {message}")
    return dict(found)


def compare(found: dict[str, list[str]], stored: dict[str, int]) -> list[str]:
    """What is wrong, a line each: nothing if no room has more errors than stored."""
    wrong = []
    for room in sorted(found.keys() | stored.keys() | set(STRICT)):
        errors = found.get(room, [])
        allowed = 0
        if room not in STRICT:
            allowed = stored.get(room, 0)
        if len(errors) > allowed:
            wrong += errors
            wrong.append(f"{room}: {len(errors)} type errors, at most {allowed} are allowed")
    return wrong


def fallen(found: dict[str, list[str]], stored: dict[str, int]) -> list[str]:
    """A line for each room with fewer errors than stored: good news, and no reason to fail."""
    lines = []
    for room, allowed in sorted(stored.items()):
        number = len(found.get(room, []))
        if number < allowed:
            lines.append(f"{room}: {number} type errors, {allowed} are stored; store: {STORE}")
    return lines


def lowered(found: dict[str, list[str]], stored: dict[str, int]) -> dict[str, int]:
    """The stored numbers, each lowered to what was found; a room without errors has no row."""
    new = {}
    for room, allowed in sorted(stored.items()):
        number = min(allowed, len(found.get(room, [])))
        if number > 0:
            new[room] = number
    return new


def main() -> None:
    report = run_checker()
    if report["summary"]["filesAnalyzed"] == 0:
        sys.exit("basedpyright read no file: see `include` in pyproject.toml")
    found = errors_by_room(report, ROOT)
    stored = json.loads(STORED.read_text())
    if "--store" in sys.argv[1:]:
        stored = lowered(found, stored)
        STORED.write_text(json.dumps(stored, indent=1) + "\n")
    wrong = compare(found, stored)
    if wrong:
        sys.exit("\n".join(wrong))
    seconds = report["summary"]["timeInSec"]
    files = report["summary"]["filesAnalyzed"]
    print(f"Types of {files} files checked in {seconds:.0f} s: no more errors than stored.")
    for line in fallen(found, stored):
        print(line)


if __name__ == "__main__":
    main()
