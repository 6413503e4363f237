"""The vocabulary of a model that is trained: words of the corpus, or a byte-level BPE over it.

    words: ids 0 `<s>`, 1 `<pad>`, 2 `</s>`, 3 `<unk>`, then words, most frequent first
    bpe:   id 0 `<|endoftext|>`, then the 256 bytes, then merges in the order they were learned

Both put one token in front of a text, the same that stands between sentences in training. Words of
equal count are in the order of their letters, as in fairseq.
"""

import json
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from ffmem.errors import FfmemError
from ffmem.files import write_text
from ffmem.models.tokenizer import UNKNOWN, WordTokenizer

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"


class Vocabulary(ABC):
    """From sentences to ids, and into a folder."""

    size: int
    start: int
    """The token in front of every sentence."""
    unknown: int | None
    controls: tuple[int, ...]
    """Tokens that stand for no text."""

    @abstractmethod
    def ids(self, sentences: Iterable[str]) -> Int[ndarray, " token"]:
        """Return the stream of sentences, each behind the start token."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files of the tokenizer."""


class Words(Vocabulary):
    """White-space tokens as they are; what is not among the most frequent is `<unk>`."""

    start, unknown, controls = 2, UNKNOWN, (0, 1, 2)

    def __init__(self, counts: Sequence[tuple[str, int]]) -> None:
        self.counts = list(counts)
        self.size = len(WordTokenizer.SPECIAL) + len(self.counts)
        names = [*WordTokenizer.SPECIAL, *(word for word, _ in self.counts)]
        self._ids = {word: id for id, word in enumerate(names)}

    @classmethod
    def of(cls, sentences: Iterable[str], size: int) -> "Words":
        """Return the `size` most frequent words of sentences."""
        counter = Counter(word for sentence in sentences for word in sentence.split())
        for special in WordTokenizer.SPECIAL:  # a word `<unk>` of the text is the one that we have
            counter.pop(special, None)
        ranked = sorted(counter.items(), key=lambda counted: (-counted[1], counted[0]))
        return cls(ranked[:size])

    def ids(self, sentences: Iterable[str]) -> Int[ndarray, " token"]:
        """Return the stream of sentences, each behind `</s>`."""
        stream = array("i")
        for sentence in sentences:
            stream.append(self.start)
            stream.extend(self._ids.get(word, self.unknown) for word in sentence.split())
        return np.array(stream, np.int32)

    def save(self, folder: Path) -> None:
        """Write dict.txt, and the same for plain transformers."""
        lines = (f"{word} {count}\n" for word, count in self.counts)
        write_text(folder / "dict.txt", "".join(lines))
        special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>"}
        _save(_word_level(self._ids), folder, special | {"pad_token": "<pad>"})


class Pieces(Vocabulary):
    """A byte-level BPE: it knows every text."""

    start, unknown, controls = 0, None, (0,)

    def __init__(self, core: "tokenizers.Tokenizer") -> None:
        self.core = core
        self.size = int(core.get_vocab_size())

    @classmethod
    def of(cls, sentences: Iterable[str], size: int) -> "Pieces":
        """Return a BPE of `size` tokens, trained on sentences."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

        if size < 257:
            raise FfmemError(
                f"--vocabulary {size} is too small for a byte-level BPE: 256 bytes and"
                f" {END_OF_TEXT} are 257 tokens. Give more."
            )
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        core.post_processor = processors.TemplateProcessing(
            single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        core.train_from_iterator(sentences, trainer)
        return cls(core)

    def ids(self, sentences: Iterable[str]) -> Int[ndarray, " token"]:
        """Return the stream of sentences, each behind the end of the text before."""
        stream = array("i")
        for batch in _batches(sentences):
            for encoding in self.core.encode_batch_fast(batch):  # the start token is in front
                stream.extend(encoding.ids)
        return np.array(stream, np.int32)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and what plain transformers needs beside it."""
        _save(self.core, folder, {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT})


def _word_level(ids: dict[str, int]) -> "tokenizers.Tokenizer":
    """Return the words as a tokenizer of Hugging Face's library."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors

    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    # As Python splits: four separators that are no white space to Unicode end a word as well.
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\x1c-\x1f]+"), "removed")
    core.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", Words.start)]
    )
    core.add_special_tokens(
        [AddedToken(name, single_word=True, normalized=False) for name in WordTokenizer.SPECIAL]
    )
    return core


def _save(core: "tokenizers.Tokenizer", folder: Path, special: dict[str, Any]) -> None:
    """Write a tokenizer so that `AutoTokenizer` reads it."""
    write_text(folder / "tokenizer.json", core.to_str(pretty=True) + "\n")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def _batches(sentences: Iterable[str], size: int = 1024) -> Iterator[list[str]]:
    batch: list[str] = []
    for sentence in sentences:
        batch.append(sentence)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
