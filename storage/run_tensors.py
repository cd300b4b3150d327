"""The tensors of a run by the names that they have in a checkpoint: "model.<fqn>" and
"optimizer.<fqn>.<state name>". To be written, or to be read into in place."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distributed.layout import named_tensors


def split_twins(modules: list[nn.Module]) -> tuple[dict, dict]:
    """({fqn: parameter}, {fqn: its twin}) of this rank. A V-shaped pipeline has its first and last
    stage on one rank: with tied embeddings, two equal parameters of one name."""
    found = []
    for module in modules:
        for fqn, tensor in named_tensors(module).items():
            if isinstance(tensor, nn.Parameter):
                found.append((fqn, tensor))
    params = dict(reversed(found))  # the first of two with one name
    return params, {fqn: tensor for fqn, tensor in found if tensor is not params[fqn]}


def model_tensors(modules: list[nn.Module]) -> dict[str, Tensor]:
    """{"model.<fqn>": tensor} of the parameters and saved buffers of this rank."""
    found = {}
    for module in modules:
        found |= named_tensors(module)
    found |= split_twins(modules)[0]
    return {f"model.{fqn}": tensor.detach() for fqn, tensor in found.items()}


class RunTensors:
    """modules: this rank's part of the model (several with interleaved pipeline stages), under the
    full model's fqns. optimizers: those that share a parameter give their states different names.
    only_trained: no frozen weights, as with LoRA.

    Build when FSDP holds the parameters sharded: after an evaluation module.parameters() may be
    gathered copies, not the shards that the optimizer updates.
    """

    def __init__(self, modules: list[nn.Module], optimizers: list, only_trained: bool):
        self.modules = modules
        self.optimizers = optimizers
        self.only_trained = only_trained
        self.params, self.twins = split_twins(modules)
        self.names = {}  # {id(parameter): fqn}
        for fqn, param in [*self.params.items(), *self.twins.items()]:
            self.names[id(param)] = fqn
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    assert id(param) in self.names, "build the optimizer after fully_shard"

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that checkpoints hold."""
        found = {}
        for module in self.modules:
            for fqn, tensor in named_tensors(module).items():
                if not isinstance(tensor, nn.Parameter):
                    found[fqn] = tensor
        return found

    def of_model(self) -> dict[str, Tensor]:
        every = {}
        for module in self.modules:
            every |= named_tensors(module)
        every |= self.params
        found = {}
        for fqn, tensor in every.items():
            if tensor.requires_grad or not self.only_trained:
                found[f"model.{fqn}"] = tensor.detach()
        return found

    def named(self, with_optimizer: bool, saving: bool = False) -> dict[str, Tensor]:
        """The flat dict for DCP to write, or to read into in place. saving: a number of the
        optimizer's, such as AdamW's step, is in the dict of one rank only, which writes it after
        its shards."""
        found = self.of_model()
        if with_optimizer:
            for fqn, param in self.params.items():
                found |= self.of_optimizers(fqn, param, saving)
        return dict(sorted(found.items(), key=lambda item: item[1].dim() == 0))

    def of_optimizers(self, fqn: str, param, saving: bool) -> dict[str, Tensor]:
        """The optimizers' state of one parameter. Raises ValueError for what DCP would not save."""
        is_first = True  # of the ranks that have the number
        if isinstance(param, DTensor):
            coordinate = param.device_mesh.get_coordinate()
            assert coordinate is not None, "a rank has only the parameters of its own mesh"
            is_first = not any(coordinate)
        found = {}
        for name, t in self.state_of(param).items():
            if not isinstance(t, Tensor):
                raise ValueError(
                    f"optimizer state {name} of {fqn} is a {type(t).__name__}: make it a tensor"
                )
            if t.numel() > 1 and hasattr(param, "placements") and not hasattr(t, "placements"):
                raise ValueError(
                    f"optimizer state {name} of {fqn} is no DTensor: DCP would save one rank's only"
                )
            if t.dim() > 0 or is_first or not saving:
                found[f"optimizer.{fqn}.{name}"] = t.detach()
        return found

    def state_of(self, param) -> dict:
        found = {}
        for optimizer in self.optimizers:
            found |= optimizer.state.get(param, {})
        return found
