"""Answers to exercise 7."""

INDEX = """
def sequence_index(T, cp, rank, device=None):
    n = T // (2 * cp)
    early = torch.arange(rank * n, (rank + 1) * n, device=device)
    return torch.cat([early, early + (2 * (cp - rank) - 1) * n])
"""
ORDER = """
def natural_order(x, dim, cp):
    # where each token has gone says where it is to be fetched
    gone = torch.cat([sequence_index(x.shape[dim], cp, rank, x.device) for rank in range(cp)])
    return x.index_select(dim, gone.argsort())
"""


RIGHT = [INDEX + ORDER]


def index(line: str) -> str:
    return (
        "def sequence_index(T, cp, rank, device=None):\n    tokens = torch.arange(T, "
        "device=device)\n    return "
        f"{line}\n"
    )


WRONG = [  # answer, what the feedback must say
    (
        index("tokens.chunk(cp)[rank]"),
        "is 10 on rank 0, 26 on rank 1: all wait for the slowest, 1.44 times the mean",
    ),
    (index("tokens[rank::cp]"), "is 16 on rank 0, 20 on rank 1"),
    (
        index("torch.cat([tokens.chunk(2 * cp)[2 * cp - 1 - rank], tokens.chunk(2 * cp)[rank]])"),
        "chunk `rank` comes first",
    ),
    (
        INDEX.replace("device=device", "device=device, dtype=torch.float32"),
        "an index is of whole numbers",
    ),
    (ORDER.replace("x.index_select", "x.detach().index_select"), "the gradient of x is missing"),
    (ORDER.replace("x.index_select(dim, gone.argsort())", "x"), "nothing has moved"),
    (ORDER.replace("gone.argsort()", "gone"), "and not its inverse"),
    (
        """
def natural_order(x, dim, cp):
    chunks = x.chunk(2 * cp, dim)
    return torch.cat([*chunks[::2], *chunks[1::2]], dim)
""",
        "the late chunks come from rank 0 last",
    ),
]
