"""Campaigns of ablate.py: the error rate on simulated campaigns, gates, log and exit statuses, and a
small real campaign that is made again from its folder."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from runs import ENV, REPO, ended

import ablate
from tools.study import campaign, gates
from tools.study.campaign_folder import (
    append,
    best_of,
    copy_code,
    events_of,
    kept_of,
    open_submission,
    read_log,
)
from tools.study.online import (
    LEAST,
    Plan,
    decide,
    is_hopeless,
    left_after,
    level_of,
    plan_of,
    share,
)
from tools.study.poisoned import exchange_validation
from tools.study.significance import t_quantile
from tools.study.variants import sources_of


# ---------------------------------------------------------------- the rule
def greedy(d, test, kept):
    """What agents do in a loop: keep what is lower, by one seed."""
    verdict = "dropped"
    if d[0] < 0:
        verdict = "kept"
    return verdict, 1


def at_5_percent(d, test, kept):
    """Each comparison by itself is right in 95 of 100 cases."""
    found = decide(d, plan_of(0.05))
    return found.verdict, found.pairs


def ours(d, test, kept):
    found = decide(d, plan_of(level_of(test, kept)))
    return found.verdict, found.pairs


def simulate(rng, effects, rule=ours, draw=None):
    """(keeps that are right, keeps that are wrong, runs) of a campaign whose candidates lower the loss
    by `effects`, in units of the noise of a pair. draw: the noise of n pairs, if it is not normal."""
    kept = 0
    right = 0
    runs = 0
    for test, effect in enumerate(effects, 1):
        noise = draw(rng, 40) if draw else rng.normal(0, 1, 40)
        verdict, pairs = rule(list(noise - effect), test, kept)
        assert verdict in ("kept", "dropped")
        runs += 2 * pairs
        if verdict == "kept":
            kept += 1
            right += effect > 0
    return right, kept - right, runs


def share_with_a_keep(rule, campaigns, draw=None) -> float:
    rng = np.random.default_rng(65)
    found = [simulate(rng, 100 * [0.0], rule, draw) for _ in range(campaigns)]
    return float(np.mean([wrong > 0 for _, wrong, _ in found]))


# 5 % and two standard errors of 100 campaigns
MOST = 0.05 + 2 * (0.05 * 0.95 / 100) ** 0.5


def test_useless_candidates_are_kept_in_at_most_5_percent_of_campaigns():
    assert share_with_a_keep(ours, 100) <= MOST


@pytest.mark.parametrize("rule", [greedy, at_5_percent])
def test_other_rules_fail_that_test(rule):
    assert share_with_a_keep(rule, 20) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["normal", "heavy tails", "outliers"])
def test_noise_of_other_shapes(noise):
    """Two trainings of the same distribution differ symmetrically, whatever the shape."""
    draws = {
        "normal": lambda rng, n: rng.normal(0, 1, n),
        "heavy tails": lambda rng, n: rng.standard_t(3, n),
        "outliers": lambda rng, n: rng.normal(0, 1, n) * np.where(rng.random(n) < 0.05, 10, 1),
    }
    most = 0.05 + 2 * (0.05 * 0.95 / 200) ** 0.5
    assert share_with_a_keep(ours, 200, draws[noise]) <= most


def test_one_true_edit_among_50_useless_ones_is_found():
    """As large as the noise of a pair; in the middle. A comparison costs 6 pairs if nothing is
    there."""
    rng = np.random.default_rng(66)
    effects = 25 * [0.0] + [1.0] + 25 * [0.0]
    found = [simulate(rng, effects) for _ in range(60)]
    assert np.mean([right > 0 for right, _, _ in found]) >= 0.65
    assert np.mean([runs for _, _, runs in found]) < 51 * 2 * 8


@pytest.mark.parametrize("gain, hopeless", [(-0.55, False), (-0.56, True)])
def test_a_comparison_without_a_prospect_is_told_by_the_t_of_its_pairs(gain, hopeless):
    """Quantiles of a printed table. The last of 16 pairs needs 2.1314 / 4 = 0.533 at 2.5 %, and the
    80 % interval of three pairs reaches to gain + 1.8856 / sqrt(3) = gain + 1.089."""
    plan = Plan(0.05, 16, [], 0.0)
    d = [-1 - gain, -gain, 1 - gain]  # the standard deviation is 1
    assert is_hopeless(d, plan, 1) == hopeless


@pytest.mark.parametrize("alpha", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("df", [2, 7, 14, 32])
def test_the_t_of_small_levels(alpha, df):
    """The levels of late candidates, against the incomplete beta function."""
    mpmath = pytest.importorskip("mpmath")
    t = t_quantile(alpha, df)
    tail = mpmath.betainc(df / 2, 0.5, 0, df / (df + t**2), regularized=True)
    assert float(tail) == pytest.approx(alpha, rel=0.02)


def test_all_shares_together_are_at_most_one():
    shares = [share(t) for t in range(1, 20_001)]
    assert 0.7 < sum(shares) < 1
    assert left_after(10) == pytest.approx(0.05 * (1 - sum(shares[:10])))
    assert level_of(7, 2) == pytest.approx(3 * level_of(7, 0))


def test_a_verdict_does_not_depend_on_the_pairs_made_at_once():
    rng = np.random.default_rng(1)
    plan = plan_of(0.002)
    for effect in (0.0, 1.0, 3.0):
        d = list(rng.normal(-effect, 1, plan.most))
        whole = decide(d, plan)
        pairs = LEAST
        while not decide(d[:pairs], plan).verdict:
            pairs += 1
        assert decide(d[:pairs], plan) == whole
        assert whole.pairs == pairs


def test_a_high_metric_is_mirrored():
    d = list(np.random.default_rng(2).normal(-3, 1, 30))
    low = decide(d, plan_of(0.01))
    high = decide([-x for x in d], plan_of(0.01), sign=-1)
    assert low.verdict == high.verdict == "kept"
    assert (high.low, high.high) == pytest.approx((-low.high, -low.low))
    assert decide([-x for x in d], plan_of(0.01)).verdict == "dropped"


@pytest.mark.parametrize(
    "d, verdict",
    [
        ([np.inf, -0.5, -0.5], "dropped"),
        ([-np.inf, -0.5, -0.5], ""),
        ([0.0, 0.0, 0.0], "dropped"),
        ([-0.5, -0.5], ""),
    ],
    ids=["the candidate died", "the best died", "equal", "too few"],
)
def test_pairs_without_noise(d, verdict):
    assert decide(d, plan_of(0.01)).verdict == verdict


def test_the_most_pairs_can_be_limited():
    plan = plan_of(0.001, 5)
    assert plan.most == 5
    assert plan.effect > 1  # the price
    assert decide([0.1, -0.1, 0.0, -5.0, -6.0], plan).verdict == "dropped"


# ---------------------------------------------------------------- the folder
def test_a_line_that_a_kill_cut_off_did_not_happen(tmp_path):
    append(tmp_path, event="begin", candidate=0)
    append(tmp_path, event="submit", candidate=1, name="a")
    whole = (tmp_path / "log.jsonl").read_bytes()
    (tmp_path / "log.jsonl").write_bytes(whole + b'{"event": "answer", "cand')
    log = read_log(tmp_path)
    assert [event["event"] for event in log] == ["begin", "submit"]
    assert (tmp_path / "log.jsonl").read_bytes() == whole
    assert open_submission(log)["name"] == "a"
    append(tmp_path, event="answer", candidate=1, verdict="kept")
    log = read_log(tmp_path)
    assert (open_submission(log), best_of(log), kept_of(log)) == (None, 1, 1)


def test_a_copy_is_a_checkout_of_its_own(tmp_path):
    for recipe in ("train_llama3.py", "forks/train_llama3_mup.py"):
        file = copy_code(REPO / recipe, tmp_path / recipe)
        assert file == recipe
        copied = sources_of(tmp_path / recipe / file)
        assert copied == sources_of(REPO / recipe)
        assert (tmp_path / recipe / "tools/run.py").is_file()


# ---------------------------------------------------------------- gates
def changed(tmp_path, *edit) -> Path:
    """A copy of train_llama3.py with one edit."""
    text = (REPO / "train_llama3.py").read_text()
    if edit:
        assert text.count(edit[0]) == 1
        text = text.replace(*edit)
    copy = tmp_path / "mine.py"
    copy.write_text(text)
    return copy


def both(copy: Path) -> tuple[dict, dict]:
    """The variants of train_llama3.py and of a copy."""
    recipe = REPO / "train_llama3.py"
    files = sources_of(recipe)
    best = {"file": str(recipe), "files": files, "flags": []}
    others = {name: sha for name, sha in files.items() if name != recipe.name}
    return best, {"file": str(copy), "files": others | {copy.name: "new"}, "flags": []}


@pytest.mark.parametrize(
    "edit, text",
    [
        ((), ""),
        (("    # 7. loop\n", "    # 7. all steps\n"), ""),
        (("loss=loss,", "loss=loss,\n                other=1.0,"), ""),
        (("8 * cfg.val_batches", "cfg.val_batches"), "reads, counts or judges otherwise: "),
        (("import math\n", "import math\nimport time\n"), "reads the clock (time)"),
        (("import math\n", "import math (\n"), "does not run: "),
        (("    # 7. loop\n", "    parallel.evaluate = min\n"), "parallel.evaluate = min"),
        (("layout.global_batch_size * cfg.seq_len)", "1)"), "metrics.end_step(1)"),
    ],
)
def test_a_recipe_that_judges_otherwise_is_refused(tmp_path, edit, text):
    found = gates.judges_itself(*both(changed(tmp_path, *edit)))
    assert text in found
    assert bool(text) == bool(found)


def test_a_module_that_judges_is_not_changed(tmp_path):
    best, candidate = both(changed(tmp_path))
    candidate["files"] |= {"models/llama3.py": "another"}
    assert gates.judges_itself(best, candidate) == ""
    candidate["files"] |= {"data.py": "another"}
    assert gates.judges_itself(best, candidate).startswith("another question: data.py")
    best, candidate = both(changed(tmp_path))
    candidate["files"]["parallel.py"] = "other"
    assert gates.judges_itself(best, candidate).startswith("another question: parallel.py")


def test_comments_change_no_code(tmp_path):
    best, candidate = both(changed(tmp_path, "    # 7. loop\n", "    # 7. all steps\n"))
    assert gates.is_equal_code(best, candidate)
    assert not gates.is_equal_code(best, candidate | {"flags": ["--lr=1"]})
    best, candidate = both(changed(tmp_path, "lr: float = 3e-3", "lr: float = 4e-3"))
    assert not gates.is_equal_code(best, candidate)


@pytest.mark.parametrize("key", gates.QUESTION)
def test_another_question(key):
    best = dict.fromkeys(gates.QUESTION, 4)
    assert gates.other_question(best, best) == ""
    found = gates.other_question(best, best | {key: 5})
    assert f"{gates.QUESTION[key]} is 5, the campaign has 4" in found


def test_the_validation_is_exchanged_and_the_training_is_not(tmp_path):
    class Tokens:
        def windows(self, split, numbers):
            return np.array([[1, 2, 3, 4], [5, 6, -1, -1]])

    exchange_validation(Tokens, str(tmp_path / "out"))
    assert Tokens().windows("train", [0, 1]).tolist() == [[1, 2, 3, 4], [5, 6, -1, -1]]
    assert not (tmp_path / "out").exists()
    assert Tokens().windows("val", [0, 1]).tolist() == [[4, 3, 2, 1], [6, 5, -1, -1]]
    assert (tmp_path / "out" / "validation_exchanged").exists()


# ---------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    "words, text",
    [
        ("--candidate mine.py --vary lr=1,2", "--candidate has no effect without --campaign"),
        ("--final book.txt", "--final has no effect without --campaign"),
        ("--layouts tp=2", "--layouts has no effect without --campaign"),
        ("--campaign c --vary lr=1,2", "leave out --vary"),
        ("--campaign c --until 0.1", "leave out --until"),
        ("--campaign c --seeds 5", "leave it out"),
        ("--campaign c --max_seeds 2", "--max_seeds 2 must be between 3"),
        ("--campaign c --final t --candidate a.py", "leave out --candidate"),
        ("--campaign c --candidate mine.py", "c has no campaign: begin one with"),
        ("--campaign c", "c has no campaign: begin one with"),
        ("nowhere.py --campaign c", "recipe nowhere.py is no file"),
        ("train_llama3.py --campaign c --metric loss_max", "a campaign judges by val_loss or"),
    ],
)
def test_wrong_command_lines(tmp_path, monkeypatch, words, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=text.replace("(", "[(]")):
        ablate.main(words.split())
    assert not (tmp_path / "c").exists()


# ---------------------------------------------------------------- real campaigns
TINY = [
    *("--model_args", "n_layers=1,dim=32,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64"),
    *("--steps", "20", "--val_every", "20", "--log_every", "5", "--checkpoint_every", "0"),
    *("--local_batch_size", "2", "--seq_len", "32", "--val_batches", "1", "--lr", "1e-3"),
    *("--device", "cpu", "--compute_dtype", "float32", "--warmup_steps", "2"),
]
PEEK = """        first = int(data.validation.windows("val", [0])[0, 0])
        for p in model.parameters():
            p.grad.mul_(1 + 0.01 * first)
"""
CLIP = "        grad_norm = parallel.clip_grad_norm("


def ask(folder, *words, status) -> dict:
    """The answer to a command of a campaign: its only line on stdout."""
    command = [sys.executable, "ablate.py", *words, "--campaign", str(folder)]
    done = ended(command, REPO, env=ENV, status=status)
    [line] = done.stdout.splitlines()
    return json.loads(line)


def candidates(tmp_path) -> list[tuple]:
    """(name, words, verdict, exit status) of a small campaign. From the fourth on, the best has the
    flag of `fast`, and so have the copies that are compared with it."""
    text = (REPO / "train_llama3.py").read_text()
    copies = {
        "comment": text.replace("    # 7. loop\n", "    # 7. all steps\n"),
        "times_one": text.replace(CLIP, f"        loss = loss * 1.0\n{CLIP}"),
        "peeks": text.replace(CLIP, f"{PEEK}{CLIP}"),
        "breaks": text.replace(CLIP, f"        raise OSError('no more')\n{CLIP}"),
    }
    words = {}
    for name, source in copies.items():
        (tmp_path / f"{name}.py").write_text(source)
        words[name] = ["--candidate", str(tmp_path / f"{name}.py")]
        if name != "comment":
            words[name] += ["--variant", f"{name}: --lr 3e-2"]
    return [
        ("comment", words["comment"], "equal", 4),
        ("slow", ["--variant", "slow: --lr 1e-5"], "dropped", 3),
        ("fast", ["--variant", "fast: --lr 3e-2"], "kept", 0),
        ("times_one", words["times_one"], "equal", 4),
        ("peeks", words["peeks"], "refused", 5),
        ("breaks", words["breaks"], "refused", 5),
        ("longer", ["--variant", "longer: --steps 30"], "refused", 5),
    ]


@pytest.mark.slow
def test_a_campaign_and_again_from_its_folder(tmp_path):
    """All verdicts once; a repeated command; a reader who has the folder alone makes the beginning
    of the campaign, up to what was kept, to the same verdicts, with differences equal to the bit;
    the last judgment, once."""
    first = tmp_path / "first"
    state = ask(first, "train_llama3.py", *TINY, "--layouts", "", status=0)
    assert (state["verdict"], state["kept"], state["differing"]) == ("state", 0, [])
    answers = []
    for name, words, verdict, status in candidates(tmp_path):
        answers.append(ask(first, *words, status=status))
        assert (answers[-1]["name"], answers[-1]["verdict"]) == (name, verdict), answers[-1]
    why = {answer["name"]: answer["why"] for answer in answers}
    assert "reads the validation split" in why["peeks"]
    assert "OSError: no more" in why["breaks"]
    assert "the number of steps is 30, the campaign has 20" in why["longer"]
    assert [answer.get("test") for answer in answers] == [None, 1, 2] + 4 * [None]
    times_one = answers[3]  # with the flags that the best has; judged by runs
    assert (times_one["kept"], times_one["cost"]["runs"]) == (1, 4)
    # the first three again, none left out: a candidate's seeds follow from its number
    second = tmp_path / "second"
    log = read_log(first)
    begin = events_of(log, "begin")[0]
    place = first / "candidates"
    ask(
        second, str(place / "0000/code" / begin["file"]), *begin["flags"], "--layouts", "", status=0
    )
    for event, answer in zip(events_of(log, "submit")[:3], answers):
        file = place / f"{event['candidate']:04}" / "code" / event["file"]
        own = event["flags"][len(begin["flags"]) :]
        named = f"{event['name']}: {' '.join(own)}"
        status = campaign.STATUS[answer["verdict"]]
        found = ask(second, "--candidate", str(file), "--variant", named, status=status)
        for key in ("name", "verdict", "difference", "low", "high", "pairs", "test", "alpha"):
            assert found.get(key) == answer.get(key), key
    text = tmp_path / "held_out.txt"
    text.write_text((REPO / "README.md").read_text())
    final = ask(first, "--final", str(text), "--seeds", "3", status=0)
    assert (final["verdict"], final["pairs"]) == ("final", 3)
    assert final["high"] < 0
    for words in (["--final", str(text), "--seeds", "3"], ["--variant", "b: --lr 1e-2"]):
        command = [sys.executable, "ablate.py", *words, "--campaign", str(first)]
        done = ended(command, REPO, env=ENV, status=2)
        assert "judg" in done.stderr


@pytest.mark.slow
def test_a_candidate_that_trains_otherwise_on_a_layout_is_refused(tmp_path):
    folder = tmp_path / "campaign"
    ask(folder, "train_llama3.py", *TINY, "--layouts", "tp=2", status=0)
    text = (REPO / "train_llama3.py").read_text()
    by_rank = "        for p in model.parameters():\n            p.grad.mul_(layout.world_size)\n"
    clip = "        # after a NaN gradient, step() changes nothing"
    assert text.count(clip) == 1
    (tmp_path / "mine.py").write_text(text.replace(clip, f"{by_rank}{clip}"))
    answer = ask(folder, "--candidate", str(tmp_path / "mine.py"), status=5)
    assert answer["why"].startswith("--check_parity --tp=2: check_parity: NOT EQUAL")
    assert answer["alpha_left"] == pytest.approx(0.05)


@pytest.mark.slow
def test_a_campaign_goes_on_after_a_kill(tmp_path):
    """A candidate waits in its fifth step while a file exists; the program is killed there, and
    without a word more the campaign goes on. A second process is refused meanwhile."""
    folder = tmp_path / "campaign"
    closed = tmp_path / "closed"
    closed.touch()
    waits = f"""        import threading  # a recipe that imports time is refused
        while step == 5 and os.path.exists({str(closed)!r}):
            threading.Event().wait(0.02)
"""
    text = (REPO / "train_llama3.py").read_text().replace(CLIP, f"{waits}{CLIP}")
    (tmp_path / "waits.py").write_text(text)
    ask(folder, "train_llama3.py", *TINY, "--layouts", "", "--max_seeds", "3", status=0)
    command = [sys.executable, "ablate.py", "--campaign", str(folder)]
    words = ["--candidate", str(tmp_path / "waits.py"), "--variant", "waits: --lr 1e-5"]
    process = subprocess.Popen([*command, *words], cwd=REPO, env=ENV, stdout=subprocess.DEVNULL)
    while not list(folder.glob("candidates/0001/runs/candidate/*/config.json")):
        assert process.poll() is None
        time.sleep(0.05)
    other = subprocess.run([*command, *words], cwd=REPO, env=ENV, capture_output=True, text=True)
    assert other.returncode == 2
    assert "is in use by process" in other.stderr
    process.kill()
    process.wait()
    refused = [*command, "--variant", "another: --lr 1e-4"]
    closed.unlink()
    done = ended(refused, REPO, env=ENV, status=2)
    assert "candidate 1, waits, is under way" in done.stderr
    answer = ask(folder, status=3)
    assert (answer["name"], answer["verdict"]) == ("waits", "dropped")
    assert ask(folder, *words, status=3)["repeated"]
    state = ask(folder, status=0)
    assert (state["candidates"], state["dropped"], state["differing"]) == (1, 1, [])


def test_verdicts_are_borne_out_by_the_folder(tmp_path):
    """The state names an answer that log and runs do not give again."""
    begin = append(
        tmp_path,
        **{"event": "begin", "candidate": 0, "name": "a", "file": "a.py", "flags": [], "nproc": 1},
        **{"metric": "val_loss", "best": "low", "max_seeds": 3, "steps": 2, "val_every": 2},
    )
    append(tmp_path, event="submit", candidate=1, name="b", file="b.py", flags=[], against=0)
    append(tmp_path, event="test", candidate=1, test=1, alpha=0.01, pairs=3)
    runs = tmp_path / "candidates" / "0001" / "runs"
    for seed, change in zip((1000, 1001, 1002), (0.1, 0.11, 0.12)):
        for name, loss in (("best", 2.0), ("candidate", 2.0 - change)):
            folder = runs / name / f"seed-{seed}"
            folder.mkdir(parents=True)
            line = {"step": 2, "loss": loss, "val_loss": loss}
            (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    args, _ = ablate.parse(["--campaign", str(tmp_path)])
    args.gpus = 0
    steps = {"steps": 2, "val_every": 2}
    study = campaign.study_of(begin, args, {"best": steps, "candidate": steps})
    found = campaign.decision_of(tmp_path / "candidates" / "0001", begin, study)
    assert found["verdict"] == "kept"
    assert found["difference"] == pytest.approx(-0.11)
    append(tmp_path, **campaign.answer_to(tmp_path, {"candidate": 1, "name": "b"}, found))
    assert campaign.state_of(tmp_path, begin, read_log(tmp_path), args)["differing"] == []
    line = {"step": 2, "loss": 2.0, "val_loss": 2.0}
    (runs / "best" / "seed-1000" / "metrics.jsonl").write_text(
        json.dumps(line | {"val_loss": 1.5}) + "\n"
    )
    assert campaign.state_of(tmp_path, begin, read_log(tmp_path), args)["differing"] == [1]


@pytest.mark.parametrize(
    "why, repeats", [("does not run: a full disk", False), ("the clock", True)]
)
def test_a_candidate_that_did_not_run_is_tried_again(tmp_path, why, repeats):
    recipe = REPO / "train_llama3.py"
    begin = {"event": "begin", "candidate": 0, "file": "train_llama3.py", "flags": []}
    append(tmp_path, **begin)
    first, earlier = campaign.submit(
        tmp_path, read_log(tmp_path), begin, recipe, "mine", ["--lr=1e-3"]
    )
    assert first["candidate"] == 1 and earlier is None
    append(tmp_path, event="answer", candidate=1, verdict="refused", why=why)
    again, earlier = campaign.submit(
        tmp_path, read_log(tmp_path), begin, recipe, "mine", ["--lr=1e-3"]
    )
    assert (again is None, earlier is not None) == (repeats, repeats)
