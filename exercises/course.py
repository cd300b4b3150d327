"""The exercises in the order of the lecture: the blanks of each exercise, and the code that cuts a
blank.

Exercise 4 is ex04.md (the page, with hints at the end) and ex04.py (the check). If torch does the
work in the lecture, a file hand04.py does the same by hand.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOUSE = HERE.parent


@dataclass(frozen=True)
class Exercise:
    number: int
    title: str
    # file -> functions to blank; a method is written Class.method
    blanks: dict[str, tuple[str, ...]]

    @property
    def name(self) -> str:  # of the page and the check
        return f"ex{self.number:02}"

    def parts(self) -> list[tuple[str, ...]]:
        """Functions that are judged together: those of a class, or a single one."""
        names = [name for group in self.blanks.values() for name in group]
        kinds = dict.fromkeys(name.split(".")[0] for name in names)
        return [tuple(name for name in names if name.split(".")[0] == kind) for kind in kinds]

    def page(self) -> tuple[str, list[str]]:
        """(task, hints); a hint is a paragraph below '## Hints'."""
        task, _, hints = (HERE / f"{self.name}.md").read_text().partition("\n## Hints\n")
        return task, [hint.strip() for hint in hints.split("\n\n") if hint.strip()]


COURSE = {
    number: Exercise(number, title, blanks)
    for number, title, blanks in [
        (
            1,
            "gradient accumulation and token counting",
            {"hand01.py": ("accumulate",), "parallel.py": ("count_tokens",)},
        ),
        (
            2,
            "all-gather and reduce-scatter as autograd functions",
            {
                "distributed/layout.py": (
                    "AllGather.forward",
                    "AllGather.backward",
                    "ReduceScatter.forward",
                    "ReduceScatter.backward",
                )
            },
        ),
        (
            3,
            "FSDP by hand on one layer",
            {"hand03.py": ("shard_of", "ShardedLinear.forward", "ShardedLinear.backward")},
        ),
        (
            4,
            "column and row parallel",
            {
                "hand04.py": (
                    "split_weights",
                    "Enter.backward",
                    "Leave.forward",
                    "Leave.backward",
                    "ffn",
                )
            },
        ),
        (5, "sequence parallel and the norm's gradient", {"models/llama3.py": ("Llama3.tp_plan",)}),
        (
            6,
            "vocab-parallel cross-entropy",
            {"hand06.py": ("token_losses",), "parallel.py": ("vocab_parallel_loss",)},
        ),
        (7, "head-tail sequence split", {"parallel.py": ("sequence_index", "natural_order")}),
        (
            8,
            "all-gather attention for context parallelism",
            {"parallel.py": ("all_gather_attention",)},
        ),
        (9, "all-to-all attention", {"parallel.py": ("all_to_all_attention",)}),
        (10, "stage split and 1F1B order", {"hand10.py": ("split_layers", "order_of_rank")}),
        (11, "tied embeddings over stages", {"distributed/schedule.py": ("sum_tied_gradients",)}),
        (12, "expert exchange", {"distributed/experts.py": ("exchange_tokens",)}),
        (13, "the gradient norm over meshes", {"parallel.py": ("replicas", "clip_grad_norm")}),
        (14, "layout-invariant initial weights", {"distributed/initial.py": ("draw_block",)}),
        (15, "resharding a checkpoint", {"hand15.py": ("load_part",)}),
        (
            16,
            "GRPO's ratio and denominator",
            {"hand16.py": ("token_losses",), "grpo.py": ("loss_denominator",)},
        ),
        (17, "an all-reduce as a ring", {"hand17.py": ("ring_all_reduce",)}),
        (18, "ZeRO-1 by hand", {"hand18.py": ("moments", "zero1_step")}),
        (19, "online softmax over blocks", {"hand19.py": ("attend_blocks",)}),
        (20, "predict, then measure", {"hand20.py": ("seconds", "fsdp_traffic", "bound")}),
    ]
}
# Files of the capstone: what a training step needs. (Not initial weights: a right answer may draw
# others than the reference.)
IN_TRAINING = (
    "parallel.py",
    "models/",
    "distributed/layout",
    "distributed/schedule",
    "distributed/experts",
)
COURSE[21] = Exercise(
    21,
    "everything at once",
    {
        file: sum((exercise.blanks.get(file, ()) for exercise in COURSE.values()), ())
        for exercise in [*COURSE.values()]
        for file in exercise.blanks
        if file.startswith(IN_TRAINING)
    },
)
COURSE[22] = Exercise(
    22, "expert capacity and dropped tokens", {"hand22.py": ("capacity_of", "places", "moe")}
)


def original(file: str) -> Path:
    """Path of a project file. The files hand*.py lie in exercises/ here, and at the top of a
    student's folder."""
    return (HERE if file.startswith("hand") else HOUSE) / file


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """name -> node, for every function of a file and every method (as Class.method)."""
    found = {}
    for node in ast.parse(source).body:
        members = (
            [(f"{node.name}.", m) for m in node.body]
            if isinstance(node, ast.ClassDef)
            else [("", node)]
        )
        found |= {prefix + m.name: m for prefix, m in members if isinstance(m, ast.FunctionDef)}
    return found


def with_blanks(source: str, names: tuple[str, ...], what: str) -> str:
    """The source with the named functions blanked: only the docstring and a raise
    NotImplementedError are left.

    what: start of the error's text, such as 'exercise 4'.
    """
    lines = source.splitlines()
    nodes = functions(source)
    # last function first, so line numbers stay valid
    for name in sorted(names, key=lambda name: -nodes[name].lineno):
        body = nodes[name].body
        begin = body[0].lineno - 1
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            begin = body[0].end_lineno
        else:
            # a comment above the first line gives too much away
            while lines[begin - 1].lstrip().startswith("#"):
                begin -= 1
        indent = " " * body[0].col_offset
        lines[begin : nodes[name].end_lineno] = [
            f'{indent}raise NotImplementedError("{what}: {name} is still a blank")'
        ]
    return "\n".join(lines) + "\n"


def in_files(exercise: Exercise, text: str) -> dict[str, dict[str, str]]:
    """{file: {function: its source}} of a text that defines some of the blanks; a method is written
    without its class."""
    given = functions(text)
    found = {
        file: {
            name: source_of(text, name.split(".")[-1])
            for name in names
            if name.split(".")[-1] in given
        }
        for file, names in exercise.blanks.items()
    }
    return {file: sources for file, sources in found.items() if sources}


def source_of(source: str, name: str) -> str:
    """The text of a function, copied from the file."""
    node = functions(source)[name]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])
