"""What changes in training and is in no checkpoint is told at the first save, by name; state that an
optimizer makes late is loaded again; what no checkpoint can hold is refused after the first step."""

from types import SimpleNamespace

import pytest
import torch
from runs import having
from saves import assert_same, saver, trained
from torch import nn

import distributed.checks
from training.optim import numbers_in_state


def lines_of_saves(capsys, change, n=1, out=None):
    """What saves say after `change` of a net and its optimizers."""
    net, optimizers = trained()
    checkpoints = saver(net, optimizers, out)
    said = []
    for step in range(1, n + 1):
        change(net, optimizers)
        capsys.readouterr()
        assert checkpoints.save(step, {"step": step})
        said.append(having(capsys.readouterr().out.splitlines(), "holds"))
    checkpoints.close()
    return said


def count_forwards(net, optimizers):
    net.norm.forwards = getattr(net.norm, "forwards", 0) + 1


def keep_average(net, optimizers):
    net.first.mean = torch.rand(3)


def keep_in_list(net, optimizers):
    net.recent = [*getattr(net, "recent", []), 0.5]


def keep_on_parameter(net, optimizers):
    net.first.weight.momentum = torch.rand(3)


def count_in_scratch(net, optimizers):
    net.scratch += 1


def carry_a_gradient(net, optimizers):
    net(torch.randn(4, 24)).sum().backward()


@pytest.mark.parametrize(
    "change, said",
    [
        (count_forwards, "checkpoint: norm.forwards changed since the start"),
        (keep_average, "checkpoint: first.mean changed since the start"),
        (keep_in_list, "checkpoint: recent changed since the start"),
        (keep_on_parameter, "checkpoint: first.weight.momentum changed since the start"),
        (count_in_scratch, "checkpoint: scratch changed since the start"),
        (carry_a_gradient, "checkpoint: a gradient of first.bias, first.weight, last.bias and 3 "),
    ],
)
def test_what_a_checkpoint_does_not_hold_is_named_once(change, said, tmp_path, capsys):
    first, second = lines_of_saves(capsys, change, n=2, out=tmp_path)
    assert len(first) == 1, first
    assert first[0].startswith(said)
    assert second == []  # told once


def train(net, optimizers):
    net(torch.randn(4, 24)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def set_a_flag(net, optimizers):
    net.first.is_warm = True
    net.name = "other"


def make_a_schedule(net, optimizers):
    """As distributed/schedule.py does with --pp, for the shape of the micro-batches."""
    net.made_for = (4, torch.Size([2, 8]))


@pytest.mark.parametrize("change", [train, set_a_flag, make_a_schedule])
def test_nothing_is_named_without_a_reason(change, tmp_path, capsys):
    """A buffer, weights and moments are saved; a switch or a text is no number that a step counts."""
    assert lines_of_saves(capsys, change, out=tmp_path) == [[]]


class LateAdam(torch.optim.AdamW):
    """Keeps a slow copy of the weights, and a count of its own, from the third step on."""

    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if state["step"] > 2 and "slow" not in state:
                state["slow"] = p.detach().clone()
                state["count"] = torch.tensor(7.0)


def test_state_that_an_optimizer_makes_late_is_loaded_again(tmp_path):
    torch.manual_seed(0)
    net, _ = trained(steps=0)
    optimizer = LateAdam(net.parameters(), lr=1e-2)
    checkpoints = saver(net, [optimizer], tmp_path)
    for _ in range(4):
        train(net, [optimizer])
    assert checkpoints.save(4, {"step": 4})
    other, _ = trained(seed=1, steps=0)
    its_optimizer = LateAdam(other.parameters(), lr=1e-2)
    assert saver(other, [its_optimizer], tmp_path).load() == {"step": 4}
    assert "slow" in its_optimizer.state[other.first.weight]
    assert_same((net, [optimizer]), (other, [its_optimizer]))


def test_state_of_another_optimizer_is_still_refused(tmp_path):
    """Only state that came late is made at a start; moments of another optimizer fit no more."""
    net, optimizers = trained()
    assert saver(net, optimizers, tmp_path).save(1, {"step": 1})
    other, _ = trained(seed=1, steps=0)
    plain = torch.optim.SGD(other.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="unknown: optimizer"):
        saver(other, [plain], tmp_path).load()


def test_numbers_in_an_optimizers_state_are_found():
    p = nn.Parameter(torch.zeros(2))
    state = {p: {"n": 1, "moment": torch.zeros(2)}}
    optimizer = SimpleNamespace(state=state)
    (said,) = numbers_in_state([optimizer], [("w", p, 0)])
    assert said == "state n of w in SimpleNamespace is a int"
    state[p]["n"] = torch.tensor(1.0)
    assert numbers_in_state([optimizer], [("w", p, 0)]) == []


def test_checksums_see_every_bit():
    """The comparison of copies, and of what changed, stands on them."""
    x = torch.zeros(3)
    before = distributed.checks.bits_sum(x)
    x[2] = 1e-30
    assert distributed.checks.bits_sum(x) != before
