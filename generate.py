"""Text out of a trained model: batched generation with a KV cache, and a command line to sample from any checkpoint.

    python generate.py --checkpoint runs/llama3 --prompt "def "
    python generate.py --checkpoint runs/llama3/checkpoints/step-300 --prompt "class " --prompt "import " --temperature 0
    python generate.py --checkpoint runs/llama3 --prompt "for i in" --top_k 50 --top_p 0.9 --seed 7
    python generate.py --checkpoint HUGGING_FACE_FOLDER --prompt "Who are you?" --chat

B batch (prompts), T tokens, V vocab
"""
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from checkpoint import load_model, step_folders
from config import Parser, parse_config, usage_error
from data import find_tokenizer, load_tokenizer
from hf import is_hf_folder, load_hf_model, read_chat

PREFILL_CHUNK = 512  # prompt tokens per forward: logits of a whole long prompt are B*T*V numbers that nobody reads


def check_request(config, prompts, max_new_tokens, temperature, top_k, top_p):
    """Raise ValueError, one line, for what the model cannot generate."""
    if not prompts:
        raise ValueError("no prompts: give a list with at least one list of token ids")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: a model continues text, give it at least one token")
        if bad := [t for t in prompt if not 0 <= t < config.vocab_size]:
            raise ValueError(f"prompt {row} has token id {bad[0]}, but vocab_size is {config.vocab_size}, wrong tokenizer?")
        if len(prompt) + max_new_tokens > config.max_seq_len:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens and {max_new_tokens} new ones make {len(prompt) + max_new_tokens}, "
                f"the model's max_seq_len is {config.max_seq_len}: shorten the prompt or lower max_new_tokens"
            )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, needs to be at least 1")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}, needs to be 0 (always the likeliest token) or more")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}, needs to be 0 (all tokens) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}, needs to be above 0 and at most 1 (all tokens)")


def row_generator(seed: int, row: int, device) -> torch.Generator:
    """Each row draws from a stream of its own, so that a sample does not depend on its neighbours in the batch.

    Hashed, so that (seed 0, row 1) and (seed 1, row 0) are not one stream.
    """
    digest = hashlib.sha256(f"{seed}/{row}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """logits (B, V) with -inf for all but the top_k likeliest tokens and the fewest that reach probability top_p."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    drop = torch.zeros_like(ranked, dtype=torch.bool)
    if top_k > 0:
        drop[:, top_k:] = True
    if top_p < 1:
        p = ranked.softmax(dim=-1)
        drop |= p.cumsum(dim=-1) - p >= top_p  # what comes before is already enough; never true of the first
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def sample(logits: Tensor, generators, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """logits (B, V) -> next tokens (B,) and their log-probabilities (B,) in fp32.

    The log-probability is that at the temperature, before top_k and top_p cut anything: the one that a training forward
    over the same tokens gives. Greedy (temperature 0) reports it at temperature 1.
    """
    logits = logits.float() / (temperature or 1.0)
    logprobs = logits.log_softmax(dim=-1)
    if temperature > 0:
        if top_k > 0 or top_p < 1:
            logits = truncate(logits, top_k, top_p)
        # argmax(logits + Gumbel noise) is a draw from softmax(logits), without a sum over V that would round it
        waits = torch.stack([torch.empty_like(logits[0]).exponential_(generator=g) for g in generators])
        logits = logits - waits.log()
    token = logits.argmax(dim=-1)
    return token, logprobs.gather(-1, token[:, None])[:, 0]


@torch.no_grad()
def generate(
    model, prompts: list[list[int]], max_new_tokens: int, temperature=1.0, top_k=0, top_p=1.0, seed=0,
    eot: int | None = None, stream=None, logprobs=False,
):
    """Continue each prompt (token ids, any lengths) by up to max_new_tokens; return one list of new ids per prompt.

    A row ends with its first `eot`, which is part of the result. Temperature 0 takes the likeliest token. What a row gets
    depends on the model, its prompt, `seed` and its index, not on the rest of the batch (up to rounding). stream(row, id)
    is called for every new token. With logprobs=True returns (ids, logprobs), see sample(). Raises ValueError.
    """
    check_request(model.config, prompts, max_new_tokens, temperature, top_k, top_p)
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    # Padding goes to the left: the last column is then every row's last token, and new tokens are one column for all.
    tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)  # (B, T)
    lengths = torch.tensor([len(p) for p in prompts], device=device)  # (B,)
    start = longest - lengths
    positions = (torch.arange(longest, device=device) - start[:, None]).clamp(min=0)  # (B, T), 0 at the first real token
    cache = model.make_cache(longest + max_new_tokens, start)
    for begin in range(0, longest, PREFILL_CHUNK):
        part = slice(begin, begin + PREFILL_CHUNK)
        logits = model(tokens[:, part], positions=positions[:, part], cache=cache)[:, -1]  # (B, V)

    generators = [row_generator(seed, row, device) for row in range(len(prompts))]
    new_ids, new_logprobs = [[] for _ in prompts], [[] for _ in prompts]
    running = set(range(len(prompts)))
    for n in range(max_new_tokens):
        token, logprob = sample(logits, generators, temperature, top_k, top_p)  # (B,), (B,)
        ids, values = token.tolist(), logprob.tolist()
        for row in sorted(running):
            new_ids[row].append(ids[row])
            new_logprobs[row].append(values[row])
            if stream is not None:
                stream(row, ids[row])
            if ids[row] == eot:
                running.remove(row)
        if not running or n + 1 == max_new_tokens:
            break
        # rows that have ended go on in the batch, and nobody looks at what they say
        logits = model(token[:, None], positions=(lengths + n)[:, None], cache=cache)[:, -1]  # (B, V)
    return (new_ids, new_logprobs) if logprobs else new_ids


# ---------------------------------------------------------------- text


@dataclass(kw_only=True)
class Config:
    checkpoint: str = "runs/llama3"  # a run folder (its newest checkpoint), a checkpoints/step-N, or a Hugging Face folder
    prompt: str = "def "  # text to continue; give the flag several times for several texts in one batch
    max_new_tokens: int = 200  # tokens to add, at most: a text may end before
    temperature: float = 0.8  # below 1 plays safe, above 1 is bold, 0 always takes the likeliest token
    top_k: int = 0  # choose among this many likeliest tokens only; 0 = all
    top_p: float = 1.0  # choose among the likeliest tokens that together have this probability; 1 = all
    chat: bool = False  # the prompt is a question to a chat model: wrap it in the chat template of the Hugging Face folder
    seed: int = 0  # another seed is another sample
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = a GPU if there is one


def open_checkpoint(folder: str, device="cpu"):
    """(model, tokenizer, eot id or None) of a run folder, a step folder or a Hugging Face folder. Raises ValueError."""
    # bf16 on GPUs: every new token reads all weights once, so half the bytes is twice the speed
    load, eos = (load_hf_model, read_chat(folder)[1].get("eos_token", "")) if is_hf_folder(folder) else (load_model, "")
    model, _ = load(folder, device, torch.bfloat16 if torch.device(device).type == "cuda" else None)
    for path in [folder, *(path for _, path in step_folders(folder))]:
        if os.path.isfile(os.path.join(path, "tokenizer.json")):
            try:
                eot = find_tokenizer(path, eos)[1]
            except ValueError:
                eot = None  # no name that is known for it: texts run on to max_new_tokens
            return model, load_tokenizer(Path(path, "tokenizer.json")), eot
    raise ValueError(f"{folder} has no tokenizer.json, its data came without one: call generate.generate with token ids")


def chat_prompts(folder: str):
    """text -> the prompt with which a chat model is asked it, by the folder's chat template. Raises ValueError."""
    template, special_tokens = read_chat(folder) if is_hf_folder(folder) else (None, {})
    if template is None:
        raise ValueError(f"--chat: {folder} has no chat template (tokenizer_config.json, chat_template.jinja); leave it out")
    try:
        import jinja2.sandbox
    except ImportError:
        raise ValueError("--chat: chat templates are written in jinja2; pip install jinja2") from None

    def fail(message):
        raise jinja2.TemplateError(message)

    # A template is a program, and anyone may have written this one: the sandbox keeps it from Python's objects. The options
    # and names are those that transformers gives it.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals |= dict(raise_exception=fail, strftime_now=lambda text: datetime.now().strftime(text))

    def render(text: str) -> str:
        values = dict(messages=[{"role": "user", "content": text}], tools=None, documents=None, add_generation_prompt=True)
        try:
            return environment.from_string(template).render(**special_tokens, **values)
        except Exception as error:  # whatever the template makes Python raise
            raise ValueError(f"--chat: the chat template of {folder} fails: {error}") from None

    return render


class TextStream:
    """Text from ids one at a time. A character may span several tokens: what is not yet whole UTF-8 is held back."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.begin, self.shown = tokenizer, [], 0, 0

    def push(self, token: int | None) -> str:
        """What can be shown after one more token; None: there are no more, so show what was held back."""
        if token is not None:
            self.ids.append(token)
        # Decoded together with the piece before: some decoders drop the space that a text begins with.
        before = self.tokenizer.decode(self.ids[self.begin : self.shown])
        text = self.tokenizer.decode(self.ids[self.begin :])
        if text.endswith("\ufffd") and token is not None:
            return ""
        self.begin, self.shown = self.shown, len(self.ids)
        return text[len(before) :]


def encode(tokenizer, text: str, bos: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=bos).ids
    except BaseException as error:  # a regular expression of a stranger's tokenizer.json that gives up makes it panic
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer fails on {text[:40]!r}: {error}") from None


def continue_texts(
    model, tokenizer, eot, texts: list[str], max_new_tokens: int, show=None, bos=False, chat=None, **options
) -> list[str]:
    """What the model writes after each text. show(piece) gets the first text and what follows it, as it comes.

    bos: begin as the tokenizer says; False, because our training text has no beginning-of-text token. chat: from
    chat_prompts(); the texts are questions then, and show() gets the answer only.
    """
    prompts = [chat(text) for text in texts] if chat else texts
    tokenizer.encode_special_tokens = chat is None  # a template's markers are tokens; in any other text they are text
    # an empty text is the beginning of a document, which follows an eot
    prompts = [encode(tokenizer, text, bos and not chat) or [eot] * (eot is not None) for text in prompts]
    stream = TextStream(tokenizer)

    def on_token(row, token):
        if row == 0 and show is not None:
            show(stream.push(token) if stream.ids or chat else texts[0] + stream.push(token))

    new = generate(model, prompts, max_new_tokens, eot=eot, stream=on_token, **options)
    if show is not None:
        show(stream.push(None))
    return [tokenizer.decode(ids) for ids in new]


def print_sample(run: str, n_params: int, prompt="def ", max_new_tokens=120):
    """Show what the newest checkpoint of a run writes. The run is done and saved by now, so nothing here may fail it."""
    command = f'python generate.py --checkpoint {run} --prompt "{prompt}"'
    if n_params > 2e9:
        print(f"for a sample: {command}")  # loading it here would keep all devices waiting
        return
    try:
        model, tokenizer, eot = open_checkpoint(run, "cuda" if torch.cuda.is_available() else "cpu")
        max_new_tokens = min(max_new_tokens, model.config.max_seq_len // 2)
        (text,) = continue_texts(model, tokenizer, eot, [prompt], max_new_tokens, temperature=0.8, top_p=0.95)
        print(f"checkpoint: {step_folders(run)[0][1]}\nsample (for others: {command}):\n\n{prompt}{text}", flush=True)
    except Exception as error:
        print(f"no sample: {error}", flush=True)


def main(argv: list[str]):
    # --prompt is the one flag that may be repeated, and whose text may hold commas
    repeated = Parser(add_help=False)
    repeated.add_argument("--prompt", action="append")
    given, rest = repeated.parse_known_args(argv)
    cfg = parse_config(Config, rest)
    texts = given.prompt or [cfg.prompt]
    options = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, seed=cfg.seed)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
    try:
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU here; use --device cpu")
        options |= dict(bos=is_hf_folder(cfg.checkpoint), chat=chat_prompts(cfg.checkpoint) if cfg.chat else None)
        parts = open_checkpoint(cfg.checkpoint, device)
        if len(texts) == 1:
            continue_texts(*parts, texts, cfg.max_new_tokens, partial(print, end="", flush=True), **options)
            print()
        else:
            for text, new in zip(texts, continue_texts(*parts, texts, cfg.max_new_tokens, **options)):
                print(f"--- {text!r}\n{'' if cfg.chat else text}{new}\n")
    except ValueError as error:
        usage_error(error)


if __name__ == "__main__":
    main(sys.argv[1:])
