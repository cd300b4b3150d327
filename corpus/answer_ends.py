"""Which token ends an answer: what a model learns from conversations about when to stop.

After an answer a template writes <|im_end|>, and a base model that learns the token has to stop at
the token: in generation, in evaluation, and in the export. A template that ends answers with plain
text teaches no end at all, and the loss does not show the mistake.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus.chat import chat_tokenizer
from corpus.shards import FIRST, LOSS
from corpus.special import NoEnds, special_ids

BLANKS = 8  # at most so many blank tokens, like a new line, come after the end of an answer


class AnswerEnds(NamedTuple):
    """What ends the answers of some conversations."""

    ends: list[int]  # ids that end an answer, the most frequent first
    n_answers: int  # last answers, one of each conversation with an answer
    n_open: int  # of them without an end
    example: str  # the text around the last trained token of such an answer


def span_ends(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places of the last trained token of each answer; whether the answer is the last of the
    conversation). mask: of a shard."""
    has_loss = mask & LOSS > 0
    begins = mask & FIRST > 0
    goes_on = np.append(has_loss[1:] & ~begins[1:], False)
    places = np.flatnonzero(has_loss & ~goes_on)
    conversation = np.cumsum(begins)[places]
    is_last = np.append(conversation[1:] != conversation[:-1], True)[: len(places)]
    return places, is_last


def is_blank(tokens: np.ndarray, tokenizer) -> np.ndarray:
    """Whether each token is no more than blanks, and no marker."""
    ids, places = np.unique(tokens, return_inverse=True)
    markers = tokenizer.get_added_tokens_decoder()
    blank = [i not in markers and not tokenizer.decode([i]).strip() for i in ids.tolist()]
    return np.array(blank, bool)[places]


def before_blanks(
    tokens: np.ndarray, mask: np.ndarray, places: np.ndarray, tokenizer
) -> np.ndarray:
    """The places, moved back over blank tokens with a loss: a new line often follows the end."""
    places = places.copy()
    for _ in range(BLANKS):
        back = is_blank(tokens[places], tokenizer) & (places > 0)
        back &= mask[places - 1] & LOSS > 0
        if not back.any():
            break
        places[back] -= 1
    return places


def show_end(tokens: np.ndarray, mask: np.ndarray, place: int, tokenizer) -> str:
    """The text before and after the last trained token of an answer, within its conversation."""
    rest = np.flatnonzero(mask[place + 1 :] & FIRST)
    n_after = 6
    if len(rest):
        n_after = min(rest[0], 6)
    before = tokens[max(0, place - 15) : place + 1].tolist()
    behind = tokens[place + 1 : place + 1 + n_after].tolist()
    said = tokenizer.decode(before, skip_special_tokens=False)
    after = tokenizer.decode(behind, skip_special_tokens=False)
    if after:
        return f"{said!r}, and without a loss {after!r}"
    return repr(said)


def find_ends(shards: list[tuple[np.ndarray, np.ndarray]], tokenizer_file: Path) -> AnswerEnds:
    """What ends the answers. shards: (tokens, mask) of each.

    An end comes after the last answer of a conversation: a marker, such as the token <|im_end|>, or
    an id that the folder calls an end. If all ends were known before, nothing is new, and the ends
    of earlier answers do not count: gpt-oss writes <|end|> after an earlier answer, and also after
    thoughts. Else a marker after any answer is an end, if the marker is rare inside of answers.
    """
    tokenizer = chat_tokenizer(tokenizer_file)
    try:
        known = set(special_ids(str(tokenizer_file.parent)).ends)
    except NoEnds:
        known = set()
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    known = {i for i in known if i < size}
    markers = known | tokenizer.get_added_tokens_decoder().keys()
    # how often each id ends a conversation, ends an earlier answer, is trained at all
    last = np.zeros(size, np.int64)
    other = np.zeros(size, np.int64)
    trained = np.zeros(size, np.int64)
    example = ""
    for tokens, mask in shards:
        tokens = np.asarray(tokens)
        mask = np.asarray(mask)
        places, is_last = span_ends(mask)
        if not len(places):
            continue
        places = before_blanks(tokens, mask, places, tokenizer)
        final = tokens[places[is_last]]
        last += np.bincount(final, minlength=size)
        other += np.bincount(tokens[places[~is_last]], minlength=size)
        trained += np.bincount(tokens[mask & LOSS > 0], minlength=size)
        is_open = ~np.isin(final, list(markers))
        if is_open.any() and not example:
            example = show_end(tokens, mask, places[is_last][is_open][0], tokenizer)
    n_answers = int(last.sum())
    n_open = n_answers - int(last[list(markers)].sum())
    inside = trained - last - other
    found = [i for i in np.argsort(-last, kind="stable").tolist() if last[i] and i in markers]
    found = [i for i in found if i in known or last[i] + other[i] > 10 * inside[i]]
    if not known >= set(found):
        more = [i for i in np.flatnonzero(other).tolist() if i in markers and i not in found]
        found += [i for i in more if i in known or other[i] > 10 * inside[i]]
    return AnswerEnds(found, n_answers, n_open, example)
