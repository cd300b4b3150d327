"""Machine-made mutants: changes of one operator, constant or line of the product, each of which
some test should notice.

    make mutants                                     # 100 mutants, drawn with a fixed seed: runs/mutants.jsonl
    make mutants ARGS="--seed 3 --n 20 --only rl/"   # others; what the file says already is not run again
    make mutants ARGS="--seconds 900"                # survivors again whose tests had not all had the time
    make mutants ARGS="--show"                       # the survivors, as diffs

A mutant lives in a copy of the repository. The quick tests that name the mutated function run first,
then those that reach it over other functions, until one fails or the time is up; a test that fails
without the mutant, too, is left out. So are tests that compare sources with documents, because any
change of a line would fail there. Each few tests are a fork of this process, which has imported torch
and none of our modules, because a module of ours in it would not be mutated. A survivor is a change
without a consequence, or one that only make test-slow or make test-cuda can see, or one whose test
had not run when the time was up (the list says so), or a missing test.
"""

import argparse
import ast
import functools
import importlib
import json
import multiprocessing.util
import os
import random
import re
import shutil
import signal
import socket
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
    "finetune.py": "sft",
    "grpo.py": "rl",
    "data.py": "corpus",
    "checkpoint.py": "storage",
}
MOST_HOPS = 6


def product_files() -> list[str]:
    return sorted(
        {str(path.relative_to(REPO)) for pattern in MUTATED for path in REPO.glob(pattern)}
    )


def files_of_tests() -> list[str]:
    found = []
    for path in sorted(REPO.glob("tests/**/*.py")):
        reads_sources = path.stem.removeprefix("test_").startswith(OF_SOURCES)
        if not reads_sources and "nullcuda" not in path.parts:
            found.append(str(path.relative_to(REPO)))
    return found


def words_of_functions(path: str) -> dict[str, set[str]]:
    """{function, class or table of a file: the words in its source, decorators and texts as well}."""
    text = Path(REPO, path).read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
            first = min([node.lineno, *[line.lineno for line in node.decorator_list]])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            first = node.lineno
        else:
            continue
        source = "\n".join(lines[first - 1 : node.end_lineno])
        found.setdefault(name, set()).update(re.findall(r"[A-Za-z_]\w+", source))
    return found


@functools.cache
def slow_tests() -> set[tuple[str, str]]:
    """(file, function) of the tests that are slow as a whole."""
    found = set()
    for path in files_of_tests():
        text = Path(REPO, path).read_text()
        all_slow = re.search(r"^pytestmark = .*\bslow\b", text, re.M)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                marks = [ast.unparse(line) for line in node.decorator_list]
                if all_slow or "pytest.mark.slow" in marks:
                    found.add((path, node.name))
    return found


@functools.cache
def users_of_words() -> dict[str, list[tuple[str, str]]]:
    """{word: [(file, function) whose source has it]}"""
    users = {}
    for path in product_files() + files_of_tests():
        for function, words in words_of_functions(path).items():
            for word in words:
                users.setdefault(word, []).append((path, function))
    return users


@functools.cache
def known_modules(path: str) -> set[str]:
    """The modules that a file imports anywhere, the files that it names, and the programs, which
    tests name without ".py" as well."""
    text = Path(REPO, path).read_text()
    found = set(re.findall(r"(\w+)\.py\b", text))
    found |= set(re.findall(r"\w+", text)) & {program.stem for program in REPO.glob("*.py")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def knows(path: str, other: str) -> bool:
    module = other.removesuffix(".py").replace("/", ".")
    if other.startswith("tests/"):  # its folder is in sys.path
        module = Path(other).stem
    return path == other or not known_modules(path).isdisjoint({module, Path(other).stem})


def tests_for(mutant: dict) -> list[str]:
    """Quick tests, as file::function, by the number of hops from name to name: a test that names the
    mutated function comes first, then one that names a function that names it, and so on. A test in
    another room than the module's is as far as if it had one hop more."""
    users = users_of_words()
    room = mutant["file"].split("/")[0]
    place = f"tests/{TESTED_IN.get(room, room)}/"
    own = f"test_{Path(mutant['file']).stem}.py"
    found = {}
    seen = set()
    level = [(mutant["file"], mutant["function"])]
    for hops in range(1, MOST_HOPS + 1):
        following = []
        for path, function in level:
            stem = Path(path).stem
            word = stem if function == "main" else function  # a program is named by its file
            for user in users.get(word, []):
                if user in seen or not knows(user[0], path):
                    continue
                seen.add(user)
                following.append(user)
                if user[1].startswith("test_") and user not in slow_tests():
                    distance = hops + 1.5
                    if Path(user[0]).name == own:
                        distance = hops
                    elif user[0].startswith(place):
                        distance = hops + 0.5
                    found[user] = (distance, Path(REPO, user[0]).stat().st_size)
        level = following
    return ["::".join(test) for test in sorted(found, key=found.get)]


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


def fork_server_of_pools():
    """tests/pool.py lets a server fork its workers. The server would be a new Python that imports
    torch, for as many CPU seconds as a layout takes. Here it is a fork of this process, made before
    any test has threads, which waits for what the new Python would be told."""
    ours, theirs = socket.socketpair()
    server = os.fork()
    if not server:
        ours.close()
        command, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 2)
        if command:  # "...main(FD, FD, ...": the descriptors have other numbers here
            text = re.sub(r"main\(\d+, \d+", f"main({fds[0]}, {fds[1]}", command.decode())
            exec(text, {})  # noqa: S102
        os._exit(0)
    theirs.close()
    start = multiprocessing.util.spawnv_passfds

    def start_or_tell(path, args, fds):
        if "multiprocessing.forkserver" not in args[-1] or ours.fileno() < 0:
            return start(path, args, fds)
        socket.send_fds(ours, [args[-1].encode()], fds)
        ours.close()  # a second server is a new Python
        return server

    multiprocessing.util.spawnv_passfds = start_or_tell


def fork_tests(folder: Path, tests: list[str], log: Path) -> int:
    """Start the quick ones of these tests in a copy of the repository. Returns the process id."""
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
        sys.path[:0] = [str(folder), str(folder / "tests")]
        fork_server_of_pools()
        import pytest
        import torch

        torch.set_num_threads(1)
        quick = "not slow and not gpu and not nullcuda"
        status = int(
            pytest.main(["-x", "-m", quick, "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
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


def run_tests(
    folder: Path, tests: list[str], log: Path, seconds: float
) -> tuple[int | None, float]:
    """(the status of these tests, None if they were not done after so many seconds of CPU time or
    ten times as many in all; the CPU time that they took)."""
    process = fork_tests(folder, tests, log)
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


@functools.cache
def passes_unchanged(folder: Path, test: str, seconds: float) -> bool:
    """A test that fails without a mutant, too, judges none."""
    log = folder / "unchanged.log"
    status, _ = run_tests(folder, [test], log, seconds)
    log.unlink(missing_ok=True)
    return status in (0, 5, None)


def first_failure(said: str) -> str:
    """What pytest printed of the first test that failed: its name with the row, or the error."""
    named = re.findall(r"^(?:FAILED|ERROR) (.+?\]|\S+)(?: - |$)", said, re.M)
    errors = re.findall(r"^(E  .*)", said, re.M)
    return [*named, *errors, "no test"][0]


def try_mutant(mutant: dict, folder: Path, seconds: float) -> dict:
    """The mutant with "caught": the first test that failed, or "" when all passed or were not
    finished in time. folder: a copy of the repository, the same afterwards."""
    spent = 0.0
    file = folder / mutant["file"]
    text = file.read_text()
    changed = text[: mutant["start"]] + mutant["new"] + text[mutant["end"] :]
    log = folder / "mutant.log"
    log.unlink(missing_ok=True)
    todo = tests_for(mutant)
    caught = ""
    n_run = 0
    status = 5
    at_once = 6
    while todo and not caught and status is not None:
        file.write_text(changed)
        forget_bytecode(file)
        status, took = run_tests(folder, todo[:at_once], log, seconds - spent)
        file.write_text(text)
        forget_bytecode(file)
        spent += took
        said = log.read_text() if log.exists() else ""
        log.unlink(missing_ok=True)
        n_run += sum(map(len, re.findall(r"([.sF]+)(?: +\[ *\d+%\])?$", said, re.M)))
        if status in (0, 5, None):  # 5: no quick test among them
            todo = todo[at_once:]
            at_once *= 2  # the nearest tests first, with few files to collect
            continue
        caught = first_failure(said)
        if "::" in caught and not passes_unchanged(folder, caught, 4 * seconds):
            function = caught.split("[")[0]
            todo = [test for test in todo if test != function]
            caught = ""
    return mutant | dict(
        caught=caught,
        finished=status is not None,
        tests=n_run,
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
    every = [mutant for name in product_files() for mutant in mutants_of(name)]
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
