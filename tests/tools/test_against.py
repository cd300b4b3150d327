"""--check_parity --where --against: no difference from transformers, and the module of a planted
mistake is named."""

import functools
import re
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from saves import refuses
from their_models import DEEPSEEK, SCALED, YARN, random_model
from their_models import TINY as LLAMA

import train_deepseek
import train_llama3
import train_qwen3
from models import deepseek, layers, llama3, qwen3
from tools.parity import against as against
from tools.reports.options import run_report

TINY = LLAMA | dict(num_hidden_layers=2, max_position_embeddings=256)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
LATENT = DEEPSEEK | dict(num_hidden_layers=2)
KINDS = {  # name -> (recipe, transformers' name, its config)
    "llama3": (train_llama3, "Llama", TINY | dict(rope_parameters=SCALED)),
    "tied": (train_llama3, "Llama", TINY | dict(tie_word_embeddings=True, num_attention_heads=4)),
    "mistral": (train_llama3, "Mistral", TINY | dict(sliding_window=16)),
    "qwen3": (train_qwen3, "Qwen3", TINY),
    "qwen3_moe": (train_qwen3, "Qwen3Moe", TINY | EXPERTS),
    "deepseek_v3": (train_deepseek, "DeepseekV3", LATENT),
    "deepseek_v2": (
        train_deepseek,
        "DeepseekV2",
        LATENT
        | dict(norm_topk_prob=False, topk_method="group_limited_greedy", rope_parameters=YARN),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """kind -> a folder written by transformers, with random weights: no weight is without effect."""

    @functools.cache
    def make(kind: str) -> str:
        _, name, values = KINDS[kind]
        folder = str(tmp_path_factory.mktemp(kind))
        random_model(name, values, std=0.15).save_pretrained(folder)
        return folder

    return make


def seams_of(kind: str, folder: str, mistake=nullcontext, **flags) -> tuple[list, dict, str]:
    recipe = KINDS[kind][0]
    cfg = recipe.Config(**flags)
    theirs = against.their_model(folder)
    with mistake():
        ours = against.our_model(recipe.main, cfg, folder)
        return *against.compare_with_transformers(ours, theirs), type(theirs).__name__


def compared(*args, **flags) -> tuple[str, int]:
    return against.report_against(*seams_of(*args, **flags))


@pytest.mark.parametrize("kind", KINDS)
def test_our_models_are_those_of_transformers_everywhere(kind, folder):
    seams, pairs, name = seams_of(kind, folder(kind))
    text, status = against.report_against(seams, pairs, name)
    assert status == 0, text
    assert text.startswith("no difference from "), text
    assert "not compared" not in text, text
    assert "in another form" not in text, text
    # what attention's kernel is given and returns was looked at, and in order
    inside = [seam.name for seam in seams if against.part_of_attention(seam.name)]
    parts = ["q", "k", "v", "attention"]
    assert inside == [f"blocks.{i}.attn {part}" for i in range(2) for part in parts]


# ---------------------------------------------------------------- planted mistakes


def mistake(owner, name, make):
    """A function that returns a context, in which owner.name is replaced by make(the real one)."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def other_config(**changes):
    """The model is built with another config than config.json has."""

    def make(real):
        return lambda folder, Config: replace(real(folder, Config), **changes)

    return mistake(against, "read_hf_config", make)


def no_residual(self, h, cos, sin, attend):
    h = self.attn(self.attn_norm(h), cos, sin, attend)
    return h + self.ffn(self.ffn_norm(h))


def without_k_norm(self, x, cos, sin, attend):
    B, T, _ = x.shape
    q = self.q_norm(self.wq(x).view(B, T, -1, self.head_dim)).transpose(1, 2)
    k, v = (w(x).view(B, T, -1, self.head_dim).transpose(1, 2) for w in (self.wk, self.wv))
    return self.wo(
        attend(layers.rotate(q, cos, sin), layers.rotate(k, cos, sin), v)
        .transpose(1, 2)
        .reshape(B, T, -1)
    )


def without_last_norm(real):
    def forward(
        self, tokens, labels=None, positions=None, doc_ids=None, loss_denom=None, cache=None
    ):
        usual = torch.nn.Module.__call__
        with mock.patch.object(
            type(self.norm), "__call__", lambda norm, x: x if norm is self.norm else usual(norm, x)
        ):
            return real(self, tokens, labels, positions, doc_ids, loss_denom, cache)

    return forward


def unrotated(heads):
    """A mistake: rotate() returns what has so many heads as it came."""

    def make(real):
        return lambda x, cos, sin: x if x.shape[1] == heads else real(x, cos, sin)

    return make


def with_values_of_other_heads(self, x, cos, sin, attend):
    B, T, _ = x.shape
    q, k, v = (
        w(x).view(B, T, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
    )
    out = attend(layers.rotate(q, cos, sin), layers.rotate(k, cos, sin), v.flip(1))
    return self.wo(out.transpose(1, 2).reshape(B, T, -1))


def with_scale_in_queries(self, x, cos, sin, attend):
    """No mistake: the softmax scale is in the queries."""
    B, T, _ = x.shape
    q, k, v = (
        w(x).view(B, T, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
    )
    q = layers.rotate(q, cos, sin) * self.head_dim**-0.5
    out = attend(q, layers.rotate(k, cos, sin), v, scale=1.0)
    return self.wo(out.transpose(1, 2).reshape(B, T, -1))


def other_scale(real):
    """A mistake: the kernel gets another softmax scale."""
    return lambda *args, **kwargs: functools.partial(real(*args, **kwargs), scale=0.25)


def keys_in_another_order(real):
    """A mistake: the keys' rotated pairs lie in another order than the queries'."""

    def rotate(x, cos, sin, interleave):
        out = real(x, cos, sin, interleave)
        if x.shape[1] > 1:
            return out
        return layers.pair_up(out, False).transpose(-1, -2).flatten(-2)

    return rotate


QUERIES = "forward of blocks.0.attn (the queries after rotation):"
KEYS = "forward of blocks.0.attn (the keys after rotation):"
RESULT = "forward of blocks.0.attn (attention):"
MISTAKES = {  # name -> (kind, mistake, words of the first line)
    "another rope_theta": ("qwen3", other_config(rope_theta=1e4 / 2), QUERIES),
    "another rope_theta of the latent": ("deepseek_v3", other_config(rope_theta=5e3), QUERIES),
    "half positions": (
        "llama3",
        mistake(
            llama3,
            "cos_and_sin",
            lambda real: lambda config, K, positions: real(config, K, positions / 2),
        ),
        QUERIES,
    ),
    "keys without rotation": ("llama3", mistake(llama3, "rotate", unrotated(4)), KEYS),
    "keys in another order": (
        "deepseek_v3",
        mistake(deepseek, "rotate", keys_in_another_order),
        KEYS,
    ),
    "keys in another order than transformers'": (
        "deepseek_v2",
        mistake(deepseek, "rotate", keys_in_another_order),
        KEYS,
    ),
    "values of other heads": (
        "llama3",
        mistake(llama3.Attention, "forward", lambda real: with_values_of_other_heads),
        "forward of blocks.0.attn (the values):",
    ),
    "another scale": ("llama3", mistake(llama3, "causal_attention", other_scale), RESULT),
    "no sliding window": ("mistral", other_config(sliding_window=None), RESULT),
    "another eps": ("llama3", other_config(norm_eps=1e-3), "forward of blocks.0.attn_norm:"),
    "no k_norm": (
        "qwen3",
        mistake(qwen3.Attention, "forward", lambda real: without_k_norm),
        "forward of blocks.0.attn.k_norm: never called here",
    ),
    "no residual": (
        "llama3",
        mistake(llama3.Block, "forward", lambda real: no_residual),
        "forward of blocks.0 (what it gives to blocks.0.ffn_norm)",
    ),
    "w1 and w3 swapped": (
        "llama3",
        mistake(
            llama3.FeedForward,
            "forward",
            lambda real: lambda self, x: self.w2(F.silu(self.w3(x)) * self.w1(x)),
        ),
        "forward of blocks.0.ffn (what it gives to blocks.0.ffn.w2)",
    ),
    "no last norm": (
        "llama3",
        mistake(llama3.Llama3, "forward", without_last_norm),
        "forward of norm: never called here",
    ),
    "router weights that do not sum to 1": (
        "qwen3_moe",
        other_config(norm_topk_prob=False),
        "forward of blocks.0.moe:",
    ),
    "no route_scale": ("deepseek_v3", other_config(route_scale=1.0), "forward of blocks.1.moe:"),
    "another eps of the latent": (
        "deepseek_v3",
        mistake(deepseek, "LATENT_EPS", lambda real: 1e-3),
        "blocks.0.attn.q_norm:",
    ),
    "yarn without its factor": (
        "deepseek_v2",
        mistake(deepseek, "attention_factors", lambda real: lambda config: (1.0, 1.0)),
        RESULT,
    ),
    "a gate without gradient": (
        "llama3",
        mistake(
            llama3.FeedForward,
            "forward",
            lambda real: lambda self, x: self.w2(F.silu(self.w1(x)).detach() * self.w3(x)),
        ),
        "finished gradient of blocks.1.ffn.w1.weight: no gradient arrives",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named_by_its_module(name, folder):
    kind, planted, named = MISTAKES[name]
    text, status = compared(kind, folder(kind), planted)
    first = text.splitlines()[0]
    assert status == 1, text
    assert first.startswith("first difference: "), text
    assert named in first, text
    assert "; there it is model." in text  # the module's name in transformers


SAME_RESULT = {  # name -> (edit, parts in another form)
    "the scale in the queries": (
        mistake(llama3.Attention, "forward", lambda real: with_scale_in_queries),
        "blocks.*.attn q",
    ),
    "all positions shifted": (
        mistake(
            llama3,
            "cos_and_sin",
            lambda real: lambda config, K, positions: real(config, K, positions + 7),
        ),
        "blocks.*.attn k, blocks.*.attn q",
    ),
}


@pytest.mark.parametrize("name", SAME_RESULT)
def test_another_form_of_the_same_attention_is_no_difference(name, folder):
    edit, parts = SAME_RESULT[name]
    text, status = compared("llama3", folder("llama3"), edit)
    first, last = text.splitlines()
    assert status == 0, text
    assert first.startswith("no difference from "), text
    assert last == f"in another form, with the same result of attention: {parts}"


def test_attention_that_only_transformers_shows_is_not_called_compared(folder):
    """A fork's model that hands no attend to its blocks: nothing sees what its kernel is given."""
    with mock.patch.object(against, "our_attention", lambda model, note: nullcontext()):
        text, status = compared("llama3", folder("llama3"))
    assert status == 0, text
    parts = ", ".join(f"blocks.*.attn {part}" for part in ("attention", "k", "q", "v"))
    assert text.endswith(f"not compared: {parts}"), text


def test_a_forks_own_class_is_compared(folder):
    """The report uses the class that the recipe passes to claim_run, here a class from a fork's
    recipe file."""

    class Fork(llama3.Llama3):
        def forward(self, tokens, *args, **kwargs):
            return super().forward(tokens, *args, **kwargs) * 1.5

    with mock.patch.object(train_llama3, "Llama3", Fork):
        text, status = compared("llama3", folder("llama3"))
    first = text.splitlines()[0]
    assert status == 1, text
    assert first.startswith("first difference: forward of logits"), text
    assert "1.5 times" in first, text


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--check_parity --where --against FOLDER --tp 2", "leave --tp 2 out"),
        ("--check_parity --where --against QWEN", "model_type is 'qwen3'"),
    ],
)
def test_what_against_refuses(flags, words, folder, tmp_path, capsys):
    flags = flags.replace("FOLDER", folder("llama3")).replace("QWEN", folder("qwen3")).split()
    refuses(
        re.escape(words),
        run_report,
        train_llama3.main,
        train_llama3.Config,
        [*flags, "--out", str(tmp_path)],
    )


def test_without_transformers_one_line_says_what_to_install(folder):
    with mock.patch.dict("sys.modules", transformers=None):
        refuses("pip install transformers", against.their_model, folder("llama3"))


def test_against_as_a_flag(folder, capsys):
    flags = ["--check_parity", "--where", "--against", folder("qwen3")]
    assert run_report(train_qwen3.main, train_qwen3.Config, flags) == 0
    assert "no difference from Qwen3ForCausalLM" in capsys.readouterr().out
