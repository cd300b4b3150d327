"""--replay: a step of a logged run is computed again, to the bit, and its sequences one by one; a
text that made a spike is found with its file and line."""

import hashlib
import json
import math
import random
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from runs import MODEL, column, ended, launch, run, train_lines

import train_llama3
from corpus.origins import find_origin, spans_of
from data import open_data
from distributed.layout import Layout
from flags.files import read_json
from storage.saved import load_model
from tools.parity.replay import compare_with_log
from tools.parity.sequences import join_token_losses, read_sequence
from tools.reports.options import run_report

LINE = 417  # of the planted text
NAMES = (
    "the a cat dog tree house river stone bird runs sees takes finds over under near and".split()
)
SEQUENCE = re.compile(
    r" +(\d+) +(\d+) +([\d.]+) +([\d.]+) % +([\d.]+) +([-\d.]+) % +([-\d.]+)  (.+)"
)
DOCUMENT = re.compile(
    r" +([\d.]+) %(?: +(-?[\d.]+) %| {9}) +([\d.]+) +(\d+)  (\S+) line (\d+): (['\"].*)"
)


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    """(folder, command) of a run of 60 steps, an epoch in fp32 on 600 stories, one of them garbage."""
    root = tmp_path_factory.mktemp("spiked")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(NAMES, k=draw.randint(20, 60))) for _ in range(600)]
    texts[LINE - 1] = "".join(chr(draw.randint(33, 126)) for _ in range(700))
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (root / "stories.jsonl").write_text("".join(lines))
    command = f"--data stories.jsonl --cache_dir cache --out run --model_args {MODEL} --seq_len 64 "
    command += "--local_batch_size 4 --global_batch_size 8 --steps 60 --log_every 1 "
    command += "--checkpoint_every 20 --val_every 25 --device cpu --compute_dtype float32"
    run(launch(1, "train_llama3.py", *command.split()), cwd=in_root(root))
    return root


def in_root(root: Path) -> Path:
    """The folder, with the recipes in it as links: a command is typed there as it is in ours."""
    for name in ("train_llama3.py", "train_qwen3.py"):
        link = root / name
        if not link.exists():
            link.symlink_to(Path(train_llama3.__file__).with_name(name))
    return root


def replayed(root: Path, step: int, *flags, processes=1) -> str:
    command = ["train_llama3.py", "--out", "run", "--cache_dir", "cache", "--replay", step, *flags]
    return run(launch(processes, *command), cwd=in_root(root))


def sequences(text: str) -> dict[int, tuple]:
    """{row: (cursor, mean loss, share of the loss, norm, share of the gradient, cosine, document)},
    in the order of the table."""
    found = [match.groups() for match in map(SEQUENCE.fullmatch, text.splitlines()) if match]
    return {int(row): (int(cursor), *map(float, rest), doc) for row, cursor, *rest, doc in found}


def largest_losses(text: str) -> list[float]:
    """Of the tokens that a report shows; shares of a sequence would not tell a common factor."""
    tokens = text[text.index("Tokens with the largest losses") :].splitlines()[1:11]
    return [float(line.split()[0]) for line in tokens]


def step_of_spike(root: Path) -> int:
    """The step whose loss is above that of the step before by most."""
    losses = column(train_lines(root / "run"), "loss")
    return 2 + max(range(len(losses) - 1), key=lambda i: losses[i + 1] - losses[i])


def contents(folder: Path) -> dict[str, str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_text_that_made_a_spike_is_found(spiked):
    """The planted line comes first, in the table of sequences and in that of documents; the loss is
    the logged loss; and the folder of the run is as before."""
    before = contents(spiked / "run")
    text = replayed(spiked, step_of_spike(spiked))
    assert "as logged, to the bit" in text, text
    assert contents(spiked / "run") == before
    found = sequences(text)
    assert len(found) == 8, text
    first = next(iter(found.values()))
    assert first[-1].startswith(f"stories.jsonl line {LINE}"), text
    assert sum(row[4] for row in found.values()) == pytest.approx(100, abs=0.3)
    assert sum(row[2] for row in found.values()) == pytest.approx(100, abs=0.3)
    documents = [match for match in map(DOCUMENT.fullmatch, text.splitlines()) if match]
    assert documents[0][6] == str(LINE), text
    tokens = text[text.index("Tokens with the largest losses") :].splitlines()[1:]
    assert len(tokens) == 10, text
    for line in tokens:
        assert f"stories.jsonl line {LINE}" in line, text
    lines = (spiked / "stories.jsonl").read_text().splitlines()
    for *_, file, number, excerpt in (match.groups() for match in documents):
        words = re.match(r"(['\"])(.*?)(<\|endoftext\|>)?\1", excerpt)[2].strip().encode()
        story = json.loads(lines[int(number) - 1])["text"]
        assert file == "stories.jsonl", excerpt
        assert words.decode("unicode_escape") in story, excerpt


def test_the_gradient_of_a_sequence_is_that_of_plain_torch(spiked):
    """Step 21, whose weights lie in the checkpoint of step 20; losses and gradients of its sequences
    by F.cross_entropy on one process without any of our parallel code."""
    text = replayed(spiked, 21)
    found = sequences(text)
    model, state = load_model(str(spiked / "run" / "checkpoints" / "step-20"))
    config = {**read_json(str(spiked / "run"), "config.json")}
    names = {field.name for field in fields(train_llama3.Config)}
    cfg = train_llama3.Config(**{name: config[name] for name in names & config.keys()})
    cfg.data = str(spiked / "stories.jsonl")
    cfg.cache_dir = str(spiked / "cache")
    data = open_data(cfg, cfg.seq_len)
    batch = next(data.batches(state["samples"], 8, 8, 0, 1, "cpu"))
    tokens = batch.tokens[0]
    labels = batch.labels[0]
    gradients = []
    for row in range(8):
        loss = F.cross_entropy(model(tokens[row : row + 1])[0], labels[row])
        parts = torch.autograd.grad(loss / 8, list(model.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
        assert found[row][1] == pytest.approx(loss.item(), abs=6e-5)
        assert found[row][3] == pytest.approx(gradients[-1].norm().item(), rel=1e-3)
    whole = sum(gradients)
    for row, gradient in enumerate(gradients):
        share = 100 * (gradient @ whole / (whole @ whole)).item()
        assert found[row][4] == pytest.approx(share, abs=0.06)
    # the same of the documents, by the labels that the other documents do not have
    shares = Counter()
    for row in range(8):
        sequence = read_sequence(data, state["samples"] + row, row)
        for span in spans_of(data, sequence.window):
            own = torch.full_like(labels[row], -100)
            own[span.start : span.end] = labels[row, span.start : span.end]
            logits = model(tokens[row : row + 1])[0]
            loss = F.cross_entropy(logits, own, reduction="sum") / labels.numel()
            parts = torch.autograd.grad(loss, list(model.parameters()))
            gradient = torch.cat([part.flatten() for part in parts])
            line = find_origin(data, span, [Path(cfg.data)]).place.removeprefix("line ")
            shares[line] += 100 * (gradient @ whole / (whole @ whole)).item()
    known = [match for match in map(DOCUMENT.fullmatch, text.splitlines()) if match and match[2]]
    assert len(known) >= 3, text
    for match in known:
        assert float(match[2]) == pytest.approx(shares[match[6]], abs=0.06), text
    assert train_lines(spiked / "run")[20]["grad_norm"] == pytest.approx(whole.norm().item())


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    ["--dp_shard 2", "--tp 2", "--tp 2 --no-loss_parallel", "--cp 2", "--pp 2"],
)
def test_another_layout_says_the_same(spiked, flags):
    step = step_of_spike(spiked)
    alone = replayed(spiked, step)
    one = sequences(alone)
    text = replayed(spiked, step, *flags.split(), processes=2)
    two = sequences(text)
    assert [*one][0] == [*two][0], text
    assert one.keys() == two.keys(), text
    for row, (cursor, loss, *rest, document) in one.items():
        assert two[row][0] == cursor
        assert two[row][-1] == document
        assert two[row][1] == pytest.approx(loss, abs=1e-3), text
        assert two[row][2:-1] == pytest.approx(tuple(rest), rel=2e-2, abs=0.2), text
    assert largest_losses(text) == pytest.approx(largest_losses(alone), abs=1e-2), text


@pytest.fixture
def process_group():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("loss_parallel", [True, False])
def test_losses_of_tokens_have_their_places(loss_parallel, process_group):
    """Under tp a rank has the losses of all tokens, or without --loss_parallel those of its part."""
    losses = torch.arange(1.0, 9.0, dtype=torch.float64)
    for rank in range(2):
        layout = Layout(tp=2, loss_parallel=loss_parallel, rank=rank)
        own = losses
        wanted = losses
        if not loss_parallel:
            own = losses[4 * rank : 4 * rank + 4]
            wanted = torch.zeros(8, dtype=torch.float64)
            wanted[4 * rank : 4 * rank + 4] = own
        assert join_token_losses([own], 8, layout).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "logged, computed, words",
    [
        ((2.0, 0.5), (2.0, 0.5), "as logged, to the bit"),
        ((2.0, 0.5), (2.002, 0.5), "loss logged as 2, 1.0e-03 apart, norm as logged"),
        ((2.0, 0.5), (math.nan, 0.5), "loss logged as 2.0, norm as logged"),
        ((2.0, None), (2.0, 0.5), "loss as logged, norm logged as None"),
        (None, (2.0, 0.5), "metrics.jsonl has no line of it"),
    ],
)
def test_a_step_that_is_not_as_logged_says_by_how_much(logged, computed, words):
    logs = {}
    if logged:
        logs[4] = dict(zip(("loss", "grad_norm"), logged, strict=True))
    as_it_was = SimpleNamespace(logged=logs, layout="--tp 2")
    said = compare_with_log(as_it_was, 4, *computed)
    assert said.startswith(f"the loss of step 4 is {computed[0]:.6g} and its gradient norm 0.5")
    assert words in said


@pytest.mark.slow
def test_a_run_on_two_processes_is_repeated_to_the_bit(spiked, tmp_path):
    """On its own layout; started with python alone, the error says how to start it."""
    root = in_root(tmp_path)
    (root / "stories.jsonl").symlink_to(spiked / "stories.jsonl")
    command = f"--data stories.jsonl --cache_dir cache --out run --model_args {MODEL} --seq_len 64 "
    command += "--local_batch_size 2 --steps 6 --log_every 1 --checkpoint_every 3 --val_every 0 "
    command += "--device cpu --tp 2"
    run(launch(2, "train_llama3.py", *command.split()), cwd=root)
    assert "as logged, to the bit" in replayed(root, 5, processes=2)
    with pytest.raises(AssertionError, match="torchrun --nproc_per_node 2 train_llama3.py"):
        replayed(root, 5)
    assert "1 step before it is trained" in replayed(root, 5, "--tp", 1)
    # a step before all checkpoints, and the data of another text
    assert "from step 0, for no checkpoint" in replayed(root, 2, processes=2)
    (root / "stories.jsonl").unlink()
    (root / "stories.jsonl").write_text((spiked / "stories.jsonl").read_text().replace("cat", "c"))
    with pytest.raises(AssertionError, match="stories.jsonl is not what run was trained on: data_"):
        replayed(root, 5, processes=2)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--replay 99", "metrics.jsonl ends with step 60; give a step from 1 to 60"),
        ("--replay 5 --out none", "none is no run, for it has no config.json"),
        ("--replay 5 --lr 1", "--lr 1.0 is not what run was trained with, 0.003; --replay repeats"),
        ("--replay 5 --compute_dtype bfloat16", "bfloat16 is not what run was trained with"),
        (
            "--replay 5 --keep_latest_k 1 --log_every 2",
            "--keep_latest_k, --log_every have no effect",
        ),
        ("--replay 5 --dry_run", "leave --dry_run out"),
        ("--replay 5 --check_parity", "leave --check_parity out"),
        ("--replay 5 --config run/config.json", "leave --config out"),
    ],
)
def test_what_cannot_be_replayed_is_refused(spiked, monkeypatch, flags, words):
    monkeypatch.chdir(spiked)
    with pytest.raises(ValueError, match=re.escape(words)):
        run_report(train_llama3.main, train_llama3.Config, ["--out", "run", *flags.split()])


def test_the_recipe_of_another_model_is_refused(spiked):
    """Also from step 0, where no checkpoint compares models."""
    root = in_root(spiked)
    for step in (5, 30):
        command = ["train_qwen3.py", "--out", "run", "--cache_dir", "cache", "--replay", step]
        said = ended(launch(1, *command), cwd=root, status=2).stderr
        assert said.count("\n") == 1, said
        assert "but run was trained with models.llama3" in said, said


def test_flags_of_the_layout_may_be_others(spiked, monkeypatch):
    """The typed layout counts, and all else is the run's."""
    from tools.parity import replay
    from tools.reports.options import with_report_flags

    monkeypatch.chdir(spiked)
    known = replay.open_run("run", 30)
    assert (known.first, known.flags) == (21, "run/checkpoints/step-40/config.json")
    WithReports = with_report_flags(train_llama3.Config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = "--out run --replay 30 --cp 2 --lr 3e-3".split()
    cfg = replay.run_flags(train_llama3.Config, WithReports, known, argv)
    assert (cfg.cp, cfg.steps, cfg.seq_len, cfg.data) == (2, 60, 64, "stories.jsonl")
    quiet = replay.quiet_flags(cfg, known, "elsewhere")
    assert (quiet.out, quiet.load_only, quiet.checkpoint_every) == ("elsewhere", True, 0)
