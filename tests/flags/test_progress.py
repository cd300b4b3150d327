"""Nothing long is silent, against flags/progress.py: every program shows its long phases on stderr, a
terminal has one line that moves, a file a line now and then; text is printed as it is generated."""

import io
import os
import pty
import sys
import time
from types import SimpleNamespace

import pytest
from policy import sharp_model
from programs import REPO, run_program
from runs import ENV, MODEL
from tokenizers import Tokenizer, decoders, models

from distributed import initial
from flags import progress
from flags.progress import Progress, Stream, describe_progress, duration_text
from generate import generate
from models.llama3 import Llama3Config
from rl import decoding


# ---------------------------------------------------------------- the line
@pytest.mark.parametrize(
    "done, total, seconds, unit, line",
    [
        (0, 0, 7.2, ("", 1), "x: 7 s"),
        (0, 12, 0.4, ("files", 1), "x: 0 of 12 files, 0 s"),
        (3, 12, 4, ("files", 1), "x: 3 of 12 files, 0.75 files/s, 4 s, 12 s left"),
        (5e9, 2e10, 10, ("GB", 1e9), "x: 5 of 20 GB, 0.5 GB/s, 10 s, 30 s left"),
        (13, 12, 4, ("files", 1), "x: 12 of 12 files, 3.25 files/s, 4 s"),
        (9, 0, 3, ("rows", 1), "x: 9 rows, 3 rows/s, 3 s"),
        (
            1,
            4000,
            3600,
            ("steps", 1),
            "x: 1 of 4,000 steps, 1 h 0 min, 3999 h 0 min left",
        ),
    ],
)
def test_the_words_of_the_line(done, total, seconds, unit, line):
    assert describe_progress("x", done, total, seconds, unit) == line


def test_durations():
    assert duration_text(59.4) == "59 s"
    assert duration_text(59.6) == "1 min 0 s"
    assert duration_text(3725) == "1 h 2 min"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_until(stream: io.StringIO, n: int) -> list[str]:
    """The writes of the thread, as soon as there are n."""
    while stream.getvalue().count(MARK) < n:
        time.sleep(0.01)
    return stream.getvalue().split(MARK)[1:]


MARK = "work: "


@pytest.fixture
def quick(monkeypatch):
    for name in ("FIRST", "EVERY", "EVERY_IN_FILE"):
        monkeypatch.setattr(progress, name, 0.02)


def test_a_terminal_has_one_line_that_is_rewritten_and_goes(quick, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("work", 10, "parts") as line:
        line(4)
        lines_until(stream, 3)
    text = stream.getvalue()
    assert "4 of 10 parts" in text
    assert "\n" not in text
    for write in text.split(progress.ERASE)[1:-1]:
        assert write.endswith("\r")  # another print takes the place of the line
    assert text.endswith(progress.ERASE)
    assert not progress.OPEN


def test_a_file_has_lines(quick, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("work"):
        lines_until(stream, 2)
    assert progress.ERASE not in stream.getvalue()
    assert all(line.startswith("work: ") for line in stream.getvalue().splitlines())


def test_short_work_shows_nothing(monkeypatch):
    assert progress.EVERY_IN_FILE >= 30 and progress.EVERY <= 1 and progress.FIRST <= 3
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "FIRST", 600.0)  # a machine may be busy for any second
    with Progress("work"):
        pass
    assert stream.getvalue() == ""


def test_the_weights_of_a_large_model_show_how_many_are_drawn(quick, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    drawn = []

    def draw():
        if len(drawn) == 1:
            for _ in range(6000):  # until it is shown that one block is done
                if "drawing weights: 1 of 3 blocks" in stream.getvalue():
                    break
                time.sleep(0.01)
        drawn.append(1)

    monkeypatch.setattr(initial, "MANY_BLOCKS", 4)
    initial.draw_side_by_side([lambda: drawn.append(1)] * 3, 1)
    assert not stream.getvalue()
    drawn.clear()
    monkeypatch.setattr(initial, "MANY_BLOCKS", 3)
    initial.draw_side_by_side([draw] * 3, 1)
    assert len(drawn) == 3
    assert "drawing weights: 1 of 3 blocks" in stream.getvalue()

    def fail():
        raise MemoryError

    with pytest.raises(MemoryError):
        initial.draw_side_by_side([fail] * 3, 1)
    assert not progress.OPEN


def test_rank_1_is_silent(quick, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    line = Progress("work")
    assert not line.shows
    with line:
        assert not line.thread.is_alive()
    assert Progress("work", shows=True).shows


def test_of_work_within_work_the_inner_has_the_line(quick, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("outer") as outer:
        while "outer" not in stream.getvalue():
            time.sleep(0.01)
        with Progress("inner"):
            with outer.writing:  # no write of the outer one is under way
                stream.truncate(0)
            while stream.getvalue().count("inner") < 3:
                time.sleep(0.01)
            assert "outer" not in stream.getvalue()
        stream.truncate(0)
        while "outer" not in stream.getvalue():
            time.sleep(0.01)


def test_a_line_that_stays_is_printed_above(quick, monkeypatch, capsys):
    stream = Terminal()
    with Progress("work") as line:
        monkeypatch.setattr(sys, "stderr", stream)
        line.on_terminal = True
        lines_until(stream, 1)
        line.say("row 1")
        with line.writing:
            assert not line.has_line or "row 1" in capsys.readouterr().out
    assert "row 1" not in stream.getvalue()


def test_a_closed_terminal_does_not_end_the_work(quick, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("work") as line:
        lines_until(stream, 1)
        stream.close()
        time.sleep(0.05)
        line(1)
    assert line.done == 1


def test_no_line_is_longer_than_the_terminal(quick, monkeypatch):
    """It would wrap, and the next line could not take its place."""
    leader, follower = pty.openpty()
    stream = os.fdopen(follower, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda number: os.terminal_size((20, 9)))
    with Progress("a long text " * 9):
        text = os.read(leader, 4096).decode()
    assert len(text.split("\r")[1].removeprefix("\x1b[K")) == 19
    os.close(leader)


def test_a_line_of_work_that_fails_is_erased_before_the_error(quick, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    outer = Progress("work").start()
    inner = Progress("work").start()
    lines_until(stream, 1)
    progress.stop_all()
    assert stream.getvalue().endswith(progress.ERASE)
    assert not outer.thread.is_alive() and not inner.thread.is_alive()
    assert not progress.OPEN
    outer.stop()  # twice does no harm


# ---------------------------------------------------------------- text as it comes
def byte_tokenizer() -> Tokenizer:
    """Each byte is a token."""
    alphabet = {chr(256 + i): i for i in range(256)}
    made = Tokenizer(models.BPE(vocab={f"<0x{i:02X}>": i for i in range(256)}, merges=[]))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert len(alphabet) == made.get_vocab_size()
    return made


def fed(stream: Stream, rows: list[list[int]], capsys) -> list[str]:
    """What is printed after each new token of all rows, and at last at the end."""
    tokenizer = byte_tokenizer()
    stream.said = lambda row, ids: tokenizer.decode(ids)
    stream.PAUSE = 0
    samples = [SimpleNamespace(ids=[]) for _ in rows]
    seen = []
    for n in range(max(map(len, rows))):
        for number, row in enumerate(rows):
            if n < len(row):
                samples[number].ids.append(row[n])
            if n == len(row):
                stream.end_row(number, row, False)
        stream.print_new(samples)
        seen.append(capsys.readouterr().out)
    stream.close([tokenizer.decode(row) for row in rows])
    return [*seen, capsys.readouterr().out]


def test_half_a_letter_is_not_printed(capsys):
    seen = fed(Stream(["> "]), [[*"aä€".encode()]], capsys)
    assert seen == ["> a", "", "ä", "", "", "€", "\n"]


def test_texts_are_printed_one_below_the_other(capsys):
    rows = [[*b"ab"], [*b"uvwxyz"], [*b"123"]]
    seen = fed(Stream(["A ", "B ", "C "]), rows, capsys)
    assert seen[:4] == ["A a", "b", "\nB uvw", "x"]
    assert "".join(seen) == "A ab\nB uvwxyz\nC 123\n"


def test_a_pipe_gets_a_text_once_at_its_end(capsys):
    seen = fed(Stream(["A ", "B "], grows=False), [[*b"ab"], [*b"uvwxyz"]], capsys)
    assert seen == ["", "", "A ab\n", "", "", "", "B uvwxyz\n"]


def test_a_closed_stderr_is_no_terminal(quick, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with Progress("work") as line:
        time.sleep(0.05)
    assert not line.on_terminal


def test_a_text_that_changes_is_printed_anew(capsys):
    stream = Stream(["> "])
    texts = iter(["a b", "a b ,", "a b, c"])
    stream.said = lambda row, ids: next(texts)
    stream.PAUSE = 0
    for _ in range(3):
        stream.print_new([SimpleNamespace(ids=[])])
    stream.close(["a b, c"])
    assert capsys.readouterr().out == "> a b ,\n> a b, c\n"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_each_token_is_heard_before_the_last_is_drawn(runs_ahead, monkeypatch):
    if runs_ahead:  # as on a GPU
        monkeypatch.setattr(decoding, "RUN_AHEAD", ("cpu",))
    model = sharp_model(
        Llama3Config(
            dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=32, vocab_size=97, max_seq_len=64
        )
    )
    heard = []
    ids = generate(
        model, [[1, 2], [3]], 9, heard=lambda samples: heard.append([[*s.ids] for s in samples])
    )
    assert ids == generate(model, [[1, 2], [3]], 9)
    counts = [len(texts[0]) for texts in heard]
    assert set(range(1, 9)) <= set(counts)
    for texts in heard:
        for row, text in enumerate(texts):
            assert ids[row][: len(text)] == text


# ---------------------------------------------------------------- every program
SEEN = """
import sys
from flags import progress
start = progress.Progress.start
def start_and_write(self):  # at once, so that it does not depend on how long the work takes
    start(self)
    if self.shows:
        self.write()
    return self
progress.Progress.start = start_and_write
sys.stderr.isatty = lambda: True
progress.columns = lambda: 1000  # a path of pytest is longer than many a terminal
import storage.manifest
storage.manifest.AT_ONCE = 0
import runpy
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TINY = ["--model_args", MODEL, "--seq_len", "32", "--local_batch_size", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With texts, a run, an export and what else the commands need."""
    folder = tmp_path_factory.mktemp("seen")
    (folder / "text.txt").write_text("A line of text, number one.\n" * 3000)
    return folder


def seen(folder, program: str, *words: str, cwd=REPO, status=0) -> tuple[str, str]:
    """(stdout, stderr) of a program on what it takes for a terminal."""
    command = [sys.executable, "-c", SEEN, str(REPO / program), *words]
    done = run_program(command, cwd=cwd, env=ENV)
    assert done.returncode == status, done.stdout[-1000:] + done.stderr[-3000:]
    assert progress.ERASE not in done.stdout
    return done.stdout, done.stderr


def run_of(folder) -> str:
    """A small run with two checkpoints; its training shows which step it is in."""
    out = folder / "run"
    if not out.exists():
        words = [*TINY, "--steps", "4", "--checkpoint_every", "2", "--val_every", "0"]
        words += ["--data", str(folder / "text.txt"), "--log_every", "4", "--out", str(out)]
        words += ["--cache_dir", f"{folder}/cache"]
        _, error = seen(folder, "train_llama3.py", *words)
        assert "training a tokenizer of" in error
        assert "tokenizing: 0 of 0.084 MB, " in error
        assert "step 1/4" in error
    return str(out)


def test_training_and_the_commands_of_checkpoints(folder):
    run = run_of(folder)
    steps = [f"{run}/checkpoints/step-{n}" for n in (2, 4)]
    assert f"verifying {steps[0]}: " in seen(folder, "checkpoint.py", "verify", run)[1]
    assert "comparing: 0 of " in seen(folder, "checkpoint.py", "diff", *steps, status=1)[1]
    _, error = seen(folder, "checkpoint.py", "average", run, f"{folder}/mean", "--last", "2")
    assert "mean of 2 checkpoints: 0 of " in error
    assert f"writing {folder}/mean" in error
    _, error = seen(folder, "checkpoint.py", "to_hf", run, f"{folder}/hf")
    assert f"writing {folder}/hf: 0 of " in error
    assert "comparing the export with transformers" in error
    _, error = seen(folder, "checkpoint.py", "from_hf", f"{folder}/hf", f"{folder}/back")
    assert f"checkpoint: reading {folder}/hf: 0 of " in error


def test_text_from_a_program(folder):
    words = ["--checkpoint", run_of(folder), "--prompt", "A", "--max_new_tokens", "9"]
    plain, _ = seen(folder, "generate.py", *words)
    assert plain.startswith("A")


def test_data(folder):
    text = f"{folder}/text.txt"
    words = ["--input", text, "--out", f"{folder}/own.json", "--vocab_size", "300"]
    _, error = seen(folder, "data.py", "tokenizer", *words)
    assert "training a tokenizer of 300 ids on " in error
    words = ["--input", text, "--out", f"{folder}/shards", "--tokenizer", f"{folder}/own.json"]
    words += ["--workers", "1"]
    _, error = seen(folder, "data.py", "prepare", *words)
    assert "looking for places to cut 1 file" in error
    assert "tokenizing: 0 of 0.084 MB" in error


def test_evaluation(folder):
    task = folder / "questions.jsonl"
    task.write_text('{"question": "A line", "answer": " of text"}\n' * 3)
    words = ["--checkpoint", run_of(folder), "--device", "cpu", "--task"]
    (folder / "short.txt").write_text("A line of text, number one.\n" * 9)
    _, error = seen(folder, "evaluate.py", *words, f"{folder}/short.txt")
    assert "scored: 0 of " in error
    _, error = seen(folder, "evaluate.py", *words, str(task), "--max_new_tokens", "4")
    assert "answered: 0 of 3 prompts" in error


def test_grpo(folder):
    words = ["--steps", "1", "--sft_steps", "1", "--eval_n", "2", "--eval_k", "1"]
    words += ["--prompts_per_step", "2", "--group_size", "2", "--out", f"{folder}/grpo"]
    _, error = seen(folder, "grpo.py", *words)
    assert "supervised warm-up: 0 of 1 steps" in error
    assert "step 1/1" in error


def test_dry_runs(folder):
    words = [*TINY, "--pp", "2", "--dp_shard", "1", "--dry_run"]
    out, error = seen(folder, "train_llama3.py", *words)
    assert "dry run: 0 of 2 pipeline ranks" in error
    assert "pipeline ranks" not in out
    words = [*TINY, "--dry_run", "--best", "2"]
    _, error = seen(folder, "train_llama3.py", *words)
    assert "legal layouts of 2 devices" in error
    assert error.count("dry run: 0 of ") >= 2


@pytest.mark.slow
def test_what_starts_other_processes(folder):
    words = [*TINY, "--check_parity", "--dp_shard", "2", "--data", f"{folder}/text.txt"]
    _, error = seen(folder, "train_llama3.py", *words)
    assert "check_parity: one process: " in error
    assert "check_parity: layout: " in error
    assert "check_parity: comparing step 1: " in error
    assert "check_parity: comparing the weights after the last step: " in error
    assert "check_parity: comparing one process, continued from step 2: " in error
    words = [*TINY, "--tp", "2", "--explain", "--html", f"{folder}/layout.html"]
    _, error = seen(folder, "train_llama3.py", *words)
    assert "one block, in two dry runs" in error
    words = ["train_llama3.py", "--vary", "lr=1e-3,2e-3", "--out", f"{folder}/study"]
    words += ["--seeds", "2", "--steps", "2"]
    words += [*TINY, "--data", f"{folder}/text.txt", "--val_every", "2"]
    _, error = seen(folder, "ablate.py", *words)
    assert "checking command lines: 0 of 2 variants" in error
    assert f"{folder}/study: 0 of 8 steps" in error
    seen(folder, "exercises/run.py", "start", "1", "--out", f"{folder}/class/ann")
    _, error = seen(folder, "exercises/run.py", "grade", f"{folder}/class", "--json", f"{folder}/x")
    assert "grading: 0 of 1 submissions" in error
