"""The tokenizer and the ids that end a text, of a run, a step folder or a Hugging
Face folder.

--init_from weights need data tokenized with the tokenizer of their training, or with an equal one:
check_tokenizer.
"""

import json
import os

from corpus.mixture import parse_mixture
from corpus.shards import is_shards
from corpus.tokenizer import (
    BESIDE,
    find_tokenizer,
    load_tokenizer,
    read_beside,
    read_special_tokens,
    tokenizer_path,
)
from flags.files import matches, read_json, sha256_file
from storage.newest import ABOUT, ADAPTER, is_hf_folder, newest_readable, resume_source, saved_state


def weights_folder(folder: str) -> str:
    """The Hugging Face folder of the weights: for a PEFT adapter its base, named in
    adapter_config.json. Raises ValueError."""
    base = read_beside(folder, ADAPTER).get("base_model_name_or_path", folder)
    if base != folder and not (
        isinstance(base, str) and is_hf_folder(base) and not read_beside(base, ADAPTER)
    ):
        raise ValueError(
            f"{folder}/{ADAPTER}: base_model_name_or_path is {base!r}, which is no folder of "
            "weights here; write "
            "the base's folder there, or put it in that place: hf download MODEL --local-dir MODEL"
        )
    return base


def text_folder(folder: str) -> str:
    """The folder with the tokenizer of a run, step or Hugging Face folder: the newest step of a
    run, and the base of a PEFT adapter that has no tokenizer.json itself."""
    if not is_hf_folder(folder):
        return newest_readable(folder)
    return (
        folder
        if os.path.lexists(os.path.join(folder, "tokenizer.json"))
        else weights_folder(folder)
    )


def ends_of(folder: str) -> list[int]:
    """The ids that end a text: eos_token of a Hugging Face folder and the ids in
    generation_config.json; for a checkpoint of ours the id that ended the documents in training,
    and the eos_token of the tokenizer, if any. Raises ValueError."""
    eos = read_special_tokens(folder).get("eos_token", "")
    found = [
        find_tokenizer(folder, name)[1]
        for name in ([eos] if is_hf_folder(folder) else ["", *[eos] * (eos != "")])
    ]
    listed = read_beside(folder, "generation_config.json").get("eos_token_id")
    found += [
        i for i in (listed if isinstance(listed, list) else [listed]) if type(i) is int and i >= 0
    ]
    return list(dict.fromkeys(found))


def has_bos(folder: str) -> bool:
    """Whether texts begin with the tokenizer's beginning-of-text token: for models from Hugging
    Face folders, and for runs of grpo.py from them. Our own training text has no such token."""
    return is_hf_folder(folder) or bool(
        saved_state(newest_readable(folder, names=ABOUT)).get("bos")
    )


def source_tokenizer(cfg) -> str:
    """The folder with the tokenizer.json of --init_from, the default for text. "" if the flags name
    a tokenizer, or if no text is tokenized.

    A run with checkpoints takes the tokenizer from the newest checkpoint: the --init_from folder
    may be gone by now. Raises ValueError.
    """
    is_text = not all(is_shards(part.path) for part in parse_mixture(cfg.data))
    if not cfg.init_from or cfg.tokenizer or not is_text or has_new_ids(cfg):
        return ""
    source, names = resume_source(cfg.out, cfg), (*ABOUT, "tokenizer.json", *BESIDE)
    folder = (
        newest_readable(source.folder, source.step, names) if source else text_folder(cfg.init_from)
    )
    file = os.path.join(folder, "tokenizer.json")
    if not os.path.lexists(file):
        raise ValueError(f"{file} is missing: give the tokenizer of these weights with --tokenizer")
    return folder


def has_new_ids(cfg) -> bool:
    """Whether the embedding starts at random: then no id has a meaning yet, and any tokenizer will
    do."""
    return matches(
        [name.removeprefix("model.") for name in cfg.exclude_from_loading],
        "model.tok_embeddings.weight",
    )


# The tokenizer of --init_from
def check_tokenizer(out: str, identity: dict, cfg):
    """Raises ValueError when the data has other ids than the training of the --init_from weights."""
    here, source = identity.get("data", {}).get("tokenizer_sha256"), resume_source(out, cfg)
    if here is None or source and source.folder != cfg.init_from:
        return
    path, there = (
        newest_readable(source.folder, source.step, ABOUT)
        if source
        else text_folder(cfg.init_from),
        None,
    )
    if source:
        there = (
            read_json(path, "state.json")
            .get("identity", {})
            .get("data", {})
            .get("tokenizer_sha256")
        )
    if there is None and os.path.lexists(os.path.join(path, "tokenizer.json")):
        there = sha256_file(tokenizer_path(path))
    shards = next((part.path for part in parse_mixture(cfg.data) if is_shards(part.path)), cfg.data)
    if there not in (None, here) and not same_ids(path, cfg.tokenizer or shards):
        fix = (
            f"leave out --tokenizer {cfg.tokenizer}"
            if cfg.tokenizer
            else f"make the shards with --tokenizer {path}"
        )
        raise ValueError(
            f"--init_from {cfg.init_from} was trained with another tokenizer (sha256 "
            f"{there[:12]}) than the data "
            f"has ({here[:12]}); {fix}, or learn new ids with --exclude_from_loading "
            "tok_embeddings,head"
        )


def same_ids(*tokenizers: str) -> bool:
    """Whether two tokenizers, given by their paths, cut every text into the same ids; False if a
    file is gone. The library spells both alike. Padding and templates may differ, because nothing
    here uses them."""
    unused = {"post_processor": None, "decoder": None}
    try:
        first, second = (
            json.loads(load_tokenizer(tokenizer_path(path)).to_str()) | unused
            for path in tokenizers
        )
    except ValueError:
        return False
    return first == second
