import asyncio
import threading

import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.web import worker as worker_module
from ffmem.web.limits import MOST_WAITING, Busy
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
        line = [
            asyncio.ensure_future(worker.run(library.shelf(), lambda _: held.wait(20)))
            for _ in range(MOST_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match=f"{MOST_WAITING} requests wait"):
            await asyncio.wait_for(worker.run(library.shelf(), lambda _: None), 10)
        held.set()
        await asyncio.gather(*line)
        return await worker.run(library.shelf(), lambda _: "again")

    assert asyncio.run(crowd()) == "again"


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
