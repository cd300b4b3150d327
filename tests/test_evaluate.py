"""evaluate.py: log-probabilities and answers equal transformers', all layouts equal one process."""

import functools
import gzip
import json
import math
import random
import re
import shutil
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from policy import hf_folder
from pool import pool
from safetensors.torch import load_file, save_file
from saves import IDENTITY, refuses, saver
from tokenizers import Tokenizer, processors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import evaluate
import parallel
from rl import evaluation, questions
from rl.datasets import HINTS, Text
from rl.measures import Measured
from rl.sample import Sample
from storage import commands as checkpoint_commands
from storage.hf import load_hf_model
from storage.prompt import open_chat

KINDS = ("llama", "qwen3_moe", "deepseek_v3")
WORDS = "Sum the digits of 123 4 naïve 東京 don't 🙂 a , .".split()


def words(rng, least, most) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def write_jsonl(path, records) -> str:
    Path(path).write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    )
    return str(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind -> a tiny Hugging Face folder with an opinion."""

    @functools.cache
    def make(kind):
        folder = str(tmp_path_factory.mktemp(kind))
        hf_folder(folder, kind, std=0.3)
        return folder

    return make


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """kind -> a file of lines of different lengths."""
    rng, folder = random.Random(4), tmp_path_factory.mktemp("tasks")
    choices = [[words(rng, 1, 5) for _ in range(rng.randint(1, 4))] for _ in range(11)]
    # 6 per batch of two data ranks: the last batch has 2 and 1
    assert sum(map(len, choices)) % 6 == 3
    answers = [rng.randrange(len(c)) for c in choices]
    spelt = [[a, "ABCD"[a], c[a]][i % 3] for i, (a, c) in enumerate(zip(answers, choices))]
    questions = ["", " ", *(words(rng, 1, 20) for _ in range(9))]
    return dict(
        choice=write_jsonl(
            folder / "choice.jsonl",
            [
                dict(question=q, choices=c, answer=a, id="more")
                for q, c, a in zip(questions, choices, spelt)
            ],
        ),
        text=write_jsonl(
            folder / "text.jsonl",
            [dict(text=words(rng, 0, 120)) for _ in range(5)] + [dict(text="")],
        ),
        answer=write_jsonl(
            folder / "answer.jsonl",
            [dict(question=q, answer=f"so {i}") for i, q in enumerate(questions)],
        ),
    )


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def evaluated(**flags):
    """Run evaluate.py in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    evaluate.main(evaluate.Config(device="cpu", **flags))


def results(capsys, folder, task, **flags) -> tuple[list[dict], dict]:
    """(items, summary) of evaluate.py in this process."""
    out = Path(task).with_suffix(".out")
    out.unlink(missing_ok=True)
    evaluated(checkpoint=folder, task=task, out=str(out), **flags)
    *items, last = read_lines(out)
    assert 0 <= last["summary"]["seconds"] < 3600
    assert [item["index"] for item in items] == list(range(len(items)))
    assert last["summary"]["n"] == len(items)
    said = capsys.readouterr().out
    assert re.search(rf"^{re.escape(str(task))}: \d+ .* tokens at once \|", said, re.M), said
    assert f"({len(items)} line" in said
    return items, last["summary"]


# ---------------------------------------------------------------- transformers
def theirs(folder):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def their_logprob(model, context: list[int], continuation: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    return (
        logits.double().log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum().item()
    )


@pytest.mark.parametrize(
    "kind",
    ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "llama")],
)
def test_scores_are_those_of_transformers(kind, folders, tasks, capsys):
    """Of choices after a line of text, where a space is between them, and after a chat template,
    which ends where the answer begins. Its last newline is scored with the answer, as by lm-eval."""
    model, tokenizer = theirs(folders(kind))
    items, _ = results(capsys, folders(kind), tasks["choice"], chat=True, limit=4)
    for line, item in zip(read_lines(tasks["choice"]), items):
        asked = [{"role": "user", "content": line["question"]}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        context = tokenizer.encode(prompt.rstrip(), add_special_tokens=False)
        want = []
        for choice in line["choices"]:
            ids = tokenizer.encode(prompt + choice, add_special_tokens=False)
            assert ids[: len(context)] == context
            want.append(their_logprob(model, context, ids[len(context) :]))
        assert item["logprobs"] == pytest.approx(want, abs=1e-4)
    items, summary = results(capsys, folders(kind), tasks["choice"], prompt_template="{question}:")
    for line, item in zip(read_lines(tasks["choice"]), items, strict=True):
        context, want = line["question"] + ":", []
        for choice in line["choices"]:
            ids = tokenizer.encode(f"{context} {choice}")
            n = len(tokenizer.encode(context))
            want.append(their_logprob(model, ids[:n], ids[n:]))
        assert item["logprobs"] == pytest.approx(want, abs=1e-4)
        lengths = dict(acc=lambda c: 1, acc_norm=len, acc_bytes=lambda c: len(c.encode()))
        for name, length in lengths.items():
            each = [x / length(c) for x, c in zip(want, line["choices"])]
            right = line["choices"][each.index(max(each))] == line["choices"][item["answer"]]
            assert item[name] == right, name
    for name in ("acc", "acc_norm", "acc_bytes"):
        values = [item[name] for item in items]
        assert summary[name] == pytest.approx(statistics.mean(values))
        assert summary[f"{name}_stderr"] == pytest.approx(
            statistics.stdev(values) / math.sqrt(len(values))
        )


def test_every_token_of_a_text_is_scored_once(folders, tasks, capsys):
    """Windows of 32 tokens, against a forward over each token's own context."""
    model, tokenizer = theirs(folders("llama"))
    first = tokenizer.eos_token_id
    texts = [line["text"] for line in read_lines(tasks["text"])]
    for flags, stride in [({}, 32), (dict(stride=5), 5)]:
        items, summary = results(
            capsys, folders("llama"), tasks["text"], seq_len=32, limit=3, **flags
        )
        for text, item in zip(texts[:3], items, strict=True):
            ids, want = [first, *tokenizer.encode(text)], 0.0
            for i in range(1, len(ids)):
                end = min(len(ids) - 1, 32 if i <= 32 else 32 + -(-(i - 32) // stride) * stride)
                begins = max(0, end - 32)
                want += their_logprob(model, ids[begins:i], ids[i : i + 1])
            assert item["tokens"] == len(ids) - 1
            assert item["bytes"] == len(text.encode())
            assert item["logprob"] == pytest.approx(want, abs=1e-3)
        tokens, nats = sum(i["tokens"] for i in items), -sum(i["logprob"] for i in items)
        assert summary["loss"] == pytest.approx(nats / tokens)
        assert summary["perplexity"] == pytest.approx(math.exp(nats / tokens))
        assert summary["bits_per_byte"] == pytest.approx(
            nats / math.log(2) / sum(i["bytes"] for i in items)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers(kind, folders, tasks, capsys):
    model, tokenizer = theirs(folders(kind))
    # a tokenizer's and a model's
    ends = [tokenizer.eos_token_id, model.generation_config.eos_token_id]
    ends = [i for i in ends if i is not None]
    flags = dict(prompt_template="{question}=", max_new_tokens=12, stop=["7"], local_batch_size=4)
    items, summary = results(capsys, folders(kind), tasks["answer"], **flags)
    for line, item in zip(read_lines(tasks["answer"]), items, strict=True):
        prompt = tokenizer(line["question"] + "=", return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=ends)
        ids = ids[0, prompt.input_ids.shape[1] :].tolist()
        ended = ids[-1] in ends
        text = tokenizer.decode(ids[:-1] if ended else ids)
        assert item["prediction"] == text.split("7")[0]
        assert item["truncated"] == (not ended and "7" not in text)
    assert summary["truncated"] == sum(item["truncated"] for item in items) / len(items)


def test_an_answer_ends_at_the_first_stop(folders, tasks, capsys):
    """Also at a stop string of several tokens; the answer has no text after the stop."""
    flags = dict(prompt_template="{question}=", max_new_tokens=24)
    usual, _ = results(capsys, folders("llama"), tasks["answer"], **flags, stop=[])
    stop = usual[3]["prediction"][5:8]
    assert len(Text(folders("llama")).ids(stop)) > 1
    items, summary = results(
        capsys, folders("llama"), tasks["answer"], **flags, stop=["no such text", stop]
    )
    for item, whole in zip(items, usual):
        assert item["prediction"] == whole["prediction"].split(stop)[0]
        assert item["truncated"] == (whole["truncated"] and stop not in whole["prediction"])
        assert item["tokens"] < 24 or stop not in whole["prediction"][:-3]
    assert items[3]["tokens"] <= 12
    assert summary["truncated"] < 1


def test_a_stop_of_single_bytes_is_not_overrun(folders, tasks, capsys):
    """A stop has at most as many ids as bytes; so many must be looked at."""
    flags = dict(prompt_template="{question}=", max_new_tokens=200)
    usual, _ = results(capsys, folders("llama"), tasks["answer"], **flags, stop=[])
    ids = Text(folders("llama")).ids
    spelt = {}  # stop -> the line where it was found
    for item in usual:
        for stop in re.findall(r"[\x21-\x7e]{4}", item["prediction"][:-8]):
            if len(ids(stop)) == len(stop):
                spelt[stop] = item["index"]
    assert spelt
    stop, found = spelt.popitem()
    items, _ = results(capsys, folders("llama"), tasks["answer"], **flags, stop=[stop])
    assert items[found]["prediction"] == usual[found]["prediction"].split(stop)[0]
    assert items[found]["tokens"] < usual[found]["tokens"] == 200
    assert not items[found]["truncated"]


# ---------------------------------------------------------------- layouts
# (kind, layouts of 4 ranks, tasks) for `make test`; the slow suite has the rest
QUICK = [
    ("llama", [dict(pp=2, cp=2)], ["text"]),
    ("qwen3_moe", [dict(pp=2, ep=2)], ["choice"]),
    ("deepseek_v3", [dict(ep=4)], ["choice", "answer"]),
]
ALL = [
    pytest.param(kind, layouts, ["choice", "text", "answer"], marks=pytest.mark.slow)
    for kind, layouts in {
        "llama": [
            dict(dp_shard=4),
            dict(tp=2),
            dict(pp=2, cp=2),
            dict(dp_replicate=2, pp=2),
            dict(cp=2, tp=2),
            dict(dp_replicate=4),
            dict(cp=2, cp_method="alltoall"),
            dict(pp=2, pp_microbatch_size=3, local_batch_size=3),
            dict(pp=2, pp_stage_fqns="tok_embeddings;blocks.0,blocks.1,norm,head"),
        ],
        "qwen3_moe": [
            dict(dp_shard=4, ep=4),
            dict(tp=2, ep=2),
            dict(pp=2, ep=2),
            dict(cp=4),
            dict(tp=2, etp=2, ep=2),
        ],
        "deepseek_v3": [dict(dp_shard=4, ep=2), dict(tp=2, ep=4), dict(tp=2, pp=2)],
    }.items()
]


def on_a_layout(runs):
    """evaluate.py on each rank, with the process group of the pool."""
    evaluate.connect = lambda layout, *_: layout
    for flags in runs:
        evaluate.main(evaluate.Config(device="cpu", **flags))
        dist.barrier()


def flags_of(kind_of_task: str) -> dict:
    asked = dict(prompt_template="{question}:", local_batch_size=3)
    return dict(
        text=dict(seq_len=32, stride=8),
        choice=asked,
        answer=asked | dict(max_new_tokens=10, seq_len=64),
    )[kind_of_task]


@pytest.mark.parametrize("kind, layouts, kinds_of_tasks", QUICK + ALL)
def test_layouts_give_the_numbers_of_one_process(
    kind, layouts, kinds_of_tasks, folders, tasks, tmp_path
):
    """Items and summaries, on 4 processes."""
    runs = []
    for i, degrees in enumerate([{}, *layouts]):
        for name in kinds_of_tasks:
            if name != "answer" or not (
                degrees.keys() & {"pp", "cp"} or kind == "deepseek_v3" and "tp" in degrees
            ):
                runs.append(
                    dict(
                        checkpoint=folders(kind),
                        task=tasks[name],
                        out=f"{tmp_path}/{i}-{name}.jsonl",
                        **flags_of(name) | degrees,
                    )
                )
    alone, apart = (
        {flags["task"]: flags["out"] for flags in runs[: len(kinds_of_tasks)]},
        runs[len(kinds_of_tasks) :],
    )
    for flags in runs[: len(kinds_of_tasks)]:
        evaluated(**flags)
    pool(4).run(on_a_layout, apart)
    for flags in apart:
        for got, want in zip(
            read_lines(flags["out"]), read_lines(alone[flags["task"]]), strict=True
        ):
            got, want = got.get("summary", got), want.get("summary", want)
            assert got.keys() == want.keys()
            for name in got.keys() - {"layout", "seconds"}:
                same = (
                    pytest.approx(want[name], abs=1e-4)
                    if isinstance(want[name], float | list)
                    else want[name]
                )
                assert got[name] == same, (flags, name)


def scores_of_a_head(V, tp):
    """label_logprobs of the vocabulary in `tp` unequal parts, with labels to leave out."""
    g = torch.Generator().manual_seed(0)
    # exact in any order
    h, weight = (torch.randint(-9, 10, shape, generator=g).float() for shape in ((2, 8, 8), (V, 8)))
    labels = torch.tensor([[1, 3, V - 1, -100, 0, 1, 1, 3], [V - 1, 2, -100, 5, 5, 5, 5, -100]])
    if tp > 1:
        mesh = init_device_mesh("cpu", (tp,))
        part = distribute_tensor(weight, mesh, [Shard(0)])
        h = h.chunk(tp, 1)[mesh.get_local_rank()]
        return parallel.vocab_parallel_loss(
            h, part, labels, None, mesh=mesh, loss=evaluate.label_logprobs
        ), None
    logprobs = (h @ weight.T).log_softmax(-1)
    return evaluate.label_logprobs(h, weight, labels), (logprobs, labels)


def test_a_vocabulary_in_parts_that_are_not_equal():
    want, (logprobs, labels) = scores_of_a_head(23, 1)
    plain = torch.where(
        labels < 0, 0.0, logprobs.gather(2, labels.clamp(min=0)[:, :, None])[:, :, 0]
    )
    torch.testing.assert_close(want, plain)
    for got, _ in pool(4).run(scores_of_a_head, 23, 4):
        torch.testing.assert_close(got, want)


# ---------------------------------------------------------------- our runs
def test_a_run_a_step_and_the_folder_that_it_came_from(folders, tasks, tmp_path, capsys):
    """In one process, and in four processes with DCP's files."""
    run_folder = str(tmp_path / "run")
    checkpoint_commands.from_hf(folders("qwen3_moe"), run_folder)
    flags = dict(task=tasks["choice"], prompt_template="Q {question}")
    want, _ = results(capsys, folders("qwen3_moe"), **flags)
    for i, folder in enumerate((run_folder, f"{run_folder}/checkpoints/step-0")):
        items, summary = results(capsys, folder, **flags)
        assert items == want
        assert summary["checkpoint"] == f"{run_folder}/checkpoints/step-0"
        pool(4).run(
            on_a_layout, [dict(checkpoint=folder, out=f"{tmp_path}/{i}.jsonl", ep=4, **flags)]
        )
        for got, item in zip(read_lines(f"{tmp_path}/{i}.jsonl"), want):
            assert got["logprobs"] == pytest.approx(item["logprobs"], abs=1e-4)


def test_texts_are_read_in_the_windows_of_the_training(folders, tasks, tmp_path, capsys):
    """A run's model may take more tokens than in training; questions may use the full length."""
    model, file = load_hf_model(folders("llama"))
    identity = IDENTITY | {"model": IDENTITY["model"] | asdict(model.config)}
    saver(model, [], tmp_path, identity, file, config={"seq_len": 16}).save(3, {}, last=True)
    lengths = {}, dict(seq_len=16), dict(seq_len=64)
    summaries = [results(capsys, str(tmp_path), tasks["text"], **flags)[1] for flags in lengths]
    assert [summary["seq_len"] for summary in summaries] == [16, 16, 64]
    assert summaries[0]["loss"] == summaries[1]["loss"] != summaries[2]["loss"]
    assert results(capsys, str(tmp_path), tasks["choice"])[1]["seq_len"] == 256


# ---------------------------------------------------------------- requests
def test_windows_score_each_token_once():
    for n in (1, 2, 7, 8, 9, 30):
        for longest, stride in ((1, 1), (8, 8), (8, 3), (8, 1), (64, 64)):
            ids, at = list(range(1, n + 1)), 0
            for context, scored in evaluate.rolling_windows(ids, 0, longest, stride):
                assert scored == ids[at : at + len(scored)]
                assert len(context) + len(scored) <= longest + 1
                assert [*context, *scored] == [0, *ids][
                    at + 1 - len(context) : at + 1 + len(scored)
                ]
                assert len(scored) <= (stride if at else longest)
                # as much context as fits
                assert at == 0 or len(context) + len(scored) == longest + 1
                at += len(scored)
            assert at == n
    assert evaluate.rolling_windows([], 0, 8, 8) == []


def test_where_a_context_ends(folders, tmp_path):
    text = Text(folders("llama"))
    ids = text.ids
    assert evaluate.encode_pair(text, "12 of", " 3") == (ids("12 of"), ids(" 3"))
    # spaces belong to the continuation
    assert evaluate.encode_pair(text, "12 of \n", "3") == (ids("12 of"), ids(" \n3"))
    assert evaluate.encode_pair(text, "", "3") == ([text.first], ids("3")) == ([2], ids("3"))
    assert evaluate.encode_pair(text, " ", "3") == ([2], ids(" 3"))
    # a shared token
    assert len(ids("Sum")) == 1
    assert evaluate.encode_pair(text, "Su", "m") == ([2], ids("Sum"))
    refuses("'' has no tokens", evaluate.encode_pair, text, "12", "")
    # a tokenizer with a first token, added once, also to texts with the token
    tokenizer = Tokenizer.from_file(f"{folders('llama')}/tokenizer.json")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    shutil.copytree(folders("llama"), tmp_path / "bos")
    tokenizer.save(str(tmp_path / "bos" / "tokenizer.json"))
    config = json.loads((tmp_path / "bos" / "tokenizer_config.json").read_text())
    (tmp_path / "bos" / "tokenizer_config.json").write_text(
        json.dumps(config | {"bos_token": "<|im_start|>"})
    )
    text = Text(str(tmp_path / "bos"))
    assert text.first == 1
    assert evaluate.encode_pair(text, "12", " 3") == (
        [1, *ids("12")],
        ids(" 3"),
    )
    assert evaluate.encode_pair(text, "", "3") == ([1], ids("3"))


def test_prompts(folders, tasks, tmp_path):
    """Shots, fields of the line, escapes, and the chat template around all parts."""
    lines = evaluate.read_task(tasks["choice"])[1][2:4]
    text, kind = Text(folders("llama")), "choice"
    first = read_lines(tasks["choice"])[0]
    make = lambda **flags: evaluate.prompts_of(evaluate.Config(**flags), text, lines, kind)  # noqa: E731
    asked = [line.fields["question"] for line in lines]
    assert make() == [f"Question: {q}\nAnswer:" for q in asked]
    assert make(prompt_template="{id}: {question} { x }\\t") == [
        f"more: {q} {{ x }}\t" for q in asked
    ]
    shot = f"Question: {first['question']}\nAnswer: {first['choices'][first['answer']]}\n\n"
    assert make(shots=1, shots_file=tasks["choice"]) == [
        f"{shot}Question: {q}\nAnswer:" for q in asked
    ]
    text = Text(folders("llama"), chat=open_chat(folders("llama"), evaluate.Config(chat=True)))
    assert make()[0] == f"<|im_start|>user\n{asked[0]}<|im_end|>\n<|im_start|>assistant\n"
    grpo = "{question}" + HINTS["gsm8k"].replace("\n", "\\n")  # as it is typed
    ((prompt, _),) = evaluate.ask_questions(
        evaluate.Config(prompt_template=grpo), text, lines[:1], 64
    )[0]
    assert prompt == Text(folders("llama"), chat=text.chat).prompt(asked[0] + HINTS["gsm8k"])
    (request, _), *_ = evaluate.ask_choices(evaluate.Config(), text, lines[:1], 64)[0]
    # markers are tokens
    assert request[0] == 1
    assert 2 in request
    for flags, message in [
        (dict(prompt_template="{answer_2}"), "has no answer_2, which --prompt_template asks for"),
        (
            dict(shots=99, shots_file=tasks["choice"]),
            "has 11 lines of kind choice; need 99 of kind choice",
        ),
        (dict(shots=1, shots_file=tasks["text"]), "of kind text; need 1 of kind choice"),
        (dict(shots=1, shots_file="nothing.jsonl"), "--shots_file 'nothing.jsonl': No such file"),
    ]:
        refuses(re.escape(message), make, **flags)


def test_no_question_reads_its_own_answer(folders, tmp_path):
    """Shots from the file that is tested: the line itself is left out, in any spelling."""
    task = write_jsonl(
        tmp_path / "a.jsonl",
        [dict(question=q, answer=i, id=i) for i, q in enumerate(["One?", "Two?", "Three?"])],
    )
    shots = write_jsonl(
        tmp_path / "b.jsonl",
        [dict(question=q, answer=i) for i, q in enumerate([" one? ", "Two?", "Three?"])],
    )
    kind, lines = evaluate.read_task(task)
    text = Text(folders("llama"))
    for file in (task, shots):
        cfg = evaluate.Config(shots=2, shots_file=file, prompt_template="Q {question}")
        for line, prompt in zip(lines, evaluate.prompts_of(cfg, text, lines, kind)):
            assert prompt.lower().count(line.fields["question"].lower()) == 1
            assert prompt.count("Q ") == 3
    cfg = evaluate.Config(shots=3, shots_file=task)
    refuses("2 lines that do not ask the question", evaluate.prompts_of, cfg, text, lines, kind)
    null = write_jsonl(tmp_path / "c.jsonl", [dict(question="Zero?", answer=None)])
    cfg = evaluate.Config(shots=1, shots_file=null)
    refuses("answer has null", evaluate.prompts_of, cfg, text, lines, kind)


def test_stops():
    """A chat model may restate its question, and a thought may hold any text."""
    assert evaluate.strings_of(evaluate.Config()) == ["\nQuestion:"]
    assert evaluate.strings_of(evaluate.Config(chat=True)) == []
    assert evaluate.strings_of(evaluate.Config(chat=True, stop=["\\nEnd", r"\nu"])) == [
        "\nEnd",
        r"\nu",
    ]
    cut = evaluate.cut_at_stop
    assert cut("a\nQ: b", False, ["\nQ:"]) == "a"
    assert cut("a", False, ["\nQ:"]) is None
    assert cut("a\nQ: b</think>c\nQ: d", True, ["\nQ:"]) == "a\nQ: b</think>c"
    assert cut("<think>a\nQ: b", False, ["\nQ:"]) is None


def judge(lines, samples, answers="auto") -> Measured:
    return evaluate.exact_match(lines, [], [[sample] for sample in samples], answers)


@pytest.mark.parametrize(
    "choices, fine",
    [(["a"], True), ([], False), ("ab", False), (None, False), (["a", ""], False), ([1], False)],
)
def test_choices_are_texts(choices, fine):
    assert questions.is_list_of_texts(choices) == fine


def test_every_kind_of_line_is_a_task():
    assert evaluate.TASKS.keys() == questions.KINDS.keys()


def test_thoughts_are_no_answers():
    line = evaluate.Line("a:1", {"question": "?", "answer": "7"})
    thought = "<think>maybe \\boxed{5}?</think>\nThe answer is 7."
    for answers, text, opened, correct in (
        ("math", thought, False, 1),
        ("math", thought.replace("7", "5").replace("{5}", "{7}"), False, 0),
        ("math", "<think>so \\boxed{7}", False, 0),
        ("number", "so 7", True, 0),
        ("exact", "<think>\n\n</think>\n\n7", False, 1),
        ("exact", "\n7</think>\n7", True, 1),
    ):
        sample = Sample(ids=[1], text=text, opened=opened)
        (item,), *_ = judge([line], [sample], answers)
        assert item["correct"] == correct, text


# ---------------------------------------------------------------- results
def test_the_standard_error_of_a_ratio():
    """With equal denominators the error of a mean; otherwise the error of resampled lines."""
    assert evaluation.ratio("x", [3.0]) == {"x": 3.0, "x_stderr": None}
    assert evaluation.ratio("x", [0, 0, 1, 1]) == {
        "x": 0.5,
        "x_stderr": pytest.approx(math.sqrt(1 / 3 / 4)),
    }
    rng = random.Random(0)
    x = [rng.uniform(1, 9) for _ in range(200)]
    y = [2 * a + rng.gauss(0, 1) * a**0.5 for a in x]
    found = evaluation.ratio("r", y, x, scale=10.0)
    again = []
    for _ in range(400):
        rows = rng.choices(range(200), k=200)
        again.append(10 * sum(y[i] for i in rows) / sum(x[i] for i in rows))
    assert found["r_stderr"] == pytest.approx(statistics.stdev(again), rel=0.15)


def test_what_counts_as_the_right_answer():
    rows = [
        ("so\n#### 1,234", "it is 1234 .\n", False, 1),
        ("#### 5", "5 and #### 6", False, 0),
        ("#### 5", "5", True, 0),
        ("Paris", " Paris\n", False, 1),
        ("Paris", "paris", False, 0),
        (7, "seven, or 7", False, 1),
        ("1/2", "1/2", False, 1),
    ]
    lines = [evaluate.Line("", {"question": "why", "answer": answer}) for answer, *_ in rows]
    samples = [Sample(text=text, ids=[1, 2], truncated=truncated) for _, text, truncated, _ in rows]
    items, metrics, _ = judge(lines, samples)
    assert [item["correct"] for item in items] == [row[-1] for row in rows]
    assert metrics["exact_match"] == pytest.approx(4 / 7)
    assert metrics["truncated"] == pytest.approx(1 / 7)
    assert items[0] == dict(
        question="why",
        prediction="it is 1234 .\n",
        answer=1234.0,
        tokens=2,
        truncated=False,
        correct=1,
    )


@pytest.mark.parametrize(
    "answers, correct",
    [("auto", [0, 1, 1]), ("exact", [0, 0, 1]), ("number", None), ("math", [1, 0, 1])],
)
def test_what_is_right_can_be_said(answers, correct):
    """As for rewards of grpo.py: a text paid by --reward math is right with --answers math."""
    lines = [
        evaluate.Line(f"a.jsonl:{i}", {"question": "?", "answer": answer})
        for i, answer in enumerate(["1/2", 5, "7"])
    ]
    samples = [
        Sample(text=text, ids=[1]) for text in ("so \\boxed{\\frac{1}{2}}", "\\boxed{6} not 5", "7")
    ]
    if correct is None:
        wanted = "a.jsonl:0: nothing can be right with --answers number for '1/2'"
        return refuses(wanted, questions.check_line, lines[0], "answer", answers)
    items, metrics, _ = judge(lines, samples, answers)
    assert [item["correct"] for item in items] == correct
    assert metrics["exact_match"] == pytest.approx(sum(correct) / 3)


QUESTION = '{"question": "x", "answer": "y"}'
# (flags, the file of the task, its content or None for no file, what the one line on stderr says)
ERRORS = [
    ({}, "", None, "--task '': it ends with nothing; need a .txt or .jsonl"),
    ({}, "task.jsonl", "", "task.jsonl is empty"),
    ({}, "task.jsonl", '{"text": ""}', "its texts are empty"),
    (
        {},
        "task.jsonl",
        '{"prompt": "x"}',
        "task.jsonl:1 has prompt; need text, or question, choices and answer, or",
    ),
    ({}, "task.jsonl", '{"text": "x", "question": "y", "answer": "z"}', "need text, or question"),
    (
        {},
        "task.jsonl",
        '{"text": "x"}\n\n{"txt": "y"}',
        "task.jsonl:3 has no text, and the first line has",
    ),
    ({}, "task.jsonl", '{"text": "x"}\n{"text": 7}', "task.jsonl:2: text is no text"),
    ({}, "task.jsonl", '{"text": "x"}\n{"text"', "task.jsonl:2 is not JSON"),
    (
        {},
        "task.jsonl",
        '{"text": "\\ud800"}',
        "task.jsonl:1 is not JSON: 'utf-8' codec can't encode",
    ),
    ({}, "task.jsonl", "[1]", "task.jsonl:1 is a JSON list, not an object"),
    (
        {},
        "task.jsonl",
        '{"question": "x", "choices": ["a", ""], "answer": 0}',
        "choices are no list of texts, none of them empty",
    ),
    (
        {},
        "task.jsonl",
        '{"question": "x", "choices": ["a", "b"], "answer": "c"}',
        "the answer 'c' is none of the 2 choices",
    ),
    (
        {},
        "task.jsonl",
        '{"question": "x", "choices": ["a", "b"], "answer": true}',
        "the answer True is none of the 2 choices",
    ),
    (
        {},
        "task.jsonl",
        '{"question": "x", "answer": " "}',
        "with --answers auto for ' ': it is no text and no number",
    ),
    ({}, "task.json", "[]", "--task 'task.json': it ends with .json; need a .txt or .jsonl"),
    ({}, "hellaswag", None, "--task 'hellaswag': No such file or directory; need a .txt or .jsonl"),
    ({}, "../", None, "--task '../': it is a folder; need a .txt or .jsonl"),
    (dict(checkpoint="nowhere"), "task.txt", "x", "nowhere is no folder"),
    (dict(out="task.txt"), "task.txt", "x", "--out task.txt is there already"),
    (dict(out="nowhere/x.jsonl"), "task.txt", "x", "--out nowhere/x.jsonl: nowhere is no folder"),
    (
        dict(seq_len=512),
        "task.txt",
        "x",
        "--seq_len 512 must be between 1 and the model's max_seq_len 256",
    ),
    (dict(seq_len=8, stride=9), "task.txt", "x", "--stride 9 must be between 1 and --seq_len 8"),
    (
        dict(max_new_tokens=8),
        "task.txt",
        "x",
        "--max_new_tokens 8 has no effect where nothing is written",
    ),
    (
        dict(answers="number"),
        "task.jsonl",
        QUESTION,
        "task.jsonl:1: nothing can be right with --answers number",
    ),
    (
        dict(stride=8, max_new_tokens=8),
        "task.jsonl",
        QUESTION,
        "--stride 8 has no effect on questions",
    ),
    (
        {},
        "task.jsonl",
        QUESTION,
        "--max_new_tokens 256 leaves no room for a prompt in the 256 tokens",
    ),
    (
        dict(seed=1, max_new_tokens=8),
        "task.jsonl",
        QUESTION,
        "--seed 1 has no effect with --temper",
    ),
    (
        dict(pp=2, max_new_tokens=8),
        "task.jsonl",
        QUESTION,
        "--pp and --cp do not help to write answers",
    ),
    (
        dict(seq_len=4),
        "task.jsonl",
        '{"question": "x", "choices": ["a b c d e f"], "answer": 0}',
        "are to be scored as a whole",
    ),
    (dict(tp=2), "task.txt", "x", "1 process but"),
    # no word of DeepSeek's latents: a Llama writes with tp
    (dict(tp=2, max_new_tokens=8), "task.jsonl", QUESTION, "1 process but"),
    (
        dict(ac="full", compile=True),
        "task.txt",
        "x",
        "--ac full, --compile: nothing is trained here; leave it out",
    ),
    (dict(shots=2), "task.txt", "x", "--shots 2 has no effect on a text"),
    (
        dict(shots=2, max_new_tokens=8),
        "task.jsonl",
        QUESTION,
        "--shots_file '': it ends with nothing; need a .txt or .jsonl",
    ),
    (dict(temperature=-1.0), "task.txt", "x", "--temperature -1.0 must be 0 or more"),
]


@pytest.mark.parametrize("flags, file, content, message", ERRORS)
def test_what_is_wrong_is_one_line(flags, file, content, message, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(file).write_text(content)
    flags = dict(checkpoint=folders("llama"), task=file) | flags
    refuses(re.escape(message), evaluated, **flags)


def test_deepseek_writes_without_tp(folders, tasks):
    flags = dict(checkpoint=folders("deepseek_v3"), tp=2, max_new_tokens=8)
    refuses(
        "--tp 2: writing with DeepSeek caches latents", evaluated, task=tasks["answer"], **flags
    )


def test_a_model_without_a_tokenizer_and_one_without_a_template(folders, tasks, tmp_path):
    without = shutil.ignore_patterns("chat_template.jinja", "tokenizer.json")
    shutil.copytree(folders("llama"), tmp_path, ignore=without, dirs_exist_ok=True)
    refuses("has no tokenizer.json", evaluated, checkpoint=str(tmp_path), task=tasks["text"])
    shutil.copy(Path(folders("llama"), "tokenizer.json"), tmp_path)
    refuses(
        "--chat: .* has no chat template",
        evaluated,
        checkpoint=str(tmp_path),
        task=tasks["choice"],
        chat=True,
    )


def test_a_model_that_has_diverged_is_told(folders, tasks, tmp_path):
    """And gets no score: no choice would be the likeliest."""
    shutil.copytree(folders("llama"), tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    for name, flags in dict(choice={}, answer=dict(max_new_tokens=4)).items():
        refuses(
            "log-probabilities are no numbers: the model has diverged, or is damaged",
            evaluated,
            checkpoint=str(tmp_path / "hf"),
            task=tasks[name],
            **flags,
        )


@pytest.mark.parametrize(
    "name, change",
    [("packed.jsonl.gz", gzip.compress), ("bom.jsonl", lambda x: b"\xef\xbb\xbf" + x)],
)
def test_packed_files_and_files_of_windows(tasks, tmp_path, name, change):
    """Windows likes to begin a file with a byte order mark, no part of the text."""
    (tmp_path / name).write_bytes(change(Path(tasks["choice"]).read_bytes()))
    (kind, got), (_, want) = (
        evaluate.read_task(str(tmp_path / name)),
        evaluate.read_task(tasks["choice"]),
    )
    assert kind == "choice"
    assert [line.fields for line in got] == [line.fields for line in want]
    assert got[3].where == f"{tmp_path / name}:4"


def test_prompts_that_are_too_long_lose_their_beginning(folders, tmp_path, capsys):
    """And are counted: choices and answers alike."""
    task = write_jsonl(
        tmp_path / "t.jsonl",
        [
            dict(question="123 " * 40 + "of", choices=["4", "5"], answer="4"),
            dict(question="of", choices=["4", "5"], answer="4"),
        ],
    )
    items, summary = results(
        capsys, folders("llama"), task, seq_len=24, prompt_template="{question}"
    )
    assert summary["cut"] == 2
    model, tokenizer = theirs(folders("llama"))
    context = tokenizer.encode("123 " * 40 + "of")
    n = len(tokenizer.encode(" 4"))
    theirs_of_the_end = their_logprob(model, context[n - 25 :], tokenizer.encode(" 4"))
    assert items[0]["logprobs"][0] == pytest.approx(theirs_of_the_end, abs=1e-4), (
        f"log-probability of a choice after the last {25 - n} tokens of its context, ours and theirs"
    )
    task = write_jsonl(
        tmp_path / "u.jsonl",
        [dict(question="123 " * 40 + "of", answer="4"), dict(question="of", answer="4")],
    )
    items, summary = results(
        capsys, folders("llama"), task, seq_len=24, max_new_tokens=4, prompt_template="{question}"
    )
    ids = model.generate(torch.tensor([context[4 - 24 :]]), max_new_tokens=4, do_sample=False)[
        0, 20:
    ].tolist()
    assert summary["cut"] == 1
    assert items[0]["prediction"] == tokenizer.decode(ids)


def test_samples_depend_on_their_question_alone(folders, tasks, tmp_path):
    """Not on the batch; another seed gives other samples."""
    flags = dict(
        checkpoint=folders("llama"), task=tasks["answer"], max_new_tokens=8, temperature=1.0
    )
    for name, more in dict(
        a={}, b=dict(local_batch_size=1), c=dict(seed=1), d=dict(limit=3)
    ).items():
        evaluated(out=str(tmp_path / name), **flags | more)
    a, b, c, d = (
        [line.get("prediction") for line in read_lines(tmp_path / name)] for name in "abcd"
    )
    assert a == b != c
    assert d[:3] == a[:3]
    assert len(d) == 4
