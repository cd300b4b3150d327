"""float8 and mxfp8, emulated on a CPU: near fp32 but not equal to it, against distributed/float8.py."""
import layouts
import pytest
import torch
from layouts import build, config, reference, train
from pool import pool

MOE = dict(model="qwen3", **layouts.MOE)  # with the auxiliary loss
FLOAT8 = [(recipe, *layout) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
          for layout in ((1, {}), (2, {}), (2, dict(tp=2)), (2, dict(pp=2, pp_microbatch_size=2)))
          if recipe != "mxfp8" or "tp" not in layout[1]]


# quick: every recipe on one process, every layout with one recipe
@pytest.mark.parametrize("recipe, processes, flags", [
    pytest.param(*row, marks=[] if row[1] == 1 or row[0] == "rowwise" or row[0] == "mxfp8" else pytest.mark.slow)
    for row in FLOAT8], ids=str)
def test_float8_stays_near_fp32(recipe, processes, flags):
    """Emulated here. Loss within 1 %, every block's gradients point the same way; and it did compute in float8."""
    want, n_blocks = reference(config(), 8), 0
    for got in pool(processes).run(train, config(), flags | {"float8": recipe}, 8, 4):
        for g, w in zip(got[:-1], want[:-1], strict=True):
            assert abs(g["loss"] - w["loss"]) < 1e-2 * w["loss"]
        for fqn, grad in got[0]["grads"].items():
            same = torch.nn.functional.cosine_similarity(grad.flatten(), want[0]["grads"][fqn].flatten(), dim=0)
            assert same > 0.97, fqn
            off = ((grad - want[0]["grads"][fqn]).norm() / want[0]["grads"][fqn].norm()).item()
            assert off > 1e-3 or "ffn" not in fqn, fqn
            n_blocks += fqn.startswith("blocks.")
    assert n_blocks


@pytest.mark.parametrize("processes, flags", [(1, {}), pytest.param(2, dict(ep=2), marks=pytest.mark.slow)], ids=str)
def test_float8_experts_stay_near_fp32(processes, flags):
    """mxfp8, emulated: the loss within 1 %, and the experts' gradients are near those in fp32, but not as near as rounding."""
    experts = config(**MOE | dict(dim=64))
    want = pool(processes).run(train, experts, flags, 8, 4)[0]
    for float8_experts in (True, False):
        on = {"float8": "mxfp8", "float8_experts": float8_experts, "float8_filter": ["attn"]}
        got = pool(processes).run(train, experts, flags | on, 8, 4)[0]
        assert abs(got[0]["loss"] - want[0]["loss"]) < 1e-2 * want[0]["loss"]
        for fqn, grad in got[0]["grads"].items():
            if ".experts." in fqn:
                off = ((grad - want[0]["grads"][fqn]).norm() / want[0]["grads"][fqn].norm()).item()
                assert 1e-3 < off < 0.3 if float8_experts else off < 1e-3, (fqn, off)


def linear_types(flags: dict) -> dict[str, str]:
    stages, _ = build(config(), {"float8": "rowwise", **flags}, 4, 2)
    return {fqn: type(module).__name__ for fqn, module in stages[0].named_modules() if isinstance(module, torch.nn.Linear)}


def test_float8_filter():
    (all_of_them,) = pool(1).run(linear_types, {})
    (filtered,) = pool(1).run(linear_types, {"float8_filter": ["wk", "blocks.0.ffn"]})
    assert all(("Float8" in kind) == (fqn != "head") for fqn, kind in all_of_them.items())
    left = {fqn for fqn, kind in filtered.items() if "Float8" not in kind}
    assert left == {"head", *(f"blocks.{i}.attn.wk" for i in range(4)), *(f"blocks.0.ffn.w{i}" for i in (1, 2, 3))}
