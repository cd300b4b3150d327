"""Tests storage/hf.py: transformers reads and writes the same files, and every layout does the same
as one process."""

import functools
import json
import math
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import chats
import pytest
import torch
import transformers  # imports each model on first use: a pool's workers need not wait
from layouts import build, config, equals_transformers, full, layouts_of, random_tokens
from pool import pool
from safetensors.torch import load_file, save_file
from saves import refuses, saver, stops
from tables import as_parameters
from their_models import SCALED, TINY, random_model
from torch import nn

import generate
from corpus.special import find_tokenizer
from corpus.tokenizer import ChatConfig
from distributed.layout import local_tensor
from flags.config import override_fields
from flags.files import printable
from models.llama3 import FLAVORS, Llama3, Llama3Config
from rl.datasets import Text
from storage import commands as checkpoint_commands
from storage import hf, hf_write
from storage.manifest import verify
from storage.newest import is_hf_folder
from storage.prompt import open_chat
from storage.saved import load_model
from tools.reports.dryrun import Watch

# ---------------------------------------------------------------- their files, our model

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
KINDS = dict(moe="Qwen3Moe", moe_raw="Qwen3Moe", mistral="Mistral", qwen2="Qwen2", qwen3="Qwen3")
VARIANTS = {
    "plain": {},
    "scaled_rope": dict(rope_parameters=SCALED),
    "tied": dict(tie_word_embeddings=True),
    "wide_heads": dict(head_dim=24, num_key_value_heads=1, rms_norm_eps=1e-3),
    "no_gqa": dict(
        num_key_value_heads=8, rope_parameters=dict(rope_type="default", rope_theta=100.0)
    ),
    "sharded": {},
    "bf16": {},
    "yarn": dict(rope_parameters=YARN | dict(attention_factor=1.3)),
    "mistral": dict(sliding_window=5, rope_parameters=YARN),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.5, beta_fast=16.0)),
    "moe_raw": dict(
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=False
    ),
    "moe": dict(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}


def write_indexed(folder, tensors: dict):
    """Writes each tensor to a separate file, with an index."""
    Path(folder).mkdir(exist_ok=True)
    for i, (name, t) in enumerate(tensors.items()):
        save_file({name: t}, Path(folder, f"{i}.safetensors"))
    index = {"weight_map": {name: f"{i}.safetensors" for i, name in enumerate(tensors)}}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """variant -> (transformers' model in fp32, folder written by transformers)."""

    @functools.cache
    def make(variant):
        folder, model = (
            tmp_path_factory.mktemp(variant),
            random_model(KINDS.get(variant, "Llama"), TINY | VARIANTS[variant]),
        )
        model.to(torch.bfloat16 if variant == "bf16" else torch.float32)
        model.save_pretrained(folder, max_shard_size="60KB" if variant == "sharded" else "1GB")
        return type(model).from_pretrained(folder, dtype=torch.float32), str(folder)

    return make


def tensors_of(folder) -> dict:
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        for name, t in load_file(file).items():
            found[name] = t
    return found


def assert_equal_files(a, b):
    a, b = tensors_of(a), tensors_of(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_are_theirs_both_ways_and_a_round_trip_is_bit_identical(
    theirs, variant, tmp_path
):
    model, folder = theirs(variant)
    if variant == "bf16":
        dtype = torch.bfloat16
    else:
        dtype = torch.float32
    ours, _ = hf.load_hf_model(folder, dtype=torch.float32)  # as in training
    equals_transformers(ours, model, tmp_path)
    as_in_the_files, _ = hf.load_hf_model(folder)
    assert {p.dtype for p in as_in_the_files.parameters()} == {dtype}
    hf.save_hf(ours, str(tmp_path / "out"), dtype, max_shard_gb=6e-5 if variant == "sharded" else 5)
    assert_equal_files(folder, tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(back) is type(model)
    tokens = random_tokens(2, 40)
    torch.testing.assert_close(back(tokens).logits, ours(tokens), atol=5e-5, rtol=0)
    # config.json, in the spelling of transformers 4, says the same to us and to transformers 5
    assert hf.read_hf_config(str(tmp_path / "out")) == ours.config
    same = {}
    for k, v in model.config.to_dict().items():
        if k not in ("dtype", "use_cache", "_name_or_path", "pad_token_id"):
            same[k] = v
    assert same.items() <= back.config.to_dict().items()
    # and not 2, the default
    assert back.config.eos_token_id is None
    assert not back.generation_config.eos_token_id


def test_files_have_at_most_max_shard_gb_and_transformers_reads_which_is_where(theirs, tmp_path):
    ours, _ = hf.load_hf_model(theirs("plain")[1])
    hf.save_hf(ours, str(tmp_path / "out"), torch.float32, max_shard_gb=3e-5)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = 0
    for file in (tmp_path / "out").glob("*.safetensors"):
        found = load_file(file)
        assert {name for name, where in index["weight_map"].items() if where == file.name} == set(
            found
        )
        size = sum(t.numel() * t.element_size() for t in found.values())
        assert size <= 30000
        total += size
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 8
    assert index["metadata"]["total_size"] == total == sum(4 * p.numel() for p in ours.parameters())


def test_bf16_and_float16_exports_round_once(theirs, tmp_path):
    ours, _ = hf.load_hf_model(theirs("plain")[1])
    for dtype in (torch.bfloat16, torch.float16):
        hf.save_hf(ours, str(tmp_path / str(dtype)), dtype)
        for fqn, name in ours.hf_keys().items():
            assert torch.equal(
                tensors_of(tmp_path / str(dtype))[name], ours.get_parameter(fqn).to(dtype)
            )
    with torch.no_grad():
        ours.blocks["1"].ffn.w1.weight[0, 0] = 7e4
    refuses(
        "blocks.1.ffn.w1.weight has numbers beyond float16",
        hf.save_hf,
        ours,
        str(tmp_path / "out"),
        torch.float16,
    )
    assert sorted(os.listdir(tmp_path)) == ["torch.bfloat16", "torch.float16"]


def test_an_export_overwrites_nothing_and_a_failed_one_leaves_nothing(
    theirs, tmp_path, monkeypatch
):
    ours, _ = hf.load_hf_model(theirs("plain")[1])
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    refuses(
        "used is there already and not an empty folder", hf.save_hf, ours, str(tmp_path / "used")
    )
    (tmp_path / "empty").mkdir()
    hf.save_hf(ours, str(tmp_path / "empty"))
    monkeypatch.setattr(
        hf_write, "write_safetensors", Mock(side_effect=OSError(28, "No space left on device"))
    )
    refuses("No space left", hf.save_hf, ours, str(tmp_path / "new"))
    assert sorted(os.listdir(tmp_path)) == ["empty", "used"]
    assert os.listdir(tmp_path / "used") == ["notes.txt"]


# ---------------------------------------------------------------- any layout


def import_and_export(flags, folder, out):
    """On one rank of a layout: (whole weights, bytes read, bytes of the rank's shards, peak of
    allocated memory)."""
    read, original = [], hf.HFTensors.read

    def counted(self, name, offset, shape):
        part = original(self, name, offset, shape)
        read.append((name, part.numel() * part.element_size()))
        return part

    stages, _ = build(hf.read_hf_config(folder), flags, n=8, local_batch_size=4)
    shards = [local_tensor(p) for s in stages for p in s.parameters()]
    hf.HFTensors.read = counted
    with Watch() as memory:
        change, files = (
            memory.change,
            {file.stat().st_size for file in Path(folder).glob("*.safetensors")},
        )
        # a mapped file takes no memory
        memory.change = lambda key, size: None if size in files else change(key, size)
        hf.load_hf(stages, folder)
    hf.HFTensors.read = original
    weights = {fqn: full(p) for s in stages for fqn, p in s.named_parameters()}
    hf.save_hf(stages, out, torch.float32, max_shard_gb=6e-5)
    return weights, read, sum(t.numel() * t.element_size() for t in shards), memory.peak


@pytest.mark.parametrize(
    "row",
    [
        *as_parameters(layouts_of("files")),
        *as_parameters(layouts_of("files, slow"), pytest.mark.slow),
    ],
)
def test_every_layout_reads_and_writes_what_one_process_does(theirs, tmp_path, row):
    n, flags, problem = row
    folder = theirs(problem["variant"])[1]
    plain, _ = hf.load_hf_model(folder)
    results = pool(n).run(import_and_export, flags, folder, str(tmp_path / "out"))
    expected = dict(plain.named_parameters())
    assert {fqn for weights, *_ in results for fqn in weights} == set(expected)
    largest = max(4 * math.prod(t.shape) for t in tensors_of(folder).values())
    for weights, read, shards, peak in results:
        for fqn, weight in weights.items():
            assert torch.equal(weight, expected[fqn]), fqn
        assert sum(size for _, size in read) == shards  # the rank's slices, and nothing else
        assert peak <= largest
    if flags.get("ep"):  # a rank opens only the rank's experts
        groups = [{name for name, _ in read if ".experts." in name} for _, read, *_ in results]
        assert len(set.union(*groups)) == n * len(groups[0])
    assert_equal_files(folder, tmp_path / "out")
    hf.save_hf(plain, str(tmp_path / "plain"), torch.float32, max_shard_gb=6e-5)
    for name in os.listdir(tmp_path / "plain"):
        if name.endswith("config.json"):
            assert (tmp_path / "plain" / name).read_bytes() == (
                tmp_path / "out" / name
            ).read_bytes()


def memory_of_export(model_config, out):
    stages, _ = build(model_config, dict(tp=2), n=8, local_batch_size=4)
    with Watch() as memory:
        hf.save_hf(stages, out, torch.float32, max_shard_gb=0.02)
    return memory.peak


@pytest.mark.slow
def test_no_rank_holds_more_than_two_files_of_an_export(tmp_path):
    model_config = config(dim=512, n_layers=5, ffn_dim=3072, vocab_size=4096, head_dim=64)
    largest = 4 * 4096 * 512
    assert sum(4 * p.numel() for p in Llama3(model_config).parameters()) > 14 * largest
    for peak in pool(4).run(memory_of_export, model_config, str(tmp_path / "out")):
        # a file is written, another collected; gathering takes up to two tensors more
        assert peak <= 2 * 0.02e9 + 2 * largest


def fail_to_import(flags, folder, out):
    stages, _ = build(config(), flags, n=8, local_batch_size=4)
    before = {fqn: full(p) for s in stages for fqn, p in s.named_parameters()}
    errors = refuses("", hf.load_hf, stages, folder), refuses("", hf.save_hf, stages, out)
    unchanged = all(
        torch.equal(before[fqn], full(p)) for s in stages for fqn, p in s.named_parameters()
    )
    return errors, unchanged


def test_what_one_rank_finds_all_ranks_raise_before_a_weight_is_touched(theirs, tmp_path):
    found = tensors_of(theirs("plain")[1])
    found["model.norm.weight"] = torch.ones(31)  # the last stage's business
    (tmp_path / "bad").mkdir()
    save_file(found, tmp_path / "bad" / "model.safetensors")
    (tmp_path / "file").write_text("in the way")
    for errors, unchanged in pool(2).run(
        fail_to_import, dict(pp=2), str(tmp_path / "bad"), str(tmp_path / "file")
    ):
        assert unchanged
        assert "rank 1: " in errors[0]
        assert "model.norm.weight is (31,) there, (32,) here" in errors[0]
        assert "file is there already" in errors[1]


# -------------------------------------- the table: stacks of experts, fp8, optional layers, buffers


class Toy(nn.Module):
    """A small model with the table entries of Qwen3-MoE and DeepSeek: a stack of experts, a buffer,
    an optional layer."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.config = SimpleNamespace(
            tie_embeddings=False, max_seq_len=8, to_hf=lambda: {"model_type": "toy"}
        )
        self.proj = nn.Parameter(torch.randn(300, 200, device=device))
        self.experts = nn.Parameter(torch.randn(8, 6, 4, device=device))
        self.mtp = nn.Parameter(torch.randn(3, device=device))
        self.register_buffer("bias", torch.randn(8, device=device))
        self.register_buffer("ours_only", torch.zeros(2, device=device))

    def hf_keys(self):
        experts = [f"model.experts.{e}.weight" for e in range(8)]
        return {
            "proj": "model.proj.weight",
            "experts": experts,
            "mtp": "model.layers.61.weight",
            "bias": "model.bias",
        }

    def hf_optional(self):
        return ["model.layers.61.*"]


def toy_files(folder, **changes):
    """Files of a Toy, one per tensor, with an index."""
    g = torch.Generator().manual_seed(2)
    found = {
        "model.proj.weight": torch.randn(300, 200, generator=g),
        "model.bias": torch.randn(8, generator=g),
        "model.layers.61.weight": torch.ones(3),
    }
    found |= {f"model.experts.{e}.weight": torch.randn(6, 4, generator=g) for e in range(8)}
    found = {name: t for name, t in {**found, **changes}.items() if t is not None}
    write_indexed(folder, found)
    return found


def test_stacks_and_buffers(tmp_path, capsys):
    found = toy_files(tmp_path / "in")
    toy = Toy()
    toy.ours_only += 1
    assert hf.load_hf(toy, str(tmp_path / "in")) == []
    for e in range(8):
        assert torch.equal(toy.experts[e], found[f"model.experts.{e}.weight"])
    assert torch.equal(toy.bias, found["model.bias"])
    assert not toy.ours_only.any()
    hf.save_hf(toy, str(tmp_path / "out"), torch.bfloat16, max_shard_gb=1e-7)
    written = tensors_of(tmp_path / "out")
    assert written.keys() == found.keys()
    for name, t in found.items():  # a buffer keeps the dtype
        assert torch.equal(written[name], t if name == "model.bias" else t.bfloat16())
    toy.ours_only += 1
    hf.save_hf(toy, str(tmp_path / "out2"))
    assert "has no place for ours_only" in capsys.readouterr().out


def test_fp8_blocks_against_a_loop(tmp_path):
    g = torch.Generator().manual_seed(3)
    # 3 x 2 blocks, the last ones partial
    codes = (torch.randn(300, 200, generator=g) * 50).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, generator=g) * 1e-3
    toy_files(tmp_path, **{"model.proj.weight": codes, "model.proj.weight_scale_inv": scale})
    expected = torch.empty(300, 200)
    for i in range(300):
        for j in range(200):
            expected[i, j] = codes[i, j].float() * scale[i // 128, j // 128]
    toy = Toy()
    hf.load_hf(toy, str(tmp_path))
    assert torch.equal(toy.proj, expected)
    source = hf.HFTensors(str(tmp_path))  # slices begin and end anywhere, as FSDP's and TP's do
    for r, c, rows, columns in [
        (0, 0, 300, 200),
        (5, 7, 1, 1),
        (100, 100, 100, 100),
        (128, 0, 128, 128),
        (127, 127, 2, 2),
        (256, 128, 44, 72),
        (299, 199, 1, 1),
        (1, 0, 299, 200),
        (0, 130, 300, 3),
    ]:
        part = source.read("model.proj.weight", (r, c), (rows, columns))
        assert torch.equal(part, expected[r : r + rows, c : c + columns])
    toy.bfloat16()  # dequantised in fp32, then rounded once
    hf.load_hf(toy, str(tmp_path))
    assert torch.equal(toy.proj, expected.bfloat16())


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model.proj.weight": torch.zeros(300, 200, dtype=torch.float8_e4m3fn)},
            "model.proj.weight is F8_E4M3, which is no F32",
        ),
        (
            {"model.proj.weight_scale_inv": torch.ones(3, 2)},
            "model.proj.weight is F32, which is no F32 .* with a",
        ),
        (
            {
                "model.proj.weight": torch.zeros(300, 200, dtype=torch.float8_e4m3fn),
                "model.proj.weight_scale_inv": torch.ones(3, 3),
            },
            "model.proj.weight_scale_inv is .3, 3. there, and should be .3, 2. floats",
        ),
        (
            {"model.experts.5.weight": torch.zeros(4, 6)},
            "model.experts.5.weight is .4, 6. there, .6, 4. here",
        ),
        (
            {f"model.experts.{e}.weight": None for e in range(8)} | {"odd": torch.ones(1)},
            "missing: model.experts.0.weight, model.experts.1.weight, model.experts.2.weight and "
            "5 more; unknown: odd",
        ),
        ({"other_scale_inv": torch.ones(1)}, "unknown: other_scale_inv"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, changes, message):
    toy_files(tmp_path, **changes)
    toy = Toy()
    before = toy.proj.clone()
    refuses(message, hf.load_hf, toy, str(tmp_path))
    assert torch.equal(toy.proj, before)


def test_a_parameter_without_a_name_is_refused_both_ways(tmp_path):
    toy_files(tmp_path / "in")
    toy = Toy()
    toy.extra = nn.Parameter(torch.ones(1))
    refuses("no name for extra", hf.load_hf, toy, str(tmp_path / "in"))
    refuses("differ in extra", hf.save_hf, toy, str(tmp_path / "out"))


def test_a_head_beside_a_tied_embedding_and_tables_of_frequencies(theirs, tmp_path):
    found = tensors_of(theirs("tied")[1])
    assert "lm_head.weight" not in found
    # in files of 2023
    found |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(4)}
    ours, _ = hf.load_hf_model(theirs("tied")[1])
    save_file(
        found | {"lm_head.weight": found["model.embed_tokens.weight"].clone()},
        tmp_path / "model.safetensors",
    )
    hf.load_hf(ours, str(tmp_path))
    save_file(
        found | {"lm_head.weight": found["model.embed_tokens.weight"] + 1e-3},
        tmp_path / "model.safetensors",
    )
    refuses(
        "lm_head.weight is not equal to model.embed_tokens.weight, but this",
        hf.load_hf,
        ours,
        str(tmp_path),
    )


def test_excluded_parameters_keep_their_values(theirs, tmp_path):
    found = tensors_of(theirs("plain")[1])
    del found["lm_head.weight"]
    save_file(found, tmp_path / "model.safetensors")
    ours = Llama3(hf.read_hf_config(theirs("plain")[1]))
    nn.init.constant_(ours.head.weight, 3.0)
    refuses("missing: lm_head.weight", hf.load_hf, ours, str(tmp_path))
    hf.load_hf(ours, str(tmp_path), exclude=["head"])
    assert (ours.head.weight == 3).all()
    assert torch.equal(ours.norm.weight, found["model.norm.weight"])


# ---------------------------------------------------------------- config.json against the flavor


def write_config(folder, **changes):
    saved = FLAVORS["debug"].to_hf() | changes
    Path(folder, "config.json").write_text(json.dumps(saved))
    return str(folder)


def test_every_disagreement_is_named_with_both_values(tmp_path):
    other = dict(
        hidden_size=512,
        num_hidden_layers=7,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=999,
        vocab_size=1000,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_scaling={name: value for name, value in SCALED.items() if name != "rope_theta"},
    )
    ours, theirs = FLAVORS["debug"], Llama3Config.from_hf(FLAVORS["debug"].to_hf() | other)
    all_others = replace(ours, qkv_bias=True, sliding_window=8)
    said = refuses(".", hf.check_hf_config, all_others, write_config(tmp_path, **other))
    for f in fields(ours):
        assert (
            f"{f.name} is {getattr(theirs, f.name)} there, {getattr(all_others, f.name)} here"
            in said
        )
    assert "add a flavor with its values to FLAVORS in models/llama3.py" in said
    for name, value in other.items():  # and each field alone
        said = refuses(
            "is of another model", hf.check_hf_config, ours, write_config(tmp_path, **{name: value})
        )
        assert said.count(" there, ") == 1


def test_the_error_says_which_flavor_it_is_or_what_to_type(tmp_path):
    saved = FLAVORS["1B"].to_hf()
    refuses(
        "n_layers is 16 there, .* use --flavor 1B and no --model_args",
        hf.check_hf_config,
        FLAVORS["debug"],
        write_config(tmp_path, **saved),
    )
    folder = write_config(tmp_path, **saved | dict(max_position_embeddings=8192, rms_norm_eps=2e-5))
    said = refuses("--flavor 1B and --model_args", hf.check_hf_config, FLAVORS["1B"], folder)
    assert said.endswith('--model_args "norm_eps=2e-05,max_seq_len=8192"')
    for changes in dict(max_position_embeddings=8192, rms_norm_eps=2e-5), dict(rope_scaling=None):
        folder = write_config(tmp_path, **saved | changes)
        args = (
            refuses(".", hf.check_hf_config, FLAVORS["1B"], folder)
            .split('--model_args "')[1]
            .rstrip('"')
        )
        # typed, the flags are accepted
        hf.check_hf_config(override_fields(FLAVORS["1B"], args, "--model_args"), folder)
    hf.check_hf_config(FLAVORS["1B"], write_config(tmp_path, **saved))


@pytest.mark.parametrize(
    "content, message",
    [  # of config.json; a dict: what is changed
        (dict(model_type="mamba"), "model_type is 'mamba'; there is a model for llama"),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (dict(num_attention_heads="8"), "TypeError"),
        (dict(num_hidden_layers=True), "n_layers would be 'True', not int"),
        (dict(num_hidden_layers=1000), "1000 layers, but the files hold 39 tensors"),
        (
            dict(vocab_size=2**40),
            "vocab_size would be 1099511627776, which is absurd: need 0 to 2147483647",
        ),
        (dict(rms_norm_eps="1e-5"), "norm_eps would be '1e-5', not float"),
        (dict(rms_norm_eps=math.nan), "norm_eps would be 'nan', not float"),
        (dict(rms_norm_eps=-1.0), "norm_eps would be -1.0, need 0 or more"),
        (dict(rope_scaling=dict(SCALED, factor=[2])), "rope_scaling"),
        (dict(num_attention_heads=0), "config.json"),
        (b'{"a":' * 100000 + b"1" + b"}" * 100000, "not JSON that can be read: RecursionError"),
        (b"{" + b" " * (1 << 20) + b"}", "1,048,578 bytes, which is absurd"),
        (b"[1]", "holds a JSON list, not an object"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_config_that_is_none(theirs, tmp_path, content, message):
    file = Path(shutil.copytree(theirs("plain")[1], tmp_path / "in"), "config.json")
    if isinstance(content, dict):
        saved = json.loads(file.read_text()) | content
        if "rope_scaling" in content:
            del saved["rope_parameters"]
        content = json.dumps(saved).encode()
    file.write_bytes(content)
    said = refuses(".", hf.load_hf_model, str(tmp_path / "in"))
    assert message in said
    assert str(tmp_path / "in") in said


# ---------------------------------------------------------------- files of strangers


def raw_safetensors(header, data=b"", claimed=None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if claimed is None else claimed).to_bytes(8, "little") + text + data


def one(start, end, shape=(2,)):
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content, message",
    [
        (raw_safetensors({}, claimed=2**63), "header too large"),
        (raw_safetensors({"a": one(0, 8), "b": one(4, 12)}, b"\0" * 12), "offset"),  # overlap
        (raw_safetensors({"a": one(0, 800)}, b"\0" * 8), "r"),  # beyond the end
        (b"\x80\x04", "no safetensors file"),
    ],
)
def test_safetensors_that_lie(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    said = refuses(message, hf.HFTensors, str(tmp_path))
    assert str(tmp_path / "model.safetensors") in said


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        ".hidden",
        "a\\b",
        "a\0b",
        "link.safetensors",
        "missing.safetensors",
        "folder",
    ],
)
def test_an_index_leads_nowhere_else(theirs, tmp_path, file):
    """In every case a good file lies at the end of the path, and is not opened."""
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "folder").mkdir()
    good = Path(theirs("plain")[1], "model.safetensors")
    for path in (
        tmp_path / "secret.safetensors",
        folder / "sub" / "model.safetensors",
        folder / "a\\b",
        folder / ".hidden",
    ):
        shutil.copy(good, path)
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    names = list(tensors_of(theirs("plain")[1]))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, file)})
    )
    model = Llama3(hf.read_hf_config(theirs("plain")[1]))
    said = refuses(".", hf.load_hf, model, str(folder))
    assert str(folder) in said
    wanted = {
        "missing.safetensors": "is missing",
        "folder": "is no plain file",
        "link.safetensors": "leads out of the folder",
    }
    assert wanted.get(file, "is not the name of a file in this folder") in said


def test_links_of_a_hugging_face_cache(theirs, tmp_path):
    blobs, snapshot = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b" / "snapshots" / "0123abcd",
    )
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(Path(theirs("sharded")[1]).iterdir()):
        shutil.copy(file, blobs / f"{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    model, _ = hf.load_hf_model(str(snapshot))
    (tmp_path / "shortcut").symlink_to(snapshot)  # the folder itself may be reached in any way
    hf.load_hf(model, str(tmp_path / "shortcut"))
    file = next(snapshot.glob("*.safetensors"))
    shutil.move(blobs, tmp_path / "models--a--b" / "elsewhere")
    for link in snapshot.iterdir():
        target = "../../elsewhere/" + os.path.basename(os.readlink(link))
        link.unlink()
        link.symlink_to(target)
    refuses("leads out of the folder", hf.load_hf, model, str(snapshot))
    assert file.is_file()


def test_only_the_files_of_the_index_are_read(theirs, tmp_path):
    shutil.copytree(theirs("sharded")[1], tmp_path / "in")
    (tmp_path / "in" / "zz.safetensors").write_bytes(b"broken, and nobody's business")
    hf.load_hf_model(str(tmp_path / "in"))
    index = json.loads((tmp_path / "in" / "model.safetensors.index.json").read_text())
    a = next(iter(index["weight_map"]))
    index["weight_map"][a] = next(
        file for file in index["weight_map"].values() if file != index["weight_map"][a]
    )
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(
        f"the index says that {a} is in .*, but it is not", hf.load_hf_model, str(tmp_path / "in")
    )
    (tmp_path / "in" / "model.safetensors.index.json").write_text("{}")
    refuses(
        f"{tmp_path}/in/model.safetensors.index.json has no weight_map",
        hf.load_hf_model,
        str(tmp_path / "in"),
    )


def test_pickles_are_refused_with_the_reason(tmp_path):
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert is_hf_folder(str(tmp_path))
    refuses("pickles, which can run any code", hf.load_hf_model, str(tmp_path))


# --------------------------------------------------------------- tokenizers, text, the command line


@pytest.fixture
def chat_folder(tmp_path):
    """A folder like that of an instruct model: the tokenizer puts a beginning-of-text token in
    front, and has chat markers."""
    folder = chats.chat_folder(tmp_path / "chat", "llama3")
    random_model("Llama", TINY | dict(vocab_size=400, max_position_embeddings=256)).save_pretrained(
        folder
    )
    return folder


def greedy(folder, text, capsys, *flags, n=24):
    capsys.readouterr()
    argv = [
        "--checkpoint",
        str(folder),
        "--prompt",
        text,
        "--temperature",
        "0",
        "--max_new_tokens",
        str(n),
        "--device",
        "cpu",
    ]
    generate.main([*argv, *flags])
    return capsys.readouterr().out.removesuffix("\n")


def test_greedy_text_is_that_of_transformers(chat_folder, capsys):
    model = transformers.AutoModelForCausalLM.from_pretrained(chat_folder)
    theirs = transformers.AutoTokenizer.from_pretrained(chat_folder)
    options = dict(max_new_tokens=24, do_sample=False, eos_token_id=4, pad_token_id=4)
    ids = model.generate(**theirs("def f", return_tensors="pt"), **options)
    assert greedy(chat_folder, "def f", capsys) == printable(
        theirs.decode(ids[0], skip_special_tokens=True)
    )
    # and the same as a chat: the template's markers are tokens, a user's markers are text
    messages = [{"role": "user", "content": "  What is <|eot_id|>?"}]
    render = open_chat(str(chat_folder), ChatConfig(chat=True))
    assert render("  What is <|eot_id|>?") == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ids = theirs.apply_chat_template(
        [{"role": "user", "content": "x + 1"}], add_generation_prompt=True, return_tensors="pt"
    )
    if not isinstance(ids, torch.Tensor):
        ids = ids["input_ids"]
    new = model.generate(ids, **options)[0, ids.shape[1] :]
    assert greedy(chat_folder, "x + 1", capsys, "--chat") == printable(
        theirs.decode(new, skip_special_tokens=True)
    )


def test_chat_templates_in_a_file_of_their_own_and_beside_the_tokenizer_alone_and_by_name(
    chat_folder,
):
    file, own = chat_folder / "tokenizer_config.json", chat_folder / "chat_template.jinja"
    rules, template, chat = json.loads(file.read_text()), own.read_text(), ChatConfig(chat=True)
    expected = open_chat(str(chat_folder), chat)("hello")
    own.unlink()
    for written in (
        template,
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}],
    ):
        file.write_text(json.dumps(rules | {"chat_template": written}))
        assert open_chat(str(chat_folder), chat)("hello") == expected


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{{ 1/0 }}", "division"),
        ("{% if %}", "chat template of .* fails"),
    ],
)
def test_chat_templates_of_strangers(chat_folder, template, message, capsys):
    (chat_folder / "chat_template.jinja").write_text(template)
    assert str(chat_folder) in stops(capsys, greedy, chat_folder, "hello", capsys, "--chat")
    refuses(message, lambda: open_chat(str(chat_folder), ChatConfig(chat=True))("hello"))


def with_id(file, number: int):
    rules = json.loads(file.read_text())
    rules["model"]["vocab"]["zz"] = number
    file.write_text(json.dumps(rules))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda file: with_id(file, 2**32 - 1), "its ids go up to 4294967295"),
        (
            lambda file: with_id(file, 400),
            "its ids go up to 400, but config.json says that vocab_size is 400",
        ),
        (lambda file: file.write_bytes(b"[" * 1_000_000), "not a tokenizer.json"),
        # a sparse file, which nobody may read
        (lambda file: os.truncate(file, 1 << 27), "134,217,728 bytes, which is absurd"),
    ],
)
def test_tokenizers_that_are_none(chat_folder, damage, message):
    damage(chat_folder / "tokenizer.json")
    said = refuses(message, hf.load_hf_model, str(chat_folder))
    assert str(chat_folder / "tokenizer.json") in said


def test_a_tokenizer_that_panics(chat_folder, capsys):
    """If a regular expression gives up, the tokenizers library raises a BaseException, not caught
    by `except Exception`."""
    rules = json.loads((chat_folder / "tokenizer.json").read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(x+x+)+y"},
        "behavior": "Isolated",
        "invert": False,
    }
    rules["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, rules["pre_tokenizer"]]}
    (chat_folder / "tokenizer.json").write_text(json.dumps(rules))
    assert "the tokenizer fails on 'xxx" in stops(capsys, greedy, chat_folder, "x" * 60, capsys)


def test_from_hf_and_to_hf(chat_folder, tmp_path, capsys):
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert checkpoint_commands.main(["from_hf", str(chat_folder), run]) == 0
    verify(f"{run}/checkpoints/step-0")
    capsys.readouterr()
    checkpoint_commands.main(["ls", run])
    assert "complete (bytes not read), only the weights" in capsys.readouterr().out
    model, state = load_model(run)
    assert state == {"step": 0, "samples": 0, "tokens": 0, "bos": True}
    tokens = random_tokens(2, 40)
    assert torch.equal(model(tokens), hf.load_hf_model(str(chat_folder))[0](tokens))
    assert (
        checkpoint_commands.main(
            ["to_hf", run, out, "--dtype", "float32", "--max_shard_gb", "0.00005"]
        )
        == 0
    )
    assert_equal_files(chat_folder, out)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs("def f").input_ids[0] == 1  # begins as the tokenizer says
    assert theirs.eos_token == "<|eot_id|>"  # as in the first folder
    assert theirs.chat_template
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert exported.config.eos_token_id == exported.generation_config.eos_token_id == 4
    ids = exported.generate(**theirs("x", return_tensors="pt"), max_new_tokens=12, do_sample=False)
    assert greedy(out, "x", capsys, n=12) == printable(
        theirs.decode(ids[0], skip_special_tokens=True)
    )
    for argv in (
        ["from_hf", str(chat_folder), run],
        ["to_hf", run, out],
        ["to_hf", str(tmp_path / "nowhere"), out + "2"],
        ["from_hf", str(tmp_path), out + "2"],
    ):
        assert stops(capsys, checkpoint_commands.main, argv).startswith("error: ")
    stops(capsys, checkpoint_commands.main, ["to_hf", run, out + "2", "--dtype", "int8"])
    assert not os.path.exists(out + "2")


def test_the_files_beside_a_tokenizer_come_along(chat_folder, tmp_path):
    """Directly, and through a checkpoint of ours. A chat model may end answers in several ways."""
    (chat_folder / "chat_template.jinja").write_text("{{ messages }}")
    (chat_folder / "generation_config.json").write_text(
        '{"eos_token_id": [1, 2], "temperature": 0.6, "do_sample": true}'
    )
    model, tokenizer_file = hf.load_hf_model(str(chat_folder))
    hf.save_hf(model, str(tmp_path / "direct"), tokenizer_file=tokenizer_file)
    checkpoint_commands.from_hf(str(chat_folder), str(tmp_path / "run"))
    checkpoint_commands.to_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        for folder in ("direct", "out"):
            assert (tmp_path / folder / name).read_bytes() == (chat_folder / name).read_bytes()
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (theirs.eos_token_id, theirs.temperature, theirs.pad_token_id) == ([4, 1, 2], 0.6, None)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == [4, 1, 2]


def test_hugging_face_folders_are_told_from_ours(chat_folder, tmp_path, monkeypatch):
    checkpoint_commands.from_hf(str(chat_folder), str(tmp_path / "run"))
    assert is_hf_folder(str(chat_folder))
    monkeypatch.chdir(chat_folder)
    assert is_hf_folder(".")
    assert not is_hf_folder("")  # no --init_from at all
    for ours in (
        tmp_path / "run",
        tmp_path / "run" / "checkpoints" / "step-0",
        tmp_path / "nowhere",
        tmp_path,
    ):
        assert not is_hf_folder(str(ours))


# ---------------------------------------------------------------- a run that starts from a folder


def begin(flags, folder, out):
    stages, _ = build(hf.read_hf_config(folder), flags, n=8, local_batch_size=4)
    checkpoints = saver(
        stages, torch.optim.AdamW(stages[0].parameters()), out, source="", init_from=folder
    )
    assert checkpoints.load() is None  # step 0
    weights = {fqn: full(p) for s in stages for fqn, p in s.named_parameters()}
    with torch.no_grad():
        stages[0].norm.weight.zero_()
    assert checkpoints.save(1, {"step": 1})
    assert checkpoints.load() == {
        "step": 1,
        "bos": True,
    }  # now the run has a checkpoint: the folder is ignored
    checkpoints.close()
    return weights, full(stages[0].norm.weight)


def test_a_run_begins_with_a_folder(theirs, tmp_path):
    expected = dict(hf.load_hf_model(theirs("sharded")[1])[0].named_parameters())
    for weights, norm in pool(2).run(begin, dict(tp=2), theirs("sharded")[1], str(tmp_path)):
        for fqn, weight in weights.items():
            assert torch.equal(weight, expected[fqn])
        assert not norm.any()


DEEPSEEK = dict(
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=8,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
)


@pytest.mark.parametrize("kind, values", [("Qwen3Moe", VARIANTS["moe"]), ("DeepseekV3", DEEPSEEK)])
def test_experts_in_stacks(tmp_path, kind, values):
    """transformers 5 writes all experts of a layer in one tensor: the same weights, and slices of
    them, as FSDP and expert parallelism read them."""
    model, plain, stacks = (
        random_model(kind, TINY | values),
        tmp_path / "plain",
        tmp_path / "stacks",
    )
    model.save_pretrained(plain)
    model.save_pretrained(stacks, save_original_format=False, max_shard_size="60KB")
    names = tensors_of(stacks)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    ours, expected = hf.load_hf_model(str(stacks))[0], hf.load_hf_model(str(plain))[0]
    expected = expected.state_dict()
    for fqn, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[fqn]), fqn
    fused, single = hf.HFTensors(str(stacks)), hf.HFTensors(str(plain))
    fused.split_experts()
    assert fused.where.keys() == single.where.keys()
    for name in single.where:
        if ".experts.1." in name:
            part = name, (3, 2), (5, 7)
            assert torch.equal(fused.read(*part), single.read(*part)), name


def test_a_head_that_is_missing(theirs, tmp_path):
    """transformers takes the embedding then, and so may we, if config.json says so."""
    shutil.copytree(theirs("plain")[1], tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = tensors_of(tmp_path / "m")
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    said = refuses("missing: lm_head.weight", hf.load_hf_model, str(tmp_path / "m"))
    assert 'write "tie_word_embeddings": true into config.json' in said
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = hf.load_hf_model(str(tmp_path / "m"))[0]
    assert model.head is None


def test_a_tokenizer_in_another_format(chat_folder, tmp_path):
    """tokenizer.model alone: every program says how to make a tokenizer.json of it."""
    folder = tmp_path / "m"
    shutil.copytree(chat_folder, folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    command = f"T.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])' {folder}"
    for call in (
        lambda: generate.open_checkpoint(str(folder)),
        lambda: find_tokenizer(str(folder)),
        lambda: Text(str(folder)),
    ):
        said = refuses("tokenizer.model is there", call)
        assert command in said
        assert "\n" not in said
    (folder / "tokenizer.model").unlink()
    refuses("has no tokenizer.json: put one there", generate.open_checkpoint, str(folder))
