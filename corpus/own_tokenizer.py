"""A tokenizer of our own, trained on the text: for data without --tokenizer, and data.py tokenizer."""

from itertools import chain
from pathlib import Path

from corpus.build import cut_file, piece_size, read_documents
from corpus.special import EOT_NAMES
from corpus.tokenizer import BPE_VOCAB
from flags.files import write_file
from flags.progress import Progress

BPE_BYTES = 10_000_000  # bytes of text for it


def train_tokenizer(
    paths: list, file: Path, vocab_size: int = BPE_VOCAB, text_column: str = "text"
) -> int:
    """Train a byte-level BPE on the beginning of each text. Returns the number of ids, smaller than
    vocab_size if no more pairs occur twice in the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = []
    enough = BPE_BYTES * vocab_size // BPE_VOCAB // len(paths)
    for path in paths:
        size = 0
        pieces = cut_file(path, EOT_NAMES[0], text_column, piece_size([path]))
        documents = chain.from_iterable(read_documents(piece, EOT_NAMES[0]) for piece in pieces)
        for split, text, _ in documents:
            if split == "train":
                texts.append(text)
                size += len(text)
            if size >= enough:
                break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: no text is unknown
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_NAMES[0]],
        initial_alphabet=alphabet,
        min_frequency=2,
        show_progress=False,
    )
    megabytes = sum(map(len, texts)) / 1e6
    with Progress(f"training a tokenizer of {vocab_size:,} ids on {megabytes:.1f} MB of text"):
        tokenizer.train_from_iterator(texts, trainer)
    write_file(file, tokenizer.to_str().encode())
    return tokenizer.get_vocab_size()
