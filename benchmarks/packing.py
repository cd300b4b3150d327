"""How much of training's forwards is padding when lengths differ: rows of one sample, and packed
sequences (--pack_tokens).

    python benchmarks/packing.py            # the plans alone, for any number of ranks
    python benchmarks/packing.py --train    # CPU seconds of forward and backward on one process, by the demo's model

Samples have lognormal lengths: median 256 tokens, sigma 1, at most 4,096. Each figure is tokens of
all forwards / tokens of the samples; in brackets with every forward as long as that of the rank
that has the most, because ranks wait for each other.
"""

import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

from rl.packing import plan_forwards  # noqa: E402

SEEDS = 5


def costs(n: int, ranks: int, **flags) -> tuple[float, float]:
    """The two figures, as means over SEEDS draws of n lengths."""
    cfg = SimpleNamespace(batch_invariant=False, compile=False, **flags)
    layout = SimpleNamespace(data_ranks=ranks, cp=1, tp=1, pp=1, device=torch.device("cpu"))
    found = []
    for seed in range(SEEDS):
        draw = random.Random(seed).lognormvariate
        lengths = [min(4096, max(8, int(256 * draw(0, 1)))) for _ in range(n)]
        forwards = [
            [max(len(rows), 1) * T for rows, T in share]
            for share in plan_forwards(lengths, cfg, layout)
        ]
        slowest = ranks * sum(map(max, zip(*forwards)))
        found.append((sum(map(sum, forwards)) / sum(lengths), slowest / sum(lengths)))
    return tuple(sum(x) / SEEDS for x in zip(*found))


def train_seconds(lengths: list[int], seq_len: int, **flags) -> tuple[float, float]:
    """(CPU seconds of a step's forwards and backwards, share of padding) for samples of 6 + these
    many tokens."""
    import torch.distributed as dist

    from distributed.refusals import check_layout
    from grpo import Config, Trainer
    from models.llama3 import Llama3
    from parallel import make_mesh
    from rl.policy import FLAVORS, build_policy
    from rl.sample import Sample

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cfg = Config(
        seq_len=seq_len, max_new_tokens=seq_len - 7, device="cpu", compute_dtype="float32", **flags
    )
    layout = check_layout(
        cfg,
        FLAVORS["debug"],
        seq_len=seq_len,
        local_batch_size=1,
        global_batch_size=-1,
        device="cpu",
    )
    layout = make_mesh(layout)
    trainer = Trainer(cfg, layout, build_policy(cfg, layout, Llama3, FLAVORS["debug"]))
    samples = []
    for n in lengths:
        sample = Sample(prompt=[1] * 6, ids=[2] * n, logprobs=[-1.0] * n, mask=[1.0] * n)
        sample.advantage = (-1.0) ** n
        samples.append(sample)
    trainer.train_on(samples)
    begin = time.process_time()
    padding = [trainer.train_on(samples).padding for _ in range(3)][0]
    return (time.process_time() - begin) / 3, padding


def time_training():
    draw = random.Random(0)
    short = [draw.choice([5, 6, 6, 6, 7]) for _ in range(256)]
    skewed = [min(490, max(4, int(40 * draw.lognormvariate(0, 1)))) for _ in range(256)]
    print("| 256 samples | forwards | padding | CPU seconds |\n|---|---|---|---|")
    for name, lengths, seq_len, packs in (
        ("of 5 to 7 tokens", short, 32, (32, 128, 512)),
        ("lognormal, median 40", skewed, 512, (512, 1024, 2048)),
    ):
        for flags in (dict(local_batch_size=64), *(dict(pack_tokens=n) for n in packs)):
            seconds, padding = train_seconds(lengths, seq_len, **flags)
            print(
                f"| {name} | --{' '.join(map(str, *flags.items()))} | {padding:.0%} | "
                f"{seconds:.2f} |",
                flush=True,
            )


def main():
    if "--train" in sys.argv:
        return time_training()
    kinds = {"rows of 64": dict(pack_tokens=0, local_batch_size=64)}
    kinds |= {f"packed {n:,}": dict(pack_tokens=n) for n in (4096, 16384)}
    print("| samples, data ranks |", " | ".join(kinds), "|")
    print("|---" * (1 + len(kinds)) + "|")
    for n, ranks in ((256, 1), (256, 8), (256, 64), (2048, 1), (2048, 8), (2048, 64)):
        cells = ["{:.2f} ({:.2f})".format(*costs(n, ranks, **flags)) for flags in kinds.values()]
        print(f"| {n:,}, {ranks} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
