"""python data.py show: documents of a file as training will see them, tokens with a loss in green."""
import json
import re
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np

from corpus.build import cut_into_pieces, tokenize_documents
from corpus.readers import is_chat, text_files
from corpus.shards import FIRST, LOSS, MASKED, array_of, is_shards, mask_array_of, open_array, read_index
from corpus.tokenizer import find_tokenizer, load_tokenizer
from sft.chat import chat_tokenizer, need_template, warn_about_border

GREEN, PLAIN = "\033[32m", "\033[0m"


def documents_of(path: Path, tokenizer_file: Path, eot: int, text_column: str = "text"):
    """Yields (ids, mask) of each document. Every token of a text has a loss, of a conversation the assistant's tokens."""
    for piece in cut_into_pieces([path], load_tokenizer(tokenizer_file).id_to_token(eot), text_column):
        ids, mask = [], []
        for _, more_ids, more_mask, closed in tokenize_documents(piece, tokenizer_file, eot):
            ids += more_ids
            mask += more_mask
            if closed:
                yield ids, mask
                ids, mask = [], []
        if ids:
            yield ids, mask


def documents_of_shards(folder: Path):
    """Yields (ids, mask) of the documents in a folder of token shards, training first. A long text in several shards comes in
    parts."""
    index = read_index(folder)
    for entry in chain(*(index["splits"][split] for split in ("train", "val"))):
        tokens = open_array(folder, *array_of(entry, index))
        bits = open_array(folder, *mask_array_of(entry)) if index["version"] == MASKED else None
        starts = np.flatnonzero(tokens == index["eot"]) + 1 if bits is None else np.flatnonzero(bits & FIRST)
        for start, stop in pairwise([0, *starts[(starts > 0) & (starts < len(tokens))].tolist(), len(tokens)]):
            ids = tokens[start:stop].tolist()
            yield ids, [1] * len(ids) if bits is None else (bits[start:stop] & LOSS).tolist()


def colour_text(ids: list[int], mask: list[int], tokenizer) -> str:
    """The text of the tokens, those with a loss in green. Characters that would command the terminal are shown as U+FFFD."""
    runs, text = [i for i in range(len(ids)) if i == 0 or mask[i] != mask[i - 1]], ""
    for start, stop in zip(runs, [*runs[1:], len(ids)]):
        part = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", tokenizer.decode(ids[start:stop], skip_special_tokens=False))
        text += f"{GREEN}{part}{PLAIN}" if mask[start] else part
    return text


def show_documents(data: str, tokenizer: str, n: int, as_json: bool, text_column: str = "text"):
    """Prints the first n documents of a file, a folder, a glob or token shards. Raises ValueError."""
    if n < 1:
        raise ValueError(f"--n {n}: show at least 1 document")
    file, eot, _ = find_tokenizer(tokenizer)
    paths = [] if is_shards(data) else text_files(data)[0]
    chat = next((path for path in paths if is_chat(path, text_column)), None)
    if chat and not as_json and (warning := warn_about_border(need_template(file, chat), chat_tokenizer(file))):
        print(warning)
    documents = chain.from_iterable(documents_of(path, file, eot, text_column) for path in paths)
    documents = documents_of_shards(Path(data)) if is_shards(data) else documents
    for number, (ids, mask) in enumerate(islice(documents, n), 1):
        if as_json:
            print(json.dumps({"ids": ids, "mask": mask}))
            continue
        print(f"--- document {number}: {len(ids):,} tokens, {sum(mask):,} with a loss (green)")
        print(colour_text(ids, mask, chat_tokenizer(file)))
