"""--plan: seconds of a step from counted bytes and FLOPs, against support/plan.py."""
import math

import pytest
from dry import report_of, run
from layouts import Flags

from distributed.layout import AXES, Layout
from support.dryrun import bubble, simulate
from support.plan import MACHINES, WORST_ERROR, Machine, predict, wire_seconds

pytestmark = pytest.mark.slow  # make test has no room for it


def layout_of(**degrees) -> Layout:
    sizes = {axis: degrees.get(axis, 1) for axis in AXES}
    return Layout(Flags(**degrees), sizes, math.prod(sizes.values()), 1, 1)


def test_a_group_uses_the_links_that_it_spans():
    machine, size = Machine(flops=1.0, nvlink=400.0, network=50.0), 800
    seconds = lambda axis, op, **degrees: wire_seconds(layout_of(**degrees), axis, op, size, machine)  # noqa: E731
    assert seconds("tp", "all_gather", tp=8, dp_shard=4) == 800 * 7 / 8 / 400  # in a node
    assert seconds("fsdp", "all_gather", tp=8, dp_shard=4) == 800 * 3 / 4 / 50  # one rank in each node: one network card
    assert seconds("fsdp", "reduce_scatter", tp=2, dp_shard=16) == 800 * 15 / 16 / 200  # four ranks in each node: four cards
    assert seconds("dp_replicate", "all_reduce", dp_replicate=2, dp_shard=8) == 2 * 800 / 2 / 50
    assert seconds("ep", "all_to_all", dp_shard=16, ep=8) == 800 * 7 / 8 / 400
    assert seconds("efsdp", "all_gather", dp_shard=16, ep=8) == 800 / 2 / 50
    assert seconds("pp", "send", pp=2, tp=8) == 800 / 50 and seconds("pp", "recv", pp=2, tp=8) == 0


def test_a_prediction_is_arithmetic_plus_what_is_waited_for():
    machine = MACHINES["H100"]
    one = report_of(dp_shard=1)
    rank = one.ranks[0]
    attention = rank.flops("attention")
    flops = (rank.flops("forward", "backward") - attention) / 0.5 + attention / 2 / 0.25
    assert predict(one, machine, 0.5, 0.5, 0.25)["seconds"] == pytest.approx(flops / machine.flops)
    two = report_of(tp=2, dp_shard=1)
    p, faster = (predict(two, machine, 0.5, bandwidth) for bandwidth in (0.5, 1.0))
    assert p["wire"] == pytest.approx(2 * faster["wire"]) and p["seconds"] > faster["seconds"]
    assert p["seconds"] == pytest.approx(p["compute"] + p["wire"] + p["uncovered"])
    piped = report_of(pp=2, dp_shard=1)
    p = predict(piped, machine, 0.5, 1e9, 0.5)
    waiting = 1 - bubble(simulate(piped.rows, piped.cost))
    work = sum(r.flops("forward", "backward") - r.flops("attention") / 2 for r in piped.ranks) / 2
    assert p["seconds"] == pytest.approx(work / waiting / (0.5 * machine.flops), rel=0.05)


def test_the_plan_is_printed_with_its_error_and_assumptions():
    done = run("train_llama3.py", "--tp", 2, "--dp_shard", 8, "--plan", "--machine", "B200", "--nvlink_gb_s", 123)
    assert done.returncode == 0, done.stderr
    for words in ("16 x B200", "off on average", f"{WORST_ERROR:.0%} at worst", "2250 TFLOP/s", "NVLink 123 GB/s",
                  "network 50 GB/s"):
        assert words in done.stdout
    wrong = run("train_llama3.py", "--plan", "--network_gb_s", -1)
    assert wrong.returncode == 2 and "--network_gb_s" in wrong.stderr
