"""Layers examined by several processes: the same patterns, through faults, and nothing is left."""

import tempfile

import numpy as np
import pytest

import ffmem
from ffmem.errors import FfmemError, StoreError, WorkerError
from ffmem.parallel import ExecutionConfig
from ffmem.patterns import detect as detect_module
from ffmem.patterns.detect import (
    LayerExaminer,
    LayerTask,
    detect,
    load_tests,
    make_worker,
)
from ffmem.patterns.features import extract_features
from ffmem.patterns.topics import fit_space
from ffmem.progress import Progress
from tests.indexing.folders import content, indexed, write_corpus
from tests.patterns.bad_workers import deadly, dying, failing

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    root = tmp_path_factory.mktemp("workers")
    corpus = write_corpus(root / "lines.txt", 150)
    return indexed(root / "index", corpus, t=60, chunk_tokens=500)


@pytest.fixture(scope="module")
def plain(index):
    """The patterns that this process finds by itself."""
    detect(index, progress=QUIET)
    return content(index.folder / "patterns")


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def use(monkeypatch, factory):
    """Let workers be made by a function."""
    monkeypatch.setattr(detect_module, "make_worker", factory)


def test_a_killed_worker_changes_nothing(index, plain, scratch, monkeypatch):
    use(monkeypatch, dying)
    detect(index, workers=2, progress=QUIET)
    assert content(index.folder / "patterns") == plain
    assert list(scratch.iterdir()) == []


def test_a_layer_that_kills_every_worker_ends_the_command(index, plain, scratch, monkeypatch):
    use(monkeypatch, deadly)
    with pytest.raises(WorkerError, match="3 workers died while working on the patterns of layer"):
        ffmem.detect(index, workers=2)
    assert content(index.folder / "patterns") == plain
    assert list(scratch.iterdir()) == []


def test_workers_that_cannot_start_end_the_command(index, plain, scratch, monkeypatch):
    use(monkeypatch, failing)
    with pytest.raises(FfmemError, match="There is no room here"):
        ffmem.detect(index, workers=2)
    assert content(index.folder / "patterns") == plain
    assert list(scratch.iterdir()) == []


def test_workers_of_a_cluster_meet_beside_the_index(index, scratch):
    with detect_module._scratch_folder(index, ExecutionConfig(2, "auto")) as folder:
        assert folder.parent == index.folder.parent
    assert not folder.exists()
    with detect_module._scratch_folder(index, ExecutionConfig(2, "local")) as folder:
        assert folder.parent == scratch


def test_a_missing_temporary_folder_is_an_error(index, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(StoreError, match=r"Cannot create a folder in .*nowhere"):
        detect(index, workers=2, progress=QUIET)


@pytest.fixture(scope="module")
def examiner(index):
    features, words = extract_features(index, 0, QUIET)
    return LayerExaminer(index, features, fit_space(words), seed=0)


@pytest.mark.parametrize("shuffled", [None, 3])
def test_a_worker_finds_what_this_process_finds(examiner, tmp_path, shuffled):
    examiner.features.save(tmp_path)
    np.save(tmp_path / "space.npy", examiner.space)
    worker = make_worker(str(tmp_path), str(examiner.index.folder), 0)
    task = LayerTask(1, shuffled)
    worker.examine(*task)
    found, expected = load_tests(tmp_path, examiner, task), examiner.examine(task)
    assert found.layer == expected.layer
    for part in ("lists", "found"):
        for one, other in zip(getattr(found, part), getattr(expected, part), strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.asarray(one).dtype == np.asarray(other).dtype


def test_a_worker_that_does_not_see_the_index_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"no index at .*elsewhere here.* that all of them share"):
        make_worker(str(tmp_path), str(tmp_path / "elsewhere"), 0)
