"""generate.py: the cache gives what a full forward gives, rows do not see each other, and the command line."""
import pytest
import torch

import generate as generate_module
from generate import generate, sample, truncate
from models.llama3 import Llama3, Llama3Config

PROMPTS = [[5, 9, 2, 77, 31, 8], [3], [60, 61, 62], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=64, vocab_size=97, max_seq_len=64)
    model = Llama3(config)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.2)  # spread-out logits, so that greedy choices are no near-ties
    return model


def full_logprobs(model, prompt, new, temperature=1.0):
    """Log-probabilities of `new` after `prompt` from one forward without a cache."""
    logits = model(torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])[:, 0]


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 1, 4, 1]])
def test_cached_decode_equals_full_forward(model, chunks):
    tokens = torch.randint(97, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        full = model(tokens)
        cache = model.make_cache(12)
        parts, begin = [], 0
        for n in chunks:
            positions = torch.arange(begin, begin + n)[None]
            parts.append(model(tokens[:, begin : begin + n], positions=positions, cache=cache))
            begin += n
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_ragged_batch_equals_each_prompt_alone(model, temperature, monkeypatch):
    together = generate(model, PROMPTS, 20, temperature=temperature, seed=4)
    assert [len(row) for row in together] == [20] * 4
    monkeypatch.setattr(generate_module, "PREFILL_CHUNK", 3)  # prompts read in pieces, some of them all padding
    assert generate(model, PROMPTS, 20, temperature=temperature, seed=4) == together
    own_stream = generate_module.row_generator
    for row, prompt in enumerate(PROMPTS):
        monkeypatch.setattr(generate_module, "row_generator", lambda seed, _, device, row=row: own_stream(seed, row, device))
        assert generate(model, [prompt], 20, temperature=temperature, seed=4) == [together[row]]


def test_greedy_is_the_argmax_of_a_full_forward(model):
    (new,) = generate(model, [PROMPTS[0]], 20, temperature=0)
    assert model(torch.tensor([PROMPTS[0] + new]))[0, 5:-1].argmax(-1).tolist() == new


def test_top_k_1_and_tiny_top_p_are_greedy(model):
    greedy = generate(model, PROMPTS, 16, temperature=0)
    assert generate(model, PROMPTS, 16, temperature=1.5, top_k=1, seed=3) == greedy
    assert generate(model, PROMPTS, 16, temperature=1.5, top_p=1e-6, seed=3) == greedy
    assert generate(model, PROMPTS, 16, temperature=1.5, seed=3) != greedy


@pytest.mark.parametrize("temperature, report", [(0.7, 0.7), (1.0, 1.0), (0, 1.0)])
def test_logprobs_equal_a_full_forward(model, temperature, report):
    new, logprobs = generate(model, PROMPTS, 20, temperature=temperature, seed=2, logprobs=True)
    for prompt, ids, values in zip(PROMPTS, new, logprobs):
        assert (full_logprobs(model, prompt, ids, report) - torch.tensor(values)).abs().max() < 1e-4


def test_seeds(model):
    first = generate(model, [[7]] * 3, 16, seed=1)
    assert generate(model, [[7]] * 3, 16, seed=1) == first
    assert generate(model, [[7]] * 3, 16, seed=2) != first
    assert first[0] != first[1] != first[2]  # one prompt, three samples
    assert generate(model, [[7]], 16, seed=1) == first[:1]


def test_samples_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -50.0]]).repeat(4000, 1)
    generators = [generate_module.row_generator(0, row, "cpu") for row in range(4000)]
    for temperature, top_k, top_p in [(1.0, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.7)]:
        tokens, logprobs = sample(logits, generators, temperature, top_k, top_p)
        wanted = truncate(logits[:1] / temperature, top_k, top_p).softmax(-1)[0]
        assert (tokens.bincount(minlength=5) / 4000 - wanted).abs().max() < 0.03  # 0.008 is one standard deviation
        assert torch.equal(logprobs, (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0])


def test_truncate():
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log()
    kept = lambda k, p: truncate(logits, k, p).isfinite()[0].tolist()  # noqa: E731
    assert kept(2, 1.0) == [True, False, True, False]
    assert kept(0, 0.5) == [True, False, False, False]
    assert kept(0, 0.6) == [True, False, True, False]
    assert kept(2, 0.95) == [True, False, True, False]
    assert kept(9, 0.999) == [True] * 4


def test_rows_end_at_eot_and_the_loop_ends_with_the_last_row(model):
    greedy = generate(model, PROMPTS, 20, temperature=0)
    eot = greedy[0][4]
    forwards, stop = [], {}
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    heard = {row: [] for row in range(4)}
    new = generate(model, PROMPTS, 20, temperature=0, eot=eot, stream=lambda row, token: heard[row].append(token))
    for row, ids in enumerate(greedy):
        stop[row] = ids.index(eot) + 1 if eot in ids else 20
        assert new[row] == ids[: stop[row]]
    assert stop[0] <= 5 and list(heard.values()) == new
    assert len(forwards) == max(stop.values())
    forwards.clear()
    generate(model, PROMPTS[:1], 20, temperature=0, eot=eot)
    hook.remove()
    assert len(forwards) == stop[0]  # one prefill, then one for every token but the last


@pytest.mark.parametrize("prompts, options, message", [
    ([], {}, "no prompts"),
    ([[1], []], {}, "prompt 1 is empty"),
    ([[1, 97]], {}, "prompt 0 has token id 97, but vocab_size is 97"),
    ([[-1]], {}, "token id -1"),
    ([[1] * 60], {}, "60 tokens and 5 new ones make 65, the model's max_seq_len is 64"),
    ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
    ([[1]], {"temperature": -1}, "temperature is -1"),
    ([[1]], {"top_k": -1}, "top_k is -1"),
    ([[1]], {"top_p": 0}, "top_p is 0"),
])
def test_errors(model, prompts, options, message):
    with pytest.raises(ValueError, match=message) as error:
        generate(model, prompts, **{"max_new_tokens": 5} | options)
    assert "\n" not in str(error.value)
