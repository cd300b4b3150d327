"""The house: which file stands on which. An import goes down a layer or stays in it, never up, and
never in a circle; and every file stays small enough to be read."""

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("models", "distributed", "support", "corpus", "storage", "sft", "rl", "tools", "forks")
# Bottom up. A file may import files of its own layer, as long as no circle comes of it, and of all
# layers below.
LAYERS = [
    ["models", "support.config", "support.files", "tools.other_names", "forks.dropout"],
    ["distributed.layout"],
    ["distributed"],
    ["parallel"],
    ["support"],
    # the last is a reader of files for storage.hf
    ["corpus", "storage", "sft", "forks.peft_folder"],
    ["data", "checkpoint"],
    ["sft.base", "sft.chat_data"],
    ["rl", "forks.nccl_engine"],
    ["generate", "evaluate", "grpo", "finetune", "train_llama3", "train_qwen3", "train_deepseek"],
    ["forks", "tools"],
    ["ablate"],
]
# A program hands its command line over to tools/, which is above it: these imports go up, each
# inside of a function.
UP = {
    ("distributed.launch", "tools.reports"),
    ("checkpoint", "tools.checkpoint_commands"),
    ("data", "tools.data_commands"),
    ("support.config", "tools.other_names"),
}


def house() -> dict[str, str]:
    """{module: source} of all that is not tests or benchmarks."""
    files = [p for folder in (".", *FOLDERS) for p in ROOT.glob(f"{folder}/*.py")]
    names = {
        str(p.relative_to(ROOT).with_suffix("")).replace("/", "."): p.read_text() for p in files
    }
    return {name: text for name, text in names.items() if not name.endswith("__init__")}


def layer(module: str) -> int:
    """Of the longest name that the module's name begins with."""
    fits = [
        (len(name), i)
        for i, names in enumerate(LAYERS)
        for name in names
        if f"{module}.".startswith(f"{name}.")
    ]
    assert fits, f"{module}.py is in no layer: add it to LAYERS"
    return max(fits)[1]


def imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """{module: the modules of the house that it imports, at its top or inside a function}."""
    found = {}
    for name, text in sources.items():
        nodes = list(ast.walk(ast.parse(text)))
        asked = {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} has a relative import"
                asked |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[name] = {other for other in asked & sources.keys() if (name, other) not in UP}
    return found


def wrong(sources: dict[str, str]) -> list[str]:
    graph, errors = imports(sources), []
    for name, asked in graph.items():
        errors += [
            f"{name} imports {other}, a layer above it"
            for other in sorted(asked)
            if layer(other) > layer(name)
        ]
    left = dict(graph)
    # imports nothing that is left
    while free := [name for name, asked in left.items() if not asked & left.keys()]:
        for name in free:
            del left[name]
    return errors + [f"a circle of imports among {', '.join(sorted(left))}"] * bool(left)


def test_imports_go_down():
    assert wrong(house()) == []


@pytest.mark.parametrize(
    "module, line, words",
    [
        (
            "distributed.layout",
            "from parallel import shard",
            "distributed.layout imports parallel, a layer above it",
        ),
        (
            "models.llama3",
            "def f():\n    import distributed.pipeline",
            "models.llama3 imports distributed.pipeline, a layer above",
        ),
        ("distributed.pipeline", "from distributed import refusals", "a circle of imports among"),
        ("storage.hf", "from checkpoint import load_model", "a circle of imports among"),
    ],
)
def test_an_import_that_is_turned_round_is_found(module, line, words):
    sources = house()
    errors = wrong(sources | {module: sources[module] + "\n" + line + "\n"})
    assert any(words in error for error in errors)


def test_folders_are_packages():
    """A folder without __init__.py loses against an installed package of its name: there is one
    called distributed."""
    for folder in FOLDERS:
        assert (ROOT / folder / "__init__.py").is_file()


def test_models_know_no_process_groups():
    for path in ROOT.glob("models/*.py"):
        assert "torch.distributed" not in path.read_text(), path


# ---------------------------------------------------------------- small enough to be read


def code_rows(text: str) -> set[int]:
    """Numbers of the lines that hold code: not blank, no comment, no docstring."""
    documented, holders = set(), (ast.Module, ast.ClassDef, ast.FunctionDef)
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
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in silent
    ]
    return {row for token in tokens for row in range(token.start[0], token.end[0] + 1)} - documented


def test_what_one_person_reads_is_short():
    """The reading path, and each function of the lecture."""
    rows = {module: code_rows(text) for module, text in house().items()}
    assert sum(len(rows[name]) for name in ("train_llama3", "models.llama3", "parallel")) <= 1000
    for node in ast.walk(ast.parse(house()["parallel"])):
        if isinstance(node, ast.FunctionDef):
            own = rows["parallel"] & set(range(node.lineno, node.end_lineno + 1))
            assert len(own) <= 80, node.name


def test_a_name_is_one_thing():
    """A function has one name in the whole house. Programs have a main; what the recipes copy is
    held equal by test_copies."""
    owners = defaultdict(list)
    for module, text in house().items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name != "main":
                owners[node.name].append(module)
    recipes = {
        name for name in house() if name.removeprefix("forks.").startswith(("train_", "finetune"))
    }
    models = {name for name in house() if name.startswith(("models.", "forks."))} - recipes
    double = {
        name: found
        for name, found in owners.items()
        if len(found) > 1 and not set(found) <= recipes | {"grpo"} and not set(found) <= models
    }
    assert double == {}


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda path: path.name)
def test_benchmarks_find_the_house_from_any_folder(path):
    """python benchmarks/x.py looks for modules in benchmarks/ first: sys.path must be changed
    before ours are imported."""
    ours, ready = {name.split(".")[0] for name in house()}, False
    for node in ast.parse(path.read_text()).body:
        ready = (
            ready
            or isinstance(node, (ast.Assign, ast.Expr))
            and ast.unparse(node).startswith("sys.path")
        )
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [getattr(node, "module", None) or ""]
        )
        assert ready or not {name.split(".")[0] for name in names} & ours, ast.unparse(node)
