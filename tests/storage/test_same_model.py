"""An export is refused when transformers would open another model: forks, and edits of our own
models."""

import importlib.util
import math
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import layouts
import pytest
import torch
import transformers
from programs import run_program
from saves import refuses, saver, stops

from distributed.refusals import check_layout
from models import llama3
from storage import commands as checkpoint_commands
from storage import hf
from storage.hf_write import check_export_of

ROOT = Path(__file__).parents[2]
RELU2 = ("F.silu(self.w1(x))", "F.relu(self.w1(x)).square()")
MODEL_TYPE = ('kind = "llama"', 'kind = "mine"')


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


KINDS = {*hf.HF_MODELS, "gpt_oss", "llama4_text", "olmo3", "qwen3_next"}


@pytest.mark.parametrize("kind", sorted(KINDS - {"kimi_k2"}))  # exported as deepseek_v3
def test_shipped_models_are_exported(kind):
    """Those of models/, and those of forks/, whose file has the name of the model_type."""
    Config = hf.config_class(kind)
    changes = dict(mistral=dict(sliding_window=8), qwen2=dict(qkv_bias=True)).get(kind, {})
    flavors = sys.modules[Config.__module__].FLAVORS.values()
    configs = [replace(flavor, **changes) for flavor in flavors]
    configs = [config for config in configs if config.to_hf()["model_type"] == kind]
    assert configs
    for config in configs:
        hf.check_same_model(hf.class_of(config), config)


@pytest.mark.parametrize("kind", ["", "bert", "train_dpo", "../llama3", "run", "mup.x", "layers"])
def test_no_other_file_is_taken_for_a_model(kind):
    before = set(sys.modules)
    assert hf.config_class(kind) is None
    assert not set(sys.modules) - before


def test_a_fork_is_not_exported_as_llama(tmp_path, fork, capsys):
    """A mere copy: refused before training, at the end of training, and from a checkpoint."""
    module, out = fork(), str(tmp_path / "out")
    model = module.Llama3(small(module))
    message = "would open an export of models.mine.Llama3 as llama; .*return another model_type$"
    refuses(message, hf.check_same_model, module.Llama3, model.config)
    refuses(message, hf.save_hf, model, out)
    save_model(model, tmp_path / "run")
    error = stops(capsys, checkpoint_commands.main, ["to_hf", str(tmp_path / "run"), out])
    assert error.startswith("error: ")
    assert not os.path.exists(out)


def test_a_fork_without_hf_keys_is_refused_before_training(fork):
    """Before, the export at the end of the training failed."""
    module = fork(
        MODEL_TYPE,
        (
            "        self.wo = nn.Linear(",
            "        self.gate = nn.Linear(config.dim, config.n_heads, bias=False)\n        self.wo = nn.Linear(",
        ),
    )
    check_export_of(llama3.Llama3, small(llama3), "hf", "float32")
    refuses(
        r"hf_keys\(\) of Llama3 and the model's parameters differ in blocks.0.attn.gate.weight",
        check_export_of,
        module.Llama3,
        small(module),
        "hf",
        "float32",
    )


def saved_and_exported(module, folder) -> tuple[torch.nn.Module, str]:
    """(a model with random weights, the folder that to_hf has made of its run)"""
    torch.manual_seed(0)
    model = module.Llama3(small(module)).eval()
    save_model(model, folder / "run")
    checkpoint_commands.to_hf(str(folder / "run"), str(folder / "out"), dtype="float32")
    return model, str(folder / "out")


@pytest.mark.parametrize(
    "change",
    [
        RELU2,
        ("F.silu(self.w1(x))", "F.gelu(self.w1(x))"),
        ("        h = self.norm(h)", "        h = self.norm(h) * 1.01"),
    ],
)
def test_an_edit_that_computes_something_else_is_refused_with_a_number(
    tmp_path, fork, capsys, change
):
    module = fork(change, name="models.llama3")
    with pytest.raises(
        ValueError, match=r"other logits .*, 0\.\d+ apart .*models/llama3.py is no llama"
    ):
        saved_and_exported(module, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["mine.py", "run"]


def test_a_harmless_edit_of_a_shipped_model_is_exported(tmp_path, fork, capsys):
    """A comment, a name, another order: what transformers opens computes the same."""
    module = fork(
        ("        h = self.norm(h)", "        # the last norm\n        h = self.norm(h)"),
        ('    "debug": ', '    "mine": Llama3Config(dim=64),\n    "debug": '),
        ("F.silu(self.w1(x)) * self.w3(x)", "self.w3(x) * F.silu(self.w1(x))"),
        name="models.llama3",
    )
    model, out = saved_and_exported(module, tmp_path)
    assert "transformers computes the same logits from the export" in capsys.readouterr().out
    x = torch.arange(24).reshape(2, 12)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (theirs(x).logits - model(x)).abs().max() < 1e-4
    assert torch.equal(hf.load_hf_model(out)[0](x), model(x))


def test_without_transformers_a_line_says_that_nothing_was_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    saved_and_exported(llama3, tmp_path)
    assert "was not compared with transformers: pip install" in capsys.readouterr().out


# what a model of one's own may lack, such as a copy of models/llama3.py of before 0.11
WITHOUT_NAMES_OF_OTHERS = (
    ("    n_experts: ClassVar[int] = 0\n", ""),
    ("    mtp_depth: ClassVar[int] = 0\n", ""),
    ("def hf_optional(", "def not_hf_optional("),
)


@pytest.mark.parametrize("flags", [{}, dict(pp=2), dict(tp=2), dict(dp_shard=2)], ids=str)
def test_layouts_of_a_model_that_knows_no_experts_and_no_multi_token_prediction(flags, fork):
    config = small(fork(*WITHOUT_NAMES_OF_OTHERS))
    assert not hasattr(config, "n_experts")
    assert not hasattr(config, "mtp_depth")
    layout = check_layout(
        layouts.Flags(**flags),
        config,
        seq_len=16,
        local_batch_size=2,
        global_batch_size=4,
        device="cpu",
        world_size=math.prod(flags.values()),
    )
    assert not layout.has_experts
    assert not layout.mtp


def test_a_model_without_optional_names_reads_a_folder(tmp_path, fork):
    module = fork(*WITHOUT_NAMES_OF_OTHERS)
    torch.manual_seed(0)
    theirs = llama3.Llama3(small(llama3))
    hf.save_hf(theirs, str(tmp_path / "folder"), torch.float32)
    model = module.Llama3(small(module))
    assert not hasattr(model, "hf_optional")
    assert hf.load_hf(model, str(tmp_path / "folder")) == []
    x = torch.arange(24).reshape(2, 12)
    assert torch.equal(model(x), theirs(x))


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
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "error: transformers would open an export of relu2.Llama3 as llama" in done.stderr
    assert not (tmp_path / "run").exists()
