"""An index that is still being made: how far it is, and what can be read of it."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.files import locked
from ffmem.indexing import estimate
from ffmem.indexing.agreement import read_agreement
from ffmem.indexing.chunks import batches
from ffmem.indexing.estimate import index_bytes
from ffmem.indexing.memory import NOTHING_READ
from ffmem.indexing.partials import Partials
from ffmem.indexing.results import SAMPLE_SIZE
from ffmem.indexing.scan import Scan
from ffmem.indexing.status import status
from ffmem.indexing.tables import read_columns
from tests.indexing import test_build
from tests.indexing.folders import indexed, memories, write_corpus
from tests.indexing.test_build import killed
from tests.test_cli import run

_commit_after_every_chunk = test_build._commit_after_every_chunk


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run that was killed after its third chunk."""
    corpus = write_corpus(tmp_path / "corpus.txt")
    killed(monkeypatch, 3, tmp_path / "index", corpus)
    return tmp_path / "index"


def test_an_unfinished_index_holds_what_was_committed(stopped, tmp_path):
    with pytest.raises(StoreError, match="is not finished"):
        ffmem.Index(stopped)
    index = ffmem.open(stopped)
    assert index.live is not None
    assert "unfinished" in repr(index)
    (partial,) = index.live.partials.disjoint()
    assert partial.chunks == {0, 1, 2}
    n = _sentences(index, partial)
    lines = "\n".join(row.text for row in index.sentences.rows(0, n))
    (tmp_path / "part.txt").write_text(lines + "\n")
    part = indexed(tmp_path / "part", tmp_path / "part.txt")
    assert part.n_prefixes == index.n_prefixes
    for layer in range(index.n_layers):
        ours, of_part = (read_agreement(one, layer).columns() for one in (index, part))
        assert ours.keys() == of_part.keys()
        assert all(np.array_equal(ours[name], of_part[name]) for name in ours)
    for cell in part:
        mine, theirs = index[cell], part[cell]
        assert mine.value == theirs.value
        assert mine.stats.active_share == theirs.stats.active_share
        for one, two in zip(mine.triggers, theirs.triggers, strict=True):
            assert one.coefficient == pytest.approx(two.coefficient, rel=1e-4)
            assert one.prefix == two.prefix


def _sentences(index, partial):
    """How many sentences the first chunks hold."""
    total = n = 0
    for row in index.sentences.rows(0, 60):
        if total == partial.n_prefixes:
            return n
        total, n = total + len(row.ids), n + 1
    return n


def test_commands_that_need_a_finished_index_refuse_an_unfinished_one(stopped):
    shown = subprocess.run(
        [sys.executable, "-m", "ffmem", "show", stopped, "L0N1"], capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert "L0N1" in shown.stdout
    assert shown.stdout.startswith("The index is unfinished: ")
    assert "so far. Triggers and statistics are partial.\n" in shown.stdout
    with pytest.raises(StoreError, match="is not finished"):
        ffmem.verify(stopped)
    with pytest.raises(StoreError, match="is not finished"):
        ffmem.merge([stopped, stopped], stopped.with_name("merged"))


def test_an_index_before_its_first_commit_has_no_triggers_yet(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.txt")
    killed(monkeypatch, 1, tmp_path / "index", corpus, before=True)
    index = ffmem.open(tmp_path / "index")
    assert index.n_prefixes == 0
    assert index["L0N0"].triggers == []
    assert index["L0N0"].value.top


def test_before_the_first_commit_show_prints_no_statistics(tmp_path, monkeypatch, capsys):
    killed(monkeypatch, 0, tmp_path / "index", write_corpus(tmp_path / "corpus.txt"))
    code, shown, _ = run("show", tmp_path / "index", "L0N1")
    assert code == 0
    assert "All numbers" not in shown
    assert NOTHING_READ in shown
    assert not re.search(r"\bmax\b|gate open|No prefix of the corpus triggers", shown)
    cases = run("show", tmp_path / "index", "L0N1", "--cases")[1]
    assert NOTHING_READ in cases
    assert "0.0%" not in cases
    page = ffmem.open(tmp_path / "index")["L0N1"]._repr_html_()
    assert NOTHING_READ in page
    assert "triggers it" not in page


def test_an_unfinished_index_is_read_from_the_storage_that_its_workers_share(
    stopped, tmp_path, monkeypatch
):
    folder, corpus = tmp_path / "with storage", tmp_path / "corpus.txt"
    killed(monkeypatch, 3, folder, corpus, shared=str(tmp_path / "shared"))
    assert not (folder / "values").exists()
    mine, other = ffmem.open(folder), ffmem.open(stopped)
    assert status(folder).chunks_read == 3
    assert mine.n_prefixes == other.n_prefixes > 0
    assert [mine[cell].to_dict() for cell in mine] == [other[cell].to_dict() for cell in other]


def test_status_says_how_far_a_stopped_run_is(stopped):
    found = status(stopped)
    assert (found.state, found.chunks_read) == ("stopped", 3)
    assert 150 <= found.tokens_read < found.tokens
    assert (found.values, found.layers) == (2, 2)
    assert "Rerun the command to resume" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["tokens_read"] == found.tokens_read


def test_status_says_that_a_run_is_running(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.txt")
    commit, seen = Partials.commit, []

    def look(self, *found):
        commit(self, *found)
        seen.append(status(tmp_path / "index"))

    monkeypatch.setattr(Partials, "commit", look)
    indexed(tmp_path / "index", corpus)
    assert {one.state for one in seen} == {"running"}
    assert [one.chunks_read for one in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].tokens_read == seen[-1].tokens
    done = status(tmp_path / "index")
    assert (done.state, done.values) == ("finished", done.layers)
    assert done.tokens_read == done.tokens == seen[-1].tokens
    assert not {"chunks", "chunks_read"} & done.to_dict().keys()


def test_status_of_what_is_no_index_is_an_error(tmp_path):
    with pytest.raises(StoreError, match="is not an indexing run"):
        status(tmp_path)
    (tmp_path / "partials").mkdir()
    assert str(status(tmp_path)).startswith("Stopped before the corpus was read. Rerun")
    with locked(tmp_path / "partials" / "lock", "busy"):
        assert status(tmp_path).state == "preparing"


def test_an_estimate_writes_nothing_and_counts_the_corpus(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    before = sorted(tmp_path.rglob("*"))
    found = ffmem.estimate(memories(), ffmem.Corpus(str(corpus), unit="line"), workers=2)
    assert sorted(tmp_path.rglob("*")) == before
    index = indexed(tmp_path / "index", corpus)
    assert (found.sentences, found.tokens) == (60, index.manifest.corpus.tokens)
    assert found.pass_seconds > 0
    assert found.values_seconds > 0
    assert f"{found.tokens:,} tokens" in str(found)


@pytest.mark.parametrize(
    ("options", "start", "first"),
    [
        ({"start": "none"}, None, 0),
        ({"start": "id:0"}, 0, 1),
        ({"start": "id:7"}, 7, 1),
        ({"start": "id:7", "compat": "ff-layers"}, 7, 0),
    ],
)
def test_an_estimate_times_the_pass_that_the_run_would_make(
    options, start, first, tmp_path, monkeypatch
):
    read = []

    def spy(sentences, start, batch_tokens):
        read.append(start)
        return batches(sentences, start, batch_tokens)

    class Spy(Scan):
        def __init__(self, memories, t, all_prefixes, positions):
            read.append(positions.first)
            super().__init__(memories, t, all_prefixes, positions)

    monkeypatch.setattr(estimate, "batches", spy)
    monkeypatch.setattr(estimate, "Scan", Spy)
    corpus = write_corpus(tmp_path / "corpus.txt")
    ffmem.estimate(memories(), ffmem.Corpus(str(corpus), unit="line"), **options)
    assert read == [start, first]


def test_an_estimate_of_the_disk_is_the_size_of_the_columns(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    index = indexed(tmp_path / "index", corpus)
    columns = sum(
        array.nbytes
        for kind in ("triggers", "stats", "values", "keys")
        for path in (index.folder / kind).glob("layer-*")
        for array in read_columns(path).values()
    )
    found = index_bytes(memories(), index.manifest.t) - len(index) * SAMPLE_SIZE * 4
    assert columns * 0.9 < found <= columns


def test_functions_that_need_a_finished_index_refuse_an_opened_one_that_is_not(stopped, tmp_path):
    index = ffmem.open(stopped)
    with pytest.raises(StoreError, match="is not finished"):
        ffmem.search(index, "w3")
    for to in ("parquet", "jsonl", "csv", "neuronpedia"):
        with pytest.raises(StoreError, match="is not finished"):
            ffmem.export(index, to, tmp_path / to)
        assert not (tmp_path / to).exists()
