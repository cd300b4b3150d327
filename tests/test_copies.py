"""Copied on purpose, kept honest by force: what has one name in two recipes, or two models, is the
same code, or says why not.

Loops are copied so that a recipe can be changed without reading four files; copied arithmetic
drifts. So functions and classes of one name must be equal after ast.unparse unless the line above
says `# differs from <other>: why`; the sections of `main` carry the same banners, and every changed
line of a recipe stands under a comment that begins with the fork's name.
"""

import ast
import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# (original, fork)
FORKS = [
    ("train_llama3.py", "train_qwen3.py"),
    ("train_qwen3.py", "train_deepseek.py"),
    ("train_llama3.py", "finetune.py"),
    ("train_llama3.py", "forks/train_llama3_mup.py"),
    ("train_llama3.py", "forks/train_llama3_ft.py"),
    ("train_llama3.py", "forks/train_speedrun.py"),
    ("train_qwen3.py", "forks/train_gpt_oss.py"),
    ("train_qwen3.py", "forks/train_llama4.py"),
    ("train_qwen3.py", "forks/train_qwen3_next.py"),
]
MODELS = [
    ("models/llama3.py", "models/qwen3.py"),
    ("models/llama3.py", "forks/olmo3.py"),
    ("models/qwen3.py", "models/deepseek.py"),
    ("models/qwen3.py", "forks/gpt_oss.py"),
    ("models/qwen3.py", "forks/llama4.py"),
    ("models/qwen3.py", "forks/qwen3_next.py"),
    ("models/qwen3.py", "forks/speedrun.py"),
]


def definitions(path: str) -> dict[str, tuple[str, str]]:
    """name -> (normalised source, the comment above it)."""
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            above = first - 1
            while lines[above - 1].startswith("#"):
                above -= 1
            found[node.name] = ast.unparse(node), "\n".join(lines[above : first - 1])
    return found


@pytest.mark.parametrize("original, fork", [*FORKS, *MODELS, ("grpo.py", "forks/train_distill.py")])
def test_same_name_same_code(original, fork):
    ours = definitions(original)
    theirs = definitions(fork)
    shared = [n for n in theirs if n in ours and n not in ("Config", "main")]
    assert shared
    other = Path(original).stem.removeprefix("train_")
    for name in shared:
        code, above = theirs[name]
        if f"# differs from {other}:" in above:
            assert code != ours[name][0], f"{fork}: {name} no longer differs, drop the comment"
        else:
            assert code == ours[name][0], (
                f"{fork}: {name} differs from {original} without saying why"
            )


@pytest.mark.parametrize("original, fork", FORKS)
def test_sections_of_main_are_the_same(original, fork):
    banners = []
    for p in (original, fork):
        banners.append(re.findall(r"^    # \d\. \w+", (ROOT / p).read_text(), re.M))
    assert banners[0] == banners[1]
    assert len(banners[0]) == 7


def body(path: str) -> list[str]:
    """The lines from Config on, with the model's own names made alike: those differ in every fork
    and need no reason."""
    text = (ROOT / path).read_text()
    text = text[text.index("@dataclass") :]
    text = re.sub(r"(models|forks)/\w+\.py", "MODEL.py", text).replace(
        "runs/finetune", "runs/MODEL"
    )
    names = "speedrun|llama4|gpt_?oss|olmo3|qwen3_?next|qwen3(?!_next)|deepseek"
    return re.sub(rf"(?i)(Mup)?llama3(_mup|_ft)?|({names})(?!:)", "MODEL", text).splitlines()


@pytest.mark.parametrize("original, fork", FORKS)
def test_every_difference_says_why(original, fork):
    # with which the comments of a fork begin
    name = Path(fork).stem.removeprefix("train_").removeprefix("llama3_")
    a = body(original)
    b = body(fork)
    for tag, _, _, begin, end in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            first = max(0, begin - 1)
            while b[first - 1].lstrip().startswith("#"):
                first -= 1
            near = b[first:end]
            assert any(f"# {name}:" in line for line in near), (
                f"{fork}: no `# {name}:` comment at:\n" + "\n".join(b[begin:end])
            )
