"""A small study, on both databases."""

import shutil

import pytest

from ffmem.annotation.item import COMPOSITION, CONTROL, TRIGGERS, Item, Shown
from ffmem.annotation.plan import Plan
from ffmem.annotation.study import AnnotationStudy
from tests.annotation.postgres import Server, programs

TEXTS = tuple(Shown(f"the {word} press", " press", " said", " said so.") for word in "abcdef")


def small_plan(people=("ana", "ben", "cai")):
    """Three lists, one of them a control, and a case of composition; everybody judges them all."""
    items = (
        Item("k1", TRIGGERS, "L0N3", 1, TEXTS),
        Item("k2", TRIGGERS, "L1N5", -1, TEXTS[:4]),
        Item("k3", CONTROL, "L0N3", 1, TEXTS[::-1]),
        Item(
            "k4",
            COMPOSITION,
            None,
            0,
            (Shown("It was 😀 later", None, None, ""),),
            (" later", "\x00", " earlier"),
        ),
    )
    orders = {name: ("k2", "k1", "k3", "k4")[i % 2 :] for i, name in enumerate(people)}
    orders = {name: keys if "k2" in keys else (*keys, "k2") for name, keys in orders.items()}
    settings = {"plan": "p", "asked": {"seed": 0}, "index": {"layers": 2}, "drawn": {"memories": 2}}
    return Plan(items, orders, ("head", "second"), settings)


@pytest.fixture(scope="session")
def postgres():
    """A running PostgreSQL server."""
    if programs() is None:
        pytest.skip("There is no PostgreSQL here: no initdb in PATH or /usr/lib/postgresql.")
    server = Server()
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request):
    """Either database."""
    return request.param


@pytest.fixture
def url(kind, request, tmp_path):
    """An empty database: in turn a file that is not there yet, and one of a real server."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.sqlite'}"
        return
    server = request.getfixturevalue("postgres")
    empty = server.url()
    yield empty
    server.drop(empty)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Make a small study once per kind of database: `made(kind, server)` is where it is."""
    places = {}

    def once(kind, server):
        if kind not in places:
            file = tmp_path_factory.mktemp("made") / "study.sqlite"
            places[kind] = f"sqlite:///{file}" if kind == "sqlite" else server.url()
            AnnotationStudy.create(places[kind], small_plan()).close()
        return places[kind]

    return once


@pytest.fixture
def study(kind, request, made, tmp_path):
    """A small study that was just made, on either database."""
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path / 'study.sqlite'}"
        shutil.copy(made(kind, None).removeprefix("sqlite:///"), tmp_path / "study.sqlite")
    else:
        server = request.getfixturevalue("postgres")
        url = server.url(template=made(kind, server))
    with AnnotationStudy.open(url) as study:
        study.url = url  # for tests that open it again
        yield study
    if kind != "sqlite":
        server.drop(url)


@pytest.fixture
def ana(study):
    """The first annotator."""
    return study.people()[0]


@pytest.fixture
def heads(study):
    """The two adjudicators."""
    return study.people()[3:]
