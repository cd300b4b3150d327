"""Programs for the tests, run as a user's command line would run them, but without importing torch each time.

    done = run_program([sys.executable, "train_llama3.py", "--steps", "2"], cwd=folder)          # as subprocess.run
    done = run_program(runs.launch(2, "train_llama3.py", "--tp", "2"), cwd=folder)               # two ranks, as torchrun

A server process imports torch once. Each program is a fork of the server, one process per rank, with the arguments, folder,
environment and outputs that the command would have. A few tests start real commands instead: those of test_launch.py, and each
test that passes real=True.
"""
import atexit
import contextlib
import functools
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path

REPO = Path(__file__).parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
LIBRARIES = [path for path in sys.path if path and ("site-packages" in path or path.startswith(sys.base_prefix))]
SOCKET = "TESTS_PROGRAMS"  # variable: where the server listens that a program was forked from
start = subprocess.run


class Server:
    """A process that has imported what its programs need, and forks a process for each request, which forks the ranks."""

    def __init__(self, *command):
        self.folder = tempfile.mkdtemp()
        self.path = f"{self.folder}/socket"
        self.process = subprocess.Popen([sys.executable, *command, self.path])
        while not os.path.exists(self.path):
            assert self.process.poll() is None, f"{command} has ended"
            time.sleep(0.01)
        atexit.register(self.close)

    def close(self):
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def ask(path: str, **request) -> dict:
    """The answer of the server at this socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = connection.makefile().readline()
    assert answer, "the process that ran the program has ended"
    return json.loads(answer)


def serve(path: str, answer) -> None:
    """Listens at this socket. A request is a line of JSON; its answer is answer(**request), a dict. Ends with its parent."""
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path + ".new")
        server.listen(64)
        os.rename(path + ".new", path)  # from now on it can be connected to
        server.settimeout(0.5)
        while os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                connection = server.accept()[0]
                if not os.fork():
                    server.close()
                    connection.setblocking(True)
                    request = json.loads(connection.makefile().readline())
                    connection.sendall(json.dumps(answer(**request)).encode() + b"\n")
                    os._exit(0)
                connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


@functools.cache
def server() -> Server:
    return Server(__file__)


def run_program(command, cwd=REPO, env=None, timeout=600, real=False, check=False) -> subprocess.CompletedProcess:
    """What subprocess.run(command, capture_output=True, text=True) returns, for a command that starts a Python program.
    real: start it as it stands."""
    words, env = list(map(str, command)), dict(os.environ if env is None else env)
    assert words[0] == sys.executable, words
    nproc, argv = (int(words[5]), words[6:]) if words[1:5] == TORCHRUN else (1, words[1:])
    if real or not (argv[0].endswith(".py") or argv[0] == "-c"):
        return start(words, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True, check=check)
    answer = ask(os.environ.get(SOCKET) or server().path, argv=argv, nproc=nproc, cwd=str(cwd), env=env, timeout=timeout)
    if answer["late"]:
        raise subprocess.TimeoutExpired(words, timeout, answer["stdout"], answer["stderr"])
    status = answer["statuses"][0] if nproc == 1 else int(any(answer["statuses"]))  # torchrun ends with 0 or 1
    done = subprocess.CompletedProcess(words, status, answer["stdout"], answer["stderr"])
    if check:
        done.check_returncode()
    return done


def run_nested(command, capture_output=False, text=False, **options):
    """subprocess.run as a program in a fork sees it: a Python that it starts is a fork, too."""
    if command[0] == sys.executable and capture_output and text and options.keys() <= {"cwd", "env", "timeout", "check"}:
        return run_program(command, **{"cwd": os.getcwd()} | options)
    return start(command, capture_output=capture_output, text=text, **options)


def rank_variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    """The environment that a launcher gives to a rank; without TORCHELASTIC_USE_AGENT_STORE rank 0 keeps the store."""
    return dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc), GROUP_RANK="0",
                MASTER_ADDR="localhost", MASTER_PORT=str(port))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def fork_ranks(nproc: int, body) -> list[int]:
    """Forks one process per rank, which calls body(rank, variables for its environment). Returns their process ids."""
    pids, port = [], free_port()
    for rank in range(nproc):
        if pid := os.fork():
            pids.append(pid)
            continue
        status = 1
        try:
            status = body(rank, rank_variables(rank, nproc, port) if nproc > 1 else {})
        except BaseException:
            traceback.print_exc()
        os._exit(status or 0)
    return pids


def wait_for(pids: list[int], timeout: float, patience: float = 5) -> list[int]:
    """Exit statuses; patience: seconds that the other ranks get when one has failed; then they are killed (status -9)."""
    statuses, deadline = {}, time.monotonic() + timeout
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses and (done := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = os.waitstatus_to_exitcode(done[1])
                if statuses[pid] != 0:
                    deadline = min(deadline, time.monotonic() + patience)
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in statuses:
                    os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.005)
    return [statuses[pid] for pid in pids]


def run_ranks(argv, nproc, cwd, env, timeout) -> dict:
    """Answer of the server: runs one program."""
    began, folder = time.monotonic(), tempfile.mkdtemp()  # a TemporaryDirectory would be removed at the end of each fork
    files = {"stdout": Path(folder, "stdout"), "stderr": Path(folder, "stderr")}
    pids = fork_ranks(nproc, lambda rank, variables: run_rank(argv, cwd, env | variables, files))
    statuses = wait_for(pids, timeout, patience=0.5)  # torchrun kills the other ranks at once
    texts = {name: path.read_text(errors="replace") if path.exists() else "" for name, path in files.items()}
    shutil.rmtree(folder)
    return dict(statuses=statuses, late=time.monotonic() - began > timeout, **texts)


def run_rank(argv: list[str], cwd: str, env: dict[str, str], files: dict[str, Path]) -> int:
    """Makes this process what `python argv[0] argv[1:]` would be, runs the program, and returns its exit status."""
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(files.values(), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    for name in set(os.environ) - set(env) - {SOCKET}:
        del os.environ[name]
    os.environ.update(env)
    if threads := env.get("OMP_NUM_THREADS", "1" if "RANK" in env else ""):
        import torch

        torch.set_num_threads(int(threads))  # the variable is read when torch is imported, which was before
        os.environ["OMP_NUM_THREADS"] = threads
    more = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    subprocess.run = run_nested
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if argv[0] == "-c":
            sys.path[:], sys.argv[:], source, name = ["", *more, *LIBRARIES], ["-c", *argv[2:]], argv[1], "<string>"
        else:
            name = main.__file__ = os.path.abspath(argv[0])
            sys.path[:], sys.argv[:] = [os.path.dirname(os.path.realpath(name)), *more, *LIBRARIES], argv
            source = Path(name).read_text()
        exec(compile(source, name, "exec"), main.__dict__)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # waits for the program's threads, as the end of an interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def preload():
    """Imports libraries that the programs need; none of the project's own files, because a test may run an edited copy."""
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.nn.attention.flex_attention
    import torch.utils.checkpoint  # noqa: F401

    gc.freeze()  # a program collects garbage at its start: its own, not that of all these libraries


if __name__ == "__main__":
    preload()
    os.environ[SOCKET] = sys.argv[1]
    serve(sys.argv[1], run_ranks)
