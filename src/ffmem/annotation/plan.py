"""What a study asks, and whom: drawn from an index by a seed, and from nothing else.

    memories   `per_layer` of each layer, uniformly among those that anything triggers
    controls   a share of all lists; random prefixes of the corpus, as long as a memory's triggers
    cases      of composition in the last layer, if any are given; judged after the lists

A memory is shown by its main list, the first `top` triggers. A control looks like a list in all
that can be seen: as many texts, of the same lengths, whole sentences where triggers are, each of
another sentence. They come from the whole corpus: drawn from the index's small sample, the same
texts would come again and again, and give controls away. The same seed on the same
index gives the same plan; who takes part in it gets a secret code only when the study is made.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ffmem.annotation.item import COMPOSITION, CONTROL, TRIGGERS, Item, Shown
from ffmem.annotation.judges import judges
from ffmem.cells import Cell
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.sentences import StoredSentence
from ffmem.indexing.store import Index
from ffmem.patterns.store import NO_SIGN, TOP, fingerprint, main_sign

ALL = "all"
"""Everybody judges everything."""

MOST_PEOPLE = 100
MOST_NAME = 60
"""Characters of a name."""


@dataclass(frozen=True)
class Plan:
    """The items of a study, who takes part, and in which order everybody meets the items."""

    items: tuple[Item, ...]
    orders: dict[str, tuple[str, ...]]
    """The keys of the items that each annotator judges, in the annotator's order."""
    adjudicators: tuple[str, ...]
    settings: dict[str, Any]
    """What was asked, of which index, and what was drawn."""


class _Lists:
    """The lists of an index as items, their keys still to come."""

    def __init__(self, index: Index, top: int, order: random.Random) -> None:
        self._index = index
        self._top = top
        self._order = order
        lengths = np.concatenate(list(index.sentences.lengths()))
        self._offsets = np.cumsum(lengths + 1) - lengths - 1
        self._by_length = np.argsort(lengths, kind="stable")
        self._sorted = lengths[self._by_length]
        self._shapes: dict[str, list[tuple[int, bool]]] = {}
        """Of the triggers of each drawn memory: length, and whether it is the whole sentence."""
        self.without_triggers = 0
        self.repeated = 0
        """Texts of controls that share a sentence with another one, for want of sentences."""

    def memories(self, layer: int, n: int) -> list[Item]:
        """Return n memories of a layer that anything triggers, or all if there are fewer."""
        signs = main_sign(self._index, layer)
        able = np.flatnonzero(signs != NO_SIGN).tolist()
        self.without_triggers += len(signs) - len(able)
        chosen = sorted(self._order.sample(able, min(n, len(able))))
        return [
            self._memory(self._index.layout.cell(layer, memory), int(signs[memory]))
            for memory in chosen
        ]

    def control(self, place: Item) -> Item:
        """Return random prefixes as long as the triggers of an item, and whole where they are."""
        prefixes: list[int] = []
        used: set[int] = set()
        for length, is_whole in self._shapes[place.cell or ""]:
            sentence = self._drawn(length, is_whole, used)
            used.add(sentence)
            prefixes.append(int(self._offsets[sentence]) + length)
        owners = self._index.sentences.at(prefixes)
        texts = tuple(self._shown(prefix, owners[prefix]) for prefix in prefixes)
        return place._replace(kind=CONTROL, texts=texts)

    def _drawn(self, length: int, is_whole: bool, used: set[int]) -> int:
        """Return a sentence that is so long, or longer; another one each time, if there are any."""
        first, past = np.searchsorted(self._sorted, [length, length + 1]).tolist()
        able = range(first, past) if is_whole else range(past, len(self._sorted))
        for _ in range(100):
            found = int(self._by_length[self._order.choice(able)])
            if found not in used:
                return found
        fresh = [one for one in able if int(self._by_length[one]) not in used]
        self.repeated += not fresh
        return int(self._by_length[self._order.choice(fresh or able)])

    def _memory(self, cell: Cell, sign: int) -> Item:
        memory = self._index.memory(cell)
        triggers = memory.triggers if sign > 0 else memory.negative_triggers
        shown = triggers[: self._top]
        self._shapes[str(cell)] = [(one.length, one.next_token is None) for one in shown]
        texts = tuple(Shown(one.prefix, one.last_token, one.next_token, one.rest) for one in shown)
        return Item("", TRIGGERS, str(cell), sign, texts)

    def _shown(self, prefix: int, sentence: StoredSentence) -> Shown:
        place = self._index.prefix_text(sentence, prefix - sentence.offset)
        return Shown(place.prefix, place.last_token, place.next_token, place.rest)


def draw(
    index: Index,
    per_layer: int = 10,
    top: int = TOP,
    annotators: int | Sequence[str] = 3,
    controls: float | int = 0.2,
    overlap: int | str = ALL,
    seed: int = 0,
    composition: Sequence[dict[str, Any]] | None = None,
    adjudicators: int = 1,
) -> Plan:
    """Return a plan: so many memories per layer, their first triggers, controls, and people."""
    people = named(annotators)
    heads = tuple(f"adjudicator-{i}" for i in range(1, adjudicators + 1))
    if adjudicators == 1:
        heads = ("adjudicator",)
    each = _refuse_odd(per_layer, top, people, heads, controls, overlap)
    order = random.Random(f"ffmem annotation {seed}")
    lists = _Lists(index, top, order)
    drawn = {layer: lists.memories(layer, per_layer) for layer in index.layout.memory_layers}
    memories = [item for some in drawn.values() for item in some]
    if not memories:
        raise FfmemError(f"Nothing triggers any memory of {index.folder}: there is nothing to see.")
    n_controls = round(len(memories) * controls / (1 - controls))
    blank = [lists.control(item) for item in _cycled(memories, n_controls, order)]
    cases = [_case(row) for row in composition or ()]
    items = _keyed([*memories, *blank, *cases], order)
    asked = {
        **{"per_layer": per_layer, "top": top, "annotators": list(people), "controls": controls},
        **{"overlap": overlap, "seed": seed, "adjudicators": list(heads)},
        "composition": None if composition is None else len(composition),
    }
    found = {
        **{"memories": len(memories), "controls": len(blank), "compositions": len(cases)},
        "memories_without_triggers": lists.without_triggers,
        "lists_shorter_than_top": sum(len(item.texts) < top for item in memories),
        "layers_with_fewer": {
            str(layer): len(some) for layer, some in drawn.items() if len(some) < per_layer
        },
        "control_texts_of_a_repeated_sentence": lists.repeated,
    }
    orders = _orders(items, people, each, seed, order)
    settings = {"ffmem": version("ffmem"), "asked": asked, "drawn": found, "index": _facts(index)}
    settings["plan"] = _digest(items)
    return Plan(items, orders, heads, settings)


def named(annotators: int | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the annotators, or those that so many are given."""
    if isinstance(annotators, int):
        return tuple(f"annotator-{i}" for i in range(1, annotators + 1))
    return tuple(name.strip() for name in annotators)


def cases_of(path: Path, index: Index) -> list[dict[str, Any]]:
    """Return the cases in the result of last-layer-composition on an index."""
    from ffmem.experiments.result import Result

    result = Result.read(path)
    if result.experiment != "last-layer-composition":
        raise StoreError(f"{path} is of {result.experiment}, not of last-layer-composition.")
    theirs, ours = result.settings.get("model_hash"), index.manifest.model.hash
    if theirs != ours:
        raise StoreError(
            f"{path} is of another model ({theirs}) than the index ({ours}):"
            " run `ffmem experiment last-layer-composition` on this index."
        )
    return result.rows


def _refuse_odd(
    per_layer: int,
    top: int,
    people: Sequence[str],
    heads: Sequence[str],
    controls: float | int,
    overlap: int | str,
) -> int:
    """Return how many judge each item, if everything can be done that was asked."""
    if per_layer < 1 or top < 1:
        raise FfmemError(f"per_layer {per_layer} and top {top} must both be 1 or more.")
    if not 1 <= len(people) <= MOST_PEOPLE or not heads:
        raise FfmemError(f"A study has 1 to {MOST_PEOPLE} annotators, and an adjudicator.")
    for name in people:
        if not 0 < len(name) <= MOST_NAME or not name.isprintable():
            raise FfmemError(f"{name!r} is no name of 1 to {MOST_NAME} characters.")
    if len({*people, *heads, "adjudicators"}) < len(people) + len(heads) + 1:
        raise FfmemError(f"Two people would have the same name: {', '.join((*people, *heads))}.")
    if not 0 <= controls <= 0.9:
        raise FfmemError(f"controls is a share of all lists, 0 to 0.9; {controls} was given.")
    each = len(people) if overlap == ALL else overlap
    if not isinstance(each, int) or not 1 <= each <= len(people):
        raise FfmemError(
            f"overlap says how many of the {len(people)} annotators judge an item: a number from"
            f" 1 on, or all; {overlap!r} was given."
        )
    return each


def _cycled(items: Sequence[Item], n: int, order: random.Random) -> list[Item]:
    """Return n of the items at random, each once before any is there again."""
    chosen: list[Item] = []
    while len(chosen) < n:
        chosen += order.sample(items, min(n - len(chosen), len(items)))
    return chosen


def _case(row: dict[str, Any]) -> Item:
    """Return a case of composition; the rule's judgement and the true next token stay outside."""
    names = ("prefix", "residual_top", "ff_top", "output_top")
    found = [row.get(name) if isinstance(row, dict) else None for name in names]
    if not all(isinstance(one, str) for one in found):
        raise FfmemError(f"A case of composition has the texts {', '.join(names)}; not so {row!r}.")
    prefix, *words = map(str, found)
    return Item("", COMPOSITION, None, 0, (Shown(prefix, None, None, ""),), tuple(words))


def _keyed(items: Sequence[Item], order: random.Random) -> tuple[Item, ...]:
    """Return the items with keys that tell nothing, in an order that tells nothing."""
    keys: dict[str, None] = {}
    while len(keys) < len(items):
        keys[f"{order.getrandbits(40):010x}"] = None
    return tuple(item._replace(key=key) for item, key in zip(items, keys, strict=True))


def _orders(
    items: Sequence[Item], people: Sequence[str], each: int, seed: int, order: random.Random
) -> dict[str, tuple[str, ...]]:
    """Return what everybody judges, lists before cases, shuffled for each on their own."""
    assigned = judges(len(items), people, each, order)
    orders = {}
    for name in people:
        mine = [item for item, some in zip(items, assigned, strict=True) if name in some]
        random.Random(f"ffmem order {seed} {name}").shuffle(mine)
        mine.sort(key=lambda item: item.kind == COMPOSITION)
        orders[name] = tuple(item.key for item in mine)
    return orders


def _facts(index: Index) -> dict[str, Any]:
    """Return which index the texts are from."""
    manifest = index.manifest
    return {
        "fingerprint": fingerprint(index),
        "model": manifest.model.source,
        "model_hash": manifest.model.hash,
        "corpus_hash": manifest.corpus.hash,
        "layers": index.n_layers,
        "memories": index.layout.per_layer,
        "gated": manifest.model.gated,
        "t": manifest.t,
        "prefixes": manifest.prefixes,
    }


def _digest(items: Sequence[Item]) -> str:
    """Return what tells the items of one study from those of another."""
    return hashlib.sha256(json.dumps(items).encode()).hexdigest()
