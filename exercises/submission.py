"""Reads a student's folder: the source of each blank is taken out, never imported, and planted into
clean project files.

    folder/exercise.json   says which exercise or bug: {"exercise": 4, "hints": 0}
    blanks of exercise 4   functions of the student's files, with the helpers that the student has added to these files
    a bug                  whole files, those of bugs.places(): parallel.py, distributed/*.py, a file of forks/

Everything else in the folder is ignored: a module with the name of ours, a check of the student's
own, a sitecustomize.py.
"""

import ast
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

from bugs import BUGS, places
from course import COURSE, HOUSE, functions, original, source_of

STATE = "exercise.json"
LARGEST = 1_000_000  # bytes of a file
# An answer computes. The modules and names below would reach files, other processes, or the check's
# own variables.
MODULES = set(
    "__future__ abc bisect collections contextlib copy dataclasses distributed enum functools "
    "hashlib heapq "
    "itertools math models numpy operator parallel random struct time torch typing warnings".split()
)
NAMES = set(
    "__builtins__ __import__ breakpoint compile delattr eval exec exit getattr globals input "
    "locals open quit setattr "
    "vars".split()
)
ATTRIBUTES = set(
    "_C _disable_current_modes _exit _getframe _python_dispatch builtins cpp_extension ctypes "
    "f_back f_globals "
    "f_locals from_file fromfile gc hub importlib inspect load memmap modules multiprocessing os "
    "pickle save "
    "savez subprocess sys system tofile".split()
)
SPECIAL = set(
    "__init__ __call__ __class__ __enter__ __exit__ __getitem__ __iter__ __len__ __name__ __post_init__".split()
)


class Refused(Exception):
    """The submission is not run; the text says why."""


class NotWritten(Exception):
    """A blank is still a blank, or the file cannot be read as Python."""


@dataclass
class Planted:
    files: dict[str, str]  # file -> text
    # file -> (first, last line in the planted text, first in the student's file)
    places: dict[str, list[tuple[int, int, int]]]


def state_of(folder) -> dict:
    try:
        state = json.loads((Path(folder).expanduser() / STATE).read_text())
    except OSError:
        raise ValueError(
            f"{folder} is no folder of an exercise: make one with start N --out {folder}"
        ) from None
    except ValueError:
        state = None
    known = (
        isinstance(state, dict)
        and isinstance(state.get("hints"), int)
        and (
            state.get("exercise") in list(COURSE)
            or state.get("bug") in list(BUGS)
            or state.get("diff") is True
        )
    )
    if not known:
        raise ValueError(
            f"{folder}/{STATE} names no exercise or bug that there is: begin again with start N "
            "--out NEW"
        )
    return state


def what(state: dict) -> str:
    if "diff" in state:
        return "the planted mistake"
    return " ".join(f"{kind} {state[kind]}" for kind in ("exercise", "bug") if kind in state)


def text_of(folder: Path, file: str) -> str:
    """The text of a file of the submission, which must be a plain file of the folder."""
    path = folder / file
    if path.is_symlink() or not path.resolve().is_relative_to(folder.resolve()):
        raise Refused(f"{file} is a link to another place; an answer is a plain file")
    try:
        if path.stat().st_size > LARGEST:
            raise Refused(
                f"{file} has {path.stat().st_size} bytes, and an answer has at most {LARGEST}"
            )
        return path.read_text()
    except OSError as e:
        raise NotWritten(f"{file} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise NotWritten(f"{file} cannot be read: {e}") from None


def parsed(text: str, file: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as e:
        raise NotWritten(
            f"SyntaxError: {file}, line {e.lineno}: {e.msg}\n    {(e.text or '').strip()}"
        ) from None
    except (ValueError, RecursionError, MemoryError) as e:
        raise NotWritten(f"{file} cannot be read as Python: {type(e).__name__}: {e}") from None


def reaches_out(tree: ast.AST) -> dict[str, int]:
    """name -> line, of all that an answer has no use for."""
    found = {}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [
                f"import {a.name}"
                for a in node.names
                if a.name.split(".")[0] not in MODULES or ATTRIBUTES & set(a.name.split("."))
            ]
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            bad = parts[0] not in MODULES or ATTRIBUTES & set(parts)
            names = [
                f"from {node.module} import {a.name}"
                for a in node.names
                if bad or a.name in ATTRIBUTES | NAMES
            ]
        elif isinstance(node, ast.Name):
            dunder = node.id.startswith("__") and node.id != "__class__"
            names = [node.id] if node.id in NAMES or dunder else []
        elif isinstance(node, ast.Attribute):
            dunder = node.attr.startswith("__") and node.attr not in SPECIAL
            names = [f".{node.attr}"] if node.attr in ATTRIBUTES or dunder else []
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = (
                [f"def {node.name}"]
                if node.name.startswith("__") and node.name not in SPECIAL
                else []
            )
        found |= {name: node.lineno for name in names if name not in found}
    return found


def refuse(tree: ast.AST, file: str, allowed=()):
    for name, line in reaches_out(tree).items():
        if name not in allowed:
            raise Refused(
                f"{file}, line {line}: {name}: an answer computes with tensors, and has no use "
                "for files, processes "
                "or the interpreter. Take this out, and check again"
            )


def defined(node: ast.stmt) -> set[str]:
    """Names that a statement at the top of a file, or of a class, defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(a.asname or a.name).split(".")[0] for a in node.names}
    if isinstance(node, ast.Assign):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    return set()


def helpers(body: list[ast.stmt], known: list[ast.stmt]) -> list[ast.stmt]:
    """What the student has added: definitions of names that the project's file does not have."""
    there = set().union(*map(defined, known)) if known else set()
    return [node for node in body if defined(node) - there and not defined(node) & there]


def first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def plant(number: int, folder: Path, only=()) -> Planted:
    """The project's files with the student's functions in place of the blanks, or of those in
    `only`. Raises NotWritten or Refused."""
    planted = Planted({}, {})
    same = []
    for file, names in COURSE[number].blanks.items():
        if not (names := [name for name in names if not only or name in only]):
            continue
        text = text_of(folder, file)
        clean = original(file).read_text()
        tree = parsed(text, file)
        clean_tree = ast.parse(clean)
        found = functions(text)
        spots = functions(clean)
        for name in names:
            if name not in found:
                raise NotWritten(
                    f"{file} has no function {name} any more; TASK.md says what it must do"
                )
            source = source_of(text, name)
            if f'NotImplementedError("exercise {number}: ' in source:
                raise NotWritten(
                    f"{file}, line {found[name].lineno}: {name} is still a blank. What it must do "
                    "is in its "
                    f"docstring and in TASK.md; `hint {folder}` tells more"
                )
            same.append(source == source_of(clean, name))
        # (first line, last line of the clean text, nodes of the student's that go there)
        edits = []
        for name in names:
            edits.append((first_line(spots[name]), spots[name].end_lineno, [found[name]]))
            if "." in name:
                kind = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}[
                    name.split(".")[0]
                ]
                mine = {n.name: n for n in clean_tree.body if isinstance(n, ast.ClassDef)}[
                    kind.name
                ]
                if name == next(n for n in names if n.startswith(kind.name + ".")):
                    edits[-1][2][:0] = helpers(kind.body, mine.body)
        at = min(
            first_line(n)
            for n in clean_tree.body
            if any(n.lineno <= a <= n.end_lineno for a, _, _ in edits)
        )
        edits.append((at, at - 1, helpers(tree.body, clean_tree.body)))
        lines, planted.places[file] = clean.splitlines(), []
        out = []
        at = 1
        for first, last, nodes in sorted(edits, key=lambda edit: edit[:2]):
            out += lines[at - 1 : first - 1]
            indent = (
                " " * (len(lines[first - 1]) - len(lines[first - 1].lstrip()))
                if last >= first
                else ""
            )
            for node in nodes:
                refuse(node, file)
                begin = first_line(node)
                source = textwrap.dedent("\n".join(text.splitlines()[begin - 1 : node.end_lineno]))
                source = textwrap.indent(source, indent).splitlines()
                planted.places[file].append((len(out) + 1, len(out) + len(source), begin))
                out += [*source, ""]
            at = last + 1
        planted.files[file] = "\n".join([*out, *lines[at - 1 :]]) + "\n"
        parsed(planted.files[file], file)
    if all(same) and not only:  # a short function alone may well come out like the project's
        raise Refused(
            "every blank holds the project's own lines, word for word, comments included. An "
            "answer of your own "
            f"counts (or does {STATE} name another exercise than the one that you have worked on?)"
        )
    return planted


def plant_repair(folder: Path) -> Planted:
    """The files of a folder with a bug that can hold the mistake. Raises NotWritten or Refused."""
    planted = Planted({}, {})
    for path in places():
        file = str(path.relative_to(HOUSE))
        text = text_of(folder, file)
        if text != (clean := path.read_text()):
            refuse(parsed(text, file), file, allowed=reaches_out(ast.parse(clean)))
            planted.files[file] = text
            planted.places[file] = [(1, len(text.splitlines()), 1)]
    return planted
