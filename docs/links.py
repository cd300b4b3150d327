"""How fast are the links of this machine? Times all-reduces of many sizes, fits latency and
bandwidth, and predicts a size that was left out of the fit. With gloo on two cores, or with NCCL on
GPUs:

    torchrun --nproc_per_node 2 docs/links.py
"""

import statistics
import time

import torch
import torch.distributed as dist

# bytes
SIZES = [2**k for k in range(10, 25, 2)]
LEFT_OUT = 2**21


def measure(n_bytes: int, device, repeats=15) -> float:
    """Seconds of an all-reduce of n_bytes, the median."""
    x = torch.zeros(n_bytes // 4, device=device)
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    n = dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    measure(1024, device)  # the first calls connect the processes
    seconds = {n_bytes: measure(n_bytes, device) for n_bytes in SIZES}
    left_out = measure(LEFT_OUT, device)
    # seconds = latency + bytes / speed, by least squares of the relative error
    b = torch.tensor(list(seconds), dtype=torch.float64)
    s = torch.tensor(list(seconds.values()), dtype=torch.float64)
    ones = torch.ones(len(b), 1, dtype=torch.float64)
    latency, slope = (
        torch.linalg.lstsq(torch.stack([1 / s, b / s], 1), ones).solution[:, 0].tolist()
    )
    if rank == 0:
        for n_bytes, took in seconds.items():
            print(
                f"{n_bytes:>10,} bytes: {took * 1e6:>9,.0f} us measured, "
                f"{(latency + n_bytes * slope) * 1e6:>9,.0f} us by "
                "the fit"
            )
        print(
            f"latency of the whole all-reduce {latency * 1e6:,.0f} us: "
            f"{latency / (2 * (n - 1)) * 1e6:,.0f} us for each of "
            f"the 2 (n - 1) = {2 * (n - 1)} steps of a ring"
        )
        print(f"bandwidth of a link {2 * (n - 1) / n / slope / 1e9:.2f} GB/s")
        print(
            f"{LEFT_OUT:,} bytes, not in the fit: predicted "
            f"{(latency + LEFT_OUT * slope) * 1e6:,.0f} us, measured "
            f"{left_out * 1e6:,.0f} us"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
