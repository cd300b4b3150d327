"""ablate.py: statistics on simulated studies, the report on written studies, and a few real studies."""
import itertools
import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from runs import ENV, REPO, ended, metrics, run

import ablate
from tools.significance import add_looks, boundaries, fit_sizes, interval, t_quantile
from tools.study import compare_variant, looks_of, report_study

BASE, OTHER = "base", "other"


def study(seeds=3, until=None, max_seeds=12, names=(BASE, OTHER), steps=20, **settings):
    variants = {n: {"recipe": "r.py", "flags": [], "steps": steps, "val_every": 10, "parameters": None} for n in names}
    return dict(metric="val_loss", best="low", at="end", reach=None, seeds=seeds, until=until, max_seeds=max_seeds, fit=False,
                nproc=1, baseline=names[0], variants=variants) | settings


def lines(final: float, steps=20, speed=100.0, tokens_hash="a", tokens=1000, **extra):
    """The metrics.jsonl of a run whose loss falls from final + 1 to final."""
    found = []
    for step in range(1, steps + 1):
        loss, cost = final + 1 - step / steps, {"tokens_per_second": speed, "step_time_s": 1000 / speed, "memory_gib": 0.5}
        found.append({"step": step, "loss": loss, "tokens": tokens * step, "tokens_hash": tokens_hash, "mfu": None} | cost)
        if step % 10 == 0:
            found.append({"step": step, "val_loss": loss, "val_bits_per_byte": None} | extra)
    return found


def write(folder, settings, runs):
    """Write a study's folder; runs: {(variant, seed): lines}."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(settings))
    for (name, seed), found in runs.items():
        (folder / name / f"seed-{seed}").mkdir(parents=True)
        (folder / name / f"seed-{seed}" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    return folder


# ---------------------------------------------------------------- statistics
@pytest.mark.parametrize("alpha, df, t", [(0.05, 1, 12.7062), (0.05, 2, 4.30265), (0.05, 3, 3.18245), (0.05, 10, 2.22814),
                                          (0.01, 4, 4.60409), (0.001, 5, 6.86883), (0.05, 29, 2.04523)])
def test_t_quantile_equals_the_printed_tables(alpha, df, t):
    assert t_quantile(alpha, df) == pytest.approx(t, rel=2e-6)


def test_one_interval_is_students():
    d = [0.10, 0.13, 0.11]
    low, high, level = interval(d, 0.05, add_looks([], 3, 3))
    half = 4.30265 * np.std(d, ddof=1) / 3**0.5
    assert level == 0.95 and (low, high) == pytest.approx((np.mean(d) - half, np.mean(d) + half), rel=1e-5)


def test_looks_cost():
    """Each of several looks needs a larger t than a single look after equally many pairs. Equal looks cost nothing."""
    looks = add_looks([], 3, 12)
    found = boundaries(0.05, tuple(map(tuple, looks)))
    assert list(found) == list(range(3, 13)) and add_looks(looks, 4, 10) == looks
    assert all(c > t_quantile(0.05, n - 1) for n, c in found.items())


def simulate(rng, settings, difference=0.0, noise=0.02, seed_noise=0.07, again=(3,)):
    """(interval, pairs) of a study of one variant. Seeds move both runs of a pair alike."""
    most = max(settings["seeds"], settings["max_seeds"], 8)
    both = rng.normal(0, seed_noise, most)
    values = {(BASE, i): both[i] for i in range(most)}
    values |= {(OTHER, i): both[i] + difference + rng.normal(0, noise) for i in range(most)}
    for seeds in again:
        d, (low, high, _), missing = compare_variant(settings, values, OTHER, set(), values.keys())
        assert not missing
        if low > 0 or high < 0:
            break
        settings = settings | {"looks": looks_of(settings), "seeds": seeds}
    return (low, high), len(d)


@pytest.mark.parametrize("settings, again", [
    (study(), [3]), pytest.param(study(until=0.005), [3], marks=pytest.mark.slow), (study(), [5, 8, 8])])
def test_equal_variants_are_told_apart_in_at_most_5_percent(settings, again):
    """Of 4,000 studies: with a chance of 5.5 % each, 220 +- 14 are wrong. The first plan has 5 %, all later looks 0.5 %."""
    rng = np.random.default_rng(0)
    wrong = sum(low > 0 or high < 0 for (low, high), _ in (simulate(rng, settings, again=again) for _ in range(4000)))
    assert wrong <= 220 + 14


def test_a_planted_difference_is_found_with_a_third_of_the_runs():
    rng, settings = np.random.default_rng(1), study(until=0.02, max_seeds=12)
    found = [simulate(rng, settings, difference=0.05) for _ in range(200)]
    assert np.mean([low > 0 for (low, _), _ in found]) >= 0.8
    paired_runs = 2 * np.mean([pairs for _, pairs in found])

    def power(n):  # of the same comparison with other seeds for the variant: Student's t of two samples
        a, b = rng.normal(0, 0.07, (2000, n)), rng.normal(0.05, 0.0728, (2000, n))
        s = np.sqrt((a.var(1, ddof=1) + b.var(1, ddof=1)) / n)
        return np.mean(np.abs(b.mean(1) - a.mean(1)) > t_quantile(0.05, 2 * n - 2) * s)

    unpaired_runs = 2 * next(n for n in range(2, 200) if power(n) >= 0.8)
    assert paired_runs <= unpaired_runs / 3, (paired_runs, unpaired_runs)


def test_until_stops_at_a_difference_that_is_small_enough():
    (low, high), pairs = simulate(np.random.default_rng(2), study(until=0.05), noise=0.005)
    assert -0.05 < low <= 0 <= high < 0.05 and pairs < 12


def test_fit_sizes():
    N = [1e5, 3e5, 1e6, 3e6, 1e7]
    found = fit_sizes(N, [1.7 + 50 * n**-0.3 for n in N])
    assert (found["E"], found["A"], found["a"]) == pytest.approx((1.7, 50, 0.3), rel=2e-2)
    assert found["low"] <= found["a"] <= found["high"] and max(map(abs, found["residuals"])) < 1e-3


# ---------------------------------------------------------------- the report
NAN = lines(1.5) + [{"step": 20, "val_loss": None}]
SLOWLY = [lines(2.1 + 0.02 * i, speed=200.0) for i in range(3)]


def row_of(folder):
    [row] = json.loads((folder / "verdicts.json").read_text())
    return row


@pytest.mark.parametrize("difference, verdict, text", [
    (-0.1, "better", "other beats base by 0.1 nats (95 % interval 0.07"),
    (0.1, "worse", "other is worse than base by 0.1 nats"),
    (0.001, "undecided", "other: no difference from base found; one of 0.026 nats could hide"),
])
def test_verdicts(tmp_path, capsys, difference, verdict, text):
    runs = {(BASE, i): lines(2 + 0.1 * i) for i in range(3)}
    runs |= {(OTHER, i): lines(2 + 0.1 * i + difference + 0.01 * (i - 1), speed=200.0) for i in range(3)}
    report_study(write(tmp_path, study(), runs))
    row, out = row_of(tmp_path), capsys.readouterr().out
    assert row.keys() >= {"variant", "baseline", "metric", "difference", "low", "high", "pairs", "verdict"}
    assert row["verdict"] == verdict and row["pairs"] == 3 and row["difference"] == pytest.approx(difference)
    assert row["low"] < difference < row["high"]
    assert text in out and "the same" in out and text in (tmp_path / "report.md").read_text()
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(results) == 6 and results[0]["value"] == pytest.approx(2.0)


@pytest.mark.parametrize("settings, base, other, expected, text", [
    (dict(seeds=2), [lines(2.0), lines(2.1)], [lines(2.0, speed=101.0), lines(2.1, speed=101.0)],
     dict(verdict="identical", difference=0), "identical in every logged step (2 pairs)"),
    (dict(seeds=1), [lines(2.0)], [lines(1.9)], dict(verdict="undecided", low=None, high=None), "nothing is known about noise"),
    (dict(seeds=1), [lines(2.0)], [lines(1.9, tokens_hash="b")], {}, "others from step 1 on"),
    # worse at the end, but twice as fast, and so ahead after equal time
    (dict(), [lines(2.0 + 0.01 * i) for i in range(3)], SLOWLY, dict(verdict="worse"), "other is worse than base"),
    (dict(at="seconds"), [lines(2.0 + 0.01 * i) for i in range(3)], SLOWLY, dict(verdict="better"), "other beats base"),
    # the loss falls by 0.05 per 1,000 tokens; the variant is 0.1 ahead, so needs 2,000 tokens less, plus a little noise
    (dict(metric="loss", reach=2.2), 3 * [lines(2.0)], [lines(1.9 + 0.001 * i) for i in range(3)],
     dict(verdict="better", difference=pytest.approx(-1980)), "tokens"),
    (dict(metric="accuracy", best="high"), 3 * [lines(2.0, accuracy=0.5)], 3 * [lines(2.0, accuracy=0.6)],
     dict(verdict="undecided", low=None), "coarse metric"),
    (dict(metric="tokens_per_second", best="high"), [lines(2.0)] * 3, [lines(2.0, speed=s) for s in (200.0, 201.0, 202.0)],
     dict(verdict="better"), "other beats base"),
    # dead seeds: a NaN at the end is null; without the dead seeds the variant would be better
    (dict(seeds=5), [lines(2.0 + 0.01 * i) for i in range(5)], [lines(1.5)] * 3 + 2 * [NAN],
     dict(verdict="undecided", difference=None, died=2), "2 of 5 seeds died, and 0 of 5 of base"),
    (dict(), 3 * [lines(2.0)], 3 * [NAN], dict(verdict="worse", died=3), "is worse than base: 3 of 3 seeds died"),
    (dict(reach=1.6), 3 * [lines(1.5)], [lines(1.4), lines(1.4), lines(2.0)],
     dict(verdict="undecided", died=1), "1 of 3 seeds died or never reached 1.6"),
    (dict(at="tokens"), [lines(2.0, tokens=250)] * 3, 3 * [lines(1.0)],
     dict(verdict="undecided", pairs=0, budget=5000), "use a smaller --val_every"),
    (dict(at="tokens"), [lines(2.0 + 0.01 * i, tokens=500) for i in range(3)], 3 * [lines(2.0)],
     dict(verdict="worse", budget=10000), "compared after 10,000 tokens, in the middle of the learning rate schedule of other"),
], ids=["identical", "one seed", "other batches", "at the end", "after equal time", "tokens to reach", "coarse", "only faster",
        "2 of 5 died", "all died", "1 never there", "before the first validation", "in the schedule"])
def test_report(tmp_path, capsys, settings, base, other, expected, text):
    runs = {(name, i): found for name, both in ((BASE, base), (OTHER, other)) for i, found in enumerate(both)}
    report_study(write(tmp_path, study(**settings), runs))
    assert row_of(tmp_path) | expected == row_of(tmp_path) and text in capsys.readouterr().out


@pytest.mark.parametrize("flags, made, text", [
    ({}, {"code": {"a.py": "2"}}, "a.py: changed since"),
    ({"val_batches": 4}, {}, "of different texts"),
    ({}, {"data": {"tokenizer_sha256": "u"}}, "use --metric val_bits_per_byte"),
])
def test_runs_that_cannot_be_compared_are_refused(tmp_path, flags, made, text):
    settings = study(seeds=1)
    settings["variants"][OTHER]["files"] = {"a.py": "1"}
    folder = write(tmp_path, settings, {(BASE, 0): lines(2.0), (OTHER, 0): lines(1.9)})
    for name, config in ((BASE, {"_run": {}}), (OTHER, flags | {"_run": made})):
        (folder / name / "seed-0" / "config.json").write_text(json.dumps({"val_batches": 8, "seq_len": 32} | config))
    with pytest.raises(ValueError, match=text):
        report_study(folder)


def test_two_optimizers_are_no_single_law(tmp_path, capsys):
    names = [f"{optimizer}{n}" for optimizer in "ab" for n in (1, 2, 4, 8)]
    settings = study(names=names, seeds=1, fit=True)
    settings["variants"] = {name: v | {"parameters": 10**6 * int(name[1:])} for name, v in settings["variants"].items()}
    report_study(write(tmp_path, settings, {(name, 0): lines(2.0) for name in names}))
    assert "no fit of 4 sizes" in capsys.readouterr().out


# ---------------------------------------------------------------- wrong usage
TINY = ["--model_args", "n_layers=2,dim=32,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64", "--steps", "6", "--val_every", "3",
        "--log_every", "1", "--checkpoint_every", "2", "--local_batch_size", "2", "--seq_len", "32", "--val_batches", "1",
        "--device", "cpu", "--compute_dtype", "float32"]


def test_more_runs_at_once_than_gpus_are_refused(monkeypatch):
    """tests/support/messages.txt has the other wrong command lines."""
    monkeypatch.setattr(ablate.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="--jobs 2 x --nproc 2 needs 4 GPUs, and there are 2"):
        ablate.main("train_llama3.py --vary lr=1,2 --jobs 2 --nproc 2".split())


def test_a_recipe_is_seeded_with_the_seeds_that_it_has(monkeypatch):
    monkeypatch.chdir(REPO)
    args, _ = ablate.parse("grpo.py --metric eval_reward".split())
    for recipe, seeded in (("grpo.py", ["seed"]), ("train_llama3.py", ["seed", "data_seed"])):
        assert ablate.check_variant("a", {"recipe": recipe, "flags": []}, args)["seeded"] == seeded


def test_what_is_good_follows_from_the_metric():
    high = ("eval_reward", "tokens_per_second", "eval_pass_at_k", "eval_greedy", "score", "exact_match", "solved")
    assert [m for m in ("val_loss", *high) if ablate.parse(["--metric", m])[0].best == "high"] == list(high)
    assert ablate.parse("--metric reward_mean --best low".split())[0].best == "low"


# ---------------------------------------------------------------- real runs
def command(out, *words):
    """words: recipes, then flags, after the flags of TINY, so that the last value counts."""
    recipes = list(itertools.takewhile(lambda word: word.endswith(".py"), words))
    return [sys.executable, "ablate.py", *recipes, *TINY, *map(str, words[len(recipes):]), "--out", str(out)]


def losses(out):
    keys = "step", "loss", "val_loss", "tokens_hash"
    folders = [path.parent for path in out.glob("*/*/metrics.jsonl")]
    return {folder.relative_to(out): [[line.get(key) for key in keys] for line in metrics(folder)] for folder in folders}


@pytest.mark.slow
def test_a_study_continues_after_a_kill(tmp_path):
    """SIGKILL in the middle of one, SIGINT of another: the same verdicts as undisturbed, and no finished run runs again."""
    flags = "train_llama3.py", "--vary", "lr=1e-3,1e-2", "--seeds", 1, "--steps", 40, "--log_every", 5
    run(command(tmp_path / "whole", *flags))
    for number in (signal.SIGKILL, signal.SIGINT):
        out = tmp_path / number.name
        process = subprocess.Popen(command(out, *flags), cwd=REPO, env=ENV)
        while not list(out.glob("*/*/checkpoints/step-*")):
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(timeout=120) == (-9 if number == signal.SIGKILL else 130)
        run(command(out, *flags))
        assert losses(out) == losses(tmp_path / "whole")
        rows = [json.loads((folder / "verdicts.json").read_text()) for folder in (out, tmp_path / "whole")]
        assert rows[0] == rows[1]
    inodes = {path: path.stat().st_mtime for path in out.glob("*/*/metrics.jsonl")}
    run(command(out, *flags))
    assert inodes == {path: path.stat().st_mtime for path in out.glob("*/*/metrics.jsonl")}


@pytest.mark.slow
def test_equal_flags_are_identical(tmp_path):
    """A real A/A study, on two processes each."""
    out = run(command(tmp_path, "train_llama3.py", "--variant", "a:", "--variant", "b:", "--seeds", 1, "--nproc", 2, "--tp", 2))
    assert "b and a are identical in every logged step (1 pair)" in out
    assert row_of(tmp_path)["verdict"] == "identical"


@pytest.mark.slow
def test_forks(tmp_path):
    """A fork with a renamed variable is bit-equal to the original, a worse block is worse, and a failure is reported."""
    left_out = shutil.ignore_patterns(".*", "tests", "docs", "runs", "__pycache__")
    shutil.copytree(REPO, tmp_path, dirs_exist_ok=True, ignore=left_out)
    recipe = (tmp_path / "train_llama3.py").read_text()
    model = (tmp_path / "models/llama3.py").read_text()

    def fork(name, text, *changes):
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)

    fork("renamed.py", recipe, ("layout", "plan"), ("check_plan", "check_layout"), ("distributed.plan", "distributed.layout"))
    fork("models/worse.py", model, ("h + self.attn(", "h + 0 * self.attn("), ("h + self.ffn(", "h + 0 * self.ffn("))
    fork("worse.py", recipe, ("models.llama3 import", "models.worse import"))
    fork("fails.py", recipe, ("        loss = forward", "        raise OSError('no more')\n        loss = forward"))
    recipes = "train_llama3.py", "renamed.py", "worse.py", "fails.py"
    flags = *recipes, "--seeds", 3, "--steps", 40, "--metric", "loss", "--lr", "2e-2"
    said = run(command("study", *flags), tmp_path, status=1)
    rows = {row["variant"]: row for row in json.loads((tmp_path / "study/verdicts.json").read_text())}
    assert (rows["renamed"]["verdict"], rows["worse"]["verdict"], rows["fails"]["died"]) == ("identical", "worse", 3)
    assert "identical in every logged step" in said and "OSError: no more" in said


@pytest.mark.slow
def test_an_unknown_metric_ends_after_the_first_run(tmp_path):
    done = ended(command(tmp_path, "train_llama3.py", "--vary", "lr=1e-3,1e-2", "--metric", "losss"), status=2)
    assert "--metric losss: no run logs it; there are" in done.stderr
