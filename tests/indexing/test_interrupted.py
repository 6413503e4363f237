"""An index that fails or is interrupted at any step: nothing is counted twice, nothing is lost."""

import pytest

from ffmem.errors import StoreError
from ffmem.indexing.partials import Partials
from ffmem.indexing.results import LayerStats
from ffmem.indexing.scan import Scan
from ffmem.indexing.topk import TopK
from ffmem.indexing.worker import IndexWorker
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
    for error in (KeyboardInterrupt(), StoreError("no room")):
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
