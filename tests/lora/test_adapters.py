"""Files of a LoRA run, against lora/lora.py: peft and transformers read them."""

import json
import os
import shutil
from dataclasses import asdict, make_dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from adapters import ALL, LORA, MLA
from layouts import KINDS, MODELS, Flags, build, config, full, initialised, random_tokens
from pool import pool
from safetensors.torch import load_file
from saves import path, refuses

from checkpoint import CheckpointConfig, Checkpoints
from evaluate import read_checkpoint
from lora.lora import claim_adapters
from sft.base import load_base
from storage import commands as checkpoint_commands
from storage import hf
from storage.adapters import base_hash, is_adapter, lora_names, placed_sum
from storage.loading import load_weights
from storage.resume import check_run
from storage.saved import load_model

MOE = KINDS["qwen3_moe"]
DS = dict(model="deepseek", n_layers=2)
WITHOUT_FFN = MLA | dict(lora_on=MLA["lora_on"][:-1])
SMALL = {
    "llama3": (dict(n_layers=2), ALL),
    "qwen3": (MOE | dict(n_layers=2), LORA),
    "deepseek": (DS, WITHOUT_FFN),
    "deepseek v2": (
        KINDS["v2"] | dict(n_layers=2),
        MLA | dict(lora_on=("blocks.1.attn.wq", "wkv_b", "wo")),
    ),
}


def flags_of(lora: dict, **more):
    """The flags of a recipe that checkpoints read, a dataclass as a recipe's Config is."""
    rest = dict(out="nowhere", model_args="") | more
    values = vars(CheckpointConfig()) | vars(Flags(lora_alpha=6, **lora)) | rest
    fields = [(name, object, None) for name in values]
    return make_dataclass("Config", fields)(**values)


def identity_of(model_config, cfg) -> dict:
    Model = MODELS[type(model_config)]
    about = {"module": Model.__module__, "class": Model.__name__, **asdict(model_config)}
    if cfg.lora_rank:
        lora = {"lora": claim_adapters(cfg, Model, model_config)}
    else:
        lora = {}
    return {"model": about, "data": {}, "optimizer": {}} | lora


def open_run(out, modules, model_config, cfg, optimizers=()):
    base = None
    if cfg.lora_rank:
        base = partial(load_base, modules, cfg.init_from, lora_from=cfg.lora_from)
    rest = dict(
        identity=identity_of(model_config, cfg), config={"seed": 3}, source="", load_base=base
    )
    return Checkpoints(cfg, str(out), modules=modules, optimizer=list(optimizers), **rest)


def written_base(folder, problem, seed=3):
    """A plain model, and the Hugging Face folder with its weights."""
    model = initialised(config(**problem), Flags(), seed)
    hf.save_hf(model, str(folder), torch.float32)
    return model, str(folder)


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("kind", SMALL)
@torch.no_grad()
def test_merged_weights_and_the_adapter_give_the_same_logits_in_transformers_and_here(
    kind, tmp_path
):
    """From a run: to_hf merged, to_hf --adapter with peft and here, and load_model."""
    import peft  # not at the top: slow to import, and every worker of a pool would wait

    problem, lora = SMALL[kind]
    _, base = written_base(tmp_path / "base", problem)
    cfg = flags_of(lora, init_from=base, out=str(tmp_path / "run"))
    # other weights than the base's
    model = initialised(config(**problem), Flags(lora_alpha=6, **lora), 7)
    run = open_run(tmp_path / "run", [model], config(**problem), cfg)
    assert run.load() is None
    run.save(1, {"step": 1}, last=True)
    run.close()
    tokens = random_tokens(2, 24, seed=1)
    expected = model(tokens).float()
    for out, adapter in ("merged", False), ("adapter", True):
        checkpoint_commands.to_hf(
            str(tmp_path / "run"), str(tmp_path / out), "float32", adapter=adapter
        )
    assert (tmp_path / "adapter" / "tokenizer.json").exists() == (
        tmp_path / "merged" / "tokenizer.json"
    ).exists()
    found = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "adapter")
    assert sum(".lora_A." in name for name, _ in found.named_parameters()) == len(
        lora_names(model, cfg.lora_on)
    )
    merged, loaded = theirs(tmp_path / "merged"), load_model(str(tmp_path / "run"))[0]
    adapted = hf.load_hf_model(str(tmp_path / "adapter"))[0]
    for other in found(tokens).logits, merged(tokens).logits, loaded(tokens), adapted(tokens):
        torch.testing.assert_close(other, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_new_adapters_are_as_wide_as_those_of_peft():
    """The standard deviation of A, within 1 %."""
    import peft

    torch.manual_seed(0)
    linear = torch.nn.Sequential(torch.nn.Linear(512, 8))
    theirs = peft.get_peft_model(linear, peft.LoraConfig(r=128, target_modules=["0"]))
    wanted = theirs.base_model.model[0].lora_A["default"].weight
    ours = (
        initialised(config(dim=512, n_layers=1), Flags(lora_rank=128, lora_on=("wq",)), seed=0)
        .blocks["0"]
        .attn.wq.lora_a.weight
    )
    assert ours.shape == wanted.shape
    assert ours.std().item() == pytest.approx(wanted.std().item(), rel=0.01)


@torch.no_grad()
def test_an_adapter_of_peft_is_read_as_peft_merges_it(tmp_path):
    """Patterns and rsLoRA, on one process and with tp; what is no plain LoRA, or does not fit the
    base, is refused by name."""
    import peft

    problem, adapter, tokens = (
        dict(n_layers=2),
        str(tmp_path / "adapter"),
        random_tokens(2, 24, seed=1),
    )
    _, base = written_base(tmp_path / "base", problem)
    lora = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules="all-linear",
        init_lora_weights=False,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 20},
    )
    adapted = peft.get_peft_model(theirs(base), lora)
    adapted.save_pretrained(adapter)
    expected = adapted.merge_and_unload()(tokens).logits.log_softmax(-1)
    read = hf.load_hf_model(adapter)[0]
    torch.testing.assert_close(read(tokens).log_softmax(-1), expected, rtol=0, atol=1e-4)
    for weights in pool(2).run(merged_weights, adapter, problem, dict(tp=2)):
        for fqn, weight in weights.items():
            assert torch.allclose(weight, read.get_parameter(fqn), rtol=0, atol=1e-6)
    config_file = tmp_path / "adapter/adapter_config.json"
    about = json.loads(config_file.read_text())
    for change, words in [
        (
            dict(use_dora=True),
            "has use_dora True, and only plain LoRA is read here; merge_and_unload",
        ),
        (dict(alpha_pattern={"(q|k)_proj": 3}), "alpha_pattern {'.q|k._proj': 3}"),
        (
            dict(base_model_name_or_path=f"{adapter}/"),
            "adapter/', which is no folder of weights here",
        ),
        (
            dict(base_model_name_or_path="meta/Llama"),
            "is 'meta/Llama', which is no folder of weights here",
        ),
    ]:
        config_file.write_text(json.dumps(about | change))
        refuses(words, hf.load_hf_model, adapter)
    written_base(tmp_path / "other", dict(n_layers=1))
    config_file.write_text(
        json.dumps(about | dict(base_model_name_or_path=str(tmp_path / "other")))
    )
    refuses(
        "layers.1.mlp.down_proj.lora_A.weight, .*: no pair of LoRA matrices that fits a weight of "
        ".*/other",
        hf.load_hf_model,
        adapter,
    )


def test_what_peft_would_take_for_experts_is_not_exported_for_it(tmp_path):
    _, base = written_base(tmp_path / "base", DS)
    cfg = flags_of(MLA, init_from=base, out=str(tmp_path / "run"))
    run = open_run(
        tmp_path / "run", [initialised(config(**DS), Flags(**MLA), 3)], config(**DS), cfg
    )
    run.load()
    run.save(1, {}, last=True)
    with pytest.raises(
        ValueError, match="peft takes gate_proj for weights of experts; leave out --adapter"
    ):
        checkpoint_commands.to_hf(str(tmp_path / "run"), str(tmp_path / "out"), adapter=True)


# ---------------------------------------------------------------- a folder of peft as the start
TARGETS = {"llama3": "q_proj v_proj down_proj", "qwen3": "q_proj o_proj"}
ON = {"llama3": ["wq", "wv", "w2"], "qwen3": ["wq", "wo"]}


def peft_folder(base: str, folder, kind: str, **more):
    """A folder that peft writes, with random A and B, and the logits of transformers with it."""
    import peft

    settings = dict(r=4, lora_alpha=12, target_modules=TARGETS[kind].split()) | more
    torch.manual_seed(5)
    made = peft.get_peft_model(theirs(base), peft.LoraConfig(init_lora_weights=False, **settings))
    made.save_pretrained(folder)
    return made(random_tokens(2, 24, seed=1)).logits.detach()


def begun(out, base, adapter, problem, flags) -> tuple:
    """A new run with --lora_from in a layout, or its continuation: (every adapter, whether the run
    is new). Saves step 1 without a step of an optimizer."""
    flags = flags | dict(lora_alpha=12, lora_from=adapter)
    stages, _ = build(config(**problem), flags, 4, 1, 9)
    lora = {name: value for name, value in flags.items() if name in ("lora_rank", "lora_on")}
    cfg = flags_of(lora, lora_alpha=12, lora_from=adapter, init_from=base, out=str(out))
    run = open_run(out, stages, config(**problem), cfg)
    is_new = run.load() is None
    if is_new:
        run.save(1, {"step": 1}, last=True)
    run.close()
    adapters = {fqn: full(p) for s in stages for fqn, p in s.named_parameters() if is_adapter(fqn)}
    return adapters, is_new


@pytest.mark.parametrize(
    "kind, processes, layout",
    [
        ("llama3", 1, {}),
        ("qwen3", 1, {}),
        pytest.param("llama3", 2, dict(tp=2), marks=pytest.mark.slow),
        pytest.param("llama3", 2, dict(dp_shard=2), marks=pytest.mark.slow),
        pytest.param("qwen3", 2, dict(pp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_training_begins_with_the_adapters_of_peft(kind, processes, layout, tmp_path):
    """The first forward is that of transformers with peft, in every layout; the run goes on without
    the folder; its export is peft's folder to the bit."""
    problem = SMALL[kind][0]
    _, base = written_base(tmp_path / "base", problem)
    adapter, run = str(tmp_path / "adapter"), str(tmp_path / "run")
    expected = peft_folder(base, adapter, kind)
    flags = dict(lora_rank=4, lora_on=ON[kind]) | layout
    found = pool(processes).run(begun, run, base, adapter, problem, flags)
    model = load_model(run)[0]  # the frozen weights and the adapters of step 1
    with torch.no_grad():
        logits = model(random_tokens(2, 24, seed=1)).float()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    os.rename(adapter, adapter + "-gone")
    again = pool(processes).run(begun, run, base, adapter, problem, flags)
    for (first, is_new), (then, is_new_again) in zip(found, again, strict=True):
        assert (is_new, is_new_again) == (True, False)
        for fqn, t in first.items():
            assert torch.equal(t, then[fqn])
    checkpoint_commands.to_hf(run, str(tmp_path / "out"), "float32", adapter=True)
    files = []
    for folder in (tmp_path / "adapter-gone", tmp_path / "out"):
        files.append(load_file(folder / "adapter_model.safetensors"))
    assert files[0].keys() == files[1].keys()
    for name, t in files[0].items():
        assert torch.equal(t, files[1][name])


@pytest.mark.parametrize(
    "made, flags, words",
    [
        (
            {},
            dict(lora_rank=8),
            "has 6 adapters, and not the 6 of --lora_rank 8 --lora_alpha 12 --lora_on wq,wv,w2; "
            "give --lora_rank 4 --lora_alpha 12 --lora_on wq,wv,w2",
        ),
        ({}, dict(lora_alpha=32), "give --lora_rank 4 --lora_alpha 12 --lora_on wq,wv,w2"),
        ({}, dict(lora_on=["wq"]), "and not the 2 of .*--lora_on wq; give .* wq,wv,w2"),
        (
            dict(layers_to_transform=[1]),
            {},
            "give .* --lora_on blocks.1.attn.wq,blocks.1.attn.wv,blocks.1.ffn.w2",
        ),
        (dict(use_rslora=True), {}, "give --lora_rank 4 --lora_alpha 24 "),
        (dict(rank_pattern={"q_proj": 2}), {}, r"ranks \[2, 4\] .*; --init_from .* merges them"),
        (dict(use_dora=True), {}, "has use_dora True, and only plain LoRA is read here"),
        (dict(modules_to_save=["lm_head"]), {}, "lm_head.*no pair of LoRA matrices that fits the"),
    ],
    ids=str,
)
def test_flags_that_are_not_those_of_the_adapters_are_refused(made, flags, words, tmp_path):
    problem = dict(n_layers=2)
    _, base = written_base(tmp_path / "base", problem)
    adapter = str(tmp_path / "adapter")
    peft_folder(base, adapter, "llama3", **made)
    lora = dict(lora_rank=4, lora_on=ON["llama3"]) | flags
    alpha = lora.pop("lora_alpha", 12)
    cfg = flags_of(
        lora, lora_alpha=alpha, lora_from=adapter, init_from=base, out=str(tmp_path / "run")
    )
    refuses(words, identity_of, config(**problem), cfg)
    twice = flags_of(lora, lora_from=adapter, init_from=adapter + "/", out=str(tmp_path / "run"))
    refuses("is the folder of --init_from too", identity_of, config(**problem), twice)
    # a folder of ours
    ours = flags_of(lora, lora_from=base, init_from=base, out=str(tmp_path / "run"))
    refuses("has no adapter_config.json: give the folder", identity_of, config(**problem), ours)


# ---------------------------------------------------------------- in every layout
def saved_and_hashed(
    out, base, problem, flags, seed, step=None, alone=False, load_number=0
) -> tuple:
    """Load in a layout, then take a step with made-up gradients and save as step `step`, or export.
    Returns (hash of the base, {fqn: adapter}, saved tensors of the model that are no adapters).
    alone: without a process group and without an export."""
    if alone:
        stages = [initialised(config(**problem), Flags(**flags), seed)]
    else:
        stages, _ = build(config(**problem), flags, 4, 1, seed)
    trained = [p for s in stages for p in s.parameters() if p.requires_grad]
    if trained:
        optimizer = [torch.optim.AdamW(trained, lr=0.1)]
    else:
        optimizer = []
    run = open_run(
        out, stages, config(**problem), flags_of(LORA, init_from=base, out=str(out)), optimizer
    )
    run.load()
    if step:
        for p in trained:
            p.grad = torch.ones_like(p)
        for o in optimizer:
            o.step()
        run.save(step, {"step": step}, last=True)
    elif not alone:
        hf.save_hf(stages, f"{out}-merged-{load_number}", torch.float32)
    run.close()
    adapters = {fqn: full(p) for s in stages for fqn, p in s.named_parameters() if is_adapter(fqn)}
    return run.base["hash"], adapters, [key for key in run.run.named(True) if not is_adapter(key)]


def merged_weights(out, problem, flags) -> dict:
    """The weights of evaluate.py in a layout."""
    stages, _ = build(config(**problem), flags, 4, 1)
    load_weights(stages, str(out))
    return {fqn: full(p) for s in stages for fqn, p in s.named_parameters()}


ZBV = dict(pp=2, pp_schedule="ZBVZeroBubble")


@pytest.mark.parametrize(
    "layouts",
    [
        [(2, dict(tp=2)), (2, ZBV)],
        pytest.param(
            [(1, {}), (2, dict(dp_shard=2)), (2, ZBV), (4, dict(tp=2, dp_shard=2)), (2, {})],
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_a_run_goes_on_in_another_layout_with_the_same_base(layouts, tmp_path):
    problem = dict(tie_embeddings=True)
    model, base = written_base(tmp_path / "base", problem)
    before, hashes, six = {}, {base_hash([model])}, LORA | dict(lora_alpha=6)
    for step, (processes, flags) in enumerate(layouts, 1):
        found = pool(processes).run(
            saved_and_hashed, tmp_path / "run", base, problem, six | flags, step, step
        )
        again = pool(processes).run(
            saved_and_hashed, tmp_path / "run", base, problem, six | flags, 9, None, False, step
        )
        for (base_is, now, others), (also, loaded, _) in zip(found, again, strict=True):
            hashes |= {base_is, also}
            assert others == []
            assert now
            for fqn, t in now.items():
                assert torch.equal(t, loaded[fqn])
            assert not before or any(not torch.equal(t, before[fqn]) for fqn, t in now.items())
        merged, _ = hf.load_hf_model(f"{tmp_path}/run-merged-{step}")
        weights = dict(load_model(f"{tmp_path}/run")[0].named_parameters())
        for other in (
            dict(merged.named_parameters()),
            *pool(processes).run(merged_weights, tmp_path / "run", problem, flags),
        ):
            assert other.keys() <= weights.keys()
            for fqn, weight in other.items():
                torch.testing.assert_close(weight, weights[fqn], rtol=0, atol=1e-7)
        before = {fqn: t for _, now, _ in found for fqn, t in now.items()}
    assert len(hashes) == 1
    assert len(before) == 2 * 4 * 4


def test_a_checkpoint_holds_the_adapters_alone_and_knows_its_base(tmp_path):
    _, base = written_base(tmp_path / "base", {})
    _, other = written_base(tmp_path / "other", {}, seed=4)
    saved_and_hashed(tmp_path / "run", base, {}, LORA, 5, 1, True)
    table = json.loads((tmp_path / "run/checkpoints/step-1/tensors.json").read_text())["tensors"]
    names = {key.split(".", 1)[1] for key in table}
    for name in names:
        assert is_adapter(name)
    assert len(table) == 16 * 2 * (1 + 3)
    about = json.loads((tmp_path / "run/checkpoints/step-1/state.json").read_text())
    assert about["base"]["folder"] == base
    assert about["identity"]["lora"] == dict(rank=4, alpha=6, on=["wq*", "w[kv]*", "wo"])
    with pytest.raises(
        ValueError,
        match=f"holds adapters of {base}, whose hash was .* now; give the weights of the training",
    ):
        saved_and_hashed(tmp_path / "run", other, {}, LORA, 5, None, True)
    # a copy of the base is the base
    shutil.copytree(base, tmp_path / "copy")
    saved_and_hashed(tmp_path / "run", str(tmp_path / "copy"), {}, LORA, 5, None, True)
    os.rename(base, base + "-gone")
    refuses(
        f"holds adapters of {base}, which is gone; continue the run with",
        load_model,
        str(tmp_path / "run"),
    )
    # evaluate.py's first call
    refuses(f"holds adapters of {base}, which is gone", read_checkpoint, str(tmp_path / "run"))


def test_adapters_of_a_run_that_was_trained_on_since_are_told_their_step(tmp_path):
    """The adapters began with the newest checkpoint of then; the refusal names the step to give."""
    own, run = tmp_path / "own", tmp_path / "run"
    for step in (1, 2):
        stage = initialised(config(), Flags(), seed=step)
        base = open_run(
            own, [stage], config(), flags_of({}), [torch.optim.AdamW(stage.parameters())]
        )
        base.save(step, {}, last=True)
        base.close()
        if step == 1:
            first, _, _ = saved_and_hashed(run, str(own), {}, LORA, 5, 1, True)
    with pytest.raises(
        ValueError, match=f"holds adapters of {path(own, 1)}, whose hash was .*; give the weights"
    ):
        saved_and_hashed(run, str(own), {}, LORA, 5, None, True)
    assert saved_and_hashed(run, path(own, 1), {}, LORA, 5, None, True)[0] == first


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(lora_rank=8), "lora.rank is 8 but .* was trained with 4; use --out NEW"),
        (dict(lora_rank=0), "lora is not set but .* was trained with"),
        (
            dict(init_from="no/where"),
            "--init_from no/where is no folder; give the one of the frozen weights",
        ),
        (
            dict(init_from=""),
            "--lora_rank 4 trains beside weights that have learned; give --init_from",
        ),
        (dict(init_model_only=False), "--no-init_model_only with --lora_rank"),
        (dict(exclude_from_loading=["head"]), "--exclude_from_loading head with --lora_rank"),
        (dict(out="new", init_from="run"), "--init_from .*run holds adapters only; merge them"),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(change, words, tmp_path):
    _, base = written_base(tmp_path / "base", {})
    saved_and_hashed(tmp_path / "run", base, {}, LORA, 5, 1, True)
    flags = (
        dict(init_from=base, out=str(tmp_path / change.pop("out", "run")))
        | LORA
        | dict(lora_alpha=6)
    )
    flags |= {
        name: str(tmp_path / value) if value == "run" else value for name, value in change.items()
    }
    cfg = SimpleNamespace(
        **vars(CheckpointConfig()) | vars(Flags()) | flags | dict(tokenizer="", data="")
    )
    refuses(words, lambda: check_run(cfg.out, identity_of(config(), cfg), cfg))


def test_the_hash_of_a_base_is_that_of_its_bits_and_their_places():
    """Against a sum by hand; swapped numbers change the hash; an empty part adds nothing."""
    for shape in (77,), (300, 7), (3, 40000), (4, 70, 90), (0, 3):
        t = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        bits = t.bfloat16().view(torch.int16).flatten().tolist()
        assert (
            placed_sum(t) % 2**64 == sum(bit * place for place, bit in enumerate(bits, 1)) % 2**64
        )
    model = torch.nn.Linear(8, 8)
    before = base_hash([model])
    with torch.no_grad():
        model.weight[0, 0], model.weight[5, 3] = (
            model.weight[5, 3].clone(),
            model.weight[0, 0].clone(),
        )
    exchanged = base_hash([model])
    assert exchanged != before
    assert base_hash([model.bfloat16()]) == exchanged
