"""Reads the tables of tests that are files. A row is known by its file and line: layouts.txt:36 is
its name in pytest."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def read_table(file: str) -> dict[str, dict[str, str]]:
    """{section: {"file.txt:LINE": row}} of a file in tests/. A line [name] begins a section; a line
    that is empty or begins with # is no row."""
    path = HERE / file
    sections = {}
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if heading := re.fullmatch(r"\[(.*)\]", line):
            rows = {}
            sections[heading[1]] = rows
        elif line and not line.startswith("#"):
            rows[f"{path.name}:{number}"] = line
    return sections


def as_parameters(rows: dict, *marks) -> list:
    """pytest's parameters of {"file.txt:LINE": value}."""
    import pytest  # exercises/ read layouts.py, and so this file, where no pytest is installed

    return [pytest.param(value, id=place, marks=marks) for place, value in rows.items()]
