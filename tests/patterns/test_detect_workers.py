"""Layers examined by others: the same patterns, through faults, and nothing left behind."""

import tempfile

import numpy as np
import pytest
from click.testing import CliRunner

import ffmem
from ffmem.cli import cli
from ffmem.cluster.hiring import Hiring
from ffmem.cluster.pieces import OUTCOME, read_arrays, write_arrays
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.errors import FfmemError, StoreError
from ffmem.patterns import detect as detection
from ffmem.patterns.corpus_view import look
from ffmem.patterns.detect import detect
from ffmem.patterns.layer_worker import (
    LayerOrders,
    LayerSight,
    LayerWorker,
    arrays_of,
    hired,
    read_tests,
)
from ffmem.patterns.lsa import LatentSpace
from ffmem.progress import Progress
from tests.cluster.workers import gone
from tests.indexing.folders import content, indexed, write_corpus
from tests.patterns.faulty import pids, planting

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    root = tmp_path_factory.mktemp("workers")
    corpus = write_corpus(root / "lines.txt", 150)
    return indexed(root / "index", corpus, t=60, lease_tokens=500)


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


def test_a_killed_worker_changes_nothing(index, plain, tmp_path, scratch, monkeypatch):
    marks = tmp_path / "marks"
    monkeypatch.setattr(detection, "Recruit", planting("patterns of layer 1", "kill", marks))
    detect(index, workers=2, progress=QUIET)
    assert content(index.folder / "patterns") == plain
    assert len(list(marks.glob("try.*"))) == 2
    assert gone(pids(marks))
    assert list(scratch.iterdir()) == []


def test_an_error_in_a_layer_ends_the_command_with_one_line(
    index, plain, tmp_path, scratch, monkeypatch
):
    marks = tmp_path / "marks"
    monkeypatch.setattr(detection, "Recruit", planting("control of layer 0", "fail", marks))
    told = CliRunner().invoke(cli, ["patterns", "detect", str(index.folder), "--workers", "2"])
    assert isinstance(told.exception, FfmemError)  # which ends the process with exit code 1
    told_of = "Control of layer 0 could not be done: the weights are bewitched"
    assert str(told.exception) == told_of
    assert gone(pids(marks))
    assert content(index.folder / "patterns") == plain
    assert list(scratch.iterdir()) == []


def test_workers_meet_where_they_are_told_and_leave_nothing_there(index, plain, tmp_path, scratch):
    ffmem.detect(index, workers=2, shared=str(tmp_path / "far"))
    assert content(index.folder / "patterns") == plain
    assert list((tmp_path / "far").iterdir()) == []
    assert list(scratch.iterdir()) == []


def test_workers_of_a_cluster_meet_beside_the_index(index, scratch):
    with detection._meeting(index, Hiring(2, "auto"), None) as (folder, logs):
        assert folder.path.parent == index.folder.parent
        assert logs.parent == folder.path
    assert not folder.path.exists()
    with detection._meeting(index, Hiring(2, "local"), None) as (folder, _):
        assert folder.path.parent == scratch


def test_a_place_that_cannot_be_written_to_is_told_with_what_to_do(index, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(StoreError, match=r"Cannot make a folder in .*nowhere.* with --shared"):
        detect(index, progress=QUIET)


@pytest.fixture(scope="module")
def sight(index):
    view, words = look(index, 0, QUIET)
    return LayerSight(index, view, LatentSpace.fit(words))


def orders_of(index):
    return LayerOrders(index=str(index.folder), space="lsa", top=25, seed=0)


def test_a_worker_that_was_told_finds_what_one_that_saw_does(index, sight, tmp_path):
    orders, shared = orders_of(index), SharedFolder(tmp_path)
    orders.lay_out(shared, sight)
    workers = {"seen": LayerWorker(sight, orders, shared), "told": hired(str(tmp_path))}
    for shuffled in (None, 3):
        for name, worker in workers.items():
            arguments = {"layer": 1, "shuffled": shuffled, OUTCOME: name}
            worker.do(Task(name, "examine", 1, arguments), lambda n: None)
        assert (tmp_path / "seen").read_bytes() == (tmp_path / "told").read_bytes()


def test_a_worker_that_does_not_see_the_index_or_the_orders_is_refused(index, sight, tmp_path):
    with pytest.raises(StoreError, match=r"There are no orders in .* --shared"):
        hired(str(tmp_path))
    orders = LayerOrders(index=str(tmp_path / "elsewhere"), space="lsa", top=25, seed=0)
    orders.lay_out(SharedFolder(tmp_path), sight)
    with pytest.raises(StoreError, match=r"no index at .*elsewhere here.* that all of them share"):
        hired(str(tmp_path))


def test_tests_of_a_layer_are_read_as_they_were_written(index, sight, tmp_path):
    shared = SharedFolder(tmp_path)
    LayerWorker(sight, orders_of(index), shared).do(
        Task("x", "examine", 1, {"layer": 0, "shuffled": None, OUTCOME: "x"}), lambda n: None
    )
    found = read_tests(read_arrays(shared, "x"))
    words = [(3, 4), (), (5,)]
    found = type(found)(**(vars(found) | {"words": words}))
    write_arrays(shared, "y", arrays_of(found))
    again = read_tests(read_arrays(shared, "y"))
    assert (again.layer, again.words, again.n_enough) == (0, words, found.n_enough)
    assert again.lists.top == found.lists.top == 25
    for part in ("lists", "shallow", "semantic"):
        for one, other in zip(getattr(again, part), getattr(found, part), strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.asarray(one).dtype == np.asarray(other).dtype
    assert len(found.shallow.owner) > 0
