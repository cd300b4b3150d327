"""The house: which room stands on which. An import goes to a lower floor or stays in its room, never up,
and no files import each other in a circle; there are no exceptions. An import inside of a function
counts, and so does the name or the path of a module in a string."""

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Bottom up. Rooms in one row are equals: none imports the other.
FLOORS = [
    ["models", "flags"],
    ["distributed"],
    ["parallel.py"],
    ["training", "corpus"],
    ["data.py"],
    ["storage"],
    ["lora"],
    ["checkpoint.py"],
    ["sft"],
    ["rl"],
    ["generate.py"],
    ["tools"],
    [
        "train_llama3.py",
        "train_qwen3.py",
        "train_deepseek.py",
        "finetune.py",
        "grpo.py",
        "evaluate.py",
        "ablate.py",
    ],
    ["forks", "exercises"],  # imported by nobody below
    ["benchmarks", "docs"],
    ["tests"],  # which look at all of it
]
SCRIPTS = {"exercises", "benchmarks", "docs", "tests"}  # folders that are no packages
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


@functools.cache
def house() -> dict[str, str]:
    """{file: source} of all Python files that git knows or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [file for file in listed.stdout.split() if (ROOT / file).is_file()]
    return {file: (ROOT / file).read_text() for file in files}


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache  # by all the tests of this file
def names_in(text: str) -> set[str]:
    """Modules that a source imports, at its top or inside a function, and those that a string
    names: "forks.olmo3" and "forks/olmo3.py"."""
    tree = ast.parse(text)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"\w+([./]\w+)+", node.value):
                found.add(node.value.removesuffix(".py").replace("/", "."))
    return found


def imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """{file: the files of the house that it imports}."""
    files = {module_of(file): file for file in sources}
    graph = {}
    for file, text in sources.items():
        names = names_in(text)
        if room_of(file) in SCRIPTS:  # python exercises/run.py finds the files beside it
            names = names | {f"{module_of(str(Path(file).parent))}.{name}" for name in names}
        graph[file] = {files[name] for name in names & files.keys()} - {file}
    return graph


def room_of(file: str) -> str:
    return file.split("/")[0]


def wrong(sources: dict[str, str]) -> list[str]:
    """What is wrong with the imports, a line each."""
    graph = imports(sources)
    errors = []
    for file, asked in graph.items():
        for other in sorted(asked):
            here = room_of(file)
            there = room_of(other)
            if here != there and FLOOR[there] >= FLOOR[here]:
                errors.append(f"{file} imports {other}, which is not on a lower floor")
    left = {file: asked for file, asked in graph.items() if room_of(file) != "tests"}
    while free := [file for file, asked in left.items() if not asked & left.keys()]:
        for file in free:  # imports nothing that is left
            del left[file]
    if left:
        errors.append(f"a circle of imports among {', '.join(sorted(left))}")
    return errors


def test_every_file_is_in_a_room():
    assert {room_of(file) for file in house()} == FLOOR.keys()


def test_imports_go_down():
    assert wrong(house()) == []


@pytest.mark.parametrize(
    "file, line, words",
    [
        (
            "distributed/layout.py",
            "from parallel import shard",
            "imports parallel.py, which is not",
        ),
        ("models/llama3.py", "def f():\n    import distributed.pipeline", "imports distributed/"),
        ("rl/engines.py", "PATH = 'forks/olmo3.py'", "imports forks/olmo3.py, which is not"),
        ("storage/hf.py", "MODEL = 'forks.olmo3'", "imports forks/olmo3.py, which is not"),
        ("evaluate.py", "import grpo", "imports grpo.py, which is not"),
        ("forks/mup.py", "import exercises.run", "imports exercises/run.py, which is not"),
        (
            "distributed/pipeline.py",
            "from distributed import refusals",
            "a circle of imports among",
        ),
        ("exercises/course.py", "from exercises import bugs, run", "a circle of imports among"),
        ("storage/hf.py", "from storage.commands import ls", "a circle of imports among"),
    ],
)
def test_an_import_that_is_turned_round_is_found(file, line, words):
    sources = house()
    errors = wrong(sources | {file: f"{sources[file]}\n{line}\n"})
    assert any(words in error for error in errors), errors


def test_rooms_are_packages():
    """A folder without __init__.py loses against an installed package of its name: there is one
    called distributed."""
    for room in FLOOR.keys() - SCRIPTS:
        folders = {Path(file).parent for file in house() if file.startswith(f"{room}/")}
        for folder in folders:
            assert (ROOT / folder / "__init__.py").is_file(), folder


def test_models_know_no_process_groups():
    for path in ROOT.glob("models/*.py"):
        assert "torch.distributed" not in path.read_text(), path


def imports_of_tests(text: str) -> list[str]:
    """Modules test_*.py that a source imports, at its top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        found += [name for name in names if name.split(".")[-1].startswith("test_")]
    return found


def test_no_test_imports_another():
    """A mistake in one file of tests would stop the collection of others. What several need lies in
    tests/, in a file that is no test."""
    for file, text in house().items():
        if room_of(file) == "tests":
            assert imports_of_tests(text) == [], file
    text = "import test_a\n\ndef f():\n    from test_b import c\n    from tests import test_d\n"
    assert imports_of_tests(text) == ["test_a", "test_b", "test_d"]


# ---------------------------------------------------------------- small enough to be read


def code_rows(text: str) -> set[int]:
    """Numbers of the lines that hold code: not blank, no comment, no docstring."""
    documented = set()
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, holders) and ast.get_docstring(node)
    ):
        documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            tokens.append(token)
    return {row for token in tokens for row in range(token.start[0], token.end[0] + 1)} - documented


def test_what_one_person_reads_is_short():
    """The reading path, and each function of the lecture."""
    path = ("train_llama3.py", "models/llama3.py", "parallel.py")
    rows = {file: code_rows(house()[file]) for file in path}
    assert sum(map(len, rows.values())) <= 1000
    for node in ast.walk(ast.parse(house()["parallel.py"])):
        if isinstance(node, ast.FunctionDef):
            own = rows["parallel.py"] & set(range(node.lineno, node.end_lineno + 1))
            assert len(own) <= 80, node.name


def test_a_name_is_one_thing():
    """A function has one name in the whole house. Programs have a main, and a task of rl/tasks/ the
    functions of its kind; what the recipes copy is held equal by test_copies."""
    sources = {file: text for file, text in house().items() if room_of(file) not in SCRIPTS}
    copies = {file for file in sources if re.match(r"(forks/)?(train_|finetune|grpo)", file)}
    models = {file for file in sources if room_of(file) in ("models", "forks")} - copies
    owners = defaultdict(set)
    for file, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name != "main":
                owners[node.name].add(file)
    for name, files in owners.items():
        files = {file for file in files if not file.startswith("rl/tasks/")}
        assert len(files) < 2 or files <= copies or files <= models, (name, files)


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda path: path.name)
def test_benchmarks_find_the_house_from_any_folder(path):
    """python benchmarks/x.py looks for modules in benchmarks/ first: sys.path must be changed
    before ours are imported."""
    ours = {module_of(room) for room in FLOOR}
    ready = False
    for node in ast.parse(path.read_text()).body:
        ready = (
            ready
            or isinstance(node, (ast.Assign, ast.Expr))
            and ast.unparse(node).startswith("sys.path")
        )
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [getattr(node, "module", None) or ""]
        assert ready or not {name.split(".")[0] for name in names} & ours, ast.unparse(node)
