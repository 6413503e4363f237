"""From a corpus to two streams of token ids: one to train on, one to validate with.

    stream = s t₀ … tₙ₋₁ s t₀ … tₘ₋₁ …          s: the start token in front of every sentence

A corpus is read once, so that it may come through a pipe. Without one for validation, the last
sentences are held out: 1 %, and at least one block. The vocabulary knows the training part only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from ffmem.corpus.corpus import Corpus
from ffmem.counted import counted
from ffmem.errors import CorpusError, FfmemError
from ffmem.models.tokenizer import Encoding, Tokenizer
from ffmem.records import Record
from ffmem.training.settings import TOKENIZERS, Settings
from ffmem.training.vocabulary import Pieces, Vocabulary, Words

HELD_OUT = 0.01


@dataclass(frozen=True, kw_only=True)
class StreamRecord(Record):
    """What a stream was made of."""

    sentences: int
    tokens: int
    """The start token in front of every sentence counts."""
    unknown: int
    """How many of them are `<unk>`."""
    headings_dropped: int
    without_tokens: int
    control: int = 0
    """Control tokens that the text writes out, such as `</s>`: each is taken as one."""
    held_out: bool = False

    @property
    def unknown_share(self) -> float:
        """The share of `<unk>` among all tokens."""
        return self.unknown / self.tokens

    @property
    def left_out(self) -> str:
        """What was left out, in words; nothing if nothing was."""
        parts = {
            "headings": self.headings_dropped,
            "empty sentences": self.without_tokens,
        }
        return ", ".join(counted(n, what) for what, n in parts.items() if n)


class Streams(NamedTuple):
    """What a run reads."""

    vocabulary: Vocabulary
    train: Int[ndarray, " token"]
    valid: Int[ndarray, " token"]
    train_record: StreamRecord
    valid_record: StreamRecord


def streams(settings: Settings, corpus: Corpus, valid: Corpus | None) -> Streams:
    """Return the streams of a run, with a vocabulary made of the part to train on."""
    sentences = _Sentences(corpus, settings)
    held_out = valid is None
    if valid is None:
        kept, apart = _hold_out(sentences, settings.context)
        read = sentences
    else:
        read = _Sentences(valid, settings)
        kept, apart = sentences.texts, read.texts
    size = settings.vocabulary or TOKENIZERS[settings.tokenizer]
    vocabulary = (Words if settings.tokenizer == "words" else Pieces).of(kept, size)
    train, other = vocabulary.ids(kept), vocabulary.ids(apart)
    if len(train) < settings.batch_tokens:
        raise CorpusError(
            f"{corpus.source!r} gives {len(train):,} tokens to train on, less than one batch of"
            f" {settings.batch_tokens:,}. Give more text, or fewer --batch-tokens."
        )
    return Streams(
        vocabulary,
        train,
        other,
        sentences.record(len(kept), train, vocabulary),
        read.record(len(apart), other, vocabulary, held_out),
    )


def _hold_out(sentences: "_Sentences", context: int) -> tuple[Sequence[str], Sequence[str]]:
    """Return the sentences to train on, and the last ones."""
    texts = sentences.texts
    n_held = max(1, round(HELD_OUT * len(texts)))
    # A word is a token, or several: what has a block's words has a block's tokens.
    n_words = sum(len(text.split()) + 1 for text in texts[-n_held:])
    while n_words < context and n_held < len(texts):
        n_held += 1
        n_words += len(texts[-n_held].split()) + 1
    if n_held == len(texts):
        raise CorpusError(
            f"{sentences.corpus.source!r} has {counted(len(texts), 'sentences')}, and no block of"
            f" {context}"
            " tokens can be held out for validation. Give more text, or --valid."
        )
    return texts[:-n_held], texts[-n_held:]


class _Sentences:
    """The sentences of a corpus in order, and what was left out of it."""

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        if corpus.unit not in ("sentence", "line"):
            raise FfmemError(
                f"--unit {corpus.unit} was asked for, but training cuts the stream into blocks"
                " itself. Give sentence or line, and --context for the size of a block."
            )
        self.corpus = corpus
        reading = corpus.sentences(_Text(settings.tokenizer == "words"))
        self.texts = list(self._texts(reading))
        self.headings, self.empty = reading.n_headings, reading.n_without_tokens

    def _texts(self, reading: Iterator) -> Iterator[str]:  # type: ignore[type-arg]
        for sentence in reading:
            if sentence.text is None:
                raise CorpusError(
                    f"{self.corpus.source!r} gives token ids, but a vocabulary is made of text."
                    " Give a corpus of text; --column names its field."
                )
            yield sentence.text

    def record(
        self,
        n_sentences: int,
        stream: Int[ndarray, " token"],
        vocabulary: Vocabulary,
        held_out: bool = False,
    ) -> StreamRecord:
        """Return what is to be told of a stream of these sentences."""
        unknown, controls = vocabulary.unknown, vocabulary.controls
        return StreamRecord(
            sentences=n_sentences,
            tokens=len(stream),
            unknown=0 if unknown is None else int((stream == unknown).sum()),
            headings_dropped=self.headings,
            without_tokens=self.empty,
            control=int(np.isin(stream, controls).sum()) - n_sentences,  # each has one in front
            held_out=held_out,
        )


class _Text(Tokenizer):
    """A tokenizer that is not there yet: it tells text from nothing, and has no ids."""

    def __init__(self, word_level: bool) -> None:
        self.word_level = word_level
        self.bos = self.eos = self.unk = self.own_start = None
        self.controls = self.unlisted = frozenset()

    @property
    def fingerprint(self) -> str:
        """Return a name for it."""
        return "text"

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Return one token for every text that is not blank."""
        return [Encoding([0] if text.strip() else [], None, None) for text in texts]

    def shown(self, size: int) -> list[str]:
        """Return nothing: there are no tokens."""
        return []

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return nothing: there are no tokens."""
        return {}
