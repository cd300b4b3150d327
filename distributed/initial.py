"""Initial values of parameters and buffers: drawn, or a constant. parallel.init_weights fills them
in."""

import fnmatch
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

# standard deviation of parameters that start at 0; tools/parity/half.py draws them, to see all
# gradients
ZERO = 0.0
MANY_BLOCKS = 300  # a model of 1B parameters has about 600
NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def constants_of(model) -> dict[str, float]:
    if hasattr(model, "init_constants"):
        return model.init_constants()
    return {}


def initial_values(stage) -> dict[str, tuple[float, float]]:
    """fqn -> (number, 0) for a constant, (0, standard deviation) for a drawn parameter.

    The first matching rule decides: the model's init_constants; 1 for the weight of a norm of any
    class, 0 for a bias; the model's init_std; 0.02 for the matrix of an nn.Linear or nn.Embedding.
    Raises ValueError for a parameter without a rule: the constructor's numbers are lost on the meta
    device, and zeros or noise instead would train as well, only worse.
    """
    values = {}
    constants = constants_of(stage)
    model = type(stage).__name__
    for path, module in stage.named_modules():
        for name, t in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            fqn = name
            if path:
                fqn = f"{path}.{name}"
            number = usual_value(module, name, t)
            std = None
            is_parameter = isinstance(t, nn.Parameter)
            for pattern, value in constants.items():
                if fnmatch.fnmatch(fqn, pattern):
                    number = value
                    break
            if is_parameter and t.dim() == 0:
                raise ValueError(
                    f"parameter {fqn} has no dimension, and FSDP needs one: make it "
                    "nn.Parameter(torch.empty(1))"
                )
            if is_parameter and t.is_complex():
                raise ValueError(
                    f"parameter {fqn} is complex: make it real, with 2 as its last dimension, and "
                    "take "
                    "torch.view_as_complex of it in forward"
                )
            # a module that was added to the model
            if is_parameter and hasattr(module, "initial_std"):
                std = module.initial_std
            elif is_parameter and number is None:
                std = stage.init_std(fqn)
                is_matrix = name == "weight" and isinstance(module, (nn.Linear, nn.Embedding))
                if std is None and is_matrix:
                    std = 0.02
            if number is None and std is None:
                fix = "compute it in forward, or add"
                if is_parameter:
                    fix = "add a standard deviation to init_std, or"
                raise ValueError(
                    f"{fqn} has no initial value: {fix} a number to init_constants, in class "
                    f"{model}"
                )
            if is_parameter and not (number or std):
                std = ZERO
            values[fqn] = (number or 0.0, std or 0.0)
    return values


def usual_value(module: nn.Module, name: str, t: Tensor) -> float | None:
    """What every model agrees on: 0 for biases, 1 for norms (known by class, or by a class name
    such as MyNorm)."""
    if name.endswith("bias"):  # in_proj_bias too
        return 0.0
    # a matrix in WeightNormLinear is drawn
    if isinstance(module, NORMS) or "Norm" in type(module).__name__ and t.dim() == 1:
        return {
            "weight": 1.0,
            "running_mean": 0.0,
            "running_var": 1.0,
            "num_batches_tracked": 0.0,
        }.get(name)
    return None


def draw_block(
    local: Tensor,
    whole: torch.Size,
    offset: tuple[int, ...],
    rows: int,
    b: int,
    std: float,
    name: str,
) -> None:
    """Draw block b, of `rows` rows, of a parameter of shape `whole`, from a generator that `name`
    seeds. Writes the numbers that belong to this rank into `local`, the rank's part of the
    parameter, which begins at `offset`."""
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    )
    drawn = torch.randn(min(rows, whole[0] - b * rows), *whole[1:], generator=generator).mul_(std)
    # the rows of the block that are in local
    begin = max(offset[0], b * rows)
    end = min(offset[0] + len(local), (b + 1) * rows)
    columns = [slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True)]
    local[begin - offset[0] : end - offset[0]] = drawn[
        (slice(begin - b * rows, end - b * rows), *columns)
    ]


def draw_side_by_side(draws: list[Callable[[], None]], n_threads: int) -> None:
    """Call draw_block for all blocks, in threads, because torch.randn frees the interpreter. A model of
    billions of parameters takes minutes, and shows how far it is."""
    with ThreadPoolExecutor(n_threads) as pool:
        done = pool.map(lambda draw: draw(), draws)  # its results raise what went wrong in a thread
        if len(draws) < MANY_BLOCKS:
            list(done)
            return
        from flags.progress import Progress  # a small run does not load it

        with Progress("drawing weights", len(draws), "blocks") as progress:
            for _ in done:
                progress()
