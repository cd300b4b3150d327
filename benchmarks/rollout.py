"""Rollout tokens/s: ours with KV cache and refill, without either, and transformers' generate, interleaved in one run.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --prompts 16 --group 16 --repeats 1

The same random Qwen3 weights and prompts for all; every variant samples at temperature 1 on one thread. Time is this process's
CPU time, which other work on the machine disturbs less; printed are the best of the repeats, and ratios.
"""
import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from rl.decoding import draw, rollout
from support.hf import load_hf_model


@torch.no_grad()
def without_cache(model, prompts, noise):
    """Every new token runs the whole sequence again, all samples as one batch."""
    G, new = noise.shape[1:]
    rows = torch.tensor(prompts).repeat_interleave(G, 0)
    for t in range(new):
        token, _ = draw(model(rows)[:, -1].float(), noise.flatten(0, 1)[:, t], 1.0)
        rows = torch.cat([rows, token[:, None]], 1)
    return rows.shape[0] * new


def main():
    parser = argparse.ArgumentParser()
    defaults = dict(prompts=8, group=4, prompt_len=32, new=128, repeats=1, dim=128, layers=4)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=64, hidden_size=args.dim, num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=3 * args.dim, max_position_embeddings=1024, initializer_range=0.1)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        model, _ = load_hf_model(folder)
    P, G, T, new = args.prompts, args.group, args.prompt_len, args.new
    prompts = torch.randint(1, 64, (P, T)).tolist()
    noise = torch.rand(P, G, new)
    batch = torch.tensor(prompts).repeat_interleave(G, 0)

    def ours(eot, rows=P * G, part=slice(None)):
        samples = rollout(model, prompts[part], noise[part], 1.0, eot, max_len=T + new, rows=rows)
        return sum(len(s["ids"]) for s in samples)

    def transformers(use_cache):
        out = theirs.generate(
            batch, attention_mask=torch.ones_like(batch), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new,
            min_new_tokens=new, use_cache=use_cache, pad_token_id=0)
        return (out.shape[1] - T) * P * G

    few = P // 4  # a quarter of the samples at once
    variants = {
        "ours": lambda: ours(eot=-1),
        "ours without cache": lambda: without_cache(model, prompts, noise),
        "transformers generate": lambda: transformers(True),
        "transformers without cache": lambda: transformers(False),
        f"ours, samples end by themselves, {few * G} rows, refill": lambda: ours(0, few * G),
        f"ours, samples end by themselves, {few * G} rows, no refill":
            lambda: sum(ours(0, few * G, slice(i, i + few)) for i in range(0, P, few)),
    }
    speed = dict.fromkeys(variants, 0.0)
    for _ in range(args.repeats):
        for name, work in variants.items():
            began = time.process_time()
            tokens = work()
            speed[name] = max(speed[name], tokens / (time.process_time() - began))
    n = sum(p.numel() for p in model.parameters())
    print(f"{n:,} parameters, {P} prompts x {G} samples, {T} + {new} tokens, {torch.get_num_threads()} thread(s), torch "
          f"{torch.__version__}")
    for name, x in speed.items():
        print(f"{name:55} {x:10,.0f} tokens per CPU second   {x / speed['ours']:6.3f} x ours")


if __name__ == "__main__":
    main()
