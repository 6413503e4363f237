"""One item as an annotator sees it: texts, words, the sheet so far. Nothing tells what it is of.

What leaves the server is built here field by field, so that an item's memory, its sign and whether
it is a control cannot slip out with it.
"""

from typing import Any, Literal, NamedTuple

from typing_extensions import TypedDict

from ffmem.annotation.item import COMPOSITION, Item, Shown
from ffmem.annotation.sheet import Sheet
from ffmem.annotation.study import AnnotationStudy, Annotator, Opened, Task
from ffmem.indexing.memory import visible

COLOURS = 9
"""Patterns that have a colour of their own; the tenth has that of the first."""


TaskState = Literal["not begun", "begun", "handed in"]


class TextJson(TypedDict):
    """A prefix, its last token, and what follows."""

    prefix: str
    last_token: str | None
    next_token: str | None
    rest: str


class PatternJson(TypedDict):
    """A pattern of a sheet."""

    id: str
    description: str
    kind: Literal["shallow", "semantic"] | None
    marks: list[int]
    """Texts that show it, from 1."""


class SheetJson(TypedDict):
    """What somebody says about an item."""

    patterns: list[PatternJson]
    no_pattern: bool
    related: bool | None
    note: str
    done: bool


class Stand(TypedDict):
    """Where a sheet stands after it was saved."""

    version: int
    sheet: SheetJson
    problems: list[str]
    """Why it cannot be handed in yet."""
    can_undo: bool
    can_redo: bool
    merged: bool
    """Whether somebody else's changes were joined with those that were sent."""
    next: str | None
    """After handing in: the next item that is open."""


class ItemJson(Stand):
    """An item and its sheet."""

    key: str
    form: Literal["patterns", "composition"]
    """What is asked: patterns in a list of texts, or whether two words are related."""
    texts: list[TextJson]
    words: list[str]
    place: int
    of: int


class Line(NamedTuple):
    """A text as the page shows it."""

    rank: int
    before: str
    last: str
    rest: str


def is_composition(item: Item) -> bool:
    """Return whether an item asks about words and not about patterns."""
    return item.kind == COMPOSITION


def lines(item: Item) -> list[Line]:
    """Return the texts of an item, in full."""
    return [_line(rank, text) for rank, text in enumerate(item.texts, start=1)]


def stand(opened: Opened, merged: bool = False, following: str | None = None) -> Stand:
    """Return where a sheet stands."""
    return {
        "version": opened.version,
        "sheet": sheet_json(opened.sheet),
        "problems": opened.sheet.problems(is_composition(opened.item)),
        "can_undo": opened.can_undo,
        "can_redo": opened.can_redo,
        "merged": merged,
        "next": following,
    }


def item_json(opened: Opened) -> ItemJson:
    """Return an item with its sheet, for programs."""
    item = opened.item
    return {
        **stand(opened),
        "key": item.key,
        "form": "composition" if is_composition(item) else "patterns",
        "texts": [
            {
                "prefix": text.prefix,
                "last_token": text.last_token,
                "next_token": text.next_token,
                "rest": text.rest,
            }
            for text in item.texts
        ],
        "words": list(item.words),
        "place": opened.place,
        "of": opened.of,
    }


def sheet_json(sheet: Sheet) -> SheetJson:
    """Return a sheet as JSON."""
    content: Any = sheet.to_dict()
    found: SheetJson = content
    return found


def colour(number: int) -> str:
    """Return the class that colours the pattern of a number, from 1."""
    return f"c{(number - 1) % COLOURS + 1}"


def state_of(task: Task) -> TaskState:
    """Return what the queue says of an item."""
    return "handed in" if task.done else "begun" if task.version else "not begun"


def following(study: AnnotationStudy, person: Annotator, key: str) -> str | None:
    """Return the next item that is not handed in, after this one and then from the start."""
    tasks = study.queue(person)
    here = next((place for place, task in enumerate(tasks) if task.key == key), -1)
    return next(
        (task.key for task in (*tasks[here + 1 :], *tasks[: here + 1]) if not task.done), None
    )


def _line(rank: int, text: Shown) -> Line:
    prefix, last = text.prefix, text.last_token or ""
    # A token that is part of a character is shown as bytes, which the prefix ends in too.
    before = prefix[: len(prefix) - len(last)] if last and prefix.endswith(last) else prefix
    return Line(rank, visible(before), visible(prefix[len(before) :]), visible(text.rest))
