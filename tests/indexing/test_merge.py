import contextlib
import multiprocessing
import shutil

import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.files import locked
from ffmem.indexing import build, merge, worker
from ffmem.indexing.store import sibling
from tests.indexing.folders import content, indexed, memories, write_corpus


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, and a folder with two corpora and an index of each."""
    model, folder = memories(), tmp_path_factory.mktemp("parts")
    for name in "ab":
        corpus = write_corpus(folder / f"{name}.txt", n=50, seed=ord(name))
        indexed(folder / name, corpus, model)
    return model, folder


@pytest.fixture
def parts(made, tmp_path):
    """Two corpora and an index of each, made by one model."""
    model, folder = made
    for name in "ab":
        shutil.copytree(folder / name, tmp_path / name)
    return model, [folder / "a.txt", folder / "b.txt"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"prefixes": "all"}),
        ("gpt2", {"compat": "ff-layers"}),
        ("ffmem_adaptive", {"prefixes": "all"}),
        ("ffmem_adaptive", {"compat": "ff-layers"}),
    ],
    ids=str,
)
def test_extending_equals_merging_byte_for_byte(tmp_path, name, options):
    model = memories(name)
    a, b = (write_corpus(tmp_path / f"{x}.txt", n=50, seed=ord(x)) for x in "ab")
    indexed(tmp_path / "a", a, model, **options)
    indexed(tmp_path / "b", b, model, **options)
    ffmem.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    ffmem.extend(tmp_path / "a", ffmem.Corpus(str(b), unit="line"), model=model)
    assert content(tmp_path / "a") == content(tmp_path / "merged")
    assert ffmem.verify(tmp_path / "merged") == []


def test_extending_projects_no_value_again(tmp_path, parts, monkeypatch):
    model, (_, b) = parts
    monkeypatch.setattr(worker, "write_values", lambda *_: pytest.fail("projected"))
    ffmem.extend(tmp_path / "a", ffmem.Corpus(str(b), unit="line"), model=model)
    assert ffmem.verify(tmp_path / "a") == []


def test_the_merged_index_is_that_of_the_joined_corpus(tmp_path, parts):
    model, (a, b) = parts
    both = tmp_path / "both.txt"
    both.write_text(a.read_text() + b.read_text())
    whole = indexed(tmp_path / "whole", both, model)
    merged = ffmem.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    for cell in whole:
        mine, theirs = whole[cell], merged[cell]
        for one, two in zip(mine.triggers, theirs.triggers, strict=True):
            assert one.coefficient == pytest.approx(two.coefficient, rel=1e-4)
        assert mine.stats.active_share == theirs.stats.active_share
        assert mine.value == theirs.value
    assert merged.sentences.row(50).text == b.read_text().splitlines()[0]


def test_merging_is_the_same_under_any_tree(tmp_path, parts):
    model, _ = parts
    indexed(tmp_path / "c", write_corpus(tmp_path / "c.txt", n=30, seed=9), model)
    a, b, c = (tmp_path / name for name in "abc")
    ffmem.merge([a, b, c], tmp_path / "flat")
    ffmem.merge([a, b], tmp_path / "ab")
    ffmem.merge([tmp_path / "ab", c], tmp_path / "left")
    ffmem.merge([b, c], tmp_path / "bc")
    ffmem.merge([a, tmp_path / "bc"], tmp_path / "right")
    assert content(tmp_path / "flat") == content(tmp_path / "left") == content(tmp_path / "right")


def test_what_was_not_made_alike_is_refused_and_the_difference_named(tmp_path, parts):
    model, (_, b) = parts
    indexed(tmp_path / "other t", b, model, t=4)
    indexed(tmp_path / "other start", b, model, start="eos")
    indexed(tmp_path / "other model", b, memories(seed=1))
    rounded = memories()
    rounded.model.bfloat16()
    indexed(tmp_path / "other dtype", b, rounded)
    for name, difference in (
        ("other t", "t is 3 in the first and 4"),
        ("other start", "start token is 0 in the first and 1"),
        ("other model", "they are of different models, "),
        ("other dtype", "dtype is float32 in the first and bfloat16"),
    ):
        with pytest.raises(StoreError, match=f"Cannot merge .*: {difference}"):
            ffmem.merge([tmp_path / "a", tmp_path / name], tmp_path / "merged")
    with pytest.raises(StoreError, match="built from a model whose weights have the hash"):
        ffmem.extend(tmp_path / "a", str(b), model=memories(seed=1))


def test_the_same_corpus_is_not_counted_twice(tmp_path, parts):
    model, (a, _) = parts
    before = content(tmp_path / "a")
    ffmem.extend(tmp_path / "a", ffmem.Corpus(str(a), unit="line"), model=model)
    assert content(tmp_path / "a") == before
    other = tmp_path / "the same lines.txt"
    other.write_text(a.read_text() + "\n\n")  # another file, the same sentences
    ffmem.extend(tmp_path / "a", ffmem.Corpus(str(other), unit="line"), model=model)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with pytest.raises(StoreError, match="would be counted twice"):
        ffmem.merge([tmp_path / "a", tmp_path / "copy"], tmp_path / "merged")
    assert content(tmp_path / "a") == before


def test_killed_while_folders_are_swapped_the_index_is_whole_again_on_opening(
    tmp_path, parts, monkeypatch
):
    model, (_, b) = parts
    ffmem.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    before, after = content(tmp_path / "a"), content(tmp_path / "merged")
    original = merge.Path.rename

    class Killed(BaseException):
        pass

    for nth, expected in ((1, before), (2, after), (3, after)):
        folder = tmp_path / f"run {nth}"
        shutil.copytree(tmp_path / "a", folder)
        counted = []

        def rename(path, target=None, nth=nth, counted=counted):
            counted.append(target)
            if len(counted) == nth:
                raise Killed
            return original(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(merge.Path, "rename", rename)
            patch.setattr(merge, "sync", rename)  # comes third, before the old index is removed
            with contextlib.suppress(Killed):
                ffmem.extend(folder, ffmem.Corpus(str(b), unit="line"), model=model)
        assert len(counted) == nth
        ffmem.open(folder)
        assert content(folder) == expected
        assert not sibling(folder, "before").exists()


def test_the_old_index_stays_while_an_extension_may_need_it(tmp_path, parts):
    shutil.copytree(tmp_path / "a", before := sibling(tmp_path / "a", "before"))
    with locked(sibling(tmp_path / "a", "extending") / "lock", "busy"):
        ffmem.open(tmp_path / "a")
        assert before.exists()
    ffmem.search(tmp_path / "a", "w3")
    assert not before.exists()


def test_what_an_interrupted_extension_has_read_is_not_taken_for_another_corpus(
    tmp_path, parts, monkeypatch
):
    model, (_, b) = parts
    c = write_corpus(tmp_path / "c.txt", n=30, seed=9)
    before = content(tmp_path / "a")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(merge, "_swap", killed)
        with pytest.raises(KeyboardInterrupt):
            ffmem.extend(tmp_path / "a", ffmem.Corpus(str(b), unit="line"), model=model)
    with pytest.raises(StoreError, match=r"has read but not added yet\. Extend with .*b\.txt"):
        ffmem.extend(tmp_path / "a", ffmem.Corpus(str(c), unit="line"), model=model)
    assert content(tmp_path / "a") == before
    extended = ffmem.extend(tmp_path / "a", ffmem.Corpus(str(b), unit="line"), model=model)
    assert [source.source for source in extended.manifest.corpus.sources][1:] == [str(b)]


def test_an_extension_that_was_interrupted_while_it_read_is_named(tmp_path, parts, monkeypatch):
    model, (_, b) = parts
    c = write_corpus(tmp_path / "c.txt", n=30, seed=9)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "_read_chunks", killed)
        with pytest.raises(KeyboardInterrupt):
            ffmem.extend(tmp_path / "a", ffmem.Corpus(str(b), unit="line"), model=model)
    with pytest.raises(StoreError, match=r"`ffmem extend .*a .*b\.txt` is unfinished\. Rerun it"):
        ffmem.extend(tmp_path / "a", ffmem.Corpus(str(c), unit="line"), model=model)
    ffmem.extend(tmp_path / "a", ffmem.Corpus(str(b), unit="line"), model=model)


def test_a_target_that_is_not_empty_is_refused(tmp_path, parts):
    with pytest.raises(StoreError, match="holds another index"):
        ffmem.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "b")
    with pytest.raises(StoreError, match="at least two"):
        ffmem.merge([tmp_path / "a"], tmp_path / "merged")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(StoreError, match="contains other files, but no index"):
        ffmem.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "photos")


def test_a_merge_that_is_done_is_done_when_it_is_given_again(tmp_path, parts):
    both = [tmp_path / "a", tmp_path / "b"]
    ffmem.merge(both, tmp_path / "merged")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "merged").rglob("*")}
    ffmem.merge(both, tmp_path / "merged")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "merged").rglob("*")}
    with pytest.raises(StoreError, match="holds another index"):
        ffmem.merge(both[::-1], tmp_path / "merged")


def test_a_killed_merge_is_done_again(tmp_path, parts, monkeypatch):
    both = [tmp_path / "a", tmp_path / "b"]
    ffmem.merge(both, tmp_path / "whole")

    def killed(*_):
        raise KeyboardInterrupt

    for name in ("join_sentences", "write_sample", "hash_files"):
        with monkeypatch.context() as patch:
            patch.setattr(merge, name, killed)
            with pytest.raises(KeyboardInterrupt):
                ffmem.merge(both, tmp_path / "merged")
        with pytest.raises(StoreError, match="not finished"):
            ffmem.Index(tmp_path / "merged")
    ffmem.merge(both, tmp_path / "merged")
    assert content(tmp_path / "merged") == content(tmp_path / "whole")


def _merge_or_refuse(folders, out):
    with contextlib.suppress(StoreError):
        ffmem.merge(folders, out)


def test_merges_into_one_folder_at_once_leave_one_whole_index(tmp_path, parts):
    model, _ = parts
    indexed(tmp_path / "c", write_corpus(tmp_path / "c.txt", n=30, seed=9), model)
    pairs = [[tmp_path / "a", tmp_path / "b"], [tmp_path / "a", tmp_path / "c"]]
    whole = []
    for number, pair in enumerate(pairs):
        ffmem.merge(pair, tmp_path / f"whole {number}")
        whole.append(content(tmp_path / f"whole {number}"))
    fork = multiprocessing.get_context("fork")
    for turn in range(4):
        out = tmp_path / f"merged {turn}"
        processes = [fork.Process(target=_merge_or_refuse, args=(pair, out)) for pair in pairs]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert content(out) in whole
