"""Text, against generate.py and rl/decoding.py: the cache equals a full forward, and rows do not
see each other."""

import copy
import json
import shlex
import sys
from dataclasses import replace

import pytest
import torch
from chats import bpe
from pieces import in_pieces
from policy import full_logprobs, sharp_model
from saves import refuses
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import generate as generate_module
from data import DataConfig, open_data
from flags.progress import Stream
from generate import check_weights, continue_texts, generate, main, open_checkpoint, print_sample
from models import deepseek
from models.llama3 import Attention, Llama3, Llama3Config
from rl import decoding
from rl.datasets import Text
from storage.manifest import checksums, write_manifest

PROMPTS = [[5, 9, 2, 77, 31, 8], [3], [60, 61, 62], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.fixture(scope="module")
def model():
    """With spread-out logits, so that greedy choices are no near-ties."""
    return sharp_model(
        Llama3Config(
            dim=32,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            ffn_dim=64,
            vocab_size=97,
            max_seq_len=64,
        )
    )


class TwoAttentions(torch.nn.Module):
    """Differential attention (arXiv:2410.05258): the difference of two, with keys of their own."""

    def __init__(self, config):
        super().__init__()
        self.first, self.second = Attention(config), Attention(config)

    def forward(self, x, *rest):
        return self.first(x, *rest) - 0.5 * self.second(x, *rest)


def twice(model):
    """The model, with two calls of attend in the second of its blocks."""
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    model.blocks["1"].attn = TwoAttentions(model.config)
    for p in model.blocks["1"].attn.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def test_a_block_that_attends_twice(model):
    """Each call has its own keys: in chunks, in a batch and in rollouts the model equals the model
    without a cache."""
    other = twice(model)
    test_cached_decode_equals_full_forward(other, [5, 1, 1, 4, 1])
    for rows in (4, 64):  # with fewer rows than samples, rows are refilled, and given up at the end
        noise = torch.rand(4, 3, 7, generator=torch.Generator().manual_seed(0))
        samples = decoding.rollout(other, PROMPTS, noise, 1.0, 0, max_len=32, rows=rows)
        for i, s in enumerate(samples):
            want = full_logprobs(other, replace(s, prompt=PROMPTS[i // 3]))
            assert torch.allclose(want, torch.tensor(s.logprobs), atol=1e-4)


def test_a_latent_block_that_attends_twice():
    """DeepSeek hands attend_cached to its attention; two attentions have two caches of latents."""
    torch.manual_seed(0)
    config = replace(
        deepseek.FLAVORS["debug"], n_layers=2, dim=32, n_heads=4, ffn_dim=64, vocab_size=97
    )
    other = deepseek.DeepSeek(config)
    first, second = other.blocks["1"].attn, deepseek.Attention(config)
    other.blocks["1"].attn = both = torch.nn.Module()
    both.first, both.second = first, second
    both.forward = lambda *args: first(*args) - 0.5 * second(*args)
    for p in other.parameters():
        torch.nn.init.normal_(p, std=0.2) if p.dim() > 1 else torch.nn.init.ones_(p)
    test_cached_decode_equals_full_forward(other, [5, 1, 1, 4, 1])


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 1, 4, 1]])
def test_cached_decode_equals_full_forward(model, chunks):
    tokens = torch.randint(97, (3, 12), generator=torch.Generator().manual_seed(1))
    logits, _ = in_pieces(model, tokens.tolist(), chunks[1:])
    torch.testing.assert_close(torch.stack(logits), model(tokens), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_ragged_batch_equals_each_prompt_alone(model, temperature, monkeypatch):
    together = generate(model, PROMPTS, 20, temperature=temperature, seed=4)
    assert [len(row) for row in together] == [20] * 4
    # prompts read in pieces, some pieces only padding
    monkeypatch.setattr(decoding, "PREFILL_CHUNK", 3)
    assert generate(model, PROMPTS, 20, temperature=temperature, seed=4) == together
    for row, prompt in enumerate(PROMPTS):
        noise = decoding.draw_noise([f"4/{row}"], 1, 20)
        monkeypatch.setattr(generate_module, "draw_noise", lambda names, *shape, noise=noise: noise)
        assert generate(model, [prompt], 20, temperature=temperature, seed=4) == [together[row]]


@pytest.mark.parametrize("temperature, report", [(0.7, 0.7), (1.0, 1.0), (0, 1.0)])
def test_logprobs_equal_a_full_forward(model, temperature, report):
    noise = decoding.draw_noise([f"2/{row}" for row in range(4)], 1, 20)
    for prompt, s in zip(
        PROMPTS, decoding.rollout(model, PROMPTS, noise, temperature, [], max_len=64)
    ):
        assert (
            full_logprobs(model, replace(s, prompt=prompt), report) - torch.tensor(s.logprobs)
        ).abs().max() < 1e-4


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-40, 1e-300])
def test_a_temperature_next_to_nothing_takes_the_likeliest_token(temperature):
    """logits / 1e-40 is infinite, and inf - inf no number."""
    logits = torch.tensor([[2.0, 30.0, 0.0, -1.0, -50.0], [-900.0, -800.0, -9e9, 5.0, 4.9]])
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.7)):
        token, logprob = decoding.draw(logits, torch.tensor([0.3, 0.99]), temperature, top_k, top_p)
        assert token.flatten().tolist() == [1, 3]
        assert logprob.flatten().tolist() == [0, 0]


def test_samples_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -50.0]]).repeat(4000, 1)
    u = decoding.draw_noise([f"0/{row}" for row in range(4000)], 1, 1).flatten()
    for temperature, top_k, top_p in [(1.0, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.7)]:
        tokens, logprobs = decoding.draw(logits, u, temperature, top_k, top_p)
        wanted = decoding.truncate(logits[:1] / temperature, top_k, top_p).softmax(-1)[0]
        # 0.008 is one standard deviation
        assert (tokens.bincount(minlength=5) / 4000 - wanted).abs().max() < 0.03
        want = (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs, want)


def test_truncate():
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log()

    def kept(k, p):
        return decoding.truncate(logits, k, p).isfinite()[0].tolist()

    assert kept(2, 1.0) == [True, False, True, False]
    assert kept(0, 0.5) == [True, False, False, False]
    assert kept(0, 0.6) == [True, False, True, False]
    assert kept(2, 0.95) == [True, False, True, False]
    assert kept(9, 0.999) == [True] * 4


@pytest.mark.parametrize(
    "scale, top_p, sorts", [(8.0, 0.9, False), (0.5, 0.9, True), (3.0, 0.999999, True)]
)
def test_top_p_sorts_the_vocabulary_only_where_it_must(scale, top_p, sorts, monkeypatch):
    """Among 20,000 tokens: the kept ones are those of a whole sort, whose probability in fp64 is
    summed up to top_p."""
    logits = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)) * scale
    calls, keep_share = [], decoding.keep_share

    def watched(*args):
        calls.append(args[2])
        return keep_share(*args)

    monkeypatch.setattr(decoding, "keep_share", watched)
    got = decoding.truncate(logits, 0, top_p)
    assert calls == [decoding.CANDIDATES, 20_000][: 1 + sorts]
    ranked, order = logits.double().sort(dim=-1, descending=True)
    p = ranked.softmax(-1)
    want = torch.zeros_like(p).scatter(-1, order, (p.cumsum(-1) - p < top_p).double()).bool()
    assert (got.isfinite() != want).sum() <= 4
    assert torch.equal(got[got.isfinite()], logits[got.isfinite()])


def test_rows_end_at_eot_and_the_loop_ends_with_the_last_row(model):
    greedy = generate(model, PROMPTS, 20, temperature=0)
    eot = greedy[0][4]
    forwards, stop = [], {}
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    new = generate(model, PROMPTS, 20, temperature=0, eot=eot)
    for row, ids in enumerate(greedy):
        if eot in ids:
            stop[row] = ids.index(eot) + 1
        else:
            stop[row] = 20
        assert new[row] == ids[: stop[row]]
    assert stop[0] <= 5
    assert len(forwards) == max(stop.values())
    forwards.clear()
    generate(model, PROMPTS[:1], 20, temperature=0, eot=eot)
    hook.remove()
    assert len(forwards) == stop[0]


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 97]], {}, "prompt 0 has token id 97, but vocab_size is 97"),
        ([[-1]], {}, "token id -1"),
        ([[1] * 60], {}, "60 tokens and 5 new ones make 65, the model's max_seq_len is 64"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"temperature": -1}, "temperature is -1"),
        ([[1]], {"top_k": -1}, "top_k is -1"),
        ([[1]], {"top_p": 0}, "top_p is 0"),
    ],
)
def test_errors(model, prompts, options, message):
    refuses(message, generate, model, prompts, **{"max_new_tokens": 5} | options)


def test_a_text_may_be_as_long_as_the_model_allows(model):
    """59 tokens and 5 new ones make 64, the model's max_seq_len."""
    (ids,) = generate(model, [[1] * 59], 5, temperature=0)
    assert len(ids) == 5


# ---------------------------------------------------------------- text and the command line

TEXT = "def f(x):\n    return 'naïve', '日本語', '🙂🙃'  # für alle\n"


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes and a few merges; like those of the built-in corpus, most non-English characters have
    several tokens."""
    return bpe(TEXT[:25], 280, ["<|endoftext|>"])


@pytest.fixture
def run_folder(tmp_path, tokenizer, monkeypatch):
    """A run folder with a tokenizer; the model is made in this file. test_checkpoint.py reads real
    checkpoints."""
    step = tmp_path / "run" / "checkpoints" / "step-3"
    step.mkdir(parents=True)
    tokenizer.save(str(step / "tokenizer.json"))
    (step / "state.json").write_text('{"state": {}}')
    write_manifest(str(step), checksums(str(step), ["tokenizer.json", "state.json"]), step=3)
    (tmp_path / "run" / "config.json").write_text('{"seq_len": 64}')
    torch.manual_seed(1)
    config = Llama3Config(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        ffn_dim=64,
        vocab_size=280,
        max_seq_len=256,
    )
    model = Llama3(config)
    monkeypatch.setattr(
        generate_module, "load_model", lambda folder, device, dtype: (model, {"step": 3})
    )
    return tmp_path / "run"


def test_texts_of_a_batch_and_an_empty_text(run_folder):
    parts = open_checkpoint(str(run_folder))
    assert parts[2] == [0]
    both = continue_texts(*parts, ["def f", ""], 12, temperature=0)
    assert both == [continue_texts(*parts, [text], 12, temperature=0)[0] for text in ("def f", "")]


@pytest.mark.parametrize("scheme", ["always", "first", "prepend"])
def test_no_space_is_lost_between_prompt_and_new_text(scheme, monkeypatch):
    """Tokenizers like Mistral's strip the space at the beginning of a text."""
    made = Tokenizer(models.BPE())
    made.decoder = decoders.Metaspace()
    if scheme == "prepend":
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        made.normalizer = normalizers.Sequence(steps)
        made.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    words = ["the capital of France"] * 9
    made.train_from_iterator(words, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    new = made.encode("the capital of France").ids[-2:]
    assert made.decode(new) == "of France"
    monkeypatch.setattr(generate_module, "generate", lambda model, prompts, *rest, **more: [new])
    texts = continue_texts(None, made, [], ["the capital"], 9)
    assert texts == [" of France"]
    # and none is put in where a tool's text goes on
    text = object.__new__(Text)
    text.tokenizer, text.alphabet = made, None
    ids = text.ids("the capital ") + text.ids_after("of France")
    assert made.decode(ids) == "the capital of France"


def test_the_command_line(run_folder, capsys):
    common = ["--checkpoint", str(run_folder), "--max_new_tokens", "12", "--device", "cpu"]
    main([*common, "--prompt", "a, b = "])
    alone = capsys.readouterr().out
    parts = open_checkpoint(str(run_folder))
    assert alone == "a, b = " + continue_texts(*parts, ["a, b = "], 12, temperature=0.8)[0] + "\n"
    main([*common, "--prompt", "a, b = ", "--prompt", "x"])
    assert capsys.readouterr().out.startswith("--- 'a, b = '\n" + alone)
    main([*common, "--prompt", "a, b = ", "--seed", "1"])
    assert capsys.readouterr().out != alone


def test_sample_at_the_end_of_a_run_goes_on_from_its_own_data(run_folder, tmp_path, capsys):
    """From the beginning of the validation text, or without validation of the training text."""
    (tmp_path / "a.txt").write_text(
        "Good morning, it's a fine day today.\n" * 300 + "It's now getting rather late\n" * 40
    )
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": "\n  Long ago \n and far away " * 60}) + "\n"
    )
    for name, words in ("a.txt", "It's now getting rather"), ("b.jsonl", "Long ago"):
        data = open_data(DataConfig(data=str(tmp_path / name), cache_dir=str(tmp_path)), 16)
        assert (data.n_val_samples > 0) == (name == "a.txt")
        print_sample(str(run_folder), 1000, data)
        shown = capsys.readouterr().out
        assert f"--prompt {shlex.quote(words)})" in shown
        assert f"\n\n{words}" in shown


def test_sample_at_the_end_of_a_run_is_the_same_on_a_terminal(run_folder, capsys, monkeypatch):
    print_sample(str(run_folder), n_params=1000)
    plain = capsys.readouterr().out
    assert "):\n\ndef " in plain
    written = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(Stream, "write", lambda self, text: written.append(text))
    print_sample(str(run_folder), n_params=1000)
    said = capsys.readouterr().out
    assert said.endswith("):\n\n")  # before the sampling
    assert said + "".join(written) == plain
    assert len(written) > 2  # it grows


def test_sample_at_the_end_of_a_run_never_fails_it(run_folder, capsys):
    print_sample(str(run_folder), n_params=1000)
    assert "step-3\nsample" in capsys.readouterr().out
    print_sample(str(run_folder), n_params=8_000_000_000)
    assert "python generate.py --checkpoint" in capsys.readouterr().out
    print_sample(str(run_folder.parent), n_params=1000)
    assert "no sample: " in capsys.readouterr().out


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value):
    """A model of such weights samples the same token again and again, with status 0."""
    model = torch.nn.Linear(2, 2)
    check_weights(model, "runs/mine")
    with torch.no_grad():
        model.weight[1, 0] = value
    with pytest.raises(ValueError, match="^runs/mine: weight is NaN or infinite"):
        check_weights(model, "runs/mine")
