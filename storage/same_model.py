"""An export must not pose as another model: the model_type in config.json tells transformers how to compute with the weights.

Only code whose logits were compared with those of transformers is exported under a model_type of transformers.
"""
import ast
import hashlib
import importlib
import os
from pathlib import Path

from support.files import read_json

# storage/same_model.json: "models": model_type of a config.json -> file and class of our model. All other differences between
# models are in the models' files: Config.from_hf and to_hf for config.json; hf_keys(), the table of fqn -> name in the files,
# or for a stack of experts (E, ...) a list of E names; hf_optional(), in some models, lists patterns of optional names (MTP);
# hf_tensors(), in some forks, is the reader of the files.
# "compared": file -> code_hash() of the code that computed the logits of transformers. After a change, run the comparisons
# again (test_models.py, test_hf.py, test_gpt_oss.py, test_llama4.py), then write the hash here.
HF_MODELS, COMPARED = read_json(os.path.dirname(__file__), "same_model.json").values()


def config_class(kind: str) -> type:
    """The config of our model for a model_type."""
    module, name = HF_MODELS[kind]
    return getattr(importlib.import_module(module), f"{name}Config")


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
        raise ValueError(f"{rename}, or, if {own} computes the same, name it for {kind} in storage/same_model.json")
    imports = [node.module for node in ast.walk(read_code(Model.__module__)) if isinstance(node, ast.ImportFrom)]
    for module in sorted({Model.__module__, *imports} & COMPARED.keys()):
        if (found := code_hash(module)) != COMPARED[module]:
            raise ValueError(f"{rename}, because {module.replace('.', '/')}.py is not the code that was compared with "
                             f"transformers; if it computes the same, write {found} for {module} in storage/same_model.json")
    if config_class(kind).from_hf(config_json) != config:
        raise ValueError(f"{rename}, because config.json cannot tell all of {config}")
