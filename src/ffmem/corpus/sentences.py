"""What one sentence of a corpus is: a sentence, a line, or a window of N tokens.

    sentences of a paragraph = slices of it, in order
    windows of a document, joined = the document

A sentence is either text that is still to be tokenised, or the token ids that the corpus gave.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import sentencex

from ffmem.corpus.sources import Line
from ffmem.errors import CorpusError
from ffmem.models.tokenizer import Encoding, Tokenizer

Item = TypeVar("Item")

_WINDOW = re.compile(r"window:([1-9]\d{0,8})", re.ASCII)


class Sentence(NamedTuple):
    """A sentence before it is tokenised."""

    text: str | None
    """None where the corpus gives ids only."""
    ids: list[int] | None
    """None where the text is to be tokenised."""


class TokenSentence(NamedTuple):
    """A sentence as tokens t₀…tₙ₋₁, without the start token."""

    text: str | None
    ids: list[int]
    starts: list[int] | None
    ends: list[int] | None


def window_size(unit: str) -> int | None:
    """Return N of the unit `window:N`, None of `sentence` and `line`; refuse any other."""
    match = _WINDOW.fullmatch(unit)
    if match is None and unit not in ("sentence", "line"):
        raise CorpusError(
            f"{unit!r} is no unit to read a corpus in."
            " Give sentence, line, or window:N with N tokens, at least 1."
        )
    return int(match[1]) if match is not None else None


def of_paragraph(text: str) -> list[str]:
    """Return the sentences of a paragraph, without the white space around them."""
    # WikiText writes a decimal point as `@.@`, which ends no sentence: hidden, by the same length.
    hidden = text.replace("@.@", "@,@")
    slices = (
        text[found["start_index"] : found["end_index"]].strip()
        for found in sentencex.get_sentence_boundaries("en", hidden)
    )
    return [sentence for sentence in slices if sentence]


def of_line(line: Line, unit: str) -> list[Sentence]:
    """Return the sentences of one line by the unit `sentence` or `line`."""
    if line.text is None:
        return [Sentence(None, line.ids)]
    if not line.text.strip():
        return []
    texts = of_paragraph(line.text) if unit == "sentence" else [line.text]
    return [Sentence(text, None) for text in texts]


def windows(lines: Iterable[Line], tokenizer: Tokenizer, size: int) -> Iterator[TokenSentence]:
    """Yield the windows of `size` tokens of every document; its last may be shorter."""
    window = _Window(size)
    for batch in batches(_pieces(lines), lambda piece: len(piece.line.text or "")):
        texts = [piece.line.text for piece in batch if piece.line.text is not None]
        encodings = iter(tokenizer.encode(texts))
        for (_, text, ids), last in batch:
            encoding = Encoding(ids or [], None, None) if text is None else next(encodings)
            yield from window.add(text, encoding)
            if last:
                yield from window.rest()


def batches(items: Iterable[Item], weight: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield the items in lists: short enough to hold, long enough to tokenise at full speed."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += weight(item)
        if len(batch) >= 256 or total >= 1 << 20:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


class _Piece(NamedTuple):
    """A part of a document that is tokenised by itself: a line with its end."""

    line: Line
    last: bool
    """Whether the document ends with it."""


def _pieces(lines: Iterable[Line]) -> Iterator[_Piece]:
    """Yield every document, cut in front of every line that is not blank.

    Blank lines stay with the line before: many vocabularies have tokens of several line ends.
    """
    held: Line | None = None
    for line in lines:
        if held is None or held.document != line.document:
            if held is not None:
                yield _Piece(held, last=True)
            held = line
        elif held.text is not None and line.text is not None and not line.text.strip():
            held = held._replace(text=f"{held.text}\n{line.text}")
        else:
            yield _Piece(held._replace(text=f"{held.text}\n"), last=False)
            held = line
    if held is not None:
        yield _Piece(held, last=True)


class _Window:
    """The tokens and the text of a document that no window has taken yet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._clear()

    def _clear(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.placed = True

    def add(self, text: str | None, encoding: Encoding) -> Iterator[TokenSentence]:
        """Take the next tokens of the document; yield the windows that they fill."""
        ids, starts, ends = encoding
        self.ids += ids
        if text is None or starts is None or ends is None:
            self.placed = False
        else:
            base = len(self.text)
            self.text += text
            self.starts += [base + start for start in starts]
            self.ends += [base + end for end in ends]
        token = character = 0
        # A full window waits for one token more: the last one also takes the text behind it.
        while len(self.ids) - token > self.size:
            until = self.ends[token + self.size - 1] if self.placed else 0
            yield self._window(token, token + self.size, character, until)
            token, character = token + self.size, until
        if token:
            self._forget(token, character)

    def rest(self) -> Iterator[TokenSentence]:
        """Yield what is left at the document's end."""
        if self.ids:
            yield self._window(0, len(self.ids), 0, len(self.text))
        self._clear()

    def _window(self, token: int, token_end: int, character: int, until: int) -> TokenSentence:
        """Return the tokens from place to place, with their text."""
        ids = self.ids[token:token_end]
        if not self.placed:
            return TokenSentence(None, ids, None, None)
        # A character of several tokens, cut in two, stays with the first window.
        starts, ends = (
            [max(0, place - character) for place in places[token:token_end]]
            for places in (self.starts, self.ends)
        )
        return TokenSentence(self.text[character:until], ids, starts, ends)

    def _forget(self, token: int, character: int) -> None:
        """Drop what windows have taken."""
        self.text = self.text[character:]
        self.ids = self.ids[token:]
        self.starts = [max(0, place - character) for place in self.starts[token:]]
        self.ends = [max(0, place - character) for place in self.ends[token:]]


def refuse_foreign(sentences: Iterable[TokenSentence], vocabulary: int) -> Iterator[TokenSentence]:
    """Return the sentences; one whose given ids are not the model's is an error."""
    for number, sentence in enumerate(sentences):
        ids = sentence.ids
        if sentence.text is None and not 0 <= min(ids) <= max(ids) < vocabulary:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise CorpusError(
                f"Sentence {number} of the corpus has token id {wrong}, but the model's ids"
                f" are 0 to {vocabulary - 1}. Was it made with another tokenizer?"
            )
        yield sentence
