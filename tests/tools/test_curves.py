"""Curves of several runs, against tools/reports/curves.py: each number at its tokens and seconds, one
colour for a run in all panels, letters in the terminal, and what ablate.py --watch refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from programs import REPO
from runs import ENV, ended, launch

import ablate
from tools.reports import curves
from tools.reports.curves import (
    COLOURS,
    curve_of,
    describe_run,
    draw_runs,
    draw_text,
    find_runs,
    is_over,
    means_of_curve,
    panels_of,
    read_curves,
    text_panel,
    watch_runs,
)


def write_run(folder: Path, lines: list[dict], steps: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if steps:
        (folder / "config.json").write_text(json.dumps({"steps": steps}))
    return folder


def training(step: int, loss: float, **more) -> dict:
    return (
        dict(
            step=step,
            loss=loss,
            tokens=1000 * step,
            step_time_s=0.5,
            tokens_per_second=2000.0,
            grad_norm=1.0,
            lr=1e-3,
            memory_gib=2.0,
        )
        | more
    )


@pytest.fixture
def two(tmp_path):
    """(a dense run, a run with experts and a mixture that ends sooner)"""
    a = [training(1, 8.0), training(10, 6.0), {"step": 10, "val_loss": 6.5}]
    a += [training(20, 4.0), {"step": 20, "val_loss": 4.5, "val_bits_per_byte": 2.0}]
    b = [training(1, 8.1, moe_dead_experts=0, moe_load_max_over_mean=1.5)]
    b += [training(4, 7.0, moe_dead_experts=13, moe_load_max_over_mean=4.0)]
    b += [{"step": 4, "val_loss": 7.2, "val_loss_by_part": {"web": 7.0, "code": 7.4}}]
    write_run(tmp_path / "study" / "a", a, steps=20)
    write_run(tmp_path / "study" / "b" / "seed-0", b, steps=40)
    found = find_runs([str(tmp_path / "study")])
    return [read_curves(name, folder) for name, folder in found.items()]


def test_runs_of_a_study_have_short_names(two, tmp_path):
    assert [run.name for run in two] == ["a", "b/seed-0"]
    alone = str(tmp_path / "study" / "a")
    assert [*find_runs([alone])] == [alone]
    with pytest.raises(ValueError, match="has no metrics.jsonl, and no folder in it has one"):
        find_runs([alone, str(tmp_path / "nothing")])


def test_a_number_is_at_its_tokens_and_seconds(two):
    a, b = two
    val = curve_of(a, "val_loss", a.tokens)
    assert val is not None and val.is_held_out
    assert val.x.tolist() == [10_000, 20_000]
    assert val.y.tolist() == [6.5, 4.5]
    loss = curve_of(a, "loss", a.seconds)
    assert loss is not None and not loss.is_held_out
    assert loss.x.tolist() == [0.5, 5.0, 10.0]  # 0.5 s for each step, logged or not
    assert curve_of(a, "moe_dead_experts", a.tokens) is None
    part = curve_of(b, "val_loss_by_part", b.tokens, "code")
    assert part is not None
    assert (part.label, part.y.tolist(), part.is_held_out) == ("code", [7.4], True)


def test_a_panel_for_each_number_that_a_run_has(two):
    a, _ = two
    dense = [panel.title for panel in panels_of([a])]
    assert dense == [
        "loss by tokens",
        "loss by time",
        "validation",
        "gradient norm",
        "learning rate",
        "tokens per second",
        "peak memory of rank 0",
    ]
    panels = {panel.title: panel for panel in panels_of(two)}
    assert panels.keys() - {*dense} == {
        "load of experts",
        "dead experts",
        "validation of the parts",
    }
    of_a, of_b = panels["dead experts"].curves
    assert of_a == []
    assert of_b[0].y.tolist() == [0, 13]
    assert [curve.label for curve in panels["validation of the parts"].curves[1]] == ["web", "code"]


def test_long_training_is_drawn_in_hours(tmp_path):
    lines = [training(step, 5.0, step_time_s=3600.0) for step in (1, 2, 3)]
    run = read_curves("slow", write_run(tmp_path / "slow", lines))
    panel = panels_of([run])[1]
    assert panel.x_label == "hours of training"
    assert panel.curves[0][0].x.tolist() == [1, 2, 3]


def test_a_reward_has_a_panel_and_its_loss_no_unit(tmp_path):
    lines = [training(step, 0.1, reward_mean=step / 4, entropy=1.0) for step in (1, 2, 3)]
    run = read_curves("grpo", write_run(tmp_path / "grpo", lines))
    panels = {panel.title: panel for panel in panels_of([run])}
    assert panels["reward"].curves[0][0].y.tolist() == [0.25, 0.5, 0.75]
    assert panels["loss by tokens"].y_label == ""
    assert draw_text([run], 80, 24, False).startswith("reward by tokens")


def test_a_run_has_one_colour_in_all_panels(two, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig

    def keep(figure, *args, **options):
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    file = tmp_path / "page.png"
    assert draw_runs(two, str(file)) == f"picture: {file}"
    assert file.read_bytes()[1:4] == b"PNG"
    [figure] = drawn
    panels = panels_of(two)
    assert [axis.get_title(loc="left") for axis in figure.axes] == [p.title for p in panels]
    for axis, panel in zip(figure.axes, panels):
        wanted = []
        for colour, of_run in zip(COLOURS, panel.curves):
            wanted += [(colour, curve.y.tolist()) for curve in of_run]
        found = []
        for line in axis.lines:
            if len(line.get_ydata()):
                found.append((line.get_color(), [*line.get_ydata()]))
        assert found == wanted, panel.title
    [legend] = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["a", "b/seed-0", "training", "held out"]


def test_a_long_curve_is_means_of_parts():
    curve = curves.Curve(np.arange(1000.0), np.arange(1000.0))
    short = means_of_curve(curve)
    assert len(short.x) == curves.POINTS
    assert short.y[0] == 2.0  # of 0 to 4


def test_letters_in_the_terminal(two):
    panel = panels_of(two)[0]
    lines = text_panel(panel, 41, 9)
    assert lines[0] == "loss by tokens, nats per token"
    rows = [line.split("|")[1].ljust(41) for line in lines[1:10]]
    assert rows[-1][-1] == "a"  # the lowest loss, at the last token
    beside = [float(line.split("|")[0]) for line in lines[1:10]]
    assert beside[-1] == 4.0, "the lowest row is not marked with the lowest loss"
    assert beside == sorted(beside, reverse=True), "the losses beside the rows do not fall"
    assert sum(row.count("A") for row in rows) == 2
    assert sum(row.count("B") for row in rows) == 1
    assert lines[-1].split() == ["tokens", "1,000", "20,000"]
    text = draw_text(two, 80, 24, False)
    assert "a  a: step 20/20  loss 4.0000  val_loss 4.5000 (A)  2,000 tok/s" in text
    assert "b  b/seed-0: step 4/40" in text
    assert "13 dead experts  18 s left" in text
    assert "\x1b[34ma\x1b[0m" in draw_text(two, 80, 24, True)


def test_a_run_that_has_only_begun(tmp_path):
    run = read_curves("new", write_run(tmp_path / "new", []))
    assert describe_run(run, 0) == "a  new: no step is logged yet"
    assert draw_text([run], 80, 24, False) == "a  new: no step is logged yet"
    assert draw_runs([run], str(tmp_path / "x.png")).startswith("no picture")


def test_an_edited_line_is_left_out(tmp_path):
    lines = [training(1, 3.0), training(2, 2.0) | {"tokens": "x"}, training(3, 1.0)]
    lines[2]["step_time_s"] = "x"
    run = read_curves("new", write_run(tmp_path / "new", lines))
    assert run.steps == [1, 3]
    assert curve_of(run, "loss", run.tokens) is not None


def test_watching_draws_anew_until_all_have_ended(two, tmp_path, monkeypatch, capsys):
    a, b = two
    assert is_over(a) and not is_over(b)
    folder = tmp_path / "study"
    file = folder / "b" / "seed-0" / "metrics.jsonl"

    def last_step(seconds):
        file.write_text(file.read_text() + json.dumps(training(40, 3.0)) + "\n")

    monkeypatch.setattr(curves.time, "sleep", last_step)
    monkeypatch.setattr(curves.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(curves.os, "get_terminal_size", lambda: (80, 24))
    watch_runs([str(folder)])
    out = capsys.readouterr().out
    assert out.count("\x1b[2J") == 2
    assert "step 4/40" in out.split("\x1b[2J")[1]
    assert "step 40/40" in out.split("\x1b[2J")[2]


def test_the_command_line(two, tmp_path, monkeypatch):
    words = ["--watch", str(tmp_path / "study")]
    done = ended(launch(1, "ablate.py", *words), REPO, env=ENV)
    assert done.stdout.startswith("loss by tokens, nats per token\n")  # no terminal: once
    assert done.stderr == ""
    picture = tmp_path / "page.svg"
    assert ablate.main([*words, "--picture", str(picture)]) == 0
    assert picture.read_text().count("<svg") == 1
    for more, error in (
        (["--picture", f"{tmp_path}/no/x.png"], "--picture .* cannot be written"),
        (["--picture", f"{tmp_path}/x.txt"], "need a .png, .svg or .pdf"),
        (["--lr", "1"], "starts none: leave out --lr"),
    ):
        with pytest.raises(ValueError, match=error):
            ablate.main([*words, *more])
    with pytest.raises(ValueError, match="add --watch RUN RUN"):
        ablate.main(["--picture", "x.png"])
