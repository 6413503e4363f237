"""How an index stands, while it is made and afterwards."""

import json

import pytest

from ffmem.cluster.status import NAME
from ffmem.errors import StoreError
from ffmem.indexing.segments import Segments
from ffmem.indexing.standing import standing
from tests.indexing.folders import indexed, write_corpus


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """The folder of a run that somebody stopped at its third lease."""
    commit = Segments.commit

    def stopping(self, node, layers):
        if node == (0, 2):
            raise KeyboardInterrupt
        commit(self, node, layers)

    monkeypatch.setattr(Segments, "commit", stopping)
    with pytest.raises(KeyboardInterrupt):
        indexed(tmp_path / "index", write_corpus(tmp_path / "corpus.txt"))
    monkeypatch.undo()
    return tmp_path / "index"


def test_a_finished_index_says_so(tmp_path):
    indexed(tmp_path / "index", write_corpus(tmp_path / "corpus.txt"))
    found = standing(tmp_path / "index")
    assert found.is_done
    assert found.told.startswith("Finished: Index(")
    assert found.to_dict() == {
        "folder": str(tmp_path / "index"),
        "state": "finished",
        "status": None,
    }


def test_a_run_that_was_stopped_says_so_and_how_far_it_came(stopped):
    found = standing(stopped)
    assert found.state == "stopped"
    assert found.status.tasks_done == 2
    assert "at its end: stopped by hand" in found.told
    assert "Run the same command again" in found.told
    json.dumps(found.to_dict())


@pytest.mark.parametrize("damage", ['{"phase": 3', '{"phase": "reading"}', "[]"])
def test_a_damaged_status_is_not_taken_for_no_beginning(stopped, damage):
    (stopped / "segments" / NAME).write_text(damage)
    found = standing(stopped)
    assert found.state == "prepared"
    assert "cannot be read" in found.told


def test_a_run_that_has_not_read_its_corpus_is_being_prepared(tmp_path):
    (tmp_path / "index" / "segments").mkdir(parents=True)
    assert standing(tmp_path / "index").state == "preparing"


def test_what_is_no_index_has_no_standing(tmp_path):
    with pytest.raises(StoreError, match="no such folder"):
        standing(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="something else"):
        standing(tmp_path)
