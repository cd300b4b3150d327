"""For people who hunt a bug: which function to look at, after `--check_parity --where` has named
the first difference.

tools/parity/where.py asks for it, unless --no-advice is given: a student, or an exam, may want the numbers
alone.
"""

import json
import math
from pathlib import Path

from distributed.pipeline import ZERO_BUBBLE

# [facts that hold, or with a minus do not, where to look]; a hint with "last" ends the list;
# "found": there is a hint
HINTS = json.loads(Path(__file__).with_name("advice.json").read_text())


def module_of(seam) -> str:
    """The module of an activation ("blocks.0.attn q" -> blocks.0.attn) or of a parameter
    (blocks.0.attn.wq.weight -> ...wq)."""
    name = seam.name.split(" ")[0].split("[")[0]
    return (
        name.rpartition(".")[0]
        if seam.phase in ("initial", "gradient", "clipped", "after")
        else name
    )


def style_hint(name: str, styles: dict[str, str]) -> str:
    """Name tensor_parallel and the style of the module, or of a module around it; "" without any."""
    while name and name not in styles:
        name = name.rpartition(".")[0]
    return name and f"tensor_parallel, style {styles[name]!r} of {name} (TP_STYLES in parallel.py)"


def look_at(first, seams: list, layout: list[dict]) -> str:
    """The functions that compute the seam on the layout, most likely first."""
    about, module, part = layout[0], module_of(first), first.name.partition(" ")[2]
    is_forward, is_gradient, is_router = (
        first.phase == "forward",
        first.phase == "gradient",
        first.name.endswith(".router"),
    )
    called = {s.name: module_of(s) for s in seams if s.phase == "forward"}
    # the module that uses a tensor computes the tensor's gradient: often the next module
    later = list(called).index(first.name) + 1 if first.phase == "backward" else len(called)
    named = [*list(called.values())[later : later + 1], module]
    gradients = [s for s in seams if s.phase == "gradient" and not math.isnan(s.error)]
    bad = [s for s in gradients if s.differs]
    factors = {s.factor and round(s.factor, 3) for s in bad}
    stages = {
        stage
        for held in layout
        for phase, name, stage, *_ in held["records"]
        if (phase, name) == first[:2]
    }
    in_experts = any(".moe." in f"{name}." for name in named)
    style = "; ".join(filter(None, (style_hint(name, about["styles"]) for name in named)))
    facts = {
        axis: n > 1
        for axis, n in (about["degrees"] | {"ep": about["ep"], "etp": about["etp"]}).items()
    } | {
        first.phase: True,
        "next": first.name.startswith("next_"),
        "balance": ".balance." in first.name,
        "halves": about["degrees"]["pp"] > 1
        and about["schedule"] in ZERO_BUBBLE
        and about["reshards"]
        and first.phase in ("backward", "gradient"),
        "by_loss": first.phase == "loss"
        or first.phase == "backward"
        and len(named) == 1
        # no module uses the tensor
        or is_gradient
        and module not in called
        and ".experts" not in first.name,
        "loss_parallel": about["loss_parallel"],
        "tied": len(stages) > 1,
        "one_factor": len(bad) == len(gradients) and len(factors) == 1 and None not in factors,
        "only_experts": all(".experts." in s.name for s in bad),
        "styled": style,
        "balances": in_experts and is_router and not is_forward,
        "sends": in_experts and not (is_router and is_forward),
        "attention": part == "attention" if is_forward else part in ("q", "k", "v"),
        "attends": about["attends"],
        "rotated": is_forward and part in ("q", "k"),
        "lost": first.note,
        "recomputes": about["recomputes"],
    }
    values = dict(
        style=style,
        module=module,
        bad=len(bad),
        gradients=len(gradients),
        factor=first.factor or 0,
        attend="".join(about["attends"][:1]),
    )
    found = []
    for words, hint in HINTS:
        if all(
            bool(facts.get(word.removeprefix("-"))) != word.startswith("-")
            for word in words.split()
            if word != "last"
        ):
            found += [hint.format(**values)] * bool(hint)
            facts["found"] = True
            if words.endswith("last"):
                break
    return "; ".join(dict.fromkeys(found))
