import asyncio
import threading
import time

import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.web import worker as worker_module
from ffmem.web.errors import Busy, ClientGone
from ffmem.web.worker import MAX_WAITING, ModelWorker


@pytest.fixture
def worker():
    made = ModelWorker(device="cpu")
    yield made
    made.close()


def test_jobs_run_one_after_the_other_in_their_order(catalog, worker):
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
        indexes = [one.current() for one in catalog.folders.values()]
        return await asyncio.gather(
            *(worker.run(indexes[number % 2], job(number)) for number in range(12))
        )

    assert asyncio.run(all_of_them()) == list(range(12))
    assert order == list(range(12))
    assert max(most) == 1
    assert worker.waiting == 0


def test_a_model_is_loaded_when_needed_once(catalog, worker):
    served = catalog.get()
    assert not worker.is_loaded(served)
    first = asyncio.run(worker.run(served, lambda at: at))
    second = asyncio.run(worker.run(served, lambda at: at))
    assert worker.is_loaded(served)
    assert first.memories is second.memories
    assert first.start == served.index.manifest.start.id


def test_models_held_are_bounded(catalog, worker, monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_MODELS", 1)
    one, other = [one.current() for one in catalog.folders.values()]
    asyncio.run(worker.run(one, lambda at: None))
    asyncio.run(worker.run(other, lambda at: None))
    assert worker.is_loaded(other)
    assert not worker.is_loaded(one)


def test_too_many_in_line_are_told_to_come_again(catalog, worker):
    held = threading.Event()

    async def crowd():
        await worker.run(catalog.get(), lambda _: None)
        worker._seconds = 0.0
        line = [
            asyncio.ensure_future(worker.run(catalog.get(), lambda _: held.wait(20)))
            for _ in range(MAX_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="please retry"):
            await asyncio.wait_for(worker.run(catalog.get(), lambda _: None), 10)
        held.set()
        await asyncio.gather(*line)
        return await worker.run(catalog.get(), lambda _: "again")

    assert asyncio.run(crowd()) == "again"


def test_whoever_would_wait_too_long_is_refused_at_once(catalog, worker, monkeypatch):
    """However many come, all are answered: those who are let in in time, the others at once."""
    monkeypatch.setattr(worker_module, "MAX_SECONDS", 0.4)

    async def visit(number):
        began = time.monotonic()
        try:
            await worker.run(catalog.get(), lambda _: time.sleep(0.1))
        except Busy:
            assert time.monotonic() - began < 0.1
            return "refused"
        return "served"

    async def crowd():
        for _ in range(14):  # the worker learns how long jobs take
            await worker.run(catalog.get(), lambda _: time.sleep(0.1))
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


def test_queued_work_whose_client_has_gone_is_dropped(catalog, worker):
    held, ran = threading.Event(), []

    async def crowd():
        first = asyncio.ensure_future(worker.run(catalog.get(), lambda _: held.wait(20)))
        gone, stays = Client(), Client()
        line = [
            asyncio.ensure_future(worker.run(catalog.get(), lambda _, n=n: ran.append(n), one))
            for n, one in enumerate((gone, stays, gone))
        ]
        await asyncio.sleep(0.1)
        assert worker.waiting == 4
        gone.is_there = False
        await asyncio.sleep(2 * worker_module.POLL_SECONDS)
        assert worker.waiting == 2
        held.set()
        await first
        return await asyncio.gather(*line, return_exceptions=True)

    left, stayed, also_left = asyncio.run(crowd())
    assert ran == [1]
    assert isinstance(left, ClientGone)
    assert isinstance(also_left, ClientGone)
    assert stayed is None


def test_it_says_what_requests_wait_for(catalog, worker, monkeypatch):
    said = []

    async def crowd():
        line = [worker.run(catalog.get(), lambda _: said.append(worker.status()))] * 1
        line.append(worker.run(catalog.get(), lambda _: said.append(worker.status())))
        await asyncio.gather(*line)

    asyncio.run(crowd())
    assert said == ["Queued behind 1 other request", None]
    worker.loading = "some-model"
    assert worker.status() == "Loading some-model"


def test_a_model_can_be_loaded_before_anybody_asks(catalog, worker):
    worker.load(catalog.get()).result(60)
    assert worker.is_loaded(catalog.get())
    assert worker.loading is None
    assert worker.waiting == 0


def test_a_model_that_cannot_be_loaded_leaves_the_pages_without_it(catalog, capfd):
    worker = ModelWorker("nowhere-at-all", "cpu")
    worker.load_all([one.current() for one in catalog.folders.values()])
    with pytest.raises(ffmem.FfmemError, match="nowhere-at-all"):
        asyncio.run(worker.run(catalog.get(), lambda _: None))
    assert worker.model_state(catalog.get()) == "none"
    assert worker.loading is None
    said = capfd.readouterr().err
    for name in catalog.folders:
        assert f"The model of {name} was not loaded" in said
    worker.close()


def test_an_error_leaves_the_line_moving(catalog, worker):
    def fail(_):
        raise ffmem.FfmemError("no")

    with pytest.raises(ffmem.FfmemError, match="no"):
        asyncio.run(worker.run(catalog.get(), fail))
    assert asyncio.run(worker.run(catalog.get(), lambda _: 1)) == 1
    assert worker.waiting == 0


def test_another_model_is_refused(catalog, ungated_folder):
    elsewhere = ModelWorker(str(ungated_folder.parent / "model"), "cpu")
    with pytest.raises(StoreError, match="was built from a model whose weights"):
        asyncio.run(elsewhere.run(catalog.get(), lambda _: None))
