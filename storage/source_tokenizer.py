"""The tokenizer and its special ids, of a run, a step folder or a Hugging Face folder.

--init_from weights need data tokenized with the tokenizer of their training, or with an equal one:
check_tokenizer in storage/other_tokenizer.py.
"""

import os
from pathlib import Path

from corpus.beside import BESIDE, has_files_beside, read_beside
from corpus.cache import parse_mixture
from corpus.shards import MASKED, is_shards, read_index
from corpus.special import EOT_NAMES, NoEnds, SpecialIds, TextSource, special_ids
from flags.files import matches, read_json
from storage.newest import (
    ABOUT,
    ADAPTER,
    Source,
    is_hf_folder,
    newest_readable,
    resume_source,
    saved_state,
)


def weights_folder(folder: str) -> str:
    """The Hugging Face folder of the weights: for a PEFT adapter its base, named in
    adapter_config.json. Raises ValueError."""
    base = read_beside(folder, ADAPTER).get("base_model_name_or_path", folder)
    if base != folder and not (
        isinstance(base, str) and is_hf_folder(base) and not read_beside(base, ADAPTER)
    ):
        raise ValueError(
            f"{folder}/{ADAPTER}: base_model_name_or_path is {base!r}, which is no folder of "
            "weights here; write "
            "the base's folder there, or put it in that place: hf download MODEL --local-dir MODEL"
        )
    return base


def text_folder(folder: str) -> str:
    """The folder with the tokenizer of a run, step or Hugging Face folder: the newest step of a
    run, and the base of a PEFT adapter that has no tokenizer.json itself."""
    if not is_hf_folder(folder):
        return newest_readable(folder)
    return (
        folder
        if os.path.lexists(os.path.join(folder, "tokenizer.json"))
        else weights_folder(folder)
    )


def is_ours(folder: str) -> bool:
    """Whether the special ids of a folder with tokenizer.json were learnt from nothing: not in a
    Hugging Face folder, and not in a step of a run that began from one."""
    if os.path.lexists(os.path.join(folder, "manifest.json")):
        return not saved_state(folder).get("bos")
    return not is_hf_folder(folder)


def ids_of_folder(folder: str) -> SpecialIds:
    """The ids that begin, end and pad a text, of a folder with tokenizer.json: of Hugging Face, of
    token shards, or a step of ours. Raises ValueError if nothing names an end."""
    return special_ids(folder, is_ours(folder))


def ends_of(folder: str) -> list[int]:
    """The ids that end a text, of a folder with tokenizer.json; at least one. Raises ValueError."""
    return ids_of_folder(folder).ends


def has_bos(folder: str) -> bool:
    """Whether texts begin with what the tokenizer puts before them, such as <s>: for models from
    Hugging Face folders, and for runs from them. Our own training text has no such token."""
    if is_hf_folder(folder):
        return True
    return bool(saved_state(newest_readable(folder, names=ABOUT)).get("bos"))


def begins_as_folder(out: str, source: Source | None, init_from: str, new_ids: bool) -> bool:
    """has_bos() of the weights that a run starts from; False if there are none, and for ids
    that are learnt anew. A run keeps what it began with. source: of resume_source; new_ids: of
    has_new_ids."""
    if source:
        try:
            path = newest_readable(source.folder, source.step, ABOUT)
        except ValueError:
            return False  # all are damaged: Checkpoints.load() refuses, and says so
        begins = bool(saved_state(path).get("bos"))
    else:
        begins = is_hf_folder(init_from)
    is_continued = source is not None and source.folder == out
    return begins and (is_continued or not new_ids)


def folder_of_ids(out: str, source: Source | None, init_from: str, new_ids: bool) -> str:
    """The folder whose special ids a run takes over: the newest step that it continues, or the
    folder of --init_from. "" if its ids are learnt anew, or if that folder has no tokenizer.json."""
    if source and source.folder == out:
        folder = newest_readable(out, source.step, (*ABOUT, "tokenizer.json", *BESIDE))
    elif init_from and not new_ids:
        folder = text_folder(init_from)
    else:
        return ""
    has_tokenizer = os.path.lexists(os.path.join(folder, "tokenizer.json"))
    return folder if has_tokenizer else ""


def generation_of_run(
    folder: str, tokenizer_file: str, learnt: list[int] | None
) -> tuple[dict | None, list[int]]:
    """(what generation_config.json of a run's steps and of its export holds, the ends that are new).

    A run from a folder keeps the folder's beginning, ends and padding, and what its data taught ends
    a text, too. folder: of folder_of_ids. learnt: the ends in the data; None: the token between the
    documents of its shards. (None, []) for a run from nothing whose tokenizer tells all."""
    shards = os.path.dirname(tokenizer_file)
    if learnt is None:
        learnt = []
        if is_shards(shards):
            index = read_index(Path(shards))
            learnt = [] if index["version"] == MASKED else [index["eot"]]
    if not folder and tells_all(shards, learnt):
        return None, []
    try:
        ids = ids_of_folder(folder or shards)
    except NoEnds:
        ids = SpecialIds(None, [], None)
    new = [i for i in learnt if i not in ids.ends]
    known = read_beside(folder or shards, "generation_config.json")
    if not new and not (folder and (known or not is_ours(folder))):
        return None, []
    return known | ids._replace(ends=ids.ends + new).for_config(), new


def ids_of_run(
    out: str,
    init_from: str,
    load_step: int,
    new_ids: bool,
    tokenizer_file: str | None,
    learnt: list[int] | None,
) -> tuple[bool, dict | None, list[int]]:
    """(begins_as_folder(), *generation_of_run()) for the checkpoints of a run. Says nothing of damaged
    checkpoints: load() refuses them."""
    try:
        source = resume_source(out, init_from, load_step)
        begins = begins_as_folder(out, source, init_from, new_ids)
        if tokenizer_file is None:
            return begins, None, []
        folder = folder_of_ids(out, source, init_from, new_ids)
        return begins, *generation_of_run(folder, tokenizer_file, learnt)
    except ValueError:
        return False, None, []


def tells_all(folder: str, ends: list[int]) -> bool:
    """Whether a tokenizer.json alone shows that these ends are the usual one: such a run starts
    without the library of tokenizers, whose import takes a while."""
    if has_files_beside(folder):
        return False
    added = read_json(folder, "tokenizer.json").get("added_tokens") or []
    ids = {token["content"]: token["id"] for token in added}
    usual = [ids[name] for name in EOT_NAMES if name in ids]
    return usual[:1] == ends


def source_tokenizer(
    data: str,
    tokenizer: str,
    out: str,
    init_from: str,
    load_step: int,
    exclude_from_loading: list[str],
) -> TextSource:
    """The tokenizer.json of --init_from, the default for text, and whether texts begin as in that
    folder. The folder is "" if --tokenizer names one, or if no text is tokenized. The parameters
    are the flags of these names.

    A run with checkpoints takes the tokenizer from the newest checkpoint: the --init_from folder
    may be gone by now. Raises ValueError.
    """
    is_text = not all(is_shards(part.path) for part in parse_mixture(data))
    if not init_from or not is_text:
        return TextSource()
    source = resume_source(out, init_from, load_step)
    new_ids = has_new_ids(exclude_from_loading)
    begins = begins_as_folder(out, source, init_from, new_ids)
    if tokenizer or new_ids:
        return TextSource("", begins)
    if source:
        names = (*ABOUT, "tokenizer.json", *BESIDE)
        folder = newest_readable(source.folder, source.step, names)
    else:
        folder = text_folder(init_from)
    file = os.path.join(folder, "tokenizer.json")
    if not os.path.lexists(file):
        from flags.hints import tokenizer_hint

        raise ValueError(
            f"{file} is missing: give the tokenizer of these weights with --tokenizer"
            + tokenizer_hint(folder)
        )
    return TextSource(folder, begins)


def has_new_ids(exclude_from_loading: list[str]) -> bool:
    """Whether the embedding starts at random: then no id has a meaning yet, and any tokenizer will
    do."""
    return matches(
        [name.removeprefix("model.") for name in exclude_from_loading],
        "model.tok_embeddings.weight",
    )
