"""Rows of tables are known by file and line where their words do not say enough, see places.py."""

from pathlib import Path

import places
import pytest

HERE = Path(__file__)
MORE = [
    ({}, "a row of"),
    ({"a": 1}, "another table"),
]


def line_of(words: str) -> int:
    """The line of this file that holds these words and is no call of this function."""
    (line,) = (
        number
        for number, text in enumerate(HERE.read_text().splitlines(), start=1)
        if f'"{words}"' in text and "line_of" not in text
    )
    return line


@pytest.mark.parametrize(
    "row, words",
    [
        ([1, 2], "a list"),
        pytest.param({1: 2}, "with a mark", marks=pytest.mark.filterwarnings("ignore")),
        *MORE,
        (3, "plain"),
        (4, "words that do not fit into the name of a row, because they are many"),
        pytest.param([5], "with a name", id="its own name"),
    ],
)
def test_a_row_has_a_name_that_finds_it(row, words, request):
    name = request.node.callspec.id
    if words == "plain":
        assert name == "3-plain"
    elif words == "with a name":
        assert name == "its own name"
    else:
        assert name == f"test_places.py:{line_of(words)}"


def test_a_row_of_the_top_table_is_found_by_its_own_line():
    found = places.lines_of_rows(HERE, "test_a_row_has_a_name_that_finds_it", "row, words")
    assert found[2:4] == [line_of("a row of"), line_of("another table")]


@pytest.mark.parametrize("ids", [None, str])
def test_a_table_that_is_computed_keeps_pytests_names(tmp_path, ids):
    """Such a table has no lines to name."""
    file = tmp_path / "test_x.py"
    file.write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('x', make())\ndef test_y(x):\n    pass\n"
    )
    assert places.lines_of_rows(file, "test_y", "x") is None
    mark = pytest.mark.parametrize("x", iter([[1], [2]]), ids=ids).mark
    named = places.named_by_place(mark, file, "test_y")
    assert list(named.args[1]) == [[1], [2]]
