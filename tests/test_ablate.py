"""ablate.py: statistics on simulated studies, the report on written studies, and a few real
studies."""

import argparse
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from programs import run_nested
from runs import ENV, REPO, ended, fork, metrics, run

import ablate
from tools.study.ladder import describe_design, fit_sizes, line_at, report_ladder
from tools.study.laws import WORST, condition_of, fit_sizes_and_tokens
from tools.study.report import report_study
from tools.study.runs import describe_running
from tools.study.significance import add_looks, interval, t_quantile
from tools.study.study import (
    APART,
    DEFAULTS,
    compare_variant,
    folder_of,
    looks_of,
    noise_of,
    winners_of,
)
from tools.study.variants import check_variants, sources_of, variants_of

BASE = "base"
OTHER = "other"


def study(seeds=3, until=None, max_seeds=12, names=(BASE, OTHER), steps=20, **settings):
    one = {
        "recipe": "r.py",
        "file": "r.py",
        "files": {},
        "flags": [],
        "steps": steps,
        "val_every": 10,
    }
    one |= dict.fromkeys(("parameters", "all_parameters", "tokens", "flops"))
    return (
        DEFAULTS
        | dict(
            metric="val_loss",
            best="low",
            reach=None,
            seeds=seeds,
            until=until,
            max_seeds=max_seeds,
            nproc=1,
            baseline=names[0],
            variants={name: dict(one) for name in names},
            command="",
        )
        | settings
    )


def lines(final: float, steps=20, speed=100.0, tokens_hash="a", tokens=1000, **extra):
    """The metrics.jsonl of a run whose loss falls from final + 1 to final."""
    found = []
    for step in range(1, steps + 1):
        loss = final + 1 - step / steps
        cost = {"tokens_per_second": speed, "step_time_s": 1000 / speed, "memory_gib": 0.5}
        found.append(
            {
                "step": step,
                "loss": loss,
                "tokens": tokens * step,
                "tokens_hash": tokens_hash,
                "mfu": None,
            }
            | cost
        )
        if step % 10 == 0:
            found.append({"step": step, "val_loss": loss, "val_bits_per_byte": None} | extra)
    return found


def write(folder, settings, runs):
    """Write a study's folder; runs: {(variant, seed): lines}."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(settings))
    for (name, seed), found in runs.items():
        (folder / name / f"seed-{seed}").mkdir(parents=True)
        (folder / name / f"seed-{seed}" / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in found)
        )
    return folder


# ---------------------------------------------------------------- statistics
@pytest.mark.parametrize(
    "alpha, df, t",
    [
        (0.05, 1, 12.7062),
        (0.05, 2, 4.30265),
        (0.05, 3, 3.18245),
        (0.05, 10, 2.22814),
        (0.01, 4, 4.60409),
        (0.001, 5, 6.86883),
        (0.05, 29, 2.04523),
    ],
)
def test_t_quantile_equals_the_printed_tables(alpha, df, t):
    assert t_quantile(alpha, df) == pytest.approx(t, rel=2e-6)


def test_one_interval_is_students():
    d = [0.10, 0.13, 0.11]
    low, high, level = interval(d, 0.05, add_looks([], 3, 3))
    half = 4.30265 * np.std(d, ddof=1) / 3**0.5
    assert level == 0.95
    assert (low, high) == pytest.approx((np.mean(d) - half, np.mean(d) + half), rel=1e-5)


def test_looks_cost():
    """Each of several looks needs a larger t than a single look after equally many pairs. Equal
    looks cost nothing."""
    looks = add_looks([], 3, 12)
    d = list(np.random.default_rng(0).normal(0, 1, 12))
    assert [n for n, _ in looks] == list(range(3, 13))
    assert looks[-1][1] == 1
    assert add_looks(looks, 4, 10) == looks
    assert all(
        np.ptp(interval(d[:n], 0.05, looks)[:2]) > np.ptp(interval(d[:n], 0.05, [[n, 1.0]])[:2])
        for n, _ in looks
    )


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


@pytest.mark.parametrize(
    "settings, again",
    [
        (study(), [3]),
        pytest.param(study(until=0.005), [3], marks=pytest.mark.slow),
        (study(), [5, 8, 8]),
    ],
)
def test_equal_variants_are_told_apart_in_at_most_5_percent(settings, again):
    """Of 4,000 studies: with a chance of 5.5 % each, 220 +- 14 are wrong. The first plan has 5 %,
    all later looks 0.5 %."""
    rng = np.random.default_rng(0)
    wrong = sum(
        low > 0 or high < 0
        for (low, high), _ in (simulate(rng, settings, again=again) for _ in range(4000))
    )
    assert wrong <= 220 + 14


NOISE = {"sd": 0.02, "df": 10}


@pytest.mark.parametrize("difference, least, most", [(0.0, 0, 220 + 14), (0.04, 3200, 4000)])
def test_noise_that_was_measured_before(difference, least, most):
    """Equal noise in both studies: two pairs are enough for twice the noise, and 5 % of studies of
    equal variants are wrong."""
    rng = np.random.default_rng(3)
    sds = 0.02 * np.sqrt(rng.chisquare(10, 4000) / 10)  # as measured, with 10 degrees of freedom
    found = (
        interval(rng.normal(difference, 0.02, 3), 0.05, add_looks([], 3, 3), NOISE | {"sd": sd})
        for sd in sds
    )
    assert least <= sum(low > 0 or high < 0 for low, high, _ in found) <= most


def test_another_noise_does_not_count():
    d = [0.1, -0.1, 0.3]
    looks = add_looks([], 1, 3, least=1)
    assert interval(d, 0.05, looks, NOISE) == interval(d, 0.05, looks)
    # 3.277 x 0.02
    assert interval(d[:1], 0.05, looks, NOISE)[:2] == pytest.approx(
        (0.1 - 0.0655, 0.1 + 0.0655), abs=1e-4
    )


@pytest.mark.parametrize("seeds, least, most", [("fresh", 0, 220 + 14), ("the same", 400, 4000)])
def test_a_tuned_comparison_needs_fresh_seeds(seeds, least, most):
    """Equal variants; one is tuned over nine rates that are all equal. On the seeds of the search
    it looks better by chance."""
    rng = np.random.default_rng(4)
    wrong = 0
    for _ in range(4000):
        cells = rng.normal(0, 0.02, (9, 5))  # (rate, seed): differences from the baseline
        d = cells[cells.mean(1).argmin()] if seeds == "the same" else rng.normal(0, 0.02, 5)
        low, high, _ = interval(list(d), 0.05, add_looks([], 5, 5))
        wrong += low > 0 or high < 0
    assert least <= wrong <= most


def test_the_difference_at_a_larger_size():
    """The line's interval at 10 times the largest size contains the true difference in 95 % of
    ladders."""
    rng = np.random.default_rng(5)
    x = np.repeat(np.log([1e5, 3e5, 1e6, 3e6]), 3)
    lines_at = (
        line_at(x, 0.1 - 0.02 * x + rng.normal(0, 0.01, 12), np.log(3e7), 0.05) for _ in range(2000)
    )
    inside = sum(low <= 0.1 - 0.02 * np.log(3e7) <= high for _, low, high in lines_at)
    assert 1900 - 40 <= inside <= 1900 + 40


def test_a_planted_difference_is_found_with_a_third_of_the_runs():
    rng, settings = np.random.default_rng(1), study(until=0.02, max_seeds=12)
    found = [simulate(rng, settings, difference=0.05) for _ in range(200)]
    assert np.mean([low > 0 for (low, _), _ in found]) >= 0.8
    paired_runs = 2 * np.mean([pairs for _, pairs in found])

    # of the same comparison with other seeds for the variant: Student's t of two samples
    def power(n):
        a = rng.normal(0, 0.07, (2000, n))
        b = rng.normal(0.05, 0.0728, (2000, n))
        s = np.sqrt((a.var(1, ddof=1) + b.var(1, ddof=1)) / n)
        return np.mean(np.abs(b.mean(1) - a.mean(1)) > t_quantile(0.05, 2 * n - 2) * s)

    unpaired_runs = 2 * next(n for n in range(2, 200) if power(n) >= 0.8)
    assert paired_runs <= unpaired_runs / 3, (paired_runs, unpaired_runs)


def test_until_stops_at_a_difference_that_is_small_enough():
    (low, high), pairs = simulate(np.random.default_rng(2), study(until=0.05), noise=0.005)
    assert -0.05 < low <= 0 <= high < 0.05
    assert pairs < 12


def test_fit_sizes():
    N = [1e5, 3e5, 1e6, 3e6, 1e7]
    found = fit_sizes(N, [1.7 + 50 * n**-0.3 for n in N])
    assert (found["E"], found["A"], found["a"]) == pytest.approx((1.7, 50, 0.3), rel=2e-2)
    assert found["low"] <= found["a"] <= found["high"]
    assert max(map(abs, found["residuals"])) < 1e-3


LADDER = [1e5, 3e5, 1e6, 3e6]


def design(sizes, ratios, runs=1):
    """(N, D) of each run."""
    points = [(n, n * ratio) for n in sizes for ratio in ratios for _ in range(runs)]
    return np.array(points).T


def synthetic(rng, N, D, a=0.5, b=0.2, noise=0.01):
    """Losses of a law with known exponents."""
    return 1.7 + 2 * (N / N.min()) ** -a + 1.5 * (D / D.min()) ** -b + rng.normal(0, noise, len(N))


def test_two_axes_tell_both_exponents():
    """95 % intervals cover the true exponents in 95 % of 100 ladders, of sizes and of tokens, and
    are narrow."""
    rng = np.random.default_rng(7)
    N, D = design(LADDER, (5, 20, 80), runs=3)
    covered = np.zeros(2)
    for _ in range(60):
        law = fit_sizes_and_tokens(N, D, synthetic(rng, N, D))
        covered += [law.a_low <= 0.5 <= law.a_high, law.b_low <= 0.2 <= law.b_high]
        assert law.a_high - law.a_low < 0.2
    # two standard errors of 60 ladders
    assert (covered >= 60 * 0.95 - 2 * (60 * 0.95 * 0.05) ** 0.5).all(), covered


def test_a_ray_does_not():
    """The design with one number of tokens per parameter: the one exponent's interval misses the
    true exponents, of sizes and of tokens, and both axes' intervals exclude nothing."""
    rng = np.random.default_rng(8)
    N, D = design(LADDER, (20,), runs=9)
    for _ in range(10):
        losses = synthetic(rng, N, D)
        found = fit_sizes(N, losses)
        assert 0.2 < found["low"] < found["high"] < 0.5
    law = fit_sizes_and_tokens(N, D, losses)
    assert (law.a_low, law.a_high, law.b_low, law.b_high) == (0, np.inf, 0, np.inf)


def test_the_constants_of_a_law_without_noise():
    N, D = design(LADDER, (5, 20, 80))
    law = fit_sizes_and_tokens(N, D, 1.7 + 400 * N**-0.34 + 300 * D**-0.28)
    assert (law.a, law.b) == pytest.approx((0.34, 0.28), rel=0.01)
    assert law.E == pytest.approx(1.7, rel=0.02)
    assert (law.A, law.B) == pytest.approx((400, 300), rel=0.1)


def test_a_design_that_cannot_tell_is_refused_or_named():
    assert condition_of(*design(LADDER, (5, 20, 80))) < 500
    assert condition_of(*design([1e5, 2e5, 4e5, 8e5, 16e5, 32e5], (20,))) > 1e6
    assert "cannot be told apart" in describe_design([*zip(*design(LADDER, (20,)))])
    assert "condition number of the design: 2" in describe_design(
        [*zip(*design(LADDER, (5, 20, 80)))]
    )
    for sizes, ratios in (([1e5, 1e6], (5, 20, 80)), (LADDER, (20, 25))):
        points = design(sizes, ratios)
        assert condition_of(*points) > WORST
        with pytest.raises(ValueError, match="cannot tell the exponents"):
            describe_design([*zip(*points)])


def test_a_ladder_over_two_axes(tmp_path, capsys):
    """Written studies: both exponents in the report, and a plane through the differences."""
    rng = np.random.default_rng(9)
    folders = []
    for n in LADDER:
        for ratio in (5, 80):
            settings = study(seeds=3)
            for variant in settings["variants"].values():
                variant |= {"parameters": n, "tokens": n * ratio / 20}
            [loss] = 1.7 + 3 * (n / 1e5) ** -0.5 + 2 * np.array([n * ratio / 5e5]) ** -0.2
            better = 0.01 * np.log(n) - 0.02 * np.log(n * ratio)
            runs = {}
            for i in range(3):
                noise = rng.normal(0, 0.003, 3)
                runs[BASE, i] = lines(loss + noise[0] + noise[1])
                runs[OTHER, i] = lines(loss + noise[0] + better + noise[2])
            folders.append(f"n={n:g}@{ratio}")
            report_study(write(tmp_path / folders[-1], settings, runs))
    report_ladder(tmp_path, folders, 3e7)
    rows = json.loads((tmp_path / "ladder.json").read_text())
    assert len(rows) == 9
    # one comparison at each of eight sizes, and the extrapolation
    assert rows[-1]["level"] == pytest.approx(1 - 0.05 / 9)
    expected = 0.01 * np.log(3e7) - 0.02 * np.log(3e7 * 80)
    assert rows[-1]["low"] < expected < rows[-1]["high"]
    assert rows[-1]["high"] - rows[-1]["low"] < 0.05
    said = capsys.readouterr().out
    [law] = re.findall(r"base: L = .*", said)
    low, high = map(float, re.findall(r"exponents (\S+) to (\S+) \(sizes", law)[0])
    assert 0.4 < low < high < 0.6


# ---------------------------------------------------------------- the report
NAN = lines(1.5) + [{"step": 20, "val_loss": None}]


def row_of(folder):
    [row] = json.loads((folder / "verdicts.json").read_text())
    return row


@pytest.mark.parametrize(
    "difference, verdict, text",
    [
        (-0.1, "better", "other beats base by 0.1 nats (95 % interval 0.07"),
        (0.1, "worse", "other is worse than base by 0.1 nats"),
        (0.001, "undecided", "other: no difference from base found; one of 0.026 nats could hide"),
    ],
)
def test_verdicts(tmp_path, capsys, difference, verdict, text):
    runs = {(BASE, i): lines(2 + 0.1 * i) for i in range(3)}
    runs |= {
        (OTHER, i): lines(2 + 0.1 * i + difference + 0.01 * (i - 1), speed=200.0) for i in range(3)
    }
    report_study(write(tmp_path, study(), runs))
    row = row_of(tmp_path)
    out = capsys.readouterr().out
    assert row.keys() >= {
        "variant",
        "baseline",
        "metric",
        "difference",
        "low",
        "high",
        "pairs",
        "verdict",
    }
    assert row["verdict"] == verdict
    assert row["pairs"] == 3
    assert row["difference"] == pytest.approx(difference)
    assert row["low"] < difference < row["high"]
    assert text in out
    assert "the same" in out
    assert text in (tmp_path / "report.md").read_text()
    assert row["differences"] == pytest.approx([difference - 0.01, difference, difference + 0.01])


@pytest.mark.parametrize(
    "settings, base, other, expected, text",
    [
        (
            dict(seeds=2),
            [lines(2.0), lines(2.1)],
            [lines(2.0, speed=101.0), lines(2.1, speed=101.0)],
            dict(verdict="identical", difference=0),
            "identical in every logged step (2 pairs)",
        ),
        (
            dict(seeds=1),
            [lines(2.0)],
            [lines(1.9)],
            dict(verdict="undecided", low=None, high=None),
            "nothing is known about noise",
        ),
        (dict(seeds=1), [lines(2.0)], [lines(1.9, tokens_hash="b")], {}, "others from step 1 on"),
        # the loss falls by 0.05 per 1,000 tokens; the variant is 0.1 ahead, so needs 2,000 tokens less,
        # plus a little noise
        (
            dict(metric="loss", reach=2.2),
            3 * [lines(2.0)],
            [lines(1.9 + 0.001 * i) for i in range(3)],
            dict(verdict="better", difference=pytest.approx(-1980)),
            "tokens",
        ),
        (
            dict(metric="accuracy", best="high"),
            3 * [lines(2.0, accuracy=0.5)],
            3 * [lines(2.0, accuracy=0.6)],
            dict(verdict="undecided", low=None),
            "coarse metric",
        ),
        (
            dict(metric="tokens_per_second", best="high"),
            [lines(2.0)] * 3,
            [lines(2.0, speed=s) for s in (200.0, 201.0, 202.0)],
            dict(verdict="better"),
            "other beats base",
        ),
        # dead seeds: a NaN at the end is null; without the dead seeds the variant would be better
        (
            dict(seeds=5),
            [lines(2.0 + 0.01 * i) for i in range(5)],
            [lines(1.5)] * 3 + 2 * [NAN],
            dict(verdict="undecided", difference=None, died=2),
            "2 of 5 seeds died, and 0 of 5 of base",
        ),
        (
            dict(),
            3 * [lines(2.0)],
            3 * [NAN],
            dict(verdict="worse", died=3),
            "is worse than base: 3 of 3 seeds died",
        ),
        (
            dict(reach=1.6),
            3 * [lines(1.5)],
            [lines(1.4), lines(1.4), lines(2.0)],
            dict(verdict="undecided", died=1),
            "1 of 3 seeds died or never reached 1.6",
        ),
    ],
    ids=[
        "identical",
        "one seed",
        "other batches",
        "tokens to reach",
        "coarse",
        "only faster",
        "2 of 5 died",
        "all died",
        "1 never there",
    ],
)
def test_report(tmp_path, capsys, settings, base, other, expected, text):
    runs = {
        (name, i): found
        for name, both in ((BASE, base), (OTHER, other))
        for i, found in enumerate(both)
    }
    folder = write(tmp_path, study(**settings), runs)
    assert ablate.main(["--report", str(folder)]) == ablate.main(["--collect", str(folder)])
    assert row_of(tmp_path) | expected == row_of(tmp_path)
    assert text in capsys.readouterr().out


def test_the_table_has_speed_mfu_and_memory(tmp_path, capsys):
    """MFU is the median over all lines with a number; without any there is no column."""
    fast = lines(1.9, speed=200.0)
    for line in fast:
        if "mfu" in line:
            line["mfu"] = 0.412
    runs = {(BASE, 0): lines(2.0), (OTHER, 0): fast}
    report_study(write(tmp_path / "known", study(seeds=1), runs))
    head, _, base, other = capsys.readouterr().out.strip().splitlines()[:4]
    columns = [cell.strip() for cell in head.split("|")]
    cells = [cell.strip() for cell in other.split("|")]
    assert dict(zip(columns, cells))["MFU"] == "41.2 %"
    assert dict(zip(columns, cells))["tokens/s"] == "200"
    assert dict(zip(columns, cells))["GiB"] == "0.50"
    assert "41.2" not in base
    report_study(write(tmp_path / "unknown", study(seeds=1), {(BASE, 0): lines(2.0)}))
    assert "MFU" not in capsys.readouterr().out.splitlines()[1]


def test_sources_of_a_recipe_in_forks_are_those_of_the_whole_checkout():
    found = sources_of(REPO / "forks/train_llama3_mup.py")
    assert found.keys() >= {
        "train_llama3_mup.py",
        "forks/mup.py",
        "models/llama3.py",
        "parallel.py",
        "training/optim.py",
    }


def test_sources_of_a_recipe_with_a_dot_in_its_name(tmp_path):
    copy = tmp_path / "idea_0.9.py"
    copy.write_text("import helper\n")
    (tmp_path / "helper.py").touch()
    assert sources_of(copy).keys() == {"torch", "idea_0.9.py", "helper.py"}


def test_a_text_that_was_replaced_is_refused(tmp_path):
    settings = study(seeds=2)
    folder = write(tmp_path, settings, {(BASE, i): lines(2.0) for i in range(2)})
    for i in range(2):
        made = {"data_sha256": str(i), "data_seed": i}
        (folder / BASE / f"seed-{i}" / "config.json").write_text(
            json.dumps({"_run": {"data": made}})
        )
    with pytest.raises(ValueError, match="was trained on another text than base before"):
        report_study(folder)


def test_a_variant_that_is_left_out_has_been_looked_at(tmp_path):
    names = [BASE, "a", "b", "c"]
    values = {
        (name, i): lines(2.0 + 0.1 * i + (0.01 * i - 0.05) * names.index(name))
        for name in names
        for i in range(3)
    }
    report_study(write(tmp_path, study(names=names), values))
    first = json.loads((tmp_path / "verdicts.json").read_text())[0]
    fewer = json.loads((tmp_path / "study.json").read_text())
    assert fewer["comparisons"] == 3
    fewer["variants"] = {name: fewer["variants"][name] for name in (BASE, "a")}
    (tmp_path / "study.json").write_text(json.dumps(fewer))
    report_study(tmp_path)
    assert row_of(tmp_path)["level"] == first["level"] == pytest.approx(1 - 0.05 / 3)


def test_what_was_there_before_the_first_line_is_unknown(tmp_path, capsys):
    runs = {(BASE, 0): lines(2.0), (OTHER, 0): lines(0.5)}
    report_study(write(tmp_path, study(seeds=1, metric="loss", reach=2.2), runs))
    assert "no loss to compare, so left out: other, seed 0" in capsys.readouterr().out


def test_names_stay_inside_of_the_study():
    assert folder_of("study", "..", 0).parts == ("study", "_", "seed-0")


@pytest.mark.parametrize(
    "flags, made, text",
    [
        ({}, {"code": {"a.py": "2"}}, "a.py: changed since"),
        ({"val_batches": 4}, {}, "of different texts"),
        ({}, {"data": {"tokenizer_sha256": "u"}}, "use --metric val_bits_per_byte"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(tmp_path, flags, made, text):
    settings = study(seeds=1)
    settings["variants"][OTHER]["files"] = {"a.py": "1"}
    folder = write(tmp_path, settings, {(BASE, 0): lines(2.0), (OTHER, 0): lines(1.9)})
    for name, config in ((BASE, {"_run": {}}), (OTHER, flags | {"_run": made})):
        (folder / name / "seed-0" / "config.json").write_text(
            json.dumps({"val_batches": 8, "seq_len": 32} | config)
        )
    with pytest.raises(ValueError, match=text):
        report_study(folder)


def tuning(tmp_path, *finals):
    """winners_of a variant with so many values of lr: a final loss on each of two seeds, or NaN."""
    cells = [f"lr={i}" for i in range(len(finals))]
    settings = study(seeds=2, names=[f"a {cell}" for cell in cells], first_seed=APART)
    runs = {
        (f"a_lr={i}", APART + seed): NAN if final is None else lines(final)
        for i, final in enumerate(finals)
        for seed in (0, 1)
    }
    return winners_of(settings, write(tmp_path, settings, runs), ["a"], cells)


@pytest.mark.parametrize(
    "finals, best, text",
    [
        ((2.0, 1.8, 1.9), "lr=1", r"lr=1 \(lr=0: 2.0000, lr=1: 1.8000, lr=2: 1.9000\)$"),
        ((2.0, 1.8, 1.7), "lr=2", "the edge of its grid"),
        ((1.9, 2.0, None), "lr=0", "the edge of its grid"),
    ],
)
def test_the_winner_of_a_search(tmp_path, finals, best, text):
    found, [said] = tuning(tmp_path, *finals)
    assert found == {"a": best}
    assert re.search(text, said)


def test_a_search_without_a_winner(tmp_path):
    with pytest.raises(ValueError, match="all values of --tune died for a"):
        tuning(tmp_path, None, None)


@pytest.mark.parametrize(
    "flags, text",
    [
        ({}, ""),
        ({"steps": 30}, "its steps is 20, here 30"),
        ({"data": "b"}, "its data is None, here b"),
    ],
)
def test_the_noise_of_another_study(tmp_path, flags, text):
    values = {(BASE, i): lines(2.0) for i in range(6)} | {
        (OTHER, i): lines(2.0 + 0.1 * (i % 2)) for i in range(6)
    }
    settings = study(seeds=6)
    for variant in settings["variants"].values():
        variant |= dict.fromkeys(("data", "val_data", "val_batches", "seq_len"))
    write(tmp_path, settings, values)
    baseline = settings["variants"][BASE] | flags
    if text:
        with pytest.raises(ValueError, match=text):
            noise_of(str(tmp_path), argparse.Namespace(metric="val_loss", reach=None), baseline)
    else:
        found = noise_of(str(tmp_path), argparse.Namespace(metric="val_loss", reach=None), baseline)
        assert found == {"sd": pytest.approx(0.003**0.5), "df": 5}


# ---------------------------------------------------------------- wrong usage
TINY = [
    "--model_args",
    "n_layers=2,dim=32,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64",
    "--steps",
    "6",
    "--val_every",
    "3",
    "--log_every",
    "1",
    "--checkpoint_every",
    "2",
    "--local_batch_size",
    "2",
    "--seq_len",
    "32",
    "--val_batches",
    "1",
    "--device",
    "cpu",
    "--compute_dtype",
    "float32",
]


def test_more_runs_at_once_than_gpus_are_refused(monkeypatch):
    """tests/flags/messages.txt has the other wrong command lines."""
    monkeypatch.setattr(ablate.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="--jobs 2 x --nproc 2 needs 4 GPUs, and there are 2"):
        ablate.main("train_llama3.py --vary lr=1,2 --jobs 2 --nproc 2".split())


@pytest.fixture
def forked(monkeypatch):
    """The recipes that ablate.py asks, each in a process of its own, are forks: see programs.py."""
    monkeypatch.setattr(subprocess, "run", run_nested)


def test_a_recipe_is_seeded_with_the_seeds_that_it_has(forked, tmp_path, monkeypatch, capsys):
    """A study as ablate.py sets it up; nothing is trained, because --only names none of its runs."""
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(ablate, "stop_signals", list)  # the tests' own stay
    words = f"grpo.py train_llama3.py --metric eval_reward --seeds 3 --only none/0 --out {tmp_path}"
    with pytest.raises(ValueError, match="--only none/0 is no run of this study: need NAME/SEED"):
        ablate.main(words.split())
    variants = json.loads((tmp_path / "study.json").read_text())["variants"]
    seeded = {name: variant["seeded"] for name, variant in variants.items()}
    assert seeded == {"grpo": ["seed"], "train_llama3": ["seed", "data_seed"]}
    assert capsys.readouterr().out.splitlines()[-1] == "6 runs"  # two recipes with three seeds


@pytest.mark.parametrize(
    "words, names",
    [
        ("a.py b.py", ["a", "b"]),
        ("a.py --vary lr=1,2", ["lr=1", "lr=2"]),
        ("a.py b.py --vary lr=1,2", ["a lr=1", "a lr=2", "b lr=1", "b lr=2"]),
    ],
)
def test_variants_are_named_by_what_differs(words, names):
    assert list(variants_of(*ablate.parse(words.split()))) == names


RENAMED = [
    ("check_model,", "check_model as check_shapes,"),
    ("    check_model(", "    check_shapes("),
]
WITHOUT_CONNECT = [
    (" connect,", " connect as join,"),
    ("        connect(", "        join("),
]


@pytest.mark.parametrize(
    "edits, text",
    [
        (RENAMED, ""),
        (WITHOUT_CONNECT, "has no connect: import it by this name"),
        ([("    run(main, Config)", "    print('hello')")], "does not answer --check"),
        ([("    run(main, Config)", "    raise OSError('no more')")], "OSError: no more"),
    ],
    ids=["renamed", "without connect", "no recipe", "fails"],
)
def test_a_recipe_checks_itself(tmp_path, forked, edits, text):
    """A changed copy beside our modules: equal answers, or one line, and nothing is trained."""
    for path in REPO.iterdir():
        if path.suffix == ".py" or (path / "__init__.py").exists():
            (tmp_path / path.name).symlink_to(path)
    source = (REPO / "train_llama3.py").read_text()
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    copy = tmp_path / "mine.py"
    copy.write_text(source)
    variants = {"copy": {"recipe": str(copy), "flags": [*TINY]}}
    args, _ = ablate.parse(["--out", str(tmp_path / "study")])
    if text:
        with pytest.raises(ValueError, match=f"variant 'copy': .*{text}"):
            check_variants(variants, args)
    else:
        variants["ours"] = {"recipe": str(REPO / "train_llama3.py"), "flags": [*TINY]}
        check_variants(variants, args)
        for key in ("steps", "parameters", "all_parameters", "flops", "tokens", "seeded"):
            assert variants["copy"][key] == variants["ours"][key] is not None
    assert not (tmp_path / "study").exists()


def test_what_is_good_follows_from_the_metric():
    high = (
        "eval_reward",
        "tokens_per_second",
        "eval_pass_at_k",
        "eval_greedy",
        "score",
        "exact_match",
        "solved",
    )
    assert [
        m for m in ("val_loss", *high) if ablate.parse(["--metric", m])[0].best == "high"
    ] == list(high)
    assert ablate.parse("--metric reward_mean --best low".split())[0].best == "low"


# ---------------------------------------------------------------- real runs
def command(out, *words):
    """words: recipes, then flags, after the flags of TINY, so that the last value counts."""
    recipes = list(itertools.takewhile(lambda word: word.endswith(".py"), words))
    return [
        sys.executable,
        "ablate.py",
        *recipes,
        *TINY,
        *map(str, words[len(recipes) :]),
        "--out",
        str(out),
    ]


def losses(out):
    keys = "step", "loss", "val_loss", "tokens_hash"
    folders = [path.parent for path in out.glob("*/*/metrics.jsonl")]
    return {
        folder.relative_to(out): [[line.get(key) for key in keys] for line in metrics(folder)]
        for folder in folders
    }


@pytest.mark.slow
def test_a_study_continues_after_a_kill(tmp_path):
    """SIGKILL in the middle of one, SIGINT of another: the same verdicts as undisturbed, and no
    finished run runs again. A run waits in step 20 while the file `closed` exists, so that the study
    is not over before its signal."""
    closed = tmp_path / "closed"
    waits = f"""
        import os, time
        while step == 20 and os.path.exists({str(closed)!r}):
            time.sleep(0.02)
    """
    flags = (
        str(fork(tmp_path, waits)),
        "--vary",
        "lr=1e-3,1e-2",
        "--seeds",
        1,
        "--steps",
        40,
        "--log_every",
        5,
    )
    env = ENV | {"PYTHONPATH": str(REPO)}  # the copy of the recipe is in another folder
    run(command(tmp_path / "whole", *flags), env=env)
    for number in (signal.SIGKILL, signal.SIGINT):
        out = tmp_path / number.name
        closed.touch()
        process = subprocess.Popen(command(out, *flags), cwd=REPO, env=env)
        while not list(out.glob("*/*/checkpoints/step-18")):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        if number == signal.SIGKILL:
            assert process.wait(timeout=600) == -9
            closed.unlink()
        else:
            closed.unlink()  # it waits for its runs, which finish their step
            assert process.wait(timeout=600) == 130
        run(command(out, *flags), env=env)
        assert losses(out) == losses(tmp_path / "whole")
        rows = [
            json.loads((folder / "verdicts.json").read_text())
            for folder in (out, tmp_path / "whole")
        ]
        assert rows[0] == rows[1]
    inodes = {path: path.stat().st_mtime for path in out.glob("*/*/metrics.jsonl")}
    run(command(out, *flags), env=env)
    assert inodes == {path: path.stat().st_mtime for path in out.glob("*/*/metrics.jsonl")}


@pytest.mark.slow
def test_a_fork_meets_a_commit(tmp_path):
    """Two checkouts in one study: a fork with a flag and a model file of its own, and a commit.
    Equal tokens, each at its best learning rate; one run made alone first."""
    commit = tmp_path / "commit"
    shutil.copytree(
        REPO, commit, ignore=shutil.ignore_patterns(".*", "tests", "docs", "runs", "__pycache__")
    )
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *words], cwd=commit, check=True)
    recipe = commit / "train_llama3.py"
    model = commit / "models/llama3.py"
    alpha = "    alpha: float = 1.0  # new\n    seed: int"
    (commit / "train_alpha.py").write_text(recipe.read_text().replace("    seed: int", alpha))
    # not committed: the fork alone is worse
    model.write_text(model.read_text().replace("h + self.ffn(", "h + 0 * self.ffn("))
    flags = [
        "--variant",
        f"old: {recipe}@HEAD",
        "--variant",
        f"new: {commit}/train_alpha.py --alpha 0.1",
        "--seeds",
        2,
        "--tune",
        "lr=1e-3,2e-2",
        "--tune_seeds",
        1,
        "--budget",
        "tokens=2560",
    ]
    study = command(tmp_path / "study", *flags)
    steps = TINY.index("--steps")
    del study[2 + steps : 4 + steps]
    run([*study, "--only", f"old lr=1e-3/{APART}"])
    said = run(study)
    assert "8 runs, with --tune\n" in said  # two variants: two seeds, and one for each of two rates
    assert "3 runs, " in said
    assert "old is best with lr=2e-2" in said
    assert "compare" not in said
    settings = json.loads((tmp_path / "study/study.json").read_text())
    assert [(v["flags"][-2:], v["steps"]) for v in settings["variants"].values()] == 2 * [
        (["--steps=40", "--lr=2e-2"], 40)
    ]
    row = row_of(tmp_path / "study")
    report = (tmp_path / "study/report.md").read_text()
    assert row["pairs"] == 2
    assert row["verdict"] != "identical"
    assert row["difference"] != 0
    assert "+    alpha: float" in report
    assert "+        return h + 0 * self.ffn(" in report
    assert "data:image/png" in (tmp_path / "study/report.html").read_text()


@pytest.mark.slow
def test_equal_variants_over_sizes(tmp_path):
    """A/A over a ladder: identical at each size, and a law for each variant. Steps follow from
    tokens per parameter."""
    study = command(
        tmp_path,
        "train_llama3.py",
        "--variant",
        "a:",
        "--variant",
        "b:",
        "--seeds",
        1,
        "--ladder",
        "dim=16;dim=32;dim=48;dim=64",
        "--tokens_per_parameter",
        0.01,
        "--ladder_to",
        1e6,
    )
    del study[3 + TINY.index("--steps") : 5 + TINY.index("--steps")]
    said = run([word.replace("2,dim=32,", "2,") for word in study])
    rows = json.loads((tmp_path / "ladder.json").read_text())
    assert [row["verdict"] for row in rows] == 4 * ["identical"] + ["extrapolated"]
    assert rows[-1]["difference"] == 0
    assert rows[-1]["parameters"] == 1e6
    assert "b: L = " in said
    assert rows[3]["parameters"] > rows[0]["parameters"]


@pytest.mark.slow
def test_equal_flags_are_identical(tmp_path):
    """A real A/A study, on two processes each."""
    out = run(
        command(
            tmp_path,
            "train_llama3.py",
            "--variant",
            "a:",
            "--variant",
            "b:",
            "--seeds",
            1,
            "--nproc",
            2,
            "--tp",
            2,
        )
    )
    assert "b and a are identical in every logged step (1 pair)" in out
    assert row_of(tmp_path)["verdict"] == "identical"


@pytest.mark.slow
def test_forks(tmp_path):
    """A fork with a renamed variable is bit-equal to the original, a worse block is worse, and a
    failure is reported."""
    left_out = shutil.ignore_patterns(".*", "tests", "docs", "runs", "__pycache__")
    shutil.copytree(REPO, tmp_path, dirs_exist_ok=True, ignore=left_out)
    recipe = (tmp_path / "train_llama3.py").read_text()
    model = (tmp_path / "models/llama3.py").read_text()

    def fork(name, text, *changes):
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)

    fork(
        "renamed.py",
        recipe,
        ("layout", "plan"),
        ("check_plan", "check_layout"),
        ("distributed.plan", "distributed.layout"),
    )
    fork(
        "models/worse.py",
        model,
        ("h + self.attn(", "h + 0 * self.attn("),
        ("h + self.ffn(", "h + 0 * self.ffn("),
    )
    fork("worse.py", recipe, ("models.llama3 import", "models.worse import"))
    fork(
        "fails.py",
        recipe,
        ("        loss = parallel", "        raise OSError('no more')\n        loss = parallel"),
    )
    recipes = "train_llama3.py", "renamed.py", "worse.py", "fails.py"
    flags = *recipes, "--seeds", 3, "--steps", 40, "--metric", "loss", "--lr", "2e-2"
    flags += "--val_every", 0, "--checkpoint_every", 0
    said = run(command("study", *flags), tmp_path, status=1)
    rows = {
        row["variant"]: row for row in json.loads((tmp_path / "study/verdicts.json").read_text())
    }
    assert (rows["renamed"]["verdict"], rows["worse"]["verdict"], rows["fails"]["died"]) == (
        "identical",
        "worse",
        3,
    )
    assert "identical in every logged step" in said
    assert "OSError: no more" in said


@pytest.mark.slow
def test_an_unknown_metric_ends_after_the_first_run(tmp_path):
    done = ended(
        command(tmp_path, "train_llama3.py", "--vary", "lr=1e-3,1e-2", "--metric", "losss"),
        status=2,
    )
    assert "--metric losss: no run logs it; there are" in done.stderr


def test_a_run_whose_loss_is_no_number_is_described(tmp_path):
    log = folder_of(tmp_path, "nan", 3) / "metrics.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"step": 5, "loss": null}\n')
    said = describe_running(tmp_path, {("nan", 3): None})
    assert said == "nan, seed 3: step 5, loss no number"
