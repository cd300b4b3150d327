"""Tokens that only the files beside tokenizer.json name. Only folders with such files load this
file."""

from contextlib import suppress

from corpus.beside import STANDARD, read_beside, read_special_tokens, special_files, text_of_token
from flags.files import read_json

# of an AddedToken
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def add_tokens_beside(tokenizer, folder: str) -> None:
    """Adds the tokens that tokenizer_config.json or special_tokens_map.json name, and tokenizer.json
    lacks, as transformers adds them: otherwise <|im_end|> would be eight tokens. Raises ValueError
    where the two files give a token different ids."""
    from tokenizers import AddedToken

    is_older = "added_tokens_decoder" not in read_beside(folder, "tokenizer_config.json")
    file = f"{folder}/tokenizer_config.json"
    key = "added_tokens_decoder"
    if is_older:
        file = f"{folder}/added_tokens.json"
        key = "added_tokens.json"
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for number, fields in listed_tokens(folder).items():
        content = fields["content"]
        there = tokenizer.token_to_id(content)
        other = tokenizer.id_to_token(number)
        if there not in (None, number) or other not in (None, content):
            raise ValueError(
                f"{file} says that id {number} is {content!r}, but in tokenizer.json "
                f"{content!r} is {there} and {number} is {other!r}; correct {key}"
            )
        token = AddedToken(**fields)
        if content in known and is_older:
            continue  # added_tokens.json tells no flags
        if content in known:
            # tokenizer.json decides whether a token counts as special
            token.special = known[content].special
            if all(getattr(token, flag) == getattr(known[content], flag) for flag in FLAGS):
                continue
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(content) != number:
            raise ValueError(
                f"{file} says that {content!r} is id {number}, but tokenizer.json ends before: it "
                f"would be id {tokenizer.token_to_id(content)}; name the ids between in "
                f"{key}"
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for content in named_tokens(folder):
        if content in known:
            continue
        # A padding token often has no row in the model. In transformers the token gets an id, and
        # the model crashes at the id; here the token stays text.
        rows = rows_in_model(folder)
        if tokenizer.token_to_id(content) is None and rows is not None:
            if max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1 >= rows:
                continue
        tokenizer.add_tokens([AddedToken(content, special=True)])
        known.add(content)


def listed_tokens(folder: str) -> dict[int, dict]:
    """{id: AddedToken's fields} of added_tokens_decoder in tokenizer_config.json, or, without one, of
    added_tokens.json, its older form. Raises ValueError."""
    config = read_beside(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        return older_tokens(folder)
    listed = config["added_tokens_decoder"] or {}
    found = {}
    try:
        for key, token in listed.items():
            fields = {name: token[name] for name in (*FLAGS, "special") if name in token}
            if not isinstance(token["content"], str) or not token["content"]:
                raise TypeError("a content is no text")
            for name in fields:
                if not isinstance(fields[name], bool):
                    raise TypeError(f"{name} is no truth value")
            found[int(key)] = {"content": token["content"], **fields}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}/tokenizer_config.json: added_tokens_decoder must be {{id: token}} ({error!r})"
        ) from None
    return dict(sorted(found.items()))


def older_tokens(folder: str) -> dict[int, dict]:
    """{id: AddedToken's fields} of added_tokens.json, which holds {text: id}. As in transformers a
    token is special if another file names the token. Raises ValueError."""
    named = named_tokens(folder)
    found = {}
    for content, number in read_beside(folder, "added_tokens.json").items():
        if type(number) is not int or number < 0 or not content:
            raise ValueError(f"{folder}/added_tokens.json must be {{token: id}}, not {content!r}")
        is_special = content in named
        found[number] = {
            "content": content,
            "special": is_special,
            "normalized": not is_special,
        }
    return dict(sorted(found.items()))


def named_tokens(folder: str) -> list[str]:
    """The texts of the special tokens that the files beside tokenizer.json name without an id: eos,
    pad and others, then additional_special_tokens. In the order of transformers."""
    names = read_special_tokens(folder)
    found = [names[f"{name}_token"] for name in STANDARD if f"{name}_token" in names]
    for file in special_files(folder):
        content = read_beside(folder, file)
        for key in ("additional_special_tokens", "extra_special_tokens"):
            others = content.get(key) or []
            if isinstance(others, dict):
                others = list(others.values())
            if not isinstance(others, list):
                raise ValueError(f"{folder}/{file}: {key} must be a list of tokens, not {others!r}")
            found += [text for text in map(text_of_token, others) if text]
    return list(dict.fromkeys(found))


def rows_in_model(folder: str) -> int | None:
    """The number of ids that the model of a folder knows: of Hugging Face, of token shards, or a step
    of ours. None if no file has the number."""
    for name in ("state.json", "index.json", "config.json"):
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            content = read_json(folder, name)
            if name == "state.json":
                content = content["identity"]["model"]
            return int(content["vocab_size"])
    return None
