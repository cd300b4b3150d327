"""--init_from weights need data tokenized with the tokenizer of their training, or with an equal one."""
import os

from corpus.mixture import parse_mixture
from corpus.shards import is_shards
from corpus.tokenizer import tokenizer_path
from storage.manifest import ABOUT, newest_readable, resume_source
from support.files import read_json, sha256_file


def check_tokenizer(out: str, identity: dict, cfg):
    """Raises ValueError when the data has other ids than the training of the --init_from weights."""
    here, source = identity.get("data", {}).get("tokenizer_sha256"), resume_source(out, cfg)
    if here is None or source and source.folder != cfg.init_from:
        return
    path, there = cfg.init_from, None
    if source:
        path = newest_readable(source.folder, source.step, ABOUT)
        there = read_json(path, "state.json")["identity"]["data"].get("tokenizer_sha256")
    if there is None and os.path.lexists(os.path.join(path, "tokenizer.json")):
        there = sha256_file(tokenizer_path(path))
    shards = next((part.path for part in parse_mixture(cfg.data) if is_shards(part.path)), cfg.data)
    if there not in (None, here) and not same_ids({path: there, cfg.tokenizer or shards: here}):
        fix = f"leave out --tokenizer {cfg.tokenizer}" if cfg.tokenizer else f"make the shards with --tokenizer {path}"
        raise ValueError(f"--init_from {cfg.init_from} was trained with another tokenizer (sha256 {there[:12]}) than the data "
                         f"has ({here[:12]}), so its embedding knows other ids; {fix}, or --exclude_from_loading "
                         "tok_embeddings,head to learn new ones")


def same_ids(tokenizers: dict[str, str]) -> bool:
    """Whether two tokenizers, {path: sha256 of its tokenizer.json}, cut every text into the same ids.

    The files may still differ in padding and templates, which nothing here uses. False if a file is gone or has changed.
    """
    try:
        if any(sha256_file(tokenizer_path(path)) != known for path, known in tokenizers.items()):
            return False
        a, b = (id_rules(read_json(tokenizer_path(path))) for path in tokenizers)
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
        return False
    return a == b


def id_rules(rules: dict) -> tuple:
    """The parts of a tokenizer.json that decide about the ids of a text."""
    model, added = rules["model"], {token["content"]: token["id"] for token in rules.get("added_tokens") or []}
    vocab = model["vocab"] | added if isinstance(model["vocab"], dict) else (model["vocab"], added)  # Unigram: [text, score]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []]  # spelt in two ways
    return model.get("type"), vocab, merges, rules.get("normalizer"), rules.get("pre_tokenizer")

