"""Pipelines, and what runs beside them, would not hang on GPUs: the calls of real runs, played
again with NCCL's rules."""

import pytest
from rendezvous import CALL, play
from rows import run

MICRO_BATCHES = "--local_batch_size 4 --val_every 1 --val_batches 1"
PIPELINE = f"train_llama3.py --pp 2 {MICRO_BATCHES}"
# name -> (processes, recipe and flags)
RUNS = {
    "1F1B": (2, f"{PIPELINE} --pp_schedule 1F1B"),
    "GPipe": (2, f"{PIPELINE} --pp_schedule GPipe"),
    "Interleaved1F1B": (2, f"{PIPELINE} --pp_schedule Interleaved1F1B"),
    "InterleavedZeroBubble": (2, f"{PIPELINE} --pp_schedule InterleavedZeroBubble"),
    "ZBVZeroBubble": (2, f"{PIPELINE} --pp_schedule ZBVZeroBubble"),
    "DualPipeV": (2, f"{PIPELINE} --pp_schedule DualPipeV"),
    "tied": (2, f"{PIPELINE} --model_args tie_embeddings=true"),
    "tied, ZBV": (2, f"{PIPELINE} --pp_schedule ZBVZeroBubble --model_args tie_embeddings=true"),
    "cp": (2, "train_llama3.py --cp 2"),
    "cp alltoall": (2, "train_llama3.py --cp 2 --cp_method alltoall"),
    "ep": (2, "train_qwen3.py --flavor debug_moe --ep 2"),
    "mtp, ep": (2, "train_deepseek.py --flavor debug_mtp --ep 2"),
    "four stages": (4, f"train_llama3.py --pp 4 {MICRO_BATCHES}"),
    "pp x tp": (4, f"{PIPELINE} --tp 2"),
    "pp x cp": (4, f"{PIPELINE} --cp 2 --pp_schedule Interleaved1F1B"),
    "pp x fsdp x ep": (
        4,
        f"train_deepseek.py --pp 2 {MICRO_BATCHES} --dp_shard 2 --ep 2 --pp_schedule DualPipeV",
    ),
}


def calls(done) -> list[list[str]]:
    for log in done.logs:
        assert any(line.startswith("nccl ") for line in log)
    return done.logs


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if RUNS[name][0] == 4 else ()) for name in RUNS],
)
def test_no_rank_hangs(device, tmp_path, name):
    processes, argv = RUNS[name]
    assert not play(calls(device.run(tmp_path, *argv.split(), nproc=processes)))


def test_weights_go_from_device_to_device(device, tmp_path):
    """--gen_ranks: a message for each tensor, on a stream of its own where the trainer is."""
    # the first two batches are of one version
    done = run(device, tmp_path, "grpo 2 --gen_ranks 1 --async_steps 1 --steps 3")
    ours, theirs = (
        [CALL.fullmatch(line) for line in log if line.startswith("nccl broadcast")]
        for log in calls(done)
    )
    assert not play(done.logs)
    assert len(ours) == len(theirs)
    assert len(ours) % 2 == 0  # two versions
    assert [call[6] for call in ours] == [call[6] for call in theirs]
    assert sum(int(call[6]) for call in ours) > 600_000
    computes = {line.split()[1] for line in done.logs[0] if line.startswith("kernel stream=")}
    assert computes
    assert f"stream={ours[0][8]}" not in computes


def test_without_its_groups_the_same_run_hangs(device, tmp_path):
    """1F1B sends forward and receives the gradients in one group; one by one, both neighbours would
    wait in their sends."""
    logs = calls(
        device.run(tmp_path, "train_llama3.py", "--pp", 2, "--local_batch_size", 4, nproc=2)
    )
    assert not play(logs)
    ungrouped = []
    for log in logs:
        ungrouped.append(
            [line for line in log if line not in ("nccl group_start", "nccl group_end")]
        )
    assert any("hangs in: nccl send" in text for text in play(ungrouped))


# -------------------------------------------------- the simulation itself: ranks whose end is known
def call(op, rank, peer=-1, comm=7, count=5, stream=1, size=2):
    return f"nccl {op} comm={comm} size={size} rank={rank} peer={peer} count={count} type=7 stream={stream}"


def grouped(*lines):
    return ["nccl group_start", *lines, "nccl group_end"]


def test_two_that_send_first_hang_unless_grouped():
    ranks = [[call("send", r, 1 - r), call("recv", r, 1 - r)] for r in (0, 1)]
    assert len(play(ranks)) == 2
    assert not play([ranks[0], ranks[1][::-1]])
    assert not play([grouped(*rank) for rank in ranks])
    assert not play([grouped(*grouped(*rank)) for rank in ranks])  # groups in groups are one


def test_the_order_on_a_stream_and_on_a_communicator():
    def first(rank, stream=1):
        return call("all_reduce", rank, comm=1, stream=stream)

    def second(rank, stream=1):
        return call("all_reduce", rank, comm=2, stream=stream)

    assert not play([[first(0), second(0)], [first(1), second(1)]])
    assert len(play([[first(0), second(0)], [second(1), first(1)]])) == 2
    # on two streams nobody waits
    assert not play([[first(0), second(0, 2)], [second(1), first(1, 2)]])
    # one communicator has one order, whatever the streams
    a = [call("send", 0, 1), call("recv", 0, 1, stream=2)]
    b = [call("send", 1, 0), call("recv", 1, 0, stream=2)]
    assert len(play([a, b])) == 2


def test_events_and_the_host_make_a_stream_wait():
    def rank(r, between, ops):
        return [
            call("all_reduce", r, comm=ops[0], stream=1),
            *between,
            call("all_reduce", r, comm=ops[1], stream=2),
        ]

    for between in (
        ["record stream=1 event=3", "wait stream=2 event=3"],
        ["sync_stream stream=1"],
        ["sync_device"],
        ["record stream=1 event=3", "sync_event event=3"],
    ):
        assert len(play([rank(0, between, (1, 2)), rank(1, between, (2, 1))])) == 2, between
        assert not play([rank(0, between, (1, 2)), rank(1, between, (1, 2))]), between
    # of another stream's work: no reason to wait
    before = ["record stream=2 event=3", "wait stream=2 event=3"]
    assert not play([rank(0, before, (1, 2)), rank(1, before, (2, 1))])


def test_a_rank_that_stays_away_and_one_that_brings_something_else():
    assert "hangs in" in play([[call("all_reduce", 0)], []])[0]
    assert "meets rank 0" in play([[call("all_reduce", 0)], [call("all_gather", 1)]])[0]
    assert "meets rank 0" in play([[call("send", 0, 1, count=5)], [call("recv", 1, 0, count=4)]])[0]
