"""--init_from weights need data tokenized with the tokenizer of their training, or with an equal one."""
import json
import os

from corpus.mixture import parse_mixture
from corpus.shards import is_shards
from corpus.tokenizer import load_tokenizer, tokenizer_path
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
                         f"has ({here[:12]}); {fix}, or learn new ids with --exclude_from_loading tok_embeddings,head")


def same_ids(tokenizers: dict[str, str]) -> bool:
    """Whether two tokenizers, {path: sha256 of tokenizer.json}, cut every text into the same ids; False if a file is gone or
    has changed. The library spells both alike. Padding and templates may differ, because nothing here uses them."""
    found = []
    try:
        for file, known in ((tokenizer_path(path), known) for path, known in tokenizers.items()):
            rules = json.loads(load_tokenizer(file).to_str()) | {"post_processor": None, "decoder": None}
            found.append(rules if sha256_file(file) == known else file)
    except ValueError:
        return False
    return found[0] == found[1]
