"""For people who hunt a bug: which function to look at, after `--check_parity --where` has named
the first difference.

tools/parity/where.py asks for it, unless --no-advice is given: a student, or an exam, may want the numbers
alone.
"""

import math

from distributed.pipeline import ZERO_BUBBLE


def look_at(first, seams: list, layout: list[dict]) -> str:
    """The functions that compute the seam on the layout, most likely first."""
    return "; ".join(hints_for(first, seams, layout))


def hints_for(first, seams: list, layout: list[dict]) -> list[str]:
    about = layout[0]  # the facts that describe_layout has written are the same on every rank
    if first.phase == "sequences":
        return ["who reads what: layout.data_rank, and batches in data.py"]
    if first.phase == "initial":
        return ["init_weights in parallel.py, distributed/initial.py"]
    if first.phase == "count":
        return ["count_tokens in parallel.py (every loss is divided by what it returns)"]
    if first.phase == "inputs":
        return [hint_for_input(first, about)]
    if first.phase == "forward":
        return hints_for_forward(first, about)
    if first.phase == "loss":
        return [hint_for_token_loss(about), "what forward_backward in parallel.py returns"]
    if first.phase == "backward":
        return hints_for_backward(first, seams, about)
    if first.phase == "gradient":
        return hints_for_gradient(first, seams, layout)
    if first.phase == "norm":
        return [
            "clip_grad_norm in parallel.py (replicas: how many ranks hold a part; tied_copy; the sum "
            "over all ranks)"
        ]
    if first.phase == "clipped":
        return [
            "clip_grad_norm in parallel.py (the norm agrees: it scales by another factor, or not all "
            "gradients)"
        ]
    return [hint_for_update(first)]


# ---------------------------------------------------------------- before and after the model


def hint_for_input(first, about: dict) -> str:
    if first.name.startswith("next_"):
        return "inputs in parallel.py (shift_targets in models/deepseek.py)"
    if about["degrees"]["cp"] == 1:
        return "inputs in parallel.py"
    return "inputs in parallel.py (sequence_index)"


def hint_for_update(first) -> str:
    if ".balance." in first.name:
        return "balance_experts in distributed/experts.py (load summed over all ranks)"
    return "the optimizer's step"


def hint_for_token_loss(about: dict) -> str:
    if about["degrees"]["tp"] == 1:
        return "token_loss: linear_cross_entropy in models/loss.py"
    if about["loss_parallel"]:
        return "token_loss: vocab_parallel_loss in parallel.py, AllGather in distributed/layout.py"
    return "token_loss: gathered_head_loss in parallel.py, AllGather in distributed/layout.py"


# ---------------------------------------------------------------- activations and their gradients


def hints_for_forward(first, about: dict) -> list[str]:
    module = module_of(first)
    part = attention_part(first)
    if part == "input":
        return hints_for_given(module, about)
    hints = []
    # the router chooses experts before any token travels
    if in_experts(module) and not is_router(first):
        hints += hints_for_experts(about) or ["apply_experts in models/moe.py"]
    if part == "attention":
        hints.append(hint_for_attention(about))
    if part in ("q", "k"):
        hints.append("rotate in models/layers.py, and the positions that it is given")
    hints += style_hints([module], about)
    return hints or hints_for_any_module(module, about)


def hints_for_given(module: str, about: dict) -> list[str]:
    """A module is given something else: all before it agrees, so it is the code around it."""
    around, _, leaf = module.rpartition(".")
    around = around.removesuffix("blocks").removesuffix(".")
    hints = [f"the code before {leaf} in {forward_of_class(around, about)}"]
    if not around:  # a block, or the head: what comes over the pipeline
        hints += hints_for_pipeline(about)
    return hints


def forward_of_class(module: str, about: dict) -> str:
    """ "Attention.forward (models/llama3.py)" """
    name, file = about["classes"][module]
    if file:
        return f"{name}.forward ({file})"
    return f"{name}.forward"


def hints_for_backward(first, seams: list, about: dict) -> list[str]:
    if half_backward_sees_other_weights(about):
        return [RESHARDED]
    # the module that uses a tensor computes the tensor's gradient: often the next module
    user = module_after(first, seams)
    if user is None:
        return [hint_for_token_loss(about)]
    module = module_of(first)
    hints = []
    if in_experts(user) or in_experts(module):
        travel = hints_for_experts(about)
        if is_router(first):
            hints.append(
                "the balancing loss: expert_parallel (aux_coef, balance.aux_scale) in "
                "distributed/experts.py, add_loss in models/moe.py"
            )
        elif not travel:
            hints.append("apply_experts in models/moe.py")
        hints += travel
    if attention_part(first) in ("q", "k", "v"):
        hints.append(hint_for_attention(about))
    hints += style_hints([user, module], about)
    if first.note:
        hints.append("what follows is not seen by autograd (wait(), detach(), .data)")
    if about["recomputes"]:
        hints.append("checkpoint_activations in parallel.py")
    return hints or hints_for_any_module(user, about)


def hints_for_experts(about: dict) -> list[str]:
    """The functions that bring tokens to experts on other ranks; [] if every rank has all experts."""
    hints = []
    if about["etp"] > 1:
        hints.append("gathered_moe in distributed/experts.py")
    if about["ep"] > 1:
        hints.append("exchange_tokens in distributed/experts.py, AllToAll in distributed/layout.py")
    return hints


def hint_for_attention(about: dict) -> str:
    if about["attends"]:
        return f"{about['attends'][0]} in parallel.py"
    return "causal_attention in models/attention.py"


def hints_for_any_module(module: str, about: dict) -> list[str]:
    """Of a module without a style: its own code, and what the layout does to every module."""
    hints = []
    name, file = about["classes"].get(module, ("", ""))
    if file:
        hints.append(f"{name}.forward ({file}), after the last module that agrees")
    hints += hints_for_pipeline(about)
    degrees = about["degrees"]
    if degrees["dp_shard"] * degrees["cp"] > 1:
        hints.append("shard in parallel.py (the weights that it gathers)")
    return hints or ["the model's own code"]


def hints_for_pipeline(about: dict) -> list[str]:
    if about["degrees"]["pp"] == 1:
        return []
    return [
        "pipeline_stages in distributed/pipeline.py, pipeline_forward_backward in "
        "distributed/schedule.py"
    ]


# ---------------------------------------------------------------- finished gradients of parameters


def hints_for_gradient(first, seams: list, layout: list[dict]) -> list[str]:
    about = layout[0]
    if half_backward_sees_other_weights(about):
        return [RESHARDED]
    module = module_of(first)
    called = {s.name for s in seams if s.phase == "forward"}
    # experts are called without a record; a head that nobody calls is read by the loss
    if module not in called and ".experts" not in first.name:
        return [hint_for_token_loss(about)]
    gradients = [s for s in seams if s.phase == "gradient" and not math.isnan(s.error)]
    bad = [s for s in gradients if s.differs]
    if len(bad) == len(gradients) and have_one_factor(bad):
        return hints_for_scale(first.factor, about)
    if is_tied(first, layout):
        return [
            "two pipeline stages hold this weight: sum_tied_gradients in distributed/schedule.py"
        ]
    if all(".experts." in s.name for s in bad):
        return [
            "only experts differ: expert_mesh in make_mesh, and the fully_shard of experts in "
            "wrap_units (parallel.py); expert_parallel in distributed/experts.py"
        ]
    hints = style_hints([module], about)
    if not hints and about["degrees"]["tp"] > 1:
        hints.append(f"tensor_parallel in parallel.py: {module} has no style in tp_plan")
    elif not hints:
        hints += hints_for_sums(about["degrees"])
        hints = hints or hints_for_any_module(module, about)
    return [*hints, f"{len(bad)} of {len(gradients)} parameters differ"]


def hints_for_sums(degrees: dict[str, int]) -> list[str]:
    """The sums of gradients over the ranks that see other tokens; [] if no ranks do."""
    ranks = []
    if degrees["dp_replicate"] * degrees["dp_shard"] > 1:
        ranks.append("data")
    if degrees["cp"] > 1:
        ranks.append("cp")
    if not ranks:
        return []
    return [f"shard and next_backward in parallel.py (sums over {' and '.join(ranks)} ranks)"]


def hints_for_scale(factor: float, about: dict) -> list[str]:
    hints = [
        f"every gradient is off by the factor {factor:.3g}: shard in parallel.py (wrap_units: "
        "set_gradient_divide_factor, set_force_sum_reduction_for_comms)"
    ]
    if about["degrees"]["pp"] > 1:
        hints.append("pipeline_schedule in distributed/schedule.py (scale_grads)")
    return hints


def have_one_factor(bad: list) -> bool:
    """Whether all these gradients are off by the same factor."""
    if any(s.factor is None for s in bad):
        return False
    return len({round(s.factor, 3) for s in bad}) == 1


def is_tied(first, layout: list[dict]) -> bool:
    """Whether two stages of the pipeline hold the parameter."""
    stages = set()
    for held in layout:
        for phase, name, stage, *_ in held["records"]:
            if (phase, name) == (first.phase, first.name):
                stages.add(stage)
    return len(stages) > 1


# ---------------------------------------------------------------- facts


RESHARDED = (
    "check_layout (reshards) in distributed/refusals.py: the two half backwards of "
    "a zero-bubble schedule must not see weights that have been resharded in between"
)


def half_backward_sees_other_weights(about: dict) -> bool:
    has_halves = about["degrees"]["pp"] > 1 and about["schedule"] in ZERO_BUBBLE
    return has_halves and about["reshards"]


def module_of(seam) -> str:
    """The module of an activation ("blocks.0.attn q" -> blocks.0.attn) or of a parameter
    (blocks.0.attn.wq.weight -> ...wq)."""
    name = seam.name.split(" ")[0].split("[")[0]
    if seam.phase in ("initial", "gradient", "clipped", "after"):
        return name.rpartition(".")[0]
    return name


def module_after(first, seams: list) -> str | None:
    """The module of the next activation, in the order of the forward; None after the last."""
    # a module that is called twice stands where its first call is
    called = {}
    for s in seams:
        if s.phase == "forward" and attention_part(s) != "input":
            called[s.name] = module_of(s)
    following = list(called).index(first.name) + 1
    return list(called.values())[following] if following < len(called) else None


def attention_part(seam) -> str:
    """q, k, v or attention, of the seams around attention; else nothing."""
    return seam.name.partition(" ")[2]


def in_experts(module: str) -> bool:
    return ".moe." in f"{module}."


def is_router(seam) -> bool:
    return seam.name.endswith(".router")


def style_hints(modules: list[str], about: dict) -> list[str]:
    """tensor_parallel with the style of each module, in one hint; [] if none has a style."""
    hints = [style_hint(module, about["styles"]) for module in modules]
    found = "; ".join(filter(None, hints))
    return [found] if found else []


def style_hint(name: str, styles: dict[str, str]) -> str:
    """Name tensor_parallel and the style of the module, or of a module around it; "" without any."""
    while name and name not in styles:
        name = name.rpartition(".")[0]
    return name and f"tensor_parallel, style {styles[name]!r} of {name} (TP_STYLES in parallel.py)"
