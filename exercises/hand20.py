"""Exercise 20, by hand: what a step moves and how long it takes, predicted; then compared with the
dry run."""


def seconds(collective: str, n: int, n_bytes: int, latency: float, bandwidth: float) -> float:
    """Time of a collective over n ranks in a ring, in which each rank sends to its neighbour only.

    collective: all_gather, reduce_scatter or all_reduce. n_bytes: of the largest tensor (what an
    all-gather makes, what a
    reduce-scatter is given). latency: seconds per message; bandwidth: bytes per second that a rank
    can send, while it receives as many.
    """
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * (n - 1) * (latency + n_bytes / n / bandwidth)


def fsdp_traffic(n_layers: int, block: int, embedding: int, rest: int) -> tuple[int, int]:
    """(bytes gathered, bytes reduced) in a step of FSDP with one micro-batch: the largest tensor of
    each collective, added up.

    block, embedding, rest: numbers in the parameters of one block, of the embedding, and of all
    that is left (the last norm and the head). Weights are gathered in bf16, gradients reduced in
    fp32. A block is gathered for the forward and again for the backward, but the last one stays.
    The embedding is gathered twice as well; the rest stays from the forward to the backward.
    """
    gathered = (2 * n_layers - 1) * block + 2 * embedding + rest
    return 2 * gathered, 4 * (n_layers * block + embedding + rest)


def bound(
    flops: float, n: int, gathered: int, reduced: int, peak: float, bandwidth: float
) -> tuple[float, str]:
    """(least seconds of a step, "arithmetic" or "network"), if FSDP's transfers over n ranks
    overlap with the arithmetic completely, and latencies are nothing. flops: of one rank in a step;
    peak: FLOPs per second."""
    arithmetic = flops / peak
    network = (n - 1) / n * (gathered + reduced) / bandwidth
    return max(arithmetic, network), "arithmetic" if arithmetic >= network else "network"
