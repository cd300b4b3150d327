"""Rollout tokens/s beside transformers' generate, beside an earlier commit, and on a GPU beside
vLLM where it is installed.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --rows 32 --rounds 9 --threads 2
    python benchmarks/rollout.py --rows 1,8,32,64 --sizes small-32k      # a vocabulary as large as those of real models
    git worktree add ../earlier COMMIT && python benchmarks/rollout.py --before ../earlier
    python benchmarks/rollout.py --rows 64 --sizes small-32k --ragged --before ../earlier    # samples of different lengths
    python benchmarks/rollout.py --device cuda --sizes qwen3-1.7B --new 512     # random weights of that shape

The same random Qwen3 for all, prompts of 32 tokens, one sample of each, temperature 1, no sample
ends early; with --ragged, of ours alone, four samples per row whose lengths are drawn (lognormal,
median 96, sigma 1, at most 1,000). Each variant is a process of its own, in rounds, so that a busy
machine disturbs all alike. On a CPU time is the process's CPU time; on a GPU it is the clock's.
Printed are medians of the rounds, and of the rounds' ratios.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL = dict(
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=384,
)
SIZES = {
    "small": SMALL | dict(vocab_size=64),
    "small-32k": SMALL | dict(vocab_size=32000),  # the draw of a token costs as much as the model
    "small-152k": SMALL | dict(vocab_size=151936),
    "qwen3-1.7B": dict(
        hidden_size=2048,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=6144,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
}


def make_model(folder: str, size: str):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    is_small = size.startswith("small")
    spread = 0.1 if is_small else 0.02
    config = Qwen3Config(**SIZES[size], max_position_embeddings=4096, initializer_range=spread)
    Qwen3ForCausalLM(config).to(torch.float32 if is_small else torch.bfloat16).save_pretrained(
        folder
    )


def drawn_lengths() -> list[int]:
    import torch

    return (
        (torch.randn(4096, generator=torch.Generator().manual_seed(1)).exp() * 96)
        .long()
        .clamp(1, 1000)
        .tolist()
    )


def sampler(variant: str, folder: str, device: str, new: int, ragged=False):
    """sample(prompts) -> nothing; every prompt is continued by `new` tokens, or ragged."""
    import torch

    if variant == "vllm":
        from vllm import LLM, SamplingParams

        engine = LLM(folder, skip_tokenizer_init=True, max_model_len=32 + new)
        params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
        return lambda prompts: engine.generate(
            [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False
        )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if variant == "transformers":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

        def sample(prompts):
            batch = torch.tensor(prompts, device=device)
            model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )

        return sample
    from rl.decoding import rollout

    if importlib.util.find_spec("storage"):
        from storage.hf import load_hf_model
    else:  # an earlier commit
        from support.hf import load_hf_model

    model, _ = load_hf_model(folder, device, dtype)
    if ragged:
        lengths = drawn_lengths()
        ends = lambda s: None if len(s.ids) >= lengths[s.index] else []  # noqa: E731
        noise = torch.rand(1024, 4, 1000, generator=torch.Generator().manual_seed(0))
        return lambda prompts: rollout(
            model,
            prompts,
            noise[: len(prompts)],
            1.0,
            [],
            max_len=1100,
            rows=len(prompts),
            reply=ends,
        )
    noise = torch.rand(1024, 1, new, generator=torch.Generator().manual_seed(0))
    return lambda prompts: rollout(
        model, prompts, noise[: len(prompts)], 1.0, [], max_len=32 + new, rows=len(prompts)
    )


def measure(args):
    """In a process of its own: prints {rows: tokens per second}."""
    import torch

    torch.set_num_threads(args.threads)
    sample = sampler(args.variant, args.folder, args.device, args.new, args.ragged)
    speed = {}
    for rows in args.rows:
        prompts = torch.randint(
            1, 64, (rows, 32), generator=torch.Generator().manual_seed(rows)
        ).tolist()
        if args.device == "cuda":
            sample(prompts)  # the first time kernels are chosen, and memory is taken
        clock = time.perf_counter if args.device == "cuda" else time.process_time
        began = clock()
        sample(prompts)
        speed[rows] = (sum(drawn_lengths()[: 4 * rows]) if args.ragged else rows * args.new) / (
            clock() - began
        )
    print(json.dumps(speed))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 32, 256]
    )
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument(
        "--ragged", action="store_true", help="samples of different lengths, ours alone"
    )
    parser.add_argument("--before", help="a worktree of an earlier commit")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--code", default=str(Path(__file__).parent.parent), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        sys.path.insert(0, args.code)
        return measure(args)
    variants = ["ours", *["before"] * bool(args.before), *["transformers"] * (not args.ragged)]
    if args.device == "cuda" and not args.ragged and importlib.util.find_spec("vllm"):
        variants.append("vllm")
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, args.sizes)
        for _ in range(args.rounds):
            rounds.append({})
            for variant in variants:
                code = args.before if variant == "before" else args.code
                given = [
                    sys.executable,
                    __file__,
                    *sys.argv[1:],
                    "--variant",
                    variant,
                    "--folder",
                    folder,
                    "--code",
                    code,
                ]
                done = subprocess.run(given, stdout=subprocess.PIPE, text=True, check=True)
                rounds[-1][variant] = json.loads(done.stdout.splitlines()[-1])
    import torch

    second = "second" if args.device == "cuda" else "CPU second"
    print(
        f"{args.sizes}, 32 + {args.new} tokens, {args.rounds} rounds, {args.threads} thread(s), "
        f"torch {torch.__version__}"
    )
    for rows in map(str, args.rows):
        for variant in variants:
            speed = statistics.median(r[variant][rows] for r in rounds)
            ratio = statistics.median(r["ours"][rows] / r[variant][rows] for r in rounds)
            print(
                f"{rows:>5} rows  {variant:14} {speed:10,.0f} tokens per {second}   ours: "
                f"{ratio:6.2f} x"
            )


if __name__ == "__main__":
    main()
