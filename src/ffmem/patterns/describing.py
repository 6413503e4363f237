"""Patterns in words that read well: “ends with “base””, “contains “the United States””."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxtyping import Int8
from numpy import ndarray

from ffmem.indexing.memory import visible, visible_token
from ffmem.indexing.store import Index
from ffmem.patterns.chunk import COLUMNS, SUFFIXES, TOKEN, WORDS, has_spaces, shown
from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.shapes import SHAPES

RULES = (
    "last-token",
    "last-word",
    *("last-n-gram" for _ in WORDS[1:]),
    *("suffix" for _ in SUFFIXES),
    *("anywhere" for _ in range(3)),
)
"""By kind of entry; shapes have their own, and `last-words` and `topic` stand beside."""

EFFORT = {
    **dict.fromkeys(("last-word", "last-n-gram"), 0),
    **dict.fromkeys(("punctuation", "shape", "casing", "position"), 1),
    "last-words": 2,
    "last-token": 3,
    "suffix": 4,
    "anywhere": 5,
}
"""To read a pattern of each rule."""

_SIGNS = {
    ",": "a comma",
    ".": "a full stop",
    "(": "an opening bracket",
    ")": "a closing bracket",
    '"': "a quotation mark",
    ":": "a colon",
    ";": "a semicolon",
    "-": "a hyphen",
    "–": "a dash",
    "'": "an apostrophe",
}


class Place(NamedTuple):
    """Where something stands in the corpus: what a row of the view ends with, or a gram."""

    kind: int
    """As in the view's table."""
    at: int
    """Row; for a gram its entry."""


class Describing:
    """Names patterns by what stands in some places of the corpus."""

    def __init__(self, index: Index, view: CorpusView, places: Iterable[Place]) -> None:
        self._texts = _texts(index, view, set(places))

    def what(self, entry: int, places: Sequence[Place]) -> str:
        """Return what the rule of a pattern looks for."""
        if entry < 0:
            return SHAPES[-1 - entry].name
        texts = sorted((self._texts[place] for place in places), key=str.casefold)
        if len(texts) == 1:
            return texts[0]
        return ", ".join(text if text[:1].isalnum() else f"“{text}”" for text in texts)

    def description(self, rule: str, entry: int, places: Sequence[Place]) -> str:
        """Return a pattern in words."""
        if entry < 0:
            return SHAPES[-1 - entry].description
        if rule == "last-token":
            return f"ends with the token “{visible_token(self.what(entry, places))}”"
        what = visible(self.what(entry, places))
        if rule == "last-words":
            return f"ends with one of: {what}"
        if rule == "suffix":
            return f"ends with a word in -{what}"
        if rule == "anywhere":
            return f"contains “{what}”"
        named = f" ({_SIGNS[what]})" if what in _SIGNS else ""
        return f"ends with “{what}”{named}"


def rule_of(kinds: Int8[ndarray, " entry"], entry: int) -> str:
    """Return the rule that finds an entry of the table, a shape or alternatives."""
    if entry < 0:
        return SHAPES[-1 - entry].rule
    return RULES[int(kinds[entry])] if entry < len(kinds) else "last-words"


def _texts(index: Index, view: CorpusView, places: set[Place]) -> dict[Place, str]:
    """Return what stands in some places, as it stands there."""
    found: dict[Place, str] = {}
    wanted: dict[int, list[tuple[Place, int, int]]] = {}
    for place in places:
        if place.kind == TOKEN:
            found[place] = index.token(int(view.begins[place.at, TOKEN]))
        elif place.kind < len(COLUMNS):
            span = (place, int(view.begins[place.at, place.kind]), int(view.ends[place.at]))
            wanted.setdefault(int(view.sentence[place.at]), []).append(span)
        else:
            sentence, start, end = view.examples[place.at].tolist()
            wanted.setdefault(sentence, []).append((place, start, end))
    spaced = not has_spaces(index)
    for row in index.sentences.rows(0, index.sentences.n_sentences if wanted else 0):
        for place, start, end in wanted.get(row.sentence, ()):
            part = shown(index, row, spaced)[0][start:end].strip()
            is_suffix = len(WORDS) < place.kind < len(COLUMNS)
            found[place] = part.casefold() if is_suffix else part
    return found
