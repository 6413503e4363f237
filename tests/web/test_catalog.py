import json
import shutil
import threading

import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.experiments.base import ExperimentResult
from ffmem.indexing.query import Query
from ffmem.web import catalog as catalog_module
from ffmem.web.catalog import Catalog
from ffmem.web.errors import NotFound


@pytest.fixture
def report(served_folder, tmp_path):
    """Results of the served index, of another corpus and of another model, in one folder."""
    manifest = ffmem.open(served_folder).manifest

    def result(name, model, corpus):
        settings = {"model_hash": model, "corpus": {"hash": corpus}}
        ExperimentResult(name, "Fig. 4", settings, [{"layer": 0}]).write(tmp_path)

    result("agreement", manifest.model.hash, manifest.corpus.hash)
    result("next-token-rank", manifest.model.hash, "other")
    result("max-probability", "other", manifest.corpus.hash)
    return tmp_path


def test_only_results_of_the_same_model_and_corpus_are_shown(served_folder, report):
    served = Catalog.open([served_folder], [report]).get()
    assert list(served.results) == ["agreement"]


def test_a_report_beside_the_index_is_found_by_itself(served_folder, report, tmp_path):
    place = tmp_path / "deep" / "tiny"
    place.parent.mkdir()
    place.symlink_to(served_folder)
    beside = served_folder.with_name("tiny-report")
    beside.symlink_to(report)
    try:
        assert list(Catalog.open([served_folder]).get().results) == ["agreement"]
    finally:
        beside.unlink()
    assert Catalog.open([served_folder]).get().results == {}


def test_a_report_of_something_else_is_refused_in_words(ungated_folder, report):
    with pytest.raises(StoreError, match="no experiment on these indexes"):
        Catalog.open([ungated_folder], [report])


def test_a_damaged_result_is_told(served_folder, report):
    (report / "agreement.json").write_text("{", encoding="utf-8")
    with pytest.raises(StoreError, match="is not an experiment's result"):
        Catalog.open([served_folder], [report])


def test_indexes_have_names_of_their_own(served_folder, ungated_folder, tmp_path):
    again = tmp_path / "tiny"
    again.symlink_to(ungated_folder)
    odd = tmp_path / "näme & <b>"
    odd.symlink_to(ungated_folder)
    catalog = Catalog.open([served_folder, served_folder, odd])
    assert list(catalog.folders)[:2] == ["tiny", "tiny-2"]
    assert catalog.get() is catalog.get("tiny")
    with pytest.raises(NotFound, match=r"no index 'nothing'. There are: tiny, tiny-2"):
        catalog.get("nothing")


def test_an_index_that_cannot_be_searched_says_why(served_folder, tmp_path, monkeypatch):
    served = Catalog.open([served_folder]).get()
    assert served.search.prepare() is None
    copy = shutil.copytree(served_folder, tmp_path / "copy")
    (copy / "search.sqlite").unlink()
    (copy / "search.sqlite").mkdir()  # where nothing can be written, whoever asks
    assert "search" in Catalog.open([copy]).get().search.prepare()


def test_every_thread_searches_for_itself(catalog):
    served, found, failed = catalog.get(), [], []

    def look():
        try:
            for _ in range(20):
                result = served.search.search(Query("river"), "triggers")
                found.append([hit.cell for hit in result.hits])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(found) == 160
    assert all(cells == found[0] for cells in found)


def test_memories_are_read_by_many_threads_at_once(catalog):
    index = catalog.get().index
    expected = {cell: json.dumps(index[cell].to_dict()) for cell in list(index)[::7]}
    wrong = []

    def look(part):
        for cell in list(expected)[part:] + list(expected)[:part]:
            if json.dumps(index[cell].to_dict()) != expected[cell]:
                wrong.append(cell)

    threads = [threading.Thread(target=look, args=(part,)) for part in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_index_that_does_not_change_is_served_as_it_is_and_new_results_are_found(
    served_folder, report, tmp_path, monkeypatch
):
    monkeypatch.setattr(catalog_module, "REFRESH_SECONDS", 0.0)
    folder = shutil.copytree(served_folder, tmp_path / "copy")
    catalog = Catalog.open([folder])
    before = catalog.get()
    assert catalog.get() is before
    assert before.results == {}
    shutil.copytree(report, tmp_path / "copy-report", ignore=shutil.ignore_patterns("copy*"))
    after = catalog.get()
    assert list(after.results) == ["agreement"]
    assert after.index is before.index
    assert after.search is before.search
    assert catalog.get() is after
