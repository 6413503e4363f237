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

from ffmem.indexing.sentences import NO_PREFIX, Sentences
from ffmem.indexing.store import Index

NONE = -1
"""No token: the last token of an empty prefix, the next one of a whole sentence."""

BLOCK = 64
"""Row groups of sentences to decode at a time: 8,192 sentences, a few megabytes."""

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


def read_following(
    sentences: Sentences, prefixes: Int64[ndarray, "*place"]
) -> Int32[ndarray, "*place"]:
    """Return the next token of each prefix, holding only a block of the corpus at a time."""
    order = np.argsort(prefixes, axis=None)
    ascending = prefixes.ravel()[order]
    found = np.full(len(ascending), NONE, np.int32)
    for first in range(0, sentences.n_groups, BLOCK):
        groups = range(first, min(first + BLOCK, sentences.n_groups))
        offsets, ids = sentences.tokens(groups)
        following = CorpusTokens(offsets - offsets[0], ids).following[:-1]
        begin, end = np.searchsorted(ascending, [offsets[0], offsets[0] + len(following)])
        found[begin:end] = following[ascending[begin:end] - offsets[0]]
    unsorted = np.empty_like(found)
    unsorted[order] = found
    return unsorted.reshape(prefixes.shape)


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


class FollowedTriggers(NamedTuple):
    """A layer's triggers of one sign with the tokens that follow them."""

    coefficients: Float32[ndarray, "memory top"]
    prefixes: Int64[ndarray, "memory top"]
    next: Int32[ndarray, "memory top"]

    def without_triggers(self) -> "FollowedTriggers":
        """Return lists of the same shape that are empty."""
        return FollowedTriggers(
            np.zeros_like(self.coefficients),
            np.full_like(self.prefixes, NO_PREFIX),
            np.full_like(self.next, NONE),
        )


class TopTriggers(NamedTuple):
    """The trigger of every memory of a layer that agreement is measured on."""

    sign: Int8[ndarray, " memory"]
    """Sign of the coefficient; NO_SIGN without a top trigger."""
    prefix: Int64[ndarray, " memory"]
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
    tables = (trigger_table(index, layer, sign) for sign in (1, -1))
    return select_top(
        *(FollowedTriggers(table.coefficients, table.prefixes, table.next) for table in tables)
    )


def last_tokens(index: Index, prefixes: Int64[ndarray, "*place"]) -> Int32[ndarray, "*place"]:
    """Return the last token of each prefix; NONE of an empty one and of NO_PREFIX."""
    tokens: ndarray = corpus_tokens(index).following[prefixes - 1]
    return tokens


def select_top(positive_lists: FollowedTriggers, negative_lists: FollowedTriggers) -> TopTriggers:
    """Return the top triggers of memories with lists of either sign."""
    best = []  # of each sign: |m| (−1 where no trigger has a next token), prefix, next token
    for lists in (positive_lists, negative_lists):
        rows = np.arange(len(lists.next))
        slot = (lists.next != NONE).argmax(axis=1)  # the first that has a next token, if any
        prefix, following = lists.prefixes[rows, slot], lists.next[rows, slot].astype(np.int64)
        strength = np.where(following != NONE, np.abs(lists.coefficients[rows, slot]), -1)
        best.append((strength, prefix, following, lists.prefixes[:, 0] == NO_PREFIX))
    (positive, *of_positive, no_positive), (negative, *of_negative, no_negative) = best
    sign = np.where(positive >= negative, 1, -1)
    sign[np.maximum(positive, negative) < 0] = NO_SIGN
    prefix, following = (
        np.where(sign == NO_SIGN, nothing, np.where(sign > 0, plus, minus))
        for nothing, plus, minus in zip((NO_PREFIX, NONE), of_positive, of_negative, strict=True)
    )
    no_trigger = no_positive & no_negative
    no_next = (sign == NO_SIGN) & ~no_trigger
    return TopTriggers(sign.astype(np.int8), prefix, following, no_next, no_trigger)
