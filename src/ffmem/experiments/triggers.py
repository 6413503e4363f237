"""The triggers of an index as arrays of tokens, and the top trigger of each memory.

    prefix = offset of sentence s + p;    tᵢ of sentence s stands at offset − s + i of all tokens
    last token t_{p−1} = token[prefix − s − 1],    next token t_p = token[prefix − s]

A memory's top trigger is its highest-ranked trigger that has a next token (§4 of the paper asks for
the next token of the top trigger). Gated models keep a list of triggers for each sign of the
coefficient: there, it is the one of larger |m| of both lists' such triggers.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int8, Int32, Int64
from numpy import ndarray

from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns

NONE = -1
"""The token that is none: the last token of an empty prefix, the next one of a whole sentence."""

NO_SIGN = 0
"""The sign of a memory without a top trigger."""


class PrefixTokens(NamedTuple):
    """Of some prefixes: the sentence of each, its length p, and the tokens that meet there."""

    sentence: Int64[ndarray, " prefix"]
    length: Int64[ndarray, " prefix"]
    last: Int64[ndarray, " prefix"]
    """t_{p−1}; NONE where p = 0."""
    next: Int64[ndarray, " prefix"]
    """t_p; NONE where p = n."""


class CorpusTokens(NamedTuple):
    """Every token of an index's corpus in one array, sentence after sentence."""

    offsets: Int64[ndarray, " sentence"]
    """The number of each sentence's empty prefix."""
    ids: Int32[ndarray, " token"]

    def at(self, prefixes: Int64[ndarray, " prefix"]) -> PrefixTokens:
        """Return what stands at some prefixes, none of them vacant."""
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


class TriggerTable(NamedTuple):
    """A layer's triggers of one sign, strongest first, vacant slots last."""

    coefficients: Float32[ndarray, "memory top"]
    prefixes: Int64[ndarray, "memory top"]
    """NO_PREFIX where nothing triggers; length 0 and no tokens stand there."""
    lengths: Int64[ndarray, "memory top"]
    last: Int64[ndarray, "memory top"]
    next: Int64[ndarray, "memory top"]


def trigger_table(index: Index, layer: int, sign: int) -> TriggerTable:
    """Return a layer's triggers of one sign; none of sign −1 in an ungated model."""
    name = "" if sign > 0 else "negative_"
    if sign < 0 and not index.manifest.model.gated:
        shape = (index.layout.widths[layer], index.manifest.t)
        vacant = np.full(shape, NO_PREFIX, np.int64)
        return TriggerTable(
            np.zeros(shape, np.float32), vacant, np.zeros_like(vacant), vacant, vacant
        )
    wanted = [f"{name}coefficient", f"{name}prefix"]
    columns = read_columns(index.folder / layer_file("triggers", layer), wanted)
    prefixes = columns[wanted[1]]
    filled = prefixes != NO_PREFIX
    places = corpus_tokens(index).at(prefixes[filled])
    return TriggerTable(
        columns[wanted[0]],
        prefixes,
        _filled(filled, places.length, 0),
        _filled(filled, places.last, NONE),
        _filled(filled, places.next, NONE),
    )


def _filled(
    filled: Bool[ndarray, "memory top"], found: Int64[ndarray, " prefix"], otherwise: int
) -> Int64[ndarray, "memory top"]:
    """Return what was found in the filled slots, and something else in the vacant ones."""
    slots = np.full(filled.shape, otherwise, np.int64)
    slots[filled] = found
    return slots


class TopTriggers(NamedTuple):
    """Of every memory of a layer: the trigger that agreement is measured on."""

    sign: Int8[ndarray, " memory"]
    """Of the coefficient; NO_SIGN where there is no top trigger."""
    prefix: Int64[ndarray, " memory"]
    length: Int64[ndarray, " memory"]
    last_token: Int64[ndarray, " memory"]
    next_token: Int64[ndarray, " memory"]
    coefficient: Float32[ndarray, " memory"]
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
    both = [trigger_table(index, layer, sign) for sign in (1, -1)]
    # The first slot that has a next token; 0 if none has.
    slots = [(triggers.next != NONE).argmax(axis=1) for triggers in both]
    strengths = [_strength(triggers, slot) for triggers, slot in zip(both, slots, strict=True)]
    sign = np.where(strengths[0] >= strengths[1], 1, -1)
    sign[np.maximum(*strengths) < 0] = NO_SIGN
    rows = np.arange(len(sign))

    def take(column: str, otherwise: int) -> ndarray:
        both_signs = [
            getattr(triggers, column)[rows, slot]
            for triggers, slot in zip(both, slots, strict=True)
        ]
        chosen = np.where(sign >= 0, *both_signs)
        return np.where(sign == NO_SIGN, np.asarray(otherwise, chosen.dtype), chosen)

    no_trigger = (both[0].prefixes[:, 0] == NO_PREFIX) & (both[1].prefixes[:, 0] == NO_PREFIX)
    return TopTriggers(
        sign.astype(np.int8),
        take("prefixes", NO_PREFIX),
        take("lengths", 0),
        take("last", NONE),
        take("next", NONE),
        take("coefficients", 0),
        (sign == NO_SIGN) & ~no_trigger,
        no_trigger,
    )


def _strength(triggers: TriggerTable, slot: Int[ndarray, " memory"]) -> Float32[ndarray, " memory"]:
    """Return |m| in one slot of each memory, −1 where no next token stands there."""
    rows = np.arange(len(slot))
    has_next = triggers.next[rows, slot] != NONE
    return np.where(has_next, np.abs(triggers.coefficients[rows, slot]), np.float32(-1))
