"""What the tests on the null device run: small models, and rows such as "moe 2 --ep 2": which of
them, on how many processes, with which flags. Nine layers are more than the compiler's limit of
eight versions of a function; sizes of 256 are whole blocks of 128."""

import pytest
import torch

from data import DataConfig, open_data
from distributed.layout import Layout
from flags.config import override_fields
from models import llama3, qwen3
from models.llama3 import Llama3
from models.qwen3 import Qwen3
from parallel import init_weights
from storage.hf import save_hf

LLAMA = "n_layers=9,dim=256,n_heads=8,n_kv_heads=4,head_dim=32,ffn_dim=512,vocab_size=4096"
MOE = LLAMA + ",n_experts=8,top_k=2,moe_ffn_dim=256"
MLA = (
    "n_layers=9,dim=256,n_heads=8,ffn_dim=512,vocab_size=4096,q_lora_rank=128,kv_lora_rank=128,qk_nope_head_dim=32,"
    "qk_rope_head_dim=32,v_head_dim=32,moe_ffn_dim=256"
)
MODELS = {
    "llama3": ["train_llama3.py", "--model_args", LLAMA],
    "tied": ["train_llama3.py", "--model_args", LLAMA + ",tie_embeddings=true"],
    "qwen3": ["train_qwen3.py", "--model_args", LLAMA],
    "moe": ["train_qwen3.py", "--flavor", "debug_moe", "--model_args", MOE],
    "deepseek": ["train_deepseek.py", "--model_args", MLA],
    "mtp": ["train_deepseek.py", "--flavor", "debug_mtp", "--model_args", MLA],
    "gpt_oss": ["forks/train_gpt_oss.py"],
    "llama4": ["forks/train_llama4.py", "--model_args", "chunk_size=100,moe_every=2"],
    "lora": ["finetune.py", "--lora_rank", 4, "--data", "stdlib", "--no-doc_mask", "--init_from"],
}
BASES = {
    "lora": (Llama3, llama3.FLAVORS["debug"], LLAMA),
    "lora_moe": (Qwen3, qwen3.FLAVORS["debug_moe"], MOE),
}
GRPO = (
    "--prompts_per_step 4 --group_size 2 --max_new_tokens 4 --local_batch_size 8 --eval_every 0 "
    "--sft_steps 2 --abort_k3 0 "
    "--steps 2 --log_every 0 --checkpoint_every 0 --device cuda"
)


def slow(*values):
    """A row that only make test-cuda-slow runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def base_folder(name: str, folder: str) -> str:
    """A Hugging Face folder with a model of random weights, for adapters, and the tokenizer of the
    built-in corpus."""
    Model, flavor, sizes = BASES[name]
    with torch.device("meta"):
        model = Model(override_fields(flavor, sizes, "--model_args"))
    model.to_empty(device="cpu")
    init_weights(model, Layout(), 3)
    save_hf(
        model, folder, torch.float32, tokenizer_file=open_data(DataConfig(), 256).tokenizer_file
    )
    return folder


def run(device, tmp_path, row: str, *more, **options):
    """The row's run, with `more` flags."""
    name, n, *flags = row.split()
    if name == "grpo":
        recipe = ["grpo.py"]
        brief = GRPO.split()
    elif name in ("generate", "evaluate"):
        recipe = [f"{name}.py", "--checkpoint", base_folder("lora", f"{tmp_path}/base")]
        brief = []
    else:
        if "--pp" in flags:
            sequences = 4
        else:
            sequences = 2
        recipe = MODELS["lora" if name in BASES else name]
        brief = device.BRIEF + ["--seq_len", 256, "--local_batch_size", sequences]
    if name in BASES:
        recipe = [*recipe, base_folder(name, f"{tmp_path}/base")]
    return device.run(
        tmp_path, recipe[0], *recipe[1:], *flags, *more, brief=brief, nproc=int(n), **options
    )
