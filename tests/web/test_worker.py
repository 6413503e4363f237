import asyncio
import threading
import time

import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.web import worker as worker_module
from ffmem.web.limits import MOST_WAITING, Busy, ClientGone
from ffmem.web.worker import Worker


@pytest.fixture
def worker():
    made = Worker(device="cpu")
    yield made
    made.close()


def test_jobs_run_one_after_the_other_in_their_order(library, worker):
    running, most, order = [], [], []

    def job(number):
        def run(_):
            running.append(number)
            most.append(len(running))
            threading.Event().wait(0.01)
            running.remove(number)
            order.append(number)
            return number

        return run

    async def all_of_them():
        shelves = list(library.shelves.values())
        return await asyncio.gather(
            *(worker.run(shelves[number % 2], job(number)) for number in range(12))
        )

    assert asyncio.run(all_of_them()) == list(range(12))
    assert order == list(range(12))
    assert max(most) == 1
    assert worker.waiting == 0


def test_a_model_is_loaded_when_needed_once(library, worker):
    shelf = library.shelf()
    assert not worker.is_loaded(shelf)
    first = asyncio.run(worker.run(shelf, lambda at: at))
    second = asyncio.run(worker.run(shelf, lambda at: at))
    assert worker.is_loaded(shelf)
    assert first.memories is second.memories
    assert first.start == shelf.index.manifest.start.id


def test_models_held_are_bounded(library, worker, monkeypatch):
    monkeypatch.setattr(worker_module, "MOST_MODELS", 1)
    one, other = library.shelves.values()
    asyncio.run(worker.run(one, lambda at: None))
    asyncio.run(worker.run(other, lambda at: None))
    assert worker.is_loaded(other)
    assert not worker.is_loaded(one)


def test_too_many_in_line_are_told_to_come_again(library, worker):
    held = threading.Event()

    async def crowd():
        await worker.run(library.shelf(), lambda _: None)
        worker._seconds = 0.0
        line = [
            asyncio.ensure_future(worker.run(library.shelf(), lambda _: held.wait(20)))
            for _ in range(MOST_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="please retry"):
            await asyncio.wait_for(worker.run(library.shelf(), lambda _: None), 10)
        held.set()
        await asyncio.gather(*line)
        return await worker.run(library.shelf(), lambda _: "again")

    assert asyncio.run(crowd()) == "again"


def test_whoever_would_wait_too_long_is_refused_at_once(library, worker, monkeypatch):
    """However many come, all are answered: those who are let in in time, the others at once."""
    monkeypatch.setattr(worker_module, "MOST_SECONDS", 0.4)

    async def visit(number):
        began = time.monotonic()
        try:
            await worker.run(library.shelf(), lambda _: time.sleep(0.1))
        except Busy:
            assert time.monotonic() - began < 0.1
            return "refused"
        return "served"

    async def crowd():
        for _ in range(14):  # the worker learns how long jobs take
            await worker.run(library.shelf(), lambda _: time.sleep(0.1))
        began = time.monotonic()
        found = await asyncio.gather(*map(visit, range(200)))
        return found, time.monotonic() - began

    found, seconds = asyncio.run(crowd())
    assert 3 <= found.count("served") <= 5
    assert found.count("refused") == 200 - found.count("served")
    assert seconds < 2
    assert worker.waiting == 0


class Client:
    """What the worker asks of a request: whether its client is still there."""

    is_there = True

    async def is_disconnected(self):
        return not self.is_there


def test_queued_work_whose_client_has_gone_is_dropped(library, worker):
    held, ran = threading.Event(), []

    async def crowd():
        first = asyncio.ensure_future(worker.run(library.shelf(), lambda _: held.wait(20)))
        gone, stays = Client(), Client()
        line = [
            asyncio.ensure_future(worker.run(library.shelf(), lambda _, n=n: ran.append(n), one))
            for n, one in enumerate((gone, stays, gone))
        ]
        await asyncio.sleep(0.1)
        assert worker.waiting == 4
        gone.is_there = False
        await asyncio.sleep(2 * worker_module.POLL)
        assert worker.waiting == 2
        held.set()
        await first
        return await asyncio.gather(*line, return_exceptions=True)

    left, stayed, also_left = asyncio.run(crowd())
    assert ran == [1]
    assert isinstance(left, ClientGone)
    assert isinstance(also_left, ClientGone)
    assert stayed is None


def test_it_says_what_requests_wait_for(library, worker, monkeypatch):
    said = []

    async def crowd():
        line = [worker.run(library.shelf(), lambda _: said.append(worker.status()))] * 1
        line.append(worker.run(library.shelf(), lambda _: said.append(worker.status())))
        await asyncio.gather(*line)

    asyncio.run(crowd())
    assert said == ["In line with 1 other request", None]
    worker.loading = "some-model"
    assert worker.status() == "Loading some-model"


def test_a_model_can_be_loaded_before_anybody_asks(library, worker):
    worker.load(library.shelf()).result(60)
    assert worker.is_loaded(library.shelf())
    assert worker.loading is None
    assert worker.waiting == 0


def test_a_model_that_cannot_be_loaded_leaves_the_pages_without_it(library, capfd):
    worker = Worker("nowhere-at-all", "cpu")
    worker.load_all(library.shelves.values())
    with pytest.raises(ffmem.FfmemError, match="nowhere-at-all"):
        asyncio.run(worker.run(library.shelf(), lambda _: None))
    assert worker.readiness(library.shelf()) == "none"
    assert worker.loading is None
    said = capfd.readouterr().err
    for name in library.shelves:
        assert f"The model of {name} was not loaded" in said
    worker.close()


def test_an_error_leaves_the_line_moving(library, worker):
    def fail(_):
        raise ffmem.FfmemError("no")

    with pytest.raises(ffmem.FfmemError, match="no"):
        asyncio.run(worker.run(library.shelf(), fail))
    assert asyncio.run(worker.run(library.shelf(), lambda _: 1)) == 1
    assert worker.waiting == 0


def test_another_model_is_refused(library, ungated_folder):
    elsewhere = Worker(str(ungated_folder.parent / "model"), "cpu")
    with pytest.raises(StoreError, match="was made with a model whose weights"):
        asyncio.run(elsewhere.run(library.shelf(), lambda _: None))
