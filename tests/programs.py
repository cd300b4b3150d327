"""Programs for the tests, run as a user's command line would run them, but without importing torch
each time.

    done = run_program([sys.executable, "train_llama3.py", "--steps", "2"], cwd=folder)          # as subprocess.run
    done = run_program(runs.launch(2, "train_llama3.py", "--tp", "2"), cwd=folder)               # two ranks, as torchrun

A server process imports torch once. Each program is a fork of the server, one process per rank,
with the arguments, folder, environment and outputs that the command would have. start_program()
runs torchrun itself in a fork, whose ranks are forks, too. A few tests start real commands instead:
each that passes real=True.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import select
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
LIBRARIES = [
    path
    for path in sys.path
    if path and ("site-packages" in path or path.startswith(sys.base_prefix))
]
SOCKET = "TESTS_PROGRAMS"  # variable: where the server listens that a program was forked from
start, register = subprocess.run, atexit.register


class Server:
    """A process that has imported what its programs need, and forks a process for each request,
    which forks the ranks."""

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
    with request_of(path, request) as connection:
        return next_answer(connection)


def request_of(path: str, request: dict) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(json.dumps(request).encode() + b"\n")
    return connection


def next_answer(connection: socket.socket) -> dict:
    answer = connection.makefile("rb", buffering=0).readline()  # and no byte of the next answer
    assert answer, "the process that ran the program has ended"
    return json.loads(answer)


def serve(path: str, answers) -> None:
    """Listens at this socket. A request is a line of JSON; each of answers(**request), dicts, is a
    line, too. Ends with its parent."""
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
                    for answer in answers(**request):
                        connection.sendall(json.dumps(answer).encode() + b"\n")
                    os._exit(0)
                connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


@functools.cache
def server() -> Server:
    return Server(__file__)


def ranks_of(words: list[str]) -> tuple[int, list[str]]:
    """(how many ranks, the program and its arguments) of what follows "python" in a command."""
    if words[:3] != TORCHRUN[:3]:
        return 1, words
    flag, equals, number = words[3].partition("=")
    assert flag == TORCHRUN[3], words
    if equals:  # --nproc_per_node=2, one word
        return int(number), words[4:]
    return int(words[4]), words[5:]


def run_program(
    command, cwd=REPO, env=None, timeout=600, real=False, check=False
) -> subprocess.CompletedProcess:
    """What subprocess.run(command, capture_output=True, text=True) returns, for a command that
    starts a Python program.
    real: start it as it stands."""
    words, env = list(map(str, command)), dict(os.environ if env is None else env)
    assert words[0] == sys.executable, words
    nproc, argv = ranks_of(words[1:])
    if real or not (argv[0].endswith(".py") or argv[0] == "-c"):
        return start(
            words, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True, check=check
        )
    answer = ask(
        os.environ.get(SOCKET) or server().path,
        argv=argv,
        nproc=nproc,
        cwd=str(cwd),
        env=env,
        timeout=timeout,
    )
    if answer["late"]:
        raise subprocess.TimeoutExpired(words, timeout, answer["stdout"], answer["stderr"])
    # torchrun ends with 0 or 1
    if nproc == 1:
        status = answer["statuses"][0]
    else:
        status = int(any(answer["statuses"]))
    done = subprocess.CompletedProcess(words, status, answer["stdout"], answer["stderr"])
    if check:
        done.check_returncode()
    return done


class Program:
    """What subprocess.Popen returns, as far as a Job or ablate.py needs it, for a program that runs
    in a fork of the server."""

    def __init__(self, argv: list[str], log: str, cwd: str, env: dict[str, str]):
        path = os.environ.get(SOCKET) or server().path
        self.connection = request_of(path, dict(argv=argv, log=log, cwd=cwd, env=env))
        self.pid, self.returncode = next_answer(self.connection)["pid"], None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.returncode = next_answer(self.connection)["status"]
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            select.select([self.connection], [], [])
        return self.returncode

    def send_signal(self, number: int):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start_program(
    command: list[str], log: str, cwd: str, env: dict[str, str], real=False
) -> Program | subprocess.Popen:
    """Starts a command, python or torchrun, that writes stdout and stderr to the file `log`. real:
    start it as it stands."""
    with open(log, "w") as file:
        if command[0] == sys.executable and not real:
            return Program(command[1:], log, cwd, env)
        return subprocess.Popen(command, cwd=cwd, env=env, stdout=file, stderr=file)


class Rank(subprocess.Popen):
    """A rank that torchrun starts as a fork of itself."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *options):
        # without "python -u"
        (self.pid,), self._child_created = fork_ranks(1, lambda *_: self.run(args[2:], env)), True

    def run(self, argv, env) -> int:
        os.setsid()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # torchrun's connections
        atexit.register = register
        return run_rank(argv, os.getcwd(), env, {})


def run_torchrun() -> None:
    """torchrun in this process, as sys.argv says. Its ranks are forks: they must not inherit its
    name and what it does at its
    end."""
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handler
    import torch.distributed.run

    handler.Popen, atexit.register = Rank, lambda function, *args, **options: function
    torch.multiprocessing._set_thread_name = lambda name: None
    torch.distributed.run.main()


def run_nested(command, capture_output=False, text=False, **options):
    """subprocess.run as a program in a fork sees it: a Python that it starts is a fork, too."""
    if (
        command[0] == sys.executable
        and capture_output
        and text
        and options.keys() <= {"cwd", "env", "timeout", "check"}
    ):
        return run_program(command, **{"cwd": os.getcwd()} | options)
    return start(command, capture_output=capture_output, text=text, **options)


class Nested(subprocess.Popen):
    """subprocess.Popen as a program in a fork sees it: a Python that writes into a file, while the
    program goes on, is a fork of the server. It does not end with the program that started it, as
    preexec_fn may want: tests of that start real processes."""

    def __new__(cls, command, **options):
        known = {"env", "stdout", "stderr", "start_new_session", "preexec_fn"}
        log = getattr(options.get("stdout"), "name", None)
        if command[0] != sys.executable or not isinstance(log, str) or options.keys() - known:
            return super().__new__(cls)
        argv = [str(word) for word in command[1:]]
        return Program(
            argv, os.path.abspath(log), os.getcwd(), options.get("env") or dict(os.environ)
        )


def rank_variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    """The environment that a launcher gives to a rank; without TORCHELASTIC_USE_AGENT_STORE rank 0
    keeps the store."""
    return dict(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
        GROUP_RANK="0",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )


def hold_port() -> socket.socket:
    """A socket that reserves a port for a program that must be told a number: as long as the socket
    is open, the system gives its port to nobody who asks for any port. The program can listen there
    all the same, because both set SO_REUSEADDR and this socket does not listen."""
    family = socket.AF_INET
    address = "127.0.0.1"
    if sys.platform == "darwin":  # where a bound socket keeps its address from those that listen
        family = socket.AF_INET6
        address = "::1"
    holder = socket.socket(family)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def port_of(holder: socket.socket) -> int:
    return holder.getsockname()[1]


def fork_ranks(nproc: int, body) -> list[int]:
    """Forks one process per rank, which calls body(rank, variables for its environment). Returns
    their process ids."""
    pids = []
    holder = hold_port()  # the ranks inherit it: the port is theirs until the last rank has ended
    port = port_of(holder)
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
    holder.close()
    return pids


def wait_for(pids: list[int], timeout: float, patience: float = 5) -> list[int]:
    """Exit statuses; patience: seconds that the other ranks get when one has failed; then they are
    killed (status -9)."""
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


def run_ranks(argv, nproc, cwd, env, timeout):
    """Answer of the server: runs one program."""
    # a TemporaryDirectory would be removed at the end of each fork
    began, folder = time.monotonic(), tempfile.mkdtemp()
    files = {"stdout": Path(folder, "stdout"), "stderr": Path(folder, "stderr")}
    pids = fork_ranks(nproc, lambda rank, variables: run_rank(argv, cwd, env | variables, files))
    statuses = wait_for(pids, timeout, patience=0.5)  # torchrun kills the other ranks at once
    texts = {
        name: path.read_text(errors="replace") if path.exists() else ""
        for name, path in files.items()
    }
    shutil.rmtree(folder)
    yield dict(statuses=statuses, late=time.monotonic() - began > timeout, **texts)


def run_job(argv, log, cwd, env):
    """Answers of the server: starts one program and says its process id, and when it has ended, its
    status."""
    (pid,) = fork_ranks(1, lambda *_: run_rank(argv, cwd, env, {"stdout": log, "stderr": log}))
    yield dict(pid=pid)
    yield dict(status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def run_rank(argv: list[str], cwd: str, env: dict[str, str], files: dict[str, Path]) -> int:
    """Makes this process what `python argv[0] argv[1:]` would be, runs the program, and returns its
    exit status."""
    if job := env.get("JOB_OF_THE_TEST"):  # a fork's environment is not in /proc, its name is
        Path("/proc/self/comm").write_text(f"{job}.{env.get('RANK', '')}")
    # torchrun's handlers, if this is its fork
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(files.values(), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    for name in set(os.environ) - set(env) - {SOCKET}:
        del os.environ[name]
    os.environ.update(env)
    if threads := env.get("OMP_NUM_THREADS", "1" if "RANK" in env else ""):
        import torch

        # the variable is read when torch is imported, which was before
        torch.set_num_threads(int(threads))
        os.environ["OMP_NUM_THREADS"] = threads
    more = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    subprocess.run = run_nested
    subprocess.Popen = Nested
    sys.stdout.reconfigure(line_buffering=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if argv[:2] == TORCHRUN[:2]:
            sys.argv[:], source, name = argv[1:], "run_torchrun()", "<string>"
            main.run_torchrun = run_torchrun
        elif argv[0] == "-c":
            sys.path[:], sys.argv[:], source, name = (
                ["", *more, *LIBRARIES],
                ["-c", *argv[2:]],
                argv[1],
                "<string>",
            )
        else:
            name = main.__file__ = os.path.abspath(argv[0])
            sys.path[:], sys.argv[:] = (
                [os.path.dirname(os.path.realpath(name)), *more, *LIBRARIES],
                argv,
            )
            source = Path(name).read_text()
        exec(compile(source, name, "exec"), main.__dict__)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code
        elif end.code is None:
            status = 0
        else:
            status = 1
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
    """Imports libraries that the programs need; none of the project's own files, because a test may
    run an edited copy."""
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.elastic.multiprocessing.subprocess_handler
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.run
    import torch.distributed.tensor.parallel
    import torch.nn.attention.flex_attention
    import torch.utils.checkpoint  # noqa: F401

    gc.freeze()  # a program collects garbage at its start: its own, not that of all these libraries


if __name__ == "__main__":
    preload()
    os.environ[SOCKET] = sys.argv[1]
    serve(sys.argv[1], lambda **request: (run_job if "log" in request else run_ranks)(**request))
