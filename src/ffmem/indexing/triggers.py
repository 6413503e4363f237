"""The triggers of an index as arrays of tokens, and the top trigger of each memory.

    prefix = offset of sentence s + p;    tᵢ of sentence s stands at offset − s + i of all tokens
    last token t_{p−1} = token[prefix − s − 1],    next token t_p = token[prefix − s]

A memory's top trigger is its highest-ranked trigger that has a next token (§4 of the paper asks for
the next token of the top trigger). Gated models keep a list of triggers for each sign of the
coefficient: there, it is the one of larger |m| of both lists' such triggers.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int8, Int32, Int64
from numpy import ndarray

from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index

NONE = -1
"""No token: the last token of an empty prefix, the next one of a whole sentence."""

NO_SIGN = 0
"""The sign of a memory without a top trigger."""


class PrefixTokens(NamedTuple):
    """Sentence, length p, last token and next token of some prefixes."""

    sentence: Int64[ndarray, " prefix"]
    length: Int64[ndarray, " prefix"]
    last: Int64[ndarray, " prefix"]
    """t_{p−1}; NONE where p = 0."""
    next: Int64[ndarray, " prefix"]
    """t_p; NONE where p = n."""


@dataclass(frozen=True, eq=False)
class CorpusTokens:
    """Every token of an index's corpus in one array, sentence after sentence."""

    offsets: Int64[ndarray, " sentence"]
    """The number of each sentence's empty prefix."""
    ids: Int32[ndarray, " token"]

    @cached_property
    def following(self) -> Int32[ndarray, " prefix"]:
        """The next token of every prefix, by its number; NONE of a whole sentence.

        It is the last token of the prefix after it. At the end stands another NONE, so that
        NO_PREFIX = −1, and the prefix before it, find NONE too.
        """
        ends = np.append(self.offsets[1:] - np.arange(1, len(self.offsets)), len(self.ids))
        return np.append(np.insert(self.ids, ends, NONE), np.int32(NONE))

    def at(self, prefixes: Int64[ndarray, " prefix"]) -> PrefixTokens:
        """Return sentence, length and tokens of some prefixes; none may be NO_PREFIX."""
        sentence = np.searchsorted(self.offsets, prefixes, side="right") - 1
        length = prefixes - self.offsets[sentence]
        past = np.append(self.offsets[1:], len(self.ids) + len(self.offsets))[sentence]
        place = prefixes - sentence
        last = np.where(length > 0, self.ids[place - 1], NONE)
        following = np.where(prefixes + 1 < past, self.ids[place % len(self.ids)], NONE)
        return PrefixTokens(sentence, length, last.astype(np.int64), following.astype(np.int64))

    def prefix(self, prefix: int) -> Int32[ndarray, " position"]:
        """Return the tokens of one prefix."""
        sentence = int(np.searchsorted(self.offsets, prefix, side="right")) - 1
        return self.ids[self.offsets[sentence] - sentence : prefix - sentence]


@lru_cache(maxsize=1)
def corpus_tokens(index: Index) -> CorpusTokens:
    """Return the tokens of an index's corpus, read once: four bytes for each."""
    return CorpusTokens(*index.sentences.tokens())


@dataclass(frozen=True, eq=False)
class TriggerTable:
    """A layer's triggers of one sign, strongest first, vacant slots last."""

    coefficients: Float32[ndarray, "memory top"]
    prefixes: Int64[ndarray, "memory top"]
    """NO_PREFIX where nothing triggers; the length is 0 there, and tokens are NONE."""
    corpus: CorpusTokens

    @cached_property
    def lengths(self) -> Int64[ndarray, "memory top"]:
        """Tokens of each prefix."""
        lengths, filled = np.zeros_like(self.prefixes), self.prefixes != NO_PREFIX
        lengths[filled] = self.corpus.at(self.prefixes[filled]).length
        return lengths

    @cached_property
    def last(self) -> Int32[ndarray, "memory top"]:
        """The last token of each prefix."""
        tokens: ndarray = self.corpus.following[self.prefixes - 1]
        return tokens

    @cached_property
    def next(self) -> Int32[ndarray, "memory top"]:
        """The token that follows each prefix in its sentence."""
        tokens: ndarray = self.corpus.following[self.prefixes]
        return tokens


def trigger_table(index: Index, layer: int, sign: int) -> TriggerTable:
    """Return a layer's triggers of one sign; none of sign −1 in an ungated model."""
    if sign < 0 and not index.manifest.model.gated:
        return empty_table((index.layout.widths[layer], index.manifest.t), corpus_tokens(index))
    names = ["coefficient", "prefix"] if sign > 0 else ["negative_coefficient", "negative_prefix"]
    columns = index.columns("triggers", layer, names)
    return TriggerTable(columns[names[0]], columns[names[1]], corpus_tokens(index))


def empty_table(shape: tuple[int, ...], corpus: CorpusTokens) -> TriggerTable:
    """Return a table of memories without triggers."""
    return TriggerTable(np.zeros(shape, np.float32), np.full(shape, NO_PREFIX, np.int64), corpus)


class TopTriggers(NamedTuple):
    """The trigger of every memory of a layer that agreement is measured on."""

    sign: Int8[ndarray, " memory"]
    """Sign of the coefficient; NO_SIGN without a top trigger."""
    prefix: Int64[ndarray, " memory"]
    last_token: Int64[ndarray, " memory"]
    next_token: Int64[ndarray, " memory"]
    no_next: Bool[ndarray, " memory"]
    """Has triggers, but none with a next token."""
    no_trigger: Bool[ndarray, " memory"]

    @property
    def exists(self) -> Bool[ndarray, " memory"]:
        """Which memories have a top trigger."""
        exists: ndarray = self.sign != NO_SIGN
        return exists


def top_triggers(index: Index, layer: int) -> TopTriggers:
    """Return the top triggers of a layer's memories."""
    return select_top(*(trigger_table(index, layer, sign) for sign in (1, -1)))


def select_top(positive_table: TriggerTable, negative_table: TriggerTable) -> TopTriggers:
    """Return the top triggers of the memories of two tables, of either sign."""
    best = []  # of each sign: |m| (−1 where no trigger has a next token), prefix, tokens
    for table in (positive_table, negative_table):
        rows = np.arange(len(table.next))
        slot = (table.next != NONE).argmax(axis=1)  # the first that has a next token, if any
        prefix, following = table.prefixes[rows, slot], table.next[rows, slot].astype(np.int64)
        last = table.corpus.following[prefix - 1].astype(np.int64)
        strength = np.where(following != NONE, np.abs(table.coefficients[rows, slot]), -1)
        best.append((strength, prefix, last, following, table.prefixes[:, 0] == NO_PREFIX))
    (positive, *of_positive, no_positive), (negative, *of_negative, no_negative) = best
    sign = np.where(positive >= negative, 1, -1)
    sign[np.maximum(positive, negative) < 0] = NO_SIGN
    prefix, last, following = (
        np.where(sign == NO_SIGN, nothing, np.where(sign > 0, plus, minus))
        for nothing, plus, minus in zip(
            (NO_PREFIX, NONE, NONE), of_positive, of_negative, strict=True
        )
    )
    no_trigger = no_positive & no_negative
    no_next = (sign == NO_SIGN) & ~no_trigger
    return TopTriggers(sign.astype(np.int8), prefix, last, following, no_next, no_trigger)
