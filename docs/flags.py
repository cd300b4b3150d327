"""docs/flags.md, every flag of every program with its help, made of the programs themselves.

python docs/flags.py > docs/flags.md
"""

import importlib
import sys
from pathlib import Path
from typing import get_type_hints

sys.path.insert(0, str(Path(__file__).parent.parent))

import ablate  # noqa: E402
from flags.config import default_of, describe, make_parser, needs_of, option_groups, spell  # noqa: E402
from tools.reports.options import with_report_flags  # noqa: E402

PROGRAMS = (
    "train_llama3",
    "train_qwen3",
    "train_deepseek",
    "finetune",
    "grpo",
    "evaluate",
    "generate",
)


def rows(program: str) -> dict[str, str]:
    """flag -> its row of the table, without those that the program never takes."""
    Config = importlib.import_module(program).Config
    Config = with_report_flags(Config) if program.startswith("train_") else Config
    kinds = get_type_hints(Config)
    helps = make_parser(Config, kinds)[1]
    found = {}
    for field in (field for fields in option_groups(Config).values() for field in fields):
        if field.name not in getattr(Config, "REFUSED", ()):
            needs = "; ".join(f"no effect {need.text}" for need in needs_of(Config, field.name))
            default = spell(default_of(field)) or '""'
            cells = [
                f"`--{field.name}`",
                f"`{describe(kinds[field.name])}`",
                f"`{default}`",
                " ".join(filter(None, [helps[field.name], needs and f"({needs})"])),
            ]
            found[field.name] = (
                f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
            )
    return found


def table_of_ablate() -> str:
    """The flags of ablate.py, which are no fields of a Config."""
    lines = ["| flag | what it does |", "|---|---|"]

    def add(*names: str, help: str, **options) -> None:
        text = help.replace("%%", "%").replace("|", r"\|")
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {text} |")

    ablate.add_variant_flags(add)
    ablate.add_study_flags(add)
    ablate.add_campaign_flags(add)
    return "## ablate.py\n\n" + "\n".join(lines)


def document() -> str:
    parts = []
    known = {}
    for program in PROGRAMS:
        new = {name: row for name, row in rows(program).items() if known.get(name) != row}
        known |= new
        about = (
            "Flags that it has alone, or with another default or help; for the rest see its "
            "`--help`.\n\n"
            if parts
            else ""
        )
        parts.append(
            f"## {program}.py\n\n{about}| flag | value | default | what it does "
            "|\n|---|---|---|---|\n" + "\n".join(new.values())
        )
    return (
        "# Every flag\n\nMade by `python docs/flags.py > docs/flags.md` of what `--help` says; a "
        "test holds it so.\n\n" + "\n\n".join([*parts, table_of_ablate()]) + "\n"
    )


if __name__ == "__main__":
    print(document(), end="")
