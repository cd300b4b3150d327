"""python data.py show: documents of a file as they will be trained, tokens with a loss in another colour."""
import json
import re
from itertools import chain, islice
from pathlib import Path

from support.chat import border_warning, chat_tokenizer, is_chat, need_template
from support.corpus import cut_at_lines, cut_into_pieces, read_chat_documents, read_documents
from support.readers import text_files
from support.tokenizer import find_tokenizer, load_tokenizer

GREEN, PLAIN = "\033[32m", "\033[0m"


def documents_of(path: Path, tokenizer_file: Path, eot: int, text_column: str = "text"):
    """Yields (ids, mask) of each document. Every token of a text has a loss, and of a conversation those of the assistant."""
    tokenizer, chat = load_tokenizer(tokenizer_file), is_chat(path, text_column)
    for piece in cut_into_pieces([path], tokenizer.id_to_token(eot), text_column):
        if chat:
            yield from ((ids, mask) for _, ids, mask in read_chat_documents(piece, tokenizer_file))
            continue
        for _, text, closed in read_documents(piece, tokenizer.id_to_token(eot)):
            parts = [tokenizer.encode(part, add_special_tokens=False).ids for part in cut_at_lines(text)]
            ids = [*(i for part in parts for i in part), *[eot] * closed]
            yield ids, [1] * len(ids)


def coloured(ids: list[int], mask: list[int], tokenizer) -> str:
    """The text of the tokens, those with a loss in green. Characters that would command the terminal are shown as U+FFFD."""
    runs, text = [i for i in range(len(ids)) if i == 0 or mask[i] != mask[i - 1]], ""
    for start, stop in zip(runs, [*runs[1:], len(ids)]):
        part = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", tokenizer.decode(ids[start:stop], skip_special_tokens=False))
        text += f"{GREEN}{part}{PLAIN}" if mask[start] else part
    return text


def show_documents(data: str, tokenizer: str, n: int, as_json: bool, text_column: str = "text"):
    """Prints the first n documents of a file, a folder or a glob. Raises ValueError."""
    if n < 1:
        raise ValueError(f"--n {n}: show at least 1 document")
    file, eot, _ = find_tokenizer(tokenizer)
    paths = text_files(data)[0]
    chat = next((path for path in paths if is_chat(path, text_column)), None)
    if chat and not as_json and (warning := border_warning(need_template(file, chat), chat_tokenizer(file))):
        print(warning)
    documents = chain.from_iterable(documents_of(path, file, eot, text_column) for path in paths)
    for number, (ids, mask) in enumerate(islice(documents, n), 1):
        if as_json:
            print(json.dumps({"ids": ids, "mask": mask}))
            continue
        print(f"--- document {number}: {len(ids):,} tokens, {sum(mask):,} with a loss (green)")
        print(coloured(ids, mask, chat_tokenizer(file)))
