"""forks/ema.py, by the lines of docs/fork_me.md: the average is the one by hand, survives another
layout, touches no weight."""

from functools import partial

import pytest
import torch
from guide import write_copy
from runs import ENV, MODEL, REPO, column, having, launch, metrics, run, train_lines
from saves import trained

from forks.ema import Ema
from storage.dcp import read_table, read_tensors
from storage.manifest import read_manifest

FLAGS = [
    "--steps",
    6,
    "--model_args",
    MODEL,
    "--seq_len",
    32,
    "--local_batch_size",
    2,
    "--global_batch_size",
    4,
    "--log_every",
    1,
    "--val_every",
    3,
    "--val_batches",
    1,
    "--compute_dtype",
    "float32",
    "--device",
    "cpu",
]
EMA = ["--ema_decay", 0.7, "--eval_ema"]


def test_an_average_by_hand():
    net, optimizers = trained(0, 0)
    ema = Ema(net.parameters(), 0.7)
    by_hand = 0
    for k in range(1, 7):
        net(torch.randn(4, 24)).square().sum().backward()
        optimizers[0].step()
        ema.step()
        by_hand = by_hand + max(0.3, 1 / k) * (net.last.weight.detach() - by_hand)
        far = (ema.state[net.last.weight]["ema"] - by_hand).abs().max()
        assert far < 1e-6, f"the average after step {k} is off by {far:.1e}"
    before = net.last.weight.detach().clone()
    with ema.in_place_of_weights():
        assert torch.equal(net.last.weight, ema.state[net.last.weight]["ema"])
        assert not torch.equal(net.last.weight, before)
    assert torch.equal(net.last.weight, before)


def averages(out) -> dict:
    folder = f"{out}/checkpoints/step-6"
    table = read_table(folder, read_manifest(folder)["files"])
    found = {key: torch.empty(t.size, dtype=t.dtype) for key, t in table.items() if ".ema" in key}
    read_tensors(found, folder, table)
    return found


@pytest.mark.slow
def test_continued_on_another_layout_the_average_is_that_of_an_uninterrupted_run(tmp_path):
    write_copy(tmp_path / "train_ema.py", "Averages of weights")
    train = partial(run, cwd=tmp_path, env=ENV | {"PYTHONPATH": str(REPO)})
    train(launch(1, "train_ema.py", *FLAGS, *EMA, "--export_hf", "hf", "--out", "one"))
    for steps, *layout in ((3, "--tp", 2), (6, "--pp", 2)):
        train(
            launch(
                2,
                "train_ema.py",
                *FLAGS,
                *EMA,
                *layout,
                "--steps",
                steps,
                "--schedule_steps",
                6,
                "--out",
                "two",
            )
        )
    one = averages(tmp_path / "one")
    two = averages(tmp_path / "two")
    assert one.keys() == two.keys()
    assert len(one) == 2 * 21
    torch.testing.assert_close(two, one, atol=2e-5, rtol=1e-4)
    train(launch(1, REPO / "train_llama3.py", *FLAGS, "--out", "plain"))
    losses = [column(train_lines(tmp_path / out), "loss") for out in ("plain", "one")]
    assert losses[0] == losses[1]
    vals = []
    for out in ("plain", "one", "two"):
        vals.append(column(having(metrics(tmp_path / out), "val_loss"), "val_loss"))
    assert vals[1] == pytest.approx(vals[2], abs=1e-5)
    assert abs(vals[0][-1] - vals[1][-1]) > 1e-3
    assert "check_parity: equal" in train(
        launch(1, "train_ema.py", *FLAGS, *EMA, "--tp", 2, "--check_parity")
    )
    from storage.hf import load_hf_model

    assert torch.equal(
        load_hf_model(str(tmp_path / "hf"))[0].norm.weight, one["optimizer.norm.weight.ema"]
    )
