"""Flags that are gone: typed, they are answered with the reason and what to type instead, for at least
a year. CHANGELOG.md has the same, with the commits.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Gone(NamedTuple):
    names: str  # of the flags
    programs: str  # that once had these flags
    since: str  # the first version without the flags
    why: str
    instead: str  # what to type; "": nothing


# A program is known by flags of its own, so that a copy of a recipe answers like the recipe.
PROGRAMS = {"grpo": "group_size", "evaluate": "task", "finetune": "lora_rank", "train": "steps"}
GONE = [
    Gone(
        "muon_lr",
        "train",
        "0.1.0",
        "Muon's updates are scaled to the size of AdamW's, so one learning rate serves both "
        "optimizers",
        "--lr",
    ),
    Gone(
        "layer_times",
        "train grpo",
        "0.3.0",
        "the profiler shows the time of every block",
        "--profile 10-12",
    ),
    Gone(
        "certify",
        "train",
        "0.5.0",
        "certificates of small versions of a layout were dropped",
        "--check_parity with the flags of the layout itself",
    ),
    Gone(
        "plan",
        "train grpo",
        "0.5.0",
        "predicted speeds were dropped; the dry run reports memory, traffic, FLOPs, bubble and "
        "the least time of a step",
        "--dry_run",
    ),
    Gone(
        "devices_per_node network_gb_s nvlink_gb_s",
        "train grpo",
        "0.5.0",
        "it belonged to --plan, which was dropped",
        "--dry_run",
    ),
    Gone(
        "optimizer_in_backward",
        "train grpo",
        "0.5.0",
        "there is no optimizer step in the backward any more",
        "--ac full, --cpu_offload or --param_dtype bfloat16",
    ),
    Gone(
        "lora_rank lora_alpha lora_on",
        "train",
        "0.5.0",
        "adapters (LoRA) are trained by finetune.py",
        "python finetune.py --init_from FOLDER --lora_rank 16",
    ),
    Gone(
        "lora_base",
        "train grpo",
        "0.5.0",
        "the base of a PEFT adapter is read from its adapter_config.json",
        "correct base_model_name_or_path in adapter_config.json, then --init_from ADAPTER_FOLDER",
    ),
    Gone(
        "lora_nf4",
        "train grpo",
        "0.5.0",
        "frozen weights in 4 bits (QLoRA) were dropped",
        "--ac full or --cpu_offload",
    ),
    Gone(
        "routing_replay",
        "grpo",
        "0.5.0",
        "replaying the generator's experts was dropped; importance sampling corrects the loss for "
        "other experts",
        "--tis 2",
    ),
    Gone(
        "attention",
        "train finetune grpo evaluate",
        "0.5.0",
        "cuDNN's kernel is tried first on H100, H200 and B200, flash on others",
        "",
    ),
    Gone(
        "flight_recorder",
        "train finetune grpo evaluate",
        "0.5.0",
        "with NCCL the last collectives are always kept, and written to the run's trace folder "
        "when one times out",
        "",
    ),
    Gone(
        "reduce_grads",
        "train finetune grpo evaluate",
        "0.5.0",
        "gradients are reduced after each micro-batch where whole ones take too much memory",
        "",
    ),
    Gone(
        "adamw_moments",
        "train finetune",
        "0.5.0",
        "moments in bfloat16 are a value of --optimizer, smaller ones were dropped",
        "--optimizer adamw_bf16_moments",
    ),
    Gone(
        "stochastic_rounding",
        "train finetune",
        "0.5.0",
        "it became a value of --optimizer",
        "--optimizer adamw_sr --param_dtype bfloat16",
    ),
    Gone(
        "float8_experts",
        "train finetune grpo",
        "0.5.0",
        "float8 for the stacked experts was a prototype that nobody measured, they stay in the "
        "compute dtype, and --float8 of the training recipes changes linears only",
        "",
    ),
    Gone(
        "moe_load_per_layer",
        "train",
        "0.5.0",
        "metrics.jsonl has moe_load_max_over_mean; the loads of each layer are the table in "
        "balance_experts",
        "",
    ),
    Gone(
        "text_column",
        "train finetune",
        "0.5.0",
        "a file with another name than text is prepared once",
        "python data.py prepare --input FILE --text_column NAME --tokenizer TOKENIZER --out "
        "FOLDER, then --data FOLDER",
    ),
    Gone(
        "engine_requests",
        "grpo",
        "0.5.0",
        "it was renamed",
        "--rollout_rows",
    ),
    Gone(
        "ep etp",
        "train",
        "0.5.0",
        "this model has no experts",
        "",
    ),
    Gone(
        "moe_aux_coef",
        "finetune",
        "0.6.0",
        "a fine-tuned model keeps its router",
        "",
    ),
    Gone(
        "mtp_weight",
        "finetune",
        "0.6.0",
        "fine-tuning keeps the usual weight of 0.3",
        "",
    ),
    Gone(
        "check_parity",
        "grpo",
        "0.3.0",
        "reports on layouts belong to the recipes for pre-training and finetune.py",
        "python train_llama3.py --check_parity",
    ),
    Gone(
        "explain",
        "grpo",
        "0.3.0",
        "reports on layouts belong to the recipes for pre-training and finetune.py",
        "python train_llama3.py --explain",
    ),
    Gone(
        "machine",
        "grpo",
        "0.3.0",
        "the dry run of grpo.py reports memory only",
        "--dry_run",
    ),
    Gone(
        "float8 float8_all_gather float8_filter",
        "grpo",
        "0.3.0",
        "grpo.py trains without float8",
        "",
    ),
    Gone(
        "pp_schedule pp_schedule_csv pp_microbatch_size pp_layers_per_stage "
        "pp_first_stage_less_layers pp_last_stage_less_layers pp_stage_fqns",
        "grpo",
        "0.3.0",
        "grpo.py --pp always takes 1F1B with a stage per rank",
        "--pp 2 with --engine or --gen_ranks",
    ),
]


def program_of(flags: Iterable[str]) -> str:
    """The program that has these flags: a key of PROGRAMS, or "" for another program."""
    for program, own in PROGRAMS.items():
        if own in flags:
            return program
    return ""


def find_gone(name: str, flags: Iterable[str]) -> Gone | None:
    """The row of a flag that the program once had. flags: all flags of the program today."""
    if name in flags:
        return None
    program = program_of(flags)
    for row in GONE:
        if name in row.names.split() and program in row.programs.split():
            return row
    return None


def tell_gone(name: str, flags: Iterable[str]) -> str:
    """ "gone since 0.5.0: why; type --this instead" for a flag that is gone; else ""."""
    row = find_gone(name, flags)
    if row is None:
        return ""
    instead = "; leave it out"
    if row.instead:
        instead = f"; instead: {row.instead}"
    return f"gone since {row.since}: {row.why}{instead}"
