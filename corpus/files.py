"""Find text files: .txt, .md, .jsonl and .parquet, also packed by gzip or Zstandard; single files,
folders, globs."""

import glob
import json
import os
import re
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from corpus.mixture import FORMATS, format_of, is_text_file, prepare_column
from distributed.agree import brief
from flags.hints import hub_hint

# columns of a conversation, and those that change it: see corpus/chat.py
CONVERSATION = ("messages", "conversations")
CONVERSATION += ("tools", "functions", "tool_defs", "system", "system_prompt", "system_message")
CONVERSATION += ("chat_template_kwargs", "documents", "weight", "train", "training", "loss")
CONVERSATION += ("masked",)
# Names of texts about a data set, which come with a download
ABOUT = r"(readme|licen[sc]e|copying|notice|changelog|citation|contributing|authors)([._-].*)?"
# Why a file or a folder is left out
NO_TEXT = "no text"
BESIDE_DATA = "no data beside .jsonl or .parquet; to train on it, name the file"
REPEATED = "a link to what is read already"
REPEATED_PATH = "read already"
CIRCLE = "a link to a folder around it"
EMPTY = "empty"
# Leaves out bytes that are not UTF-8
DROP = "iconv -c -f utf-8 -t utf-8"
# First bytes of files in other encodings than UTF-8: the name, and the command that converts
BEGINNINGS = {
    b"\xff\xfe\0\0": ("UTF-32", "iconv -f utf-32 -t utf-8"),
    b"\0\0\xfe\xff": ("UTF-32", "iconv -f utf-32 -t utf-8"),
    b"\xff\xfe": ("UTF-16", "iconv -f utf-16 -t utf-8"),
    b"\xfe\xff": ("UTF-16", "iconv -f utf-16 -t utf-8"),
    b"\x1f\x8b": ("packed by gzip", "zcat"),
    b"\x28\xb5\x2f\xfd": ("packed by Zstandard", "zstdcat"),
    b"PK\3\4": ("packed by zip", "zcat"),
}


def check_text(path: Path) -> None:
    """Raises ValueError for a file without text to train on, and says what to do."""
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}, which is not there; mount it, or remove the "
            "link"
        )
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


def text_files(what: str) -> tuple[list[Path], dict[Path, str]]:
    """(files of a path, {file or linked folder that is left out: reason}). The path is a file, a
    folder with text files in and below it, or a glob. Sorted by name, so that every machine has the
    same order. Raises ValueError."""
    path = Path(what)
    if path.is_dir():
        files, left_out = files_of_folder(path)
        if not files:
            raise ValueError(
                f"{what}: no index.json of token shards (see python data.py prepare) and no "
                f"{FORMATS} is in it"
            )
    elif path.exists() or path.is_symlink() or not glob.has_magic(what):
        files = [path]
        left_out = {}
    else:
        files, left_out = files_of_glob(what)
    files = leave_out_twins(files, left_out)
    files = leave_out_empty(files, left_out)
    for file in files:
        check_text(file)
    return files, left_out


def describe_left_out(left_out: dict[Path, str]) -> str:
    """ ", without meta.json (no text), without README.md (...)"; "" if nothing is left out."""
    by_reason = {}
    for path, reason in left_out.items():
        by_reason.setdefault(reason, []).append(path.name)
    return "".join(f", without {brief(names)} ({why})" for why, names in by_reason.items())


# --------------------------------------------------------------------------------------------------
# Folders and globs
def files_of_folder(top: Path) -> tuple[list[Path], dict[Path, str]]:
    """The text files in and below a folder; the rest by reason."""
    visited, left_out = walk(top)
    found = [Path(folder, name) for folder, names in visited for name in names]
    found = sorted(found, key=lambda file: file.relative_to(top).as_posix())
    found = leave_out_repeated(found, left_out)
    data_set = any(format_of(file) == ".jsonl" for file in found)
    files = []
    for file in found:
        if file.is_symlink() and not file.exists():
            check_text(file)  # raises: the name does not tell whether text would be there
        if not is_text_file(file):
            left_out[file] = NO_TEXT
        elif data_set and is_about_data(file, top):
            left_out[file] = BESIDE_DATA
        else:
            files.append(file)
    return files, left_out


def files_of_glob(pattern: str) -> tuple[list[Path], dict[Path, str]]:
    """The files that match a pattern, each once: links may give it several names."""
    found = [Path(name) for name in expand(pattern) if os.path.isfile(name)]
    if not found:
        raise ValueError(f"{pattern}: no file matches")
    files = []
    left_out = {}
    known = set()
    for file in sorted(found, key=lambda file: (len(file.parts), str(file))):
        real = os.path.realpath(file)
        if real not in known:
            files.append(file)
        elif file not in files:
            left_out[file] = REPEATED
        known.add(real)
    return sorted(files, key=str), left_out


def expand(pattern: str) -> list[str]:
    """glob.glob, but with ** no link to a folder is followed round and round."""
    match = re.search(r"(?:^|/)\*\*(?:/|$)", pattern)
    if match is None:
        return glob.glob(pattern)
    head = pattern[: match.start()]
    rest = pattern[match.end() :] or "*"
    if match.group().startswith("/"):
        tops = glob.glob(f"{head}/")
    else:
        tops = ["."]
    found = []
    for top in tops:
        for folder, _ in walk(Path(top))[0]:
            found += expand(os.path.join(glob.escape(folder), rest))
    return found


def walk(top: Path) -> tuple[list[tuple[str, list[str]]], dict[Path, str]]:
    """([(folder, names of its files)] in and below a folder, {linked folder that is left out:
    reason}). Without hidden files and folders. Linked folders are followed after all real
    folders; no folder is read twice under two names."""
    visited = []
    left_out = {}
    seen = set()
    waiting = [top]

    def fail(error):
        raise error

    while waiting:
        start = waiting.pop(0)
        if os.path.realpath(start) in seen:
            left_out[start] = REPEATED
            continue
        for folder, folders, names in os.walk(start, onerror=fail):
            real = Path(os.path.realpath(folder))
            seen.add(str(real))
            visited.append((folder, [name for name in names if not name.startswith(".")]))
            inside = []
            for name in sorted(folders):
                path = Path(folder, name)
                target = os.path.realpath(path)
                if name.startswith("."):
                    continue
                if not path.is_symlink():
                    # a part of a linked folder may have been read under another name
                    if target not in seen:
                        inside.append(name)
                elif real.is_relative_to(target):
                    left_out[path] = CIRCLE
                else:
                    waiting.append(path)
            folders[:] = inside
    return visited, left_out


def is_about_data(file: Path, top: Path) -> bool:
    """Whether a text is about a data set of .jsonl or .parquet, and not part of it: a card, a
    licence, and any .md or .txt at the top of the folder."""
    if format_of(file) != ".txt":
        return False
    return file.parent == top or re.fullmatch(ABOUT, file.name.lower()) is not None


def leave_out_repeated(files: list[Path], left_out: dict[Path, str]) -> list[Path]:
    """The files without links to another of them; these go to left_out."""
    known = {os.path.realpath(file) for file in files if not file.is_symlink()}
    kept = []
    for file in files:
        if file.is_symlink():
            real = os.path.realpath(file)
            if real in known:
                left_out[file] = REPEATED
                continue
            known.add(real)
        kept.append(file)
    return kept


def leave_out_known(files: list[Path], known: list[Path], left_out: dict[Path, str]) -> list[Path]:
    """The files that are not among the known ones, also under another name: several paths of a
    command may hold the same file."""
    seen = {os.path.realpath(file) for file in known}
    kept = []
    for file in files:
        if os.path.realpath(file) in seen:
            left_out[file] = REPEATED_PATH
        else:
            kept.append(file)
    return kept


def leave_out_twins(files: list[Path], left_out: dict[Path, str]) -> list[Path]:
    """The files without x.jsonl.gz beside x.jsonl, and without x.jsonl.zst beside x.jsonl.gz."""
    there = set(files)
    kept = []
    for file in files:
        plain = file.with_suffix("")
        twins = {".gz": [plain], ".zst": [plain, plain.with_name(f"{plain.name}.gz")]}
        twin = next((twin for twin in twins.get(file.suffix, []) if twin in there), None)
        if twin is None:
            kept.append(file)
        else:
            left_out[file] = f"{twin.name}, packed"
    return kept


def leave_out_empty(files: list[Path], left_out: dict[Path, str]) -> list[Path]:
    """The files with at least one byte. If all are empty, all of them."""
    empty = {file for file in files if file.is_file() and file.stat().st_size == 0}
    if len(empty) == len(files):
        return files
    left_out |= dict.fromkeys(sorted(empty), EMPTY)
    return [file for file in files if file not in empty]


# --------------------------------------------------------------------------------------------------
# Bytes that are no text
def check_beginning(path: Path, beginning: bytes) -> None:
    """Raises ValueError for a text in another encoding than UTF-8, and for packed files under the
    name of a text. beginning: the first bytes of the unpacked text."""
    for mark, (kind, command) in BEGINNINGS.items():
        if beginning.startswith(mark):
            raise ValueError(f"{path} is {kind}: {filtered(path, command)}")
    # every second byte of English text in UTF-16 is NUL
    nuls = [byte == 0 for byte in beginning[:4]]
    if nuls in ([False, True, False, True], [True, False, True, False]):
        encoding = "utf-16be"
        if nuls[1]:
            encoding = "utf-16le"
        command = filtered(path, f"iconv -f {encoding} -t utf-8")
        raise ValueError(f"{path} is UTF-16, without a mark that says so: {command}")


def check_nuls(path: Path, place: int) -> None:
    """Raises ValueError for a text with a NUL. place: its byte in the unpacked text; -1: none."""
    if place >= 0:
        raise ValueError(
            f"{path}: byte {place} is NUL, which is in no text; to take out all NULs: "
            + filtered(path, "tr -d '\\000'")
        )


def bad_byte(path: Path, place: int, text: bytes, ends_inside: bool = False) -> str:
    """The error for a byte that is not UTF-8. place: of the byte in the unpacked file; text: around
    it; ends_inside: the file ends in the middle of a character."""
    if ends_inside:
        cure = (
            "the text ends inside of a character, or is Latin-1; get the file again, or leave the "
            f"byte out: {filtered(path, DROP)}"
        )
    elif text.decode(errors="ignore").isascii():
        cure = f"is it Latin-1? {filtered(path, 'iconv -f latin1 -t utf-8')}"
    else:  # other letters are UTF-8, so Latin-1 would spoil them
        cure = f"to leave out damaged ones: {filtered(path, DROP)}"
    return f"byte {place} is not UTF-8; {cure}"


def filtered(path: Path, command: str) -> str:
    """The command line that unpacks a file, changes the text by a command, and writes a new file."""
    unpack = {".gz": "zcat", ".zst": "zstdcat"}.get(path.suffix)
    if unpack:
        name = path.with_suffix("").name
    else:
        name = path.name
    new = quote(str(path.with_name(f"new-{name}")))
    if unpack:
        return f"{unpack} {quote(str(path))} | {command} > {new}"
    return f"{command} < {quote(str(path))} > {new}"


# --------------------------------------------------------------------------------------------------
# Packed files
def unpacked(path: Path, text_column: str = "text") -> Iterator[bytes]:
    """Yields the text of a packed file in chunks of bytes, of a .parquet lines of JSON (text_column
    "": of all columns). Raises ValueError for a damaged file, and for a file of a stranger that
    would fill memory and disk."""
    total = 0
    most = max(1 << 28, 1000 * path.stat().st_size)
    if path.suffix == ".parquet":
        chunks = parquet_lines(path, text_column, most)
    else:
        chunks = decompressed(path)
    for chunk in chunks:
        total += len(chunk)
        check_unpacked(path, total, most)
        yield chunk


def check_unpacked(path: Path, n_bytes: int, most: int) -> None:
    if n_bytes > most:
        raise ValueError(
            f"{path} unpacks to more than {most:,} bytes, 1000 times its size; if right, unpack "
            "it first"
        )


def decompressed(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a .gz or .zst."""
    if path.suffix == ".gz":
        broken = zlib.error
        make = partial(zlib.decompressobj, wbits=31)
    else:
        try:
            import zstandard
        except ImportError:
            raise ValueError(
                f"{path}: reading .zst needs zstandard: pip install zstandard"
            ) from None
        broken = zstandard.ZstdError
        make = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
    unpacker = make()
    try:
        with open(path, "rb") as file:
            # a small chunk fits into memory even if it unpacks to 1000 times its size
            while chunk := file.read(1 << 14):
                while chunk:
                    # packed files may be concatenated
                    if unpacker.eof:
                        unpacker = make()
                    yield unpacker.decompress(chunk)
                    # tapes are filled up with zeros
                    chunk = b""
                    if unpacker.eof:
                        chunk = unpacker.unused_data.lstrip(b"\0")
    except broken as error:
        raise ValueError(f"{path} is damaged ({error}); get it again") from None
    if not unpacker.eof:
        raise ValueError(
            f"{path} is truncated: its packed text does not come to its end; get it again"
        )


def parquet_lines(path: Path, text_column: str, most: int) -> Iterator[bytes]:
    """Yields the rows of a .parquet as lines of JSON: text_column, else the columns of a
    conversation; with "" all columns. Bytes are read as UTF-8. The row has no key for a null, nor
    for a date; a row of nulls alone is a null in the first column. most: bytes in memory at once, and
    of all pages. Raises ValueError for a damaged file, and for text that is not UTF-8."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            columns = columns_to_read(path, file.schema_arrow.names, text_column)
            sizes = [0]  # bytes of each column in each group of rows
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                sizes += [group.column(i).total_uncompressed_size for i in range(group.num_columns)]
            check_unpacked(path, max(sizes), most)
            # Few rows, because a row may be a whole book. A text stored once may be the text of many
            # rows.
            rows = max(1, min(128, most // max(1, *sizes)))
            done = 0
            for batch in file.iter_batches(rows, columns=columns, use_threads=False):
                for row in json_rows(path, batch, done, bool(text_column)):
                    yield json.dumps(row).encode() + b"\n"
                done += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        # not readable at all; for a damaged file pyarrow gives no number
        if isinstance(error, OSError) and error.errno:
            raise
        raise ValueError(
            f"{path} is damaged ({' '.join(str(error).split())}); get it again"
        ) from None


def columns_to_read(path: Path, names: list[str], text_column: str) -> list[str]:
    """Of the columns of a .parquet those with the text. Raises ValueError if there is none."""
    if not text_column:
        return names
    if text_column in names:
        return [text_column]
    columns = [name for name in CONVERSATION if name in names]
    if not set(CONVERSATION[:2]) & set(columns):
        raise ValueError(
            f"{path} has no column {text_column!r}, but {', '.join(names)}; {prepare_column(path)}"
        )
    return columns


def json_rows(path: Path, batch, done: int, all_text: bool) -> list[dict]:
    """The rows of a batch, as JSON knows them. done: rows before them, for errors. all_text: refuse
    bytes other than UTF-8, else leave the bytes out: a picture, perhaps."""
    try:
        return [json_row(row, all_text) for row in batch.to_pylist()]
    except UnicodeDecodeError:
        pass  # which row?
    for i in range(batch.num_rows):
        try:
            [row] = batch.slice(i, 1).to_pylist()
            json_row(row, all_text)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} row {done + i + 1}: byte {error.start} of a text is not UTF-8; write the "
                "file again without this row, or with its text as UTF-8"
            ) from None
    raise AssertionError(f"{path}: rows {done + 1} to {done + batch.num_rows} can be read")


def json_row(row: dict, all_text: bool) -> dict:
    """A row as JSON values. A row of nulls alone becomes a single null, so that the row is counted."""
    if all_text and all(value is None for value in row.values()):
        return dict.fromkeys([*row][:1])
    return json_value(row, all_text)


def json_value(value: Any, all_text: bool) -> Any:
    """A value of pyarrow as JSON knows it: bytes as text; an object without nulls and dates. Raises
    UnicodeDecodeError. all_text: see json_rows."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [json_value(inner, all_text) for inner in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, inner in value.items():
        if isinstance(inner, bytes) and not all_text and not is_utf8(inner):
            continue
        if isinstance(inner, str | bytes | int | float | list | dict):
            found[key] = json_value(inner, all_text)
    return found


def is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
