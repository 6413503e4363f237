"""Reading a run while its workers commit and while it finishes."""

import shutil
import threading

import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.indexing import merge, worker
from ffmem.indexing.partials import Partials
from ffmem.indexing.status import status
from ffmem.storage import Storage
from tests.indexing.folders import content, indexed, memories, write_corpus


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(worker, "COMMIT_SHARE", 0.0)
    return write_corpus(tmp_path / "corpus.txt")


def at_commit(monkeypatch, look):
    """Call `look` with the number of commits so far, after each commit."""
    commit, commits = Partials.commit, []

    def committing(self, *found):
        commit(self, *found)
        commits.append(True)
        look(len(commits))

    monkeypatch.setattr(Partials, "commit", committing)


def test_shares_are_of_the_prefixes_that_were_counted_with_them(tmp_path, corpus, monkeypatch):
    opened, shares = [], []

    def look(n):
        if n == 1:
            opened.append(ffmem.open(tmp_path / "index"))
        if n == 5:
            shares.extend(opened[0][cell].stats.active_share for cell in opened[0])
            now = ffmem.open(tmp_path / "index")
            assert shares == [now[cell].stats.active_share for cell in now]

    at_commit(monkeypatch, look)
    indexed(tmp_path / "index", corpus)
    assert shares
    assert max(shares) <= 1


def test_a_live_index_whose_run_has_finished_says_so(tmp_path, corpus, monkeypatch):
    opened = []
    at_commit(monkeypatch, lambda n: opened.append(ffmem.open(tmp_path / "index")))
    indexed(tmp_path / "index", corpus)
    with pytest.raises(StoreError, match=r"has changed since you opened it.* Open it again"):
        opened[0]["L0N0"]


def test_a_partial_that_a_worker_commits_again_is_not_merged_with_the_old_count(
    tmp_path, corpus, monkeypatch
):
    layers, saved = Partials.layers, tmp_path / "saved"

    def look(n):
        if n == 2:
            shutil.copytree(tmp_path / "index" / "partials", saved)

    at_commit(monkeypatch, look)

    def commit_in_between(self, partials):
        (older,) = saved.glob("partial-*.arrow")
        shutil.copy(older, tmp_path / "index" / "partials")
        return layers(self, partials)

    monkeypatch.setattr(Partials, "layers", commit_in_between)
    with pytest.raises(StoreError, match=r"partial-.* changed during the merge"):
        indexed(tmp_path / "index", corpus)
    assert not (tmp_path / "index" / "manifest.json").exists()


def test_a_partial_that_is_deleted_between_listing_and_opening_does_not_count(
    tmp_path, corpus, monkeypatch
):
    names, seen = Partials._names, []

    def look(n):
        with monkeypatch.context() as patch:
            patch.setattr(
                Partials, "_names", lambda self: [*names(self), "partials/partial-gone.arrow"]
            )
            seen.append(status(tmp_path / "index").chunks_read)
            seen.append(len(ffmem.open(tmp_path / "index").live.committed))

    at_commit(monkeypatch, look)
    indexed(tmp_path / "index", corpus)
    assert seen[:4] == [1, 1, 2, 1]


@pytest.mark.parametrize("moment", ["before it looks", "while it reads"])
def test_status_of_a_run_that_finishes_meanwhile_is_finished(tmp_path, corpus, monkeypatch, moment):
    import ffmem.indexing.status as module

    indexed(tmp_path / "done", corpus)
    folder = tmp_path / "index"
    (folder / "partials").mkdir(parents=True)
    read_run = module._read_run

    def finish_first(folder):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "done", folder)
        return read_run(folder)

    if moment == "while it reads":
        monkeypatch.setattr(module, "_read_run", finish_first)
    else:
        is_dir = module.Path.is_dir

        def is_dir_after(path):
            if path == folder / "partials" and not (folder / "manifest.json").exists():
                shutil.rmtree(folder)
                shutil.copytree(tmp_path / "done", folder)
            return is_dir(path)

        monkeypatch.setattr(module.Path, "is_dir", is_dir_after)
    assert status(folder).state == "finished"


def test_a_reader_deletes_nothing_while_a_run_finishes(tmp_path, corpus, monkeypatch):
    clear, seen = Storage.clear, []

    def open_meanwhile(self):
        seen.append(ffmem.open(tmp_path / "index").n_prefixes)
        seen.append((tmp_path / "index" / "partials" / "lock").exists())
        clear(self)

    monkeypatch.setattr(Storage, "clear", open_meanwhile)
    index = indexed(tmp_path / "index", corpus, shared=str(tmp_path / "shared"))
    assert seen == [index.n_prefixes, True]
    assert not (tmp_path / "index" / "partials").exists()


def test_what_a_run_leaves_if_it_is_killed_after_its_manifest_is_deleted_by_a_rerun(
    tmp_path, corpus, monkeypatch
):
    model = memories()
    indexed(tmp_path / "whole", corpus, model)

    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "clear", killed)
        with pytest.raises(KeyboardInterrupt):
            indexed(tmp_path / "index", corpus, model, shared=str(tmp_path / "shared"))
    assert ffmem.open(tmp_path / "index").live is None
    assert (tmp_path / "index" / "partials").exists()
    indexed(tmp_path / "index", corpus, model)
    assert content(tmp_path / "index") == content(tmp_path / "whole")
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_reader_waits_while_extend_swaps_folders(tmp_path, corpus, monkeypatch):
    model, folder = memories(), tmp_path / "index"
    indexed(folder, corpus, model)
    rename, found = merge.Path.rename, []
    reader = threading.Thread(target=lambda: found.append(ffmem.open(folder)))

    def read_between(path, target):
        rename(path, target)
        if path == folder:  # it is away now; the extended one is next
            reader.start()
            reader.join(0.3)

    monkeypatch.setattr(merge.Path, "rename", read_between)
    more = write_corpus(tmp_path / "more.txt", seed=5)
    extended = ffmem.extend(folder, ffmem.Corpus(str(more), unit="line"), model=model)
    reader.join()
    assert found[0].manifest == extended.manifest
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
