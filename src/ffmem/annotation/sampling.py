"""What a study asks, and of whom: drawn from an index by a seed alone.

    memories   `per_layer` of each layer, uniformly from those with triggers
    controls   a share of all lists: random prefixes of the corpus
    cases      of composition in the last layer, if given; judged after the lists

A memory is shown by the first `top` triggers of its main list. A control looks the same: as many
texts, of the same lengths, whole sentences where the triggers are, each from another sentence. They
come from the whole corpus; from the index's small sample the same texts would come up again and
again and give controls away. The access codes do not depend on the seed.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ffmem.annotation.study import (
    ADJUDICATORS,
    COMPOSITION,
    CONTROL,
    TRIGGERS,
    Item,
    Plan,
    Text,
)
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.memory import Trigger
from ffmem.indexing.store import Index
from ffmem.patterns.store import NO_SIGN, TOP_TRIGGERS, fingerprint, main_sign

ALL = "all"
"""Every annotator judges every item."""

MAX_NAME = 60
"""Characters of a name."""


def draw_plan(
    index: Index,
    per_layer: int = 10,
    top: int = TOP_TRIGGERS,
    annotators: int | Sequence[str] = 3,
    controls: float | int = 0.2,
    overlap: int | str = ALL,
    seed: int = 0,
    composition: Sequence[dict[str, Any]] | None = None,
    adjudicators: int = 1,
) -> Plan:
    """Draw the items of a study and who judges which of them, in which order."""
    if isinstance(annotators, int):
        annotators = [f"annotator-{i}" for i in range(1, annotators + 1)]
    people = [name.strip() for name in annotators]
    leads = [f"adjudicator-{i}" for i in range(1, adjudicators + 1)]
    each = _check_people(people, leads, overlap)

    rng = random.Random(f"ffmem annotation {seed}")
    by_layer = {
        layer: _draw_memories(index, layer, per_layer, top, rng)
        for layer in index.layout.memory_layers
    }
    memories = [drawn for some in by_layer.values() for drawn in some]
    if not memories:
        raise FfmemError(
            f"No memory of {index.folder} has a trigger, so there is nothing to judge."
        )
    prefixes = _RandomPrefixes(index, rng)
    # Memories whose place a control takes, each once before any again
    places: list[SampledMemory] = []
    n_controls = round(len(memories) * controls / (1 - controls))
    while len(places) < n_controls:
        places += rng.sample(memories, min(n_controls - len(places), len(memories)))
    control_items = [
        one.item._replace(kind=CONTROL, texts=prefixes.like(one.triggers)) for one in places
    ]
    cases = [_case(row) for row in composition or ()]
    items = _with_keys([*(one.item for one in memories), *control_items, *cases], rng)
    orders = _orders(items, people, each, seed, rng)
    words = {one.key: sum(len(text.prefix.split()) for text in one.texts) for one in items}

    options = {
        "per_layer": per_layer,
        "top": top,
        "annotators": people,
        "controls": controls,
        "overlap": overlap,
        "seed": seed,
        "adjudicators": leads,
        "composition": None if composition is None else len(composition),
    }
    counts = {
        "memories": len(memories),
        "controls": len(control_items),
        "compositions": len(cases),
        "words": {name: sum(words[key] for key in keys) for name, keys in orders.items()},
        "lists_shorter_than_top": sum(len(one.triggers) < top for one in memories),
        "layers_with_fewer": {
            str(layer): len(some) for layer, some in by_layer.items() if len(some) < per_layer
        },
        "control_texts_of_a_repeated_sentence": prefixes.repeated,
    }
    settings = {
        "ffmem": version("ffmem"),
        "options": options,
        "counts": counts,
        "index": _index_facts(index),
        # Tells the items of one study from those of another.
        "plan": hashlib.sha256(json.dumps(items).encode()).hexdigest(),
    }
    return Plan(items, orders, tuple(leads), settings)


def read_cases(path: Path, index: Index) -> list[dict[str, Any]]:
    """Return the cases of a last-layer-composition result that was measured on this model."""
    from ffmem.experiments.base import ExperimentResult

    result = ExperimentResult.read(path)
    if result.experiment != "last-layer-composition":
        raise StoreError(f"{path} is a result of {result.experiment}, not last-layer-composition.")
    theirs, ours = result.settings.get("model_hash"), index.manifest.model.hash
    if theirs != ours:
        raise StoreError(
            f"{path} was measured on another model ({theirs}) than the index ({ours})."
            " Run `ffmem experiment last-layer-composition` on this index."
        )
    return result.rows


def assign(n: int, people: Sequence[str], overlap: int, rng: random.Random) -> list[list[str]]:
    """Return who judges each of n items, `overlap` people each.

    Each item goes to those with the fewest items so far, and among them to those who share the
    fewest: loads differ by at most one, and every pair of people can be compared.
    """
    loads: Counter[str] = Counter()
    shared: Counter[frozenset[str]] = Counter()
    assigned = []
    for _ in range(n):
        chosen: list[str] = []
        for _ in range(overlap):
            # Shuffled: among equals, the same people would always come first.
            left = rng.sample(
                [name for name in people if name not in chosen], len(people) - len(chosen)
            )

            def cost(name: str, chosen: list[str] = chosen) -> tuple[int, int, int]:
                met = [shared[frozenset((name, other))] for other in chosen]
                return loads[name], max(met, default=0), sum(met)

            chosen.append(min(left, key=cost))
        loads.update(chosen)
        shared.update(frozenset(pair) for pair in combinations(chosen, 2))
        assigned.append([name for name in people if name in chosen])
    return assigned


class SampledMemory(NamedTuple):
    """A memory of a study."""

    item: Item
    triggers: Sequence[Trigger]


def _draw_memories(
    index: Index, layer: int, n: int, top: int, rng: random.Random
) -> list[SampledMemory]:
    """Return n memories of a layer, or all with triggers."""
    signs = main_sign(index, layer)
    able = np.flatnonzero(signs != NO_SIGN).tolist()
    drawn = []
    for number in sorted(rng.sample(able, min(n, len(able)))):
        cell, sign = index.layout.cell(layer, number), int(signs[number])
        triggers = index.memory(cell).triggers_of(sign)[:top]
        texts = tuple(Text(t.prefix, t.last_token, t.next_token, t.rest) for t in triggers)
        drawn.append(SampledMemory(Item("", TRIGGERS, str(cell), sign, texts), triggers))
    return drawn


class _RandomPrefixes:
    """Random prefixes of the corpus that look like the triggers of a memory."""

    def __init__(self, index: Index, rng: random.Random) -> None:
        self.repeated = 0
        """Texts that share a sentence with another of their list: the corpus is too small."""
        self._index = index
        self._rng = rng
        lengths = np.concatenate(list(index.sentences.lengths()))
        self._offsets = np.cumsum(lengths + 1) - lengths - 1
        self._by_length = np.argsort(lengths, kind="stable")
        self._sorted = lengths[self._by_length]

    def like(self, triggers: Sequence[Trigger]) -> tuple[Text, ...]:
        """Return prefixes as long as some triggers, and whole sentences where those are."""
        prefixes: list[int] = []
        used: set[int] = set()
        for trigger in triggers:
            sentence = self._sentence(trigger.length, trigger.next_token is None, used)
            used.add(sentence)
            prefixes.append(int(self._offsets[sentence]) + trigger.length)
        owners = self._index.sentences.at(prefixes)
        texts = []
        for prefix in prefixes:
            owner = owners[prefix]
            found = self._index.prefix_text(owner, prefix - owner.offset)
            texts.append(Text(found.prefix, found.last_token, found.next_token, found.rest))
        return tuple(texts)

    def _sentence(self, length: int, is_whole: bool, used: set[int]) -> int:
        """Return an unused sentence of exactly this length, or longer; a used one if need be."""
        first, past = np.searchsorted(self._sorted, [length, length + 1]).tolist()
        able = range(first, past) if is_whole else range(past, len(self._sorted))
        for _ in range(100):
            found = int(self._by_length[self._rng.choice(able)])
            if found not in used and self._is_prefix(found, length):
                return found
        fresh = [one for one in able if int(self._by_length[one]) not in used]
        self.repeated += not fresh
        return int(self._by_length[self._rng.choice(fresh or able)])

    def _is_prefix(self, sentence: int, length: int) -> bool:
        """Return whether a prefix of this length ends in the sentence (`--content-only`)."""
        if not self._index.sentences.has_content or length == 0:
            return True
        content = self._index.sentences.row(sentence).is_content
        return content is None or content[length - 1]


def _check_people(people: Sequence[str], leads: Sequence[str], overlap: int | str) -> int:
    """Return how many annotators judge each item; raise if the names make no sense."""
    for name in people:
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise FfmemError(f"{name!r} is not a name of 1 to {MAX_NAME} printable characters.")
    if len({*people, *leads, ADJUDICATORS}) < len(people) + len(leads) + 1:
        raise FfmemError(f"Two people would have the same name: {', '.join((*people, *leads))}.")
    each = len(people) if overlap == ALL else overlap
    if not isinstance(each, int) or not 1 <= each <= len(people):
        raise FfmemError(
            f"overlap is how many of the {len(people)} annotators judge an item: 1 to"
            f" {len(people)}, or all; not {overlap!r}."
        )
    return each


def _case(row: dict[str, Any]) -> Item:
    """Return a case of composition, without the program's verdict and the true next token."""
    names = ("prefix", "residual_top", "ff_top", "output_top")
    found = [row.get(name) if isinstance(row, dict) else None for name in names]
    if not all(isinstance(one, str) for one in found):
        raise FfmemError(f"A case of composition has the texts {', '.join(names)}; found {row!r}.")
    prefix, *words = map(str, found)
    return Item("", COMPOSITION, None, 0, (Text(prefix, None, None, ""),), tuple(words))


def _with_keys(items: Sequence[Item], rng: random.Random) -> tuple[Item, ...]:
    """Return the items with random keys, which reveal nothing."""
    keys: dict[str, None] = {}
    while len(keys) < len(items):
        keys[f"{rng.getrandbits(40):010x}"] = None
    return tuple(item._replace(key=key) for item, key in zip(items, keys, strict=True))


def _orders(
    items: Sequence[Item], people: Sequence[str], each: int, seed: int, rng: random.Random
) -> dict[str, tuple[str, ...]]:
    """Return each annotator's items, lists before cases, in an order of the annotator's own."""
    assigned = assign(len(items), people, each, rng)
    orders = {}
    for name in people:
        own = [item for item, some in zip(items, assigned, strict=True) if name in some]
        random.Random(f"ffmem order {seed} {name}").shuffle(own)
        own.sort(key=lambda item: item.is_composition)
        orders[name] = tuple(item.key for item in own)
    return orders


def _index_facts(index: Index) -> dict[str, Any]:
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
