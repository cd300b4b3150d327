"""Text -> token shards: documents of text files, tokenizers trained on the text, and tokenization piece by piece."""
import contextlib
import hashlib
import json
import mmap
import multiprocessing
import os
import re
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from corpus.readers import (
    PACKED,
    Piece,
    check_text,
    cut_rows,
    first_number,
    format_of,
    is_chat,
    json_lines,
    lines_of_chunks,
    place,
    prepare_column,
    raw_bytes,
    read_piece,
    unpacked,
)
from corpus.shards import FIRST, LOSS, VERSION, is_as_written, mask_name, read_index, token_dtype, write_index, write_shard
from corpus.tokenizer import BESIDE, BPE_VOCAB, EOT_NAMES, files_beside, load_tokenizer
from support.files import sha256_file, write_file

VAL_PART = 20  # one document in 20 is for validation, or the last 20th of a file with few documents
MANY_DOCUMENTS = 100  # a .jsonl with at least so many lines is split by hash
BPE_BYTES = 10_000_000  # bytes of text for a tokenizer of our own


# ---------------------------------------------------------------------------------------------------------------------
# Text -> documents
def cut_into_pieces(paths: list, eot_text: str, text_column: str = "text") -> list:
    """The pieces of all files. In a file of many JSON objects the hash of each document decides about training or validation,
    so that both are alike; of any other text the tail is for validation."""
    pieces = []
    for path in paths:
        check_text(path)
        if path.suffix == ".parquet":
            found = cut_rows(path, text_column, MANY_DOCUMENTS, VAL_PART)
        elif path.suffix not in PACKED:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                found = cut_bytes(path, text, eot_text, text_column)
        elif format_of(path) == ".jsonl" and has_many(path):  # one piece: unpacked only once, by the reader
            found = [Piece(path, 0, None, "hash", True, text_column)]
        else:
            found = cut_bytes(path, b"".join(unpacked(path)), eot_text, text_column)
        if not found:
            raise ValueError(f"{path} is empty; give a file with text in it")
        pieces += found
    return pieces


def has_many(path: Path) -> bool:
    """Whether a packed file has enough lines to be split by hash."""
    return sum(1 for _ in islice(lines_of_chunks(unpacked(path)), MANY_DOCUMENTS + 1)) > MANY_DOCUMENTS


def cut_bytes(path: Path, text: mmap.mmap | bytes, eot_text: str, text_column: str) -> list:
    size, eot, pieces, is_jsonl = len(text), re.escape(eot_text.encode()), [], format_of(path) == ".jsonl"
    chunk = min(max(size // 64, 1 << 20), 32 << 20)  # enough pieces for all processes, few enough files
    between = re.compile(b"\n" if is_jsonl else b"\n(?!%s)|%s" % (eot, eot))  # an eot belongs to the text before it
    by_hash = is_jsonl and sum(1 for _ in islice(re.finditer(b"\n", text), MANY_DOCUMENTS)) == MANY_DOCUMENTS
    border = size if by_hash else tail_border(text, is_jsonl)
    for split, start, end in ("hash" if by_hash else "train", 0, border), ("val", border, size):
        while start < end:
            stop = found.end() if (found := between.search(text, start + chunk, end)) else end
            pieces.append(Piece(path, start, stop, split, is_jsonl or stop == end, text_column))
            start = stop
    return pieces


def tail_border(text: mmap.mmap | bytes, is_jsonl: bool) -> int:
    """Start of the last 20th of a text: at a line, or, in a .txt without lines nearby, at a character."""
    border = len(text) - len(text) // VAL_PART
    line = text.rfind(b"\n", 0 if is_jsonl else border - border // VAL_PART, border) + 1
    if line or is_jsonl:
        return line or len(text)  # a single JSON object: nothing to validate on
    while border < len(text) and text[border] & 0xC0 == 0x80:  # 10xxxxxx: inside a UTF-8 character
        border += 1
    return border


def read_documents(piece: Piece, eot_text: str):
    """Yields (split, text, closed). In a .txt file the eot token, spelled out, separates documents."""
    if format_of(piece.path) == ".txt":
        try:
            text = read_piece(piece).decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise ValueError(f"{piece.path}: byte {piece.start + error.start} is not UTF-8; convert the file, for example: "
                             "iconv -f latin1 -t utf-8") from None
        *whole, last = text.split(eot_text)
        yield from ((piece.split, document, True) for document in whole if document)
        if last:
            yield piece.split, last, piece.closed
        return
    for number, line in enumerate(json_lines(piece)):
        try:
            record = json.loads(line.decode()) if line.strip() else {piece.text_column: ""}
            document = record[piece.text_column]
            key = record.get("split_key", document)  # our stdlib.jsonl is split by path
            is_val = hashlib.sha256(key.encode()).digest()[0] * VAL_PART < 256  # 13 of 256: one in 20
            document.encode()  # a string, and valid Unicode: "\ud800" is JSON, but no text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            cure = f"; {prepare_column(piece.path)}" * isinstance(error, KeyError)
            raise ValueError(f'{place(piece, first_number(piece) + number)}: need a JSON object with a string '
                             f'"{piece.text_column}" ({error!r}){cure}') from None
        if document:
            yield ("val" if is_val else "train") if piece.split == "hash" else piece.split, document, True


def read_chat_documents(piece: Piece, tokenizer_file: Path):
    """Yields (split, ids, mask) of each conversation of a piece; mask: 1 for a token with a loss."""
    from sft.chat import chat_tokenizer, conversation_of, need_template, tokens_and_mask

    template, tokenizer = need_template(tokenizer_file, piece.path), chat_tokenizer(tokenizer_file)

    def tokenized(line: bytes, where: str):
        return tokens_and_mask(conversation_of(line, where), template, tokenizer)

    for number, line in enumerate(json_lines(piece)):
        if line := line.strip():
            split = "val" if hashlib.sha256(line).digest()[0] * VAL_PART < 256 else "train"
            try:
                ids, mask = tokenized(line, "")
            except ValueError:  # again with the line number, for which all lines before the piece must be counted
                try:
                    ids, mask = tokenized(line, place(piece, first_number(piece) + number))
                except ValueError as error:
                    raise ValueError(f"{error}; python data.py prepare --skip_bad N leaves out up to N such lines") from None
            yield split if piece.split == "hash" else piece.split, ids, mask


def cut_at_lines(text: str, size: int = 1 << 16):
    """Segments of a long document, to be tokenized in parallel and in little memory; cut after a newline if possible."""
    start = 0
    while start < len(text):
        stop = len(text) if start + size >= len(text) else text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:stop]
        start = stop


# ---------------------------------------------------------------------------------------------------------------------
# Documents -> tokenizer, documents -> token shards
def train_tokenizer(paths: list, file: Path, vocab_size: int = BPE_VOCAB, text_column: str = "text"):
    """Train a byte-level BPE on the beginning of each text. Returns the number of ids, smaller than vocab_size if no more pairs
    occur twice in the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts, enough = [], BPE_BYTES * vocab_size // BPE_VOCAB // len(paths)
    for path in paths:
        size, pieces = 0, cut_into_pieces([path], EOT_NAMES[0], text_column)
        for split, text, _ in (document for piece in pieces for document in read_documents(piece, EOT_NAMES[0])):
            if split == "train":
                texts.extend(cut_at_lines(text))
                size += len(text)
            if size >= enough:
                break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: no text is unknown
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOT_NAMES[0]], initial_alphabet=alphabet, min_frequency=2, show_progress=False))
    write_file(file, tokenizer.to_str().encode())
    return tokenizer.get_vocab_size()


def intact_entries(note: Path, made_from: str) -> dict | None:
    """The entries in a note of tokenize_piece, if made_from is the same and no byte of the shards has changed since."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        known = json.loads(note.read_bytes())
        entries = known["entries"].values()
        if known["made_from"] == made_from and all(is_as_written(note.parent, entry) for entry in entries):
            return known["entries"]


def tokenize_piece(piece: Piece, number: int, folder: Path, tokenizer_file: Path, eot: int, vocab_size: int) -> dict:
    """Writes the shards of a piece and then a note, piece-00000.json. Returns {split: entry of index.json}.

    If an earlier start has left the same note and intact shards, nothing is tokenized again."""
    tokenizer, note, dtype = load_tokenizer(tokenizer_file), folder / f"piece-{number:05d}.json", token_dtype(vocab_size)
    source = hashlib.sha256()
    for part in chain(raw_bytes(piece), [tokenizer_file.read_bytes()]):
        source.update(part)
    source.update(repr((VERSION, eot, vocab_size, piece.split, piece.closed, piece.path.suffix)).encode())
    if piece.path.suffix not in (".txt", ".jsonl") or piece.text_column != "text":
        source.update(repr((format_of(piece.path), piece.start, piece.end, piece.text_column)).encode())
    if chat := is_chat(piece.path, piece.text_column):
        from sft.chat import need_template

        source.update(need_template(tokenizer_file, piece.path).rules.encode())
    if entries := intact_entries(note, made_from := source.hexdigest()):
        return entries

    splits = ("train", "val") if piece.split == "hash" else (piece.split,)
    tokens, documents = {split: [np.empty(0, dtype)] for split in splits}, dict.fromkeys(splits, 0)
    masks = {split: [np.empty(0, np.uint8)] for split in splits} if chat else {}
    if chat:
        for split, ids, mask in read_chat_documents(piece, tokenizer_file):
            tokens[split].append(np.array(ids, dtype))
            masks[split].append(np.array(mask, np.uint8) * LOSS | (np.arange(len(ids)) == 0) * FIRST)
            documents[split] += len(ids) > 0
    else:
        for split, ids, closed in tokenized_text(piece, tokenizer, eot):
            tokens[split].append(np.array(ids, dtype))
            documents[split] += closed
    entries = {split: write_shard(folder / f"{split}-{number:05d}.npy", np.concatenate(tokens[split]), documents[split],
                                  np.concatenate(masks[split]).astype(np.uint8) if chat else None) for split in splits}
    write_file(note, json.dumps({"made_from": made_from, "entries": entries}).encode())
    return entries


def tokenized_text(piece: Piece, tokenizer, eot: int):
    """Yields (split, ids, closed) of each segment of a piece's documents; the last segment of a document ends with eot."""
    def segments():
        for split, text, closed in read_documents(piece, tokenizer.id_to_token(eot)):
            *parts, last = cut_at_lines(text)
            yield from ((split, part, False) for part in parts)
            yield split, last, closed

    found = segments()
    while group := list(islice(found, 64)):  # 4 MB of text at once: as Encoding objects they take 200 MB
        encodings = tokenizer.encode_batch_fast([text for _, text, _ in group], add_special_tokens=False)
        for (split, _, closed), encoding in zip(group, encodings):
            yield split, encoding.ids + [eot] * closed, closed


def build_shards(paths: list, tokenizer: tuple, folder: Path, workers: int = 1, text_column: str = "text"):
    """Tokenizes text files into a folder of token shards. After an interruption, the same call keeps finished pieces.

    tokenizer: from find_tokenizer(). workers: processes; 1 = here, with the threads of the `tokenizers` library."""
    tokenizer_file, eot, vocab_size = tokenizer
    pieces = cut_into_pieces(paths, load_tokenizer(tokenizer_file).id_to_token(eot), text_column)
    source = {"inputs": [[path.name, path.stat().st_size] for path in paths], "tokenizer": sha256_file(tokenizer_file)}
    source |= {"text_column": text_column} if text_column != "text" else {}
    if chats := [path for path in paths if is_chat(path, text_column)]:
        if other := next((path for path in paths if path not in chats), None):
            raise ValueError(f"{chats[0]} holds conversations and {other} text; keep them apart, and train on both with "
                             "--data name=path:weight,name=path:weight")
        from sft.chat import border_warning, chat_tokenizer, need_template

        template = need_template(tokenizer_file, chats[0])
        source["chat_template"] = hashlib.sha256(template.rules.encode()).hexdigest()
        if os.environ.get("RANK", "0") == "0" and (warning := border_warning(template, chat_tokenizer(tokenizer_file))):
            print(warning, flush=True)
    if (folder / "index.json").exists() and ((old := read_index(folder))["source"], old["eot"]) != (source, eot):
        raise ValueError(f"{folder} holds shards that were made from other files or with another tokenizer"
                         + " or chat template" * bool(chats) + "; name a new --out")
    folder.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer.json": tokenizer_file.read_bytes()} | files_beside(tokenizer_file)
    for name, content in files.items():
        write_file(folder / name, content)
    job = partial(tokenize_piece, folder=folder, tokenizer_file=tokenizer_file, eot=eot, vocab_size=vocab_size)
    splits, workers = {"train": [], "val": []}, min(workers, len(pieces))
    with contextlib.ExitStack() as stack:
        do = map
        if workers > 1:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
            do = stack.enter_context(ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))).map
        for done, entries in enumerate(do(job, pieces, range(len(pieces))), 1):
            for split, entry in entries.items():
                splits[split].append(entry)
            if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
                bar, end = "#" * (30 * done // len(pieces)), "\n" * (done == len(pieces))
                print(f"\rtokenizing [{bar:30}] {done}/{len(pieces)}", end=end, file=sys.stderr, flush=True)
    beside = {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name in BESIDE}
    write_index(folder, {"vocab_size": vocab_size, "eot": eot, "source": source, "beside": beside, "splits": splits})
    names = [entry["name"] for entry in chain(*splits.values())]
    listed = {*names, *(mask_name(name) for name in names if chats)} | {f"piece-{i:05d}.json" for i in range(len(pieces))}
    for path in folder.iterdir():  # leftovers of an interrupted run
        if re.fullmatch(r"((train|val)-\d+(\.mask)?\.npy|piece-\d+\.json)(\.tmp-\d+)?", path.name) and path.name not in listed:
            path.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# The built-in corpus
def collect_stdlib(paths: list, target: Path):
    """Write all sources as one .jsonl, each text once. Split by path: the same files validate in every version of Python."""
    root, texts = sysconfig.get_paths()["stdlib"], {}
    for path in paths:
        with contextlib.suppress(UnicodeDecodeError):
            texts.setdefault(path.read_bytes().decode(), path.relative_to(root).as_posix())
    lines = [json.dumps({"split_key": name, "text": text}) + "\n" for text, name in texts.items()]
    write_file(target, "".join(lines).encode())
