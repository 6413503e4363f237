"""Layers examined by several processes: the same patterns, through faults, and nothing is left."""

import tempfile

import numpy as np
import pytest

import ffmem
from ffmem.errors import FfmemError, StoreError, WorkerError
from ffmem.parallel import ExecutionConfig
from ffmem.patterns import detect as detect_module
from ffmem.patterns.detect import LayerWorker, detect, examine_layer, load_candidates
from ffmem.patterns.features import extract_features
from ffmem.patterns.topics import fit_space
from ffmem.progress import Progress
from tests.indexing.folders import content, indexed, write_corpus
from tests.patterns.bad_workers import DeadlyWorker, DyingWorker, FailingWorker

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


def use(monkeypatch, kind):
    """Use another kind of workers."""
    monkeypatch.setattr(detect_module, "LayerWorker", kind)


def test_a_killed_worker_changes_nothing(index, plain, scratch, monkeypatch):
    use(monkeypatch, DyingWorker)
    detect(index, workers=2, progress=QUIET)
    assert content(index.folder / "patterns") == plain
    assert list(scratch.iterdir()) == []


def test_a_layer_that_kills_every_worker_ends_the_command(index, plain, scratch, monkeypatch):
    use(monkeypatch, DeadlyWorker)
    with pytest.raises(WorkerError, match="3 workers died while working on the patterns of layer"):
        ffmem.detect(index, workers=2)
    assert content(index.folder / "patterns") == plain
    assert list(scratch.iterdir()) == []


def test_workers_that_cannot_start_end_the_command(index, plain, scratch, monkeypatch):
    use(monkeypatch, FailingWorker)
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


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_worker_finds_what_this_process_finds(index, tmp_path, shuffled):
    features, words = extract_features(index, 0, QUIET)
    space = fit_space(words)
    features.save(tmp_path)
    np.save(tmp_path / "space.npy", space)
    LayerWorker(str(tmp_path), str(index.folder), seed=3).examine(1, shuffled)
    found = load_candidates(tmp_path, 1, shuffled)
    expected = examine_layer(index, features, space, 1, shuffled, seed=3).candidates
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype


def test_a_worker_that_does_not_see_the_index_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"no index at .*elsewhere here.* that all of them share"):
        LayerWorker(str(tmp_path), str(tmp_path / "elsewhere"), 0)
