"""docs/parallelism.md, the course: its pictures, its code and its numbers are those of the program,
against the program."""

import importlib
import re
import shlex
import textwrap
import xml.etree.ElementTree as xml

import pytest
import torch
import torch.distributed as dist
from course import COURSE as EXERCISES
from dry import REPO, collectives_of, report_of
from pool import pool

from distributed.layout import AllGather, AllToAll, ReduceScatter
from docs import pictures
from flags.config import parse_config
from tools.reports import dryrun
from tools.reports.options import with_report_flags
from tools.reports.schedule import bubble, simulate

COURSE = (REPO / "docs" / "parallelism.md").read_text()
SLOW = "hsdp", "ep", "dualpipev", "overlap", "memory"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in pictures.PICTURES],
)
def test_a_picture_is_what_the_program_does(name):
    path = pictures.HERE / f"{name}.svg"
    made = pictures.PICTURES[name]()
    assert made == path.read_text(), f"stale: run `python docs/pictures.py {name}`"
    root = xml.fromstring(made)
    assert not [
        e
        for e in root.iter()
        if e.tag.endswith(("script", "image", "style")) or "href" in str(e.attrib)
    ]
    # viewers know no style rules
    assert not [e for e in root.iter() if "class" in e.attrib or "var(" in str(e.attrib)]
    width = float(root.get("width"))
    height = float(root.get("height"))
    boxes = [e for e in root.iter() if e.tag.endswith("rect")]
    assert (boxes[0].get("fill"), float(boxes[0].get("width")), float(boxes[0].get("height"))) == (
        "#ffffff",
        width,
        height,
    )
    assert f"(pictures/{name}.svg)" in COURSE


def collected(before: dict) -> dict:
    """What the collectives of distributed/layout.py make of numbers."""
    group = dist.group.WORLD
    rank = dist.get_rank()
    out = {}
    for name, op in dict(all_gather=AllGather, reduce_scatter=ReduceScatter).items():
        out[name.replace("_", "-")] = op.apply(
            torch.tensor(before[name.replace("_", "-")][rank]), 0, group
        ).tolist()
    out["all-to-all"] = AllToAll.apply(torch.tensor(before["all-to-all"][rank]), group).tolist()
    total = torch.tensor(before["all-reduce"][rank])
    dist.all_reduce(total)
    return out | {"all-reduce": total.tolist()}


def test_the_collectives_are_drawn_as_they_are():
    """A2 is 10^2 x 1, B2 is 10^2 x 2 and so on; Σ2 is then 10^2 x 10."""

    def value(piece):
        return 10.0 ** int(piece[1]) * (10 if piece[0] == "Σ" else 1 + "ABCD".index(piece[0]))

    before = {op: pictures.before(op) for op in pictures.MEANING}
    numbers = {}
    for op, rows in before.items():
        numbers[op] = [[value(piece) for piece in row] for row in rows]
    real = pool(4).run(collected, numbers)
    for op, rows in before.items():
        drawn = []
        for row in pictures.after(op, rows):
            drawn.append([value(piece) for piece in row])
        assert drawn == [real[rank][op] for rank in range(4)], op


def test_the_code_of_the_course_is_the_code():
    """Each block names its file in its first line; a line of three points stands for lines that are
    left out."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", COURSE, re.S)
    assert len(blocks) == COURSE.count("```python") >= 9
    for file, block in blocks:
        source = (REPO / file).read_text()
        at = 0
        for piece in re.split(r"^ *\.\.\.\n", block, flags=re.M):
            # the piece, indented as the file has it
            found = []
            for n in (0, 4, 8, 12):
                found.append(
                    source.find("\n" + textwrap.indent(textwrap.dedent(piece), " " * n), at)
                )
            assert max(found) >= 0, f"{file} has no such lines, or not in this order:\n{piece}"
            at = max(found)
        assert 2 <= len(block.splitlines()) <= 26, block


def test_the_commands_of_the_course_are_understood():
    commands = re.findall(r"^    python (train_\w+)\.py (.*?)(?: +#.*)?$", COURSE, re.M)
    assert len(commands) >= 5
    for recipe, flags in commands:
        parse_config(with_report_flags(importlib.import_module(recipe).Config), shlex.split(flags))


def test_every_exercise_has_its_chapter():
    named = {int(n) for n in re.findall(r"\*\*Exercise (\d+)\*\*", COURSE)}
    assert named == set(EXERCISES)


EXAMPLE = dict(
    dp_shard=1,
    flavor="8B",
    model_args="",
    seq_len=8192,
    local_batch_size=1,
    compute_dtype="auto",
    device="auto",
)
MEMORY = [
    dict(dp_shard=8),
    dict(dp_replicate=2, dp_shard=4),
    dict(dp_replicate=8, dp_shard=1),
    dict(tp=8),
    dict(cp=8),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags", MEMORY, ids=str)
def test_the_memory_of_the_example(flags):
    rank = report_of(**EXAMPLE | flags).ranks[0]
    cells = [
        *(dryrun.format_bytes(rank.step[k]) for k in ("parameters", "gradients", "optimizer")),
        dryrun.format_bytes(rank.activations),
        dryrun.format_bytes(rank.peak),
        "yes" if rank.peak <= 80e9 else "no",
    ]
    shown = " ".join(f"--{name} {n}" for name, n in flags.items())
    assert f"| `{shown}` | {' | '.join(cells)} |" in COURSE
    if flags == dict(dp_replicate=2, dp_shard=4):
        counts = collectives_of(rank.step)
        number, size = counts["dp_replicate", "all_reduce"]
        assert f"{number} all-reduces of {dryrun.format_bytes(size)} in a step" in COURSE


@pytest.mark.slow
@pytest.mark.parametrize(
    "shown, flags",
    [
        ("--dp_shard 64 --ac full", dict(dp_shard=64, ac="full")),
        ("--dp_shard 8 --tp 8", dict(dp_shard=8, tp=8)),
        ("--ac op", dict(flavor="8B", dp_shard=8, ac="op")),
        ("--ac full", dict(flavor="8B", dp_shard=8, ac="full")),
    ],
)
def test_the_worked_examples(shown, flags):
    report = report_of(**EXAMPLE | dict(flavor="70B") | flags)
    rank = report.ranks[0]
    row = next(line for line in COURSE.splitlines() if line.startswith(f"| `{shown}` |"))
    assert f" {dryrun.format_bytes(rank.activations if 'flavor' in flags else rank.peak)} |" in row


@pytest.mark.slow
def test_the_pipeline_of_the_example():
    report = report_of(**EXAMPLE | dict(pp=8, local_batch_size=16))
    bubbles = [100 * bubble(simulate(report.rows, *cost)) for cost in ((), (report.cost,))]
    text = " ".join(COURSE.split())
    assert f"the bubble is {bubbles[0]:.1f} %, or {bubbles[1]:.1f} % with the FLOPs" in text
    first, last = (dryrun.format_bytes(report.ranks[i].activations) for i in (0, -1))
    assert (
        f"rank 0 holds {first} of activations (8 micro-batches in flight), the last rank {last} "
        "(one)" in text
    )
