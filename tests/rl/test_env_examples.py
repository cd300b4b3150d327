"""The examples of environments in rl/tasks/: code in processes of its own, and adapters for libraries,
where they are installed."""

import os
import random
import socket
import time

import pytest
from policy import SMALL, run, steps_of

from rl.environments import open_env
from rl.tasks import code as code_task


def test_programs_are_paid_for_values_that_they_have_not_seen(monkeypatch):
    monkeypatch.setattr(code_task, "SECONDS", 60)  # Python starts late on a busy machine
    for i in range(3):
        prompt, answer = code_task.make(random.Random(i))
        table = dict(map(int, point.split(":")) for point in prompt.strip().split(","))
        assert code_task.reward(prompt, answer) == 1.0
        assert [
            code_task.reward(prompt, text)
            for text in ("", "x", "1/0", f"{table}[x]", f"{table}.get(x)")
        ] == [0] * 5


HOSTILE = {
    "never ends": "while True: pass",
    "memory": "x = 'a' * 10**10",
    "output": "print('a' * 10**6)",
    "a file": "open('{folder}/evil', 'w').write('x')",
    "another's file": "import os; os.remove('{folder}/mine')",
    "its parent": "import os; os.kill(os.getppid(), 9)",
    "a status": "import os; print(7, flush=True); os._exit(3)",
    "the network": "import socket; socket.create_connection(('127.0.0.1', {port}), 1); print(7)",
    "a child": "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(3); "
    "open('{folder}/evil', 'w')\nelse: time.sleep(9)",
}


@pytest.mark.skipif(not code_task.alone(), reason="unshare is not allowed here")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_program_can_harm_nobody(tmp_path, name):
    (tmp_path / "mine").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        began, program = (
            time.monotonic(),
            HOSTILE[name].format(folder=tmp_path, port=server.getsockname()[1]),
        )
        assert code_task.run(program) is None
        assert time.monotonic() - began < 300
    # only the root file system is read-only
    own_mount = os.stat(tmp_path).st_dev != os.stat("/").st_dev
    assert os.listdir(tmp_path) == ["mine"] or own_mount
    assert code_task.run("print(7)") == "7"


@pytest.mark.parametrize(
    "name, library", [("verifiers", "verifiers.v1"), ("openenv", "openenv.core")]
)
def test_environments_of_libraries(tmp_path, name, library):
    try:
        __import__(library)
    except ImportError:
        with pytest.raises(ValueError, match="need a library: pip install"):
            open_env(name)
        return
    run(
        1,
        "--env",
        name,
        "--model_args",
        SMALL,
        "--steps",
        2,
        "--prompts_per_step",
        4,
        "--group_size",
        4,
        "--max_new_tokens",
        16,
        "--sft_steps",
        20,
        "--eval_n",
        8,
        "--checkpoint_every",
        0,
        "--device",
        "cpu",
        "--out",
        tmp_path / "run",
    )
    lines = steps_of(tmp_path / "run")
    assert all(line["reward_mean"] >= 0 for line in lines)
    assert all(
        ("reward_part_short" if name == "verifiers" else "tool_calls") in line for line in lines
    )
