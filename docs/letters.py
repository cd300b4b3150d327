"""The data of a study of benchmarks/RESULTS.md: six letters, and the same in the order of the
alphabet.

    python docs/letters.py --out runs/letters

Conversations to fine-tune a model with, problems for rewards, a test, and a chat template. No
problem is in two files.
"""

import argparse
import json
import random
from pathlib import Path

TEMPLATE = """\
{%- for message in messages %}
    {{- message.content + ('>' if message.role == 'user' else '<|endoftext|>') }}
{%- endfor %}
"""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder to write")
    folder = Path(parser.parse_args().out)
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    words = list(dict.fromkeys("".join(rng.choices("abcdefghij", k=6)) for _ in range(10_000)))
    problems = [{"question": word, "answer": "".join(sorted(word))} for word in words]
    chats = [
        {
            "messages": [
                {"role": "user", "content": p["question"]},
                {"role": "assistant", "content": p["answer"]},
            ]
        }
        for p in problems[:4000]
    ]
    for name, lines in {
        "chat": chats,
        "train": problems[4000:8000],
        "test": problems[8000:8500],
    }.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines), "utf-8"
        )
    # for a tokenizer without merges: one token per letter
    (folder / "letters.txt").write_text("abcdefghij>\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    main()
