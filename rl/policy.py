"""The policy: choice of the model, construction on its devices, its weights for those who sample,
and the reference copy."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel
from checkpoint import Checkpoints
from distributed.agree import gather
from distributed.checks import check_model
from distributed.experts import expert_parallel
from distributed.layout import Layout, mtp_depth_of, reshard, whole_tensor
from distributed.pipeline import pipeline_stages
from flags.config import Need, flag, override_fields
from lora.lora import lora_linears
from models.attention import sdpa
from models.llama3 import Llama3Config
from models.loss import token_logprobs
from models.qwen3 import Qwen3Config
from sft.base import read_model
from storage.adapters import is_adapter
from storage.hf import class_of
from storage.newest import is_hf_folder

SMALL = dict(
    dim=96,
    n_layers=3,
    n_heads=4,
    n_kv_heads=4,
    head_dim=24,
    ffn_dim=288,
    max_seq_len=1024,
    rope_theta=10000.0,
)
FLAVORS = {  # for the demos on characters; larger models come from --init_from
    "debug": Llama3Config(**SMALL),
    "debug_moe": Qwen3Config(**SMALL, n_experts=8, top_k=2, moe_ffn_dim=96),
}


# see flags/config.py
NEW_MODEL = Need("with --init_from, which brings a trained model", lambda c: not c.init_from)


@dataclass(kw_only=True)
class PolicyConfig:
    # a small Llama 3, or Qwen3 with experts
    flavor: Literal[tuple(FLAVORS)] = flag("debug", NEW_MODEL)
    model_args: str = ""  # fields of the flavor to change: "n_layers=4,dim=128"

    # not flags, as in pre-training: with --pp each rank has one stage, and the forwards of an update
    # are the micro-batches
    pp_schedule = "1F1B"
    pp_schedule_csv = ""
    pp_microbatch_size = 1
    pp_layers_per_stage = None
    pp_first_stage_less_layers = 1
    pp_last_stage_less_layers = 1
    pp_stage_fqns = ""


def model_of(cfg: Any, vocab_size: int) -> tuple[type, Any]:
    """(model class, model config) of the flavor or of --init_from. Raises ValueError."""
    if not cfg.init_from:
        config = override_fields(FLAVORS[cfg.flavor], cfg.model_args, "--model_args")
        # a multiple of 8, for --tp and for fast matmuls
        config = replace(config, vocab_size=-(-vocab_size // 8) * 8)
    else:
        if cfg.model_args and not is_hf_folder(cfg.init_from):
            raise ValueError(
                f"--model_args {cfg.model_args}: the model is that of --init_from "
                f"{cfg.init_from}; leave it out"
            )
        config = read_model(cfg.out, cfg.init_from, cfg.model_args)[1]
    if hasattr(config, "kv_lora_rank"):  # DeepSeek
        if cfg.tp > 1 and not cfg.engine and not cfg.gen_ranks:
            raise ValueError(
                f"--tp {cfg.tp}: tp cannot split DeepSeek's rollouts; use --dp_shard, --gen_ranks "
                "or --engine"
            )
    if mtp_depth_of(config):
        config = replace(config, mtp_depth=0)  # these losses have no second prediction
    return class_of(config), config


def split_model(model: nn.Module, layout: Layout, cfg: Any) -> None:
    """Tensor, expert and context parallelism of a model, or of a stage; shard() and init_weights()
    come later."""
    if cfg.tp > 1:
        parallel.tensor_parallel(model, layout, cfg)
    if layout.has_experts:
        expert_parallel(model, layout)
    if cfg.cp > 1:
        parallel.context_parallel(model, layout, cfg)


def build_policy(
    cfg: Any,
    layout,
    Model: type,
    model_config: Any,
    unknown: Tensor | None = None,
    skip: Callable[[str], bool] = lambda fqn: False,
) -> Any:
    """The model on its devices, or with --pp this rank's stage, for training and sampling. Called
    with labels: (log-probabilities, entropy), (B, T/cp) each.

    unknown: see Text.unknown_ids. skip: see parallel.init_weights. Log-probabilities are at the
    sampling temperature; otherwise
    the ratio of a policy to itself would not be 1.
    """
    with torch.device("meta"):
        model = Model(model_config)
    check_model(model, layout, parallel.TP_STYLES, cfg.ac, cfg.param_dtype)
    if layout.pp > 1:
        (model,) = pipeline_stages(model, layout, cfg)
    split_model(model, layout, cfg)
    if cfg.lora_rank:
        lora_linears(model, cfg)
    if cfg.ac not in ("none", "budget"):
        parallel.checkpoint_activations(model, cfg)
    if cfg.compile:
        # for training only: see whole_weights(), and rl/replay.py for rollouts
        parallel.compile_blocks(model, layout, cfg)
    parallel.shard(model, layout, cfg)
    parallel.init_weights(model, layout, cfg.seed, skip)
    logprobs = partial(token_logprobs, unknown=unknown)
    if layout.tp > 1:
        logprobs = partial(
            parallel.vocab_parallel_loss,
            mesh=layout.mesh["tp"],
            loss=token_logprobs,
            unknown=unknown,
        )
    model.token_loss = lambda h, weight, labels, denom: logprobs(h, weight, labels, cfg.temperature)
    if cfg.batch_invariant:
        model.make_attend = fixed_shape_attention
    model.unknown_ids = unknown
    return model


# those of a forward's tensors that the model takes
INPUTS = ("tokens", "labels", "positions", "doc_ids")


def forward(model: nn.Module, b: dict, layout: Layout):
    """(log-probabilities, entropy) of the labels of a forward's tensors, (B, T/cp) each. In a
    pipeline the last stage has them, and the others return zeros."""
    arguments = {name: b[name] for name in INPUTS if name in b}
    whole = replace(layout, microbatch_size=len(b["tokens"]))
    found = parallel.run_forwards([model], arguments, whole)
    if found:
        return found[0]
    zeros = torch.zeros_like(b["mu"])
    return zeros, zeros.clone()


def backward_of_pipeline(
    stage, batches: list[dict], loss_of: Callable[[int, Tensor, Tensor], Tensor], layout: Layout
) -> None:
    """Add the gradients of loss_of(i, log-probabilities, entropy) of each forward i, by torch's
    1F1B. All have one shape, see plan_forwards(). loss_of is called on the ranks of the last stage.
    """
    from distributed.schedule import run_schedule

    usual_loss = stage.token_loss
    turns = iter(range(len(batches)))  # the last stage takes the forwards in this order

    def loss_of_forward(*given):
        logprobs, entropy = usual_loss(*given)
        return loss_of(next(turns), logprobs, entropy)

    arguments = {}
    for name in INPUTS:
        if name in batches[0]:
            arguments[name] = torch.cat([b[name] for b in batches])
    stage.token_loss = loss_of_forward
    run_schedule([stage], arguments, len(batches), layout)
    stage.token_loss = usual_loss


def fixed_shape_attention(
    positions: Tensor, doc_ids: Tensor | None = None, reach: Tensor | None = None
) -> Callable[..., Tensor]:
    """--batch_invariant: the same kernel, mask and number of keys as in rollout()."""
    index = torch.arange(positions.shape[1], device=positions.device)
    distance = index[:, None] - index  # (T, T), from a query back to a key
    farthest = len(index)
    if reach is not None:
        farthest = reach[:, None, :, None]
    mask = (distance >= 0) & (distance < farthest)

    def attend(q, k, v, scale=None):
        return sdpa(q, k, v, mask, scale=scale)

    return attend


def list_weights(
    model, compute_dtype: torch.dtype, adapters_only: bool = False
) -> dict[str, tuple[Tensor, torch.dtype]]:
    """fqn -> (parameter or buffer, its dtype in the trainer's forward), sorted by fqn: FSDP casts
    all parameters and no buffers. A generator with other dtypes would compute other numbers: with
    an expert's selection bias in bf16, for instance, tokens would go to other experts.
    adapters_only: LoRA's, all that its training changes."""
    reshard(model)  # FSDP may hold gathered weights from before the optimizer's step
    found = {fqn: (p, compute_dtype) for fqn, p in model.named_parameters()}
    for fqn, b in model.named_buffers():
        found[fqn] = (b, b.dtype)
    names = sorted(found)
    if adapters_only:
        names = [fqn for fqn in names if is_adapter(fqn)]
    return {fqn: found[fqn] for fqn in names}


@torch.no_grad()
def pack_weights(
    found: dict[str, tuple[Tensor, torch.dtype]], layout: Layout, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Copy the tensors of list_weights() to the host of rank 0; other ranks get none. All trainer
    ranks call this function, because gathering a tensor is collective. With --pp each has the
    tensors of its stage, and rank 0 gets those of all."""
    packed = {}
    ranks = layout.world_size // layout.pp  # of a stage; its first rank sends
    # the ranks of a pipeline tell each other; all ranks of a large run would take long
    pipeline = None
    if layout.pp > 1:
        pipeline = layout.group("pp")
    facts = gather({fqn: (t.shape, dtype) for fqn, (t, dtype) in found.items()}, pipeline)
    owners = {}  # a tied tensor has two: the first stage sends it
    for stage in reversed(range(layout.pp)):
        for fqn in facts[stage]:
            owners[fqn] = stage
    for fqn, stage in sorted(owners.items()):  # one after the other
        whole = None
        if stage == layout.rank // ranks:
            whole = whole_tensor(found[fqn][0])
        if layout.rank in (0, stage * ranks):
            shape, dtype = facts[stage][fqn]
            # page-locked, so that the courier copies to the device without the CPU
            host = torch.empty(shape, dtype=dtype, pin_memory=layout.device.type == "cuda")
            if whole is not None:
                host.copy_(whole)
            if stage > 0 and layout.rank == 0:
                dist.recv(host, stage * ranks, group)
            elif stage > 0:
                dist.send(host, 0, group)
            if layout.rank == 0:
                packed[fqn] = host
    return packed


def keep_reference(trainer, is_new: bool, about: dict) -> None:
    """--kl_coef: the initial policy of this run. A new run writes <out>/reference, a continued run
    reads the folder."""
    cfg = trainer.cfg
    folder = f"{cfg.out}/reference"
    if is_new:
        reshard(trainer.model)
        trainer.reference.load_state_dict(trainer.model.state_dict())
        if trainer.layout.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # left by a run without a checkpoint
    plain = replace(cfg, init_from="", load_step=-1, checkpoint_async="off")
    store = Checkpoints(plain, folder, modules=[trainer.reference], optimizer=[], **about)
    if is_new:
        store.save(0, {}, last=True)
    else:
        store.load()
    store.close()
