"""Pipelines apart from their place in a layout: schedules from a file, and evaluation, against
distributed/schedule.py."""

from collections import deque
from contextlib import ExitStack
from unittest import mock

import pytest
from layouts import build, compare, config, global_batch, local_batch
from pool import pool

import parallel
from distributed.pipeline import tied_copy


def talk(flags: dict, n: int, n_layers: int) -> list[tuple[str, int]]:
    """What this rank sends and receives in an evaluation, in the order in which it would be queued:
    (send or recv, peer)."""
    stages, layout = build(config(n_layers=n_layers), flags, n, n)
    said = []

    def heard(name, usual):
        def run(tensor, peer, group):
            said.append((name, peer))
            return usual(tensor, peer, group)

        return run

    names = {"send": "send", "isend": "send", "recv": "recv", "irecv": "recv"}
    with ExitStack() as stack:
        for name, kind in names.items():
            stack.enter_context(
                mock.patch.object(parallel.dist, name, heard(kind, getattr(parallel.dist, name)))
            )
        parallel.evaluate(
            stages, [local_batch(global_batch(step, n, False), layout) for step in (0, 1)], layout
        )
    return said


@pytest.mark.parametrize(
    "processes, flags",
    [
        (2, dict(pp=2)),
        (2, dict(pp=2, pp_schedule="Interleaved1F1B")),
        (2, dict(pp=2, pp_schedule="ZBVZeroBubble")),
        *[
            pytest.param(4, flags, marks=pytest.mark.slow)
            for flags in (
                dict(pp=4, pp_schedule="Interleaved1F1B"),
                dict(pp=4, pp_schedule="DualPipeV"),
                dict(pp=2, tp=2, pp_schedule="Interleaved1F1B"),
            )
        ],
    ],
    ids=str,
)
def test_evaluation_cannot_hang_where_a_send_waits_for_its_receive(processes, flags):
    """NCCL may run the messages of a pair one after the other: played with messages that are a
    handshake, all must arrive."""
    left = {rank: deque(said) for rank, said in enumerate(pool(processes).run(talk, flags, 8, 8))}
    assert any(left.values())
    while meeting := next(
        (
            (a, said[0][1])
            for a, said in left.items()
            if said
            and said[0][0] == "send"
            and left[said[0][1]]
            and left[said[0][1]][0] == ("recv", a)
        ),
        None,
    ):
        for rank in meeting:
            left[rank].popleft()
    assert not any(left.values()), {rank: list(said)[:3] for rank, said in left.items()}


def stages_with_a_copy(tied: bool) -> list[int]:
    """The rank's stages that hold a copy of the embedding."""
    flags = dict(pp=2, pp_schedule="Interleaved1F1B")
    stages, _ = build(config(n_layers=4, tie_embeddings=tied), flags, 8, 4)
    found = []
    for stage in stages:
        if tied_copy(stage) is not None:
            found.append(stage.index)
    return found


def test_the_last_stage_has_a_copy_of_a_tied_embedding():
    """A rank that does not see its copy leaves the other rank to wait for its gradient."""
    assert pool(2).run(stages_with_a_copy, True) == [[], [3]]
    assert pool(2).run(stages_with_a_copy, False) == [[], []]


def test_schedule_from_csv(tmp_path):
    """Hand-written: 1F1B for two ranks and four micro-batches, and a zero-bubble order with the
    backward in two halves."""
    for text in (
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
        "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0I3,0W3\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3\n",
    ):
        (tmp_path / "order.csv").write_text(text)
        assert (
            compare(
                2,
                dict(pp=2, pp_schedule_csv=str(tmp_path / "order.csv")),
                dict(n=4, b=4, tie_embeddings=True),
            )
            == ""
        )
