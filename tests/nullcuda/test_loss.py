"""The loss of models/loss.py on a GPU: which kernels a chunk launches."""

import re

WIDE = "n_layers=1,dim={},n_heads=4,n_kv_heads=2,head_dim=64,ffn_dim=256,vocab_size=128256"


def products(device, tmp_path, dim: int, seq_len: int) -> tuple[list, list]:
    """Sizes of the head's matmuls in a step, and the line after each."""
    flags = ("--model_args", WIDE.format(dim), "--seq_len", seq_len)
    step = device.run(tmp_path, "train_llama3.py", *flags, empty_weights=True).step(2)
    where = [i for i, line in enumerate(step) if re.match(r"gemm .*=128256\b", line)]
    return [tuple(sorted(int(n) for n in re.findall(r"\b[mnk]=(\d+)", step[i]))) for i in where], [
        step[i + 1] for i in where
    ]


def test_the_heads_gradient_is_added_up_by_its_matmul(device, tmp_path):
    """8,192 tokens in four equal chunks, and between them no pass over the V x D numbers of the
    gradient."""
    sizes, after = products(device, tmp_path, 256, 1024)
    # logits, the gradients of the tokens, and of the head
    assert sizes == [(256, 2048, 128256)] * 12
    # the next chunk begins at once
    for line in after[2:-1:3]:
        assert re.match(r"gemm .*=128256\b", line)


def test_a_wide_heads_gradient_is_one_product(device, tmp_path):
    """Up to 2 dim tokens: two chunks, of which only the logits and the gradients of the tokens are
    computed apart."""
    assert products(device, tmp_path, 2048, 512)[0] == [(2048, 2048, 128256)] * 4 + [
        (2048, 4096, 128256)
    ]
