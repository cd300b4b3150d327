"""forks/train_llama3_mup.py: activations and updates keep their size at every width, and without it
they do not."""

import importlib
import math

import pytest
import torch
from runs import REPO, launch, run, train_lines
from saves import refuses

import train_llama3
from distributed.layout import Layout
from flags.config import override_fields
from forks.mup import FLAVORS, MupLlama3, MupLlama3Config
from models.llama3 import Llama3, Llama3Config
from parallel import init_weights
from storage.hf import check_same_model
from storage.saved import load_model
from training.optim import set_lr

mup = importlib.import_module("forks.train_llama3_mup")
WIDTHS = (64, 128, 256, 512)


def wide(Model, Config, dim: int, seed: int, **fields):
    """A model of three blocks with heads of 16."""
    n_heads = dim // 16
    sizes = dict(
        dim=dim,
        n_layers=3,
        head_dim=16,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        ffn_dim=2 * dim,
        vocab_size=256,
    )
    with torch.device("meta"):
        model = Model(Config(**sizes, **fields))
    model.index = 0
    model.n_stages = 1
    model.to_empty(device="cpu")
    init_weights(model, Layout(), seed)
    return model


def sizes_of(model, tokens) -> dict[str, float]:
    """Mean absolute activation: of each attention, FFN, block and of the logits."""
    found = {}
    hooks = []
    for fqn, module in model.named_modules():
        if fqn.startswith("blocks.") and fqn.split(".")[-1] in (*"012", "attn", "ffn"):

            def keep(m, args, out, fqn=fqn):
                found[fqn] = out.abs().mean().item()

            hooks.append(module.register_forward_hook(keep))
    with torch.no_grad():
        found["logits"] = model(tokens).abs().mean().item()
    for hook in hooks:
        hook.remove()
    return found


def before_and_after(recipe, Model, Config, dim: int, **fields) -> list[dict[str, float]]:
    """sizes_of() at the start and after ten steps, each a mean over three seeds."""
    pairs = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(5))
    pairs[:, 1::2] = pairs[:, :-1:2]  # every second token is the one before it: something to learn
    tokens = pairs[:, :-1]
    labels = pairs[:, 1:]
    all_found = []
    for seed in range(3):
        model = wide(Model, Config, dim, seed, **fields)
        cfg = recipe.Config(lr=1e-3, weight_decay=0.0)
        optimizers = recipe.build_optimizers([model], cfg)
        found = [sizes_of(model, tokens)]
        for _ in range(10):
            model(tokens, labels=labels, loss_denom=labels.numel()).backward()
            set_lr(optimizers, cfg.lr)
            if recipe is mup:  # as its main does
                set_lr(optimizers[-1:], cfg.lr / model.config.width)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        all_found.append([*found, sizes_of(model, tokens)])
    return [
        {name: sum(found[i][name] for found in all_found) / 3 for name in all_found[0][0]}
        for i in (0, 1)
    ]


@pytest.mark.slow
def test_the_coordinate_check_is_flat():
    """Within 20 % over 8 x the width, at the start and after ten steps (2203.03466, app. D.1).
    Plain Llama 3 grows tenfold."""
    narrow, *wider = [
        before_and_after(mup, MupLlama3, MupLlama3Config, dim, base_dim=64) for dim in WIDTHS
    ]
    for found in wider:
        for start, now in zip(narrow, found):
            assert {
                name: round(now[name] / start[name], 2)
                for name in now
                if start[name] and not 0.8 < now[name] / start[name] < 1.2
            } == {}
    narrow, wide_one = [
        before_and_after(train_llama3, Llama3, Llama3Config, dim)[1] for dim in (64, 512)
    ]
    assert max(wide_one[name] / narrow[name] for name in narrow) > 10


def test_at_the_width_of_the_base_all_is_as_in_llama3():
    """but for the head, which begins at 0."""
    ours = wide(MupLlama3, MupLlama3Config, 64, 0, base_dim=64).state_dict()
    theirs = wide(Llama3, Llama3Config, 64, 0).state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == ["head.weight"]
    assert not ours["head.weight"].any()


def test_initial_deviation_and_multiplier_follow_the_width():
    model = wide(MupLlama3, MupLlama3Config, 256, 0, base_dim=64)
    plain = wide(Llama3, Llama3Config, 256, 0)
    for fqn, p in plain.named_parameters():
        ours = model.get_parameter(fqn)
        if p.dim() > 1 and fqn.startswith("blocks."):
            torch.testing.assert_close(ours, p / 2)  # sqrt(256 / 64)
        elif fqn != "head.weight":
            assert torch.equal(ours, p)
    h = torch.randn(2, 3, 256)
    torch.testing.assert_close(model.norm(h), plain.norm(h) / 4)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: override_fields(FLAVORS["debug"], "base_dim=0", "--model_args"), "base_dim 0"),
        (
            lambda: override_fields(FLAVORS["debug"], "tie_embeddings=true", "--model_args"),
            "tie_embeddings True",
        ),
        (lambda: check_same_model(MupLlama3, MupLlama3Config()), "leave --export_hf out"),
        (lambda: MupLlama3Config.from_hf(Llama3Config().to_hf()), "leave --init_from out"),
    ],
)
def test_what_it_cannot_do_is_one_line(wrong, words):
    refuses(words, wrong)


@pytest.mark.slow
def test_a_run_on_four_processes_is_that_of_one(tmp_path):
    flags = [
        "--steps",
        6,
        "--model_args",
        "dim=128,ffn_dim=256,n_heads=4,n_layers=2",
        "--local_batch_size",
        2,
        "--global_batch_size",
        4,
        "--compute_dtype",
        "float32",
        "--seq_len",
        32,
        "--log_every",
        1,
    ]
    for n, layout in ((1, []), (4, ["--tp", 2, "--pp", 2])):
        run(
            launch(
                n, REPO / "forks/train_llama3_mup.py", *flags, *layout, "--out", tmp_path / str(n)
            ),
            tmp_path,
        )
    for a, b in zip(train_lines(tmp_path / "1"), train_lines(tmp_path / "4"), strict=True):
        assert math.isclose(a["loss"], b["loss"], abs_tol=1e-5)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-4)
    model, state = load_model(str(tmp_path / "4"))
    assert type(model) is MupLlama3
    assert model.norm.multiplier == 0.5
    assert state["step"] == 6
