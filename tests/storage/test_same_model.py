"""An export is refused when transformers would open another model: forks, and edits of our own
models."""

import importlib.util
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from programs import run_program
from saves import refuses, saver, stops

from models import llama3
from storage import commands as checkpoint_commands
from storage import hf

ROOT = Path(__file__).parents[2]
RELU2 = ("F.silu(self.w1(x))", "F.relu(self.w1(x)).square()")
MODEL_TYPE = ('else "llama"', 'else "mine"')


@pytest.fixture
def fork(monkeypatch, tmp_path):
    """fork((old, new) ...): the module of a copy of models/llama3.py with changed text.

    name: "models.llama3" puts the copy in the place of the original, as for a user who edits that
    file."""

    def make(*changes, name="models.mine", file="llama3"):
        text = (ROOT / "models" / f"{file}.py").read_text()
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / "mine.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return make


def small(module):
    return replace(module.FLAVORS["debug"], n_layers=2, vocab_size=64)


def save_model(model, out):
    identity = {
        "module": type(model).__module__,
        "class": type(model).__name__,
        **asdict(model.config),
    }
    saver(model, [], out, {"model": identity, "data": {}, "optimizer": {}}, source="").save(
        1, {"step": 1}
    )


def test_hashes_are_of_the_code_that_is_there():
    """After a change of a model and new comparisons with transformers: the hashes for
    storage/same_model.json."""
    assert hf.COMPARED == {module: hf.code_hash(module) for module in hf.COMPARED}


# exported as deepseek_v3
@pytest.mark.parametrize("kind", [kind for kind in hf.HF_MODELS if kind != "kimi_k2"])
def test_shipped_models_are_exported(kind):
    module = importlib.import_module(hf.HF_MODELS[kind][0])
    changes = dict(mistral=dict(sliding_window=8), qwen2=dict(qkv_bias=True)).get(kind, {})
    flavors = [
        c
        for flavor in module.FLAVORS.values()
        if (c := replace(flavor, **changes)).to_hf()["model_type"] == kind
    ]
    assert flavors
    for config in flavors:
        hf.check_same_model(hf.class_of(config), config)


def test_a_fork_is_not_exported_as_llama(tmp_path, fork, capsys):
    """A mere copy: refused before training, at the end of training, and from a checkpoint."""
    module, out = fork(), str(tmp_path / "out")
    model = module.Llama3(small(module))
    message = r"would open an export of models.mine.Llama3 as llama; .*name it for llama in storage/same_model.json$"
    for export in (
        lambda: hf.check_same_model(module.Llama3, model.config),
        lambda: hf.save_hf(model, out),
    ):
        refuses(message, export)
    save_model(model, tmp_path / "run")
    error = stops(capsys, checkpoint_commands.main, ["to_hf", str(tmp_path / "run"), out])
    assert error.startswith("error: ") and not os.path.exists(out)


@pytest.mark.parametrize(
    "change",
    [
        RELU2,
        ("        self.w1 = nn.Linear(", "        ffn_dim *= 2\n        self.w1 = nn.Linear("),
        (
            "    tie_embeddings: bool = False",
            "    tie_embeddings: bool = False\n    power: int = 1",
        ),
    ],
)
def test_an_edit_of_a_shipped_model_is_not_exported(fork, change):
    module = fork(change, name="models.llama3")
    message = "as llama; .* because models/llama3.py is not the code that was compared .* write [0-9a-f]{8} for models.llama3"
    refuses(message, hf.check_same_model, module.Llama3, small(module))


def test_an_edit_of_a_file_that_the_model_imports_is_not_exported(fork):
    """OLMo 3 inherits from Llama 3, whose file has the import."""
    fork(("def sdpa(", "ONE = 1\n\n\ndef sdpa("), name="models.attention", file="attention")
    for config in (small(llama3), hf.config_class("olmo3")()):
        refuses(
            "because models/attention.py is not the code",
            hf.check_same_model,
            hf.class_of(config),
            config,
        )


def test_comments_and_docstrings_may_change(fork):
    module = fork(
        (
            "        h = self.norm(h)",
            "        # the last norm\n        h = self.norm(\n            h)",
        ),
        ('"""The inverse: a config.json for transformers."""', '"""config.json."""'),
        ('    "debug": ', '    "mine": Llama3Config(dim=64),\n    "debug": '),
        name="models.llama3",
    )
    hf.check_same_model(module.Llama3, small(module))


def test_a_config_that_config_json_cannot_tell_is_not_exported():
    @dataclass(kw_only=True)
    class Config(llama3.Llama3Config):
        power: int = 1

    refuses(
        "because config.json cannot tell all of .*power=2",
        hf.check_same_model,
        llama3.Llama3,
        Config(power=2),
    )


def test_a_fork_with_a_model_type_of_its_own_is_exported(tmp_path, fork):
    module = fork(RELU2, MODEL_TYPE)
    hf.save_hf(module.Llama3(small(module)), str(tmp_path / "out"))
    with pytest.raises(ValueError, match="mine"):
        transformers.AutoConfig.from_pretrained(tmp_path / "out")


def test_a_fork_that_has_a_row_is_what_transformers_opens(tmp_path, fork, monkeypatch):
    monkeypatch.setitem(hf.HF_MODELS, "llama", ("models.mine", "Llama3"))
    module = fork()
    torch.manual_seed(0)
    model = module.Llama3(small(module)).eval()
    save_model(model, tmp_path / "run")
    hf.save_hf(model, str(tmp_path / "saved"), torch.float32)
    checkpoint_commands.to_hf(str(tmp_path / "run"), str(tmp_path / "out"), dtype="float32")
    x = torch.arange(24).reshape(2, 12)
    for folder in ("saved", "out"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert (theirs(x).logits - model(x)).abs().max() < 1e-4
        assert torch.equal(hf.load_hf_model(str(tmp_path / folder))[0](x), model(x))


@pytest.mark.slow
def test_an_export_that_tells_of_another_model_is_refused_before_anything_is_trained(tmp_path):
    """A user's fork with one changed line, in a new recipe and model file."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "relu2.py").write_text((ROOT / "models" / "llama3.py").read_text().replace(*RELU2))
    recipe = (
        (ROOT / "train_llama3.py")
        .read_text()
        .replace("from models.llama3 import", "from relu2 import")
    )
    (tmp_path / "train_mine.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\n" + recipe
    )
    command = [
        sys.executable,
        "train_mine.py",
        "--steps",
        "2",
        "--device",
        "cpu",
        "--export_hf",
        "out",
        "--out",
        "run",
    ]
    done = run_program(command, cwd=tmp_path, timeout=240)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "error: transformers would open an export of relu2.Llama3 as llama" in done.stderr
    assert not (tmp_path / "run").exists()
