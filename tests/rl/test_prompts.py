r"""Prompts: templates and their braces, \n and \t of a shell, thoughts, and problems with one prompt."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
from policy import open_problems, write_problems
from saves import refuses

from flags.escapes import unescape
from rl import answers, environments, prompts, rewards
from rl.prompts import Line
from rl.sample import Sample

FIELDS = {"question": "1+1?", "unit": "cm", "n": 3, "answer": "2", "choices": ["a", "b"]}
LINE = Line("a.jsonl:1", FIELDS)


@pytest.mark.parametrize(
    "template, text",
    [
        ("{question}", "1+1?"),
        (r"{question} $\boxed{{number}}$", r"1+1? $\boxed{number}$"),
        (r"{question} \frac{1}{2} \text{a b}", r"1+1? \frac{1}{2} \text{a b}"),
        (r"{question} \frac{\text{a b}}{2}", r"1+1? \frac{\text{a b}}{2}"),
        (r"{question} \boxed{{\text{{none}}}}", r"1+1? \boxed{\text{none}}"),
        (r"{question} \boxed{{{unit}}}", r"1+1? \boxed{cm}"),
        ("{question}{{answer}}{n}", "1+1?{answer}3"),
        ("{question} {{{{unit}}}}", "1+1? {{unit}}"),
        ("{choices} {question}", "A. a\nB. b 1+1?"),
        ("Q_{n}: {question}", "Q_3: 1+1?"),
    ],
)
def test_braces(template, text):
    prompts.check_template(template, [LINE], "question")
    assert prompts.fill_template(template, LINE) == text


@pytest.mark.parametrize(
    "template, message",
    [
        (r"{question} $\boxed{answer}$", r"\\boxed\{answer\} would show the right answer; write"),
        (r"{question} \frac{{a}}{unit}", "could be the word or the field"),
        ("{question} $x^{n}$", "could be the word or the field"),
        ("{question} $x_{n}$", "could be the word or the field"),
        ("{question} {answer}", "answer is the right answer of each line"),
        (r"{question} \text{none}", r"write .text\{\{none\}\} for the word"),
        ("{qestion}", r"is \{question\} meant"),
        ("{ question }", "has no field in braces"),
        ("Solve it.", "has no field in braces"),
    ],
)
def test_templates_that_are_refused(template, message):
    refuses(message, prompts.check_template, template, [LINE], "question")


def test_no_field_that_says_the_answer():
    lines = [
        Line(
            "a:1", {"question": "q", "answer": "4", "gold": 4, "solution": r"so \boxed{4}", "n": 1}
        ),
        Line(
            "a:2", {"question": "r", "answer": "5", "gold": 5, "solution": r"so \boxed{5}", "n": 5}
        ),
    ]
    for name in ("gold", "solution"):
        refuses(
            f"{name} is the right answer",
            prompts.check_template,
            f"{{question}} {{{name}}}",
            lines,
            "question",
        )
    prompts.check_template("{question} {n}", lines, "question")
    letter = [Line("a:1", {"question": "q", "choices": ["x", "y"], "answer": 1, "label": "B"})]
    refuses("label is the right", prompts.check_template, "{question} {label}", letter, "question")


@pytest.mark.parametrize("value", [None, {"a": 1}, [1, None], [[1]]])
def test_no_null_and_no_object_in_a_prompt(value):
    refuses("cannot be written", prompts.fill_template, "{a}", Line("a:1", {"a": value}))


def test_a_later_line_may_lack_a_field_of_the_template():
    """The template is checked against the first line; every line says for itself what it lacks."""
    refuses("a.jsonl:1 has no unknown, which", prompts.fill_template, "{question} {unknown}", LINE)


def test_lists_and_truth_values_in_a_prompt():
    line = Line("a:1", {"a": [8, 2, "x"], "b": True})
    assert prompts.fill_template("{a} {b}", line) == "8, 2, x true"


@pytest.mark.parametrize(
    "typed, text",
    [
        (r"Compute with \times", r"Compute with \times"),
        (r"\theta \text{a} \neq \nabla \nu \tau", r"\theta \text{a} \neq \nabla \nu \tau"),
        (r"{question}\nanswer:\tnow", "{question}\nanswer:\tnow"),
        (r"\n\nThink", "\n\nThink"),
        (r"\\times \\n \\nQuestion", r"\times \n \nQuestion"),
        (r"1 \\ 2", r"1 \\ 2"),
    ],
)
def test_escapes(typed, text):
    assert unescape(typed) == text


THOUGHTS = [
    ("<think>maybe \\boxed{5}? no</think>\nThe answer is 7.", False, "The answer is 7."),
    ("<think>\n\n</think>\n\n7", False, "7"),
    ("<think>so \\boxed{42}", False, None),
    ("it is \\boxed{42}", True, None),
    ("so 5</think>7", True, "7"),
    ("7 <think>no, 5", False, None),
    ("<think>a</think>5<think>b</think>7", False, "7"),
    ("[THINK]5[/THINK]7", False, "7"),
    (
        "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>7",
        False,
        "7",
    ),
    ("7", False, "7"),
]


@pytest.mark.parametrize("text, opened, said", THOUGHTS)
def test_thoughts_are_cut(text, opened, said):
    assert answers.cut_thoughts(text, opened) == said
    asked = []
    own = SimpleNamespace(reward=lambda prompt, completion: asked.append(completion) or 1.0)
    group = SimpleNamespace(group_reward=lambda prompt, completions: [1.0 for _ in completions])
    for env in (own, group):
        (paid,) = rewards.pay(env, "1", [text], [False], opened)
        assert paid.reward == (0.0 if said is None else 1.0)
    assert asked == ([] if said is None else [said])


def test_of_several_turns_only_thoughts_are_cut():
    text = "<think>a</think>1+1=2;<think>b</think>3"
    assert answers.cut_thoughts(text, in_turns=True) == "1+1=2;3"
    assert answers.cut_thoughts("a</think>1=<think>b</think>3", True, True) == "1=3"


def test_a_game_does_not_hear_thoughts():
    words = ["", "<think>", "a\n", "</think>\n", "b", "\n"]
    text = SimpleNamespace(
        decode=lambda ids: "".join(words[i] for i in ids), ids=lambda said: [], ends=[0]
    )
    heard = []
    game = SimpleNamespace(
        TURN_END="\n",
        reset=lambda task: (task, ""),
        step=lambda state, said: heard.append(said) or ("", True, 1.0),
    )
    turns = environments.Turns(game, text, ["task"])
    for n, is_over in ((2, False), (3, False), (4, False), (5, True)):
        s = Sample(ids=[1, 2, 3, 4, 5][:n])
        assert turns.is_over(s) == is_over
    assert turns.answer(s).result() is None
    assert heard == ["b"]
    assert turns.earned == [1.0]
    assert turns.answer(Sample(ids=[1, 2, 0])).result() is None
    assert heard == ["b"]  # the end of the text, in a thought


@pytest.mark.parametrize(
    "answer, is_number",
    [
        *((text, True) for text in ("42", "so #### 42", "1969", "5 km", "5km", "42 apples", "$5")),
        *(
            (text, True)
            for text in ("50%", "x = 5", "the answer is 42", "3 + 4 = 7", "-5", "20 °C")
        ),
        *((text, False) for text in ("Apollo 11", "July 20, 1969", "20 July 1969", "in 1969")),
        *((text, False) for text in ("1960s", "50 Cent", "21st", "9/11", "12:30", "Catch-22")),
        *((text, False) for text in ("10 am", "10pm", "007", "2x", "5 k")),
        *((text, True) for text in ("5 m", "5 g", "0.7", "0", "3 km/h")),
    ],
)
def test_years_and_names_are_no_numbers(answer, is_number):
    assert answers.is_ordinary_number(answer) == is_number


def test_equal_lines_are_left_out_and_equal_prompts_are_not(tmp_path):
    """Ten lines with one prompt, each with a word of its own that the reward asks for."""
    own = tmp_path / "own.py"
    own.write_text("def reward(completion, fields): return float(fields['must'] in completion)\n")
    same = [{"prompt": "Write a line.", "must": f"word{i}"} for i in range(10)]
    more = [{"prompt": f"Write {i}.", "must": "x"} for i in range(20)]
    env = open_problems(
        write_problems(tmp_path / "a.jsonl", *same, *more, same[3]), reward=str(own)
    )
    assert len(env.problems) == 30
    assert "1 of 31 lines of --env_data are left out" in env.left_out[0]
    names = [name for name, _ in env.problems][:10]
    assert names[0] == "Write a line."
    assert len(set(names)) == 10
    for i, name in enumerate(names):
        assert env.reward(name, f"word{i}") == 1.0
        assert env.reward(name, f"word{i + 1}") == 0.0
        assert env.messages.get(name, name) == "Write a line."
    split = [dict(environments.shuffled(env, split, 0)) for split in ("train", "eval")]
    assert sum(names[0] in part for part in split) == 1
    assert all(set(names) <= set(part) or not set(names) & set(part) for part in split)
    pair = [{"prompt": "1+1=", "answer": 2, "id": i} for i in range(2)]
    assert len(open_problems(write_problems(tmp_path / "b.jsonl", *pair)).problems) == 2
    other = write_problems(tmp_path / "c.jsonl", pair[0], {"prompt": "1+1=", "answer": 3})
    refuses("the prompt is that of .*c.jsonl:1, and the answer another", open_problems, other)


# a third of the tables is judged by the libraries, too, where they are installed
@pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="needs math-verify")
def test_math_verify_judges_alike():
    for text, answer in (
        (r"\boxed{10^{3}}", "1000"),
        (r"\boxed{2\times 10^{3}}", "2000"),
        ("The answer is 10 000", "10000"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        ("so it is -3", "-3"),
        (r"\boxed{x = 5}", "5"),
    ):
        assert answers.is_right("math_verify", text, answer)
        assert answers.is_right("math", text, answer)


@pytest.mark.skipif(not importlib.util.find_spec("verifiers"), reason="needs verifiers")
def test_verifiers_cuts_thoughts_alike():
    from verifiers import ThinkParser

    for text, _, said in THOUGHTS[:2]:
        message = [{"role": "assistant", "content": text}]
        assert ThinkParser().parse_answer(message).strip() == said


def test_samples_have_their_tasks(tmp_path):
    from rl.messages import keep_samples

    text = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: "p"))
    cfg = SimpleNamespace(out=tmp_path, log_samples=1)
    keep_samples(cfg, 1, [Sample(prompt=[1], text="a", task="abc7", reward=1.0)], text)
    assert json.loads((tmp_path / "samples.jsonl").read_text())["task"] == "abc7"
