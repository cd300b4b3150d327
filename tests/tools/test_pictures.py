"""--plot: schedules and meshes are drawn right, as text and as SVG, against
tools/reports/layout_plots.py."""

import importlib
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import pytest
import torch
from dry import config, recipe_of, world
from layouts import Flags, layouts_of
from tables import as_parameters

from distributed.stages import ONE_STAGE_PER_RANK
from models.llama3 import Llama3Config
from tools.reports import dryrun
from tools.reports.dryrun import bubble, rows_of, simulate
from tools.reports.layout_plots import draw_mesh, pipeline_peers, plot
from tools.reports.parts import axis_groups
from tools.reports.svg import LOOKS

BUBBLES = dict(
    GPipe=3 / 11,
    LoopedBFS=3 / 19,
    Interleaved1F1B=3 / 19,
    InterleavedZeroBubble=1 / 17,
    ZBVZeroBubble=1 / 17,
    DualPipeV=1 / 17,
) | {"1F1B": 3 / 11}


@pytest.mark.parametrize("name", BUBBLES)
def test_schedule(name):
    """4 ranks, 8 micro-batches, forward and both halves of a backward of one unit: the papers'
    bubbles."""
    if name in ONE_STAGE_PER_RANK:
        stages = 4
    else:
        stages = 8
    times = simulate(rows_of(Flags(pp=4, pp_schedule=name), 4, 8, stages))
    assert bubble(times) == pytest.approx(BUBBLES[name], abs=2e-3)
    work = sorted((kind, stage, m) for row in times for *_, kind, stage, m in row if kind in "FB")
    assert [w for w in work if w[0] == "F"] == [
        ("F", s, m) for s in range(stages) for m in range(8)
    ]
    busy = {}
    for kind in ("F", "BIW"):
        busy[kind] = sum(b - a for row in times for a, b, found, *_ in row if found in kind)
    assert busy == {"F": 8 * stages, "BIW": 16 * stages}


def groups_of_fsdp(stages) -> set[tuple]:
    """The ranks over which the device's parameters are really sharded, split or copied."""
    meshes = {p.device_mesh for stage in stages for p in stage.parameters()}
    found = set()
    for mesh in meshes:
        for i in range(mesh.ndim):
            found.add(tuple(torch.distributed.get_process_group_ranks(mesh.get_group(i))))
    return found


@pytest.mark.parametrize("row", as_parameters(layouts_of("meshes")))
def test_the_drawn_mesh_is_the_mesh(row):
    """The groups of device 0 are the process groups of the parameters, the layers and the experts."""
    recipe, flags = recipe_of(dict(local_batch_size=2, dp_shard=1) | row[1], row[2])
    main = importlib.import_module(recipe).main
    with dryrun.dry_world(main, config(recipe, flags), 0) as (stages, _, layout):
        ranks = torch.distributed.get_process_group_ranks
        real = {axis: ranks(layout.group(axis)) for axis in ("tp", "cp", "dp_replicate", "pp")}
        real["fsdp"] = ranks(layout.mesh["fsdp"].get_group())
        if recipe == "train_qwen3":
            real |= {
                axis: ranks(layout.expert_mesh[axis].get_group()) for axis in ("etp", "ep", "efsdp")
            }
        sharded = {group for group in groups_of_fsdp(stages) if len(group) > 1}
    real = {axis: group for axis, group in real.items() if len(group) > 1}
    groups = {axis: groups[0] for axis, groups in axis_groups(layout).items()}
    assert groups == real
    assert sharded <= {tuple(group) for group in groups.values()}
    if layout.pp == 1:
        colors_of = {}  # {rank: colours}, from the boxes before the label of a cell
        boxes = []
        for element in xml.fromstring(draw_mesh(layout, [])).iter():
            if element.tag.endswith("rect"):
                boxes.append(element.get("fill"))
            elif element.tag.endswith("text") and (element.text or "").isdigit():
                colors_of[int(element.text)], boxes = boxes, []
        for axis, group in real.items():
            assert {
                rank for rank, colors in colors_of.items() if LOOKS[axis]["fill"] in colors
            } == set(group[1:]), axis


def test_plot_writes_pictures(tmp_path, capsys):
    cfg = config("train_llama3", dict(pp=2, dp_shard=1, out=str(tmp_path)))
    with world(pp=2) as layout:
        pass
    stage = SimpleNamespace(config=Llama3Config())
    ranks = [SimpleNamespace(ids=[i], stages=[stage]) for i in range(2)]
    plot(cfg, SimpleNamespace(layout=layout, n=4, rows=rows_of(cfg, 2, 4, 2), ranks=ranks))
    assert "1F1B, pp 2, 4 micro-batches: bubble 20.0%" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mesh.svg", "pipeline.svg"]
    for path in tmp_path.iterdir():
        xml.parse(path)


@pytest.mark.parametrize(
    "ids, tied, peers",
    [
        ([[0], [1], [2], [3]], False, [1]),
        ([[0], [1], [2], [3]], True, [1, 3]),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], False, [1, 3]),
        ([[0, 7], [1, 6], [2, 5], [3, 4]], False, [1]),
    ],
)
def test_device_0_talks_to_its_pipeline_neighbours(ids, tied, peers):
    """1F1B, the same with a tied embedding, interleaved stages, and a V of stages."""
    stage = SimpleNamespace(config=Llama3Config(tie_embeddings=tied))
    report = SimpleNamespace(ranks=[SimpleNamespace(ids=held, stages=[stage]) for held in ids])
    assert pipeline_peers(report) == peers
