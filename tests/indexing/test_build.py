import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ffmem
from ffmem.errors import CorpusError, FfmemError, StorageFull, StoreError
from ffmem.indexing import worker
from ffmem.indexing.build import build, lock_folder
from ffmem.indexing.config import BuildOptions, IndexConfig
from ffmem.indexing.partials import Partials
from ffmem.progress import Progress
from tests.indexing.folders import Steps, content, indexed, memories, write_corpus


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


@pytest.fixture(autouse=True)
def _commit_after_every_chunk(monkeypatch):
    monkeypatch.setattr(worker, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(worker, "COMMIT_SHARE", 0.0)


def stop_after(monkeypatch, n, before=False):
    """Let the n-th commit of a partial be the last thing that happens, or just not happen."""
    commit = Partials.commit
    committed = []

    def counting(self, name, chunks, *found):
        committed.append(sorted(chunks))
        if len(committed) > n or (len(committed) == n and before):
            raise Killed
        commit(self, name, chunks, *found)
        if len(committed) == n:
            raise Killed

    monkeypatch.setattr(Partials, "commit", counting)
    return committed


def killed(monkeypatch, n, folder, corpus, before=False, **options):
    """Index, and be killed at the n-th commit of a partial."""
    with monkeypatch.context() as patch:
        stop_after(patch, n, before)
        with pytest.raises(Killed):
            indexed(folder, corpus, **options)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt")


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The bytes of a run that nobody kills."""
    folder = tmp_path_factory.mktemp("whole") / "index"
    indexed(folder, corpus)
    return content(folder)


@pytest.fixture(scope="module")
def killed_run(corpus, tmp_path_factory):
    """A run that was killed after its third commit. Copy it before you resume it."""
    folder = tmp_path_factory.mktemp("killed") / "index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "COMMIT_SECONDS", 0.0)
        patch.setattr(worker, "COMMIT_SHARE", 0.0)
        killed(patch, 3, folder, corpus)
    return folder


@pytest.fixture
def unfinished(killed_run, tmp_path):
    """A copy of the run that was killed after its third commit."""
    return Path(shutil.copytree(killed_run, tmp_path / "index"))


@pytest.mark.parametrize(("n", "before"), [(1, True), (1, False), (3, True)])
def test_a_killed_run_resumes_and_ends_in_the_same_bytes(
    tmp_path, monkeypatch, corpus, whole, n, before
):
    killed(monkeypatch, n, tmp_path / "killed", corpus, before)
    assert not (tmp_path / "killed" / "manifest.json").exists()
    with pytest.raises(StoreError, match="is not finished"):
        ffmem.Index(tmp_path / "killed")
    with monkeypatch.context() as patch:
        committed = stop_after(patch, 10**6)
        indexed(tmp_path / "killed", corpus)
    done = n - before
    # Nothing that was committed is read again.
    assert committed[-1] == [chunk for chunk in range(committed[-1][-1] + 1) if chunk >= done]
    assert content(tmp_path / "killed") == whole


def test_what_a_killed_process_left_half_written_is_removed(unfinished, corpus, whole):
    for name in ("manifest.json", "stats/layer-000.parquet", "values/layer-001.parquet"):
        path = unfinished / name
        path.parent.mkdir(exist_ok=True)
        path.with_name(f".{path.name}.0123456789abcdef.tmp").write_bytes(b"PAR1")
    indexed(unfinished, corpus)
    assert content(unfinished) == whole


def test_killed_ten_times_at_random_moments_the_bytes_are_the_same(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt", n=800)
    model, folder = memories("qwen2"), tmp_path / "killed"
    begin = time.monotonic()
    indexed(tmp_path / "whole", corpus, model, chunk_tokens=300)
    whole_time = time.monotonic() - begin
    moments = random.Random(0)
    fork = multiprocessing.get_context("fork")
    kills = 0
    while kills < 10:
        process = fork.Process(
            target=indexed, args=(folder, corpus, model), kwargs={"chunk_tokens": 300}
        )
        process.start()
        time.sleep(moments.uniform(0, whole_time / 4))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        if (folder / "manifest.json").exists():  # done before the tenth kill: once more
            indexed(folder, corpus, model, chunk_tokens=300)
            assert content(folder) == content(tmp_path / "whole")
            shutil.rmtree(folder)
    indexed(folder, corpus, model, chunk_tokens=300)
    assert content(folder) == content(tmp_path / "whole")


def test_chunks_batches_and_thresholds_do_not_change_what_is_found(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    one = indexed(tmp_path / "one", corpus, chunk_tokens=10**6)
    many = indexed(tmp_path / "many", corpus, chunk_tokens=20)
    for cell in one:
        for mine, theirs in zip(one[cell].triggers, many[cell].triggers, strict=True):
            assert mine.coefficient == pytest.approx(theirs.coefficient, rel=1e-4)


def test_a_finished_index_is_left_alone(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    indexed(tmp_path / "index", corpus)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "index").rglob("*")}
    indexed(tmp_path / "index", corpus)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "index").rglob("*")}
    with pytest.raises(
        StoreError, match=r"finished index with other settings: t: 3 → 4\. Use the same"
    ):
        indexed(tmp_path / "index", corpus, t=4)


def test_a_finished_index_of_other_content_is_not_taken_for_this_one(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    indexed(tmp_path / "index", corpus)
    with pytest.raises(
        StoreError, match=r"weights have the hash\n? [0-9a-f]{64}; the loaded one has"
    ):
        indexed(tmp_path / "index", corpus, memories(seed=1))
    ffmem.extend(
        tmp_path / "index",
        ffmem.Corpus(str(write_corpus(tmp_path / "more.txt", seed=5)), unit="line"),
        model=memories(),
    )
    with pytest.raises(StoreError, match=r"finished index of further corpora: .*more\.txt"):
        indexed(tmp_path / "index", corpus)
    indexed(tmp_path / "other", corpus)
    write_corpus(corpus, seed=1)
    with pytest.raises(StoreError, match="settings: the files of the corpus have changed"):
        indexed(tmp_path / "other", corpus)


def test_a_run_that_fails_before_it_has_read_anything_leaves_nothing_behind(tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(CorpusError):
        indexed(tmp_path / "new", tmp_path / "empty.txt")
    assert not (tmp_path / "new").exists()
    corpus = write_corpus(tmp_path / "corpus.txt", n=20)
    indexed(tmp_path / "index", corpus)
    with pytest.raises(CorpusError):
        ffmem.extend(tmp_path / "index", str(tmp_path / "empty.txt"), model=memories())
    more = ffmem.Corpus(str(write_corpus(tmp_path / "more.txt", n=20, seed=5)), unit="line")
    assert ffmem.extend(tmp_path / "index", more, model=memories()).manifest.corpus.sentences == 40


def test_an_index_is_not_written_over_a_file(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt", n=20)
    with pytest.raises(StoreError, match="is a file"):
        indexed(corpus, corpus)
    with pytest.raises(StoreError, match="Cannot write"):
        indexed(corpus / "inside", corpus)


def test_a_finished_index_is_known_by_a_relative_path_and_in_another_dtype(
    tmp_path, monkeypatch, model_folder
):
    corpus = write_corpus(tmp_path / "corpus.txt", n=20)
    monkeypatch.chdir(model_folder.parent)
    options = {"dtype": "bfloat16", "t": 3}
    first = ffmem.index(model_folder.name, str(corpus), tmp_path / "index", **options)
    again = ffmem.index(model_folder.name, str(corpus), tmp_path / "index", **options)
    assert again.manifest == first.manifest
    loaded = ffmem.load(model_folder, dtype="bfloat16")
    assert ffmem.index(loaded, str(corpus), tmp_path / "index", t=3).manifest == first.manifest
    with pytest.raises(StoreError, match="dtype: bfloat16 → float32"):
        ffmem.index(model_folder.name, str(corpus), tmp_path / "index", t=3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"t": 4}, "t: 3 → 4"),
        ({"prefixes": "all"}, "prefixes: best → all"),
        ({"batch_tokens": 41}, "batch_tokens: 40 → 41"),
        ({"start": "none"}, "start: bos → none"),
    ],
)
def test_an_unfinished_index_with_other_settings_is_refused(unfinished, corpus, change, named):
    with pytest.raises(StoreError, match=f"with other settings: {named}. Use the same"):
        indexed(unfinished, corpus, **change)


def test_other_settings_are_refused_before_the_model_is_loaded(unfinished, corpus):
    config = IndexConfig(t=4, chunk_tokens=50, batch_tokens=40, start="bos")
    source = ffmem.Corpus(str(corpus), unit="line")
    options, quiet = BuildOptions(), Progress(quiet=True)
    with pytest.raises(StoreError, match="with other settings: t: 3 → 4"):
        build(lambda: pytest.fail("loaded"), source, unfinished, config, options, quiet)


def test_another_model_or_a_changed_corpus_is_refused_in_words(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.txt")
    killed(monkeypatch, 1, tmp_path / "index", corpus)
    with pytest.raises(StoreError, match=r"settings: the model has other weights\. Use"):
        indexed(tmp_path / "index", corpus, memories(seed=1))
    write_corpus(corpus, seed=1)
    with pytest.raises(StoreError, match=r"settings: the files of the corpus have changed\. Use"):
        indexed(tmp_path / "index", corpus)


@pytest.mark.parametrize("kind", ["partial", "sample"])
@pytest.mark.parametrize("damage", ["cut", "changed", "emptied", "gone"])
def test_what_a_damaged_file_covered_is_read_again(unfinished, corpus, whole, kind, damage):
    path = next((unfinished / "partials").glob(f"{kind}-*.arrow"))
    sound = path.read_bytes()
    middle = len(sound) // 2
    damaged = {
        "cut": sound[:-9],
        "changed": sound[:middle] + bytes([sound[middle] ^ 1]) + sound[middle + 1 :],
        "emptied": b"",
    }
    path.unlink() if damage == "gone" else path.write_bytes(damaged[damage])
    indexed(unfinished, corpus)
    assert content(unfinished) == whole


def test_a_partial_of_another_run_is_refused(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.txt")
    for name, t in (("one", 3), ("two", 4)):
        killed(monkeypatch, 1, tmp_path / name, corpus, t=t)
    (foreign,) = (tmp_path / "two" / "partials").glob("partial-*.arrow")
    shutil.copy(foreign, tmp_path / "one" / "partials")
    with pytest.raises(StoreError, match="belongs to another run"):
        indexed(tmp_path / "one", corpus)


def test_of_two_partials_that_overlap_the_larger_one_counts(
    tmp_path, monkeypatch, unfinished, corpus, whole
):
    killed(monkeypatch, 1, tmp_path / "first", corpus)
    (stale,) = (tmp_path / "first" / "partials").glob("partial-*.arrow")
    shutil.copy(stale, unfinished / "partials")
    with monkeypatch.context() as patch:
        committed = stop_after(patch, 10**6)
        indexed(unfinished, corpus)
    assert committed[-1][0] == 3
    assert content(unfinished) == whole


def test_the_same_files_by_another_path_are_the_same_corpus(
    tmp_path, monkeypatch, unfinished, corpus, whole
):
    shutil.copy(corpus, tmp_path)
    monkeypatch.chdir(tmp_path)
    index = indexed(unfinished, Path("corpus.txt"))
    assert content(unfinished) == whole
    assert indexed(unfinished, Path("corpus.txt")).manifest == index.manifest
    write_corpus(tmp_path / "other.txt", seed=1)
    with pytest.raises(StoreError, match=r"settings: corpus: \S*corpus\.txt → other\.txt\. Use"):
        indexed(unfinished, Path("other.txt"))


def test_a_run_that_finds_the_index_finished_leaves_it_alone(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.txt", n=20)
    indexed(tmp_path / "index", corpus)
    before = content(tmp_path / "index")
    config = IndexConfig(t=3, chunk_tokens=50, batch_tokens=40, start="bos")
    source, quiet = ffmem.Corpus(str(corpus), unit="line"), Progress(quiet=True)
    arguments = (memories, source, tmp_path / "index", config, BuildOptions(), quiet)
    assert build(*arguments) is False
    (tmp_path / "index" / "manifest.json").rename(tmp_path / "manifest.json")
    (tmp_path / "index" / "partials").mkdir()

    def finish_first(path, busy):
        (tmp_path / "manifest.json").rename(tmp_path / "index" / "manifest.json")
        return contextlib.nullcontext()

    monkeypatch.setattr("ffmem.indexing.build.locked", finish_first)
    with lock_folder(tmp_path / "index") as is_finished:
        assert is_finished
    assert content(tmp_path / "index") == before


def test_a_folder_of_other_things_is_refused(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").write_text("meow")
    with pytest.raises(StoreError, match="contains other files, but no index"):
        indexed(folder, corpus)
    assert (folder / "cat.jpg").exists()


def test_two_processes_do_not_work_on_one_folder(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.txt")
    commit = Partials.commit
    refused = []

    def intrude(self, *found):
        with pytest.raises(StoreError, match="Another process is working on"):
            indexed(tmp_path / "index", corpus)
        refused.append(True)
        commit(self, *found)

    monkeypatch.setattr(Partials, "commit", intrude)
    indexed(tmp_path / "index", corpus)
    assert refused


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 300 kB, where mounting is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_an_error_and_what_was_committed_is_kept(tmp_path, small_disk):
    corpus = write_corpus(tmp_path / "corpus.txt", n=400)
    ballast = small_disk / "ballast"
    model = memories()
    settings = {"t": 20, "chunk_tokens": 200}
    indexed(tmp_path / "whole", corpus, model, **settings)
    ballast.write_bytes(bytes(150_000))
    with pytest.raises(StorageFull, match=r"The disk is full.* rerun the command"):
        indexed(small_disk / "index", corpus, model, **settings)
    assert list((small_disk / "index" / "partials").glob("partial-*"))
    assert not list(small_disk.rglob("*.tmp"))
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    indexed(small_disk / "index", corpus, model, **settings)
    assert content(small_disk / "index") == content(tmp_path / "whole")


def test_sentences_longer_than_the_context_are_cut_and_counted(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("w3 " * 100 + "\nw4 w5\n")
    index = indexed(tmp_path / "index", corpus)
    (source,) = index.manifest.corpus.sources
    assert source.cut == 1
    assert source.tokens == 63 + 2  # a context of 64, one place of it for the start token


def test_windows_wider_than_the_context_are_refused(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    for size, is_right in ((63, True), (64, False)):
        source = ffmem.Corpus(str(corpus), unit=f"window:{size}")
        if is_right:
            ffmem.index(memories(), source, tmp_path / "index", start="bos")
            continue
        with pytest.raises(CorpusError, match=r"64 tokens at most.* Use window:63 or less"):
            ffmem.index(memories(), source, tmp_path / "wide", start="bos")


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    pq.write_table(pa.table({"ids": [[3, 4], [5, 64]]}), tmp_path / "ids.parquet")
    with pytest.raises(CorpusError, match=r"Sentence 1 .* token id 64, .* has ids 0 to 63"):
        indexed(tmp_path / "index", tmp_path / "ids.parquet")


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(CorpusError):
        indexed(tmp_path / "index", tmp_path / "empty.txt")


@pytest.mark.parametrize(
    "options", [{"t": 0}, {"prefixes": "some"}, {"compat": "x"}, {"threads": 0}, {"start": "none"}]
)
def test_wrong_options_are_refused_before_anything_is_written(tmp_path, options):
    corpus = write_corpus(tmp_path / "corpus.txt")
    if options == {"start": "none"}:
        options = {"start": "none", "compat": "ff-layers"}
    with pytest.raises(FfmemError):
        indexed(tmp_path / "index", corpus, **options)
    assert not (tmp_path / "index" / "manifest.json").exists()


def test_the_manifest_says_how_the_index_was_made(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    manifest = indexed(tmp_path / "index", corpus, start="auto").manifest
    assert manifest.model.family == "llama"
    assert manifest.start.chosen_by == "lowest loss"
    assert set(manifest.start.losses) == {"none", "<s>", "</s>"}
    lowest = min(manifest.start.losses, key=manifest.start.losses.get)
    assert manifest.start.token == (None if lowest == "none" else lowest)
    assert set(manifest.versions) == {"ffmem", "torch", "transformers"}
    assert manifest.corpus.sources[0].perplexity.tokens > 0
    listed = {path for path in content(tmp_path / "index") if path != "manifest.json"}
    assert set(manifest.files) == listed


def test_the_stated_perplexity_does_not_depend_on_the_chunks(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    made = [
        indexed(tmp_path / str(tokens), corpus, start="auto", chunk_tokens=tokens).manifest
        for tokens in (20, 1000)
    ]
    assert made[0].corpus.sources[0].perplexity == made[1].corpus.sources[0].perplexity
    assert made[0].start == made[1].start


def test_a_finished_index_says_whether_the_weights_were_compared(tmp_path, model_folder, capsys):
    corpus = str(write_corpus(tmp_path / "corpus.txt", n=20))
    loaded = ffmem.load(model_folder)
    for model in (loaded, loaded, model_folder):
        ffmem.index(model, corpus, tmp_path / "index", t=3, progress=Progress())
        said = capsys.readouterr().err
        assert ("weights were not compared" in said) == (model is model_folder)
    assert "nothing to do" in said


def test_the_bar_of_a_serial_run_moves_by_batches_to_the_tokens_of_the_corpus(tmp_path):
    steps = Steps()
    corpus = write_corpus(tmp_path / "corpus.txt")
    index = indexed(tmp_path / "index", corpus, chunk_tokens=10**6, progress=steps)
    moves = steps.of["Triggers"]
    assert sum(moves) == index.manifest.corpus.tokens
    assert len([n for n in moves if n > 0]) > 5
    assert max(moves) <= 40  # the tokens of a batch


@pytest.mark.parametrize(("words", "share"), [("zebra", "25.0 %"), ("<unk>", None)])
def test_a_text_of_unknown_words_brings_a_warning(tmp_path, capsys, words, share):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(f"w3 w4 w5 {words}\n" * 5)
    indexed(tmp_path / "index", corpus, progress=Progress())
    told = capsys.readouterr().err
    assert ("Warning" in told) == (share is not None)
    if share is not None:
        assert f"does not know {share} of the corpus's tokens" in told
