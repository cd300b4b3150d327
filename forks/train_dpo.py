"""Direct preference optimization (DPO, arXiv:2305.18290): grpo.py for pairs of answers, of which
people preferred one.

    python forks/train_dpo.py --init_from HUGGING_FACE_FOLDER --data pairs.jsonl --seq_len 1024
    torchrun --nproc_per_node 4 forks/train_dpo.py --init_from FOLDER --data pairs.jsonl --lora_rank 16 --lr 1e-5 --tp 2

A line of pairs.jsonl is as TRL reads it: {"prompt", "chosen", "rejected"}, all texts or all lists
of messages. If there is no prompt, the prompt is the common beginning of chosen and rejected.

DPO is a policy gradient, so grpo.Trainer computes it, in any layout, packed or not. With y+ chosen
and y- rejected,

    m = beta * (log pi(y+)/ref(y+) - log pi(y-)/ref(y-)),   loss = -log sigmoid(m)
    d loss = -beta * sigmoid(-m) * (d log pi(y+) - d log pi(y-))

the gradient of a pair is the one of two samples with the advantages +w and -w, w = beta *
sigmoid(-m). No token has to be
sampled: score_pairs() takes the place of the rollouts and set_advantages() the place of the
rewards. ref is the initial policy:
with --lora_rank the model without adapters, else a second copy of the weights, kept in
<out>/reference.

A comment that begins with "dpo:" says where a part differs from the part of grpo.py with the same
name or number. The same command again continues the run. A run writes runs/dpo/{config.json,
metrics.jsonl, checkpoints/}.
"""

import hashlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

# dpo: beside the folder of the rest
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from checkpoint import CheckpointConfig, Checkpoints, loaded_later
from corpus.chat import prepare_message, read_template, remove_marks
from distributed.checks import check_replicas
from distributed.experts import balance_experts
from distributed.launch import LaunchConfig, StopSignal, connect, disconnect, set_timeouts
from distributed.layout import ExpertConfig, ParallelConfig, n_experts_of, reshard
from distributed.refusals import check_layout, refuse
from flags.config import Need, check_range, flag, save_config
from flags.files import step_folders
from grpo import LOSSES, ROWS, Trainer, lr_at
from lora.lora import LoraConfig, claim_adapters, lora_counts
from parallel import make_mesh
from rl.datasets import Text
from rl.packing import pieces
from rl.policy import build_policy, forward, keep_reference, model_of
from rl.sample import Sample, n_read
from sft.base import load_base
from storage.adapters import is_frozen
from storage.resume import check_run, lock_run, wait_for_run
from storage.source_tokenizer import text_folder
from tools.run import run
from training.metrics import Metrics, MetricsConfig


@dataclass(kw_only=True)
class Config(
    ParallelConfig, ExpertConfig, LaunchConfig, LoraConfig, CheckpointConfig, MetricsConfig
):
    REFUSED = ("pp", "loss_parallel", "load_only", "exclude_from_loading")  # as in grpo.py
    # dpo: what grpo.py's functions ask a config for, and DPO has no choice about
    clip_low = clip_high = None
    tis = 0.0
    tis_mode = ""
    kl_coef = 0.0
    minibatches = 1
    max_new_tokens = 1
    temperature = 1.0
    batch_invariant = False
    # the model: a Hugging Face folder, a run folder's newest checkpoint, or one step folder
    init_from: str = ""
    data: str = ""  # pairs of answers, a .jsonl file
    # fields of the model to change, where its weights allow that: "mtp_depth=0"
    model_args: str = ""
    # folder for all files of the run; the same folder again continues the run
    out: str = "runs/dpo"
    steps: int = 100  # optimizer steps
    pairs_per_step: int = 16  # pairs per step, over all ranks
    val_pairs: int = 0  # the last pairs of the file are for validation
    # steps between validations
    val_every: int = flag(50, Need("without --val_pairs", lambda c: c.val_pairs))
    # prompt and answer together, in tokens; longer pairs are left out, and counted
    seq_len: int = 1024
    # how much a log-ratio counts: a small beta lets the policy go far from the reference
    beta: float = 0.1
    # peak learning rate, reached after warmup_steps; adapters take ten times as much
    lr: float = 1e-6
    min_lr_ratio: float = 0.1  # the learning rate falls linearly to this share of the peak
    warmup_steps: int = 10  # steps of linear warmup
    beta1: float = 0.9  # AdamW: decay of the gradient's mean
    beta2: float = 0.95  # AdamW: decay of the squared gradient's mean
    eps: float = 1e-8  # AdamW: added to the root of the squared gradient's mean
    weight_decay: float = 0.0  # AdamW: weight decay, decoupled from the gradient
    max_norm: float = 1.0  # gradients are scaled down to this norm; 0 = never
    local_batch_size: int = flag(8, ROWS)  # answers per forward of a data rank
    # pack answers into sequences of up to this many tokens, one per forward; 0 = a row for each
    # answer
    pack_tokens: int = 0
    seed: int = 0  # of the order of the pairs, and of adapters
    log_every: int = 10  # steps between printed lines; metrics.jsonl has every step
    checkpoint_every: int = 100  # steps between checkpoints (and one at the end); 0 = never
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = a GPU, else the CPU

    def __post_init__(self):
        MetricsConfig.__post_init__(self)
        check_range(self, 1, math.inf, "steps", "pairs_per_step", "val_every", "local_batch_size")
        check_range(self, 0, math.inf, "lr", "eps", "weight_decay", "max_norm", "beta", "val_pairs")
        check_range(self, 0, 1, "beta1", "beta2", "min_lr_ratio")
        step = pieces(self)
        refuse(
            [
                (
                    self.pp > 1,
                    f"--pp {self.pp}: grpo.Trainer has no pipeline; use --tp, --dp_shard or --cp",
                ),
                (
                    self.lora_from,
                    f"--lora_from {self.lora_from}: the reference would be the model without these "
                    "adapters; merge them, --init_from ADAPTER_FOLDER",
                ),
                (
                    not self.loss_parallel,
                    "--no-loss_parallel: under tp log-probabilities are split over the vocabulary",
                ),
                (
                    self.load_only or self.exclude_from_loading,
                    "--load_only, --exclude_from_loading: a run goes on as a whole",
                ),
                (
                    self.compile and not self.pack_tokens,
                    "--compile needs --pack_tokens: packed sequences have one length",
                ),
                (
                    0 < self.pack_tokens < self.seq_len or self.pack_tokens % step,
                    f"--pack_tokens {self.pack_tokens} must be a multiple of {step} and at least "
                    f"--seq_len {self.seq_len}",
                ),
            ]
        )


# ---------------------------------------------------------- pairs, in place of prompts and rollouts
def split_pair(record: dict) -> tuple:
    """(prompt, chosen, rejected), each a text or a list of messages. Without a prompt the common
    beginning is the prompt, up to a blank, as TRL's extract_prompt takes it. Raises ValueError."""
    prompt = record.get("prompt")
    chosen = record.get("chosen")
    rejected = record.get("rejected")
    if prompt is None and type(chosen) is type(rejected) and isinstance(chosen, str | list):
        n = 0  # length of the common beginning
        while n < min(len(chosen), len(rejected)) and chosen[n] == rejected[n]:
            n += 1
        if n > 0 and chosen[n - 1] == " ":
            n -= 1
        prompt = chosen[:n]
        chosen = chosen[n:]
        rejected = rejected[n:]
    same_type = type(prompt) is type(chosen) is type(rejected) and isinstance(prompt, str | list)
    if not same_type or not (prompt and chosen and rejected):
        raise ValueError(
            'need {"prompt": ..., "chosen": ..., "rejected": ...}, all texts or all lists of '
            "messages, none empty"
        )
    return prompt, chosen, rejected


def pair_of(record: dict, text: Text, template) -> list[Sample]:
    """[chosen, rejected] as grpo.py's samples. template: of the folder, for messages; plain texts end with the end token."""
    prompt, *answers = split_pair(record)
    if isinstance(prompt, str):
        begin = text.ids(prompt, text.bos)
        ends = [text.ids(answer) + [text.eot] for answer in answers]
    else:
        prompt, *answers = (
            [prepare_message(message) for message in part] for part in (prompt, *answers)
        )
        written = remove_marks(template.render(prompt, None, True))
        whole = [remove_marks(template.render(prompt + answer, None)) for answer in answers]
        if not all(full.startswith(written) and len(full) > len(written) for full in whole):
            raise ValueError(
                f"{template.name} writes the prompt in another way than the whole conversation"
            )
        begin = text.ids(written)
        ends = [text.ids(full[len(written) :]) for full in whole]
    pair = []
    for ids in ends:
        n = len(ids)
        answer = Sample(prompt=begin or [text.eot], ids=ids, logprobs=[0.0] * n, mask=[1.0] * n)
        answer.advantage = 0.0
        pair.append(answer)
    return pair


def read_pairs(cfg: Config) -> tuple[list[list[Sample]], Text, str]:
    """(pairs that fit into --seq_len, tokenizer, hash of the pairs). Raises ValueError naming the
    line."""
    text = Text(cfg.init_from)
    template = None
    pairs = []
    for number, line in enumerate(Path(cfg.data).read_text("utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            if template is None and isinstance(record["chosen"], list):
                template = read_template(text_folder(cfg.init_from), cfg.data)
            # markers in a template are tokens, in other texts plain text
            text.tokenizer.encode_special_tokens = isinstance(record["chosen"], str)
            pairs.append(pair_of(record, text, template))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{cfg.data}, line {number}: {error!r}") from None
    kept = [pair for pair in pairs if max(map(n_read, pair)) <= cfg.seq_len]
    if len(kept) - cfg.val_pairs < cfg.pairs_per_step:
        raise ValueError(
            f"{cfg.data} has {len(kept)} pairs of at most --seq_len {cfg.seq_len} tokens, "
            "--val_pairs "
            f"{cfg.val_pairs} of them for validation: too few for --pairs_per_step "
            f"{cfg.pairs_per_step}"
        )
    if len(kept) < len(pairs) and int(os.environ.get("RANK", 0)) == 0:
        print(
            f"{cfg.data}: {len(pairs) - len(kept)} of {len(pairs)} pairs are longer than "
            f"--seq_len {cfg.seq_len}, left out"
        )
    text.tokenizer.encode_special_tokens = template is None
    return kept, text, hash_of(kept)


def hash_of(pairs: list[list[Sample]]) -> str:
    """A run continues with the same pairs only."""
    names = ("prompt", "ids", "logprobs", "mask", "advantage")
    content = []
    for pair in pairs:
        content.append([{name: vars(s)[name] for name in names} for s in pair])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def pairs_of_step(step: int, n: int, cfg: Config) -> list[int]:
    """Numbers of a step's pairs: epochs of n pairs one after the other, each in an order of its
    own. A pure function."""
    places = range((step - 1) * cfg.pairs_per_step, step * cfg.pairs_per_step)
    orders = {}  # epoch -> its order
    for epoch in range(places[0] // n, places[-1] // n + 1):
        generator = torch.Generator().manual_seed(cfg.seed * 1_000_003 + epoch)
        orders[epoch] = torch.randperm(n, generator=generator).tolist()
    return [orders[place // n][place % n] for place in places]


# ---------------------------------------------------------------- the algorithm
@torch.no_grad()
def score_pairs(trainer: Trainer, pairs: list[list[Sample]]) -> torch.Tensor:
    """(2, 2 * pairs) fp64: log-likelihood of each answer under the policy and under the reference,
    the same on every rank. The answers keep the policy's log-probabilities, as samples keep their
    sampler's."""
    samples = sum(pairs, [])
    layout = trainer.layout
    n = [len(s.ids) for s in samples]
    # the last number is for prompts and padding
    table = torch.zeros(2, sum(n) + 1, device=layout.device)
    for _, b in trainer.microbatches(samples):
        table[0, b["at"]] = forward(trainer.model, b, layout)[0]
        table[1, b["at"]] = trainer.reference_logprobs(b)
    reshard(trainer.model)
    if trainer.reference is not None:
        reshard(trainer.reference)
    if layout.coordinate("tp"):  # all tp ranks have the same numbers
        table.zero_()
    # the rank that trains an answer may not be the rank that scored it; cp ranks share an answer
    dist.all_reduce(table)
    policy, reference = (row[:-1].split(n) for row in table.cpu())
    for s, logprobs in zip(samples, policy):
        s.logprobs = logprobs.tolist()
    return torch.tensor(
        [[part.double().sum().item() for part in row] for row in (policy, reference)],
        dtype=torch.float64,
    )


def preference_loss(
    scores: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, margin, weight) of each pair, from score_pairs()."""
    chosen, rejected = (beta * (scores[0] - scores[1])).view(-1, 2).unbind(1)  # implicit rewards
    margin = chosen - rejected
    return -F.logsigmoid(margin), margin, beta * torch.sigmoid(-margin)


def update_policy(trainer: Trainer, pairs: list[list[Sample]], beta: float, lr: float) -> dict:
    """One step. dpo: advantages are weights of pairs, and the loss is divided by their number."""
    scores = score_pairs(trainer, pairs)
    loss, margin, weight = preference_loss(scores, beta)
    for (chosen, rejected), w in zip(pairs, weight.tolist()):
        chosen.advantage = w
        rejected.advantage = -w
    # the policy that is trained has scored: the ratio is 1, never clipped
    found = trainer.train_on(sum(pairs, []), LOSSES["dapo"])
    trainer.denominator = len(pairs)
    line = vars(found) | numbers_of(loss, margin)
    line["grad_norm"] = trainer.optim_step(lr)
    line["policy_version"] = trainer.policy_version
    line["logprob_chosen"] = scores[0, ::2].mean().item()
    line["logprob_rejected"] = scores[0, 1::2].mean().item()
    return line


def numbers_of(loss, margin) -> dict:
    return dict(
        loss=loss.mean().item(),
        loss_max=loss.max().item(),
        margin=margin.mean().item(),
        accuracy=(margin > 0).double().mean().item(),
    )


# ---------------------------------------------------------------- the run
def main(cfg: Config):
    # 1. task, model and devices: all wrong flags are found before anything is built
    if not cfg.init_from or not cfg.data:
        raise ValueError("DPO needs a model and pairs: --init_from FOLDER --data pairs.jsonl")
    pairs, text, data_hash = read_pairs(cfg)
    Model, model_config = model_of(cfg, text.tokenizer.get_vocab_size())
    layout = check_layout(
        cfg,
        model_config,
        seq_len=cfg.seq_len,
        local_batch_size=cfg.local_batch_size,
        global_batch_size=-1,
        device=cfg.device,
    )
    wait_for_run(cfg.out)
    # dpo: the pairs are a part of what a run is
    model_identity = {"module": Model.__module__, "class": Model.__name__, **asdict(model_config)}
    identity = {
        "model": model_identity,
        "data": {"pairs": data_hash, "seed": cfg.seed},
        "optimizer": {"name": "adamw"},
    }
    if cfg.lora_rank:
        identity["lora"] = claim_adapters(cfg, Model, model_config)
    check_run(cfg.out, identity, cfg, lr_at)

    # 2. dpo: no ranks that only sample
    lock_run(cfg.out)
    os.makedirs(cfg.out, exist_ok=True)
    layout = make_mesh(connect(layout, cfg, cfg.device, cfg.seed, trace=f"{cfg.out}/trace"))
    set_timeouts(layout, cfg.init_timeout_s)
    stop = StopSignal(cfg)

    # 3. model, 4. parallelism, 5. optimizer
    with torch.device("meta"):
        plain = Model(model_config)
    n_params = sum(p.numel() for p in plain.parameters())
    adapters, more_flops = lora_counts(plain, cfg) if cfg.lora_rank else ("", 0)
    flops_per_token = plain.flops_per_token(cfg.seq_len) + more_flops
    build = partial(
        build_policy,
        cfg,
        layout,
        Model,
        model_config,
        text.unknown_ids(model_config.vocab_size, layout.device),
    )
    model = build(is_frozen if cfg.lora_rank else loaded_later(cfg, cfg.out))
    # dpo: always a reference
    reference = None if cfg.lora_rank else build(lambda fqn: True)  # filled by keep_reference
    trainer = Trainer(cfg, layout, model, reference)

    # 6. checkpoint: of this run, else --init_from's weights
    is_new = not step_folders(cfg.out)
    about = dict(
        identity=identity,
        config=asdict(cfg),
        source=open(__file__).read(),
        tokenizer_file=text.file,
    )
    base = None
    if cfg.lora_rank:
        base = partial(load_base, [model], cfg.init_from, lora_from=cfg.lora_from)
    checkpoints = Checkpoints(
        cfg, cfg.out, modules=[model], optimizer=trainer.optimizer, load_base=base, **about
    )
    state = checkpoints.load() or {"step": 0, "tokens": 0, "policy_version": 0}
    trainer.policy_version = state["policy_version"]
    first = state["step"] + 1
    if reference is not None:
        keep_reference(trainer, is_new, about)
    check_replicas([model], layout, flags=asdict(cfg), pairs=data_hash)
    pairs, held_out = pairs[: len(pairs) - cfg.val_pairs], pairs[len(pairs) - cfg.val_pairs :]
    if layout.rank == 0:
        if first <= cfg.steps:
            about_run = {
                "torch": torch.__version__,
                "world_size": layout.world_size,
                **identity,
                **checkpoints.made_from,
            }
            save_config(cfg, f"{cfg.out}/config.json", about_run)
        print(
            f"{Model.__name__}: {n_params:,} parameters{adapters} | {layout} on "
            f"{layout.device.type} | {len(pairs):,} pairs, "
            f"{cfg.pairs_per_step} per step",
            flush=True,
        )

    # 7. loop
    metrics = Metrics(
        cfg.out,
        cfg,
        layout,
        flops_per_token,
        first_step=first,
        steps=cfg.steps,
        tokens=state["tokens"],
    )
    stopping = False
    for step in range(first, cfg.steps + 1):
        # dpo: pairs of a file, scored by the policy and the reference
        batch = metrics.start_step(iter([[pairs[i] for i in pairs_of_step(step, len(pairs), cfg)]]))
        lr = cfg.lr * lr_at(step, cfg)
        line = update_policy(trainer, batch, cfg.beta, lr)
        if n_experts_of(model_config):
            line |= balance_experts([model], layout, "none", 0.0)
        metrics.end_step(sum(n_read(s) + 1 for pair in batch for s in pair))
        tokens_hash = hashlib.sha256(
            json.dumps([s.ids for pair in batch for s in pair]).encode()
        ).hexdigest()[:16]
        metrics.log(
            step,
            loss=line["loss"],
            loss_max=line["loss_max"],
            grad_norm=line["grad_norm"],
            lr=lr,
            tokens_hash=tokens_hash,
            extra=line,
        )
        if held_out and (step % cfg.val_every == 0 or step == cfg.steps):
            found = numbers_of(*preference_loss(score_pairs(trainer, held_out), cfg.beta)[:2])
            if layout.rank == 0:
                metrics.write(
                    {"step": step, "val_loss": found["loss"], "val_accuracy": found["accuracy"]}
                )
                print(
                    f"step {step}: validation loss {found['loss']:.4f}, accuracy "
                    f"{found['accuracy']:.3f}",
                    flush=True,
                )
        state = {"step": step, "tokens": metrics.tokens, "policy_version": trainer.policy_version}
        if step == first:
            set_timeouts(layout, cfg.train_timeout_s)
        stopping = stop.agreed(layout) and step < cfg.steps
        last = step == cfg.steps or stopping
        if cfg.checkpoint_every and (
            step % cfg.checkpoint_every == 0 or last or step == 1 and cfg.checkpoint_first_step
        ):
            checkpoints.save(
                step, state, last=last, model_only=cfg.last_save_model_only and step == cfg.steps
            )
            if not last:
                stopping = stop.agreed_now(layout)  # a signal that came during the save
        if stopping:
            break
    checkpoints.close(export=not stopping and not os.path.exists(cfg.export_hf))
    metrics.close()
    disconnect()
    if stopping:
        return stop.report(step, layout)


if __name__ == "__main__":
    run(main, Config)
