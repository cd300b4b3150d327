"""What a sampled token costs the host: the policy of grpo.py in one process or under FSDP, with
FSDP's hooks off (as rollouts are, on a GPU as CUDA graphs) and on (kernel by kernel), in turns.

    python benchmarks/decode.py                                  # 28 narrow layers on a CPU; one process
    torchrun --nproc_per_node 2 benchmarks/decode.py             # under FSDP
    torchrun --nproc_per_node 8 benchmarks/decode.py --flavor 1.7B --rows 64     # GPUs, if there are any
    .venv-cuda/bin/python -m torch.distributed.run --nproc_per_node 2 benchmarks/decode.py --flavor 1.7B --rows 64 --null

--null: on the device of tests/nullcuda, which computes nothing; the host's work is the real one.
Printed are milliseconds of
rank 0 per token of all rows, CPU time of the sampling thread and the clock's, the least of the
rounds. Random weights.
"""

import argparse
import os
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(REPO / "tests/nullcuda"), str(REPO)]

import torch
import torch.distributed as dist


@contextmanager
def gathered_with_hooks(model):
    """whole_weights() as it would be with FSDP's hooks on: they find all weights gathered, and
    leave them so."""
    from distributed.layout import reshard

    units = [module for module in model.modules() if hasattr(module, "reshard")]
    for unit in units:
        unit.unshard()
        if hasattr(unit, "set_reshard_after_forward"):
            unit.set_reshard_after_forward(False, recurse=False)
    yield
    for unit in units:
        if hasattr(unit, "set_reshard_after_forward"):
            unit.set_reshard_after_forward(True, recurse=False)
    reshard(model)


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--flavor", help="of models/qwen3.py, not one with experts")
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--new", type=int, default=24, help="tokens per sample")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--compile", action="store_true", help="blocks of a CUDA graph, as in grpo.py")
    p.add_argument("--null", action="store_true")
    args = p.parse_args()
    if args.null:
        from build import environment

        if os.environ.get("LD_PRELOAD") != environment()["LD_PRELOAD"]:
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment())
        import answers

        answers.answer()
    from distributed.launch import connect, disconnect
    from distributed.refusals import check_layout
    from grpo import Config
    from models.qwen3 import FLAVORS, Qwen3, Qwen3Config
    from parallel import make_mesh
    from rl import policy, replay
    from rl.decoding import rollout
    from rl.rollouts import whole_weights

    narrow = Qwen3Config(
        dim=64, n_layers=28, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=256
    )
    config = FLAVORS[args.flavor] if args.flavor else narrow
    dtype = "auto" if torch.cuda.is_available() else "float32"
    cfg = Config(seq_len=16 + args.new, max_new_tokens=args.new, compute_dtype=dtype)
    layout = check_layout(
        cfg,
        config,
        seq_len=cfg.seq_len,
        local_batch_size=1,
        global_batch_size=-1,
        device=cfg.device,
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
    )
    layout = make_mesh(connect(layout, cfg, cfg.device))
    if args.null:
        answers.empty_weights()
    model = policy.build_policy(cfg, layout, Qwen3, config)
    noise = torch.rand(args.rows, 1, args.new, generator=torch.Generator().manual_seed(0))
    sample = partial(
        rollout,
        model,
        [[1 + i % 50] * 16 for i in range(args.rows)],
        noise,
        1.0,
        [],
        max_len=cfg.seq_len,
        rows=args.rows,
        compiled=args.compile,
    )
    found = {}
    known = replay.Replays
    for _ in range(args.rounds):
        for name, gathered in (("off", whole_weights), ("on", gathered_with_hooks)):
            replay.Replays = known if name == "off" else lambda advance, *_: advance
            with gathered(model):
                began = time.thread_time(), time.perf_counter()
                ids = [s.ids for s in sample()]
                spent = time.thread_time() - began[0], time.perf_counter() - began[1]
            found.setdefault(name, []).append((*spent, ids))
    if layout.rank == 0:
        assert all(ids == found["on"][0][2] for rounds in found.values() for *_, ids in rounds)
        kind = "null device" if args.null else layout.device.type
        of = f"{args.flavor or 'narrow'}, {args.rows} rows"
        print(f"{of}, {layout.world_size} process(es), {kind}, torch {torch.__version__}")
        for name, rounds in found.items():
            cpu, clock = (
                1000 * min(spent) / args.new for spent in list(zip(*rounds, strict=True))[:2]
            )
            print(f"hooks {name:3} {cpu:7.2f} ms of CPU, {clock:7.2f} ms per token")
    dist.barrier()
    disconnect()


if __name__ == "__main__":
    main()
