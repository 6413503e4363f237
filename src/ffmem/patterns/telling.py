"""From tests to patterns: which are told, under which names, with which scores."""

import re
from collections import Counter

import numpy as np
from jaxtyping import Bool, Float64
from numpy import ndarray

from ffmem.indexing.store import Index
from ffmem.patterns import closeness
from ffmem.patterns.chunk import COLUMNS, LAST_WORD
from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.describing import Describing, Place, rule_of
from ffmem.patterns.detected import Detected
from ffmem.patterns.examining import LayerTests, holding, is_content_word, selected
from ffmem.patterns.pattern import KINDS, LEAST, Examined, Pattern
from ffmem.patterns.shallow import Candidates, as_marks, generalises, spread
from ffmem.patterns.significance import surprise
from ffmem.patterns.vocabulary import Vocabulary

TOPIC_WORDS = 5
"""That describe a topic."""

_WORD = re.compile(r"\w+")

Chosen = tuple[list[int], list[int]]
"""Places of shallow candidates and of topics in their tests."""


class Telling:
    """Chooses and names what the tests of all layers found."""

    def __init__(self, index: Index, view: CorpusView, words: Vocabulary, alpha: float) -> None:
        self._index, self._view, self._words, self._alpha = index, view, words, alpha

    def patterns(
        self, tests: list[LayerTests], q_values: Float64[ndarray, " test"]
    ) -> dict[int, list[Pattern]]:
        """Return the patterns of every layer."""
        q_of, chosen = {}, {}
        place = 0
        for one in tests:
            n, past = len(one.shallow.p_value), len(one.semantic.p_value)
            shallow, semantic = q_values[place : place + n], q_values[place + n : place + n + past]
            place += n + past
            q_of[one.layer] = (shallow, semantic)
            chosen[one.layer] = self._chosen(one, shallow <= self._alpha, semantic <= self._alpha)
        places = {one.layer: self._places(one, chosen[one.layer][0]) for one in tests}
        every = (place for layer in places.values() for each in layer for place in each)
        described = Describing(self._index, self._view, every)
        return {
            one.layer: self._told(
                one, chosen[one.layer], q_of[one.layer], places[one.layer], described
            )
            for one in tests
        }

    def control(self, tests: list[LayerTests], limit: float) -> dict[str, int]:
        """Return how many shuffled lists have a pattern under a limit of p-values."""
        lists = found = 0
        for one in tests:
            shallow, semantic = self._chosen(
                one, one.shallow.p_value <= limit, one.semantic.p_value <= limit
            )
            owners = {*one.shallow.owner[shallow].tolist(), *one.semantic.owner[semantic].tolist()}
            lists += int((one.lists.rows >= 0).any(axis=1).sum())
            found += len(owners)
        return {"lists": lists, "lists_with_pattern": found}

    def examined(self, one: LayerTests) -> list[Examined]:
        """Return the lists of a layer that hold a trigger."""
        n = (one.lists.rows[:, : one.lists.top] >= 0).sum(axis=1).tolist()
        pairs = zip(one.lists.memory.tolist(), one.lists.sign.tolist(), n, strict=True)
        cell = self._index.layout.cell
        return [Examined(cell(one.layer, memory), sign, k) for memory, sign, k in pairs if k]

    def summary(
        self,
        tests: list[LayerTests],
        told: dict[int, list[Pattern]],
        p_values: Float64[ndarray, " test"],
        q_values: Float64[ndarray, " test"],
        shuffled: bool,
    ) -> Detected:
        """Return all of it in numbers."""
        found = Detected(shuffled)
        passed = p_values[q_values <= self._alpha]
        found.p_limit = float(passed.max()) if len(passed) else 0.0
        for one in tests:
            examined = self.examined(one)
            found.lists += len(examined)
            found.too_short += len(examined) - one.n_enough
            found.memories += len({owner.cell for owner in examined})
            entries, counts = np.unique(one.shallow.entry, return_counts=True)
            for entry, n in zip(entries.tolist(), counts.tolist(), strict=True):
                found.tested[rule_of(self._view.kinds, entry)] += n
            found.tested["topic"] += len(one.semantic.owner)
            patterns = told[one.layer]
            found.kept += Counter(pattern.rule for pattern in patterns)
            found.lists_with_pattern += len({(each.cell, each.sign) for each in patterns})
            found.memories_with_pattern += len({each.cell for each in patterns})
            for kind in KINDS:
                lists = {(each.cell, each.sign) for each in patterns if each.kind == kind}
                found.lists_by_kind[kind] += len(lists)
        return found

    def _chosen(
        self,
        one: LayerTests,
        shallow: Bool[ndarray, " candidate"],
        semantic: Bool[ndarray, " topic"],
    ) -> Chosen:
        """Return what is told of a layer, of those that passed a test.

        A content word that stands in fewer than half of the triggers, most of them about a topic
        that is told, is one of the words of that topic.
        """
        first = as_marks(one.lists.fresh)[one.semantic.owner] & np.uint64((1 << one.lists.top) - 1)
        often = np.bitwise_count(one.semantic.marks & first) >= LEAST
        topics = (often & semantic & generalises(one.semantic, closeness.LEAST_LIFT)).nonzero()[0]
        holds = shallow & holding(self._view, one.shallow)
        about: dict[int, int] = {}
        for place in topics.tolist():
            owner = int(one.semantic.owner[place])
            about[owner] = about.get(owner, 0) | int(one.semantic.marks[place])
        minor = is_content_word(self._view, one.shallow.entry) & (
            2 * one.shallow.k_seen < one.shallow.n_seen
        )
        for place in (holds & minor).nonzero()[0].tolist():
            marks = int(one.shallow.marks[place])
            inside = (marks & about.get(int(one.shallow.owner[place]), 0)).bit_count()
            if 2 * inside >= marks.bit_count():
                holds[place] = False
        return selected(self._view, one.lists, one.shallow, holds), topics.tolist()

    def _places(self, one: LayerTests, chosen: list[int]) -> list[list[Place]]:
        """Return where what each of the chosen looks for stands: in the first trigger with it."""
        view, n = self._view, len(self._view.kinds)
        found: list[list[Place]] = []
        for place in chosen:
            entry, owner = int(one.shallow.entry[place]), int(one.shallow.owner[place])
            rows = one.lists.rows[owner]
            if entry < 0:
                found.append([])
            elif entry < n and view.kinds[entry] >= len(COLUMNS):
                found.append([Place(int(view.kinds[entry]), entry)])
            else:
                words = one.words[entry - n] if entry >= n else (entry,)
                column = LAST_WORD if entry >= n else int(view.kinds[entry])
                codes = view.codes[rows, column]
                first = (int(rows[(codes == word).argmax()]) for word in words)
                found.append([Place(column, row) for row in first])
        return found

    def _told(
        self,
        one: LayerTests,
        chosen: Chosen,
        q_values: tuple[Float64[ndarray, " candidate"], Float64[ndarray, " topic"]],
        places: list[list[Place]],
        described: Describing,
    ) -> list[Pattern]:
        """Return the patterns of a layer, those of a list numbered from the best."""
        drafts: list[tuple[float, Pattern]] = []
        some = one.shallow.where(np.array(chosen[0], np.int64))
        scored = self._scored(one, some, q_values[0][chosen[0]], "shallow")
        for draft, entry, stands in zip(scored, some.entry.tolist(), places, strict=True):
            rule = rule_of(self._view.kinds, entry)
            pattern = draft[1]._replace(
                rule=rule,
                what=described.what(entry, stands),
                description=described.description(rule, entry, stands),
            )
            drafts.append((draft[0], pattern))
        told_words: dict[int, set[str]] = {}
        for owner, (_, pattern) in zip(some.owner.tolist(), drafts, strict=True):
            told_words.setdefault(owner, set()).update(_WORD.findall(pattern.what.casefold()))
        topics = one.semantic.where(np.array(chosen[1], np.int64))
        for draft, named in zip(
            self._scored(one, topics, q_values[1][chosen[1]], "semantic"),
            self._topic_words(one, topics, told_words),
            strict=True,
        ):
            what = ", ".join(named)
            pattern = draft[1]._replace(rule="topic", what=what, description=f"about: {what}")
            drafts.append((draft[0], pattern))
        return _numbered(drafts)

    def _topic_words(
        self, one: LayerTests, found: Candidates, told: dict[int, set[str]]
    ) -> list[list[str]]:
        """Return the words that the triggers of each topic hold more often than other prefixes.

        Words of the shallow patterns that are told of the list are not said again.
        """
        ranks = np.arange(one.lists.rows.shape[1], dtype=np.uint64)
        shown = (found.marks[:, None] >> ranks & np.uint64(1)).astype(bool)
        rows = one.lists.rows[found.owner]
        topic, rank = shown.nonzero()
        which, at = spread(self._view.word_slices[rows[topic, rank]])
        n_words = max(len(self._words.words), 1)
        keys, counts = np.unique(topic[which] * n_words + self._view.words[at], return_counts=True)
        owner, word = np.divmod(keys, n_words)
        common = self._words.sentences[word] / self._words.n_sentences
        n = shown.sum(axis=1)[owner]
        order = np.lexsort((word, -surprise(counts, n, common), owner))
        starts = np.searchsorted(owner[order], np.arange(len(found.owner) + 1))
        named = [self._words.words[each] for each in word[order].tolist()]
        return [
            [each for each in named[start:past] if each not in told.get(owner, ())][:TOPIC_WORDS]
            for owner, start, past in zip(
                found.owner.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True
            )
        ]

    def _scored(
        self,
        one: LayerTests,
        found: Candidates,
        q_values: Float64[ndarray, " candidate"],
        kind: str,
    ) -> list[tuple[float, Pattern]]:
        """Return patterns without names, each with what it is ranked by."""
        ranked = surprise(found.k_seen + found.k_held, found.n_seen + found.n_held, found.base)
        tested = (found.marks & as_marks(one.lists.held)[found.owner]).tolist()
        drafts = []
        for place, owner in enumerate(found.owner.tolist()):
            recall, base = found.k_held[place] / found.n_held[place], float(found.base[place])
            pattern = Pattern(
                self._index.layout.cell(one.layer, int(one.lists.memory[owner])),
                int(one.lists.sign[owner]),
                0,
                kind,
                "",
                "",
                "",
                _ranks(int(found.marks[place])),
                _ranks(tested[place]),
                int(found.n_held[place]),
                float(recall / (recall + base)),
                float(recall),
                base,
                float(recall / base),
                float(found.p_value[place]),
                float(q_values[place]),
            )
            drafts.append((float(ranked[place]), pattern))
        return drafts


def _ranks(marks: int) -> tuple[int, ...]:
    return tuple(rank + 1 for rank in range(64) if marks >> rank & 1)


def _numbered(drafts: list[tuple[float, Pattern]]) -> list[Pattern]:
    """Return patterns in order, numbered within their lists."""
    ordered = sorted(drafts, key=lambda one: (one[1].cell, -one[1].sign, -one[0], one[1].what))
    found: list[Pattern] = []
    for _, pattern in ordered:
        same = found and found[-1][:2] == pattern[:2]
        found.append(pattern._replace(number=found[-1].number + 1 if same else 1))
    return found
