"""A corpus as a stream of sentences in tokens.

    source ─► lines ─► sentences ─► tokens

A corpus of any size is read in constant memory. The reader counts what it drops.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass

from ffmem.config_fields import check_options, option
from ffmem.corpus import sentences, sources, wikitext
from ffmem.corpus.sentences import READ_AHEAD, TokenSentence
from ffmem.corpus.sources import Conversation, Line
from ffmem.errors import CorpusError
from ffmem.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """A source of text, and how to read it."""

    source: str
    """CORPUS as you write it on the command line."""
    unit: str = option(
        "How to split the text: sentence, line, or window:N (tokens).", "sentence", metavar="UNIT"
    )
    column: str = option(
        "Field with the text or messages, in JSON Lines, Parquet and Hub data.",
        "text",
        metavar="NAME",
    )
    detokenize: str | None = option(
        "Undo WikiText's tokenization and drop its headings.", None, choices=("wikitext",)
    )
    limit: int | None = option("Read at most this many sentences.", None, minimum=1)
    content_only: bool = option(
        "In conversations, skip prefixes that end in the chat template.", False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise CorpusError(
                f"A corpus is a path or a name, not {self.source!r}. To read your own sentences,"
                " write them to a file, one per line, and pass it with unit='line'."
            )
        check_options(self, CorpusError)
        sentences.window_size(self.unit)
        if self.detokenize is None and sources.is_wikitext(self.source):
            object.__setattr__(self, "detokenize", "wikitext")

    def sentences(self, tokenizer: Tokenizer) -> "CorpusReader":
        """Return the sentences of the corpus, as a stream."""
        return CorpusReader(self, tokenizer)

    def check(self) -> None:
        """Raise if there is no such corpus, or no text in its files: reads up to the first text."""
        sources.check_exists(self.source)
        if not sources.is_on_disk(self.source):
            return
        n_lines = n_headings = 0
        for line in sources.lines(self.source, self.column):
            n_lines += 1
            if self.drops(line):
                n_headings += 1
            elif line.text is None or line.text.strip():
                return
        raise self.no_sentence(n_lines, n_headings)

    def drops(self, line: Line) -> bool:
        """Return whether a line is a heading that is not read."""
        drops_headings = self.detokenize is not None and self.unit != "line"
        return drops_headings and line.text is not None and wikitext.is_heading(line.text)

    def no_sentence(self, n_lines: int, n_headings: int, without_tokens: int = 0) -> CorpusError:
        """Return the error of a corpus in which there is nothing to read."""
        if n_lines == 0:
            return CorpusError(f"{self.source!r} is empty. Use a corpus that contains text.")
        return CorpusError(
            f"There is no sentence in {self.source!r}: of {n_lines} lines, {n_headings} are"
            f" headings, and the others are blank or without tokens ({without_tokens} sentences)."
            " Use a corpus that contains text."
        )

    def describe(self) -> dict[str, str | int | bool | None]:
        """Return the settings, for the manifest of an index."""
        return asdict(self)

    def identify(self) -> dict[str, str | int | bool | None]:
        """Return the settings, and the SHA-256 of the corpus's files: None if it has none."""
        return asdict(self) | {"digest": sources.digest(self.source)}


class CorpusReader(Iterator[TokenSentence]):
    """The sentences of a corpus, with counts of what has been read so far."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer) -> None:
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.n_lines = 0
        """Lines read, including blank ones and headings."""
        self.n_headings = 0
        """WikiText headings dropped."""
        self.n_without_tokens = 0
        """Sentences dropped because they have no tokens."""
        self.n_control = 0
        """Sentences whose text spells out a control token, such as `</s>`."""
        self.n_conversations = 0
        """Sentences that are conversations."""
        self.n_sentences = 0
        self._stream = self._read()

    def __next__(self) -> TokenSentence:
        if self.n_sentences == self.corpus.limit:
            self._stream.close()
        sentence = next(self._stream)
        self.n_sentences += 1
        return sentence

    def _read(self) -> Generator[TokenSentence, None, None]:
        """Yield every sentence that has a token; raise if there is none."""
        size = sentences.window_size(self.corpus.unit)
        if size is None:
            stream = self._tokenize()
        else:
            ahead = READ_AHEAD if self.corpus.limit is None else 1  # a line may be many windows
            stream = self._count_controls(
                sentences.windows(self._lines(), self.tokenizer, size, ahead)
            )
        for sentence in stream:
            if sentence.ids and sentence.n_prefixes:
                yield sentence
            else:
                self.n_without_tokens += 1
        if self.n_sentences == 0:
            raise self.corpus.no_sentence(self.n_lines, self.n_headings, self.n_without_tokens)

    def _count_controls(self, windows: Iterable[TokenSentence]) -> Iterator[TokenSentence]:
        """Yield windows; count those whose text spells out a control token."""
        for window in windows:
            is_text = window.text is not None  # given as ids, control tokens are intended
            self.n_control += is_text and not self.tokenizer.controls.isdisjoint(window.ids)
            yield window

    def _lines(self) -> Iterator[Line]:
        """Yield the lines, detokenized if the corpus asks for it."""
        unchanged = self.corpus.unit == "line" or self.corpus.detokenize is None
        is_window = sentences.window_size(self.corpus.unit) is not None
        for line in sources.lines(self.corpus.source, self.corpus.column):
            self.n_lines += 1
            if line.conversation is not None and is_window:
                raise CorpusError(
                    f"{line.conversation.place} is a conversation, which is one sentence; --unit"
                    f" {self.corpus.unit} would split it. Drop --unit."
                )
            if self.corpus.drops(line):
                self.n_headings += 1
            elif unchanged or line.text is None or self.tokenizer.word_level:
                yield line
            else:
                yield line._replace(text=wikitext.detokenize(line.text))

    def _tokenize(self) -> Iterator[TokenSentence]:
        """Yield the sentences or lines as tokens."""
        units = (
            sentence
            for line in self._lines()
            for sentence in sentences.sentences_of_line(line, self.corpus.unit)
        )

        def ahead() -> int:
            """Return how many to read: never beyond the limit, since what is read is counted."""
            limit = self.corpus.limit
            return READ_AHEAD if limit is None else min(READ_AHEAD, limit - self.n_sentences)

        for batch in sentences.batches(units, lambda unit: len(unit.text or ""), ahead):
            yield from self._encode(batch)

    def _encode(self, batch: list[Line]) -> Iterator[TokenSentence]:
        """Yield a batch of sentences as tokens."""
        texts = [sentence.text for sentence in batch if sentence.text is not None]
        encodings = iter(self.tokenizer.encode(texts))
        controls = self.tokenizer.controls
        for _, text, ids, conversation in batch:
            if conversation is not None:
                self.n_conversations += 1
                yield self._read_conversation(conversation)
            elif text is None:
                yield TokenSentence(None, ids or [], None, None)
            else:
                encoding = next(encodings)
                self.n_control += not controls.isdisjoint(encoding.ids)
                yield TokenSentence(text, *encoding)

    def _read_conversation(self, conversation: Conversation) -> TokenSentence:
        """Return a conversation as one sentence, in the tokens of the model's chat template.

        A start token that the tokenizer adds to any text is left to `--start`.
        """
        template = self.tokenizer.chat
        try:
            text, ids, starts, ends, is_content, _ = template.encode(conversation.messages)
        except CorpusError as error:
            raise CorpusError(f"{conversation.place}: {error}") from None
        if not self.corpus.content_only:
            is_content = None
        elif is_content is None:
            raise CorpusError(
                "--content-only needs a tokenizer that maps tokens to positions in the text, and"
                " this model's does not. Drop it."
            )
        if ids[0] != self.tokenizer.own_start:
            return TokenSentence(text, ids, starts, ends, is_content)
        first = ends[0] if ends else 0
        return TokenSentence(
            text[first:],
            ids[1:],
            starts and [start - first for start in starts[1:]],
            ends and [end - first for end in ends[1:]],
            is_content and is_content[1:],
        )
