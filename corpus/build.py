"""Text -> token shards: documents of text files, and their tokenization piece by piece."""

import contextlib
import hashlib
import json
import mmap
import multiprocessing
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from corpus.beside import BESIDE, files_beside
from corpus.files import CONVERSATION, bad_byte, check_beginning, check_nuls, unpacked
from corpus.mixture import PACKED, format_of, prepare_column
from corpus.shard_damage import changed_files
from corpus.shards import FIRST, LOSS, cache_name, read_index, token_dtype
from corpus.spelling import (
    MOST,
    SEGMENT,
    Spelling,
    add_counts,
    lost_refusal,
    per_cent,
    segment_tokenizer,
    spelling_rules,
    traits_of,
)
from corpus.tokenizer import load_tokenizer, token_text
from corpus.write_shards import share_shards, write_index, write_shard
from distributed.agree import brief
from distributed.refusals import plural
from flags.config import own_rank
from flags.files import sha256_file, write_file
from flags.progress import Progress

VAL_PART = 20  # one document in 20 is for validation, or the last 20th of a file with few documents
MANY_DOCUMENTS = 100  # a .jsonl with at least so many lines is split by hash
# the most null lines at the beginning of a file, when we look for the kind of its contents
NULLS_AT_MOST = 1000
LINE_LIMIT = 1 << 28  # bytes of a line; text8, the longest that is known, has 100 MB


# --------------------------------------------------------------------------------------------------
# Pieces of text files: bytes of text (.txt, .md), or a JSON object per document (a line of a
# .jsonl, a row of a .parquet)
class Piece(NamedTuple):
    """A part of a file: unpacked bytes start..end. Each piece, or a group of pieces of small files,
    becomes one shard per split."""

    path: Path
    start: int
    end: int | None  # None: a packed file to its end, of unknown length
    split: str  # "train", "val", or "hash": the hash of each document decides
    closed: bool  # a document ends here; else (a long .txt) the next piece continues the document
    text_column: str = "text"  # key of the text in the objects of a .jsonl, column of a .parquet


def read_chunks(piece: Piece) -> Generator[bytes, None, None]:
    """Yields the text of a piece in chunks of bytes: of a packed file as unpacked, of a .parquet
    lines of JSON."""
    if piece.path.suffix in PACKED:
        chunks = unpacked(piece.path, piece.text_column)
        if piece.end is None:
            yield from chunks
        else:
            yield b"".join(chunks)[piece.start : piece.end]
    else:
        assert piece.end is not None, "only a packed file is read to an unknown end"
        with open(piece.path, "rb") as file:
            file.seek(piece.start)
            yield file.read(piece.end - piece.start)


def json_lines(piece: Piece) -> Generator[bytes, None, None]:
    """Yields the JSON objects of a piece, still as bytes: lines of a .jsonl, rows of a .parquet."""
    parts = []  # of the line that has begun; joined once, because a line may be as long as a book
    size = 0
    for chunk in read_chunks(piece):
        first, *others = chunk.split(b"\n")
        parts.append(first)
        size += len(first)
        check_line_length(piece.path, size)
        for line in others:
            yield b"".join(parts)
            parts = [line]
            size = len(line)
            check_line_length(piece.path, size)
    yield b"".join(parts)


def check_line_length(path: Path, size: int) -> None:
    """Raises ValueError for a line that would fill the memory."""
    if size > LINE_LIMIT:
        raise ValueError(
            f"{path} has a line of more than {LINE_LIMIT:,} bytes, which is absurd; write each "
            "document as a line of its own"
        )


def plain_lines(path: Path) -> Generator[bytes, None, None]:
    """Yields the lines of a file that is not packed."""
    with open(path, "rb") as file:
        while line := file.readline(LINE_LIMIT + 1):
            check_line_length(path, len(line))
            yield line


def is_chat(path: Path, text_column: str = "text") -> bool:
    """Whether a file holds conversations, by its first line or row that is not null. A row with
    "text" is plain text to train on."""
    if format_of(path) != ".jsonl" or not path.is_file():
        return False
    if path.suffix in PACKED:
        rows = json_lines(Piece(path, 0, None, "hash", True, text_column))
    else:
        rows = plain_lines(path)
    with contextlib.closing(rows) as lines:
        for line in islice(lines, NULLS_AT_MOST):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                return False  # read_documents reports the error with the line number
            if not is_null(record, text_column):
                return (
                    isinstance(record, dict)
                    and text_column not in record
                    and bool({"messages", "conversations"} & record.keys())
                )
    return False


def is_null(record: Any, text_column: str) -> bool:
    """Whether a line or row has a null where its text or conversation should be: nothing to train
    on."""
    if not isinstance(record, dict):
        return False
    found = [record[name] for name in (text_column, *CONVERSATION[:2]) if name in record]
    return found != [] and all(value is None for value in found)


def name_line(piece: Piece, index: int) -> str:
    """File and number of the line or row with this index in a piece, for errors."""
    number = index + 1
    if piece.start:
        before = read_chunks(piece._replace(start=0, end=piece.start))
        number += b"".join(before).count(b"\n")
    if piece.path.suffix == ".parquet":
        return f"{piece.path} row {number}"
    return f"{piece.path} line {number}"


# --------------------------------------------------------------------------------------------------
# Text -> documents
def cut_into_pieces(paths: list, eot_text: str, text_column: str = "text") -> list:
    """The pieces of all files; an empty file has none. In a file of many JSON objects the hash of
    each document decides about training or validation, so that both are alike; of any other text
    the tail is for validation. Raises ValueError if all are empty, and for what is no text."""
    chunk = piece_size(paths)
    pieces = []
    for path in paths:
        pieces += cut_file(path, eot_text, text_column, chunk)
    if not pieces:
        raise ValueError(f"{brief([*map(str, paths)])} is empty; give a file with text in it")
    return pieces


def piece_size(paths: list) -> int:
    """Bytes of a piece: enough pieces for all processes, few enough files for a file system."""
    total = sum(path.stat().st_size for path in paths)
    return min(max(total // 64, 1 << 20), 512 << 20)


def cut_file(path: Path, eot_text: str, text_column: str, chunk: int) -> list:
    """The pieces of a file, each of about `chunk` bytes. Raises ValueError for what is no text."""
    whole = Piece(path, 0, None, "hash", True, text_column)
    is_jsonl = format_of(path) == ".jsonl"
    if is_jsonl and path.suffix in PACKED:
        lines = json_lines(whole)
        first = next(lines)
        check_beginning(path, first[:4])
        if next(islice(lines, MANY_DOCUMENTS - 1, None), None) is not None:
            return [whole]  # one piece: unpacked once, by the reader
    with text_of(path, text_column) as text:
        check_beginning(path, text[:4])
        if not is_jsonl:
            check_nuls(path, text.find(b"\0"))
        return cut_bytes(path, text, eot_text, text_column, chunk)


@contextlib.contextmanager
def text_of(path: Path, text_column: str = "text") -> Iterator[Any]:
    """The bytes of a file, unpacked; a file that is not packed is mapped into memory."""
    if path.suffix in PACKED:
        yield b"".join(read_chunks(Piece(path, 0, None, "hash", True, text_column)))
    elif path.stat().st_size == 0:
        yield b""
    else:
        with open(path, "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                yield text


def cut_bytes(
    path: Path, text: mmap.mmap | bytes, eot_text: str, text_column: str, chunk: int
) -> list:
    """The pieces of one text, each of about `chunk` bytes."""
    size = len(text)
    eot = re.escape(eot_text.encode())
    pieces = []
    is_jsonl = format_of(path) == ".jsonl"
    by_hash = False
    if is_jsonl:
        between = re.compile(b"\n")
        n_lines = sum(1 for _ in islice(between.finditer(text), MANY_DOCUMENTS))
        by_hash = n_lines == MANY_DOCUMENTS
    else:  # an eot belongs to the text before it
        between = re.compile(b"\n(?!%s)|%s" % (eot, eot))
    if by_hash:
        parts = [("hash", 0, size)]
    else:
        border = tail_border(text, is_jsonl)
        parts = [("train", 0, border), ("val", border, size)]
    for split, start, end in parts:
        while start < end:
            stop = end
            found = between.search(text, start + chunk, end)
            if found:
                stop = found.end()
            if is_jsonl:  # a text may well be one line
                check_line_length(path, stop - start - chunk)
            pieces.append(Piece(path, start, stop, split, is_jsonl or stop == end, text_column))
            start = stop
    return pieces


def tail_border(text: mmap.mmap | bytes, is_jsonl: bool) -> int:
    """Start of the last 20th of a text: at a line, or, in a .txt without lines nearby, at a
    character."""
    border = len(text) - len(text) // VAL_PART
    nearby = border - border // VAL_PART
    if is_jsonl:
        nearby = 0
    line = text.rfind(b"\n", nearby, border) + 1
    if line or is_jsonl:
        return line or len(text)  # a single JSON object: nothing to validate on
    while border < len(text) and text[border] & 0xC0 == 0x80:  # 10xxxxxx: inside a UTF-8 character
        border += 1
    return border


def goes_on(piece: Piece, eot_text: str) -> bool:
    """Whether a piece of a .txt goes on with the document of the piece before."""
    if format_of(piece.path) != ".txt" or piece.start == 0:
        return False
    eot = eot_text.encode()
    with text_of(piece.path) as text:
        begins = text[piece.start - len(eot) : piece.start] == eot
        return not begins and piece.start != tail_border(text, False)


def read_documents(
    piece: Piece, eot_text: str, whole_words: bool = False, nulls: list | None = None
) -> Iterator[tuple]:
    """Yields (split, text, whether the document ends) for each segment. In a .txt the spelled eot
    token ends a document. whole_words: see cut_at_lines. nulls: list that takes the lines or rows
    with null for a text, which are left out."""
    if format_of(piece.path) == ".txt":
        content = b"".join(read_chunks(piece))
        try:
            text = content.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            place = piece.start + error.start
            with text_of(piece.path) as whole:
                around = whole[max(0, place - SEGMENT) : place + SEGMENT]
                is_last = piece.start + len(content) == len(whole)
            ends_inside = is_last and error.reason == "unexpected end of data"
            problem = bad_byte(piece.path, place, around, ends_inside)
            raise ValueError(f"{piece.path}: {problem}") from None
        *whole, last = text.split(eot_text)
        for document in whole:
            yield from cut_at_lines(piece.split, document, True, whole_words)
        yield from cut_at_lines(piece.split, last, piece.closed, whole_words)
        return
    for i, line in enumerate(json_lines(piece)):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
            if is_null(record, piece.text_column):
                if nulls is not None:
                    nulls.append(i)
                continue
            document = record[piece.text_column]
            key = record.get("split_key", document)  # our stdlib.jsonl is split by path
            split = split_of(piece, key.encode())
            document.encode()  # a string, and valid Unicode: "\ud800" is JSON, but no text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{name_line(piece, i)}: {problem_of(piece, line, error)}") from None
        yield from cut_at_lines(split, document, True, whole_words)


def problem_of(piece: Piece, line: bytes, error: Exception) -> str:
    """What is wrong with a line of a .jsonl, and what to do."""
    # the repr of an error about bytes has the whole line
    if isinstance(error, UnicodeDecodeError):
        return bad_byte(piece.path, error.start, line)
    cure = ""
    if isinstance(error, KeyError):
        cure = f"; {prepare_column(piece.path)}"
    if b"\0" in line:
        cure = "; it has NULs: is it a text, in UTF-8?"
    return f'need a JSON object with a string "{piece.text_column}" ({error!r:.200}){cure}'


def split_of(piece: Piece, key: bytes) -> str:
    """Split of a document: of its piece, or by the hash of the key."""
    if piece.split != "hash":
        return piece.split
    if hashlib.sha256(key).digest()[0] * VAL_PART < 256:  # 13 of 256: one in 20
        return "val"
    return "train"


def cut_at_lines(
    split: str, text: str, closed: bool, whole_words: bool = False, size: int = SEGMENT
) -> Iterator[tuple[str, str, bool]]:
    """Yields (split, segment, whether the document ends) for a document, to be tokenized in
    parallel and in little memory. Cuts after a newline if possible. whole_words: else before a
    space, if possible."""
    start = 0
    while start < len(text):
        stop = start + size
        if stop >= len(text):
            stop = len(text)
        elif line := text.rfind("\n", start, stop) + 1:
            stop = line
        elif whole_words:
            space = text.rfind(" ", start + 1, stop)
            if space > 0:
                stop = space
        yield split, text[start:stop], closed and stop == len(text)
        start = stop


class Findings:
    """Counts and examples found while a piece is tokenized, beside the tokens."""

    def __init__(self, tokenizer_file: Path, skip_bad: bool):
        traits = traits_of(tokenizer_file)
        self.has_seams = traits.has_seams
        self.spelling = None
        if not traits.spells_all:
            self.spelling = Spelling(tokenizer_file)  # counts what the tokenizer cannot spell
        self.skip_bad = skip_bad  # leave out bad conversations
        self.skipped = []  # their errors
        self.nulls = []  # lines or rows with null for a text

    def look(self, text: str, ids: list[int] | None = None) -> None:
        if self.spelling is not None:
            self.spelling.look(text, ids)


def tokenize_text(
    piece: Piece, tokenizer_file: Path, eot: int, findings: Findings, begin: Sequence[int] = ()
) -> Iterator[tuple]:
    """Yields (split, ids, mask, whether a document ends) for each segment; begin: ids before the
    first segment of a document, eot follows the last."""
    eot_text = token_text(load_tokenizer(tokenizer_file), eot)
    seams = findings.has_seams
    found = read_documents(piece, eot_text, seams, findings.nulls)
    # whether a segment begins a document
    opens = not (seams or begin) or not goes_on(piece, eot_text)
    # 4 MB of text at once: as Encoding objects they take 200 MB
    while group := list(islice(found, 64)):
        kinds = []  # of each segment, for its tokens: opens, closes
        first = []  # whether a segment is the first of its document
        for _, _, closed in group:
            kinds.append((opens, closed) if seams else (True, True))
            first.append(opens)
            opens = closed
        all_ids = tokenize_segments([text for _, text, _ in group], kinds, tokenizer_file)
        for (split, text, closed), ids, is_first in zip(group, all_ids, first):
            findings.look(text, ids)
            ids = ids + [eot] * closed
            if begin and is_first:
                ids = [*begin, *ids]
            yield split, ids, [1] * len(ids), closed


def tokenize_segments(texts: list[str], kinds: list[tuple], tokenizer_file: Path) -> list:
    """The ids of each text. kinds: of each text, whether it opens and closes a document."""
    all_ids = [[]] * len(texts)
    for kind in dict.fromkeys(kinds):
        places = [i for i, other in enumerate(kinds) if other == kind]
        tokenizer = segment_tokenizer(tokenizer_file, *kind)
        try:
            encodings = tokenizer.encode_batch_fast(
                [texts[i] for i in places], add_special_tokens=False
            )
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{tokenizer_file} fails on this text: {error}") from None
        for i, encoding in zip(places, encodings):
            all_ids[i] = encoding.ids
    return all_ids


def tokenize_chats(piece: Piece, tokenizer_file: Path, findings: Findings) -> Iterator[tuple]:
    """Yields (split, ids, mask, whether a document ends) for each conversation; mask: 1 for a token
    with a loss. Raises ValueError for a bad conversation, unless findings take them."""
    from corpus.chat import chat_tokenizer, parse_conversation, read_template, tokens_and_mask

    template = read_template(str(tokenizer_file.parent), str(piece.path))
    tokenizer = chat_tokenizer(tokenizer_file)
    for i, line in enumerate(json_lines(piece)):
        line = line.strip()
        if not line:
            continue
        try:
            conversation = parse_conversation(line)
            ids, mask = tokens_and_mask(conversation, template, tokenizer)
        except ValueError as error:
            if is_null_line(line):
                findings.nulls.append(i)
                continue
            problem = f"{name_line(piece, i)}: {error}"
            if not findings.skip_bad:
                raise ValueError(
                    f"{problem}; python data.py prepare --skip_bad N leaves out up to N such lines"
                ) from None
            findings.skipped.append(problem)
        else:
            for message in conversation.messages:
                findings.look(message.get("content") or "")
            yield split_of(piece, line), ids, mask, len(ids) > 0


def is_null_line(line: bytes) -> bool:
    """Whether a line has null in place of its conversation."""
    try:
        return is_null(json.loads(line), "messages")
    except (ValueError, RecursionError):
        return False


def tokenize_documents(
    piece: Piece, tokenizer_file: Path, eot: int, findings: Findings, begin: Sequence[int] = ()
) -> Iterator[tuple]:
    """tokenize_chats or tokenize_text, depending on the file. A chat template begins its own texts."""
    if is_chat(piece.path, piece.text_column):
        return tokenize_chats(piece, tokenizer_file, findings)
    return tokenize_text(piece, tokenizer_file, eot, findings, begin)


# --------------------------------------------------------------------------------------------------
# Documents -> token shards
def tokenize_group(
    pieces: list[Piece], number: int, folder: Path, tokenizer: tuple, source: dict, skip_bad: int
) -> dict:
    """Writes the shards of a group of pieces, then a note, piece-00000.json. Returns the note,
    {"entries": {split: entry of index.json}, "skipped": errors of bad conversations, "nulls": lines
    without a text, "lost": Spelling.counted()}; the last two only where there are some. Of a fitting
    note with intact shards nothing is written again."""
    tokenizer_file, eot, vocab_size = tokenizer
    note = folder / f"piece-{number:05d}.json"
    dtype = token_dtype(vocab_size)
    chat = source.get("chat_template")
    about = []
    for piece in pieces:
        text = piece.path.stat()
        about += [piece, text.st_size, text.st_mtime_ns]
    made_from = cache_name(*about, source["tokenizer"], eot, chat, *spelling_rules(tokenizer_file))
    if source.get("begin"):
        made_from = cache_name(made_from, source["begin"])
    # no note, or a damaged one
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        known = json.loads(note.read_bytes())
        is_damaged = any(changed_files(folder, entry) for entry in known["entries"].values())
        if known["made_from"] == made_from and not is_damaged:
            return known

    kinds = {piece.split for piece in pieces}
    splits = [split for split in ("train", "val") if kinds & {split, "hash"}]
    tokens = {split: [np.empty(0, dtype)] for split in splits}
    bits = {split: [np.empty(0, np.uint8)] for split in splits}
    documents = dict.fromkeys(splits, 0)
    findings = Findings(tokenizer_file, bool(skip_bad))
    begin = source.get("begin", ())
    found = (tokenize_documents(piece, tokenizer_file, eot, findings, begin) for piece in pieces)
    for split, ids, mask, closed in chain.from_iterable(found):
        tokens[split].append(np.array(ids, dtype))
        documents[split] += closed
        if chat:
            bits[split].append(np.array(mask, np.uint8) * LOSS)
            bits[split][-1][:1] |= FIRST
    entries = {}
    for split in splits:
        shard = folder / f"{split}-{number:05d}.npy"
        marks = None
        if chat:
            marks = np.concatenate(bits[split])
        entries[split] = write_shard(shard, np.concatenate(tokens[split]), documents[split], marks)
    known = {"made_from": made_from, "entries": entries, "skipped": findings.skipped}
    if findings.nulls:
        known["nulls"] = len(findings.nulls)
    if findings.spelling is not None:
        known["lost"] = findings.spelling.counted()
    write_file(note, json.dumps(known).encode())
    return known


def build_shards(
    paths: list,
    tokenizer: tuple,
    folder: Path,
    workers: int = 1,
    text_column: str = "text",
    skip_bad: int = 0,
    share: tuple[int, int] = (0, 1),
    begin: Sequence[int] = (),
    max_lost: float = MOST,
    accept: str = "",
) -> None:
    """Tokenizes text files into a folder of token shards. After an interruption, the same call
    keeps finished pieces.

    tokenizer: from find_tokenizer(). workers: processes; 1 = here, with the threads of the
    `tokenizers` library.
    skip_bad: leave out at most so many bad conversations; skipped.txt lists them. share (i, n):
    make every n-th group of pieces from
    number i on, and no index.json; a call for all groups keeps those of the shares. begin: ids
    before each document of text. max_lost: per cent of the characters that the tokenizer may fail
    to spell; accept: the command that takes --max_lost, "" if it is the user's. Raises ValueError."""
    tokenizer_file, eot, vocab_size = tokenizer
    with Progress(f"looking for places to cut {plural(len(paths), 'file')}"):
        pieces = cut_into_pieces(
            paths, token_text(load_tokenizer(tokenizer_file), eot), text_column
        )
    with_text = {piece.path for piece in pieces}
    empty = [str(path) for path in paths if path not in with_text]
    if empty:
        say(f"{brief(empty)} is empty and left out")
    texts = [path for path in paths if path in with_text]
    source = source_of(paths, texts, tokenizer_file, text_column, begin)
    if (folder / "index.json").exists():
        old = read_index(folder)
        if old["source"] != source or old["eot"] != eot:
            raise ValueError(
                f"{folder} has shards of other files, or of another tokenizer or chat template; "
                "name a new --out"
            )
    folder.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer.json": tokenizer_file.read_bytes()} | files_beside(tokenizer_file)
    for name, content in files.items():
        write_file(folder / name, content)
    job = partial(
        tokenize_group, folder=folder, tokenizer=tokenizer, source=source, skip_bad=skip_bad
    )
    groups = share_shards(pieces, piece_size(paths))
    notes = tokenize_groups(job, groups, range(len(groups))[share[0] :: share[1]], workers)
    nulls = sum(note.get("nulls", 0) for note in notes)
    if nulls:
        say(f"{nulls:,} lines or rows have null for a text and are left out")
    lost = add_counts([note["lost"] for note in notes if "lost" in note])
    if per_cent(lost) > max_lost:
        raise ValueError(lost_refusal(lost, accept))
    if share[1] > 1:
        return
    splits = {"train": [], "val": []}
    skipped = []
    for note in notes:
        skipped += note["skipped"]
        for split, entry in note["entries"].items():
            splits[split].append(entry)
    if skip_bad or skipped:  # an interrupted run with --skip_bad may have left notes
        kept = sum(entry["documents"] for entry in chain(*splits.values()))
        list_skipped(skipped, kept, skip_bad, folder)
    beside = {}
    for name, content in files.items():
        if name in BESIDE:
            beside[name] = hashlib.sha256(content).hexdigest()
    index = {
        "vocab_size": vocab_size,
        "eot": eot,
        "source": source,
        "beside": beside,
        "splits": splits,
    }
    if lost["characters"]:  # looked at, because this tokenizer cannot spell everything
        index["lost"] = lost
    write_index(folder, index)


def source_of(
    paths: list, texts: list, tokenizer_file: Path, text_column: str, begin: Sequence[int]
) -> dict:
    """The sources of a folder of shards, for the index. texts: the files with content. Raises
    ValueError for conversations beside text."""
    source = {
        "inputs": [[path.name, path.stat().st_size] for path in paths],
        "tokenizer": sha256_file(tokenizer_file),
    }
    if text_column != "text":
        source["text_column"] = text_column
    if begin:
        source["begin"] = list(begin)
    chats = [path for path in paths if is_chat(path, text_column)]
    if not chats:
        return source
    others = [path for path in texts if path not in chats]
    if others:
        raise ValueError(
            f"{chats[0]} holds conversations and {others[0]} text; name the files of one kind, "
            "or use --data name=path:weight,name=path:weight"
        )
    from corpus.chat import read_template

    rules = read_template(str(tokenizer_file.parent), str(chats[0])).rules
    source["chat_template"] = hashlib.sha256(rules.encode()).hexdigest()
    return source


def bytes_of(pieces: list[Piece]) -> int:
    """Bytes of text of a group of pieces; of a packed file its packed size."""
    total = 0
    for piece in pieces:
        end = piece.end
        if end is None:
            end = piece.path.stat().st_size
        total += end - piece.start
    return total


def tokenize_groups(
    job: Callable[..., dict], groups: list, numbers: range, workers: int
) -> list[dict]:
    """The notes of the groups in `numbers`, on several processes. job: tokenize_group."""
    workers = min(workers, len(numbers))
    notes = []
    with contextlib.ExitStack() as stack:
        sizes = [bytes_of(groups[i]) for i in numbers]
        progress = stack.enter_context(Progress("tokenizing", sum(sizes), "MB", 1e6))
        do = map
        if workers > 1:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
            spawn = multiprocessing.get_context("spawn")
            do = stack.enter_context(ProcessPoolExecutor(workers, spawn)).map
        for note in told_deaths(do(job, [groups[i] for i in numbers], numbers)):
            notes.append(note)
            progress(sizes[len(notes) - 1])
    return notes


def told_deaths(notes: Iterable[dict]) -> Iterator[dict]:
    """The notes. Raises ValueError if a process that makes them was killed."""
    try:
        yield from notes
    except BrokenProcessPool:
        raise ValueError(
            "a process that tokenizes has died: ended by kill -9, or by the system for want of "
            "memory; finished parts are kept, and the same command goes on; fewer --workers of "
            "data.py prepare take less memory"
        ) from None


def list_skipped(skipped: list[str], kept: int, skip_bad: int, folder: Path) -> None:
    """Write skipped.txt, the conversations left out. Raises ValueError for more than skip_bad."""
    write_file(folder / "skipped.txt", "".join(f"{line}\n" for line in skipped).encode())
    total = kept + len(skipped)
    if len(skipped) > skip_bad:
        raise ValueError(
            f"--skip_bad {skip_bad}: {len(skipped)} of {total} conversations cannot be "
            f"trained, see {folder}/skipped.txt; the first is {skipped[0]}"
        )
    print(f"{len(skipped)} of {total} conversations are left out; {folder}/skipped.txt lists them")


def say(line: str) -> None:
    if own_rank() == 0:
        print(line, flush=True)
