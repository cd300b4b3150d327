"""An export must not pose as another model: the model_type in config.json tells transformers how to compute with the weights.

Only code whose logits were compared with those of transformers is exported under a model_type of transformers.
"""
import ast
import hashlib
import importlib
from pathlib import Path

# model_type of a config.json -> (file, class) of our model. All other differences between models are in the models' files:
# Config.from_hf and to_hf for config.json; hf_keys(), the table of fqn -> name in the files, or for a stack of experts (E, ...)
# a list of E names; hf_optional(), in some models, lists patterns of optional names (MTP).
HF_MODELS = {
    "llama": ("models.llama3", "Llama3"),
    "qwen3": ("models.qwen3", "Qwen3"),
    "qwen3_moe": ("models.qwen3", "Qwen3"),
    "deepseek_v2": ("models.deepseek", "DeepSeek"),
    "deepseek_v3": ("models.deepseek", "DeepSeek"),
    "gpt_oss": ("forks.gpt_oss", "GptOss"),
    "llama4_text": ("forks.llama4", "Llama4"),
}
# file -> code_hash() of the code that computed the logits of transformers. After a change, run the comparisons again
# (test_models.py, test_hf.py, test_gpt_oss.py, test_llama4.py), then write the hash of test_same_model.py here.
COMPARED = {
    "forks.gpt_oss": "1fea6d60",
    "forks.llama4": "fbcadb26",
    "models.attention": "9703c06b",
    "models.deepseek": "55702127",
    "models.hf_config": "4e0f8198",
    "models.layers": "bc63d0f1",
    "models.llama3": "366d0c9b",
    "models.moe": "f932e583",
    "models.qwen3": "309b11a1",
}


def classes_of(kind: str) -> tuple[type, type]:
    """(our model, its config) for a model_type."""
    module, name = HF_MODELS[kind]
    module = importlib.import_module(module)
    return getattr(module, name), getattr(module, f"{name}Config")


def read_code(module: str) -> ast.Module:
    return ast.parse(Path(importlib.import_module(module).__file__).read_text(encoding="utf-8"))


def code_hash(module: str) -> str:
    """Eight hex digits of a file's code: equal after a change of comments, docstrings, line breaks or FLAVORS."""

    def as_lists(node):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return "docstring"
        if isinstance(node, list):
            return [*map(as_lists, node)]
        if not isinstance(node, ast.AST):
            return [type(node).__name__, node]
        fields = [value for _, value in ast.iter_fields(node) if value not in (None, [])]  # newer Pythons have more empty ones
        return [type(node).__name__, *map(as_lists, fields)]

    tree = read_code(module)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLAVORS")]
    return hashlib.sha256(repr(as_lists(tree)).encode()).hexdigest()[:8]


def check_same_model(Model, config):
    """Raises ValueError where transformers would open an export of this class as a model that computes something else."""
    own = f"{Model.__module__}.{Model.__name__}"
    if not hasattr(config, "to_hf") or not hasattr(Model, "hf_keys"):
        raise ValueError(f"{own} cannot be exported: it needs hf_keys(), and to_hf() of its config")
    config_json = config.to_hf()
    kind = config_json.get("model_type")
    if kind not in HF_MODELS:
        return  # a model_type that transformers does not know
    rename = f"transformers would open an export of {own} as {kind}; let to_hf() return another model_type"
    if own != ".".join(HF_MODELS[kind]):
        raise ValueError(f"{rename}, or, if {own} computes the same, give its file and class to HF_MODELS[{kind!r}] in "
                         "storage/same_model.py")
    imports = [node.module for node in ast.walk(read_code(Model.__module__)) if isinstance(node, ast.ImportFrom)]
    for module in sorted({Model.__module__, *imports} & COMPARED.keys()):
        if (found := code_hash(module)) != COMPARED[module]:
            raise ValueError(f"{rename}, because {module.replace('.', '/')}.py is not the code that was compared with "
                             f"transformers, or, if it computes the same, write {module!r}: {found!r} into COMPARED in "
                             "storage/same_model.py")
    if classes_of(kind)[1].from_hf(config_json) != config:
        raise ValueError(f"{rename}, because config.json cannot tell all of {config}")
