"""A small net with an optimizer and checkpoints, for the tests of checkpoint.py and storage/."""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from layouts import config
from torch import nn

from checkpoint import CheckpointConfig, Checkpoints
from flags.files import json_bytes
from storage.manifest import checksums, own_hash
from storage.source_tokenizer import source_tokenizer

IDENTITY = {
    "model": {"module": "models.llama3", "class": "Llama3", **asdict(config())},
    "data": {"sha256": "12ab", "seq_len": 16},
    "optimizer": {"name": "adamw"},
}


class Net(nn.Module):
    def __init__(self, seed, width=24):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = (
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.Linear(width, 7),
        )
        self.register_buffer("counts", torch.zeros(5))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def forward(self, x):
        self.counts += 1
        return self.last(self.norm(self.first(x)).relu())


def trained(seed=0, steps=2, optimizer="adamw", width=24):
    """(net, optimizers) after some steps; a fresh start has seed 1 and no steps."""
    net = Net(seed, width)
    if optimizer == "muon":
        matrices = [net.first.weight, net.last.weight]
    else:
        matrices = []
    rest = []
    for p in net.parameters():
        if not any(p is m for m in matrices):
            rest.append(p)
    optimizers = [torch.optim.AdamW(rest, lr=1e-2)] + (
        [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
    )
    for _ in range(steps):
        net(torch.randn(4, width)).square().sum().backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    return net, optimizers


def saver(
    model,
    optimizers,
    out,
    identity=IDENTITY,
    tokenizer_file=None,
    config=None,
    source="print(1)\n",
    **flags,
):
    """The Checkpoints of a model, or of the list of a rank's stages."""
    modules, config = model if isinstance(model, list) else [model], config or {"tp": 2, "cp": 1}
    return Checkpoints(
        CheckpointConfig(**flags),
        str(out),
        modules=modules,
        optimizer=optimizers,
        identity=identity,
        config=config,
        source=source,
        tokenizer_file=tokenizer_file,
    )


def tokenizer_of(cfg):
    """source_tokenizer() as a recipe calls it."""
    return source_tokenizer(
        cfg.data, cfg.tokenizer, cfg.out, cfg.init_from, cfg.load_step, cfg.exclude_from_loading
    )


def save_run(out, *steps, **flags):
    """A run with checkpoints at these steps, with the weights of `trained(0, step)`."""
    for step in steps:
        assert saver(*trained(0, step), out, **flags).save(
            step, {"step": step, "samples": 8 * step}
        )
    return out


def everything(net, optimizers):
    tensors = {name: t for name, t in net.state_dict().items()}
    for name, p in net.named_parameters():
        for o in optimizers:
            tensors |= {f"{name}.{k}": v for k, v in o.state.get(p, {}).items()}
    return tensors


def assert_same(a, b):
    a, b = everything(*a), everything(*b)
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


def path(out, step):
    return str(Path(out) / "checkpoints" / f"step-{step}")


def names(out):
    return sorted(p.name for p in (Path(out) / "checkpoints").iterdir())


def set_manifest(folder, **changed):
    about = json.loads(Path(folder, "manifest.json").read_bytes()) | changed
    about["sha256"] = own_hash(about)
    Path(folder, "manifest.json").write_bytes(json_bytes(about))


def rewrite(folder, name, content):
    """Replaces a file, or with None removes a file, and makes the checksums right, as an attacker
    can."""
    Path(folder, name).unlink()
    if content is not None:
        Path(folder, name).write_bytes(content)
    files = sorted(p.name for p in Path(folder).iterdir() if p.name != "manifest.json")
    set_manifest(folder, files=checksums(folder, files))


def refuses(words, function, *args, **flags) -> str:
    """Checks that function(*args, **flags) raises a ValueError of one line with these words, and
    returns the line."""
    with pytest.raises(ValueError, match=words) as error:
        function(*args, **flags)
    assert "\n" not in str(error.value)
    return str(error.value)


@contextlib.contextmanager
def refused(*parts):
    """Checks that the statements below raise a ValueError of one line that holds these parts."""
    with pytest.raises(ValueError) as error:
        yield
    line = str(error.value)
    assert "\n" not in line
    for part in parts:
        assert part in line, line


def stops(capsys, command, *args) -> str:
    """Checks that command(*args) ends with status 2 and says nothing but one line on stderr, and
    returns the line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as status:
        command(*args)
    said, error = capsys.readouterr()
    assert status.value.code == 2, said + error
    assert said == "", said + error
    assert error.find("\n") == len(error) - 1, said + error
    return error


def flip(file, bit):
    content = bytearray(Path(file).read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    Path(file).write_bytes(content)
