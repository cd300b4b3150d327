"""The command line of data.py: stdlib, tokenizer, prepare, show, check."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import chain, groupby, islice
from pathlib import Path
from typing import NoReturn

from corpus.build import Findings, build_shards, cut_file, piece_size, tokenize_documents
from corpus.cache import cached_corpus
from corpus.chat import chat_tokenizer
from corpus.files import describe_left_out, leave_out_known, text_files
from corpus.mixture import FORMATS
from corpus.own_tokenizer import train_tokenizer
from corpus.shard_damage import find_damage
from corpus.shards import is_shards, read_index
from corpus.special import EOT_NAMES, TextSource, find_tokenizer, prefix_ids
from corpus.spelling import MOST, WARN, describe_lost, per_cent, traits_of
from corpus.tokenizer import BPE_VOCAB, load_tokenizer, token_text
from flags.config import Parser, usage_error
from flags.files import check_local

GREEN = "\033[32m"
PLAIN = "\033[0m"
UNDERLINED = "\033[4m"
NO_LINE = "\033[24m"


# -------------------------------------------------------- show: documents as training will see them
def documents_of(
    path: Path, tokenizer_file: Path, eot: int, text_column: str = "text"
) -> Iterator[tuple]:
    """Yields (ids, mask) of each document, of a long text in parts. Every token of a text has a
    loss, of a conversation the assistant's tokens."""
    eot_text = token_text(load_tokenizer(tokenizer_file), eot)
    findings = Findings(tokenizer_file, skip_bad=False)
    for piece in cut_file(path, eot_text, text_column, piece_size([path])):
        for _, ids, mask, _ in tokenize_documents(piece, tokenizer_file, eot, findings):
            yield ids, mask


def colour_text(ids: list[int], mask: list[int], tokenizer) -> str:
    """The text of the tokens, in green if a token has a loss. Markers of a single id, such as
    <|im_end|>, are underlined: a marker without the line is several tokens, letters to the model.
    Characters that would command the terminal are shown as U+FFFD."""
    markers = tokenizer.get_added_tokens_decoder()
    # a run: whether it has a loss, and the place of a marker, because each has a line of its own
    kinds = []
    for place, (has_loss, i) in enumerate(zip(mask, ids)):
        if i not in markers:
            place = -1
        kinds.append((has_loss, place))
    text = ""
    done = 0
    for (has_loss, marker), run in groupby(kinds):
        end = done + len(list(run))
        part = tokenizer.decode(ids[done:end], skip_special_tokens=False)
        done = end
        part = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", part)
        if marker >= 0:
            part = f"{UNDERLINED}{part}{NO_LINE}"
        if has_loss:
            part = f"{GREEN}{part}{PLAIN}"
        text += part
    return text


def show_documents(paths: list[Path], tokenizer: str, n: int, text_column: str) -> None:
    """Prints the first n documents of the files. Raises ValueError."""
    file, eot, _ = find_tokenizer(tokenizer)
    documents = chain.from_iterable(documents_of(path, file, eot, text_column) for path in paths)
    for number, (ids, mask) in enumerate(islice(documents, max(n, 1)), 1):
        markers = chat_tokenizer(file).get_added_tokens_decoder()
        n_markers = sum(i in markers for i in ids)
        print(
            f"--- document {number}: {len(ids):,} tokens, {sum(mask):,} with a loss (green), "
            f"{n_markers:,} of them markers with an id of their own (underlined)"
        )
        print(colour_text(ids, mask, chat_tokenizer(file)))


# ------------------------------------------------------------------ the command line
def own_tokenizer(paths: list, out: Path, vocab_size: int, text_column: str) -> None:
    """python data.py tokenizer"""
    if not 257 <= vocab_size <= 1 << 20:
        raise ValueError(
            f"--vocab_size {vocab_size} must be between 257, all bytes and {EOT_NAMES[0]}, and "
            f"{1 << 20:,}"
        )
    if out.exists():
        raise ValueError(f"--out {out} is there already; name a new file, like own.json")
    if out.suffix != ".json":
        raise ValueError(f"--out {out} is no .json; name a new file, like own.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    found = train_tokenizer(paths, out, vocab_size, text_column)
    fewer = ""
    if found < vocab_size:
        fewer = f" instead of {vocab_size:,}, for no other pair of tokens occurs twice in this text"
    print(f"{out}: {found:,} ids{fewer}; train with --tokenizer {out}")


def add_prepare_flags(prepare: Parser) -> None:
    prepare.add_argument(
        "--eot", default="", help="token that ends a document, where the tokenizer does not tell"
    )
    prepare.add_argument(
        "--bos",
        action="store_true",
        help="begin each document as the tokenizer begins a text, such as with <s>: for --init_from "
        "a Hugging Face folder",
    )
    prepare.add_argument(
        "--skip_bad",
        type=int,
        default=0,
        metavar="N",
        help="leave out at most N conversations that cannot be trained; OUT/skipped.txt lists them",
    )
    prepare.add_argument(
        "--max_lost",
        type=float,
        default=MOST,
        metavar="PERCENT",
        help="characters that the tokenizer may lose or write as <unk>, in per cent of the text "
        f"[default: {MOST:g}]",
    )
    prepare.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    prepare.add_argument(
        "--shard",
        default="0/1",
        metavar="I/N",
        help="tokenize the share of machine I, from 0, of N; at the "
        "end, the same command without --shard writes index.json",
    )


def add_dataset_flags(prepare: Parser) -> None:
    prepare.add_argument(
        "--from_datasets",
        default="",
        metavar="NAME",
        help="in place of --input: a data set of the `datasets` library, or a folder that it reads; "
        "read once, into OUT/dataset",
    )
    prepare.add_argument(
        "--subset", default="", help="of --from_datasets, such as sample-10BT, where it has several"
    )
    prepare.add_argument(
        "--split", default="train", help="of --from_datasets, also train[:1%%] [default: train]"
    )


def read_dataset(args, folder: Path) -> list[Path]:
    """The files of --from_datasets. Raises ValueError."""
    from corpus.from_datasets import fingerprint_of, text_of_dataset

    if not args.out:
        raise ValueError("--from_datasets needs --out FOLDER")
    paths, note = text_of_dataset(
        args.from_datasets, args.subset, args.split, args.text_column, folder
    )
    print(
        f"{args.from_datasets}: {note['rows']:,} rows, {', '.join(note['columns'])}, in "
        f"{folder}/dataset ({fingerprint_of(note)})",
        flush=True,
    )
    return paths


# what to type where something is missing
EXAMPLES = {
    "tokenizer": "python data.py tokenizer --input {files} --out {out}",
    "prepare": "python data.py prepare --input {files} --tokenizer {tokenizer} --out {out}",
    "show": "python data.py show {files} --tokenizer {tokenizer}",
}
NEEDED = {"tokenizer": ("out",), "prepare": ("tokenizer", "out"), "show": ("tokenizer",)}


def refuse_incomplete(args: argparse.Namespace, words: list[str]) -> None:
    """End a command that lacks a flag, with a whole line to type. words: what no flag has taken, such
    as a file without --input before it."""
    command = args.command
    if command not in EXAMPLES:
        return
    files = shlex.join(words or args.input) or "FILE"
    typed = {"files": files, "tokenizer": "own.json", "out": "tokens"}
    if command == "tokenizer":
        typed["out"] = "own.json"
    for name in NEEDED[command]:
        if getattr(args, name):
            typed[name] = shlex.quote(getattr(args, name))
    example = EXAMPLES[command].format(**typed)
    if words and not words[0].startswith("-") and command != "show":
        usage_error(f"{command} {' '.join(words)}: --input goes before files: {example}")
    missing = [f"--{name}" for name in NEEDED[command] if not getattr(args, name)]
    if missing and not words:
        usage_error(f"{command} needs {' and '.join(missing)}: {example}")


def refuse_unknown(words: list[str], flags: list[str]) -> NoReturn:
    hint = ""
    near = get_close_matches(words[0], flags, 1)
    if near:
        hint = f"; did you mean {near[0]}?"
    usage_error(f"unrecognized arguments: {' '.join(words)}{hint}")


def check_sources(args) -> None:
    """Raises ValueError unless a command that reads text is given some, from one place."""
    if args.command not in ("tokenizer", "prepare"):
        return
    name = ""
    if args.command == "prepare":
        name = args.from_datasets
        if not name and (args.subset or args.split != "train"):
            raise ValueError("--subset and --split have no effect without --from_datasets NAME")
    if args.input and name:
        raise ValueError("--input and --from_datasets are two sources of text: give one of them")
    if not args.input and not name:
        raise ValueError(f"{args.command} needs --input FILE, or a folder or quoted globs")


def define_commands(about: str | None) -> Parser:
    parser = Parser(description=about)
    parser.set_defaults(input=[], out="reading")  # of commands without these
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="stdlib|tokenizer|prepare|show|check"
    )
    stdlib = commands.add_parser("stdlib", help="build the built-in corpus")
    stdlib.add_argument("--cache_dir", default="", help="instead of the user's cache folder")
    own = commands.add_parser(
        "tokenizer", help="train a byte-level BPE on text files, for --tokenizer"
    )
    own.add_argument(
        "--vocab_size",
        type=int,
        default=BPE_VOCAB,
        help=f"ids, {EOT_NAMES[0]} among them [default: {BPE_VOCAB}]",
    )
    prepare = commands.add_parser(
        "prepare", help="tokenize text files into a folder of token shards"
    )
    add_prepare_flags(prepare)
    add_dataset_flags(prepare)
    show = commands.add_parser(
        "show", help="documents of a file as they will be trained, tokens with a loss in green"
    )
    show.add_argument(
        "input",
        nargs=1,
        metavar="FILE",
        help="text or conversations: a file, a folder, a quoted glob",
    )
    show.add_argument("--n", type=int, default=3, help="documents [default: 3]")
    for command in own, prepare:
        command.add_argument(
            "--input", nargs="+", default=[], help=f"{FORMATS}; files, folders or quoted globs"
        )
        command.add_argument(
            "--out",
            default="",
            help="file.json or folder; prepare finishes what was interrupted",
        )
    for command in prepare, show:
        command.add_argument(
            "--tokenizer", default="", help="tokenizer.json, or a Hugging Face folder"
        )
    for command in own, prepare, show:
        command.add_argument(
            "--text_column",
            default="text",
            help="name of the text in .jsonl and .parquet [default: text]",
        )
    check = commands.add_parser(
        "check", help="verify sizes, checksums, counts and ids of a folder of token shards"
    )
    check.add_argument("out", metavar="DIR", help="the folder")
    return parser


def prepare(args: argparse.Namespace, paths: list[Path], folder: Path) -> bool:
    """python data.py prepare. Returns False if other shares of the work are still to be made.
    Raises ValueError."""
    if not args.out or args.workers < 1:
        raise ValueError(
            f"--out {args.out!r} must be a folder, and --workers {args.workers} at least 1"
        )
    share = re.fullmatch(r"(\d+)/(\d+)", args.shard)
    if share is None or int(share[1]) >= int(share[2]):
        raise ValueError(f"--shard {args.shard}: need I/N with I from 0 to N - 1, like 0/4")
    tokenizer = find_tokenizer(args.tokenizer, args.eot)
    begin = []
    if args.bos:
        begin = prefix_ids(load_tokenizer(tokenizer[0]))
        if not begin:
            raise ValueError(
                f"--bos: the tokenizer of {args.tokenizer} puts nothing before a text; leave it out"
            )
    if not 0 <= args.max_lost <= 100:
        raise ValueError(f"--max_lost {args.max_lost:g} must be between 0 and 100 per cent")
    number = int(share[1])
    n = int(share[2])
    build_shards(
        paths,
        tokenizer,
        folder,
        args.workers,
        args.text_column,
        args.skip_bad,
        (number, n),
        begin,
        args.max_lost,
    )
    if n > 1:
        print(
            f"share {args.shard} is in {folder}; after all shares, leave out --shard to "
            "write index.json"
        )
    return n == 1


def main(about: str | None = None) -> None:
    args, unknown = define_commands(about).parse_known_args()
    refuse_incomplete(args, unknown)
    if unknown:
        known = [f"--{name}" for name in vars(args) if name != "command"]
        # what was typed is no advice: the command may have that word without the dashes
        refuse_unknown(unknown, [flag for flag in known if flag not in unknown])
    try:
        if args.command == "show" and is_shards(args.input[0]):
            raise ValueError(
                f"show {args.input[0]}: these are token shards; show the text or the conversations"
            )
        check_sources(args)
        paths = []
        for what in args.input:
            files, left_out = text_files(what)
            files = leave_out_known(files, paths, left_out)
            paths += files
            if left_out:
                files_text = f"{len(files):,} file" + "s" * (len(files) != 1)
                print(f"{what}: {files_text}{describe_left_out(left_out)}")
        if args.command == "show":
            return show_documents(paths, args.tokenizer, args.n, args.text_column)
        if args.command == "stdlib":
            folder = cached_corpus("stdlib", TextSource(), args.cache_dir)
        else:
            folder = Path(args.out)
        check_local(str(folder), "--out")
        if args.command in ("prepare", "check") and folder.is_file():
            raise ValueError(f"{args.command}: {folder} is a file; give a folder of token shards")
        if args.command == "prepare" and args.from_datasets:
            paths = read_dataset(args, folder)
        if args.command == "tokenizer":
            return own_tokenizer(paths, folder, args.vocab_size, args.text_column)
        if args.command == "prepare":
            is_finished = prepare(args, paths, folder)
            if not is_finished:
                return
        if args.command == "check":
            damage = find_damage(folder)
            if damage:
                print("\n".join(damage), file=sys.stderr)
                raise SystemExit(1)
        index = read_index(folder)
    except BrokenPipeError:
        # `show ... | head` has seen enough, and Python would complain once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except OSError as error:
        place = error.filename
        if not place:  # a full disk names no file
            place = args.out
        usage_error(f"{place}: {error.strerror}")
    except ValueError as error:
        usage_error(error)
    for split, entries in index["splits"].items():
        n_tokens = sum(entry["tokens"] for entry in entries)
        print(f"{split}: {n_tokens:,} tokens, {index['documents'][split]:,} documents")
    line = spelling_line(folder, index)
    if line:
        print(line)
    print(f"{folder}: {index['vocab_size']:,} ids, sha256 {index['sha256'][:16]}")


def spelling_line(folder: Path, index: dict) -> str:
    """What the tokenizer of a folder of token shards could not spell; "" if it spells everything."""
    if "lost" in index:
        warning = "warning: " * (per_cent(index["lost"]) > WARN)
        return f"{warning}{describe_lost(index['lost'])}"
    if traits_of(folder / "tokenizer.json").spells_all:
        return ""
    return (
        "this tokenizer cannot spell everything, and it was not counted what was lost; to count, "
        "prepare the text again, into another folder"
    )
