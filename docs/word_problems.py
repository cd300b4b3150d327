"""The data of docs/finetune.md: a text for a base model, conversations for fine-tuning, problems
for the test.

    python docs/word_problems.py --out problems

Problems have GSM8K's format (arXiv:2110.14168), a question and an answer ending with #### and a
number, but are simple enough for a model of four million parameters. No problem is in two files.
"""

import argparse
import json
import random
from pathlib import Path

NAMES = "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karla Leo".split()
THINGS = "apples books cards coins eggs flowers marbles pens shells stamps".split()
# (question, steps of the answer). a: amount at the start; b, c: changes
KINDS = [
    (
        "{name} has {a} {things}. {name} buys {b} bags with {c} {things} in each. How many "
        "{things} does {name} have now?",
        "{b} * {c} = {bc}\n{a} + {bc} = {sum}\n#### {sum}",
    ),
    (
        "{name} finds {b} boxes with {c} {things} in each. There were {a} {things} at home. How "
        "many {things} are there in all?",
        "{b} * {c} = {bc}\n{a} + {bc} = {sum}\n#### {sum}",
    ),
    (
        "{name} has {abc} {things}. {b} friends get {c} {things} each. How many {things} are left?",
        "{b} * {c} = {bc}\n{abc} - {bc} = {a}\n#### {a}",
    ),
    (
        "{name} has {a} {things}, gives {c} of them away and then finds {b} more. How many "
        "{things} does {name} have now?",
        "{a} - {c} = {less}\n{less} + {b} = {more}\n#### {more}",
    ),
]
# as grpo.py asks
HINT = "\nThink step by step, and end with the answer alone on a line: #### number"
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- 'Question: ' + message.content + '\\nAnswer:\\n' }}
    {%- else %}
        {{- message.content + '<|endoftext|>' }}
    {%- endif %}
{%- endfor %}
"""


def problem(rng: random.Random) -> tuple[str, str]:
    """(question, answer)."""
    a = rng.randint(10, 30)
    b = rng.randint(2, 9)
    c = rng.randint(2, 9)
    numbers = dict(
        a=a, b=b, c=c, bc=b * c, sum=a + b * c, abc=a + b * c, less=a - c, more=a - c + b
    )
    question, answer = rng.choice(KINDS)
    words = dict(name=rng.choice(NAMES), things=rng.choice(THINGS))
    return question.format(**numbers, **words), answer.format(**numbers)


def sentence(rng: random.Random) -> str:
    """A text for the base model: sums, stories with and without a sum, and a few questions without
    answers."""
    a = rng.randint(10, 100)
    b = rng.randint(2, 9)
    c = rng.randint(2, 9)
    sums = [
        f"{a} + {b * c} = {a + b * c}",
        f"{a + b * c} - {b * c} = {a}",
        f"{b} * {c} = {b * c}",
        f"{a} - {b} = {a - b}",
    ]
    if rng.random() < 0.3:
        return rng.choice(sums)
    question, answer = problem(rng)
    if rng.random() < 0.1:
        return question + HINT
    story = question.rsplit(". ", 1)[0] + "."
    return f"{story} {answer.splitlines()[0]}" if rng.random() < 0.7 else story


def write_lines(path: Path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    print(path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder to write")
    folder = Path(parser.parse_args().out)
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    problems = {}
    while len(problems) < 8200:
        question, answer = problem(rng)
        problems[question] = answer
    problems = [dict(question=question, answer=answer) for question, answer in problems.items()]
    test = problems[:200]
    chat = problems[200:4200]
    train = problems[4200:]
    write_lines(
        folder / "text.jsonl",
        ({"text": "\n".join(sentence(rng) for _ in range(8))} for _ in range(20_000)),
    )
    write_lines(
        folder / "chat.jsonl",
        (
            {
                "messages": [
                    {"role": "user", "content": p["question"] + HINT},
                    {"role": "assistant", "content": p["answer"]},
                ]
            }
            for p in chat
        ),
    )
    write_lines(folder / "train.jsonl", train)
    write_lines(folder / "test.jsonl", test)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    main()
