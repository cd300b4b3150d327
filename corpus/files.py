"""Find text files: .txt, .md, .jsonl and .parquet, also packed by gzip or Zstandard; single files,
folders, globs."""

import glob
import json
import os
import zlib
from pathlib import Path

from corpus.mixture import FORMATS, is_text_file, prepare_column
from flags.files import hub_hint

# columns of a conversation: see corpus/chat.py
CONVERSATION = ("messages", "conversations", "tools", "system")


def check_text(path: Path):
    """Raises ValueError for a file without text to train on, and says what to do."""
    if not path.exists():
        need = f"need {FORMATS}, a folder of them or of token shards, or a glob"
        raise ValueError(f"{path}: no such file; {need}{hub_hint(str(path), 'dataset')}")
    if not is_text_file(path) or not path.is_file():
        raise ValueError(
            f'{path}: need {FORMATS}; a line of a .jsonl is a JSON object {{"text": ...}}; unpack '
            "other archives"
        )
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; give a file with text in it")


def text_files(what: str) -> tuple[list[Path], list[Path]]:
    """(files of a path, files of the folder that are no text). The path is a file, a folder with
    text files in and below it, or a glob. Sorted by name, so that every machine has the same order.
    Raises ValueError."""
    path, left_out = Path(what), []
    if path.is_dir():

        def fail(error):
            raise error

        found = [
            Path(folder, name).relative_to(path)
            for folder, _, names in os.walk(path, onerror=fail)
            for name in names
        ]
        found = sorted(
            (p for p in found if not any(part.startswith(".") for part in p.parts)),
            key=Path.as_posix,
        )
        left_out = [path / p for p in found if not is_text_file(p)]
        if not (files := [path / p for p in found if is_text_file(p)]):
            raise ValueError(
                f"{what}: no index.json of token shards (see python data.py prepare) and no "
                f"{FORMATS} is in it"
            )
    elif path.exists() or not glob.has_magic(what):
        files = [path]
    elif not (
        files := [
            Path(name) for name in sorted(glob.glob(what, recursive=True)) if os.path.isfile(name)
        ]
    ):
        raise ValueError(f"{what}: no file matches")
    for file in files:
        check_text(file)
    return files, left_out


# --------------------------------------------------------------------------------------------------
# Packed files
def unpacked(path: Path, text_column: str = "text"):
    """Yields the text of a packed file in chunks of bytes, of a .parquet lines of JSON (text_column
    "": of all columns). Raises ValueError for a damaged file, and for a file of a stranger that
    would fill memory and disk."""
    total, most = 0, max(1 << 28, 1000 * path.stat().st_size)
    for chunk in (
        parquet_lines(path, text_column, most) if path.suffix == ".parquet" else decompressed(path)
    ):
        total += len(chunk)
        check_unpacked(path, total, most)
        yield chunk


def check_unpacked(path: Path, n_bytes: int, most: int):
    if n_bytes > most:
        raise ValueError(
            f"{path} unpacks to more than {most:,} bytes, 1000 times its size; if right, unpack "
            "it first"
        )


def decompressed(path: Path):
    """Yields the bytes of a .gz or .zst."""
    if path.suffix == ".gz":
        broken, make = zlib.error, lambda: zlib.decompressobj(wbits=31)
    else:
        try:
            import zstandard
        except ImportError:
            raise ValueError(
                f"{path}: reading .zst needs zstandard: pip install zstandard"
            ) from None
        broken, make = (
            zstandard.ZstdError,
            zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj,
        )
    unpacker = make()
    try:
        with open(path, "rb") as file:
            # a small chunk fits into memory even if it unpacks to 1000 times its size
            while chunk := file.read(1 << 14):
                while chunk:
                    # packed files may be concatenated
                    unpacker = make() if unpacker.eof else unpacker
                    yield unpacker.decompress(chunk)
                    # tapes are filled up with zeros
                    chunk = unpacker.unused_data.lstrip(b"\0") if unpacker.eof else b""
    except broken as error:
        raise ValueError(f"{path} is damaged ({error}); get it again") from None
    if not unpacker.eof:
        raise ValueError(
            f"{path} is truncated: its packed text does not come to its end; get it again"
        )


def parquet_lines(path: Path, text_column: str, most: int):
    """Yields the rows of a .parquet as lines of JSON: text_column, else the columns of a
    conversation; with "" all columns. The row has no key for a null, nor for bytes or a date. most:
    bytes in memory at once, and of all pages."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            columns = (
                [text_column]
                if text_column in names
                else [name for name in CONVERSATION if name in names]
            )
            columns = columns if text_column else names
            if text_column and not {text_column, *CONVERSATION[:2]} & set(columns):
                raise ValueError(
                    f"{path} has no column {text_column!r}, but {', '.join(names)}; "
                    f"{prepare_column(path)}"
                )
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            sizes = [
                group.column(i).total_uncompressed_size
                for group in groups
                for i in range(group.num_columns)
            ]
            check_unpacked(path, max(sizes, default=0), most)
            # Few rows, because a row may be a whole book. A text that is there once may be the text
            # of many rows.
            rows = max(1, min(128, most // max(1, *sizes)))
            for batch in file.iter_batches(rows, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    yield json.dumps(without_nulls(row)).encode() + b"\n"
    except (pyarrow.ArrowException, OSError) as error:
        # not readable at all; for a damaged file pyarrow gives no number
        if getattr(error, "errno", None):
            raise
        raise ValueError(
            f"{path} is damaged ({' '.join(str(error).split())}); get it again"
        ) from None


def without_nulls(value):
    if isinstance(value, dict):
        return {
            key: without_nulls(inner)
            for key, inner in value.items()
            if isinstance(inner, str | int | float | list | dict)
        }
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
