"""Shared by tests of GRPO: a small policy, its samples, its Trainer, and whole runs of grpo.py."""

import json
import random
from dataclasses import replace

import runs
import torch
import torch.distributed as dist
from chats import bpe
from layouts import KINDS, config
from runs import REPO, metrics

import grpo
from distributed.layout import local_slice, local_tensor
from distributed.refusals import check_layout
from grpo import Config, Trainer
from models.llama3 import Llama3Config
from parallel import make_mesh
from rl import datasets
from rl.decoding import rollout
from storage.hf import class_of

ENV = runs.ENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
SMALL = "dim=32,n_layers=2,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64"
TINY = [
    "--env",
    REPO / "tests" / "env_counting.py",
    "--model_args",
    SMALL,
    "--prompts_per_step",
    4,
    "--group_size",
    4,
    "--max_new_tokens",
    8,
    "--seq_len",
    16,
    "--device",
    "cpu",
    "--sft_steps",
    3,
    "--eval_n",
    8,
    "--eval_k",
    2,
    "--eval_every",
    2,
    "--local_batch_size",
    8,
    "--log_every",
    1,
]
MODEL = Llama3Config(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    vocab_size=24,
    max_seq_len=64,
)
# other policies; sharp_model makes the routers certain of their choices
OTHERS = {
    name: config(**KINDS[name], n_layers=2, vocab_size=24) for name in ("qwen3_moe", "deepseek")
}
OTHERS["tied"] = config(n_layers=2, vocab_size=24, tie_embeddings=True)
LORA = dict(lora_rank=4, lora_on=["wq", "wo", "w1"], init_from="not read here", kl_coef=0.5)


def write_problems(path, *lines) -> str:
    """The path of a new file with one JSON value in each line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def open_problems(env_data, **flags):
    """The task of --env dataset, or of another --env, with these problems."""
    return datasets.open_task(grpo.Config(**{"env": "dataset", "env_data": str(env_data), **flags}))


def sharp_model(config=MODEL, seed=0):
    """A model with an opinion: logits spread out, so a wrong position or temperature shows."""
    torch.manual_seed(seed)
    model = class_of(config)(config)
    for p in model.parameters():
        if p.ndim >= 2:
            torch.nn.init.normal_(p, std=0.3)
    return model


def samples_of(
    model, n_prompts=4, group_size=3, max_new_tokens=9, temperature=1.0, eot=0, seed=0, **options
):
    """Rollouts of random prompts of different lengths, with random rewards turned into advantages."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 24) for _ in range(rng.randint(1, 7))] for _ in range(n_prompts)]
    noise = torch.rand(
        n_prompts, group_size, max_new_tokens, generator=torch.Generator().manual_seed(seed)
    )
    samples = rollout(model, prompts, noise, temperature, eot, **{"max_len": 32} | options)
    for i, s in enumerate(samples):
        s.prompt, s.advantage = prompts[i // group_size], rng.uniform(-1, 1)
    return samples


def full_logprobs(model, s, temperature=1.0):
    """Log-probabilities of a sample's ids from a forward, by hand."""
    logits = (
        model(torch.tensor([s.prompt + s.ids]))[0, len(s.prompt) - 1 : -1].float() / temperature
    )
    return logits.log_softmax(-1).gather(-1, torch.tensor(s.ids)[:, None])[:, 0]


def trainer_of(seed=0, unknown=None, config=MODEL, **flags):
    """A Trainer around sharp_model(config) on this process's layout; with n ranks, --dp_shard and
    the like in flags."""
    cfg = Config(
        **{
            "compute_dtype": "float32",
            "device": "cpu",
            "seq_len": 32,
            "max_new_tokens": 9,
            "max_norm": 0.0,
            **flags,
        }
    )
    if dist.is_initialized():
        world = dist.get_world_size()
    else:
        world = 1
    layout = check_layout(
        cfg,
        config,
        seq_len=cfg.seq_len,
        local_batch_size=cfg.local_batch_size,
        global_batch_size=-1,
        device="cpu",
        world_size=world,
    )
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layout = make_mesh(replace(layout, rank=dist.get_rank()))
    model = grpo.build_policy(
        cfg, layout, class_of(config), config, unknown and torch.tensor(unknown)
    )
    plain = dict(sharp_model(config, seed).named_parameters())
    for fqn, p in model.named_parameters():
        if fqn not in plain:  # an adapter, as drawn
            continue
        whole = plain[fqn].detach()
        part = tuple(slice(o, o + n) for n, o in zip(*local_slice(p)))
        local_tensor(p).data.copy_(whole[part])
    return Trainer(cfg, layout, model)


def gradients(trainer):
    return {
        fqn: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for fqn, p in trainer.model.named_parameters()
        if p.grad is not None
    }


def assert_close(a: dict, b: dict, tolerance=1e-5):
    assert a.keys() == b.keys()
    assert a
    for fqn in a:
        assert (a[fqn] - b[fqn]).norm() <= tolerance * b[fqn].norm().clamp(min=1e-6), fqn


def launch(processes, *argv, program="grpo.py"):
    return runs.launch(processes, REPO / program, *argv)


def run(processes, *argv, status=0, program="grpo.py"):
    done = runs.ended(
        launch(processes, *argv, program=program), timeout=400, status=status, env=ENV
    )
    if status == 0:
        return done.stdout
    return done.stderr


def steps_of(out) -> list[dict]:
    return [line for line in metrics(out) if "reward_mean" in line]


def assert_same(a, b, tolerance):
    assert all(x["grad_norm"] > 0 for x in a)  # with equal rewards any two runs would be the same
    assert [x["step"] for x in a] == [x["step"] for x in b]
    for x, y in zip(a, b):
        for name in ("tokens_hash", "reward_mean", "policy_version"):
            assert x[name] == y[name]
        assert abs(x["loss"] - y["loss"]) <= tolerance
        assert abs(x["grad_norm"] - y["grad_norm"]) <= 100 * tolerance


def evaluations(out) -> list[tuple]:
    names = ("step", "eval_reward", "eval_greedy")
    return [tuple(line[name] for name in names) for line in metrics(out) if "eval_reward" in line]


SAME = [
    *TINY,
    "--steps",
    3,
    "--eval_every",
    0,
    "--checkpoint_every",
    0,
    "--lr",
    "1e-3",
    "--compute_dtype",
    "float32",
]


def hf_folder(folder, kind, std=0.02, n_layers=2):
    """A tiny random model with a real tokenizer and chat template, as written by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = bpe(
        "Sum the digits of 123: 6", 280, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    theirs.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=288,
        hidden_size=32,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        intermediate_size=64,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=std,
    )
    if kind == "deepseek_v3":
        sizes |= dict(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        )
    else:
        sizes |= dict(num_key_value_heads=2, head_dim=8)
    if kind == "qwen3_moe":
        sizes |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.uniform_(-0.5, 0.5)
    model.save_pretrained(folder)
    theirs.save_pretrained(folder)
