"""An index that fails or is interrupted at any step: nothing is counted twice, nothing is lost."""

import weakref

import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.indexing import build, worker
from ffmem.indexing.chunks import cut_chunks
from ffmem.indexing.config import BuildOptions, read_run
from ffmem.indexing.partials import Partials
from ffmem.indexing.results import LayerStats
from ffmem.indexing.scan import Scan
from ffmem.indexing.topk import TopK
from ffmem.indexing.worker import IndexWorker
from ffmem.models.arguments import use_threads
from ffmem.storage import Storage
from tests.indexing.folders import content, indexed, memories, write_corpus


@pytest.fixture(scope="module")
def model():
    return memories()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt", n=40)


@pytest.fixture(scope="module")
def whole(model, corpus, tmp_path_factory):
    """The bytes of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "index"
    indexed(folder, corpus, model)
    return content(folder)


def interrupt(patch, owner, name, n, error, after):
    """Let the n-th call of a function raise an error, before or after it does its work."""
    function, calls = getattr(owner, name), []

    def counted(*arguments):
        calls.append(name)
        if len(calls) == n and not after:
            raise error
        found = function(*arguments)
        if len(calls) == n:
            raise error
        return found

    patch.setattr(owner, name, counted)
    return calls


STEPS = [
    (Partials, "commit_sample"),
    (Scan, "read"),
    (Scan, "commit"),
    (LayerStats, "merge"),
    (TopK, "commit"),
    (TopK, "rollback"),
    (IndexWorker, "_scan_rows"),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
def test_a_run_that_fails_at_any_step_of_a_chunk_resumes_to_the_same_bytes(
    model, corpus, whole, tmp_path, monkeypatch, owner, name, after
):
    for error in (KeyboardInterrupt(), StoreError("no room"))[: 1 if after else 2]:
        folder = tmp_path / type(error).__name__
        with monkeypatch.context() as patch:
            # Of two layers with two lists each: the third call is in the middle of a chunk.
            interrupt(patch, owner, name, 3, error, after)
            with pytest.raises(type(error)):
                indexed(folder, corpus, model)
        indexed(folder, corpus, model)
        assert content(folder) == whole


def test_a_partial_that_counts_more_prefixes_than_its_chunks_have_is_refused(
    model, corpus, tmp_path, monkeypatch
):
    commit = Partials.commit

    def commit_one_too_many(self, worker, chunks, n_prefixes, *rest):
        commit(self, worker, chunks, n_prefixes + 1, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Partials, "commit", commit_one_too_many)
        with pytest.raises(StoreError, match=r"count \d+ prefixes; the corpus has \d+\. Delete"):
            indexed(tmp_path / "index", corpus, model)
    for path in (tmp_path / "index" / "partials").glob("partial-*.arrow"):
        path.unlink()
    assert indexed(tmp_path / "index", corpus, model).n_prefixes > 0


class Stopped(BaseException):
    """Ends a run where its workers would start."""


def stop_before_workers(monkeypatch, look=lambda: None):
    def stop(*_):
        look()
        raise Stopped

    monkeypatch.setattr(build, "executor", stop)


def test_a_run_resumes_with_another_number_of_workers(model_folder, corpus, tmp_path, monkeypatch):
    source, folder = ffmem.Corpus(str(corpus), unit="line"), tmp_path / "index"
    stop_before_workers(monkeypatch)
    recorded = BuildOptions(workers=2).threads + 1
    with use_threads(recorded), pytest.raises(Stopped):
        ffmem.index(model_folder, source, folder)
    with pytest.raises(Stopped):
        ffmem.index(model_folder, source, folder, workers=2)
    assert read_run(Storage(folder)).threads == recorded
    with pytest.raises(StoreError, match=rf"threads: {recorded} → {recorded + 1}\. Use the same"):
        ffmem.index(model_folder, source, folder, workers=2, threads=recorded + 1)


def test_the_main_process_keeps_no_model_while_others_work(
    model_folder, corpus, tmp_path, monkeypatch
):
    loaded, alive, load = [], [], ffmem.load

    def remember(*arguments, **options):
        found = load(*arguments, **options)
        loaded.append(weakref.ref(found.model))
        return found

    monkeypatch.setattr("ffmem.models.load.load", remember)
    stop_before_workers(monkeypatch, lambda: alive.append(loaded[0]() is not None))
    source = ffmem.Corpus(str(corpus), unit="line")
    with pytest.raises(Stopped):
        ffmem.index(model_folder, source, tmp_path / "index", workers=2)
    assert alive == [False]
    monkeypatch.undo()
    ffmem.index(model_folder, source, tmp_path / "whole")
    monkeypatch.setattr("ffmem.interventions.forward.load", remember)
    stop_before_workers(monkeypatch, lambda: alive.append(loaded[1]() is not None))
    more = ffmem.Corpus(str(write_corpus(tmp_path / "more.txt", seed=5)), unit="line")
    with pytest.raises(Stopped):
        ffmem.extend(tmp_path / "whole", more, workers=2)
    assert alive == [False, False]


@pytest.fixture
def stopped_with_storage(model, corpus, tmp_path, monkeypatch):
    """A run that shares a folder and was killed after its third commit."""
    with monkeypatch.context() as patch:
        patch.setattr(worker, "COMMIT_SECONDS", 0.0)
        patch.setattr(worker, "COMMIT_SHARE", 0.0)
        interrupt(patch, Partials, "commit", 3, KeyboardInterrupt(), True)
        with pytest.raises(KeyboardInterrupt):
            indexed(tmp_path / "index", corpus, model, shared=str(tmp_path / "shared"))
    return tmp_path / "index"


def test_a_run_resumes_from_its_shared_storage_without_naming_it_again(
    model, corpus, whole, stopped_with_storage, monkeypatch
):
    read = interrupt(monkeypatch, Scan, "read", -1, None, True)
    indexed(stopped_with_storage, corpus, model)
    assert content(stopped_with_storage) == whole
    chunks = list(cut_chunks(ffmem.open(stopped_with_storage).sentences.lengths(), 50))
    assert len(read) == len(chunks) - 3 > 0
    assert list((stopped_with_storage.parent / "shared").iterdir()) == []


def test_a_run_is_not_resumed_with_another_shared_storage(
    model, corpus, stopped_with_storage, tmp_path, monkeypatch
):
    with pytest.raises(StoreError, match=r"results in .*/shared/.*, not in .*/other/.*"):
        indexed(stopped_with_storage, corpus, model, shared=str(tmp_path / "other"))
    with monkeypatch.context() as patch:
        interrupt(patch, Scan, "read", 3, KeyboardInterrupt(), True)
        with pytest.raises(KeyboardInterrupt):
            indexed(tmp_path / "local", corpus, model)
    with pytest.raises(StoreError, match=r"results in .*/local, not in .*/other/.*"):
        indexed(tmp_path / "local", corpus, model, shared=str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()
