"""The tokenizer of the data against the tokenizer of the weights that a run begins with: refuses
other ids, and says where texts begin or end in another way. Only runs with --init_from load this
file."""

import json
import os
from pathlib import Path

from corpus.cache import parse_mixture
from corpus.shards import MASKED, is_shards, read_index
from corpus.special import prefix_ids
from corpus.tokenizer import load_tokenizer, token_text, tokenizer_path
from flags.files import read_json, sha256_file
from storage.newest import ABOUT, Source, newest_readable
from storage.source_tokenizer import text_folder


def describe_ends(tokenizer_file: str, ends: list[int]) -> str:
    """The line about ends that the data taught."""
    tokenizer = load_tokenizer(Path(tokenizer_file))
    names = " and ".join(f"{tokenizer.id_to_token(i)!r} (id {i})" for i in ends)
    return (
        f"the texts of --data end with {names}, which ended nothing before: from now on an end for "
        "generation, evaluation, grpo.py and exports of this run"
    )


def describe_beginning(tokenizer_file: str) -> str:
    """A line if the documents of text shards begin without what the model's folder puts before a
    text; "" if all is well."""
    shards = Path(tokenizer_file).parent
    if not is_shards(str(shards)):
        return ""
    index = read_index(shards)
    tokenizer = load_tokenizer(Path(tokenizer_file))
    prefix = prefix_ids(tokenizer)
    if not prefix or index["version"] == MASKED or "begin" in index["source"]:
        return ""
    name = "".join(token_text(tokenizer, i) for i in prefix)
    return (
        f"the documents of {shards} do not begin with {name}, as texts do for the model of "
        "--init_from; make them with data.py prepare --bos"
    )


# The tokenizer of --init_from
def check_tokenizer(
    source: Source | None, init_from: str, here: str, data: str, tokenizer: str
) -> None:
    """Raises ValueError when the data has other ids than the training of the --init_from weights.
    source: of resume_source; here: the hash of the data's tokenizer; data, tokenizer: the flags."""
    if source and source.folder != init_from:
        return
    there = None
    if source:
        path = newest_readable(source.folder, source.step, ABOUT)
        saved = read_json(path, "state.json").get("identity", {}).get("data", {})
        there = saved.get("tokenizer_sha256")
    else:
        path = text_folder(init_from)
    if there is None and os.path.lexists(os.path.join(path, "tokenizer.json")):
        there = sha256_file(tokenizer_path(path))
    shards = next((part.path for part in parse_mixture(data) if is_shards(part.path)), data)
    if there not in (None, here) and not same_ids(path, tokenizer or shards):
        fix = f"make the shards with --tokenizer {path}"
        if tokenizer:
            fix = f"leave out --tokenizer {tokenizer}"
        raise ValueError(
            f"--init_from {init_from} was trained with another tokenizer (sha256 "
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
