import json
import shutil
import threading

import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.experiments.base import ExperimentResult
from ffmem.web.library import Library
from ffmem.web.limits import NotHere


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
    shelf = Library.of([served_folder], [report]).shelf()
    assert list(shelf.results) == ["agreement"]


def test_a_report_beside_the_index_is_found_by_itself(served_folder, report, tmp_path):
    place = tmp_path / "deep" / "tiny"
    place.parent.mkdir()
    place.symlink_to(served_folder)
    beside = served_folder.with_name("tiny-report")
    beside.symlink_to(report)
    try:
        assert list(Library.of([served_folder]).shelf().results) == ["agreement"]
    finally:
        beside.unlink()
    assert Library.of([served_folder]).shelf().results == {}


def test_a_report_of_something_else_is_refused_in_words(ungated_folder, report):
    with pytest.raises(StoreError, match="no experiment on these indexes"):
        Library.of([ungated_folder], [report])


def test_a_damaged_result_is_told(served_folder, report):
    (report / "agreement.json").write_text("{", encoding="utf-8")
    with pytest.raises(StoreError, match="is not an experiment's result"):
        Library.of([served_folder], [report])


def test_indexes_have_names_of_their_own(served_folder, ungated_folder, tmp_path):
    again = tmp_path / "tiny"
    again.symlink_to(ungated_folder)
    odd = tmp_path / "näme & <b>"
    odd.symlink_to(ungated_folder)
    library = Library.of([served_folder, served_folder, odd])
    assert list(library.shelves)[:2] == ["tiny", "tiny-2"]
    assert library.shelf() is library.shelf("tiny")
    with pytest.raises(NotHere, match=r"no index 'nothing' here. There are: tiny, tiny-2"):
        library.shelf("nothing")


def test_an_index_that_cannot_be_searched_says_why(served_folder, tmp_path, monkeypatch):
    shelf = Library.of([served_folder]).shelf()
    assert shelf.prepare() is None
    copy = shutil.copytree(served_folder, tmp_path / "copy")
    (copy / "search.sqlite").unlink()
    (copy / "search.sqlite").mkdir()  # where nothing can be written, whoever asks
    assert "search" in Library.of([copy]).shelf().prepare()


def test_every_thread_searches_for_itself(library):
    shelf, found, failed = library.shelf(), [], []

    def look():
        try:
            for _ in range(20):
                with shelf.searching() as search:
                    found.append([hit.cell for hit in search.find("river", "triggers")])
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


def test_memories_are_read_by_many_threads_at_once(library):
    index = library.shelf().index
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
