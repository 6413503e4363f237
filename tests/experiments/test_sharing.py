"""A study's long parts as tasks: the same bytes from anybody, through faults and stops."""

import random

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.cli import cli
from ffmem.cluster import pieces
from ffmem.cluster.hiring import Hiring
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.corpus.sentences import TokenSentence
from ffmem.errors import FfmemError, ModelError, StoreError
from ffmem.experiments import catalogue, workplace
from ffmem.experiments.drawn import Drawn, Example
from ffmem.experiments.names import FROM_INDEX, FROM_SAMPLE
from ffmem.experiments.sequences import Sequences
from ffmem.experiments.sharing import (
    read_sample,
    read_sequences,
    sample_arrays,
    sequence_arrays,
)
from ffmem.experiments.study import Study
from ffmem.experiments.study_worker import StudyOrders, StudyWorker, hired
from ffmem.experiments.workplace import Labour, Workplace
from ffmem.progress import Progress
from tests.cluster.workers import gone
from tests.conftest import text_model
from tests.experiments.faulty import pids, planting

MEASURED = (*FROM_INDEX[1:], *FROM_SAMPLE)
"""All that need the model."""

PIECES = 4 + 2 + 2
"""Groups of Section 5, layers of token removal, layers of values."""


@pytest.fixture(scope="module")
def index(model_folder, corpus_file, tmp_path_factory):
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    folder = tmp_path_factory.mktemp("sharing") / "index"
    return ffmem.index(str(model_folder), corpus, folder, t=6, threads=1)


@pytest.fixture(scope="module")
def loaded(model_folder):
    return ffmem.load(str(model_folder))


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A corpus of which all prefixes are four groups."""
    path = tmp_path_factory.mktemp("valid") / "valid.txt"
    chance = random.Random(2)
    words = ["the", "ship", "sailed", "north", "in", "a", "cold", "winter", "and", "nobody", "came"]
    lines = (" ".join(chance.choices(words, k=chance.randint(1, 9))) for _ in range(130))
    path.write_text("\n".join(lines) + "\n")
    return ffmem.Corpus(str(path), unit="line")


def measuring(index, loaded, valid):
    """Return how everything is measured with some labour: to the bytes of the results by name."""

    def measure(out, hiring=None, *, names=MEASURED, shared=None, threads=1, **options):
        labour = Labour(hiring or Hiring(), out / ".working", shared, "cpu", threads)
        settings = {"sample": None, "per_layer": 3, "triggers": 3} | options
        study = Study(index=index, memories=loaded, corpus=valid, labour=labour, **settings)
        with study:
            return {
                result.experiment: result.write(out).read_bytes()
                for result in catalogue.measure(study, names)
            }

    return measure


@pytest.fixture
def measured(index, loaded, valid):
    return measuring(index, loaded, valid)


@pytest.fixture(scope="module")
def plain(index, loaded, valid, tmp_path_factory):
    """What this process finds by itself."""
    out = tmp_path_factory.mktemp("plain")
    found = measuring(index, loaded, valid)(out)
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{n}.json" for n in MEASURED)
    return found


def counting(monkeypatch, stop=None):
    """Count what workers of this process do; the one that would be number `stop` is interrupted."""
    done, do = [], StudyWorker.do

    def counted(self, task, step):
        if len(done) == stop:
            raise KeyboardInterrupt
        done.append(task.key)
        return do(self, task, step)

    monkeypatch.setattr(StudyWorker, "do", counted)
    return done


def test_two_workers_of_whom_one_is_killed_go_on_to_the_same_bytes_and_leave_nothing(
    measured, plain, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:  # begun without workers, and stopped
        counting(patched, 2)
        with pytest.raises(KeyboardInterrupt):
            measured(tmp_path / "out")
    fault = planting("group 1 of Section 5", "kill", tmp_path / "marks")
    monkeypatch.setattr(workplace, "Recruit", fault)
    assert measured(tmp_path / "out", Hiring(2)) == plain
    assert len(list((tmp_path / "marks").glob("try.*"))) == 2
    assert len(pids(tmp_path / "marks")) >= 2
    assert not (tmp_path / "out/.working").exists()
    assert gone(pids(tmp_path / "marks"))


def test_an_error_in_a_task_ends_the_command_with_one_line(index, tmp_path, monkeypatch):
    fault = planting("token removal of layer 1", "fail", tmp_path / "marks")
    monkeypatch.setattr(workplace, "Recruit", fault)
    out = str(tmp_path / "out")
    told = CliRunner().invoke(
        cli, ["experiment", "token-removal", str(index.folder), "--out", out, "--workers", "2"]
    )
    assert isinstance(told.exception, FfmemError)  # which ends the process with exit code 1
    told_of = "Token removal of layer 1 could not be done: the weights are bewitched"
    assert str(told.exception) == told_of
    assert len(list((tmp_path / "marks").glob("try.*"))) == 1
    assert gone(pids(tmp_path / "marks"))


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_a_study_that_was_stopped_goes_on(measured, plain, tmp_path, monkeypatch, stop):
    with monkeypatch.context() as patched:
        before = counting(patched, stop)
        with pytest.raises(KeyboardInterrupt):
            measured(tmp_path)
    assert len(before) == stop
    after = counting(monkeypatch)
    assert measured(tmp_path) == plain
    assert len(after) == PIECES - stop
    assert set(before).isdisjoint(after)
    assert not (tmp_path / ".working").exists()


def test_who_is_stopped_is_told_that_it_goes_on(index, loaded, tmp_path, capsys, monkeypatch):
    counting(monkeypatch, 1)
    labour = Labour(Hiring(), tmp_path / ".working", threads=1)
    study = Study(index=index, memories=loaded, labour=labour, progress=Progress())
    with pytest.raises(KeyboardInterrupt), study:
        study.values  # noqa: B018
    assert "The same command goes on" in capsys.readouterr().err
    monkeypatch.undo()
    with Study(index=index, memories=loaded, labour=labour, progress=Progress()) as again:
        assert len(again.values) == 2
    assert "Going on: 24 of 48 values are measured already." in capsys.readouterr().err


@pytest.mark.parametrize("other", [{"sample": 700}, {"draw": "tokens", "sample": 600, "seed": 1}])
def test_what_was_measured_otherwise_is_not_taken(measured, tmp_path, monkeypatch, other):
    with monkeypatch.context() as patched:
        counting(patched, 2)
        with pytest.raises(KeyboardInterrupt):
            measured(tmp_path / "one", names=["residual-prediction"])
    done = counting(monkeypatch)
    found = measured(tmp_path / "one", names=["residual-prediction"], **other)
    n = len(done)
    assert n >= 1
    assert measured(tmp_path / "new", names=["residual-prediction"], **other) == found
    assert len(done) == 2 * n
    assert not (tmp_path / "one/.working").exists()


def test_other_threads_or_versions_have_other_folders(loaded, monkeypatch):
    def fingerprint(n):
        return Workplace(loaded, Labour(threads=n), Progress(quiet=True)).fingerprint

    assert fingerprint(1) == fingerprint(1) != fingerprint(2)
    before = fingerprint(1)
    monkeypatch.setattr(workplace, "version", lambda name: "0.0")
    assert fingerprint(1) != before


def test_pieces_meet_in_another_folder_if_asked_and_are_removed(
    measured, plain, tmp_path, monkeypatch
):
    seen = []
    monkeypatch.setattr(
        workplace,
        "read_arrays",
        lambda shared, name: seen.append(shared.path) or pieces.read_arrays(shared, name),
    )
    assert measured(tmp_path / "out", shared=str(tmp_path / "far")) == plain
    assert {path.parent for path in seen} == {tmp_path / "far"}
    assert list((tmp_path / "far").iterdir()) == []
    assert not (tmp_path / "out/.working").exists()


def test_another_study_in_the_same_folder_keeps_what_it_has(measured, index, loaded, tmp_path):
    labour = Labour(Hiring(), tmp_path / ".working", threads=1)
    with Study(index=index, memories=loaded, labour=labour) as other:
        assert other.values
        measured(tmp_path, names=["token-removal"])
        assert other.workplace.shared.names()
    assert not (tmp_path / ".working").exists()


def test_a_study_that_fails_keeps_what_it_has(index, loaded, tmp_path):
    labour = Labour(Hiring(), tmp_path / ".working", threads=1)
    study = Study(index=index, memories=loaded, labour=labour)

    def fail():
        with study:
            assert study.values
            raise ValueError("out of the blue")

    with pytest.raises(ValueError, match="out of the blue"):
        fail()
    assert [name for name in study.workplace.shared.names() if name.startswith("values")]


def test_threads_are_those_of_the_workers_and_afterwards_as_before(index, loaded):
    before = torch.get_num_threads()
    with Study(index=index, memories=loaded, labour=Labour(threads=before + 1)):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_model_in_memory_is_not_handed_to_others(tokenizer):
    memories = ffmem.load(text_model("llama"), tokenizer)
    with pytest.raises(FfmemError, match="A model in memory cannot be handed"):
        Workplace(memories, Labour(Hiring(2)), Progress(quiet=True))


def test_a_worker_with_other_weights_or_without_orders_is_refused(model_folder, tmp_path):
    with pytest.raises(StoreError, match=r"There are no orders in .* --shared"):
        hired(str(tmp_path))
    orders = StudyOrders(
        model=str(model_folder), hash="0" * 64, dtype="float32", device="cpu", threads=1
    )
    orders.write(SharedFolder(tmp_path))
    with pytest.raises(ModelError, match=r"weights of hash 0000.* Use the same model everywhere"):
        hired(str(tmp_path))
    SharedFolder(tmp_path).write_text("orders.json", '{"model": 3}')
    with pytest.raises(StoreError, match="of another version of ffmem"):
        hired(str(tmp_path))


def test_what_is_damaged_or_gone_is_told(tmp_path):
    shared = SharedFolder(tmp_path)
    name = pieces.lay_out(shared, "sample", {"ids": np.arange(1000)})
    whole = (tmp_path / name).read_bytes()
    for part in (b"", whole[:300], b"x" * len(whole)):
        (tmp_path / name).write_bytes(part)
        with pytest.raises(StoreError, match="is damaged"):
            pieces.read_arrays(shared, name)
    (tmp_path / name).unlink()
    with pytest.raises(StoreError, match=r"is not in .* any more"):
        pieces.read_arrays(shared, name)


def test_a_name_tells_content_shape_type_and_names_apart(tmp_path):
    shared, numbers = SharedFolder(tmp_path), np.arange(6)
    several = [
        {"a": numbers},
        {"b": numbers},
        {"a": numbers + 1},
        {"a": numbers.reshape(2, 3)},
        {"a": numbers.astype(np.uint64)},
        {"a": numbers, "b": numbers},
    ]
    names = [pieces.lay_out(shared, "x", arrays) for arrays in several]
    assert len(set(names)) == len(several)
    assert pieces.lay_out(shared, "x", {"a": np.arange(12)[::2] // 2}) == names[0]
    for name, arrays in zip(names, several, strict=True):
        found = pieces.read_arrays(shared, name)
        assert list(found) == list(arrays)
        for key, one in arrays.items():
            assert found[key].dtype == one.dtype
            np.testing.assert_array_equal(found[key], one)


def test_pieces_are_those_that_are_not_there_the_largest_first(tmp_path):
    shared = SharedFolder(tmp_path)
    tasks = [Task(f"t{n}", "x", n, {pieces.OUTCOME: f"{n}.npz"}) for n in (1, 5, 3)]
    pieces.write_arrays(shared, "5.npz", {"a": np.arange(2)})
    work = pieces.Pieces(shared, "trying", "things", tasks)
    assert [task.size for task in work.tasks()] == [3, 1]
    assert (work.units, work.units_done) == (9, 5)


ids = st.lists(st.integers(0, 50), min_size=1, max_size=6)
starts = st.none() | st.integers(0, 50)


@given(
    st.lists(
        st.tuples(ids, st.sets(st.integers(0, 6), min_size=1)).map(
            lambda pair: (pair[0], sorted({min(n, len(pair[0])) for n in pair[1]}))
        ),
        min_size=1,
        max_size=5,
    ),
    starts,
)
def test_a_sample_goes_to_others_and_comes_back(drawn, start):
    examples = [
        Example(n, TokenSentence("text", ids, None, None), lengths)
        for n, (ids, lengths) in enumerate(drawn)
    ]
    found, same = read_sample(sample_arrays(Drawn(examples, 9, 1), start))
    assert same == start
    assert [one.lengths for one in found.examples] == [one.lengths for one in examples]
    for one, other in zip(found.examples, examples, strict=True):
        assert one.sentence.ids == other.sentence.ids[: other.lengths[-1]]


@given(st.lists(ids.map(tuple), max_size=4), starts, st.integers(0, 9))
def test_sequences_go_to_others_and_come_back(several, start, layer):
    chance = np.random.default_rng(layer)
    sequence, length = chance.integers(-1, 5, (2, 3, 7))
    sequences = Sequences(layer, np.arange(3), several, sequence, length)
    found, same = read_sequences(sequence_arrays(sequences, start))
    assert (same, found.layer, found.ids) == (start, layer, several)
    for name in ("memory", "sequence", "length"):
        np.testing.assert_array_equal(getattr(found, name), getattr(sequences, name))
