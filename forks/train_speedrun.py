"""train_llama3.py as a speedrun: `make train`'s bits per byte in a fraction of its CPU seconds, see
docs/speedrun.md.

    OMP_NUM_THREADS=1 python forks/train_speedrun.py                  # the record, with seed 0
    torchrun --nproc_per_node 2 forks/train_speedrun.py --tp 2

Lines that differ from train_llama3.py stand under a comment that begins with "speedrun:".
"""

import math
import os
import sys
from dataclasses import asdict, dataclass
from typing import Literal

import torch

# speedrun: beside the folder of the rest
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import parallel
from checkpoint import CheckpointConfig, Checkpoints, loaded_later
from data import DataConfig, open_data
from distributed.checks import check_documents, check_first_batch, check_model, check_replicas
from distributed.float8 import Float8Config, float8_linears, float8_scales
from distributed.launch import LaunchConfig, StopSignal, connect, disconnect, set_timeouts
from distributed.layout import ParallelConfig
from distributed.pipeline import PipelineConfig, pipeline_stages
from distributed.refusals import check_layout
from flags.config import override_fields, save_config
from forks.speedrun import FLAVORS, Speedrun
from generate import print_sample
from storage.resume import check_start, claim_run, keep_batch, list_warnings
from storage.source_tokenizer import source_tokenizer
from tools.run import run
from training.metrics import Metrics, MetricsConfig
from training.optim import Guard, Optimizer, adamw, check_optimizer, set_lr


@dataclass(kw_only=True)
class Config(
    ParallelConfig,
    LaunchConfig,
    PipelineConfig,
    Float8Config,
    CheckpointConfig,
    DataConfig,
    MetricsConfig,
):
    flavor: Literal[tuple(FLAVORS)] = "debug"  # model size: see FLAVORS in forks/speedrun.py
    model_args: str = ""  # fields of the flavor to change for an ablation: "n_layers=4,dim=512"
    # folder for all files of the run; the same folder again continues the run
    out: str = "runs/speedrun"
    # speedrun: more steps of fewer tokens, in short sequences
    steps: int = 480  # optimizer steps
    seq_len: int = 64  # tokens per sequence
    # tokens per sequence of the validation: the text that train_llama3.py validates on
    val_seq_len: int = 256
    local_batch_size: int = 16  # sequences per forward of a data rank
    # sequences per optimizer step; -1 = local_batch_size x data ranks; a resumed run keeps its own
    global_batch_size: int = -1
    # speedrun: Muon, and higher rates, which fall to 0 in a straight line
    #
    # muon: Muon for the blocks' matrices; adamw_sr: rounds bf16 weights by chance;
    # adamw_bf16_moments: half of AdamW's memory
    optimizer: Optimizer = "muon"
    lr: float = 2e-2  # peak learning rate, reached after warmup_steps
    embed_lr: float = 15.0  # learning rate of the embedding, as a multiple of lr
    min_lr_ratio: float = 0.0  # the learning rate ends at this share of its peak
    warmup_steps: int = 40  # steps of linear warmup
    # share of the steps, at the end, over which lr decays; none = right after warmup
    decay_ratio: float | None = None
    # speedrun: see above
    decay_type: Literal["cosine", "linear", "sqrt"] = "linear"  # shape of the decay
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
    # speedrun: one validation, at the end
    val_every: int = 100000  # steps between validations (and one at the end); 0 = never
    # size of the validation set, in batches of 8 sequences; the same sequences in every layout
    val_batches: int = 8
    # speedrun: no checkpoint
    checkpoint_every: int = 0  # steps between checkpoints (and one at the end); 0 = never

    # rules of flags alone; check_layout has the rules of flags and model together
    def __post_init__(self):
        MetricsConfig.__post_init__(self)
        check_optimizer(self)


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


# speedrun: the embedding has a learning rate of its own
# differs from llama3: see the line above
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
    # speedrun: the first of all parameters is the embedding, on the first pipeline stage
    first, _ = next(stages[0].named_parameters())
    if first == "tok_embeddings.weight":
        embedding = decayed.pop(0)
        groups.append({"params": [embedding], "weight_decay": 0.0, "lr": cfg.embed_lr * cfg.lr})
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
    model_config = override_fields(FLAVORS[cfg.flavor], cfg.model_args, "--model_args")
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
    tokenizer = source_tokenizer(
        cfg.data, cfg.tokenizer, cfg.out, cfg.init_from, cfg.load_step, cfg.exclude_from_loading
    )
    data = open_data(cfg, cfg.seq_len, tokenizer, vocab_size=model_config.vocab_size)
    # speedrun: always the same text, however short the sequences of the training are
    data.validation = open_data(cfg, cfg.val_seq_len, tokenizer).validation
    # lock --out; refuse if the run cannot go on, --init_from is unreadable or --export_hf
    # unwritable; print changed flags
    identity = claim_run(cfg, Speedrun, model_config, data, lr_at)
    layout = parallel.make_mesh(
        connect(layout, cfg, cfg.device, cfg.seed, trace=f"{cfg.out}/trace")
    )
    set_timeouts(layout, cfg.init_timeout_s)
    # from here on a signal finishes the step and saves; before, a signal ends the process
    stop = StopSignal(cfg)

    # 3. model: shapes only, no memory yet
    with torch.device("meta"):
        model = Speedrun(model_config)
    check_model(model, layout, parallel.TP_STYLES, cfg.ac, cfg.param_dtype, cfg.optimizer)
    if cfg.doc_mask:
        check_documents(model, layout)
    n_params = sum(p.numel() for p in model.parameters())
    flops_per_token = model.flops_per_token(cfg.seq_len)

    # 4. parallelism. The order matters: the pipeline picks the layers, float8 swaps linears before
    #    TP splits them, CP replaces the attention, checkpointing wraps a block's forward, compile
    #    sees the wrapped block, FSDP's hooks gather weights around the compiled block and shard
    #    each rank's TP part once more; then memory is taken and filled.
    stages = pipeline_stages(model, layout, cfg) if cfg.pp > 1 else [model]
    for stage in stages:
        if cfg.float8 != "off":
            float8_linears(stage, layout, cfg)
        if cfg.tp > 1:
            parallel.tensor_parallel(stage, layout, cfg)
        if cfg.cp > 1:
            parallel.context_parallel(stage, layout, cfg)
        if cfg.ac not in ("none", "budget"):  # a budget is the compiler's task
            parallel.checkpoint_activations(stage, cfg)
        if cfg.compile:
            parallel.compile_blocks(stage, layout, cfg)
        parallel.shard(stage, layout, cfg)
        # the same weights in every layout
        parallel.init_weights(stage, layout, cfg.seed, loaded_later(cfg, cfg.out))

    # 5. optimizer: after sharding, so that optimizer state is sharded like the parameters
    optimizers = build_optimizers(stages, cfg)

    # 6. checkpoint: continue the run, on any layout
    checkpoints = Checkpoints(
        cfg,
        cfg.out,
        modules=stages,
        optimizer=optimizers,
        identity=identity,
        config=asdict(cfg),
        source=open(__file__).read(),
        tokenizer_file=data.tokenizer_file,
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
        print(f"{cfg.flavor}: {n_params:,} parameters | {where}{warnings}")
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
                # epochs of each part of a mixture
                extra=data.epochs(state["samples"]),
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
        # the built-in text is Python: "def "
        print_sample(cfg.out, n_params, None if cfg.data == "stdlib" else data)


if __name__ == "__main__":
    run(main, Config)
