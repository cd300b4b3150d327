"""Problems in files, --env dataset and gsm8k: right answers, lines of a file, and runs."""

import json

import pyarrow
import pyarrow.parquet as pq
import pytest
from policy import REPO, TINY, hf_folder, open_problems, run, steps_of, write_problems
from saves import refuses

import grpo
from rl import answers, datasets, environments, rewards
from storage.prompt import open_chat
from storage.provenance import local_code

GSM8K = REPO.parent / "shared" / "data" / "gsm8k_train.jsonl"  # the published problems, if at hand


def sums(a, begin, end) -> list[dict]:
    return [{"question": f"{a}+{b}=", "answer": a + b} for b in range(begin, end)]


# ---------------------------------------------------------------- answers
# (what a model says, its final number)
NUMBERS = [
    ("#### 18 dollars and 20 cents", 18),
    ("#### -5", -5),
    ("####-5", -5),
    ("3, so #### 1,234.5", 1234.5),
    ("$1,000", 1000),
    ("so -$5.", -5),
    ("20-5=15.", 15),
    ("it is .5", 0.5),
    ("the answer is 7", 7),
    ("7. So: 8.", 8),
    ("1,2,3", None),
    ("1/2", None),
    ("3-5", None),
    ("1,23", None),
    ("#### none", None),
    ("1.2.3", None),
    ("x-5", 5),
    ("#### 5^2", None),
    ("#### 5:30", None),
    ("#### 2+3", None),
    ("1e400", None),
    ("3*4=12", 12),
    ("#### −5", -5),
    ("", None),
    ("#### 1\n#### 2", 2),
    ("The answer is –5", -5),
    ("The answer is - 5", -5),
    ("x = - 5", -5),
    (r"-\$5", -5),
    ("-€5", -5),
    ("negative 5", -5),
    ("it is minus 5", -5),
    ("10 minus 5", None),
    ("x - 5", None),
    ("10 - 5", None),
    ("10–20", None),
    ("±5", None),
    (r"\frac{1}{2}", None),
    (r"\sqrt{5}", None),
    ("5²", None),
    ("10 000", 10000),
    ("1_000", 1000),
    ("10'000", 10000),
    (r"10\,000", 10000),
    ("10 00", None),
    ("1_0", None),
    (r"2\times 10^{3}", 2000),
    ("2 × 10³", 2000),
    ("2 × 3", None),
    ("Answer—42", 42),
    ("20 - 5 = 15", 15),
    ("2 million dollars", 2_000_000),
    ("1.5 billion", 1_500_000_000),
    ("5½", None),
    (r"3\pi", None),
    ("5!", 5),
    ("9" * 400, None),
]


def test_long_numbers_are_compared_exactly():
    """As floats these two are the same."""
    assert not answers.is_right("number", "12345678901234567", "12345678901234568")
    assert answers.is_right("number", "#### 12345678901234568", "12,345,678,901,234,568")


@pytest.mark.parametrize(
    "answer, text",
    [(0.00001, "0.00001"), (1e22, "1" + "0" * 22), (5.0, "5.0"), (7, "7"), ("1e-05", "1e-05")],
)
def test_numbers_of_json_are_written_without_exponents(tmp_path, answer, text):
    assert answers.answer_text(answer) == text
    path = write_problems(tmp_path / "a.jsonl", {"question": "q", "answer": answer})
    assert open_problems(path).reward("q", text) == 1.0


@pytest.mark.parametrize("text, number", NUMBERS)
def test_final_number(text, number):
    assert answers.final_number(text) == number


# (what a model says, an answer that it is equal to)
RIGHT = [
    (r"so \boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{50\%}", "1/2"),
    (r"\boxed{50}", r"50\%"),
    ("5 %", "5%"),
    ("#### 1,234", "1234"),
    ("it is 3/4.", r"\frac34"),
    (r"$\frac{1}{2}$", "1/2"),
    ("the answer is 7", "7"),
    ("so it is -3", "-3"),
    (r"\boxed{x = 5}", "5"),
    (r"no 5, \boxed{7} 8", "7"),
    (r"\boxed{7} or \boxed{8}", "8"),
    (r"\boxed{\dfrac{\sqrt{3}}{2}}", r"\sqrt{3}/2"),
    (r"\boxed{\frac{3}{4}\pi}", r"\frac{3\pi}{4}"),
    (r"\boxed{(1, \frac12)}", "(1,0.5)"),
    (r"\boxed{\{1,2\}}", r"\{1, 2\}"),
    (r"\boxed{\left(3,\infty\right)}", r"(3,\infty)"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    (r"\boxed{1 1/2}", "1.5"),
    (r"\boxed{-\frac{2}{4}}", "-0.5"),
    (r"\boxed{12 \text{ cm}}", "12"),
    (r"\boxed{\text{Evelyn}}", "Evelyn"),
    (r"\boxed{(A)}", "A"),
    ("A", r"\text{(A)}"),
    (r"\boxed{{5}}", "5"),
    ("so it is −3", "-3"),
    (r"\boxed{0}", "0.0"),
    (".5", "0.50"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{\$10.00}", "10"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{x^2+1}", "x^2 + 1"),
    ("x^2", "x^2"),
    (r"so \boxed{\tfrac{7}{3}}", r"we get \boxed{\frac{7}{3}}"),
    (r"\boxed{10^{3}}", "1000"),
    (r"\boxed{2\times 10^{3}}", "2000"),
    (r"so 2\cdot 10^3", "2000"),
    (r"\boxed{3·10^{-2}}", "0.03"),
    (r"\boxed{1_000}", "1000"),
    ("The answer is 10 000", "10000"),
    ("The answer is – 5", "-5"),
    (r"\boxed{–5}", "-5"),
    ("Step 2:\n12", "12"),
    ("part 1:\n$15", "15"),
    ("is - 1/2", "-1/2"),
    (r"it is \frac{-1}{2}", "-0.5"),
    (r"\boxed{\{1,2,3\}}", r"\{3, 2, 1\}"),
    (r"\boxed{\begin{pmatrix}1 \\ 2\end{pmatrix}}", r"\begin{pmatrix} 1\\2 \end{pmatrix}"),
    (r"\boxed{x^{2}+a_{1}}", "x^2 + a_1"),
    (r"\boxed{1011_{2}}", "1011_2"),
    ("#### **42**", "42"),
    ("we get 1 1/2 hours", "1.5"),
    (r"so it is 2\frac{1}{3}", "7/3"),
    ("it is 1½", "3/2"),
    ("½", "0.5"),
    ("about 2.5 million", "2500000"),
    (r"\boxed{5\text{ million dollars}}", "5000000"),
]
# (what a model says, an answer that it is not equal to)
WRONG = [
    (r"\boxed{0.333}", "1/3"),
    (r"\boxed{2+3}", "5"),
    (r"\boxed{37*4}", "148"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{5", "5"),
    (r"\boxed{}", "5"),
    (r"\boxed{5 or 6}", "5"),
    ("5 or 6", "5"),
    (r"\boxed{[1,2]}", "(1,2)"),
    (r"\boxed{1,2}", "12"),
    (r"\boxed{2,1}", "1,2"),
    (r"\boxed{1/0}", "0"),
    (r"\boxed{\frac{1}{0}}", "1"),
    (r"\boxed{--5}", "5"),
    (r"\boxed{5\%}", "500"),
    (r"\boxed{x}", "y"),
    (r"5, no: \boxed{6}", "5"),
    (r"\boxed{5\text{ or 6}}", "5"),
    (r"\boxed{5\mathrm{e}}", "5"),
    (r"\boxed{(1,000)}", "(1,0)"),
    (r"\boxed{(AB)}", "AB"),
    ("", "5"),
    ("9" * 5000, "9"),
    ("\\boxed{" * 9999, "5"),
    ("\\boxed{" + "(" * 9999 + "}", "5"),
    ("-" * 9999 + "5", "5"),
    ("\\boxed{" + "\\frac{" * 99 + "1" + "}{1}" * 99 + "}", "2"),
    ("5^2", "2"),
    (r"2\times 10^{3}", "3"),
    ("10 - 5", "5"),
    (r"\sqrt{5}", "5"),
    (r"\boxed{10^{999}}", "1"),
    ("we get 1 1/2 hours", "1/2"),
    (r"so it is 2\frac{1}{3}", "7"),
    ("it is 1½", "1"),
    ("it is 5x", "5"),
    (r"the area is 3\pi", "3"),
    ("2e5", "5"),
    ("1:2", "2"),
    ("1/2/3", "3"),
    ("2 million", "2"),
    (r"\boxed{5\text{ million}}", "5"),
    (r"\boxed{\{1,2\}}", r"\{1,1\}"),
    (r"\boxed{[2,1]}", "[1,2]"),
]


@pytest.mark.parametrize(
    "text, answer, right",
    [(*x, True) for x in RIGHT] + [(*x, False) for x in WRONG],
    ids=lambda x: str(x)[:30],
)
def test_mathematics(text, answer, right):
    assert answers.is_right("math", text, answer) == right
    assert not right or answers.is_right("math", answer, answer)


def test_mathematics_by_a_library(tmp_path, monkeypatch):
    data = write_problems(
        tmp_path / "a.jsonl", {"question": "expand (x+1)^2", "answer": "x^2+2x+1"}
    )
    if answers.find_spec("math_verify"):
        judge = open_problems(data, reward="math_verify").reward
        assert [
            judge("expand (x+1)^2", f"so it is $\\boxed{{{text}}}$")
            for text in ("(x+1)^2", "x^2+1")
        ] == [1.0, 0.0]
        assert judge("expand (x+1)^2", "$(x+1)^2$", truncated=True) == 0.0
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    refuses(
        "math_verify needs a library: pip install math-verify",
        open_problems,
        data,
        reward="math_verify",
    )


# ---------------------------------------------------------------- files


def test_prompts_answers_and_rewards_of_a_file(tmp_path):
    """Two files, neither is split; a model with random weights knows the characters of both."""
    train, test = (
        write_problems(tmp_path / "a.jsonl", *sums(3, 0, 40)),
        write_problems(tmp_path / "b.jsonl", *sums(7, 0, 20), *sums(7, 0, 2)),
    )
    env = open_problems(train, eval_data=test)
    assert env.ALPHABET == "+0123456789="
    assert len(env.problems) == 40
    assert len(env.eval_problems) == 20
    drawn = [environments.draw_task(env, "train/0", i) for i in range(40)]
    assert sorted(drawn) == sorted(env.problems)
    assert ("3+4=", "7") in drawn
    held_out = environments.held_out_tasks(env, -1)
    assert sorted(held_out) == sorted(f"7+{b}=" for b in range(20))
    assert len(environments.held_out_tasks(env, 5)) == 5
    assert env.reward("3+4=", " 7\n") == 1.0 == env.reward("7+1=", "8")
    assert (
        env.reward("3+4=", "07")
        == env.reward("3+4=", "7", truncated=True)
        == env.reward("3+4=", "it is 7")
        == 0.0
    )
    assert [
        open_problems(train, reward=kind).reward("3+4=", "it is 14/2")
        for kind in ("exact", "number", "math")
    ] == [0.0, 0.0, 1.0]
    # the same spelling as in evaluate.py
    half = open_problems(train, prompt_template="Q: {question}\\nIs it {{answer}}?")
    assert half.problems[4] == ("Q: 3+4=\nIs it {answer}?", "7")
    assert not hasattr(half, "eval_problems")
    assert set(environments.held_out_tasks(half, -1)) == {
        p for p, _ in half.problems if environments.is_held_out(p)
    }


def test_messages_and_answers_as_verl_has_them(tmp_path):
    """Rows of a .parquet. A user's message alone is like a text; more of them go through the
    template as they are."""
    user, system = {"role": "user", "content": "2+3="}, {"role": "system", "content": "add"}
    rows = [
        {
            "question": said,
            "reward_model": {"ground_truth": "5", "style": "rule"},
            "data_source": "x",
        }
        for said in ([user], [system, user])
    ]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    env = open_problems(tmp_path / "a.parquet")
    assert env.problems == [("2+3=", "5"), ("add\n\n2+3=", "5")]
    assert env.reward("add\n\n2+3=", "5") == 1.0
    hf_folder(tmp_path / "hf", "llama")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    (tmp_path / "hf" / "chat_template.jinja").write_text(template)
    flags = dict(
        init_from=str(tmp_path / "hf"), env_data=str(tmp_path / "a.parquet"), env="dataset"
    )
    ids = [env.problems[i][0] for i in (0, 1)]
    text = datasets.Text(
        flags["init_from"], chat=open_chat(flags["init_from"], grpo.Config(**flags)), env=env
    )
    assert [text.decode(text.prompt(prompt)) for prompt in ids] == [
        "user: 2+3=;",
        "system: add;user: 2+3=;",
    ]
    refuses(
        "list of messages, which needs the chat template",
        datasets.Text(flags["init_from"], env=env).prompt,
        ids[1],
    )
    text.chat = open_chat(flags["init_from"], grpo.Config(**flags, system="Be brief."))
    refuses(
        "--system 'Be brief.': the prompts have a system message of their own", text.prompt, ids[1]
    )
    data = write_problems(tmp_path / "a.jsonl", {"prompt": [user, {"role": "user"}], "answer": 5})
    refuses("a.jsonl:1: prompt is no text, and no list of messages", open_problems, data)
    (tmp_path / "own.py").write_text(
        "def reward(completion, fields):\n    return float(completion == fields['word'])"
    )
    own = open_problems(
        write_problems(tmp_path / "a.jsonl", {"prompt": "say x", "word": "x"}),
        reward=str(tmp_path / "own.py"),
    )
    assert own.problems == [("say x", "")]
    assert own.reward("say x", "x") == 1.0


def test_a_reward_of_your_own_is_given_what_it_asks_for(tmp_path):
    """The countdown set with division, with the numbers in each line: docs/grpo.md."""
    lines = [
        {"prompt": f"Make {t} of 8, 2 and 3", "answer": t, "numbers": [8, 2, 3]}
        for t in (1, 12, 19)
    ]
    data, own = write_problems(tmp_path / "a.jsonl", *lines), tmp_path / "my_reward.py"
    own.write_text(
        "from rl.tasks.calculator import arithmetic\nimport re\n\n\ndef reward(completion, answer, "
        "fields, weight=2.0):\n"
        "    used = sorted(map(int, re.findall(r'\\d+', completion))) == "
        "sorted(fields['numbers'])\n"
        "    return weight * (used and arithmetic(completion) == int(answer))\n"
    )
    env = open_problems(data, reward=str(own))
    assert env.reward(lines[2]["prompt"], "8*2+3") == 2.0
    assert env.reward(lines[2]["prompt"], "19") == 0.0
    own.write_text(
        "def reward(prompt, completion, answer, truncated, fields):\n    return truncated and "
        "fields['answer'] == 1"
    )
    assert rewards.pay(open_problems(data, reward=str(own)), lines[0]["prompt"], [""], [True]) == [
        (1.0, "", {})
    ]
    # a checkpoint keeps the source of the reward
    assert local_code()["my_reward.py"] == own.read_text()
    for code, message in [
        (
            "def reward(prompt, solution): pass",
            "reward\\(\\) asks for solution; it may ask for prompt, ",
        ),
        ("x = 1", "it must define reward\\(prompt, "),
        ("import nope", "No module named 'nope'"),
    ]:
        own.write_text(code)
        refuses(message, open_problems, data, reward=str(own))
    refuses(
        "--reward best is no file ending in .py and none of exact, number, math",
        open_problems,
        data,
        reward="best",
    )


# (the objects in the lines of a file, flags, what is said)
UNUSABLE = [
    (
        [{"question": "1", "answer": 2}, {"question": "1"}],
        {},
        "a.jsonl:2 has no answer; need prompt or question",
    ),
    ([{"question": "1", "answer": 2}, [3]], {}, "a.jsonl:2 is a JSON list, not an object"),
    ([{"question": 1, "answer": 2}], {}, "a.jsonl:1: question is no text"),
    ([{"question": " ", "answer": 2}], {}, "a.jsonl:1: the prompt is empty"),
    (
        [{"prompt": [{"role": "assistant", "content": "It is"}], "answer": 2}],
        {},
        "a.jsonl:1: the last message of prompt is the assistant's",
    ),
    (
        [{"prompt": [{"role": "user", "content": "1"}], "answer": 2, "tools": [{"name": "a"}]}],
        {},
        "a.jsonl:1: tools are not written into a prompt",
    ),
    (
        [{"question": "1", "answer": [2]}],
        {},
        "a.jsonl:1: nothing can be right .*: it is no text and no number",
    ),
    (
        [{"question": "1", "answer": "two"}],
        dict(reward="number"),
        "--reward number where the answer is 'two': it ends with no num",
    ),
    ([{"question": "1", "answer": "$$"}], dict(reward="math"), "it has nothing to compare"),
    (
        [{"question": "1", "answer": 2}, {"question": "1", "answer": 3}],
        {},
        "a.jsonl:2: the prompt is that of .*a.jsonl:1, and",
    ),
    (
        [{"question": "1", "answer": 2}],
        dict(prompt_template="{task}"),
        "a.jsonl:1 has no task, which --prompt_temp",
    ),
    ([], {}, "a.jsonl is empty"),
    (
        [{"question": "7+0=", "answer": 2}, {"question": "7+9=", "answer": 2}],
        dict(eval_data="b.jsonl"),
        "1 of the 3 prompts of --eval_data .*b.jsonl are in --env_data as well",
    ),
    (
        [{"question": "1", "answer": 2}],
        dict(eval_data="c.jsonl"),
        "--eval_data '.*c.jsonl': No such file or directory; need a .jsonl",
    ),
]


@pytest.mark.parametrize("lines, flags, message", UNUSABLE)
def test_files_that_cannot_be_used(tmp_path, lines, flags, message):
    data = write_problems(tmp_path / "a.jsonl", *lines)
    write_problems(tmp_path / "b.jsonl", *sums(7, 0, 3))
    flags = {
        name: str(tmp_path / value) if name == "eval_data" else value
        for name, value in flags.items()
    }
    refuses(message, open_problems, data, **flags)


def test_gsm8k(tmp_path):
    lines = [
        {"question": f"{i} and {i}?", "answer": f"<<{i}+{i}>> so\n#### 1,0{i:02d}"}
        for i in range(40)
    ]
    env = open_problems(write_problems(tmp_path / "p.jsonl", *lines), env="gsm8k")
    prompt, answer = environments.draw_task(env, "eval", 0)
    number = answer.split("#### ")[1].replace(",", "")
    assert prompt.endswith(
        "?\nThink step by step, and end with the answer alone on a line: #### number"
    )
    assert (
        env.reward(prompt, f"I think 12, no: #### {number}")
        == 1.0
        == env.reward(prompt, f"it is {number}.0")
    )
    assert env.reward(prompt, "#### 12") == 0.0 == env.reward(prompt, "no idea")
    assert (
        open_problems(tmp_path / "p.jsonl", env="gsm8k", prompt_template="{question}").problems[0][
            0
        ]
        == "0 and 0?"
    )


@pytest.mark.skipif(not GSM8K.exists(), reason="no gsm8k_train.jsonl")
def test_the_published_gsm8k():
    env = open_problems(GSM8K, env="gsm8k", eval_data=str(GSM8K.with_name("gsm8k_test.jsonl")))
    assert len(env.problems) == 7473
    assert len(env.eval_problems) == 1319
    for prompt, answer in env.problems + env.eval_problems:
        number = answer.split("#### ")[1]
        assert answers.final_number(answer) == float(number.replace(",", ""))
        assert answers.is_right("math", answer, number)
        assert env.reward(prompt, answer) == 1.0
        assert env.reward(prompt, answer, truncated=True) == 0.0
        assert env.reward(prompt, f"{answer}\nNo: #### {answers.final_number(answer) + 1}") == 0.0
    # a model with random weights also reads the few characters outside of ASCII
    text = grpo.Text("", alphabet=env.ALPHABET)
    assert all(text.decode(text.prompt(prompt)) == prompt for prompt, _ in env.problems)


def test_a_run_goes_on_with_the_characters_that_it_began_with(tmp_path):
    """Before the first checkpoint any characters will do; afterwards each character is an id of the
    model."""

    def text_of(*questions):
        data = write_problems(
            tmp_path / "a.jsonl", *({"question": question, "answer": "1"} for question in questions)
        )
        text = grpo.Text("", str(tmp_path), open_problems(data).ALPHABET)
        text.save()
        return text

    text_of("ab")
    ids = text_of("abc").ids("cab")
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    assert text_of("cba").ids("cab") == ids
    for make in (
        lambda: text_of("abé"),
        lambda: text_of("ab"),
        lambda: grpo.Text("", str(tmp_path), "cba1"),
    ):
        refuses("tokenizer.json, .*; give the old ALPHABET or data, or use --out NEW", make)


# ---------------------------------------------------------------- runs


def test_a_run_on_two_files(tmp_path):
    """A run trains on a file and evaluates on all of another; too long prompts of both are left out
    and counted."""
    train = write_problems(
        tmp_path / "a.jsonl", *sums(3, 0, 30), {"question": "1" * 20, "answer": 1}
    )
    test = write_problems(
        tmp_path / "b.jsonl", *sums(7, 0, 20), {"question": "2" * 30, "answer": 1}
    )
    flags = [
        *TINY[2 : TINY.index("--eval_n")],
        "--eval_k",
        2,
        "--eval_every",
        2,
        "--log_every",
        1,
        "--env",
        "dataset",
    ]
    flags += [
        "--env_data",
        train,
        "--eval_data",
        test,
        "--reward",
        "number",
        "--checkpoint_every",
        0,
        "--steps",
        2,
    ]
    said = run(1, *flags, "--out", tmp_path / "run")
    assert "1 of 31 problems are left out: with their prompts --seq_len 16" in said
    assert "1 of 21 eval problems are left" in said
    assert len(steps_of(tmp_path / "run")) == 2
    evals = [
        line
        for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open())
        if "eval_n" in line
    ]
    assert [line["eval_n"] for line in evals] == [20, 20]
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    assert {(line["evaluation"], line["prompt"][:2]) for line in shown} == {
        (False, "3+"),
        (True, "7+"),
    }
    said = run(
        1, *flags[:-2], "--steps", 3, "--env_data", test, "--out", tmp_path / "none", status=2
    )
    assert said.count("\n") == 1
    assert "21 of the 21 prompts of --eval_data" in said
    assert not (tmp_path / "none").exists()
