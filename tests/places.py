"""A pytest plugin: a row of a table is known by its place. A row that pytest would call
flags3-told3, or by more words than fit a line, is called test_x.py:120. Rows of a few plain words
keep them, because these say more than a number of a line."""

import ast
import functools
from pathlib import Path

import pytest

PLAIN = (str, int, float, bool, type(None))
LONGEST = 60  # letters of a name made of a row's words


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def assigned(tree: ast.Module, name: str):
    """What the last statement at the top of a module assigns to this name; None: nothing."""
    found = None
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    found = node.value
    return found


def lines_of_table(table, tree: ast.Module) -> list[int] | None:
    """The line of each row of an expression: a list, the name of a list at the top of the module,
    two lists added, a part of a list, or one row made of each row of a list. None: something
    else."""
    if isinstance(table, ast.Name):
        return lines_of_table(assigned(tree, table.id), tree)
    if isinstance(table, ast.BinOp) and isinstance(table.op, ast.Add):
        table = ast.List([ast.Starred(table.left), ast.Starred(table.right)])
    if isinstance(table, ast.Subscript) and isinstance(table.slice, ast.Slice):
        whole = lines_of_table(table.value, tree)
        begin, end = (
            part and ast.literal_eval(part) for part in (table.slice.lower, table.slice.upper)
        )
        return whole and whole[begin:end]
    if isinstance(table, ast.ListComp | ast.GeneratorExp):
        only = table.generators[0]
        if len(table.generators) > 1 or only.ifs:
            return None
        return lines_of_table(only.iter, tree)
    if isinstance(table, ast.Dict):
        return [key.lineno for key in table.keys if key]
    if isinstance(table, ast.Call) and isinstance(table.func, ast.Attribute):
        if table.func.attr == "items":
            return lines_of_table(table.func.value, tree)
    if not isinstance(table, ast.List | ast.Tuple):
        return None
    lines = []
    for row in table.elts:
        if isinstance(row, ast.Starred):
            inside = lines_of_table(row.value, tree)
            if inside is None:
                return None
            lines += inside
        else:
            lines.append(row.lineno)
    return lines


def lines_of_rows(file: Path, function: str, names) -> list[int] | None:
    """The line of each row of the table of a test that has these parameters."""
    tree = tree_of(file)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != function:
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.parametrize":
                if ast.literal_eval(mark.args[0]) == names:
                    return lines_of_table(mark.args[1], tree)
    return None


def says_enough(values, ids) -> bool:
    """Whether a name made of these values tells the row. ids: as in parametrize()."""
    if ids is None and not all(isinstance(value, PLAIN) for value in values):
        return False
    return sum(len(str(value)) + 1 for value in values) <= LONGEST


def named_by_place(mark: pytest.Mark, file: Path, function: str) -> pytest.Mark:
    """The mark of a table, whose rows without a name have their place as a name."""
    names, table = mark.args[:2]
    ids = mark.kwargs.get("ids")
    if ids not in (None, str):
        return mark
    table = list(table)
    lines = lines_of_rows(file, function, names)
    if lines is None or len(lines) != len(table):
        return pytest.mark.parametrize(names, table, *mark.args[2:], **mark.kwargs).mark
    single = isinstance(names, str) and "," not in names
    rows = []
    for row, line in zip(table, lines):
        marks = ()
        name = None
        values = [row] if single else row
        if hasattr(row, "marks"):  # a pytest.param
            marks = row.marks
            name = row.id
            values = row.values
        if name is None and not says_enough(values, ids):
            name = f"{file.name}:{line}"
        rows.append(pytest.param(*values, marks=marks, id=name))
    return pytest.mark.parametrize(names, rows, *mark.args[2:], **mark.kwargs).mark


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    marks = metafunc.definition.own_markers
    for number, mark in enumerate(marks):
        if mark.name == "parametrize" and len(mark.args) > 1:
            file = Path(metafunc.module.__file__)
            marks[number] = named_by_place(mark, file, metafunc.function.__name__)
