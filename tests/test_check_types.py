"""tests/check_types.py: more errors are refused, fewer are told. Here without the checker,
which `make lint` runs."""

from pathlib import Path

from check_types import STORE, compare, errors_by_room, fallen, lowered


def report(*files: str) -> dict:
    """As basedpyright writes it: an error in line 3 of each file, and a warning, which is none."""
    entries = []
    for file in files:
        entry = {
            "file": f"/house/{file}",
            "severity": "error",
            "message": "None has no step\n  in two lines",
            "rule": "reportOptionalMemberAccess",
            "range": {"start": {"line": 2, "character": 4}},
        }
        entries.append(entry)
        entries.append(entry | {"severity": "warning"})
    return {"generalDiagnostics": entries}


def found_in(*files: str) -> dict[str, list[str]]:
    return errors_by_room(report(*files), Path("/house"))


def test_as_many_errors_as_stored_pass():
    found = found_in("rl/calls.py", "rl/tasks/code.py", "grpo.py")
    assert compare(found, {"rl": 2, "grpo.py": 1}) == []


def test_a_rise_names_the_errors():
    wrong = compare(found_in("rl/calls.py", "rl/calls.py"), {"rl": 1})
    line = "rl/calls.py:3: reportOptionalMemberAccess: None has no step"
    assert wrong == [line, line, "rl: 2 type errors, at most 1 are allowed"]


def test_a_room_without_a_row_has_no_errors():
    assert compare(found_in("sft/base.py"), {})[-1] == "sft: 1 type errors, at most 0 are allowed"


def test_a_strict_room_cannot_store_errors():
    wrong = compare(found_in("models/moe.py"), {"models": 1})
    assert wrong[-1] == "models: 1 type errors, at most 0 are allowed"


def test_a_fall_passes_and_is_told():
    found = found_in("rl/calls.py")
    stored = {"rl": 3, "lora": 1}
    assert compare(found, stored) == []
    assert fallen(found, stored) == [
        f"lora: 0 type errors, 1 are stored; store: {STORE}",
        f"rl: 1 type errors, 3 are stored; store: {STORE}",
    ]
    assert lowered(found, stored) == {"rl": 1}
    assert fallen(found, lowered(found, stored)) == []


def test_a_rise_is_never_stored():
    found = found_in("rl/calls.py", "rl/replay.py", "sft/base.py")
    assert lowered(found, {"rl": 1}) == {"rl": 1}
