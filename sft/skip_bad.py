"""python data.py prepare --skip_bad N: leave out conversations that cannot be trained."""
import os
from pathlib import Path

from corpus.build import cut_into_pieces
from corpus.readers import first_number, is_chat, json_lines, place
from sft.chat import chat_tokenizer, conversation_of, need_template, tokens_and_mask
from support.files import write_file


def without_bad(paths: list[Path], tokenizer_file: Path, folder: Path, most: int, text_column: str) -> list[Path]:
    """Copy the files to `folder`, kept-00000.jsonl ..., without bad conversations; skipped.txt lists the bad ones with reasons.
    Every conversation is tokenized here, and again by build_shards. most: limit of bad conversations. Raises ValueError above
    the limit, or if a file holds no conversations."""
    if text := next((path for path in paths if not is_chat(path, text_column)), None):
        raise ValueError(f"--skip_bad {most}: {text} holds no conversations; leave it out")
    template, tokenizer = need_template(tokenizer_file, paths[0]), chat_tokenizer(tokenizer_file)
    kept, bad, total = [], [], 0
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(paths):
        kept.append(folder / f"kept-{number:05d}.jsonl")
        with open(f"{kept[-1]}.tmp", "wb") as file:
            for piece in cut_into_pieces([path], "", text_column):
                first = first_number(piece)
                for i, line in enumerate(json_lines(piece)):
                    if not line.strip():
                        continue
                    total += 1
                    try:
                        tokens_and_mask(conversation_of(line, place(piece, first + i)), template, tokenizer)
                        file.write(line.strip() + b"\n")
                    except ValueError as error:
                        bad.append(str(error))
        os.replace(f"{kept[-1]}.tmp", kept[-1])
    write_file(folder / "skipped.txt", "".join(f"{line}\n" for line in bad).encode())
    if len(bad) > most:
        raise ValueError(f"--skip_bad {most}: {len(bad)} of {total} conversations cannot be trained; {folder}/skipped.txt "
                         f"lists them, the first is {bad[0]}")
    print(f"{len(bad)} of {total} conversations are left out; {folder}/skipped.txt lists them")
    return kept
