"""--against RECIPE@COMMIT and --bisect GOOD..BAD, in a repository that is made of this tree: some
commits that change nothing, and one that changes what is computed."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from runs import MODEL, REPO, ended, launch

from distributed.agree import reason
from tools.parity.bisection import commits_between
from tools.parity.versions import names_commit, training_words
from tools.reports.options import ReportConfig

FLAGS = ["--model_args", MODEL, "--seq_len", "32", "--local_batch_size", "2", "--device", "cpu"]
FLAGS += ["--data", "text.jsonl", "--cache_dir", "cache", "--check_parity"]
# what changes nothing, in files that runs load and in others
NOTED = ("models/llama3.py", "README.md", "parallel.py", "docs/numerics.md", "data.py")
# the planted mistake: every learning rate is 5 % too large
MISTAKE = ("training/optim.py", "rate = lr * share", "rate = lr * share * 1.05")


def git(repo: Path, *words: str) -> str:
    names = ["-c", "user.name=A. Student", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(repo), *names, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit(repo: Path, title: str) -> str:
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", title)
    return git(repo, "rev-parse", "HEAD")


def edit(repo: Path, file: str, old: str, new: str):
    text = (repo / file).read_text()
    assert old in text, (file, old)
    (repo / file).write_text(text.replace(old, new, 1))


def note(repo: Path, number: int):
    file = repo / NOTED[number % len(NOTED)]
    if file.suffix == ".py":
        mark = "#"
    else:
        mark = ""
    file.write_text(f"{file.read_text()}\n{mark} note {number}\n")


@pytest.fixture
def repo(tmp_path):
    """A repository with one commit: the files of ours, as they lie here."""
    listed = subprocess.run(
        ["git", "-C", str(REPO), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        folder = name.split("/")[0]
        if folder in ("tests", "benchmarks", "exercises", "forks") or not (REPO / name).is_file():
            continue
        file = tmp_path / "repo" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((REPO / name).read_bytes())
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"line {i} of {i * i} " * 9}) + "\n" for i in range(200))
    )
    git(tmp_path / "repo", "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path / "repo", "The beginning")
    return tmp_path / "repo"


def told(repo: Path, *flags, status=0) -> str:
    """What the recipe of the repository prints, started beside it."""
    command = launch(1, repo / "train_llama3.py", *FLAGS, *flags)
    done = ended(command, cwd=repo.parent, status=status)
    return done.stdout + done.stderr


def test_a_commit_that_changes_the_numbers_is_named(repo):
    """Of four commits; the others change documents and comments."""
    note(repo, 0)
    commit(repo, "A comment")
    edit(repo, *MISTAKE)
    bad = commit(repo, "A little faster")
    note(repo, 1)
    commit(repo, "Documents")
    note(repo, 2)
    commit(repo, "Another comment")
    text = told(repo, "--bisect", "HEAD~4..HEAD")
    assert f"{bad[:7]}  A little faster  (A. Student, 2" in text, text
    assert "step 2 differs first in the update of" in text
    assert "+            rate = " in text
    assert "lr * share * 1.05" in text
    assert "note" not in text
    assert "commits left, about 2 steps" in text


def test_the_working_tree_is_compared_with_a_commit(repo):
    """Equal to the last bit; after an edit that no commit has, the first operation, and the file."""
    text = told(repo, "--where", "--against", "@HEAD")
    assert re.search(
        r"no difference from train_llama3.py of \w+ \(The beginning\) at 1\d\d seams", text
    )
    assert "all are equal to the last bit" in text
    edit(repo, "models/layers.py", "def rope_frequencies(", "def rope_frequencies(\n    ")
    edit(repo, "models/llama3.py", "self.w2(", "1.01 * self.w2(")
    text = told(repo, "--where", "--against", "train_llama3.py@HEAD", status=1)
    assert "with changes of models/layers.py, models/llama3.py" in text
    assert "first difference: forward of blocks.0.ffn:" in text, text
    assert ", 1.01 times what it should be; everything before agrees" in text
    assert re.search(r"^ models/llama3.py +\| 2 \+-", text, re.M), text


@pytest.mark.slow
def test_one_commit_of_forty_is_found(repo):
    """In a few steps. A commit that does not run is skipped."""
    broken = 19
    planted = 27
    for number in range(40):
        note(repo, number)
        if number == broken:
            (repo / "data.py").write_text("def broken(:\n" + (repo / "data.py").read_text())
        if number == broken + 1:
            edit(repo, "data.py", "def broken(:\n", "")
        if number == planted:
            edit(repo, *MISTAKE)
        made = commit(repo, f"Commit {number}")
        if number == planted:
            bad = made
    text = told(repo, "--bisect", "HEAD~40..HEAD")
    assert f"{bad[:7]}  Commit {planted}  (A. Student, 2" in text, text
    assert "skipped, for it does not run: SyntaxError" in text, text
    assert text.count("commits left, about") + text.count("commit left, about") <= 7, text
    assert "lr * share * 1.05" in text
    layout = told(repo, "--where", "--against", f"@{bad}~1", "--tp", "2", status=1)
    assert "(2 processes)" in layout
    assert "after the step" in layout.split("first difference")[1]


@pytest.mark.slow
def test_bits_and_rounding(repo):
    """A sum in another order is no difference up to rounding, and one to the bit."""
    edit(repo, "models/llama3.py", "self.w2(", "(1 + 2**-22) * self.w2(")
    commit(repo, "Another rounding")
    text = told(repo, "--bisect", "HEAD~1..HEAD", status=2)
    assert "compute the same, up to rounding, in 4 steps: nothing to find" in text
    text = told(repo, "--bisect", "HEAD~1..HEAD", "--expect", "bits")
    assert "Another rounding  (A. Student" in text
    assert "step 1 differs first in" in text


def test_what_cannot_be_compared_is_refused(repo, tmp_path):
    note(repo, 0)
    commit(repo, "A comment")
    root = str(repo)
    for text, words in (
        ("HEAD", "need two commits, GOOD..BAD, such as HEAD~20..HEAD"),
        ("HEAD...HEAD~1", "need two commits"),
        ("HEAD~1..nosuch", "nosuch is no commit of"),
        ("HEAD..HEAD", "both are"),
        ("HEAD..HEAD~1", "is no ancestor of"),
    ):
        with pytest.raises(ValueError) as error:
            commits_between(root, text)
        assert words in reason(error.value), text
        assert "\n" not in str(error.value), text
    assert "is not in" in told(repo, "--where", "--against", "train_x.py@HEAD", status=2)
    both = told(repo, "--bisect", "HEAD~1..HEAD", "--where", status=2)
    assert "--bisect names a commit, and --where an operation" in both
    through = told(repo, "--bisect", "HEAD~1..HEAD", "--through", status=2)
    assert "--through continues from checkpoints" in through
    alone = told(repo, "--expect", "bits", status=2)
    assert "--expect bits has no effect without --check_parity --bisect" in alone
    # outside of any repository
    for file in ("train_llama3.py", *(path.name for path in repo.iterdir() if path.is_dir())):
        if file != ".git":
            (tmp_path / file).symlink_to(repo / file)
    git(repo, "init", "--quiet", "--separate-git-dir", str(tmp_path / "elsewhere"))
    (repo / ".git").unlink()
    assert "is in no git repository" in told(repo, "--bisect", "HEAD~1..HEAD", status=2)


@pytest.mark.parametrize(
    "typed, kept",
    [
        ("--tp 2 --check_parity --where --against @HEAD~5", "--tp 2"),
        ("--bisect=A..B --check_parity true --seq_len 8 --expect bits", "--seq_len 8"),
        ("--no-advice --check_parity --doc_mask --lr=1e-3", "--doc_mask --lr=1e-3"),
    ],
)
def test_flags_of_reports_are_not_handed_on(typed, kept):
    assert training_words(ReportConfig(), typed.split()) == kept.split()


def test_a_folder_is_no_commit(tmp_path):
    (tmp_path / "a@b").mkdir()
    assert names_commit("train_llama3.py@HEAD~5")
    assert names_commit("@v0.10")
    assert not names_commit("folder")
    assert not names_commit(str(tmp_path / "a@b"))
