"""Answers to exercise 20: the project's own, changed."""

from course import original, source_of


def answer(name: str, *change) -> str:
    return source_of(original("hand20.py").read_text(), name).replace(*change)


RIGHT = [
    answer("seconds", "rounds * (n - 1)", "(n - 1) * rounds"),
    answer("bound", "arithmetic >= network", "arithmetic > network"),
]
WRONG = [  # answer, what the feedback must say
    (answer("seconds", "2 if", "1 if"), "goes round twice: a reduce-scatter, then an all-gather"),
    (answer("seconds", "n_bytes / n /", "n_bytes /"), "a rank sends one piece of n in a step"),
    (
        answer("seconds", "(n - 1) * (latency + ", "(n - 1) * ("),
        "how many messages follow each other?",
    ),
    (answer("fsdp_traffic", "(2 * n_layers - 1)", "2 * n_layers"), "which is -1.00 blocks"),
    (answer("fsdp_traffic", "4 * (n", "2 * (n"), "are reduced, and --dry_run counts"),
    (answer("bound", "max(arithmetic, network)", "arithmetic + network"), "the longer one counts"),
    (answer("bound", "(n - 1) / n * ", ""), "(n - 1)/n of the bytes"),
]
