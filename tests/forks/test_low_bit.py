"""forks/adamw_8bit.py and mxfp8.py, which is emulated on a CPU: near fp32 or bf16, smaller, on
layouts, and by the lines of docs/fork_me.md."""

from types import SimpleNamespace

import layouts
import pytest
import torch
import torchao.optim
from guide import FLAGS, write_copy
from layouts import build, config, full, global_batch, local_batch, reference, relative, train
from pool import pool
from runs import ENV, REPO, column, launch, run, train_lines
from saves import saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import forks.mxfp8
import parallel
from distributed.layout import local_tensor
from forks.adamw_8bit import BLOCK, AdamW8bit, adamw_8bit
from training.optim import adamw, skip_if_not_finite

MODEL = dict(dim=128, n_layers=2, head_dim=32, n_heads=4, n_kv_heads=4, ffn_dim=256, vocab_size=128)


def n_bytes(optimizer) -> int:
    """Of the moments on this rank."""
    total = 0
    for state in optimizer.state.values():
        for name, t in state.items():
            if name != "step":
                part = local_tensor(t)
                total += part.numel() * part.element_size()
    return total


def steps(flags: dict, make, folder=None, first=0, last=8):
    """(losses, bytes of this rank's moments per number of its weights, whole state after the last
    step). folder: save to it after `last` steps, or load from it before step `first`."""
    local = 4 // flags.get("dp_shard", 1)
    stages, layout = build(config(**MODEL), flags, 4, local)
    params = []
    for stage in stages:
        params.extend(stage.named_parameters())
    optimizer = make([{"params": [p for _, p in params]}], 1e-3, (0.9, 0.95), 1e-8, "adamw")
    if folder:
        checkpoints = saver(stages, [optimizer], folder)
    if first:
        checkpoints.load()
    losses = []
    for step in range(first, last):
        batch = local_batch(global_batch(step % 2, 4, False), layout)
        loss = parallel.forward_backward(stages, batch, layout)
        skip_if_not_finite([optimizer], parallel.clip_grad_norm(stages, 1.0, layout))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parallel.reduce_loss(loss, layout)[0].item())
    if folder and not first:
        checkpoints.save(last, {}, last=True)
    numbers = sum(local_tensor(p).numel() for _, p in params)
    state = {}
    for fqn, p in params:
        for name, t in optimizer.state[p].items():
            state[f"{fqn} {name}"] = full(t)
    return losses, n_bytes(optimizer) / numbers, state


def test_moments_in_8_bits_are_small_learn_alike_and_continue(tmp_path):
    """On two FSDP ranks: two bytes per number and a scale for each 128, the losses of AdamW within
    1 %, a continued run equal to the bit, and on one process the same codes."""
    plain, plain_size, _ = pool(2).run(steps, dict(dp_shard=2), adamw)[0]
    whole, size, state = pool(2).run(steps, dict(dp_shard=2), adamw_8bit)[0]
    assert plain_size == 8
    assert 2 < size < 2.15
    assert plain[-1] < plain[0] - 0.5
    assert whole[0] == plain[0]
    assert whole != plain
    for got, want in zip(whole, plain, strict=True):
        assert abs(got - want) < 1e-2 * want
    half, _, saved = pool(2).run(steps, dict(dp_shard=2), adamw_8bit, str(tmp_path), 0, 4)[0]
    assert half == whole[:4]
    rest, _, end = pool(2).run(steps, dict(dp_shard=2), adamw_8bit, str(tmp_path), 4, 8)[0]
    assert rest == whole[4:]
    for key, t in state.items():
        assert torch.equal(end[key], t), key
    assert any(t.dtype == torch.uint8 and t.any() for t in saved.values())
    one, _, loaded = pool(1).run(steps, {}, adamw_8bit, str(tmp_path), 4, 4)[0]
    assert one == []
    for key, t in saved.items():
        assert torch.equal(loaded[key], t), key


def test_moments_in_8_bits_are_those_of_torchao(monkeypatch):
    """torchao's AdamW8bit, op by op and not compiled, on the same gradients: the same codes, and
    the same steps of a matrix and of a vector, which has fp32 in both."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    torch.manual_seed(0)
    begin = [torch.randn(40, 256), torch.randn(256)]
    ours = [torch.nn.Parameter(t.clone()) for t in begin]
    theirs = [torch.nn.Parameter(t.clone()) for t in begin]
    first = adamw_8bit([{"params": ours}], 1e-2, (0.9, 0.95), 1e-8, "adamw")
    second = torchao.optim.AdamW8bit(theirs, 1e-2, (0.9, 0.95), 1e-8, block_size=BLOCK)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p) * torch.logspace(-4, 0, p.shape[-1])
            q.grad = p.grad.clone()
        first.step()
        second.step()
    for p, q, t in zip(ours, theirs, begin, strict=True):
        assert relative(p.detach() - t, q.detach() - t) < 1e-4
    codes = first.state[ours[0]]["exp_avg_codes"]
    assert (codes == second.state[theirs[0]]["exp_avg"].codes).float().mean() > 0.999


def test_a_skipped_step_changes_no_code():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(64, 256))
    optimizer = AdamW8bit([{"params": [p]}], 1e-2, (0.9, 0.95), 1e-8)
    for norm in (torch.tensor(1.0), torch.tensor(float("nan"))):
        p.grad = torch.randn_like(p)
        before = {name: t.clone() for name, t in optimizer.state[p].items()} | {"p": p.clone()}
        skip_if_not_finite([optimizer], norm)
        optimizer.step()
    for name, t in (optimizer.state[p] | {"p": p}).items():
        assert torch.equal(t, before[name]), name


def names_of_state(sizes: list[tuple]) -> list[list[str]]:
    """Of the state of each parameter of these sizes, sharded by rows over two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    names = []
    for size in sizes:
        p = torch.nn.Parameter(distribute_tensor(torch.ones(size), mesh, [Shard(0)]))
        p.grad = torch.ones_like(p)
        optimizer = AdamW8bit([{"params": [p]}], 1e-2, (0.9, 0.95), 1e-8)
        optimizer.step()
        names.append(sorted(optimizer.state[p]))
    return names


def test_all_ranks_have_a_state_of_the_same_names():
    """Of the vector, 2,049 numbers lie on one rank, and 16 whole blocks on the other, which must not
    code them alone: a checkpoint is written by all ranks. Of the one row, a rank has nothing."""
    first, second = pool(2).run(names_of_state, [(4097,), (1, 4096), (33, 128)])
    assert first == second
    vector, row, _ = first
    assert vector == ["exp_avg", "exp_avg_sq", "step"]
    assert "exp_avg_codes" in row


def test_what_moments_in_8_bits_need():
    weights = [{"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]}]
    with pytest.raises(ValueError, match="8 bits need --param_dtype float32, not bfloat16"):
        adamw_8bit(weights, 1e-3, (0.9, 0.95), 1e-8, "adamw")
    with pytest.raises(ValueError, match="8 bits replace --optimizer adamw_sr: use .* adamw"):
        adamw_8bit(weights, 1e-3, (0.9, 0.95), 1e-8, "adamw_sr")


# ---------------------------------------------------------------- MXFP8
def train_mxfp8(*args):
    """layouts.train with the fork's line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "float8_linears", forks.mxfp8.mxfp8_linears)
        # a recipe's flag
        patch.setattr(layouts.Flags, "seq_len", layouts.T, raising=False)
        return train(*args)


@pytest.mark.parametrize(
    "processes, flags",
    [
        (2, {}),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, dict(tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_mxfp8_stays_near_fp32(processes, flags):
    """Emulated. Loss within 1 %, every gradient points the same way; and it did compute in fewer
    bits."""
    c = config(**MODEL)
    want = reference(c, 8)
    for got in pool(processes).run(train_mxfp8, c, flags | {"float8": "rowwise"}, 8, 4):
        for g, w in zip(got[:-1], want[:-1], strict=True):
            assert abs(g["loss"] - w["loss"]) < 1e-2 * w["loss"]
        for fqn, grad in got[0]["grads"].items():
            right = want[0]["grads"][fqn]
            same = torch.nn.functional.cosine_similarity(grad.flatten(), right.flatten(), dim=0)
            assert same > 0.97, fqn
            off = (grad - right).norm() / right.norm()
            assert off > 1e-3 or "ffn" not in fqn, fqn


def test_what_mxfp8_needs(monkeypatch):
    cfg = SimpleNamespace(float8_all_gather=False, seq_len=32)
    layout = SimpleNamespace(
        device=torch.device("cuda"), local_batch_size=1, microbatch_size=1, pp=1, cp=1, tp=1
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match="needs a GPU of capability 10.0 .B200.* has 9.0"):
        forks.mxfp8.check_mxfp8(layout, cfg)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    forks.mxfp8.check_mxfp8(layout, cfg)
    layout.tp = 2
    with pytest.raises(ValueError, match="multiple of 32 tokens .* not 16; use another --seq_len"):
        forks.mxfp8.check_mxfp8(layout, cfg)


# ---------------------------------------------------------------- by the lines of docs/fork_me.md
def call(folder, processes, *argv):
    return run(launch(processes, *argv), folder, env=ENV | {"PYTHONPATH": str(REPO)})


@pytest.mark.slow
def test_recipes_with_the_lines_train_and_continue(tmp_path):
    """Of both, two processes: MXFP8's losses are near those of bf16, moments in 8 bits are near
    AdamW's, and a continued run has the same losses."""
    write_copy(tmp_path / "eight.py", "Moments in 8 bits")
    write_copy(tmp_path / "mx.py", "MXFP8")
    sizes = "n_layers=2,dim=128,n_heads=4,n_kv_heads=2,head_dim=32,ffn_dim=256,vocab_size=4096"
    flags = [*FLAGS[4:], "--model_args", sizes, "--log_every", 1, "--warmup_steps", 1]
    plain = REPO / "train_llama3.py"
    call(tmp_path, 2, plain, *flags, "--steps", 8, "--checkpoint_every", 0, "--out", "plain")
    call(tmp_path, 2, "eight.py", *flags, "--steps", 8, "--checkpoint_every", 4, "--out", "eight")
    want = column(train_lines(tmp_path / "eight"), "loss")
    for got, loss in zip(want, column(train_lines(tmp_path / "plain"), "loss"), strict=True):
        assert abs(got - loss) < 3e-3 * loss
    again = ["--steps", 8, "--load_step", 4, "--checkpoint_every", 4, "--out", "eight"]
    call(tmp_path, 2, "eight.py", *flags, *again)
    assert column(train_lines(tmp_path / "eight"), "loss") == want
    half = [*flags, "--compute_dtype", "bfloat16", "--steps", 8, "--checkpoint_every", 0]
    call(tmp_path, 2, plain, *half, "--out", "bf16")
    call(tmp_path, 2, "mx.py", *half, "--float8", "rowwise", "--out", "mx")
    of_bf16 = column(train_lines(tmp_path / "bf16"), "loss")
    of_mx = column(train_lines(tmp_path / "mx"), "loss")
    assert of_mx != of_bf16
    for got, loss in zip(of_mx, of_bf16, strict=True):
        assert abs(got - loss) < 1e-2 * loss
