"""Many visitors at once: nobody is refused, and nobody gets another's answer."""

import json
import random
import threading
from urllib.request import urlopen

import pytest

import ffmem
from ffmem.web.app import make_app
from ffmem.web.state import State
from ffmem.web.worker import ModelWorker
from tests.web.browser import running

VISITORS, REQUESTS = 20, 8


@pytest.fixture(scope="module")
def questions(catalog):
    """Addresses with what the catalog itself answers: memories, searches, traces under edits."""
    found = []
    for name in catalog.folders:
        index = catalog.get(name).index
        model = ffmem.load(index.manifest.model.source, device="cpu")
        chance = random.Random(name)
        cells = chance.sample(list(index), 12)
        for cell in cells[:6]:
            found.append((f"/api/m/{cell}?index={name}", index[cell].to_dict()))
        for number, text in enumerate(("The river runs", "In the summer of", "one", "the city")):
            state = State(name, text)
            edited = {"off": [str(cells[number])], "scale": {str(cells[-1 - number]): 40.0}}
            state = state.with_edit(cells[number], "off").with_edit(
                cells[-1 - number], "scale", 40.0
            )
            for asked, edits in ((State(name, text), {}), (state, edited)):
                trace = ffmem.trace(index, text, grid=True, model=model, **edits)
                found.append((asked.link("/api/trace", generate=0), trace.to_dict()))
    return found


def alike(one, other):
    """Return whether two answers are the same, up to the noise of float32."""
    if isinstance(other, float):
        return one == pytest.approx(other, rel=1e-4, abs=1e-6)
    if isinstance(other, dict):
        return one.keys() >= other.keys() and all(alike(one[k], other[k]) for k in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def test_twenty_visitors_get_their_own_answers(catalog, questions):
    failed, answered = [], []
    with running(make_app(catalog, ModelWorker(device="cpu"))) as address:

        def visit(number):
            chance = random.Random(number)
            for path, expected in chance.sample(questions, REQUESTS):
                try:
                    with urlopen(address + path, timeout=120) as answer:
                        given = json.load(answer)
                    expected = json.loads(json.dumps(expected))
                    if not alike(given, expected):
                        failed.append((path, "another answer"))
                except Exception as error:
                    failed.append((path, repr(error)))
                answered.append(path)

        visitors = [threading.Thread(target=visit, args=(n,)) for n in range(VISITORS)]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            visitor.join()
    assert not failed
    assert len(answered) == VISITORS * REQUESTS
    assert any("off=" in path for path in answered)


def test_two_edits_of_one_prompt_differ(questions):
    """The comparison above can fail: answers under other edits are not alike."""
    traces = [answer for path, answer in questions if "/api/trace" in path]
    assert not alike(traces[0], traces[1])
    assert not alike(traces[0], traces[2])
