"""An export is refused when others would open it as another model: forks, and edits of our own models."""
import os
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from programs import run_program

import checkpoint
from checkpoint import CheckpointConfig, Checkpoints
from support import hf, same_model

ROOT = Path(__file__).parent.parent


@pytest.fixture
def fork(monkeypatch):
    """fork(file, (old, new) ...) -> (models.mine, a copy of models/<file>.py with its text changed, its class).

    name: "models.<file>" puts it in the place of the original, as one who edits that has it."""

    def make(file, *changes, name="models.mine"):
        module, text = ModuleType(name), (ROOT / "models" / f"{file}.py").read_text()
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(text, "models/mine.py", "exec"), module.__dict__)
        return module, getattr(module, {"llama3": "Llama3", "qwen3": "Qwen3", "deepseek": "DeepSeek"}[file])

    return make


def declare(name):
    """to_hf() as docs/fork_me.md says it: this class computes what transformers' does."""
    return "dict(architectures=", f'dict(nanotitan_model="models.mine.{name}", architectures='


def small(module, flavor="debug"):
    return replace(module.FLAVORS[flavor], n_layers=2, vocab_size=64)


def save_run(model, out):
    identity = {"module": type(model).__module__, "class": type(model).__name__, **asdict(model.config)}
    checkpoints = Checkpoints(CheckpointConfig(), str(out), modules=[model], optimizer=[], source="", config={},
                              identity={"model": identity, "data": {}, "optimizer": {}})
    checkpoints.save(1, {"step": 1})
    checkpoints.close()


RELU2 = ("F.silu(self.w1(x))", "F.relu(self.w1(x)).square()")
DECLARED = declare("Llama3")


@pytest.mark.parametrize("file, flavor", [
    ("llama3", "debug"), ("qwen3", "debug"), ("qwen3", "debug_moe"), ("deepseek", "debug"),
])
def test_a_copy_of_a_model_is_exported_when_it_says_that_it_is_the_same(tmp_path, fork, file, flavor):
    module, Model = fork(file)
    with pytest.raises(ValueError, match=f'return "nanotitan_model": "models.mine.{Model.__name__}", too, else a model_type'):
        hf.check_export(str(tmp_path / "out"), Model, small(module, flavor))
    module, Model = fork(file, declare(Model.__name__))
    hf.check_export(str(tmp_path / "out"), Model, small(module, flavor))


@pytest.mark.parametrize("changes, message", [
    ([RELU2], "would be opened as llama"),
    ([RELU2, DECLARED], "its logits are others"),
    ([("h = self.norm(h)", "h = 2 * self.norm(h)"), DECLARED], "its logits are others"),
    ([declare("Other")], "would be opened as llama"),  # the name of the file that this one was copied from
    ([("        self.w1 = nn.Linear(", "        ffn_dim *= 2\n        self.w1 = nn.Linear("), DECLARED],
     r"another llama: model.layers.0.mlp.gate_proj.weight is \(512, 192\) there, \(1024, 192\) here"),
    ([("self.w3 = nn.Linear(dim, ffn_dim, bias=False)", "self.w3 = nn.Linear(dim, ffn_dim)"), DECLARED],
     "no name for blocks.0.ffn.w3.bias"),
    ([("mlp_bias=(False,)) | SHARED_FIXED", "mlp_bias=(True,)) | SHARED_FIXED"), DECLARED], "mlp_bias is True"),
])
def test_another_model_is_not_exported_as_one_of_theirs(tmp_path, fork, capsys, changes, message):
    module, Model = fork("llama3", *changes)
    model, out = Model(small(module)), str(tmp_path / "out")
    for export in (lambda: hf.check_export(out, Model, model.config), lambda: hf.save_hf(model, out)):
        with pytest.raises(ValueError, match=message) as error:
            export()
        assert "\n" not in str(error.value)
    save_run(model, tmp_path / "run")
    assert checkpoint.main(["to_hf", str(tmp_path / "run"), out]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and not os.path.exists(out)


def test_a_declared_copy_is_what_transformers_opens(tmp_path, fork):
    module, Model = fork("llama3", DECLARED)
    torch.manual_seed(0)
    model = Model(small(module)).eval()
    save_run(model, tmp_path / "run")
    hf.save_hf(model, str(tmp_path / "saved"), torch.float32)
    checkpoint.to_hf(str(tmp_path / "run"), str(tmp_path / "out"), dtype="float32")
    x = torch.arange(24).reshape(2, 12)
    for folder in ("saved", "out"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert (theirs(x).logits - model(x)).abs().max() < 1e-4
        assert torch.equal(hf.load_hf_model(str(tmp_path / folder))[0](x), model(x))  # and so do we, as the registered class


def model_of(kind):
    """(class, config of the fingerprint) for a model_type."""
    Model, Config = same_model.classes_of(kind)
    return Model, Config(**same_model.FINGERPRINTS[kind][0])


@pytest.mark.parametrize("kind", same_model.HF_MODELS)
def test_fingerprints_are_of_the_models_that_transformers_has(tmp_path, kind, monkeypatch):
    """After a deliberate change of a model, which transformers must make, too: same_model.py gets the numbers printed here."""
    Model, small_config = model_of(kind)
    seen, forward = [], Model.forward

    def remembered(self, tokens):
        seen.append((self, tokens, forward(self, tokens)))
        return seen[-1][2]

    monkeypatch.setattr(Model, "forward", remembered)
    found = same_model.fingerprint(kind)
    print(f'"{kind}": [{", ".join(f"{x:.4f}" for x in found)}]')
    [(model, tokens, logits)] = seen
    assert tokens.shape == (1, 512) and small_config.to_hf()["model_type"] == kind
    monkeypatch.undo()
    same_model.check_same_model(Model, small_config)
    hf.save_hf(model, str(tmp_path / "out"), torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(tokens).logits - logits).abs().max() < 2e-3 * logits.std()
    assert found == pytest.approx(same_model.FINGERPRINTS[kind][1], rel=0, abs=2e-4)


def test_a_fingerprint_leaves_everything_as_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            same_model.check_same_model(*model_of("deepseek_v3"))
            assert torch.empty(1).is_meta
        assert torch.get_default_dtype() == torch.bfloat16 and torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state())


WINDOW = ("attend(rotate(q, cos, sin), rotate(k, cos, sin), v)", """F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, enable_gqa=True,
            attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-200))""")
NO_ROPE = ("block(h, cos, sin,", "block(h, cos if i != '3' else torch.ones_like(cos), sin if i != '3' else 0 * sin,")
EXPERT = ("self.experts, flat, index, weight,", "self.experts, flat, index, weight.square(),")


@pytest.mark.parametrize("file, flavor, old, new", [
    ("llama3", "debug", *RELU2),
    ("llama3", "debug", "F.silu(", "F.gelu("),
    ("llama3", "debug", "config.rope_theta **", "20000.0 **"),
    ("llama3", "debug", "eps=config.norm_eps", "eps=1e-2"),
    ("llama3", "debug", "low) / (high - low)", "low) / high"),
    ("llama3", "debug", "transpose_heads(self.wq(x).unflatten(-1, (-1, self.head_dim)))",
     "self.wq(x).unflatten(-1, (self.head_dim, -1)).permute(0, 3, 1, 2)"),
    ("llama3", "debug", "self.attn(self.attn_norm(h),", "self.attn(h,"),
    ("llama3", "debug", "h = self.norm(h)", "h = 1.01 * self.norm(h)"),
    ("llama3", "debug", "return self.logits(h, weight)", "return 30 * (self.logits(h, weight) / 30).tanh()"),
    ("llama3", "debug", *WINDOW),
    ("llama3", "debug", *NO_ROPE),
    ("llama3", "debug", '"ffn.w1": "mlp.gate_proj"', '"ffn.w1": "mlp.up_proj"'),
    ("llama3", "debug", "h = self.norm(h)", "h = self.norm(h, 1)"),  # an error
    ("qwen3", "debug", "self.k_norm(self.wk(x).unflatten(-1, (-1, self.head_dim)))",
     "self.wk(x).unflatten(-1, (-1, self.head_dim))"),
    ("qwen3", "debug_moe", ".softmax(-1)", ".sigmoid()"),
    ("qwen3", "debug_moe", *EXPERT),
    ("deepseek", "debug", "RMSNorm(Q, eps=LATENT_EPS)", "nn.Identity()"),
    ("deepseek", "16B", "attention_factors(config)[1]", "1"),
])
def test_an_edit_inside_a_registered_model_is_not_exported(tmp_path, fork, file, flavor, old, new):
    module, Model = fork(file, (old, new), name=f"models.{file}")
    config = next(iter(module.FLAVORS.values())) if flavor == "debug" else module.FLAVORS[flavor]
    for export in (lambda: hf.check_export(str(tmp_path / "out"), Model, config),
                   lambda: same_model.check_same_model(Model, replace(config, n_layers=2))):
        with pytest.raises(ValueError, match="an export of models.* would be opened as .*, but its file, or what") as error:
            export()
        assert "\n" not in str(error.value) and "a model_type of its own" in str(error.value)


def test_an_edit_that_a_field_of_the_config_switches_on_is_noticed(fork, tmp_path):
    """With the default the model is what it was, and its export is right."""
    changes = [("    tie_embeddings: bool = False", "    tie_embeddings: bool = False\n    power: int = 1"),
               ("        self.w1 = nn.Linear(", "        self.power = POWER\n        self.w1 = nn.Linear("),
               ("class FeedForward", "POWER = 1\n\n\nclass FeedForward"),
               ("        self.ffn = ", "        global POWER\n        POWER = config.power\n        self.ffn = "),
               ("F.silu(self.w1(x))", "F.silu(self.w1(x)) ** self.power")]
    module, Model = fork("llama3", *changes, name="models.llama3")
    same_model.check_same_model(Model, small(module))
    with pytest.raises(ValueError, match="its logits are others"):
        same_model.check_same_model(Model, replace(small(module), power=2))


def test_a_window_of_many_tokens_shows(fork):
    module, Model = fork("llama3", WINDOW, DECLARED)
    with pytest.raises(ValueError, match="its logits are others"):
        same_model.check_same_model(Model, small(module))


def test_a_large_copy_is_compared_in_small_sizes(fork):
    """DeepSeek-V2 Lite has no latent for queries, V2 has one: 16 and 236 billion parameters are never made."""
    module, Model = fork("deepseek", declare("DeepSeek"))
    for flavor in module.FLAVORS.values():
        same_model.check_same_model(Model, flavor)


@pytest.mark.slow
@pytest.mark.parametrize("edited", ["a file of its own", "the original"])
def test_an_export_that_tells_of_another_model_is_refused_before_anything_is_trained(tmp_path, edited):
    """A fork as a user has it, with one line changed: of a recipe and a model of its own, or in a folder copied whole."""
    recipe, model = (ROOT / "train_llama3.py").read_text(), (ROOT / "models" / "llama3.py").read_text().replace(*RELU2)
    if edited == "the original":
        shutil.copytree(ROOT / "models", tmp_path / "models", ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "models" / "llama3.py").write_text(model)
        message = "error: an export of models.llama3.Llama3 would be opened as llama, but its file"
    else:
        (tmp_path / "models").symlink_to(ROOT / "models")
        recipe = recipe.replace("from models.llama3 import", "from relu2 import")
        (tmp_path / "relu2.py").write_text(model)
        message = "error: an export of relu2.Llama3 would be opened as llama, which is models.llama3.Llama3"
    (tmp_path / "train_mine.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n" + recipe)
    command = [sys.executable, "train_mine.py", "--steps", "2", "--device", "cpu", "--export_hf", "out", "--out", "run"]
    done = run_program(command, cwd=tmp_path, timeout=240)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run").exists()
