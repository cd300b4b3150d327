"""How torchao's matmuls in 8 bits are put in place of linears: which linears, and their forward on
the parts of a rank. Only runs with --float8 load this file."""

from fnmatch import fnmatch

from torch import nn
from torch.distributed.tensor import DTensor, Partial

from distributed.layout import Layout
from distributed.linears import beside_weight


def float8_names(stage: nn.Module, layout: Layout, cfg) -> list[str]:
    """Names of the linears for float8. Prints the linears that do not fit; raises ValueError if
    none is left."""
    names = []
    odd = {}
    for fqn, module in stage.named_modules():
        in_block = fqn.startswith(("blocks.", "mtp."))
        is_left_out = any(part in fqn for part in cfg.float8_filter)
        if not isinstance(module, nn.Linear) or not in_block or is_left_out:
            continue
        sizes = sides_on_a_rank(stage, fqn, module, layout.tp)
        if all(n % 16 == 0 for n in sizes):
            names.append(fqn)
        else:
            odd[".".join(fqn.split(".")[-2:])] = " x ".join(map(str, sizes))
    left = ", ".join(f"{name} {sizes}" for name, sizes in odd.items())
    if not odd:
        left = f"--float8_filter {cfg.float8_filter}"
    if not names:
        raise ValueError(
            f"--float8 {cfg.float8} changes no matrix, for on a rank a side is no multiple of 16: "
            f"{left}"
        )
    if odd and layout.rank == 0:
        print(
            f"--float8 {cfg.float8} leaves matrices as they are, for on a rank a side is no "
            f"multiple of 16: {left}"
        )
    return names


def sides_on_a_rank(stage, fqn: str, module: nn.Linear, tp: int) -> tuple[int, int]:
    """(out, in) of a rank's part of a linear, by the model's tp_plan."""
    style = ""
    for pattern, planned in stage.tp_plan().items():
        if fnmatch(fqn, pattern):
            style = planned
            break
    rows, columns = module.weight.shape
    if "colwise" in style:
        rows //= tp
    if style == "rowwise":
        columns //= tp
    return rows, columns


class Float8Linear(nn.Linear):
    """A linear that multiplies with self.multiply(x (..., in), weight (out, in)). Under TP weight
    and x are DTensors, and every rank multiplies its parts with scales of the parts, so no scale is
    sent. Given DTensors, torchao would agree on scales with all ranks, in 28 all-reduces per layer
    and step.

    A method of a class, not a function in place of forward: the compiler would compile a function
    once per module.
    """

    def forward(self, x):
        if isinstance(self.weight, DTensor):
            y = self.multiply_parts(x, self.weight)
        else:
            y = self.multiply(x, self.weight)
        if self.bias is None:
            return y
        return y + self.bias

    def multiply_parts(self, x, weight):
        (cut,) = weight.placements
        x_grad, out = beside_weight(x, weight)
        weight_grad = cut
        if not cut.is_shard():  # of a whole weight every rank has a summand
            weight_grad = Partial()
        y = self.multiply(
            x.to_local(grad_placements=[x_grad]), weight.to_local(grad_placements=[weight_grad])
        )
        return DTensor.from_local(y, weight.device_mesh, [out], run_check=False)
