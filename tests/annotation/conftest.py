"""A small study."""

import shutil

import pytest

from ffmem.annotation.study import (
    COMPOSITION,
    CONTROL,
    TRIGGERS,
    AnnotationStudy,
    Item,
    Plan,
    Text,
)

TEXTS = tuple(Text(f"the {word} press", " press", " said", " said so.") for word in "abcdef")


def small_plan(people=("ana", "ben", "cai")):
    """Three lists, one of them a control, and a case of composition; everybody judges them all."""
    case = Text("It was 😀 later", None, None, "")
    items = (
        Item("k1", TRIGGERS, "L0N3", 1, TEXTS),
        Item("k2", TRIGGERS, "L1N5", -1, TEXTS[:4]),
        Item("k3", CONTROL, "L0N3", 1, TEXTS[::-1]),
        Item("k4", COMPOSITION, None, 0, (case,), (" later", "\x00", " earlier")),
    )
    orders = {name: ("k2", "k1", "k3", "k4")[i % 2 :] for i, name in enumerate(people)}
    orders = {name: keys if "k2" in keys else (*keys, "k2") for name, keys in orders.items()}
    settings = {
        "plan": "p",
        "options": {"seed": 0},
        "index": {"layers": 2},
        "counts": {"memories": 2},
    }
    return Plan(items, orders, ("head", "second"), settings)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The file of a new study."""
    return AnnotationStudy.create(tmp_path_factory.mktemp("made") / "study.sqlite", small_plan())


@pytest.fixture
def study(made, tmp_path):
    """A new study that a test may change."""
    return AnnotationStudy.open(shutil.copy(made.path, tmp_path / "study.sqlite"))


@pytest.fixture
def ana(study):
    """The first annotator."""
    return study.people()[0]


@pytest.fixture
def heads(study):
    """The two adjudicators."""
    return study.people()[3:]
