"""Files of text as they come: .txt, .md, .jsonl and .parquet, packed by gzip or Zstandard, alone, in folders, or named by a
glob.

Whatever the file, what comes out are bytes of text (.txt, .md) or one JSON object per document (.jsonl lines, rows of a
.parquet). """
import glob
import json
import os
import zlib
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import NamedTuple

PACKED, FORMATS = (".gz", ".zst"), ".txt, .md, .jsonl (each also with .gz or .zst) or .parquet"
UNPACK = {".xz": "unxz -k", ".bz2": "bunzip2 -k", ".zip": "unzip"}
# What makes a .jsonl of a table or of one JSON list: nobody knows which of their columns is the text
CONVERT = {".csv": "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(open(sys.argv[1]))]",
           ".json": "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1]))]"}
CONVERSATION = ("messages", "conversations", "tools", "system")  # columns that a conversation may have: see sft/chat.py
PARQUET_PIECE = 32 << 20  # bytes of the rows that one shard is made of, as far as their groups allow


class Piece(NamedTuple):
    """A part of a file: its bytes start..end, as they are when unpacked, or its rows. One shard per split is made of it."""

    path: Path
    start: int
    end: int | None  # None: a packed file from beginning to end, however long it is
    split: str  # "train", "val", or "hash": each document goes where its hash says
    closed: bool  # a document ends here; else (a long .txt) the next piece goes on with it
    text_column: str = "text"  # name of what a .jsonl's objects and a .parquet's rows have the text under


def format_of(path: Path) -> str:
    """.txt, .jsonl or .parquet, without what packs it; another suffix is no text. Markdown is text as it stands."""
    suffix = path.with_suffix("").suffix if path.suffix in PACKED else path.suffix
    return ".txt" if suffix == ".md" else suffix


def is_text_file(path: Path) -> bool:
    return format_of(path) in (".txt", ".jsonl") or path.suffix == ".parquet"


def prepare_column(path: Path) -> str:
    """How to train on a file whose texts have another name than "text", for errors."""
    return (f'if its texts are not named "text": python data.py prepare --input {quote(str(path))} --text_column NAME '
            "--tokenizer tokenizer.json --out FOLDER, and train with --data FOLDER")


def check_text(path: Path):
    """Raises ValueError with what to do about a file that is not text to train on."""
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if path.is_file() and path.suffix in UNPACK:
        raise ValueError(f"{path} is compressed; unpack it first: {UNPACK[path.suffix]} {path}")
    if path.is_file() and path.suffix in CONVERT:
        new = path.with_suffix(".jsonl")
        command = f"python -c {quote(CONVERT[path.suffix])} {quote(str(path))} > {quote(str(new))}"
        raise ValueError(f"{path}: need {FORMATS}; make a .jsonl of it, {command}; {prepare_column(new)}")
    if not is_text_file(path) or not path.is_file():
        raise ValueError(f'{path}: need {FORMATS}; each line of a .jsonl is a JSON object {{"text": ...}}')
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; give a file with text in it")


def text_files(what: str) -> tuple[list[Path], list[Path]]:
    """The files that a path means: a file, all text files in and below a folder, or what a glob matches. And those files of a
    folder that are no text. Sorted by name, so that the order is the same on every machine. Raises ValueError."""
    path, left_out = Path(what), []
    if path.is_dir():
        def fail(error):
            raise error

        found = [Path(folder, name).relative_to(path) for folder, _, names in os.walk(path, onerror=fail) for name in names]
        found = sorted((p for p in found if not any(part.startswith(".") for part in p.parts)), key=Path.as_posix)
        left_out = [path / p for p in found if not is_text_file(p)]
        if not (files := [path / p for p in found if is_text_file(p)]):
            raise ValueError(f"{what}: no index.json, so it is not a folder of finished token shards, and no text either: no "
                             f"{FORMATS} is in it; python data.py prepare --input TEXT --tokenizer tokenizer.json --out DIR "
                             "makes shards")
    elif path.exists() or not glob.has_magic(what):
        files = [path]
    elif not (files := [Path(name) for name in sorted(glob.glob(what, recursive=True)) if os.path.isfile(name)]):
        raise ValueError(f"{what}: no file matches")
    for file in files:
        check_text(file)
    return files, left_out


# ---------------------------------------------------------------------------------------------------------------------
# Packed files
def unpacked(path: Path):
    """Yields the text of a packed file, in chunks of bytes. Raises ValueError where it is damaged, or ends too early."""
    if path.suffix == ".gz":
        broken, make = zlib.error, lambda: zlib.decompressobj(wbits=31)
    else:
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"{path}: reading .zst needs zstandard: pip install zstandard") from None
        broken, make = zstandard.ZstdError, zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
    unpacker, total, most = make(), 0, max(1 << 28, 1000 * path.stat().st_size)
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 14):  # so little that what it unpacks to fits into memory, whatever it is
                while chunk:
                    unpacker = make() if unpacker.eof else unpacker  # several packed files, one behind the other, are one
                    text = unpacker.decompress(chunk)
                    total += len(text)
                    if total > most:
                        raise ValueError(f"{path} unpacks to more than {most:,} bytes, 1000 times its size, as no text does; "
                                         "unpack it by hand if that is right")
                    yield text
                    chunk = unpacker.unused_data.lstrip(b"\0") if unpacker.eof else b""  # tapes are filled up with zeros
    except broken as error:
        raise ValueError(f"{path} is damaged ({error}); get it again") from None
    if not unpacker.eof:
        raise ValueError(f"{path} is truncated: its packed text does not come to its end; get it again")


def lines_of_chunks(chunks):
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    yield rest


# ---------------------------------------------------------------------------------------------------------------------
# Parquet
@contextmanager
def open_parquet(path: Path, text_column: str):
    """(file, names of the columns to read). Raises ValueError."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            columns = [text_column] if text_column in schema.names else [c for c in CONVERSATION if c in schema.names]
            if not {text_column, *CONVERSATION[:2]} & set(columns):
                raise ValueError(f"{path} has no column {text_column!r}, but {', '.join(schema.names)}; {prepare_column(path)}")
            kind = str(schema.field(columns[0]).type)
            if columns == [text_column] and kind not in ("string", "large_string", "string_view"):
                raise ValueError(f"{path}: column {text_column!r} holds {kind}, not text")
            yield file, columns
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # not readable at all; for what is broken inside, pyarrow gives no number
            raise
        raise ValueError(f"{path} is damaged ({' '.join(str(error).split())}); get it again") from None


def cut_rows(path: Path, text_column: str, many: int, val_part: int) -> list[Piece]:
    """Pieces of whole groups of rows. Fewer than `many` rows are no group's business: the last ones are for validation."""
    with open_parquet(path, text_column) as (file, _):
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        n = file.metadata.num_rows
        if n < many:
            border = n - max(1, n // val_part) if n > 1 else n
            cuts = (0, border, "train"), (border, n, "val")
            return [Piece(path, start, end, split, True, text_column) for start, end, split in cuts if start < end]
        pieces, start, end, size = [], 0, 0, 0
        for group in groups:
            end, size = end + group.num_rows, size + group.total_byte_size
            if size >= PARQUET_PIECE or end == n:
                pieces.append(Piece(path, start, end, "hash", True, text_column))
                start, size = end, 0
        return pieces


def groups_of(file, piece: Piece) -> tuple[list[int], int]:
    """(numbers of the groups that a piece's rows are in, the first one's first row)"""
    found, first, row = [], 0, 0
    for i in range(file.num_row_groups):
        n = file.metadata.row_group(i).num_rows
        if row < piece.end and row + n > piece.start:
            first = first if found else row
            found.append(i)
        row += n
    return found, first


def rows(piece: Piece):
    """Yields the rows of a piece of a .parquet as JSON objects. A null is left out: there the row has no such thing."""
    with open_parquet(piece.path, piece.text_column) as (file, columns):
        groups, row = groups_of(file, piece)
        for batch in file.iter_batches(1024, row_groups=groups, columns=columns, use_threads=False):
            for record in batch.to_pylist():
                row += 1
                if piece.start < row <= piece.end:
                    try:
                        yield json.dumps(without_nulls(record)).encode()
                    except TypeError as error:  # bytes or dates among the messages
                        raise ValueError(f"{piece.path} row {row}: {error}; need text") from None


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------------------------------------
# What a piece holds
def read_piece(piece: Piece) -> bytes:
    """The text of a piece that has an end."""
    if piece.path.suffix in PACKED:
        return b"".join(unpacked(piece.path))[piece.start:piece.end]
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        return file.read(piece.end - piece.start)


def json_lines(piece: Piece):
    """Yields the JSON objects of a piece, still as bytes: lines of a .jsonl, rows of a .parquet."""
    if piece.path.suffix == ".parquet":
        yield from rows(piece)
        return
    found = iter(lines_of_chunks(unpacked(piece.path)) if piece.end is None else read_piece(piece).split(b"\n"))
    yield next(found, b"").removeprefix(b"\xef\xbb\xbf")  # Windows likes to begin with these
    yield from found


def first_line(path: Path, text_column: str = "text") -> bytes:
    """The first JSON object of a .jsonl or .parquet, b"" where there is none."""
    end = None if path.suffix in PACKED else 1 if path.suffix == ".parquet" else 0
    if end == 0:
        with open(path, "rb") as file:
            return next((line for line in file if line.strip()), b"")
    return next((line for line in json_lines(Piece(path, 0, end, "hash", True, text_column)) if line.strip()), b"")


def is_chat(path: Path, text_column: str = "text") -> bool:
    """Whether a file holds conversations: its first line or row tells. One with a "text" is text to train on as it is."""
    if format_of(path) not in (".jsonl", ".parquet") or not path.is_file():
        return False
    try:
        record = json.loads(first_line(path, text_column))
    except (ValueError, RecursionError):
        return False  # said with its line number by whoever reads the text
    return isinstance(record, dict) and text_column not in record and bool({"messages", "conversations"} & record.keys())


def first_number(piece: Piece) -> int:
    """The number, counted from 1, of the piece's first line or row in its file."""
    if piece.start == 0:
        return 1
    if piece.path.suffix == ".parquet":
        return piece.start + 1
    return 1 + read_piece(piece._replace(start=0, end=piece.start)).count(b"\n")


def place(piece: Piece, number: int) -> str:
    """Where a line or row is, for errors."""
    return f"{piece.path} {'row' if piece.path.suffix == '.parquet' else 'line'} {number}"


def raw_bytes(piece: Piece):
    """Yields the bytes that the text of a piece is made of: its own, or more of its file where it has none of its own."""
    start, size = 0, piece.path.stat().st_size
    if piece.path.suffix == ".parquet":
        with open_parquet(piece.path, piece.text_column) as (file, _):
            columns = [group.column(i) for number in groups_of(file, piece)[0]
                       for group in [file.metadata.row_group(number)] for i in range(group.num_columns)]
        starts = [min(filter(None, (c.dictionary_page_offset, c.data_page_offset))) for c in columns]
        start = min(starts)
        size = max(s + c.total_compressed_size for s, c in zip(starts, columns)) - start
    elif piece.path.suffix not in PACKED:
        start, size = piece.start, piece.end - piece.start
    with open(piece.path, "rb") as file:
        file.seek(start)
        while size and (chunk := file.read(min(size, 1 << 22))):
            yield chunk
            size -= len(chunk)
