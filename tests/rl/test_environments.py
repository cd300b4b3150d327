"""Tasks and rewards, against rl/environments.py: paid answers, drawn prompts and held-out prompts."""

import itertools
import math
import random
import sys
import threading
import time
from fractions import Fraction
from types import ModuleType, SimpleNamespace

import pytest
from policy import ENV, TINY, run, steps_of, trainer_of
from programs import run_program
from saves import refuses

import grpo
from checkpoint import CheckpointConfig
from flags.config import parse_config, usage_error
from rl import environments, rewards, rollouts, warm_up
from rl.calls import WATCH
from rl.environments import ask_for_two, load_own
from rl.sample import Sample
from rl.tasks import calculator
from tools.failure import report_error


def test_what_was_cut_off_is_not_paid_for():
    """By our tasks; tasks of users decide, with a parameter `truncated`."""
    for name in ("reverse", "sum_digits", "calculator"):
        env = environments.open_env(name)
        prompt, answer = environments.draw_task(env, "eval", 3)
        assert [
            rewards.pay(env, prompt, [answer], [truncated])[0].reward for truncated in (False, True)
        ] == [1, 0]
    asks = SimpleNamespace(reward=lambda prompt, completion, truncated: -1.0 if truncated else 1.0)
    other = SimpleNamespace(reward=lambda prompt, completion: 0.5)
    assert [rewards.pay(env, "", [""], [True])[0].reward for env in (asks, other)] == [-1.0, 0.5]


def test_a_file_that_loads_another_one_keeps_its_own_limit(tmp_path, monkeypatch):
    """After the inner import the outer one still has its moment to end."""
    monkeypatch.setattr(WATCH, "seconds", 600.0)
    inner = tmp_path / "inner.py"
    inner.write_text("")
    outer = tmp_path / "outer.py"
    outer.write_text(f"""
from rl.calls import WATCH
from rl.environments import load_own

load_own("env", {str(inner)!r}, [])
running = [what for _, what in WATCH.running.values()]
""")
    assert load_own("env", str(outer), []).running == [f"the import of {outer}"]
    assert WATCH.running == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "x", "raise"])
def test_a_reward_that_is_none_names_its_sample(value):
    def reward(prompt, completion):
        if value == "raise":
            raise KeyError("no\nsuch key")
        return value

    ((nothing, failure, _),) = rewards.pay(
        SimpleNamespace(reward=reward), "1 2", ["some\nwhere"], [False]
    )
    assert nothing is None
    assert "no reward for prompt '1 2', completion 'some\\nwhere'" in failure
    assert "\n" not in failure


def test_prompts_are_drawn_without_replacement_where_there_is_a_list():
    env = environments.open_env("sum_digits")
    prompts = [prompt for prompt, _ in env.problems]
    held_out = environments.held_out_tasks(env, 1024)
    assert len(held_out) == len(set(held_out)) == sum(map(environments.is_held_out, prompts)) == 122
    n = len(prompts) - len(held_out)
    drawn = [environments.draw_task(env, "train/0", i)[0] for i in range(2 * n)]
    assert set(drawn[:n]) == set(drawn[n:]) == set(prompts) - set(held_out)
    assert drawn[:n] != drawn[n:]
    assert set(environments.held_out_tasks(env, 50)) < set(held_out)
    many = environments.held_out_tasks(environments.open_env("reverse"), 1024)
    assert len(set(many)) == 1024
    assert all(map(environments.is_held_out, many))
    # of unknown number
    small = SimpleNamespace(__name__="small", make=lambda rng: (str(rng.randrange(100)), ""))
    assert sorted(environments.held_out_tasks(small, 1024)) == sorted(
        filter(environments.is_held_out, map(str, range(100)))
    )


LENGTHS = """
ALPHABET = "0123456789>"
make = lambda rng: ("7" * rng.randint(1, 25) + ">", "7")
reward = lambda prompt, completion: float(len(completion) % 2)
"""


@pytest.mark.parametrize("finite", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, finite):
    """--seq_len 16 has no room for an answer to most prompts: once such a prompt ended the run,
    again after every restart."""
    more = (
        "problems = [('7' * (i % 25) + str(i) + '>', '7') for i in range(400)]\ndel make\n"
        if finite
        else ""
    )
    (tmp_path / "env.py").write_text(LENGTHS + more)
    said = run(
        1,
        *TINY,
        "--env",
        tmp_path / "env.py",
        "--steps",
        2,
        "--checkpoint_every",
        0,
        "--out",
        tmp_path / "run",
    )
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    assert all((line["prompts_too_long"] > 0) == (not finite) for line in steps)
    assert (
        "problems are left out: with their prompts --seq_len 16 leaves no room"
        if finite
        else " prompts too long"
    ) in said
    flags = [
        "--env",
        tmp_path / "env.py",
        "--seq_len",
        2,
        "--max_new_tokens",
        1,
        "--out",
        tmp_path / "none",
    ]
    said = run(1, *TINY, *flags, status=2)
    assert "--seq_len" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "none" / "metrics.jsonl").exists()


def test_prompts_that_leave_little_room_are_told():
    """A prompt of 27 tokens in 29: every sample is cut after two, and paid nothing."""
    text = SimpleNamespace(prompt=lambda task: [1] * len(task), fits=lambda task, seq_len: True)
    finite, endless = ModuleType("finite"), ModuleType("endless")
    finite.problems = [("x" * 13, ""), ("x" * 14, ""), ("x" * 27, "")]
    finite.eval_problems = [("x", "")]
    endless.make = lambda rng: (str(rng.random())[:13] + "x" * rng.randint(0, 14), "")
    (said,) = environments.leave_out_long(finite, text, 29, 16)
    assert said.startswith(
        "2 of 4 prompts leave less than --max_new_tokens 16 in --seq_len 29, the "
    )
    assert "longest 2:" in said
    assert "--seq_len 43 has room for all" in said
    assert "of 64 prompts leave less" in environments.leave_out_long(endless, text, 29, 16)[0]
    for env in (finite, endless):
        assert environments.leave_out_long(env, text, 43, 16) == []


@pytest.mark.parametrize(
    "processes, flags",
    [
        (1, []),
        pytest.param(2, ["--dp_shard", 2], marks=pytest.mark.slow),
        pytest.param(2, ["--gen_ranks", 1, "--async_steps", 1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_reward_that_fails_ends_the_run_in_one_line(tmp_path, processes, flags):
    (tmp_path / "env.py").write_text(
        "import tests.env_counting\nfrom tests.env_counting import ALPHABET, make\ncalls = []\n\n\n"
        "def reward(prompt, completion):\n    calls.append(1)\n"
        "    return None if len(calls) == 20 else tests.env_counting.reward(prompt, completion)\n"
    )
    said = run(
        processes,
        *TINY,
        "--env",
        tmp_path / "env.py",
        "--steps",
        9,
        "--eval_every",
        0,
        "--checkpoint_every",
        0,
        *flags,
        "--out",
        tmp_path / "run",
        status=1,
    )
    ours = [line for line in said.splitlines() if "error on rank" in line]
    assert len(ours) == 1
    assert "env.py: no reward for prompt '" in ours[0]
    assert ", completion '" in ours[0]
    assert processes > 1 or said.count("\n") == 1  # torchrun adds a report of its own


@pytest.mark.parametrize("name", ["reverse", "sum_digits", "calculator"])
def test_environments_pay_for_their_own_answers_only(name):
    env = environments.open_env(name)
    tasks = [environments.draw_task(env, "train/0", i) for i in range(50)]
    assert all(env.reward(prompt, answer) == 1.0 for prompt, answer in tasks)
    assert all(
        env.reward(prompt, "") == 0.0 == env.reward(prompt, "1")
        for prompt, _ in tasks
        if tasks[0][1] != "1"
    )
    held_out = {environments.draw_task(env, "eval", i)[0] for i in range(50)}
    assert not held_out & {
        environments.draw_task(env, f"train/{seed}", i)[0] for seed in range(3) for i in range(300)
    }
    text = grpo.Text("", alphabet=env.ALPHABET)
    for prompt, answer in tasks:
        s = environments.supervised_sample(env, text, prompt, answer)
        assert text.decode(s.ids) == answer
        assert text.tokenizer.decode(s.prompt) == prompt
        masked = text.decode([t for t, m in zip(s.ids, s.mask) if not m])
        assert masked == (
            "".join(f"{turn.split('=')[1]};" for turn in answer.split(";")[:-1])
            if name == "calculator"
            else ""
        )


def test_a_tool_is_asked_once_where_a_token_goes_on_after_its_mark():
    words, heard = ["", "1+1", "</", "code>", "code>\n", "2", "1+"], []
    text = SimpleNamespace(
        decode=lambda ids: "".join(words[i] for i in ids),
        ids_after=lambda said: [words.index(said)],
        ends=[0],
    )
    env = SimpleNamespace(
        TOOL_END="</code>", tool=lambda completion: heard.append(completion) or "2"
    )
    for last in (3, 4):  # 4: the mark and a new line in one token
        turns, ids = environments.Turns(env, text, ["task"]), [1, 2, last, 5, 1, 2, last]
        ask = lambda begin, end: turns.reply(Sample(begin=begin, ids=ids[:end]))  # noqa: B023, E731
        assert [ask(0, 1), ask(0, 2), ask(4, 5)] == [[], [], []]
        assert turns.calls == [0]
        assert [ask(0, 3).result(), ask(4, 7).result()] == [[5], [5]]
        assert turns.calls == [2]
        assert heard[-2:] == ["1+1</code>", f"1+1</{words[last]}21+1</code>"]
    env.tool = lambda completion: 1 / 0
    assert turns.reply(Sample(ids=[1, 2, 3])).result() is None
    assert "ZeroDivisionError" in turns.failed[0]
    game = SimpleNamespace(
        TURN_END="</code>",
        reset=lambda task: (task, ""),
        step=lambda state, said: ("", False, math.nan),
    )
    turns = environments.Turns(game, text, ["task"])
    assert turns.reply(Sample(ids=[1, 2, 3])).result() is None
    assert "the reward is nan" in turns.failed[0]
    game.step = lambda state, said: ("", 1.0, True)
    assert turns.reply(Sample(ids=[1, 2, 3])).result() is None
    assert "True or False, not 1.0" in turns.failed[1]


def test_an_environment_with_state_plays_each_sample_by_itself():
    """Three turns, each ended by a 7 and paid by its letters: read and not trained, and the last is
    the end of the sample."""

    def step(state, turn):
        state.append(turn)
        return f"{len(state)}.", len(state) == 4, float(len(turn))

    game = SimpleNamespace(
        __name__="game",
        TURN_END="7",
        make=lambda rng: (str(rng.randrange(1000)), "12373."),
        step=step,
        reset=lambda task: ([task], task[::-1] + ">"),
    )
    text = grpo.Text("", alphabet="0123456789>.", env=game)
    s = environments.supervised_sample(game, text, "35", "1272.73.7799")
    assert s.mask == [1.0] * 3 + [0.0] * 2 + [1.0] + [0.0] * 2 + [1.0]
    assert text.decode(s.prompt) == "53>"
    text.ends, trainer = [], trainer_of(seq_len=64, unknown=[0, *range(13, 24)])
    cfg = grpo.Config(
        prompts_per_step=6, group_size=4, seq_len=64, max_new_tokens=40, reward_threads=3
    )
    samples = rollouts.make_batch(cfg, game, text, trainer.layout, trainer.model, 0, 0)["samples"]
    for s in samples:
        *turns, _ = "".join(word for word, mask in zip(s.text, s.mask) if mask).split("7")
        said = "".join(word for word, mask in zip(s.text, s.mask) if not mask)
        assert s.calls == len(turns) <= 3
        assert s.truncated == (len(turns) < 3)
        assert s.reward == sum(map(len, turns))
        assert "2.3."[: 2 * len(turns)].startswith(said)
    assert {s.calls for s in samples} >= {1, 3}


def test_own_environments(tmp_path):
    for lines, said in (
        ("make = print", "does not define reward"),
        ("TOOL_END='='\nmake = reward = print", "not define tool;"),
        (
            "TOOL_END = 7\nmake = reward = tool = print",
            "TOOL_END must be a text with at least one .*, not 7",
        ),
        ("problems = ['7+', '1+']\nreward = print", "must be pairs .* and '7.' is a text"),
        ("problems = [('7+', 1)]\nreward = print", "number 0 is"),
        ("problems = []\nreward = print", "not empty"),
        ("ALFABET = '7'\nmake = reward = print", "ALFABET is not read; is ALPHABET meant"),
        (
            "TURN_ENDS = '7'\nmake = reset = step = print",
            "TURN_ENDS is not read; is TURN_END meant",
        ),
        ("TOOLEND = '7'\nmake = reward = print", "TOOLEND is not read; is TOOL_END meant"),
    ):
        (tmp_path / "mine.py").write_text(lines)
        refuses(f"mine.py:? .*{said}", environments.open_env, str(tmp_path / "mine.py"))
    (tmp_path / "game.py").write_text(
        "def make(rng):\n    return 'x'\n\ndef reset(task):\n    return {}, int(task)\n"
    )
    refuses("game.py does not define step", environments.open_env, str(tmp_path / "game.py"))
    (tmp_path / "game.py").write_text(
        (tmp_path / "game.py").read_text() + "\ndef step(state, text):\n    return 1\n"
    )
    game = environments.open_env(str(tmp_path / "game.py"))
    message = "^--env: make fails, or does not return two values: ValueError"
    refuses(message, environments.draw_task, game, "train", 0)
    message = "^--env: reset fails, or .*: ValueError.*invalid literal.*game.py, line 5"
    refuses(message, grpo.Text("", env=game).prompt, "x")
    game.make = lambda rng: (1, "x")
    refuses("make must return .*, and 1 is none", environments.draw_task, game, "train", 0)
    text = grpo.Text("", alphabet=environments.open_env("reverse").ALPHABET)
    refuses("'é' in '1é>' is not in the ALPHABET of --env; add it there", text.prompt, "1é>")
    refuses(
        "--env n is no file ending in .py and none of reverse.*calculator.*, dataset, gsm8k",
        environments.open_env,
        "n",
    )


def test_arithmetic_is_no_eval():
    assert calculator.arithmetic("2*(3+4)-1") == 13 == calculator.arithmetic("91/7")
    assert str(calculator.arithmetic("9/3")) == "3"  # as in the calculator's text
    assert calculator.arithmetic("1/3") == Fraction(1, 3)
    assert calculator.arithmetic("(1/3 + 1/6) * 4") == 2
    for text in (
        "2**9",
        "1/0",
        "3//2",
        "2/(1-1)",
        "a",
        "__import__('os')",
        "(" * 5000,
        "",
        "1+",
        "-1",
        "2 3",
        "3*7--2",
        "3*7 #2",
        "3*7-2\n#",
        "2_1-2",
        "\u0663*7-2",
        "3*7-2=19",
    ):
        assert calculator.arithmetic(text) is None


def test_countdown():
    """The task on which people compare: each number once, and the right value in any way."""
    env = environments.open_env("countdown")
    for completion, reward in (
        *((text, 1) for text in ("3*7-2", " 3*7-2 ", "(3 * 7) - 2", "7*3-2")),
        *((text, 0) for text in ("3*7 #2", "3*7-2=19", "7+7+3+2", "3*7--2", "21-2", "")),
    ):
        assert env.reward("3 7 2 = 19: ", completion) == reward
    for i in range(50):
        prompt, answer = environments.draw_task(env, "train", i)
        assert set(prompt + answer) <= set(env.ALPHABET)
        assert rewards.pay(env, prompt, [answer], [False])[0].reward == 1
        assert rewards.pay(env, prompt, [answer], [True])[0].reward == 0


def game_of(reset, **more):
    return SimpleNamespace(
        make=lambda rng: (str(rng.randrange(10**9)), "1"),
        reset=reset,
        step=lambda state, said: ("", True, 1.0),
        **more,
    )


def test_chance_is_noticed():
    """Two resets of one task must begin alike; of a state that differs a line is told."""
    fair = game_of(lambda task: (random.Random(task), task))
    assert environments.notice_chance(fair, lambda prompt: True) == []
    dice = game_of(lambda task: ({"dice": random.random()}, ">"))
    (said,) = environments.notice_chance(dice, lambda prompt: True)
    assert "have different states" in said
    seen = game_of(lambda task: (None, f"{random.random()}>"))
    refuses(
        "two resets of the task .* begin with", environments.notice_chance, seen, lambda p: True
    )
    other = SimpleNamespace(make=lambda rng: (str(random.random()), "1"))
    (said,) = environments.notice_chance(other, lambda prompt: True)
    assert "two calls of make" in said


def test_a_name_that_nobody_reads_is_told():
    env = SimpleNamespace(make=len, reward=len, eval_problem=[], helper=len, step_size=1)
    assert environments.near_names(env) == [("eval_problem", "eval_problems")]


def test_a_step_has_a_time_limit():
    """Also in an answer of the warm-up; the endless loop is ended."""
    words = ["", "1", "7"]
    text = SimpleNamespace(decode=lambda ids: "".join(words[i] for i in ids), ends=[0])

    def endless(state, said):
        while True:
            pass

    game = SimpleNamespace(TURN_END="7", reset=lambda task: (task, ""), step=endless)
    before = threading.active_count()
    turns = environments.Turns(game, text, ["task"], 1, 0.2)
    assert turns.answer(Sample(ids=[1, 2])).result(600) is None
    assert "the step takes longer than --reward_timeout_s 0.2" in turns.failed[0]
    turns.close([])
    for _ in range(6000):
        if threading.active_count() == before:
            break
        time.sleep(0.1)
    assert threading.active_count() == before


def test_the_warm_up_speaks_and_hears(monkeypatch, capsys):
    """A line every five seconds, and the end after the step in which a signal has come."""
    answers = iter([False, False, True])
    stop = SimpleNamespace(saves=True, agreed=lambda layout: next(answers))
    steps = []
    trainer = SimpleNamespace(
        cfg=grpo.Config(sft_steps=9),
        layout=SimpleNamespace(rank=0),
        train_supervised=lambda samples: 1.5,
        optim_step=steps.append,
    )
    clock = itertools.count(0, 6)
    monkeypatch.setattr(warm_up.time, "monotonic", lambda: next(clock))
    env = environments.open_env("reverse")
    text = grpo.Text("", alphabet=env.ALPHABET)
    monkeypatch.setattr(warm_up, "supervised_sample", lambda *args: None)
    assert warm_up.warm_up(trainer, env, text, stop)
    assert len(steps) == 3
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("supervised warm-up: step 1 of at most 9, loss 1.500")
    assert said[-1] == "stopped in the supervised warm-up: the same command begins again"


@pytest.mark.parametrize(
    "text, line",
    [
        ("raise SystemExit\n", 1),
        (
            "import sys\n\n\ndef make(rng):\n    sys.exit(0)\n\n\ndef reward(p, c):\n    return 1.0\n",
            5,
        ),
        ("def make(rng):\n    exit()\n\n\ndef reward(p, c):\n    return 1.0\n", 2),
    ],
)
def test_a_file_that_ends_the_program_is_an_error(text, line, tmp_path, capsys):
    """With status 0 and nothing trained, a script would go on with the next command."""
    file = tmp_path / "my_env.py"
    file.write_text(text)
    with pytest.raises(SystemExit) as error:
        env = load_own("env", str(file), ["reverse"])
        ask_for_two(env, "make", random.Random(0))
    assert report_error(error.value) == 1
    assert f"{file}, line {line} ended the program with sys.exit(" in capsys.readouterr().err


@pytest.mark.parametrize("slow", ["make", "reset"])
def test_make_and_reset_have_a_limit(slow, tmp_path):
    """A program that waits for them without end would say nothing at all."""
    file = tmp_path / "env.py"
    sleeps = {name: "time.sleep(99)" if name == slow else "pass" for name in ("make", "reset")}
    file.write_text(
        "import time\n"
        f"def make(rng):\n    {sleeps['make']}\n    return str(rng.random()), 'b'\n"
        f"def reset(task):\n    {sleeps['reset']}\n    return 1, task\n"
        "def step(state, text): return '', True, 1.0\n"
    )
    command = [sys.executable, "grpo.py", "--env", file, "--reward_timeout_s", "2"]
    done = run_program([*command, "--out", tmp_path / "run"], env=ENV)
    assert done.returncode == 1
    assert done.stderr == f"error on rank 0: --env: {slow} takes longer than --reward_timeout_s 2\n"


def test_wrong_usage_and_help_keep_their_status():
    with pytest.raises(SystemExit) as error:
        usage_error("wrong")
    assert report_error(error.value) == 2
    with pytest.raises(SystemExit) as error:
        parse_config(CheckpointConfig, ["--help"])
    assert report_error(error.value) == 0
