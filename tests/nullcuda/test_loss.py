"""The loss of models/loss.py on a GPU: which kernels a chunk launches."""
import re

WIDE = "n_layers=1,dim=256,n_heads=4,n_kv_heads=2,head_dim=64,ffn_dim=256,vocab_size=128256"


def test_the_heads_gradient_is_added_up_by_its_matmul(device, tmp_path):
    """8,192 tokens in four equal chunks, and between them no pass over the V x D numbers of the gradient."""
    done = device.run(tmp_path, "train_llama3.py", "--model_args", WIDE, "--seq_len", 1024, empty_weights=True)
    step = done.step(2)
    where = [i for i, line in enumerate(step) if re.match(r"gemm .*=128256\b", line)]
    shapes = [tuple(sorted(int(n) for n in re.findall(r"\b[mnk]=(\d+)", step[i]))) for i in where]
    assert shapes == [(256, 2048, 128256)] * 12  # logits, the gradients of the tokens, and of the head
    assert [step[i + 1] for i in where[2:-1:3]] == [step[i] for i in where[3::3]]  # the next chunk begins at once
