"""Fine-tune a model of a folder, on conversations or text: all weights, or adapters beside them
(LoRA). train_llama3.py for a model that is trained already: Llama, Mistral, Qwen or DeepSeek,
according to --init_from.

    python finetune.py --init_from HUGGING_FACE_FOLDER --data chat.jsonl --seq_len 2048
    torchrun --nproc_per_node 2 finetune.py --init_from HUGGING_FACE_FOLDER --data chat.jsonl --lora_rank 16 --lr 2e-4 --tp 2
    python finetune.py --init_from runs/llama3 --data book.txt --out runs/book --export_hf runs/book-hf

The same command again continues the run. A run writes runs/finetune/{config.json, metrics.jsonl,
checkpoints/}; with LoRA a checkpoint holds the adapters alone. One conversation in 20 is for
validation.
Read next: `diff train_llama3.py finetune.py`, corpus/chat.py (tokens with a loss), lora/lora.py,
docs/finetune.md.
"""

import flags.interrupt  # noqa: F401  Ctrl-C ends in one line, from here on

import math
import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import torch

import parallel
from checkpoint import CheckpointConfig, Checkpoints, loaded_later
from data import DataConfig, open_data
from distributed.checks import check_documents, check_first_batch, check_model, check_replicas
from distributed.experts import balance_experts, expert_parallel
from distributed.float8 import Float8Config, float8_linears, float8_scales
from distributed.launch import LaunchConfig, StopSignal, connect, disconnect, set_timeouts
from distributed.layout import ExpertConfig, ParallelConfig
from distributed.pipeline import PipelineConfig, pipeline_stages
from distributed.refusals import check_layout
from flags.config import save_config
from generate import print_sample
from lora.lora import LoraConfig, claim_adapters, lora_counts, lora_linears
from sft.base import load_base, read_model
from sft.chat_data import ChatData
from storage.adapters import is_frozen
from storage.resume import check_start, claim_run, keep_batch, list_warnings
from storage.source_tokenizer import source_tokenizer
from tools.run import run
from training.metrics import Metrics, MetricsConfig
from training.optim import Guard, Optimizer, adamw, check_optimizer, set_lr


@dataclass(kw_only=True)
class Config(
    ParallelConfig,
    # finetune: and experts and adapters
    ExpertConfig,
    LaunchConfig,
    PipelineConfig,
    Float8Config,
    # finetune: as above
    LoraConfig,
    CheckpointConfig,
    DataConfig,
    MetricsConfig,
):
    # finetune: --init_from says what the model is, and nothing is trained on by default
    #
    # the model: a Hugging Face folder, a run folder's newest checkpoint, or one step folder
    init_from: str = ""
    # conversations or text (file, folder, glob), token shards, or name=path:weight,...
    data: str = ""
    # several conversations share a sequence and do not see each other; off: one in each, with
    # padding
    doc_mask: bool = True
    # fields of the model to change, where its weights allow that: "mtp_depth=0"
    model_args: str = ""
    # folder for all files of the run; the same folder again continues the run
    out: str = "runs/finetune"
    steps: int = 160  # optimizer steps
    # finetune: answers are longer than a demo's lines, and steps smaller than those from nothing
    seq_len: int = 1024  # tokens per sequence
    local_batch_size: int = 8  # sequences per forward of a data rank
    # sequences per optimizer step; -1 = local_batch_size x data ranks; a resumed run keeps its own
    global_batch_size: int = -1
    # muon: Muon for the blocks' matrices; adamw_sr: rounds bf16 weights by chance;
    # adamw_bf16_moments: half of AdamW's memory
    optimizer: Optimizer = "adamw"
    # finetune: for all weights; adapters take 1e-4 to 5e-4
    lr: float = 1e-5  # peak learning rate, reached after warmup_steps
    min_lr_ratio: float = 0.1  # the learning rate ends at this share of its peak
    warmup_steps: int = 20  # steps of linear warmup
    # share of the steps, at the end, over which lr decays; none = right after warmup
    decay_ratio: float | None = None
    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"  # shape of the decay
    # length of the learning rate schedule, if not the length of the run; -1 = steps
    schedule_steps: int = -1
    beta1: float = 0.9  # AdamW: decay of the gradient's mean
    beta2: float = 0.95  # AdamW: decay of the squared gradient's mean
    eps: float = 1e-8  # AdamW: added to the root of the squared gradient's mean
    weight_decay: float = 0.1  # weight decay, decoupled from the gradient
    # parameters with weight decay: matrices only, or norms as well
    wd_on: Literal["matrices", "all"] = "matrices"
    max_norm: float = 1.0  # gradients are scaled down to this norm; 0 = never
    # a NaN gradient changes no weight; stop = the run ends at the next log line
    on_nan: Literal["stop", "skip"] = "stop"
    seed: int = 0  # of the initial weights
    val_every: int = 50  # steps between validations (and one at the end); 0 = never
    # size of the validation set, in batches of 8 sequences; the same sequences in every layout
    val_batches: int = 8
    checkpoint_every: int = 100  # steps between checkpoints (and one at the end); 0 = never

    # rules of flags alone; check_layout has the rules of flags and model together
    def __post_init__(self):
        MetricsConfig.__post_init__(self)
        check_optimizer(self)
        # finetune: float8 does not go with frozen weights
        if self.lora_rank and self.float8 != "off":
            raise ValueError(
                f"--lora_rank {self.lora_rank} with --float8 {self.float8}: the frozen weights "
                "would be quantized "
                "again in every step; leave one of them out"
            )


def lr_at(step: int, cfg: Config) -> float:
    """Share of the peak learning rate at a step (from 1): warmup, stable, decay. A pure function,
    without state to save.

    The decay ends one step after the last, so that with --min_lr_ratio 0 the last step still
    learns.
    """
    total = cfg.schedule_steps
    if total == -1:
        total = cfg.steps
    warmup = min(cfg.warmup_steps, total)
    decay = total - warmup
    if cfg.decay_ratio is not None:
        decay = min(round(total * cfg.decay_ratio), decay)
    if step <= warmup:
        return step / max(warmup, 1)
    x = min(max(step - (total - decay), 0) / (decay + 1), 1.0)  # progress of the decay
    shape = {
        "cosine": 0.5 * (1 + math.cos(math.pi * x)),
        "linear": 1 - x,
        "sqrt": 1 - math.sqrt(x),
    }[cfg.decay_type]
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape


def build_optimizers(stages, cfg: Config) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest; one learning
    rate serves both."""
    matrices = []  # for Muon
    decayed = []
    undecayed = []
    for stage in stages:
        for fqn, p in stage.named_parameters():
            if not p.requires_grad:
                continue
            if cfg.optimizer == "muon" and p.dim() > 1 and fqn.startswith("blocks."):
                matrices.append(p)
            elif p.dim() > 1 or cfg.wd_on == "all":
                decayed.append(p)
            else:
                undecayed.append(p)
    groups = []
    if decayed:
        groups.append({"params": decayed, "weight_decay": cfg.weight_decay})
    if undecayed:
        groups.append({"params": undecayed, "weight_decay": 0.0})
    optimizers = []
    if groups:  # a pipeline stage in the middle may have matrices only
        optimizers.append(adamw(groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, cfg.optimizer))
    if matrices:
        from training.muon import Muon

        # updates as large as AdamW's, so that the learning rate and the decay carry over
        # (arXiv:2502.16982)
        optimizers.append(Muon(matrices, cfg.lr, cfg.weight_decay, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def main(cfg: Config):
    # 1. devices: wrong flags are refused here, before anything is built
    # finetune: the folder knows the model
    if not cfg.init_from or not cfg.data:
        raise ValueError(
            "fine-tuning needs a model and what to learn: --init_from FOLDER --data chat.jsonl"
        )
    Model, model_config = read_model(cfg.out, cfg.init_from, cfg.model_args)
    # a continued run keeps its global batch on any number of processes; the local one may shrink
    cfg = keep_batch(cfg)
    layout = check_layout(
        cfg,
        model_config,
        seq_len=cfg.seq_len,
        local_batch_size=cfg.local_batch_size,
        global_batch_size=cfg.global_batch_size,
        device=cfg.device,
    )

    # 2. data: one fixed global order of sequences; the layout decides only which rank reads which
    #    sequence
    check_start(cfg, model_config)  # an --init_from of another model is refused before that work
    # finetune: and adapters that do not fit
    adapters = claim_adapters(cfg, Model, model_config) if cfg.lora_rank else None
    tokenizer = source_tokenizer(
        cfg.data, cfg.tokenizer, cfg.out, cfg.init_from, cfg.load_step, cfg.exclude_from_loading
    )
    # finetune: conversations too, of which only the answers have a loss
    data = open_data(cfg, cfg.seq_len, tokenizer, ChatData, model_config.vocab_size)
    # lock --out; refuse if the run cannot go on, --init_from is unreadable or --export_hf
    # unwritable; print changed flags
    # finetune: adapters are a part of what a run is
    identity = claim_run(cfg, Model, model_config, data, lr_at, adapters)
    layout = parallel.make_mesh(
        connect(layout, cfg, cfg.device, cfg.seed, trace=f"{cfg.out}/trace")
    )
    set_timeouts(layout, cfg.init_timeout_s)
    # from here on a signal finishes the step and saves; before, a signal ends the process
    stop = StopSignal(cfg)

    # 3. model: shapes only, no memory yet
    with torch.device("meta"):
        # finetune: any model; LoRA trains none of its weights
        model = Model(model_config).requires_grad_(not cfg.lora_rank)
    check_model(model, layout, parallel.TP_STYLES, cfg.ac, cfg.param_dtype, cfg.optimizer)
    if cfg.doc_mask:
        check_documents(model, layout)
    n_params = sum(p.numel() for p in model.parameters())
    flops_per_token = model.flops_per_token(cfg.seq_len)
    # finetune: more parameters, and fewer FLOPs
    beside, more_flops = lora_counts(model, cfg) if cfg.lora_rank else ("", 0)
    flops_per_token += more_flops

    # 4. parallelism. The order matters: the pipeline picks the layers, float8 swaps linears before
    # TP splits them, CP
    #    replaces the attention, checkpointing wraps a block's forward, compile sees the wrapped block, FSDP's hooks gather
    #    weights around the compiled block and shard each rank's TP part once more; then memory is taken and filled.
    # finetune: LoRA comes after TP, because an adapter is split as the weight beside it, and after
    # EP, which makes new weights.
    stages = pipeline_stages(model, layout, cfg) if cfg.pp > 1 else [model]
    for stage in stages:
        if cfg.float8 != "off":
            float8_linears(stage, layout, cfg)
        if cfg.tp > 1:
            parallel.tensor_parallel(stage, layout, cfg)
        # finetune: experts have an axis of their own
        if layout.has_experts:
            expert_parallel(stage, layout)
        if cfg.cp > 1:
            parallel.context_parallel(stage, layout, cfg)
        # finetune: freeze all of this, and put adapters beside some linears
        if cfg.lora_rank:
            lora_linears(stage, cfg)
        if cfg.ac not in ("none", "budget"):  # a budget is the compiler's task
            parallel.checkpoint_activations(stage, cfg)
        if cfg.compile:
            parallel.compile_blocks(stage, layout, cfg)
        parallel.shard(stage, layout, cfg)
        # finetune: adapters are drawn, all else is loaded
        parallel.init_weights(
            stage, layout, cfg.seed, is_frozen if cfg.lora_rank else loaded_later(cfg, cfg.out)
        )

    # 5. optimizer: after sharding, so that optimizer state is sharded like the parameters
    optimizers = build_optimizers(stages, cfg)

    # 6. checkpoint: continue the run, on any layout
    # finetune: with LoRA a checkpoint holds the adapters, and names the folder of the frozen
    # weights
    base = None
    if cfg.lora_rank:
        base = partial(load_base, stages, cfg.init_from, lora_from=cfg.lora_from)
    checkpoints = Checkpoints(
        cfg,
        cfg.out,
        modules=stages,
        optimizer=optimizers,
        identity=identity,
        config=asdict(cfg),
        source=open(__file__).read(),
        tokenizer_file=data.tokenizer_file,
        # finetune: as above
        load_base=base,
        # finetune: what ends the answers is an end of the model
        learnt=data.learnt_ends(),
    )
    state = checkpoints.load() or {"step": 0, "samples": 0, "tokens": 0}
    # ranks with the same weights, data or flags must agree, or training would silently drift apart
    start = check_replicas(
        stages,
        layout,
        data=data.fingerprint,
        val_data=data.validation.fingerprint,
        flags=asdict(cfg),
    )
    if layout.rank == 0:
        where = layout.step_text(cfg.seq_len, stages[0].reduces_always)
        warnings = list_warnings(
            cfg.out, state["step"], cfg.steps, cfg.schedule_steps, cfg.warmup_steps, cfg.export_hf
        )
        # finetune: the folder has no flavor
        print(f"{Model.__name__}: {n_params:,} parameters{beside} | {where}{warnings}")
        print(
            data.plan(state["samples"] + (cfg.steps - state["step"]) * layout.global_batch_size),
            end="",
        )
    if state["step"] >= cfg.steps:
        return checkpoints.close(export=not os.path.exists(cfg.export_hf))  # export a finished run

    # 7. loop
    if layout.rank == 0:  # a finished run keeps the config.json of its training
        save_config(
            cfg,
            f"{cfg.out}/config.json",
            {"world_size": layout.world_size, **identity, **checkpoints.made_from},
        )
    first = state["step"] + 1
    metrics = Metrics(
        cfg.out,
        cfg,
        layout,
        flops_per_token,
        first_step=first,
        steps=cfg.steps,
        tokens=state["tokens"],
    )
    guard = Guard(optimizers, layout, start, cfg.out, cfg.on_nan, cfg.checkpoint_every, cfg.compile)
    mine = (cfg.local_batch_size, layout.data_rank, layout.data_ranks, layout.device)
    batches = data.batches(state["samples"], layout.global_batch_size, *mine)
    for step in range(first, cfg.steps + 1):
        batch = metrics.start_step(batches)
        if step == 1:
            check_first_batch(batch)
        lr = set_lr(optimizers, cfg.lr * lr_at(step, cfg))
        # the rank's share, for reduce_loss; gradients are complete
        loss = parallel.forward_backward(stages, batch, layout)
        grad_norm = parallel.clip_grad_norm(stages, cfg.max_norm, layout)
        # after a NaN gradient, step() changes nothing; decided on the GPU
        guard.before_update(step, grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if cfg.float8_all_gather:
            float8_scales(stages)
        # finetune: how busy the experts are
        balance = balance_experts(stages, layout, "none", 0.0) if layout.has_experts else {}
        metrics.end_step(layout.global_batch_size * cfg.seq_len)
        state = {
            "step": step,
            "samples": state["samples"] + batch.samples,
            "tokens": metrics.tokens,
        }

        stopping = stop.agreed(layout) and step < cfg.steps
        last = step == cfg.steps or stopping
        saving = cfg.checkpoint_every and (
            step % cfg.checkpoint_every == 0 or last or step == 1 and cfg.checkpoint_first_step
        )
        validating = cfg.val_every and (step % cfg.val_every == 0 or step == cfg.steps)
        if metrics.due(step) or saving or validating or stopping:
            guard.report(step)
        if metrics.due(step):
            loss, loss_max = parallel.reduce_loss(loss, layout)
            metrics.log(
                step,
                # finetune: the epochs of a mixture, and how busy the experts are
                extra=data.epochs(state["samples"]) | balance,
                loss=loss,
                loss_max=loss_max,
                grad_norm=grad_norm,
                lr=lr,
                tokens_hash=metrics.reduce_hash(batch.hash),
            )
        if step == first:
            set_timeouts(layout, cfg.train_timeout_s)
        if saving:  # before the validation: a signal may leave little time
            checkpoints.save(
                step, state, last=last, model_only=cfg.last_save_model_only and step == cfg.steps
            )
        if validating:
            metrics.log_val(
                step,
                *parallel.evaluate(stages, data.val_batches(8 * cfg.val_batches, *mine), layout),
            )
        if (saving or validating) and not stopping and step < cfg.steps:
            # a signal that came meanwhile: no other step is trained, and none is saved twice
            stopping = stop.agreed_now(layout)
            if stopping and cfg.checkpoint_every and not saving:
                checkpoints.save(step, state, last=True)
        if stopping:
            break
    batches.close()
    checkpoints.close(export=not stopping)
    metrics.close()
    disconnect()
    if stopping:
        return stop.report(step, layout)  # a status of its own: the run is not finished
    if layout.rank == 0 and cfg.checkpoint_every:
        # finetune: an answer to the beginning of a held-out question, or text
        print_sample(cfg.out, n_params, data)


if __name__ == "__main__":
    run(main, Config)
