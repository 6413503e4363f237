"""From a corpus to batches: vocabulary, token streams, blocks.

    stream = s t₀ … tₙ₋₁ s t₀ … tₘ₋₁ …          s: the start token before every sentence

The corpus is read once, so it may come through a pipe. Without a validation corpus, the last
sentences are held out: 1 %, and at least one block. The vocabulary is made of the training part.
"""

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.corpus.corpus import Corpus, CorpusReader
from ffmem.errors import CorpusError, FfmemError
from ffmem.files import write_text
from ffmem.models.tokenizer import UNKNOWN, WordTokenizer
from ffmem.records import Record
from ffmem.text import pluralize
from ffmem.training.config import TrainConfig

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"

HELD_OUT_SHARE = 0.01
"""Share of the sentences held out for validation."""


# Vocabularies


class WordVocabulary:
    """The most frequent words of a corpus, split at white space; other words are `<unk>`.

    Ids: 0 `<s>`, 1 `<pad>`, 2 `</s>`, 3 `<unk>`, then words by frequency, ties in alphabetical
    order, as in fairseq.
    """

    start = 2
    """The token before every sentence."""
    unknown = UNKNOWN
    controls = (0, 1, 2)
    """Tokens that stand for no text."""

    def __init__(self, counts: Sequence[tuple[str, int]]) -> None:
        self.counts = list(counts)
        self.size = len(WordTokenizer.SPECIAL) + len(self.counts)
        names = [*WordTokenizer.SPECIAL, *(word for word, _ in self.counts)]
        self._ids = {word: id for id, word in enumerate(names)}

    @classmethod
    def train(cls, sentences: Iterable[str], size: int) -> "WordVocabulary":
        """Return the `size` most frequent words of sentences."""
        counter = Counter(word for sentence in sentences for word in sentence.split())
        for special in WordTokenizer.SPECIAL:  # `<unk>` in the text is the special token
            counter.pop(special, None)
        ranked = sorted(counter.items(), key=lambda pair: (-pair[1], pair[0]))
        return cls(ranked[:size])

    def encode(self, sentences: Sequence[str]) -> Int[ndarray, " token"]:
        """Return the token stream of sentences, each after `</s>`."""
        stream = array("i")
        for sentence in sentences:
            stream.append(self.start)
            stream.extend(self._ids.get(word, self.unknown) for word in sentence.split())
        return np.array(stream, np.int32)

    def save(self, folder: Path) -> None:
        """Write fairseq's dict.txt, and tokenizer.json for transformers."""
        from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors
        from tokenizers import Tokenizer as FastTokenizer

        lines = (f"{word} {count}\n" for word, count in self.counts)
        write_text(folder / "dict.txt", "".join(lines))
        fast = FastTokenizer(models.WordLevel(self._ids, unk_token="<unk>"))
        # Like str.split, which also splits at four separators that are no white space to Unicode.
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\x1c-\x1f]+"), "removed")
        fast.post_processor = processors.TemplateProcessing(
            single="</s> $A", special_tokens=[("</s>", self.start)]
        )
        fast.add_special_tokens(
            [AddedToken(name, single_word=True, normalized=False) for name in WordTokenizer.SPECIAL]
        )
        special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>"}
        _save_tokenizer(fast, folder, special | {"pad_token": "<pad>"})


class BPEVocabulary:
    """A byte-level BPE, which covers every text.

    Ids: 0 `<|endoftext|>`, then the 256 bytes, then merges in the order they were learned.
    """

    start, unknown, controls = 0, None, (0,)

    def __init__(self, fast: "tokenizers.Tokenizer") -> None:
        self.fast = fast
        self.size = int(fast.get_vocab_size())

    @classmethod
    def train(cls, sentences: Iterable[str], size: int) -> "BPEVocabulary":
        """Train a BPE of `size` tokens on sentences."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

        if size < 257:
            raise FfmemError(
                f"--vocabulary {size} is too small for a byte-level BPE. Use at least 257: the 256"
                f" bytes and {END_OF_TEXT}."
            )
        fast = Tokenizer(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        fast.post_processor = processors.TemplateProcessing(
            single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        fast.train_from_iterator(sentences, trainer)
        return cls(fast)

    def encode(self, sentences: Sequence[str]) -> Int[ndarray, " token"]:
        """Return the token stream of sentences, each after `<|endoftext|>`."""
        stream = array("i")
        for first in range(0, len(sentences), 1024):
            batch = sentences[first : first + 1024]
            for encoding in self.fast.encode_batch_fast(batch):  # adds the start token
                stream.extend(encoding.ids)
        return np.array(stream, np.int32)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and its config for transformers."""
        _save_tokenizer(self.fast, folder, {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT})


Vocabulary = WordVocabulary | BPEVocabulary


def _save_tokenizer(fast: "tokenizers.Tokenizer", folder: Path, special: dict[str, Any]) -> None:
    """Write a tokenizer so that `AutoTokenizer` reads it."""
    write_text(folder / "tokenizer.json", fast.to_str(pretty=True) + "\n")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


# Streams


@dataclass(frozen=True, kw_only=True)
class StreamStats(Record):
    """What a token stream was made of."""

    sentences: int
    tokens: int
    """Including the start token of every sentence."""
    unknown: int
    """`<unk>` tokens."""
    headings_dropped: int
    without_tokens: int
    control: int = 0
    """Control tokens spelled out in the text, such as `</s>`."""
    held_out: bool = False

    @property
    def unknown_share(self) -> float:
        """The share of `<unk>` among all tokens."""
        return self.unknown / self.tokens


class TokenStreams(NamedTuple):
    """What a run trains and validates on."""

    vocabulary: Vocabulary
    train: Int[ndarray, " token"]
    valid: Int[ndarray, " token"]
    train_stats: StreamStats
    valid_stats: StreamStats


def make_streams(config: TrainConfig, corpus: Corpus, valid: Corpus | None) -> TokenStreams:
    """Read the corpora, make the vocabulary of the training part, and encode both parts."""
    texts, reading = _read_texts(corpus, config)
    if valid is None:
        n_held = _n_held_out(texts, config.context, corpus.source)
        train_texts, valid_texts = texts[:-n_held], texts[-n_held:]
        valid_reading = reading
    else:
        train_texts = texts
        valid_texts, valid_reading = _read_texts(valid, config)
    kind = WordVocabulary if config.tokenizer == "words" else BPEVocabulary
    vocabulary: Vocabulary = kind.train(train_texts, config.vocabulary_size)
    train_stream, valid_stream = vocabulary.encode(train_texts), vocabulary.encode(valid_texts)
    if len(train_stream) < config.batch_tokens:
        raise CorpusError(
            f"{corpus.source!r} has {len(train_stream):,} tokens to train on, less than one batch"
            f" of {config.batch_tokens:,}. Use more text, or fewer --batch-tokens."
        )

    def stats(stream: ndarray, n_sentences: int, read: CorpusReader, held_out: bool) -> StreamStats:
        return StreamStats(
            sentences=n_sentences,
            tokens=len(stream),
            unknown=0 if vocabulary.unknown is None else int((stream == vocabulary.unknown).sum()),
            headings_dropped=read.n_headings,
            without_tokens=read.n_without_tokens,
            control=int(np.isin(stream, vocabulary.controls).sum()) - n_sentences,
            held_out=held_out,
        )

    return TokenStreams(
        vocabulary,
        train_stream,
        valid_stream,
        stats(train_stream, len(train_texts), reading, False),
        stats(valid_stream, len(valid_texts), valid_reading, valid is None),
    )


def _read_texts(corpus: Corpus, config: TrainConfig) -> tuple[list[str], CorpusReader]:
    """Return the sentences of a corpus, and the reader, which counts what was left out."""
    if corpus.unit not in ("sentence", "line"):
        raise FfmemError(
            f"--unit {corpus.unit}: training splits the stream into blocks itself. Use sentence or"
            " line, and set the block size with --context."
        )
    tokenizer = WordTokenizer([])  # there is none yet; this one tells text from blanks
    tokenizer.word_level = config.tokenizer == "words"
    reading = corpus.sentences(tokenizer)
    texts = []
    for sentence in reading:
        if sentence.text is None:
            raise CorpusError(
                f"{corpus.source!r} has token ids, but training needs text. Use a text corpus;"
                " --column names its field."
            )
        texts.append(sentence.text)
    return texts, reading


def _n_held_out(texts: Sequence[str], context: int, source: str) -> int:
    """Return how many of the last sentences to hold out: 1 %, and at least one block."""
    n_held = max(1, round(HELD_OUT_SHARE * len(texts)))
    # A word is at least one token, so a block of words is at least a block of tokens.
    n_words = sum(len(text.split()) + 1 for text in texts[-n_held:])
    while n_words < context and n_held < len(texts):
        n_held += 1
        n_words += len(texts[-n_held].split()) + 1
    if n_held == len(texts):
        raise CorpusError(
            f"{source!r} has {pluralize(len(texts), 'sentences')}, too few to hold out a block of"
            f" {context} tokens for validation. Use more text, or --valid."
        )
    return n_held


# Batches


class Blocks:
    """A stream cut into blocks of equal length, with another order and offset every epoch.

        block b of epoch e = stream[o + b·L … o + b·L + L]  (wrapping around),  o from (seed, e)

    The stream is a ring: after its last token comes the start token it begins with. So an epoch has
    ⌈tokens / L⌉ blocks and leaves no token out; fewer than L tokens are read twice. Blocks of all
    epochs form one sequence, and step n takes the n-th batch of it: what a step reads follows from
    its number alone.
    """

    def __init__(self, stream: Int[ndarray, " token"], context: int, seed: int) -> None:
        self.stream = torch.from_numpy(np.asarray(stream, np.int64))
        self.context = context
        self.seed = seed
        self.per_epoch = -(-len(stream) // context)
        self._shuffle = lru_cache(maxsize=2)(self._shuffle_epoch)

    def n_steps(self, epochs: int, batch_size: int) -> int:
        """Return how many steps of `batch_size` blocks it takes to read that many epochs."""
        return -(-epochs * self.per_epoch // batch_size)

    def batch(
        self, step: int, batch_size: int
    ) -> tuple[Int[Tensor, "block position"], Int[Tensor, "block position"]]:
        """Return the tokens that a step reads, and those that follow them."""
        starts = []
        for number in range(step * batch_size, (step + 1) * batch_size):
            epoch, block = divmod(number, self.per_epoch)
            offset, order = self._shuffle(epoch)
            starts.append(offset + int(order[block]) * self.context)
        places = torch.tensor(starts)[:, None] + torch.arange(self.context + 1)
        tokens = self.stream[places % len(self.stream)]
        return tokens[:, :-1], tokens[:, 1:]

    def _shuffle_epoch(self, epoch: int) -> tuple[int, Int64[ndarray, " block"]]:
        """Return where an epoch begins in the stream, and the order of its blocks."""
        rng = np.random.default_rng([self.seed, epoch])
        return int(rng.integers(len(self.stream))), rng.permutation(self.per_epoch)
