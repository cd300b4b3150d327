"""The flag that somebody meant who typed an unknown flag: a name of an earlier version, of nanoGPT,
nanochat, torchtitan, TRL, Hugging Face's Trainer or torchrun, or a name with a slip.

config.py imports this file when a name is unknown. other_names.json is a table: our flag -> its
names elsewhere. If a name is in two rows, the first row with a flag of the program counts.
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from flags.files import read_json
from flags.gone import tell_gone

ELSEWHERE = read_json(Path(__file__).with_suffix(".json"))
# (names elsewhere, the answer): where no row of the table has one of the names, and the program has
# the first flag in the answer
SENTENCES = [
    (
        "batch_size device_batch_size micro_batch_size per_device_train_batch_size "
        "train_batch_size",
        "did you mean --local_batch_size? It is what one data rank runs at once; "
        "--global_batch_size is a whole step",
    ),
    (
        "grad_accum grad_accum_steps gradient_accumulation_steps accumulation_steps "
        "total_batch_size",
        "--global_batch_size is the size of a step, in sequences; what exceeds --local_batch_size "
        "is accumulated",
    ),
    (
        "epochs num_epochs num_train_epochs",
        "--steps counts optimizer steps; an epoch has tokens / (global_batch_size x seq_len)",
    ),
    (
        "resume resume_from resume_from_checkpoint auto_resume",
        "nothing to type: the same --out continues where it stopped",
    ),
    (
        "overwrite_output_dir force restart",
        "use --out NEW to begin anew, or delete the old folder",
    ),
    (
        "n_layer n_layers num_layers depth n_head n_heads n_embd d_model hidden_size dim "
        "vocab_size rope_theta",
        "fields of the model are in --model_args: --model_args n_layers=4,dim=512",
    ),
    (
        "text_column dataset_text_field",
        '--data reads "text"; of another name: python data.py prepare --input FILE '
        "--text_column NAME ..., then --data FOLDER",
    ),
    (
        "dropout attention_dropout",
        "these models have no dropout; --model_args changes the fields that they have",
    ),
    (
        "dtype",
        "did you mean --compute_dtype, of matmuls and activations, or --param_dtype, of weights?",
    ),
    (
        "no_cuda cpu",
        "did you mean --device cpu?",
    ),
    (
        "nproc_per_node nproc nnodes node_rank master_addr master_port rdzv_endpoint rdzv_backend "
        "standalone gpus num_gpus",
        "--device is cpu or cuda; torchrun takes the number of processes, before the script: "
        "torchrun --nproc_per_node 2 FILE",
    ),
    (
        "num_samples",
        "give --prompt several times, or another --seed",
    ),
    (
        "lora peft lora_rank lora_alpha lora_on lora_target_modules target_modules",
        "adapters (LoRA) are trained by finetune.py",
    ),
    (
        "stochastic_rounding",
        "--optimizer adamw_sr rounds by chance",
    ),
    (
        "float8_experts",
        "--float8 changes linears; the stacked experts stay in the compute dtype",
    ),
    (
        "flight_recorder trace_buf_size save_traces_folder",
        "nothing to type: with NCCL the last collectives are always kept, and written to the "
        "trace folder of the run when one times out",
    ),
    (
        "attention",
        "nothing to type: cuDNN's kernel is tried first, then flash",
    ),
    (
        "moe_load_per_layer",
        "metrics.jsonl has moe_load_max_over_mean; loads of each layer: the table in "
        "balance_experts",
    ),
    (
        "reduce_grads",
        "nothing to type: gradients are reduced after each micro-batch where whole ones take too "
        "much memory",
    ),
    (
        "create_seed_checkpoint",
        "nothing to type: --seed gives the same initial weights in every layout",
    ),
    (
        "ep etp expert_parallel_degree expert_tensor_parallel_degree debug_moe_force_load_balance",
        "experts are in train_qwen3.py, train_deepseek.py and finetune.py; this model has none",
    ),
    (
        "name description",
        "--out names a run, --flavor a size, --optimizer an optimizer; another model is another "
        "recipe, such as train_qwen3.py",
    ),
    (
        "model.name",
        "--flavor is a size of this model; another model is another recipe, such as train_qwen3.py",
    ),
    (
        "print_config print_args",
        "nothing to type: a start prints the flags that differ from their defaults, and "
        "config.json has all",
    ),
    (
        "custom_config_module custom_import",
        "nothing is registered: copy the recipe, and add a field to its Config, see "
        "docs/fork_me.md",
    ),
    (
        "initial_load_in_hf initial_load_in_hf_quantized",
        "nothing to type: --init_from tells a Hugging Face folder by its files, and fp8 by its "
        "scales",
    ),
    (
        "converters",
        "--float8 is a flag of its own; any other change of the model is a line in section 4 of "
        "the recipe",
    ),
    (
        "implementation",
        "nothing to type: --optimizer adamw takes torch's fused kernel",
    ),
    (
        "early_step_in_backward optimizer_in_backward",
        "there is no step in the backward; --ac, --cpu_offload and --param_dtype bfloat16 save "
        "memory",
    ),
    (
        "gc_debug",
        "--memory_snapshot shows what holds memory on a GPU; --gc_every collects on all ranks at "
        "once",
    ),
    (
        "compiled_autograd",
        "torch has given compiled autograd up; --compile compiles every block",
    ),
    (
        "checkpoint.enable",
        "nothing to type: checkpoints are saved; --checkpoint_every 0 saves none",
    ),
    (
        "enable",
        "enable what? --compile, --profile or --dry_run; checkpoints are saved without a flag",
    ),
    (
        "ft_dataloader_checkpoints fault_tolerance.enable",
        "replica groups are trained by forks/train_llama3_ft.py, whose checkpoints know every "
        "group's data",
    ),
]


def suggest_flag(name: str, flags: Iterable[str]) -> str:
    """The answer to an unknown flag, or "". flags: all flags of the program.

    torchtitan writes a section before the name, training.seq_len, disable_x for no-x, and enable_x
    for x; others write use_x. A row with the section counts first: compile.enable.
    """
    leaf = name.rpartition(".")[2]
    if leaf.startswith("disable_") and leaf[8:] in flags:
        return f"did you mean --no-{leaf[8:]}?"
    for word in (name, leaf, re.sub("^(use|enable)_", "", leaf)):
        ours = [flag for flag, names in ELSEWHERE.items() if word in names.split()]
        for flag in (word, *ours):
            if flag in flags:
                return f"did you mean --{flag}?"
        for names, sentence in SENTENCES:
            named = re.search(r"--(\w+)", sentence)
            is_flag_here = named is None or named[1] in flags
            if word in names.split() and is_flag_here:
                return sentence
    return ""


def did_you_mean(name: str, helps: dict, dashes: str) -> str:
    """ "did you mean --steps? " or "". Tries the name in our spelling, other projects' names, the
    words in a help text, then similar letters."""
    wanted = name.lstrip("-").lower().replace("-", "_")
    gone = tell_gone(wanted.removeprefix("no_"), helps)
    if gone:
        return f"{gone}; "
    if wanted not in helps and dashes:
        answer = suggest_flag(wanted, helps)
        if answer.endswith("?"):
            return f"{answer} "
        if answer:
            return f"{answer}; "
    wanted = re.sub(r"\W", "_", wanted)
    words = wanted.replace("_", " ").split()
    found = [name for name in helps if name == wanted]
    if len(words) > 1:
        phrase = " ".join(words)
        found += sorted((name for name in helps if phrase in helps[name].lower()), key=len)
    found += difflib.get_close_matches(wanted, helps, n=1)
    found += [word for word in words if word in helps]
    if found:
        return f"did you mean {dashes}{found[0]}? "
    return ""


def refuse_word(word: str, kinds: dict, helps: dict) -> str:
    """The usage error for an unknown word of the command line. kinds: {flag: type}."""
    if word.startswith("-"):
        flag = word.split("=")[0]
        negated = {f"no-{name}": "" for name in kinds if kinds[name] is bool}
        wish = did_you_mean(flag, helps | negated | {"config": ""}, "--")
        return f"unknown flag {flag}; {wish}--help lists all flags"
    wish = ""
    if "checkpoint" in helps:
        wish = f"did you mean --checkpoint {word}? "
    return f"unexpected argument {word!r}; {wish}flags are written --name value, see --help"


def refuse_keys(path: str, unknown: dict, helps: dict) -> str:
    """The usage error for the unknown keys of a config.json. "" if all are flags of an earlier version
    that were switched off (false, 0, none or empty)."""
    for name in unknown:
        if not tell_gone(name, helps):
            wish = did_you_mean(name, helps, "")
            return f"{path}: unknown key {name!r}; {wish}--help lists all names"
    if not any(unknown.values()):
        return ""
    reasons = [f"{name} is {tell_gone(name, helps)}" for name in unknown]
    return (
        f"{path}: {', '.join(unknown)}: no flags of this version; {'; '.join(reasons)}; to go on, "
        "delete these keys from a copy of the file, and give that copy to --config"
    )
