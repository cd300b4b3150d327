"""Text from a trained model: batched generation with a KV cache, and a command line to sample from
any checkpoint.

    python generate.py --checkpoint runs/llama3 --prompt "def "
    python generate.py --checkpoint runs/llama3/checkpoints/step-300 --prompt "class " --prompt "import " --temperature 0
    python generate.py --checkpoint runs/llama3 --prompt "for i in" --top_k 50 --top_p 0.9 --seed 7
    python generate.py --checkpoint HUGGING_FACE_FOLDER --prompt "Who are you?" --chat
"""

import flags.interrupt  # noqa: F401  Ctrl-C ends in one line, from here on

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from corpus.special import NoEnds, ids_of
from corpus.tokenizer import ChatConfig, load_tokenizer
from distributed.refusals import refuse
from flags.config import Parser, parse_config, usage_error
from flags.files import printable, read_json, step_folders
from rl.decoding import draw_noise, rollout
from storage.newest import is_hf_folder
from storage.saved import load_model
from storage.source_tokenizer import ends_of, has_bos, text_folder


def check_request(
    config: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """Raise ValueError, one line, for requests that the model cannot serve."""
    rules = [
        (not prompts, "no prompts: give a list with at least one list of token ids"),
        (max_new_tokens < 1, f"max_new_tokens is {max_new_tokens}, needs to be at least 1"),
        (
            temperature < 0,
            f"temperature is {temperature}, needs to be 0 (always the likeliest token) or more",
        ),
        (top_k < 0, f"top_k is {top_k}, needs to be 0 (all tokens) or more"),
        (not 0 < top_p <= 1, f"top_p is {top_p}, needs to be above 0 and at most 1 (all tokens)"),
    ]
    for row, prompt in enumerate(prompts):
        n = len(prompt)
        bad = next((t for t in prompt if not 0 <= t < config.vocab_size), None)
        rules += [
            (n == 0, f"prompt {row} is empty: a model continues text, give it at least one token"),
            (
                bad is not None,
                f"prompt {row} has token id {bad}, but vocab_size is {config.vocab_size}, wrong "
                "tokenizer?",
            ),
            (
                n + max_new_tokens > config.max_seq_len,
                f"prompt {row} has {n} tokens and {max_new_tokens} new ones make "
                f"{n + max_new_tokens}, the model's max_seq_len is "
                f"{config.max_seq_len}: shorten the prompt or lower max_new_tokens",
            ),
        ]
    refuse(rules)


def generate(
    model: nn.Module,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eot: int | list[int] | None = None,
    **of_rollout,
) -> list[list[int]]:
    """Continue each prompt (token ids, any lengths) by up to max_new_tokens; return a list of new
    ids per prompt.

    A row ends with its first `eot` (or any of several), included in the result. Temperature 0 takes
    the likeliest token. The text of a row depends on the model, its prompt, `seed` and its index,
    not on other rows (up to rounding). of_rollout: heard and ended, functions that rollout() calls
    meanwhile. Raises ValueError.
    """
    check_request(model.config, prompts, max_new_tokens, temperature, top_k, top_p)
    if eot is None:
        eot = []
    noise = draw_noise([f"{seed}/{row}" for row in range(len(prompts))], 1, max_new_tokens)
    max_len = max(map(len, prompts)) + max_new_tokens
    samples = rollout(
        model,
        prompts,
        noise,
        temperature,
        eot,
        max_len=max_len,
        top_k=top_k,
        top_p=top_p,
        **of_rollout,
    )
    return [s.ids for s in samples]


# ---------------------------------------------------------------- text
@dataclass(kw_only=True)
class Config(ChatConfig):
    # a run folder (its newest checkpoint), a checkpoints/step-N, or a Hugging Face folder
    checkpoint: str = "runs/llama3"
    # text to continue; give the flag several times for several texts in one batch
    prompt: str = "def "
    max_new_tokens: int = 200  # tokens to add, at most: a text may end before
    # below 1 plays safe, above 1 is bold, 0 always takes the likeliest token
    temperature: float = 0.8
    top_k: int = 0  # choose among this many likeliest tokens only; 0 = all
    top_p: float = 1.0  # choose among the likeliest tokens with this probability together; 1 = all
    seed: int = 0  # another seed is another sample
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = a GPU, else the CPU


def check_weights(model: nn.Module, folder: str) -> None:
    """Raises ValueError for weights that are NaN or infinite: words would come out all the same."""
    for fqn, p in model.named_parameters():
        if not p.isfinite().all():
            raise ValueError(f"{folder}: {fqn} is NaN or infinite: nothing can be computed with it")


def open_checkpoint(folder: str, device: str = "cpu") -> tuple[nn.Module, Any, list[int]]:
    """(model, tokenizer, ids that end a text) of a run, step or Hugging Face folder. Raises
    ValueError."""
    load = load_model
    if is_hf_folder(folder):
        from storage.hf import load_hf_model as load
    dtype = None
    if torch.device(device).type == "cuda":
        dtype = torch.bfloat16  # each new token reads all weights: half the bytes, twice the speed
    model, _ = load(folder, device, dtype)
    check_weights(model, folder)
    path = text_folder(folder)
    if not os.path.isfile(os.path.join(path, "tokenizer.json")):
        raise ValueError(no_tokenizer(folder, path))
    try:
        ends = ends_of(path)
    except NoEnds:
        ends = []  # no known end-of-text token: texts run on to max_new_tokens
    return model, load_tokenizer(Path(path, "tokenizer.json")), ends


def no_tokenizer(folder: str, path: str) -> str:
    """The error for weights without tokenizer.json. path: where it should be."""
    if is_hf_folder(folder):
        from flags.hints import tokenizer_hint

        return f"{path} has no tokenizer.json{tokenizer_hint(path) or ': put one there'}"
    return (
        f"{folder} has no tokenizer.json, its data came without one: call generate.generate with "
        "token ids"
    )


def new_text(tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of new ids after a prompt. Many tokenizers strip the space at the beginning of a
    text, so the new ids are not decoded alone."""
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode(prompt + ids)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(ids)


def continue_texts(
    model: nn.Module,
    tokenizer,
    ends: list[int],
    texts: list[str],
    max_new_tokens: int,
    bos: bool = False,
    chat=None,
    stream=None,
    **options: Any,
) -> list[str]:
    """The model's continuation of each text.

    bos: begin each text with what the tokenizer puts before a text; False, because our training text
    has no such token. chat: from open_chat(); the texts are questions then. stream: a Stream, which
    prints the continuations while they come.
    """
    prompts = texts
    if chat:
        prompts = [chat(text) for text in texts]
    # markers in a template are tokens, in other texts plain text
    tokenizer.encode_special_tokens = chat is None
    # an empty text begins a document, after the end of another
    prompts = [ids_of(tokenizer, text, bos and not chat) or ends[:1] for text in prompts]

    def said(row: int, ids: list[int]) -> str:
        if chat:  # an answer is a text of its own
            return printable(tokenizer.decode(ids))
        return printable(new_text(tokenizer, prompts[row], ids))

    if stream:
        stream.said = said
        options |= dict(heard=stream.print_new, ended=stream.end_row)
    found = generate(model, prompts, max_new_tokens, eot=ends, **options)
    return [said(row, ids) for row, ids in enumerate(found)]


def print_sample(run: str, n_params: int, data: Any = None) -> None:
    """Print a sample of a run's newest checkpoint, after the first words of its data
    (data.TokenData) or "def ". The run is finished and saved, so an error must not fail the run: we
    print the error."""
    try:
        prompt = "def "
        if data is not None and data.tokenizer_file:
            prompt = data.first_words()
        # conversations: the first words are a question, asked in the chat template
        is_chat = hasattr(data, "packing")
        command = (
            f"python generate.py --checkpoint {shlex.quote(run)} --prompt {shlex.quote(prompt)}"
        )
        if is_chat:
            command += " --chat"
        if n_params > 2e9:
            # loading a model of this size would keep all devices waiting
            print(f"for a sample: {command}")
            return
        model, tokenizer, ends = open_checkpoint(run, device_of("auto"))
        # not longer than what the run was trained on
        chat = None
        length = min(120, read_json(run, "config.json")["seq_len"] // 2)
        if is_chat:
            from storage.prompt import open_chat

            chat = open_chat(run, ChatConfig(chat=True))
        options = dict(bos=has_bos(run), chat=chat, temperature=0.8, top_p=0.95)
        head = prompt
        if is_chat:
            head = f"{prompt}\n\n"
        stream = None
        if sys.stdout.isatty():  # the text is seen as it grows
            from flags.progress import Stream

            stream = Stream([head])
        # before the sampling, which takes a while
        print(
            f"checkpoint: {step_folders(run)[0][1]}\nsample (for others: {command}):\n", flush=True
        )
        found = continue_texts(model, tokenizer, ends, [prompt], length, stream=stream, **options)
        if stream:
            stream.close(found)
        else:
            print(f"{head}{found[0]}", flush=True)
    except Exception as error:
        print(f"no sample: {error}", flush=True)


def device_of(flag: str) -> str:
    """--device; auto is a GPU, else the CPU."""
    if flag != "auto":
        return flag
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def main(argv: list[str]) -> None:
    # --prompt alone may be repeated, and its text may contain commas
    repeated = Parser(add_help=False)
    repeated.add_argument("--prompt", action="append")
    given, rest = repeated.parse_known_args(argv)
    cfg = parse_config(Config, rest)
    texts = given.prompt or [cfg.prompt]
    options = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, seed=cfg.seed)
    device = device_of(cfg.device)
    try:
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU here; use --device cpu")
        from flags.progress import Stream
        from storage.prompt import open_chat

        options |= dict(bos=has_bos(cfg.checkpoint), chat=open_chat(cfg.checkpoint, cfg))
        parts = open_checkpoint(cfg.checkpoint, device)
        heads = []
        for text in texts:
            head = ""
            if len(texts) > 1:
                head = f"--- {text!r}\n"
            if not cfg.chat:
                head += text
            heads.append(head)
        stream = Stream(heads, grows=sys.stdout.isatty())
        found = continue_texts(*parts, texts, cfg.max_new_tokens, stream=stream, **options)
        stream.close(found)
    except BrokenPipeError:
        # `generate.py ... | head` has seen enough, and Python would complain once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        usage_error(error)


if __name__ == "__main__":
    main(sys.argv[1:])
