"""What --replay prints of a step: the sequences, documents, files and tokens with the largest part
of the loss and of the gradient."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from corpus.origins import Origin, Span, find_origin, spans_of
from corpus.tokenizer import load_tokenizer
from models.loss import IGNORE
from tools.parity.sequences import CLOSER, gradient_order

MOST = 12  # rows of a table
TOKENS = 10  # the most expensive tokens
EXCERPT = 60  # characters of a text


@dataclass
class Document:
    """A document, or its part in the sequences of a step."""

    origin: Origin
    tokens: int = 0  # with a loss
    loss: float = 0.0  # sum over its tokens, in nats
    text: str = ""
    products: list = field(default_factory=list)  # of its spans, with the gradient; None: not known


def print_replay(sequences: list, facts: SimpleNamespace, files: dict) -> None:
    """sequences: of replay.Sequence. facts: loss, square (of the gradient norm), tokens with a loss,
    seconds. files: of files_of_parts."""
    documents = defaultdict(list)  # {row: [(span, document)]}
    for sequence in sequences:
        for span in spans_of(sequence.data, sequence.window):
            paths = files[sequence.data.name]
            origin = find_origin(sequence.data, span, paths)
            documents[sequence.row].append((span, origin))
    loss = sum(sequence.part.loss for sequence in sequences)
    projected = sum(sequence.part.product for sequence in sequences)
    print(
        f"\n{len(sequences)} sequences, {facts.tokens:,} tokens with a loss, each sequence computed "
        f"alone in {facts.seconds:.0f} s. The losses add up to {percent(loss, facts.loss)} of the "
        f"step's loss, the gradients' projections on the step's gradient to "
        f"{percent(projected, facts.square)} of its norm."
    )
    print_sequences(sequences, facts, documents)
    if all(sequence.losses is None for sequence in sequences):
        print("\nThe loss of this recipe is no sum of cross-entropies: nothing is known of tokens.")
        return
    print_documents(sequences, facts, documents)
    print_tokens(sequences, documents)


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "- %"


def print_sequences(sequences: list, facts: SimpleNamespace, documents: dict) -> None:
    """A row for each sequence, the largest gradient first."""
    print("\nSequences, largest gradient norm first (cos: of the angle to the step's gradient)")
    print("  row    sample     loss  of loss  grad norm  of grad     cos  most of it is from")
    ordered = sorted(sequences, key=gradient_order)
    for sequence in ordered[:MOST]:
        tokens = int((sequence.labels != IGNORE).sum())
        mean = sequence.part.loss * facts.tokens / max(tokens, 1)
        norm = sequence.norm
        both = norm * math.sqrt(facts.square)
        cosine = sequence.part.product / both if both else 0.0
        print(
            f"{sequence.row:>5} {sequence.cursor:>9} {mean:>8.4f} "
            f"{percent(sequence.part.loss, facts.loss):>8} {norm:>10.4g} "
            f"{percent(sequence.part.product, facts.square):>8} {cosine:>7.3f}  "
            f"{most_of_it(sequence, documents[sequence.row])}"
        )
    rest = ordered[MOST:]
    if rest:
        print(f"  and {len(rest)} more, none with a gradient norm above {rest[0].norm:.4g}")


def most_of_it(sequence, spans: list[tuple[Span, Origin]]) -> str:
    """The document with the largest part of a sequence's loss, or of its tokens."""

    def weight(item):
        span, _ = item
        if sequence.losses is None:
            return span.end - span.start
        return np.nan_to_num(sequence.losses[span.start : span.end], nan=np.inf).sum()

    if not spans:
        return "padding"
    _, origin = max(spans, key=weight)
    others = len(spans) - 1
    if others > 1:
        return f"{origin.text}, and {others} other documents"
    if others == 1:
        return f"{origin.text}, and 1 other document"
    return origin.text


def print_documents(sequences: list, facts: SimpleNamespace, documents: dict) -> None:
    """Two tables: documents, and files, the largest part of the loss first."""
    found = {}
    files = {}
    for sequence in sequences:
        if sequence.losses is None:
            continue
        for span, origin in documents[sequence.row]:
            one = found.setdefault(origin, Document(origin))
            add_span(one, sequence, span)
            one.text = one.text or text_of_tokens(sequence, span.start, span.end)
            whole = files.setdefault(origin.file, Document(Origin(origin.file or "?", "")))
            add_span(whole, sequence, span)
    total = facts.loss * facts.tokens
    print(
        "\nDocuments, largest part of the loss first (of grad: known of the sequences with the "
        f"{CLOSER} largest gradients)"
    )
    print("  of loss  of grad  mean loss   tokens  document: text")
    print_rows(found, total, facts)
    if len(files) > 1:
        print("\nFiles, largest part of the loss first")
        print("  of loss  of grad  mean loss   tokens  file")
        print_rows(files, total, facts)


def add_span(document: Document, sequence, span: Span) -> None:
    document.tokens += int((sequence.labels[span.start : span.end] != IGNORE).sum())
    document.loss += float(sequence.losses[span.start : span.end].sum())
    part = sequence.documents.get(span)
    document.products.append(None if part is None else part.product)


def print_rows(found: dict, total: float, facts: SimpleNamespace) -> None:
    """total: the losses of all tokens."""
    ordered = sorted(found.values(), key=loss_order)
    for one in ordered[:MOST]:
        mean = one.loss / max(one.tokens, 1)
        text = f": {one.text}" if one.text else ""
        of_gradient = ""
        if None not in one.products:
            of_gradient = percent(sum(one.products), facts.square)
        print(
            f"{percent(one.loss, total):>9} {of_gradient:>8} {mean:>10.4f} {one.tokens:>8}  "
            f"{one.origin.text}{text}"
        )
    rest = ordered[MOST:]
    if rest:
        print(f"  and {len(rest)} more, together {percent(sum(x.loss for x in rest), total)}")


def loss_order(document: Document) -> tuple[bool, float]:
    return not math.isnan(document.loss), -document.loss


def print_tokens(sequences: list, documents: dict) -> None:
    """The tokens with the largest losses, and the text before them."""
    found = []
    for sequence in sequences:
        if sequence.losses is not None:
            worst = np.argsort(-np.nan_to_num(sequence.losses, nan=np.inf))[:TOKENS]
            found += [(float(sequence.losses[at]), sequence, int(at)) for at in worst]
    found = sorted(found, key=lambda item: -item[0])[:TOKENS]
    print("\nTokens with the largest losses, behind the text that they were predicted from")
    for loss, sequence, at in found:
        token = decoded(sequence, sequence.labels[at : at + 1])
        before = decoded(sequence, sequence.tokens[max(0, at - 30) : at + 1])
        origins = [
            origin for span, origin in documents[sequence.row] if span.start <= at < span.end
        ]
        where = origins[0].text if origins else "?"
        print(
            f"{loss:>9.4f}  {token!r:<14} behind {before[-30:]!r}, row {sequence.row} position {at}, "
            f"{where}"
        )


def text_of_tokens(sequence, start: int, end: int) -> str:
    """An excerpt of the labels start..end of a sequence, quoted."""
    ids = np.append(sequence.tokens[1:], sequence.labels[-1])[start:end]
    text = decoded(sequence, ids[: 2 * EXCERPT])
    if len(text) > EXCERPT:
        return repr(text[:EXCERPT]) + "..."
    return repr(text)


def decoded(sequence, ids: np.ndarray) -> str:
    """The text of tokens, with markers; the numbers themselves without a tokenizer."""
    ids = [int(i) for i in ids if i >= 0]
    if not sequence.data.tokenizer_file:
        return " ".join(map(str, ids))
    tokenizer = load_tokenizer(Path(sequence.data.tokenizer_file))
    return tokenizer.decode(ids, skip_special_tokens=False)
