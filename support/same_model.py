"""Whether an export would be opened as another model than the one whose weights are in it.

config.json has one word for what a model computes, its model_type. Whoever opens the folder takes the weights and computes what
that word means to him. So an export is refused when our class computes something else than transformers' class for its
model_type: because it is a fork, or because a file of ours has been edited since transformers agreed with it.
"""
import importlib
import zlib
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from distributed.agree import reason, some
from distributed.layout import named_tensors

# model_type of a config.json -> (file, class) of our model. All else that differs between models is in their own files:
# Config.from_hf and to_hf for config.json; hf_keys(), the table of fqn -> name in the files, or for a stack of experts (E, ...)
# a list of E names; hf_optional(), where a model has it, lists patterns of names that files may lack or add (MTP).
HF_MODELS = {
    "llama": ("models.llama3", "Llama3"),
    "qwen3": ("models.qwen3", "Qwen3"),
    "qwen3_moe": ("models.qwen3", "Qwen3"),
    "deepseek_v2": ("models.deepseek", "DeepSeek"),
    "deepseek_v3": ("models.deepseek", "DeepSeek"),
    "gpt_oss": ("forks.gpt_oss", "GptOss"),
    "llama4_text": ("forks.llama4", "Llama4"),
}
# model_type -> (a small config that uses all that its models have, fingerprint() of it when transformers computed the same).
# After a change that is meant, and that transformers makes, too, renew the numbers:
# pytest -rP tests/test_same_model.py -k fingerprints prints them.
_sizes = dict(dim=64, n_layers=4, n_heads=4, ffn_dim=96, vocab_size=64, norm_eps=1e-5, rope_theta=10000.0, max_seq_len=4096)
_heads = dict(n_kv_heads=2, head_dim=24)
_yarn = dict(factor=4.0, beta_fast=32, beta_slow=1, mscale=0.7, mscale_all_dim=0.7, original_max_position_embeddings=128)
_scaled = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
_moe = dict(n_experts=8, top_k=3, moe_ffn_dim=32)
_latent = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24, n_dense_layers=1, n_shared_experts=2,
               n_groups=4, top_k_groups=2, route_scale=1.5, rope_scaling=_yarn, mtp_depth=0, rope_interleave=True)
FINGERPRINTS = {
    "llama": (
        dict(**_sizes, **_heads, rope_scaling=_scaled, tie_embeddings=False),
        [1.0432, 1.1491, 0.8989, 0.3487, -1.0618, 1.2537, 1.1721, 1.1458],
    ),
    "qwen3": (
        dict(**_sizes, **_heads, n_experts=0, top_k=0, moe_ffn_dim=0, norm_topk_prob=True, tie_embeddings=True),
        [-1.2343, 0.3434, -0.9563, 0.3434, 2.0470, 0.4702, -0.7220, -0.0444],
    ),
    "qwen3_moe": (
        dict(**_sizes, **_heads, **_moe, norm_topk_prob=True, tie_embeddings=False),
        [-0.2337, -0.4888, -0.4608, 2.3360, -1.7623, 1.2454, 0.5891, -0.1457],
    ),
    "deepseek_v2": (
        dict(**_sizes, **_moe, **_latent, q_lora_rank=0, score_func="softmax", norm_topk_prob=False, tie_embeddings=False),
        [0.6138, -1.7084, 0.1569, 0.4395, -0.5974, -0.8001, 1.7939, 0.5156],
    ),
    "deepseek_v3": (
        dict(**_sizes, **_moe, **_latent, q_lora_rank=32, score_func="sigmoid", norm_topk_prob=True, tie_embeddings=False),
        [-0.9220, -0.0777, -1.2205, -0.8603, -0.9314, 0.1322, -1.1875, -1.9856],
    ),
    "gpt_oss": (
        {name: n for name, n in _sizes.items() if name != "ffn_dim"} | _heads | _moe | dict(
            sliding_window=100, swiglu_limit=0.5, tie_embeddings=False,
            rope_scaling=dict(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=128)),
        [0.8590, -0.5875, 1.0601, 0.2759, 0.6915, -0.4100, 0.6542, -0.4234],
    ),
    "llama4_text": (
        _sizes | _heads | _moe | dict(
            top_k=1, rope_scaling=_scaled, tie_embeddings=False, moe_every=2, nope_every=4, chunk_size=100, floor_scale=64,
            attn_scale=0.3, qk_norm=True, temperature_tuning=True),
        [-0.0751, 1.3387, 1.7062, -0.1056, 1.1468, -0.8626, 0.1548, 0.5866],
    ),
}


class OtherModel(ValueError):
    """What config.json would say is not the model whose weights lie beside it."""


def classes_of(kind: str) -> tuple[type, type]:
    """(our model, its config) for a model_type."""
    module, name = HF_MODELS[kind]
    module = importlib.import_module(module)
    return getattr(module, name), getattr(module, f"{name}Config")


def check_same_model(Model, config):
    """Raises OtherModel where others would open an export of this class as another model.

    A fork, a class that is not in HF_MODELS for its model_type, must say that it computes the same function: its to_hf() then
    holds "nanotitan_model" and its own module and class. (A copy of the fork has another name, and must say so again.) Its
    names, shapes and logits are then compared with those of the class in HF_MODELS, and the logits of that class with what
    they were when transformers agreed.
    """
    own = f"{Model.__module__}.{Model.__name__}"
    if not hasattr(config, "to_hf") or not hasattr(Model, "hf_keys"):
        raise OtherModel(f"{own} cannot be exported: it needs hf_keys(), and to_hf() of its config")
    found = config.to_hf()
    kind = found.get("model_type")
    if kind not in HF_MODELS:
        return  # a model_type of its own, which nobody takes for another
    original = ".".join(HF_MODELS[kind])
    if own != original and found.get("nanotitan_model") != own:
        raise OtherModel(f"an export of {own} would be opened as {kind}, which is {original}; if transformers' {kind} "
                         f'computes the same function, let to_hf() of its config return "nanotitan_model": "{own}", too, else '
                         "a model_type of its own")
    check_fingerprint(kind)
    compare_with_theirs(Model, config, kind)


def compare_with_theirs(Model, config, kind: str):
    """Raises OtherModel where the class of HF_MODELS, built from this model's config.json, is another model."""
    (Original, Config), own, original = classes_of(kind), f"{Model.__module__}.{Model.__name__}", ".".join(HF_MODELS[kind])
    try:
        theirs = Config.from_hf(config.to_hf())
        if Model is Original and theirs == config:
            return  # the registered class itself, and config.json tells all of its config
        with torch.device("meta"):
            model, original_model = Model(config), Original(theirs)
    except ValueError as error:
        raise OtherModel(f"to_hf() of {own} tells of a {kind} that there is not: {error}") from None
    a, b = file_shapes(model), file_shapes(original_model)
    if odd := [f"{n} is {b.get(n, 'missing')} there, {a.get(n, 'missing')} here" for n in {**a, **b} if a.get(n) != b.get(n)]:
        raise OtherModel(f"an export of {own} would be opened as another {kind}: {some(odd)}")
    try:
        same = same_logits(Model, config, Original, Config, FINGERPRINTS[kind][0])
    except Exception as error:  # whatever a fork raises that is not made for small sizes
        raise OtherModel(f"{own} cannot be compared with {original} in small sizes: {reason(error)}") from None
    if not same:
        raise OtherModel(f"{own} with this config says that it computes the same function as {original} with what "
                         "config.json tells, but with the same weights its logits are others; let to_hf() return a model_type "
                         "of its own")


def file_shapes(model: nn.Module) -> dict[str, tuple]:
    """{name in the files: shape}, without what files may lack (MTP)."""
    keys, found, optional = model.hf_keys(), {}, getattr(model, "hf_optional", list)()
    for fqn, tensor in named_tensors(model).items():
        if fqn not in keys and isinstance(tensor, nn.Parameter):
            raise OtherModel(f"hf_keys() of {type(model).__name__} has no name for {fqn}")
        names = keys.get(fqn, [])
        found |= {names: tuple(tensor.shape)} if isinstance(names, str) else dict.fromkeys(names, tuple(tensor.shape[1:]))
    return {name: shape for name, shape in found.items() if not any(fnmatchcase(name, pattern) for pattern in optional)}


def same_logits(Model, config, Original, Config, sizes: dict) -> bool:
    """Whether two classes, or two configs, compute the same logits from the same weights, in the small sizes of FINGERPRINTS.

    Only what config.json carries is made small: a field that it does not tell of may be the very one that makes the difference.
    A size of 0 stays 0: such a model has no latent of queries, or no shared experts.
    """
    carried = Config.from_hf(config.to_hf())
    smaller = {name: n for name, n in sizes.items() if type(n) is int and n and getattr(config, name, 0)
               and getattr(config, name) == getattr(carried, name)}
    small = replace(config, **smaller)
    ours, theirs = small_logits(Model, small), small_logits(Original, Config.from_hf(small.to_hf()))
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.std().item())


@torch.no_grad()
def small_logits(Model, config) -> Tensor:
    """Logits (512, V) of a new model whose weights follow from their names in the files: the same on every machine.

    Always on the CPU in fp32; torch's random numbers, default dtype and device stay as they are. The weights are numpy's, which
    promises that the numbers of a RandomState never change; torch does not.
    """
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = Model(config).eval()
            keys = model.hf_keys()
            for fqn, tensor in named_tensors(model).items():
                noise = np.random.RandomState(zlib.crc32(str(keys.get(fqn, fqn)).encode())).standard_normal(tuple(tensor.shape))
                noise = torch.from_numpy(np.asarray(noise)).to(tensor.dtype)
                if not isinstance(tensor, nn.Parameter):  # the bias of experts: 0 where the files do not hold it
                    noise = 0.1 * noise if fqn in keys else 0 * noise
                else:
                    noise = noise / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 1 + 0.1 * noise
                tensor.copy_(noise)
            tokens = torch.from_numpy(np.random.RandomState(0).randint(config.vocab_size, size=(1, 512)))
            return model(tokens)[0].float()
    finally:
        torch.set_default_dtype(dtype)


def fingerprint(kind: str) -> list[float]:
    """Eight sums over all logits of our class for this model_type, with fixed random factors, in the sizes of FINGERPRINTS."""
    Model, Config = classes_of(kind)
    logits = small_logits(Model, Config(**FINGERPRINTS[kind][0])).double().flatten().numpy()
    return (np.random.RandomState(1).standard_normal((8, logits.size)) @ logits / logits.size**0.5).tolist()


def check_fingerprint(kind: str):
    """Raises OtherModel when our class for this model_type computes something else than it did when transformers agreed."""
    own, known = ".".join(HF_MODELS[kind]), FINGERPRINTS[kind][1]
    try:
        found = fingerprint(kind)
        differs = not np.allclose(found, known, rtol=0, atol=1e-3 * np.linalg.norm(known) / len(known) ** 0.5)
        why = "with fixed weights its logits are others than those of the original" if differs else ""
    except Exception as error:  # whatever an edit leads to
        why = f"it cannot be compared with the original: {reason(error)}"
    if why:
        raise OtherModel(f"an export of {own} would be opened as {kind}, but its file, or what that imports, has been changed: "
                         f"{why}; let to_hf() of its config return a model_type of its own, or, if transformers' {kind} "
                         'computes the same function, put the original back and your model into another file, whose to_hf() '
                         'says so with "nanotitan_model": see docs/fork_me.md')
