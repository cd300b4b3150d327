"""Tasks of evaluate.py: the lines of a file, what kind of task they are, answered examples, and the
requests that a text becomes."""

from typing import Any

from rl.answers import never_right
from rl.datasets import Line, Text, read_task_lines
from rl.prompts import write_field

KINDS = {
    "text": ("text",),
    "choice": ("question", "choices", "answer"),
    "answer": ("question", "answer"),
}


def read_task(path: str, flag: str = "--task", answers: str = "") -> tuple[str, list[Line]]:
    """("text", "choice" or "answer", the lines) of a task's file. answers: as in --answers; "" for
    examples. The ValueError names the line."""
    lines = read_task_lines(path, flag, ".txt", ".jsonl")
    names_found = lines[0].fields.keys()
    found = [kind for kind, names in KINDS.items() if set(names) <= names_found]
    if not found or found[0] == "text" and len(found) > 1:
        raise ValueError(
            f"{lines[0].where} has {', '.join(lines[0].fields) or 'no fields'}; need text, or "
            "question, choices "
            "and answer, or question and answer"
        )
    kind = found[0]
    return kind, [check_line(line, kind, answers) for line in lines]


def check_line(line: Line, kind: str, answers: str) -> Line:
    """The line, with its answer among choices as a number from 0. Raises ValueError for missing or
    wrong fields, and for a written answer that no text can match."""
    where, record = line
    for name in KINDS[kind]:
        if name not in record:
            raise ValueError(f"{where} has no {name}, and the first line has")
        if name in ("text", "question") and not isinstance(record[name], str):
            raise ValueError(f"{where}: {name} is no text")
    if kind == "answer" and answers:
        check_answer(line, answers)
    if kind != "choice":
        return line
    choices = record["choices"]
    answer = record["answer"]
    if not is_list_of_texts(choices):
        raise ValueError(f"{where}: choices are no list of texts, none of them empty")
    is_letter = isinstance(answer, str) and len(answer) == 1 and answer.isalpha()
    if answer in choices:
        index = choices.index(answer)
    elif is_letter:
        index = ord(answer.upper()) - ord("A")
    else:
        index = answer
    if type(index) is not int or not 0 <= index < len(choices):
        raise ValueError(
            f"{where}: the answer {answer!r} is none of the {len(choices)} choices, nor a letter "
            "or number of one"
        )
    return Line(where, record | {"answer": index})


def check_answer(line: Line, answers: str) -> None:
    """Raises ValueError for a written answer that no text can match."""
    answer = line.fields["answer"]
    reason = never_right(answers, answer)
    if reason:
        raise ValueError(
            f"{line.where}: nothing can be right with --answers {answers} for "
            f"{str(answer)[-60:]!r}: {reason}"
        )


def is_list_of_texts(choices: Any) -> bool:
    """Whether it is a list with at least one text, and none of them empty."""
    if not isinstance(choices, list) or not choices:
        return False
    return all(isinstance(choice, str) and choice for choice in choices)


def read_shots(path: str, n: int, kind: str) -> list[Line]:
    """The lines of --shots_file, at least n. Raises ValueError."""
    found, examples = read_task(path, "--shots_file")
    if found != kind or len(examples) < n:
        raise ValueError(
            f"--shots_file has {len(examples)} lines of kind {found}; need {n} of kind {kind}"
        )
    return examples


def other_shots(examples: list[Line], line: Line, n: int) -> list[Line]:
    """The first n examples that do not ask what this line asks: the model would read the answer in
    its own prompt. Raises ValueError if there are fewer."""
    asked = question_of(line)
    found = [example for example in examples if question_of(example) != asked]
    if len(found) < n:
        raise ValueError(
            f"--shots {n}: --shots_file has {len(found)} lines that do not ask the question of "
            f"{line.where}; give {n} other lines, or --shots {len(found)}"
        )
    return found[:n]


def question_of(line: Line) -> tuple:
    """What a line asks, without case and spaces; the order of choices does not matter."""
    words = line.fields["question"].casefold().split()
    choices = line.fields.get("choices")
    if not isinstance(choices, list):
        return words, None
    return words, sorted(choices)


def answer_of_shot(line: Line, kind: str) -> str:
    answer = line.fields["answer"]
    if kind == "choice":
        return line.fields["choices"][answer]
    return write_field(line, "answer")


def opening_ids(text: Text, string: str) -> list[int]:
    """Ids of a text without context: with the tokenizer's first token, which a chat template writes
    itself."""
    return text.ids(string, bool(string) and text.bos and not text.chat)


def encode_pair(text: Text, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Both texts as token ids, cut as in lm-eval: spaces at the end of the context belong to the
    continuation; the context alone has n tokens, and the first n tokens of both together are the
    context. Without a context, text.first is the context. Raises ValueError if no token is left to
    be scored."""
    before = context.rstrip()
    after = context[len(before) :] + continuation
    head = opening_ids(text, before)
    if before:
        whole = opening_ids(text, before + after)
    else:
        whole = text.ids(after)
    tail = whole[len(head) :]
    if not tail and whole != head:  # both share a token; the shared token is scored
        head = whole[:-1]
        tail = whole[-1:]
    if not tail:
        raise ValueError(f"{after!r} has no tokens")
    return head or [text.first], tail


def rolling_windows(
    ids: list[int], first: int, longest: int, stride: int
) -> list[tuple[list[int], list[int]]]:
    """Requests that score each token of a text once, beginning after the token `first`. A forward
    has at most `longest` tokens; each window after the first scores `stride` tokens, with as much
    context as fits."""
    tokens = [first, *ids]
    windows = []
    done = 0  # tokens that have been scored
    while done < len(ids):
        end = done + stride
        if done == 0:
            end = longest
        end = min(end, len(ids))
        windows.append((tokens[max(0, end - longest) : done + 1], tokens[done + 1 : end + 1]))
        done = end
    return windows
