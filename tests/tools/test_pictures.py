"""--plot: schedules and meshes are drawn right, in text and with matplotlib, against tools/layout_plots.py."""
import importlib
import re
from types import SimpleNamespace

import pytest
import torch
from dry import MOE, config, world
from layouts import Flags

from distributed.pipeline import ONE_STAGE_PER_RANK
from models.llama3 import Llama3Config
from tools import dryrun
from tools import layout_plots as pictures
from tools.dryrun import bubble, rows_of, simulate
from tools.layout_plots import AXIS_COLORS, draw_mesh, draw_schedule, mesh_groups, plot, text_mesh, text_picture

BUBBLES = dict(GPipe=3 / 11, LoopedBFS=3 / 19, Interleaved1F1B=3 / 19, InterleavedZeroBubble=1 / 17, ZBVZeroBubble=1 / 17,
               DualPipeV=1 / 17) | {"1F1B": 3 / 11}


@pytest.mark.parametrize("name", BUBBLES)
def test_schedule(name):
    """4 ranks, 8 micro-batches, forward and both halves of a backward of one unit: the papers' bubbles, drawn as computed."""
    stages = 4 if name in ONE_STAGE_PER_RANK else 8
    times = simulate(rows_of(Flags(pp=4, pp_schedule=name), 4, 8, stages))
    assert bubble(times) == pytest.approx(BUBBLES[name], abs=2e-3)
    work = sorted((kind, stage, m) for row in times for *_, kind, stage, m in row if kind in "FB")
    assert [w for w in work if w[0] == "F"] == [("F", s, m) for s in range(stages) for m in range(8)]
    picture = text_picture(times)
    drawn = "".join(line.split("|")[1] for line in picture.splitlines())
    assert drawn.count(".") / len(drawn) == pytest.approx(bubble(times), abs=1e-9)
    assert {k: drawn.count(k) for k in "FIW"} == dict.fromkeys("FIW", 8 * stages)


def groups_of_fsdp(stages) -> set[tuple]:
    """The ranks over which the device's parameters are really sharded, split or copied."""
    meshes = {p.device_mesh for stage in stages for p in stage.parameters()}
    return {tuple(torch.distributed.get_process_group_ranks(mesh.get_group(i))) for mesh in meshes for i in range(mesh.ndim)}


@pytest.mark.parametrize("recipe, flags", [
    ("train_llama3", dict(dp_shard=4)),
    ("train_llama3", dict(pp=2, dp_shard=2, cp=2, tp=2)),
    ("train_llama3", dict(pp=2, dp_replicate=2, cp=2)),
    ("train_qwen3", dict(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4, model_args=MOE)),
    ("train_qwen3", dict(dp_shard=4, cp=2, tp=2, ep=2, etp=2, model_args=MOE)),
    ("train_qwen3", dict(dp_replicate=2, dp_shard=2, tp=2, model_args=MOE))], ids=str)
def test_the_drawn_mesh_is_the_mesh(recipe, flags, tmp_path, monkeypatch):
    """The groups of device 0 are the process groups of the parameters, the layers and the experts."""
    main, drawn = importlib.import_module(recipe).main, {}
    with dryrun.dry_world(main, config(recipe, dict(local_batch_size=2, dp_shard=1) | flags), 0) as (stages, _, layout):
        ranks = torch.distributed.get_process_group_ranks
        real = {axis: ranks(layout.group(axis)) for axis in ("tp", "cp", "dp_replicate", "pp")}
        real["fsdp"] = ranks(layout.mesh["fsdp"].get_group())
        if "model_args" in flags:
            real |= {axis: ranks(layout.expert_mesh[axis].get_group()) for axis in ("etp", "ep", "efsdp")}
        sharded = {group for group in groups_of_fsdp(stages) if len(group) > 1}
    real = {axis: group for axis, group in real.items() if len(group) > 1}
    groups = mesh_groups(layout)
    assert groups == real and sharded <= {tuple(group) for group in groups.values()}
    text = {line.split()[0]: line for line in text_mesh(layout).splitlines()[1:]}
    assert text.keys() == real.keys()
    assert all(re.search(rf" {len(g)} +{', '.join(map(str, g[:4]))}\b", text[axis]) for axis, g in real.items())

    class Cell:  # in place of a rectangle: note a device's colours
        def __init__(self, place, width, height, color, linewidth):
            drawn.setdefault((int(place[0] + 1e-6), place[1]), set()).add(color)

    if layout.pp == 1 and importlib.util.find_spec("matplotlib"):
        pyplot, patches = pictures.pyplot_and_patches()
        stand_in = SimpleNamespace(Rectangle=Cell, Patch=patches.Patch)
        monkeypatch.setattr(pictures, "pyplot_and_patches", lambda: (pyplot, stand_in))
        monkeypatch.setattr(pyplot.Axes, "add_patch", lambda axes, patch: None)
        draw_mesh(layout, str(tmp_path / "mesh.png"))
        inner = layout.cp * layout.tp
        for axis, group in real.items():
            colored = {d * inner + j for (d, j), colors in drawn.items() if AXIS_COLORS[axis] in colors}
            assert colored == set(group[1:]), axis


def test_plot_without_matplotlib_is_text(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
    cfg = config("train_llama3", dict(pp=2, dp_shard=1, out=str(tmp_path)))
    with world(pp=2) as layout:
        pass
    stage = SimpleNamespace(config=Llama3Config())
    ranks = [SimpleNamespace(ids=[i], stages=[stage]) for i in range(2)]
    plot(cfg, SimpleNamespace(layout=layout, n=4, rows=rows_of(cfg, 2, 4, 2), ranks=ranks))
    shown = capsys.readouterr().out
    assert "rank   0 |FF..IWFIWFIW.IW|" in shown and "pp    2      0, 1" in shown and "pip install matplotlib" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ids, tied, peers", [
    ([[0], [1], [2], [3]], False, [1]), ([[0], [1], [2], [3]], True, [1, 3]), ([[0, 4], [1, 5], [2, 6], [3, 7]], False, [1, 3]),
    ([[0, 7], [1, 6], [2, 5], [3, 4]], False, [1])])
def test_device_0_talks_to_its_pipeline_neighbours(ids, tied, peers):
    """1F1B, the same with a tied embedding, interleaved stages, and a V of stages."""
    stage = SimpleNamespace(config=Llama3Config(tie_embeddings=tied))
    report = SimpleNamespace(ranks=[SimpleNamespace(ids=held, stages=[stage]) for held in ids])
    assert pictures.pipeline_peers(report) == peers


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    times = simulate(rows_of(Flags(pp=4, pp_schedule="DualPipeV"), 4, 8, 8))
    draw_schedule(times, "DualPipeV", str(tmp_path / "a.png"))
    with world(pp=2, dp_shard=64, tp=2) as layout:
        pass
    draw_mesh(layout, str(tmp_path / "b.png"))
    for name in "ab":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
