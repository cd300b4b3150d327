"""--check_parity of grpo.py, forks/train_dpo.py and forks/train_distill.py: the recipes as they stand are
equal in every cut, and edits that train another policy in some cut are named."""

import json
import re

import pytest
import torch
from policy import hf_folder
from policy_edits import DISTILL, DPO, EDITS, GRPO, write_edit
from runs import ENV, REPO, launch, run_program

import grpo
from tools.parity.compare_policy import Record, compare_cut, likely_reason, say_verdict
from tools.parity.policy import common_flags

SMALL = "--model_args dim=32,n_layers=1,n_heads=2,n_kv_heads=2,head_dim=16,ffn_dim=32".split()
# on a small model, of different kinds: a count of ranks, which is quick, a sum over rows, no effect
ON_SMALL = ["denominator_over_ranks", "sum_of_a_row", "detached_bonus"]


def check(program, *flags, cwd=REPO):
    """(status, stdout, stderr) of the command."""
    env = ENV | {"PYTHONPATH": str(REPO)}
    command = launch(1, program, "--check_parity", *flags)
    done = run_program(command, cwd=cwd, env=env, timeout=400)
    return done.returncode, done.stdout, done.stderr


def largest_difference(said: str) -> float:
    """Of the gradients of a table."""
    rows = re.findall(r"^--.* ([\d.e+-]+) \S+$", said, re.M)
    assert len(rows) >= 4, said
    return max(map(float, rows))


def test_grpo_is_equal_in_every_cut(tmp_path):
    status, said, error = check(REPO / "grpo.py", *SMALL, cwd=tmp_path)
    assert status == 0, (said, error)
    cuts = ("--local_batch_size 5", "--pack_tokens 38", "--minibatches 2, added up")
    for cut in (*cuts, "--dp_shard 2", "--tp 2", "--cp 2"):
        assert f"\n{cut} " in said, said
    assert "check_parity: equal: " in said, said
    assert "in 7 cuts" in said, said
    assert largest_difference(said) <= 1e-5
    assert not list(tmp_path.iterdir())  # nothing is kept


def judge(program, name, tmp_path, *flags):
    """Run the command on a copy with the edit, and compare what it says with what is known."""
    edit = EDITS[program][name]
    copy = write_edit(program, name, tmp_path)
    status, said, error = check(copy, *edit.flags.split(), *flags, cwd=tmp_path)
    verdict = [line for line in said.splitlines() if line.startswith("check_parity: ")]
    assert len(verdict) == 1, (said, error)
    if edit.differs:
        assert status == 1, said
        assert verdict[0].startswith("check_parity: NOT EQUAL: "), said
        assert f"{edit.differs} " in verdict[0], said
    else:
        assert status == 0, said
        assert verdict[0].startswith("check_parity: equal: "), said
        # an honest edit has an effect
        assert ("NO EFFECT" in said) == edit.no_effect, said
        assert edit.no_effect or re.search(r"your edit changes the gradient by \d", said), said
        assert largest_difference(said) <= 1e-5
    return said


@pytest.mark.parametrize(
    "name", [ON_SMALL[0], *(pytest.param(name, marks=pytest.mark.slow) for name in ON_SMALL[1:])]
)
def test_edits_of_grpo_on_a_small_model(name, tmp_path):
    said = judge("grpo.py", name, tmp_path, *SMALL)
    if name == "denominator_over_ranks":
        assert "by one factor, 2)" in said, said
        assert "is Z (loss_denominator)" in said, said
    if name == "sum_of_a_row":
        assert "in place of the sample's (sequence_sum" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GRPO if name not in ON_SMALL])
def test_edits_of_grpo(name, tmp_path):
    judge("grpo.py", name, tmp_path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, a teacher with its tokenizer, and pairs of answers."""
    folder = tmp_path_factory.mktemp("folders")
    hf_folder(folder / "hf", "qwen3", 0.08)
    hf_folder(folder / "teacher", "qwen3", 0.1)
    lines = []
    for i in range(12):
        prompt = f"{i} and {'more ' * (i % 5)}?"
        answers = dict(chosen="yes " * (1 + i % 4), rejected="no no, not " * (1 + i % 3))
        lines.append(json.dumps(dict(prompt=prompt, **answers)))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder


def flags_of(program: str, folders) -> list:
    flags = ["--init_from", folders / "hf", "--seq_len", 64]
    if program == "forks/train_dpo.py":
        return [*flags, "--data", folders / "pairs.jsonl"]
    task = ["--env", "sum_digits", "--max_new_tokens", 16]
    return [*flags, *task, "--teacher", folders / "teacher"]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["forks/train_dpo.py", "forks/train_distill.py"])
def test_forks_are_equal_in_every_cut(program, folders, tmp_path):
    status, said, error = check(REPO / program, *flags_of(program, folders), cwd=tmp_path)
    assert status == 0, (said, error)
    assert "check_parity: equal: " in said, (said, error)
    assert largest_difference(said) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, name",
    [("forks/train_dpo.py", name) for name in DPO]
    + [("forks/train_distill.py", name) for name in DISTILL],
)
def test_edits_of_forks(program, name, folders, tmp_path):
    judge(program, name, tmp_path, *flags_of(program, folders))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, cut",
    [
        ("--flavor debug_moe", "--dp_shard 2 --ep 2"),
        ("--dp_shard 2 --tp 2 --pack_tokens 64 --loss gspo --kl_coef 0.1", "--dp_shard 2 --tp 2"),
        ("--pp 2 --gen_ranks 1 --kl_coef 0.1", "--pp 2"),
        ("--env calculator --max_new_tokens 40 --seq_len 64 --loss grpo --std_norm", "--cp 2"),
        ("--ac full --tis 2 --minibatches 4 --async_steps 1", "--ac full"),
    ],
    ids=str,
)
def test_other_flags(flags, cut, tmp_path):
    status, said, error = check(REPO / "grpo.py", *flags.split(), cwd=tmp_path)
    assert status == 0, (said, error)
    assert "check_parity: equal: " in said, (said, error)
    assert f"\n{cut} " in said, said
    assert largest_difference(said) <= 1e-5, said


@pytest.mark.slow
def test_adapters(folders, tmp_path):
    flags = ["--init_from", folders / "hf", "--seq_len", 64, "--env", "sum_digits"]
    status, said, error = check(REPO / "grpo.py", *flags, "--lora_rank", 4, cwd=tmp_path)
    assert status == 0, (said, error)
    assert "check_parity: equal: " in said, (said, error)
    assert "lora_" in said, said
    assert largest_difference(said) <= 1e-5, said


@pytest.mark.slow
def test_an_entropy_bonus_in_a_pipeline(tmp_path):
    said = judge("grpo.py", "entropy_bonus", tmp_path, "--pp", 2, "--gen_ranks", 1)
    assert "\n--pp 2 " in said, said


def edited(tmp_path, old: str, new: str):
    text = (REPO / "grpo.py").read_text()
    assert text.count(old) == 1
    (tmp_path / "mine.py").write_text(text.replace(old, new))
    return tmp_path / "mine.py"


@pytest.mark.slow
def test_a_cut_that_fails_is_named(tmp_path):
    old = "            assert lp.dtype == torch.float32, lp.dtype\n"
    new = old + '            assert self.layout.tp == 1, "no tp here"\n'
    status, said, _ = check(edited(tmp_path, old, new), *SMALL, cwd=tmp_path)
    assert status == 1, said
    assert "--tp 2 fails: AssertionError: no tp here (mine.py:" in said, said
    assert "check_parity: NOT EQUAL: --tp 2 fails" in said, said


@pytest.mark.slow
def test_an_update_by_rank_is_named(tmp_path):
    old = "            set_lr([self.optimizer], lr)\n"
    new = "            set_lr([self.optimizer], lr * (1 + self.layout.rank))\n"
    status, said, _ = check(edited(tmp_path, old, new), *SMALL, cwd=tmp_path)
    assert status == 1, said
    assert "--dp_shard 2, --tp 2, --cp 2: the first update of" in said, said
    assert "does the optimizer's step" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, error",
    [
        ("--check_parity --dry_run", "ask for one after the other"),
        ("--check_parity --tp 3", "--tp 3 does not divide n_heads 4"),
        ("--check_parity --cp_method alltoall", "has no effect without --cp 2"),
        ("--check_parity --plot", "--check_parity trains nothing: leave one out"),
    ],
)
def test_refusals_are_one_line(flags, error, tmp_path):
    done = run_program(launch(1, REPO / "grpo.py", *flags.split()), cwd=tmp_path, env=ENV)
    assert done.returncode == 2, done.stderr
    assert error in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr + done.stdout
    assert not done.stdout, done.stderr + done.stdout


def record(*gradients, z=(1.0,), loss=1.0) -> Record:
    """Of one weight, two numbers long."""
    tensors = [{"w": torch.tensor(g)} for g in gradients]
    weights = [{"w": torch.zeros(2)}, {"w": torch.ones(2)}]
    return Record([loss, loss], tensors, weights, list(z), {"w"}, [], 4)


def test_parts_of_an_update_add_up_by_their_denominators():
    whole = record([3.0, 0.0], [1.0, 1.0])
    parts = record([1.0, 0.0], [4.0, 0.0], z=(1.0, 2.0))
    assert not compare_cut("--minibatches 2, added up", whole, parts, adds_up=True).problems
    unequal = record([1.0, 0.0], [4.0, 0.0], z=(2.0, 1.0))
    assert compare_cut("--minibatches 2, added up", whole, unequal, adds_up=True).problems


def test_one_factor_of_all_gradients_is_found():
    whole = record([3.0, 1.0], [1.0, 1.0])
    twice = compare_cut("--tp 2", whole, record([6.0, 2.0], [1.0, 1.0]), adds_up=False)
    other = compare_cut("--tp 2", whole, record([6.0, 1.0], [1.0, 1.0]), adds_up=False)
    assert twice.factor == pytest.approx(2)
    assert other.factor is None
    assert "Z (loss_denominator)" in likely_reason([twice])
    assert twice.problems == ["the gradient of w by 1.0e+00"]
    nan = compare_cut("--tp 2", whole, record([float("nan"), 1.0], [1.0, 1.0]), adds_up=False)
    assert nan.problems
    assert nan.worst[0] == float("inf")


@pytest.mark.parametrize(
    "cuts, words",
    [
        (["--pack_tokens 64"], "where a row holds several samples"),
        (["--local_batch_size 1", "--pack_tokens 64"], "where rows have another length"),
        (
            ["--local_batch_size 1", "--pack_tokens 64", "--dp_shard 2"],
            "where a forward holds other samples",
        ),
        (["--dp_shard 2", "--tp 2"], "only on ranks"),
        (["--cp 2"], "only where ranks share a sample"),
        (["--local_batch_size 1", "--tp 2"], "how the samples are cut into forwards"),
    ],
    ids=str,
)
def test_the_cuts_that_differ_hint_at_the_reason(cuts, words):
    whole = record([3.0, 1.0], [1.0, 1.0])
    other = record([6.0, 1.0], [1.0, 1.0])
    differs = [compare_cut(cut, whole, other, adds_up=False) for cut in cuts]
    assert words in likely_reason(differs)


def test_a_weight_without_a_gradient_is_not_called_equal(capsys):
    assert say_verdict(record([3.0, 1.0]), [], 4, []) == 0
    assert "check_parity: equal: " in capsys.readouterr().out
    assert say_verdict(record([0.0, 0.0]), [], 4, []) == 1
    said = capsys.readouterr().out
    assert said.startswith("check_parity: NOT COMPARED: w, whose gradient is 0 or missing"), said


@pytest.mark.parametrize("given, used", [(1e-12, 1e-6), (1e-3, 1e-3)])
def test_rounding_of_a_gradient_is_not_enlarged_by_a_tiny_eps(given, used):
    """AdamW divides by the gradient's own size, plus eps."""
    assert common_flags(grpo.Config(eps=given), 1)["eps"] == used


def test_a_cut_whose_ranks_wait_for_each_other_ends_soon():
    """In a minute, also where the user's training waits for hours."""
    flags = common_flags(grpo.Config(init_timeout_s=7200, train_timeout_s=7200), 1)
    assert max(flags["init_timeout_s"], flags["train_timeout_s"]) <= 60
