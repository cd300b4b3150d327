"""Machine-made mutants: changes of one operator, constant or line of the product, each of which
some test should notice.

    make mutants                                     # 100 mutants, drawn with a fixed seed: runs/mutants.jsonl
    make mutants ARGS="--seed 3 --n 20 --only rl/"   # others; what the file says already is not run again
    make mutants ARGS="--seconds 900"                # survivors again whose tests had not all had the time
    make mutants ARGS="--show"                       # the survivors, as diffs

A mutant lives in a copy of the repository. The quick tests whose files name the mutated function,
or else the mutated module, run until one fails or the time is up. Tests that compare sources with
documents are left out, because any change of a line would fail there. Each file of tests is a fork of
this process, which has imported torch and none of our modules, because a module of ours in it would
not be mutated. A survivor is a change without a consequence, or one that only make test-slow or make
test-cuda can see, or one whose test had not run when the time was up (the list says so), or a
missing test.
"""

import argparse
import ast
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).parent.parent
MUTATED = [  # the product
    "*.py",
    "corpus/*.py",
    "distributed/*.py",
    "flags/*.py",
    "lora/*.py",
    "models/*.py",
    "rl/**/*.py",
    "sft/*.py",
    "storage/*.py",
    "tools/**/*.py",
    "training/*.py",
]
OF_SOURCES = (
    "house",
    "copies",
    "lessons",
    "course",
    "exercises",
    "provenance",
    "pictures",
    "recipes",
    "grpo_docs",
)
SWAPS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}


def swapped(left, right, op, text: str, place) -> list[tuple]:
    """The operator between two operands, exchanged."""
    if type(op) not in SWAPS:
        return []
    start = place(left)[1]
    end = place(right)[0]
    return [(start, end, text[start:end].replace(*SWAPS[type(op)], 1))]


def changes_of(node, text: str, place) -> list[tuple[int, int, str]]:
    """(start, end, new text) of each change of this node."""

    def source(part):
        return ast.get_source_segment(text, part)

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return swapped(node.left, node.comparators[0], node.ops[0], text, place)
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        return swapped(*node.values, node.op, text, place)
    if isinstance(node, ast.BinOp):
        found = []
        is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if not isinstance(node.left, ast.Constant | ast.JoinedStr):
            found = swapped(node.left, node.right, node.op, text, place)
        if isinstance(node.op, ast.Mult | ast.Div) and not is_text:  # a factor dropped
            found.append((*place(node), source(node.left)))
        if isinstance(node.op, ast.Mult) and not is_text:
            found.append((*place(node), source(node.right)))
        return found
    if isinstance(node, ast.IfExp):  # decided
        return [(*place(node), f"({source(branch)})") for branch in (node.body, node.orelse)]
    if isinstance(node, ast.keyword) and node.arg:  # dropped
        start, end = place(node)
        comma = re.match(r"\s*,", text[end:])
        return [(start, end + comma.end() if comma else end, "")]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [(*place(node), str(not node.value))]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return [(*place(node), str(node.value + 1))]
    if isinstance(node, ast.Constant) and isinstance(node.value, float):
        return [(*place(node), str(node.value * 2 or 1.0))]
    if isinstance(node, ast.If):
        return [(*place(node.test), new) for new in (f"not ({source(node.test)})", "False")]
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call or isinstance(node, ast.AugAssign):
        return [(*place(node), "pass")]
    return []


def idle_parts(scope) -> set[int]:
    """The nodes of messages and of types."""
    idle = [node for node in ast.walk(scope) if isinstance(node, ast.Raise | ast.JoinedStr)]
    for node in ast.walk(scope):
        for name in ("annotation", "returns"):
            hint = getattr(node, name, None)
            if hint:
                idle.append(hint)
    return {id(part) for node in idle for part in ast.walk(node)}


def mutants_of(path: str) -> list[dict]:
    """All mutants of a file: {"file", "function", "line", "start", "end", "new"}, start and end as
    offsets into the text."""
    text = Path(REPO, path).read_text()
    if not text.isascii():  # col_offset counts bytes
        return []
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node) -> tuple[int, int]:
        start = starts[node.lineno - 1] + node.col_offset
        return start, starts[node.end_lineno - 1] + node.end_col_offset

    tree = ast.parse(text)
    owner = {}  # method: its class
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            owner |= {id(method): node.name for method in node.body}
    found = {}  # a nested function is walked twice
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef):
            continue
        function = scope.name
        if function.startswith("__"):  # the class of an __init__
            function = owner.get(id(scope), function)
        skipped = idle_parts(scope)
        for node in ast.walk(scope):
            if id(node) in skipped:
                continue
            for start, end, new in changes_of(node, text, place):
                if "\n" not in text[start:end]:
                    found[start, end, new] = dict(
                        file=path,
                        function=function,
                        line=node.lineno,
                        start=start,
                        end=end,
                        new=new,
                    )
    return list(found.values())


TESTED_IN = {  # the folder of tests of a room, where it has another name
    "flags": "support",
    "training": "support",
    "lora": "sft",
    "finetune.py": "sft",
    "grpo.py": "rl",
    "data.py": "corpus",
    "checkpoint.py": "storage",
}


def tests_for(mutant: dict) -> list[str]:
    """The test file of the mutated module (where it has none, of the modules that import it), then
    those that name the mutated function, then those that name the module, then all of the module's
    room; of each the shortest first."""
    texts = {
        path: path.read_text()
        for path in sorted(REPO.glob("tests/**/test_*.py"))
        if not path.stem.removeprefix("test_").startswith(OF_SOURCES)
        and "nullcuda" not in path.parts
    }
    module = mutant["file"].removesuffix(".py").replace("/", ".")
    names = [
        rf"\b{re.escape(mutant['function'])}\b",
        rf"\b{re.escape(module)}\b",
        rf"from {module.rpartition('.')[0] or module} import",
    ]
    folder, _, name = module.rpartition(".")
    imports = rf"from {module} import|from {folder or module} import [^\n]*\b{name}\b"
    users = {
        path.stem
        for path in (*REPO.glob("*.py"), *REPO.glob("*/*.py"))
        if re.search(imports, path.read_text())
    }
    own = {
        f"test_{stem}"
        for stem in ({name} if f"test_{name}" in {path.stem for path in texts} else users)
    }
    ranks = {
        path: [-1] * (path.stem in own)
        + [i for i, name in enumerate(names) if re.search(name, text)]
        for path, text in texts.items()
    }
    room = mutant["file"].split("/")[0]
    for path in texts:  # last, all tests of the room: some run it through a recipe
        if path.parent.name == TESTED_IN.get(room, room):
            ranks[path].append(8)
    if module.startswith("distributed"):
        ranks[REPO / "tests" / "test_parallel.py"].insert(0, 0.5)  # the table of layouts
    return [
        str(path)
        for path in sorted(texts, key=lambda path: (ranks[path] or [9], len(texts[path])))
        if ranks[path]
    ]


FIRST = [  # what each pytest would import first
    "_pytest.terminal",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "transformers.models.llama.modeling_llama",
]


def preload():
    """Import libraries, and nothing of ours."""
    sys.path[:] = [
        path for path in sys.path if Path(path).resolve() not in (REPO, REPO / "benchmarks")
    ]
    for name in FIRST:
        importlib.import_module(name)
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None) or ""
        assert (
            module.__name__ == "__main__"
            or "site-packages" in file
            or not file.startswith(str(REPO))
        )


def fork_tests(folder: Path, test: str, log: Path) -> int:
    """Start the quick tests of a file in a copy of the repository. Returns the process id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["OMP_NUM_THREADS"] = "1"
        sys.argv = ["pytest"]
        sys.path.insert(0, str(folder))
        import pytest
        import torch

        torch.set_num_threads(1)
        quick = "not slow and not gpu and not nullcuda"
        status = int(
            pytest.main(["-x", "-m", quick, "-p", "no:cacheprovider", "-p", "no:xdist", test])
        )
    finally:
        sys.stdout.flush()
        os._exit(status)


def cpu_seconds(session: int) -> float:
    """CPU time that the processes of a session have taken, and those children of theirs that have
    ended. A busy machine then gives a mutant as many tests as a quiet one."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run_tests(folder: Path, test: str, log: Path, seconds: float) -> tuple[int | None, float]:
    """(the status of a file of tests, None if it was not done after so many seconds of CPU time or
    ten times as many in all; the CPU time that it took)."""
    process = fork_tests(folder, test, log)
    deadline = time.monotonic() + 10 * seconds
    took = 0.0
    status = None
    while status is None and took < seconds and time.monotonic() < deadline:
        took = max(took, cpu_seconds(process))
        ended, code = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
        time.sleep(0.1)
    try:
        os.killpg(process, signal.SIGKILL)  # and what the tests have started
    except ProcessLookupError:
        pass
    if status is None:
        os.waitpid(process, 0)
    return status, took


def forget_bytecode(file: Path):
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def try_mutant(mutant: dict, folder: Path, seconds: float) -> dict:
    """The mutant with "caught": the first test that failed, or "" when all passed or were not
    finished in time. folder: a copy of the repository, the same afterwards."""
    spent = 0.0
    file = folder / mutant["file"]
    text = file.read_text()
    log = folder / "mutant.log"
    log.unlink(missing_ok=True)
    file.write_text(text[: mutant["start"]] + mutant["new"] + text[mutant["end"] :])
    forget_bytecode(file)
    status = 5
    for test in tests_for(mutant):
        path = str(folder / Path(test).relative_to(REPO))
        status, took = run_tests(folder, path, log, seconds - spent)
        spent += took
        if status not in (0, 5):  # 5: no quick test in this file
            break
    file.write_text(text)
    forget_bytecode(file)
    said = log.read_text() if log.exists() else ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    failed += re.findall(r"^(E  .*)", said, re.M)
    caught = ""
    if status not in (0, 5, None):
        caught = failed[0] if failed else f"status {status}"
    return mutant | dict(
        caught=caught,
        finished=status is not None,
        tests=sum(map(len, re.findall(r"^([.sF]+)(?: +\[ *\d+%\])?$", said, re.M))),
        seconds=round(spent, 1),
    )


def diff(mutant: dict) -> str:
    text = Path(REPO, mutant["file"]).read_text()
    new = text[: mutant["start"]] + mutant["new"] + text[mutant["end"] :]
    at = mutant["line"] - 1
    old = text.splitlines()[at]
    new = new.splitlines()[at]
    return f"{mutant['file']}:{mutant['line']} in {mutant['function']}\n  - {old.strip()}\n  + {new.strip()}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=100, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=28, help="of the draw")
    parser.add_argument("--only", default="", help="only files whose path begins so")
    parser.add_argument("--seconds", type=float, default=60, help="of CPU time per mutant")
    parser.add_argument(
        "--part", default="0/1", help="I/N: each Nth mutant, for N commands at a time"
    )
    parser.add_argument(
        "--file", default=str(REPO / "runs/mutants.jsonl"), help="where the results are kept"
    )
    parser.add_argument("--show", action="store_true", help="print the survivors and run nothing")
    args = parser.parse_args()
    file = Path(args.file)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    key = lambda m: (m["file"], m["start"], m["end"], m["new"])  # noqa: E731
    done = list({key(m): m for m in lines}.values())  # the last line about a mutant counts
    if args.show:
        late = "\n  not all tests had the time to run"
        print("\n".join(diff(m) + late * (not m["finished"]) for m in done if not m["caught"]))
        return
    files = sorted(
        {str(path.relative_to(REPO)) for pattern in MUTATED for path in REPO.glob(pattern)}
    )
    every = [mutant for name in files for mutant in mutants_of(name)]
    every = [mutant for mutant in every if mutant["file"].startswith(args.only)]
    drawn = random.Random(args.seed).sample(every, min(args.n, len(every)))
    decided = {key(m) for m in done if m["caught"] or m["finished"]}
    todo = [m for m in drawn if key(m) not in decided]
    todo.sort(key=lambda m: key(m) in set(map(key, done)))  # new ones first
    print(
        f"{len(every)} mutants are possible; {len(drawn)} drawn with seed {args.seed}, "
        f"{len(todo)} to run"
    )
    file.parent.mkdir(exist_ok=True)
    preload()
    mine, parts = map(int, args.part.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "main")
        hidden = shutil.ignore_patterns(".*", "runs", "__pycache__")
        shutil.copytree(REPO, copy, ignore=hidden, symlinks=True)
        for mutant in todo[mine::parts]:
            result = try_mutant(mutant, copy, args.seconds)
            with open(file, "a") as out:
                out.write(json.dumps(result) + "\n")
            verdict = f"caught by {result['caught']}" if result["caught"] else "SURVIVED"
            took = f"{result['tests']} tests, {result['seconds']:.0f} s"
            print(f"{diff(result)}\n  {verdict} ({took})", flush=True)
            done.append(result)
    kept = {key(m): m for m in done if key(m) in set(map(key, drawn))}.values()
    print(f"{sum(bool(m['caught']) for m in kept)} of {len(kept)} caught")


if __name__ == "__main__":
    main()
