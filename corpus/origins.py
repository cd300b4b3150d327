"""From a place in the stream of tokens back to the text: file, document, and line.

No place was recorded. A shard comes from one piece of a file, or from some small files, and the
documents of a shard stand in their order, so the files are cut into pieces again, and documents and
lines are counted again.
"""

import bisect
import json
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus.build import (
    Piece,
    cut_into_pieces,
    is_chat,
    is_null,
    is_null_line,
    json_lines,
    piece_size,
    read_documents,
    split_of,
    text_of,
)
from corpus.cache import cache_folder, parse_mixture
from corpus.files import text_files
from corpus.mixture import format_of
from corpus.shards import FIRST, is_shards, read_index
from corpus.tokenizer import load_tokenizer, token_text
from corpus.write_shards import share_shards
from distributed.agree import brief


class Span(NamedTuple):
    """The labels of a sequence that belong to one document."""

    start: int  # positions start..end of the sequence
    end: int
    shard: int  # number of the shard among those of the training split
    document: int  # number of the document in the shard
    place: int  # the shard's token at `start`


class Origin(NamedTuple):
    """Where a document is."""

    file: str  # "" if the files are not known
    place: str  # "line 417"

    @property
    def text(self) -> str:
        return f"{self.file} {self.place}".strip()


# --------------------------------------------------------------------------------------------------
# The documents of a sequence
def spans_of(data, number: int) -> list[Span]:
    """The documents of a training window, in order. data: a TokenData, or ChatData; number: of the
    window."""
    if hasattr(data, "packing"):
        return spans_of_chats(data, number)
    ends = data.ends["train"]
    # the label of position 0 is the second token of the window
    first = number * data.seq_len + 1
    last = min(first + data.seq_len, int(ends[-1]))
    spans = []
    at = first
    while at < last:
        shard = int(np.searchsorted(ends, at, side="right"))
        begin = int(ends[shard - 1]) if shard else 0
        closing = ends_of_documents(data, shard)
        # an end of text belongs to the document before it
        document = int(np.searchsorted(closing, at - begin))
        stop = begin + int(closing[document]) + 1 if document < len(closing) else int(ends[shard])
        stop = min(stop, last)
        spans.append(Span(at - first, stop - first, shard, document, at - begin))
        at = stop
    return spans


def spans_of_chats(data, number: int) -> list[Span]:
    """spans_of, for conversations that are packed into sequences."""
    packing = data.packing["train"]
    spans = []
    at = 0  # tokens of the sequence before the document
    for shard, start, n in packing.documents[packing.bounds[number] : packing.bounds[number + 1]]:
        document = int(np.count_nonzero(data.mask("train", shard)[:start] & FIRST))
        first = max(at - 1, 0)
        end = min(at + int(n) - 1, data.seq_len)
        spans.append(Span(first, end, int(shard), document, int(start) + first - at + 1))
        at += int(n)
    return spans


def ends_of_documents(data, shard: int) -> np.ndarray:
    """The places of the end-of-text tokens in a shard of the training split."""
    return places_of_eot(data.folder, data.entries["train"][shard]["name"], data.eot)


@lru_cache(256)
def places_of_eot(folder: Path, name: str, eot: int) -> np.ndarray:
    return np.flatnonzero(np.load(folder / name, mmap_mode="r") == eot)


# --------------------------------------------------------------------------------------------------
# The files of a folder of shards
def files_of_parts(data: str, cache_dir: str) -> dict[str, list[Path] | None]:
    """{name of a part of --data: its text files, or None for token shards}; without a mixture the
    name is ""."""
    found = {}
    for part in parse_mixture(data):
        if is_shards(part.path):
            found[part.name] = None
        elif part.path == "stdlib":
            found[part.name] = [cache_folder(cache_dir) / "stdlib.jsonl"]
        else:
            found[part.name] = text_files(part.path)[0]
    return found


def find_origin(data, span: Span, files: list[Path] | None) -> Origin:
    """File and line of a document. files: of files_of_parts. Where files or lines are not known, the
    shard and the number of the document in it."""
    entry = data.entries["train"][span.shard]
    in_shard = f"document {span.document + 1} of {data.folder / entry['name']}"
    if files is None:
        names = [name for name, _ in read_index(data.folder)["source"]["inputs"]]
        return Origin(brief(names), f"({in_shard})")
    tokenizer = load_tokenizer(Path(data.tokenizer_file))
    eot_text = token_text(tokenizer, data.eot)
    groups = groups_of_files(tuple(files), eot_text)
    last = max(shard_number(other) for split in data.entries.values() for other in split)
    if last >= len(groups):  # shards of before 0.11: each piece has its own
        groups = [[piece] for group in groups for piece in group]
    number = shard_number(entry)
    if number >= len(groups):
        return Origin("", f"({in_shard})")
    counts = [entry["documents"]]
    if len(groups[number]) > 1:
        counts = [count_training(piece, eot_text) for piece in groups[number]]
        if sum(counts) != entry["documents"]:
            return Origin("", f"({in_shard}; the files have other documents today)")
    firsts = [0, *accumulate(counts)]  # the documents of the shard before each piece
    # the last piece that begins at the document, or before: a piece may have no document
    place = bisect.bisect_right(firsts, span.document, hi=len(counts)) - 1
    piece = groups[number][place]
    first = firsts[place]
    if format_of(piece.path) == ".txt":
        begin = 0
        if first:
            begin = ends_of_documents(data, span.shard)[first - 1] + 1
        shard = np.load(data.folder / entry["name"], mmap_mode="r")[begin : span.place]
        # in a shard of text the tokens are the text, so its lines can be counted in the tokens
        lines = tokenizer.decode(shard[shard != data.eot].tolist()).count("\n")
        return Origin(str(piece.path), f"line {lines_before(piece) + lines + 1}")
    documents = training_lines(piece)
    if len(documents) != counts[place]:
        return Origin(str(piece.path), f"({in_shard}; the file has other documents today)")
    line, key = documents[span.document - first]
    if key:  # a file of the built-in corpus
        return Origin(key, "")
    kind = "row" if piece.path.suffix == ".parquet" else "line"
    return Origin(str(piece.path), f"{kind} {lines_before(piece) + line + 1}")


def shard_number(entry: dict) -> int:
    """The number of a shard, from its entry in index.json: 7 for train-00007.npy."""
    return int(entry["name"].rpartition("-")[2].removesuffix(".npy"))


@lru_cache(8)
def groups_of_files(files: tuple, eot_text: str) -> list[list[Piece]]:
    return share_shards(cut_into_pieces([*files], eot_text), piece_size([*files]))


@lru_cache(4096)
def count_training(piece: Piece, eot_text: str) -> int:
    """The training documents of a piece, as its shard counts them."""
    if format_of(piece.path) != ".txt":
        return len(training_lines(piece))
    found = read_documents(piece, eot_text)
    return sum(closed for split, _, closed in found if split == "train")


@lru_cache(256)
def lines_before(piece: Piece) -> int:
    """The lines of a file before a piece."""
    if piece.start == 0:
        return 0
    with text_of(piece.path, piece.text_column) as text:
        return text[: piece.start].count(b"\n")


@lru_cache(256)
def training_lines(piece: Piece) -> list[tuple[int, str]]:
    """(line in the piece, from 0; the path of a file of the built-in corpus, else "") of every
    training document of a .jsonl or .parquet, in the order of read_documents and tokenize_chats."""
    chats = is_chat(piece.path, piece.text_column)
    found = []
    for i, line in enumerate(json_lines(piece)):
        if not line.strip():
            continue
        if chats:
            if not is_null_line(line) and split_of(piece, line.strip()) == "train":
                found.append((i, ""))
            continue
        record = json.loads(line.decode("utf-8-sig"))
        if is_null(record, piece.text_column):
            continue
        document = record[piece.text_column]
        key = record.get("split_key", "")
        if document and split_of(piece, (key or document).encode()) == "train":
            found.append((i, key))
    return found
