"""The command line of data.py: stdlib, tokenizer, prepare, show, check."""
import os
import sys
from pathlib import Path

import data
from corpus.build import build_shards, train_tokenizer
from corpus.cache import cached_corpus
from corpus.readers import FORMATS, text_files
from corpus.shards import find_damage, read_index
from corpus.tokenizer import BPE_VOCAB, EOT_NAMES, find_tokenizer
from support.config import Parser, usage_error
from support.files import check_local


def own_tokenizer(paths: list, out: Path, vocab_size: int, text_column: str):
    """python data.py tokenizer"""
    least, most = 257, 1 << 20
    if not least <= vocab_size <= most:
        raise ValueError(f"--vocab_size {vocab_size} must be between {least:,}, all bytes and {EOT_NAMES[0]}, and {most:,}")
    if out.suffix != ".json" or out.exists():
        raise ValueError(f"--out {out} {'is there already' if out.exists() else 'is no .json'}; name a new file, like own.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    found = train_tokenizer(paths, out, vocab_size, text_column)
    fewer = f" instead of {vocab_size:,}, for no other pair of tokens occurs twice in this text" * (found < vocab_size)
    print(f"{out}: {found:,} ids{fewer}; train with --tokenizer {out}")


def main():
    parser = Parser(description=data.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="stdlib|tokenizer|prepare|show|check")
    stdlib = commands.add_parser("stdlib", help="build the built-in corpus")
    stdlib.add_argument("--cache_dir", default="", help="instead of the user's cache folder")
    own = commands.add_parser("tokenizer", help="train a byte-level BPE on text files, for --tokenizer")
    own.add_argument("--input", nargs="+", required=True, help=f"{FORMATS}; files, folders or quoted globs")
    own.add_argument("--vocab_size", type=int, default=BPE_VOCAB, help=f"ids, {EOT_NAMES[0]} among them [default: {BPE_VOCAB}]")
    own.add_argument("--out", required=True, metavar="FILE.json", help="file to write")
    prepare = commands.add_parser("prepare", help="tokenize text files into a folder of token shards")
    prepare.add_argument("--input", nargs="+", required=True, help=f"{FORMATS}; files, folders or quoted globs")
    prepare.add_argument("--tokenizer", required=True, help="tokenizer.json, or a Hugging Face folder")
    prepare.add_argument("--out", required=True, help="folder to write; the same command again finishes what was interrupted")
    prepare.add_argument("--eot", default="", help="token that ends a document, where the tokenizer does not tell")
    prepare.add_argument("--skip_bad", type=int, default=0, metavar="N",
                         help="leave out at most N conversations that cannot be trained; OUT/skipped.txt lists them")
    prepare.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    show = commands.add_parser("show", help="documents of a file as they will be trained, tokens with a loss in green")
    show.add_argument("file", metavar="FILE", help="text or conversations: a file, a folder, a quoted glob, or token shards")
    show.add_argument("--tokenizer", required=True, help="tokenizer.json, or a Hugging Face folder")
    show.add_argument("--n", type=int, default=3, help="documents [default: 3]")
    show.add_argument("--json", action="store_true", help='an object per document instead: {"ids": [...], "mask": [...]}')
    for command in own, prepare, show:
        command.add_argument("--text_column", default="text", help="name of the text in .jsonl and .parquet [default: text]")
    check = commands.add_parser("check", help="verify sizes, checksums, counts and ids of a folder of token shards")
    check.add_argument("out", metavar="DIR", help="the folder")
    args = parser.parse_args()
    try:
        if args.command == "show":
            from sft.show import show_documents

            return show_documents(args.file, args.tokenizer, args.n, args.json, args.text_column)
        folder = cached_corpus("stdlib", "", args.cache_dir) if args.command == "stdlib" else Path(args.out)
        paths = [path for what in getattr(args, "input", ()) for path in text_files(what)[0]]
        check_local(str(folder), "--out")
        if args.command == "prepare":
            if not args.out or args.workers < 1:
                raise ValueError(f"--out {args.out!r} must be a folder, and --workers {args.workers} at least 1")
            tokenizer = find_tokenizer(args.tokenizer, args.eot)
            build_shards(paths, tokenizer, folder, args.workers, args.text_column, args.skip_bad)
        if args.command == "tokenizer":
            return own_tokenizer(paths, folder, args.vocab_size, args.text_column)
        if args.command == "check" and (damage := find_damage(folder)):
            print("\n".join(damage), file=sys.stderr)
            raise SystemExit(1)
        index = read_index(folder)
    except BrokenPipeError:  # `show ... | head` has seen enough, and Python would complain once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except OSError as error:
        usage_error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        usage_error(error)
    for split, entries in index["splits"].items():
        print(f"{split}: {sum(entry['tokens'] for entry in entries):,} tokens, {index['documents'][split]:,} documents")
    print(f"{folder}: {index['vocab_size']:,} ids, sha256 {index['sha256'][:16]}")
