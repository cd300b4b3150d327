"""Read text files: .txt, .md, .jsonl and .parquet, also packed by gzip or Zstandard; single files, folders and globs.

A reader gives bytes of text (.txt, .md), or one JSON object per document (lines of a .jsonl, rows of a .parquet)."""
import glob
import json
import os
import zlib
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import NamedTuple

PACKED, FORMATS = (".gz", ".zst", ".parquet"), ".txt, .md, .jsonl (each also with .gz or .zst) or .parquet"
UNPACK = {".xz": "unxz -k", ".bz2": "bunzip2 -k", ".zip": "unzip"}
# Commands that turn a table or a JSON list into a .jsonl; the user must say which column is the text
CONVERT = {".csv": "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(open(sys.argv[1]))]",
           ".json": "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1]))]"}
CONVERSATION = ("messages", "conversations", "tools", "system")  # columns of a conversation: see sft/chat.py
PARQUET_PIECE = 32 << 20  # bytes of the row groups in one piece, at least


class Piece(NamedTuple):
    """A part of a file: unpacked bytes start..end; of a .parquet with split "hash", row groups start..end. Each piece becomes
    one shard per split."""

    path: Path
    start: int
    end: int | None  # None: a packed file to its end, of unknown length
    split: str  # "train", "val", or "hash": the hash of each document decides
    closed: bool  # a document ends here; else (a long .txt) the next piece continues the document
    text_column: str = "text"  # key of the text in the objects of a .jsonl, column of a .parquet


def format_of(path: Path) -> str:
    """Format after unpacking: .txt (Markdown, too) or .jsonl (a .parquet, too). Any other suffix is no text."""
    if path.suffix == ".parquet":
        return ".jsonl"
    suffix = path.with_suffix("").suffix if path.suffix in PACKED else path.suffix
    return ".txt" if suffix == ".md" else suffix


def is_text_file(path: Path) -> bool:
    return format_of(path) in (".txt", ".jsonl")


def prepare_column(path: Path) -> str:
    """For errors: how to train on a file with another name than "text" for its texts."""
    return (f'if its texts are not named "text": python data.py prepare --input {quote(str(path))} --text_column NAME '
            "--tokenizer tokenizer.json --out FOLDER, and train with --data FOLDER")


def check_text(path: Path):
    """Raises ValueError for a file without text to train on, and says what to do."""
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
    """(files of a path, files of the folder that are no text). The path is a file, a folder with text files in and below it, or
    a glob. Sorted by name, so that every machine has the same order. Raises ValueError."""
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
    """Yields the text of a packed file, in chunks of bytes. Raises ValueError for a damaged or truncated file."""
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
            while chunk := file.read(1 << 14):  # a small chunk fits into memory even if it unpacks to 1000 times its size
                while chunk:
                    unpacker = make() if unpacker.eof else unpacker  # packed files may be concatenated
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


def cut_row_groups(whole: Piece) -> list[Piece]:
    """The pieces of a .parquet."""
    import pyarrow.parquet

    pieces, start, size = [], 0, 0
    with pyarrow.parquet.ParquetFile(whole.path) as file:
        for i in range(file.num_row_groups):
            size += file.metadata.row_group(i).total_byte_size
            if size >= PARQUET_PIECE or i + 1 == file.num_row_groups:
                pieces.append(whole._replace(start=start, end=i + 1))
                start, size = i + 1, 0
    return pieces


def parquet_lines(piece: Piece):
    """Yields the rows of a .parquet as lines of JSON: text_column, else the columns of a conversation. A null is left out: the
    row has no such key. Raises ValueError."""
    path, text_column = piece.path, piece.text_column
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
            groups = [*range(file.num_row_groups)][piece.start:piece.end] if piece.split == "hash" else None  # None: all
            first = sum(file.metadata.row_group(i).num_rows for i in range(groups[0])) if groups else 0
            batches = file.iter_batches(1024, row_groups=groups, columns=columns, use_threads=False)
            for number, record in enumerate((record for batch in batches for record in batch.to_pylist()), first + 1):
                try:
                    yield json.dumps(without_nulls(record)).encode() + b"\n"
                except TypeError as error:  # bytes or dates among the messages
                    raise ValueError(f"{path} row {number}: {error}; need text") from None
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # not readable at all; for a damaged file pyarrow gives no number
            raise
        raise ValueError(f"{path} is damaged ({' '.join(str(error).split())}); get it again") from None


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------------------------------------
# Contents of a piece
def read_chunks(piece: Piece):
    """Yields the text of a piece in chunks of bytes: of a packed file as unpacked, of a .parquet lines of JSON."""
    if piece.path.suffix in PACKED:
        is_parquet = piece.path.suffix == ".parquet"
        chunks = parquet_lines(piece) if is_parquet else unpacked(piece.path)
        whole = piece.end is None or is_parquet and piece.split == "hash"
        yield from chunks if whole else [b"".join(chunks)[piece.start:piece.end]]
    else:
        with open(piece.path, "rb") as file:
            file.seek(piece.start)
            yield file.read(piece.end - piece.start)


def json_lines(piece: Piece):
    """Yields the JSON objects of a piece, still as bytes: lines of a .jsonl, rows of a .parquet."""
    rest = b""
    for chunk in read_chunks(piece):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    yield rest


def is_chat(path: Path, text_column: str = "text") -> bool:
    """Whether a file holds conversations, by its first line or row. A row with "text" is plain text to train on."""
    if format_of(path) != ".jsonl" or not path.is_file():
        return False
    packed = closing(json_lines(Piece(path, 0, None, "hash", True, text_column)))
    with packed if path.suffix in PACKED else open(path, "rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False  # read_documents reports the error with the line number
    return isinstance(record, dict) and text_column not in record and bool({"messages", "conversations"} & record.keys())


def name_line(piece: Piece, index: int) -> str:
    """File and number of the line or row with this index in a piece, for errors."""
    before = piece.start and b"".join(read_chunks(piece._replace(start=0, end=piece.start))).count(b"\n")
    return f"{piece.path} {'row' if piece.path.suffix == '.parquet' else 'line'} {before + index + 1}"
