"""Splitting a corpus into sentences, lines, or windows of N tokens.

    sentences of a paragraph      slices of it, in order
    windows of a document         joined, they are the document

A line is text to tokenize, token ids given by the corpus, or a whole conversation.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import sentencex

from ffmem.corpus.sources import Line
from ffmem.errors import CorpusError
from ffmem.models.tokenizer import Encoding, Tokenizer

Item = TypeVar("Item")

READ_AHEAD = 256
"""Sentences to tokenize at a time."""

_WINDOW = re.compile(r"window:([1-9]\d{0,8})", re.ASCII)


class TokenSentence(NamedTuple):
    """A sentence as tokens t₀…tₙ₋₁, without the start token."""

    text: str | None
    ids: list[int]
    starts: list[int] | None
    ends: list[int] | None
    is_content: list[bool] | None = None
    """Whether a prefix ends at each token. None: at every token."""

    def cut(self, longest: int) -> "TokenSentence":
        """Return the first tokens; the text stays whole."""
        starts, ends, is_content = self.starts, self.ends, self.is_content
        return TokenSentence(
            self.text,
            self.ids[:longest],
            starts and starts[:longest],
            ends and ends[:longest],
            is_content and is_content[:longest],
        )

    @property
    def n_prefixes(self) -> int:
        """How many prefixes it has."""
        return len(self.ids) if self.is_content is None else sum(self.is_content)


def window_size(unit: str) -> int | None:
    """Return N of the unit `window:N`; None for `sentence` and `line`; raise for others."""
    match = _WINDOW.fullmatch(unit)
    if match is None and unit not in ("sentence", "line"):
        raise CorpusError(
            f"--unit {unit}: unknown unit. Use sentence, line, or window:N with at least 1 token."
        )
    return int(match[1]) if match is not None else None


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a paragraph, stripped."""
    # WikiText writes a decimal point as `@.@`. Hide it: it does not end a sentence.
    hidden = text.replace("@.@", "@,@")
    slices = (
        text[found["start_index"] : found["end_index"]].strip()
        for found in sentencex.get_sentence_boundaries("en", hidden)
    )
    return [sentence for sentence in slices if sentence]


def sentences_of_line(line: Line, unit: str) -> list[Line]:
    """Return the sentences of a line, by the unit `sentence` or `line`."""
    if line.text is None:
        return [line]
    if not line.text.strip():
        return []
    texts = split_sentences(line.text) if unit == "sentence" else [line.text]
    return [line._replace(text=text) for text in texts]


def windows(
    lines: Iterable[Line], tokenizer: Tokenizer, size: int, ahead: int = READ_AHEAD
) -> Iterator[TokenSentence]:
    """Yield every document as windows of `size` tokens; its last one may be shorter.

    Tokenizes `ahead` lines at a time.
    """
    window = _Window(size)
    for batch in batches(_pieces(lines), lambda piece: len(piece.line.text or ""), lambda: ahead):
        texts = [piece.line.text for piece in batch if piece.line.text is not None]
        encodings = iter(tokenizer.encode(texts))
        for (_, text, ids, _), is_last in batch:
            encoding = Encoding(ids or [], None, None) if text is None else next(encodings)
            yield from window.add(text, encoding)
            if is_last:
                yield from window.rest()


def batches(
    items: Iterable[Item],
    weight: Callable[[Item], int],
    ahead: Callable[[], int] = lambda: READ_AHEAD,
) -> Iterator[list[Item]]:
    """Yield the items in lists, small enough for memory and large enough to tokenize fast.

    A list has at most `ahead()` items.
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += weight(item)
        if len(batch) >= ahead() or total >= 1 << 20:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


class _Piece(NamedTuple):
    """A part of a document to tokenize on its own: a line with its line end."""

    line: Line
    is_last: bool
    """Whether it is the last piece of its document."""


def _pieces(lines: Iterable[Line]) -> Iterator[_Piece]:
    """Yield every document, split before each line that is not blank.

    Blank lines stay with the line before: many vocabularies have tokens for several line ends.
    """
    pending: Line | None = None
    for line in lines:
        if pending is None or pending.document != line.document:
            if pending is not None:
                yield _Piece(pending, is_last=True)
            pending = line
        elif pending.text is not None and line.text is not None and not line.text.strip():
            pending = pending._replace(text=f"{pending.text}\n{line.text}")
        else:
            yield _Piece(pending._replace(text=f"{pending.text}\n"), is_last=False)
            pending = line
    if pending is not None:
        yield _Piece(pending, is_last=True)


class _Window:
    """The tokens and text of a document that have not been yielded in a window yet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._clear()

    def _clear(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.has_text = True

    def add(self, text: str | None, encoding: Encoding) -> Iterator[TokenSentence]:
        """Add the next tokens of the document; yield the windows that are full."""
        ids, starts, ends = encoding
        self.ids += ids
        if text is None or starts is None or ends is None:
            self.has_text = False
        else:
            base = len(self.text)
            self.text += text
            self.starts += [base + start for start in starts]
            self.ends += [base + end for end in ends]
        token = character = 0
        # A full window waits for one more token: the last window also takes the text after it.
        while len(self.ids) - token > self.size:
            until = self.ends[token + self.size - 1] if self.has_text else 0
            yield self._window(token, token + self.size, character, until)
            token, character = token + self.size, until
        if token:
            self._drop(token, character)

    def rest(self) -> Iterator[TokenSentence]:
        """Yield the last window of the document, if anything is left."""
        if self.ids:
            yield self._window(0, len(self.ids), 0, len(self.text))
        self._clear()

    def _window(self, token: int, token_end: int, character: int, until: int) -> TokenSentence:
        """Return a range of tokens with their text."""
        ids = self.ids[token:token_end]
        if not self.has_text:
            return TokenSentence(None, ids, None, None)
        # A character whose tokens are split between windows stays with the first one.
        starts, ends = (
            [max(0, place - character) for place in places[token:token_end]]
            for places in (self.starts, self.ends)
        )
        return TokenSentence(self.text[character:until], ids, starts, ends)

    def _drop(self, token: int, character: int) -> None:
        """Drop what has been yielded."""
        self.text = self.text[character:]
        self.ids = self.ids[token:]
        self.starts = [max(0, place - character) for place in self.starts[token:]]
        self.ends = [max(0, place - character) for place in self.ends[token:]]


def check_token_ids(sentences: Iterable[TokenSentence], vocabulary: int) -> Iterator[TokenSentence]:
    """Yield the sentences; raise at a token id that the model does not have."""
    for number, sentence in enumerate(sentences):
        ids = sentence.ids
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise CorpusError(
                f"Sentence {number} of the corpus has token id {wrong}, but the model has ids 0 to"
                f" {vocabulary - 1}. Use the tokenizer that the ids were made with."
            )
        yield sentence
