"""Experiments that are finished in a folder are not measured again, unless anything differs."""

import json
from dataclasses import replace
from shutil import copytree

import pytest
import torch

import ffmem
from ffmem.errors import FfmemError
from ffmem.experiments import base, charts, context
from ffmem.experiments.base import NAMES, find, find_all
from ffmem.experiments.forward import SampleEvaluator
from ffmem.progress import Progress
from tests.experiments.planting import measured
from tests.indexing.folders import indexed, write_corpus

OTHERS = [name for name in NAMES if name != "patterns"]
"""All that need the model."""

FROM_SAMPLE = [one.name for one in find_all() if one.metrics]

TWO = ["token-removal", "active-memories"]
"""One that reads the index, and one that reads the sample."""


def measure(made, out, names=TWO, **options):
    return measured(made, out, names, **options)


def report(made, out, **options):
    index, model, valid = made
    settings = {"model": model, "per_layer": 3, "triggers": 3} | options
    return ffmem.report(index, out, str(valid), **settings)


@pytest.fixture
def ran(monkeypatch):
    """The names of the experiments that are measured, as they begin."""
    names = []

    def noting(experiment):
        def measure(context):
            names.append(experiment.name)
            return experiment.measure(context)

        return measure

    for experiment in find_all():
        change(monkeypatch, experiment.name, noting(experiment))
    return names


def change(monkeypatch, name, measure):
    """Let an experiment be measured by another function."""
    changed = replace(find(name), measure=measure)
    module = f"ffmem.experiments.{name.replace('-', '_')}"
    monkeypatch.setattr(f"{module}.EXPERIMENT", changed)


def interrupt(monkeypatch, name):
    """Let Ctrl-C come when an experiment begins."""

    def stop(context):
        raise KeyboardInterrupt

    change(monkeypatch, name, stop)


def content(folder):
    """The bytes of every file; a PDF's ids of fonts differ from run to run."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".pdf"}


@pytest.fixture(scope="module")
def finished(made, tmp_path_factory):
    """The folder of a whole report."""
    return report(made, tmp_path_factory.mktemp("whole")).parent


def test_a_stopped_report_goes_on_to_the_same_bytes(
    made, finished, ran, tmp_path, monkeypatch, capsys
):
    stop = "stop-words"  # behind some that read the index, and some that read the sample
    with monkeypatch.context() as patched:
        interrupt(patched, stop)
        with pytest.raises(KeyboardInterrupt):
            report(made, tmp_path)
    before = [name for name in ran if name != "patterns"]
    assert before == OTHERS[: OTHERS.index(stop)]
    ran.clear()
    report(made, tmp_path, progress=Progress())
    assert ran == ["patterns", *OTHERS[OTHERS.index(stop) :]]
    told = capsys.readouterr().err
    assert f"has the results: {', '.join(before)}.\n" in told
    assert content(tmp_path) == content(finished)


def test_a_report_writes_each_result_and_figure_once(made, tmp_path, monkeypatch):
    written = []

    def noting(write):
        def note(result, *more):
            written.append((write.__name__, result.experiment))
            return write(result, *more)

        return note

    monkeypatch.setattr(base.ExperimentResult, "write", noting(base.ExperimentResult.write))
    monkeypatch.setattr(charts, "write_figure", noting(charts.write_figure))
    report(made, tmp_path)
    assert sorted(written) == sorted(
        (kind, name) for kind in ("write", "write_figure") for name in NAMES
    )


def test_a_finished_report_runs_no_pass_over_the_sample(made, finished, ran, tmp_path, monkeypatch):
    copytree(finished, tmp_path, dirs_exist_ok=True)
    passes, read = [], SampleEvaluator.read
    monkeypatch.setattr(
        SampleEvaluator, "read", lambda self, group: passes.append(1) or read(self, group)
    )
    report(made, tmp_path)
    assert (ran, passes) == (["patterns"], [])
    (tmp_path / "neural-memory.json").unlink()
    report(made, tmp_path)
    assert ran == ["patterns"] * 2 + ["neural-memory"]
    assert passes


def test_an_experiment_takes_what_a_report_finished_and_the_other_way(
    made, finished, ran, tmp_path
):
    copytree(finished, tmp_path, dirs_exist_ok=True)
    for name in ("agreement", "stop-words"):
        (tmp_path / f"{name}.json").unlink()
    measure(made, tmp_path, "agreement", corpus=None)
    measure(made, tmp_path, FROM_SAMPLE)
    report(made, tmp_path)
    assert ran == ["agreement", "stop-words", "patterns"]
    assert content(tmp_path) == content(finished)


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ({}, []),
        ({"seed": 1}, TWO),
        ({"per_layer": 2}, ["token-removal"]),
        ({"triggers": 2}, ["token-removal"]),
        ({"sample": 15}, ["active-memories"]),
        ({"sample": "all"}, ["active-memories"]),
        ({"draw": "tokens"}, ["active-memories"]),
        ({"corpus": {"unit": "window:4"}}, ["active-memories"]),
        ({"corpus": {"unit": "line", "limit": 12}}, ["active-memories"]),
        ({"threads": 3}, TWO),
    ],
    ids=str,
)
def test_other_settings_are_measured_where_they_matter(made, ran, tmp_path, changed, again):
    if "corpus" in changed:
        changed = {"corpus": ffmem.Corpus(str(made[2]), **changed["corpus"])}
    measure(made, tmp_path, threads=1)
    ran.clear()
    results = measure(made, tmp_path, **({"threads": 1} | changed))
    assert ran == again
    fresh = measure(made, tmp_path / "new", **({"threads": 1} | changed))
    assert results == fresh
    for name in TWO:  # what was there is replaced
        kept, new = (folder / f"{name}.json" for folder in (tmp_path, tmp_path / "new"))
        assert kept.read_bytes() == new.read_bytes()


def test_another_dtype_is_measured(tiny_index, model_folder, ran, tmp_path):
    for dtype in (None, "float32", "bfloat16"):
        ffmem.experiment("agreement", tiny_index, tmp_path, model=model_folder, dtype=dtype)
    assert ran == ["agreement"] * 2


@pytest.mark.parametrize("library", ["ffmem", "torch"])
def test_another_version_is_measured(made, ran, tmp_path, monkeypatch, library):
    measure(made, tmp_path)
    true = context.version
    monkeypatch.setattr(context, "version", lambda name: "0.0" if name == library else true(name))
    measure(made, tmp_path)
    assert ran == TWO * 2


def test_a_changed_index_or_corpus_is_measured(made, ran, tmp_path):
    train, valid = write_corpus(tmp_path / "train.txt"), write_corpus(tmp_path / "valid.txt", n=9)
    model, out = made[1], tmp_path / "out"
    index = indexed(tmp_path / "index", train, model, t=5)
    measure((index, model, valid), out)
    lines = [line.split() for line in valid.read_text().splitlines()]
    valid.write_text("".join(" ".join(reversed(words)) + "\n" for words in lines))
    measure((index, model, valid), out)
    assert ran == [*TWO, "active-memories"]
    ran.clear()
    more = ffmem.Corpus(str(write_corpus(tmp_path / "more.txt", n=9, seed=2)), unit="line")
    measure((ffmem.extend(index.folder, more, model=model), model, valid), out)
    assert ran == TWO


@pytest.mark.parametrize("damage", ["half", "empty", "foreign", "without a fingerprint"])
def test_a_file_that_is_no_whole_result_does_not_count(made, ran, tmp_path, damage):
    measure(made, tmp_path, "agreement")
    path = tmp_path / "agreement.json"
    whole = path.read_bytes()
    old = {k: v for k, v in json.loads(whole).items() if k != "fingerprint"}
    path.write_bytes(
        {
            "half": whole[: len(whole) // 2],
            "empty": b"",
            "foreign": b"[]",
            "without a fingerprint": json.dumps(old).encode(),
        }[damage]
    )
    measure(made, tmp_path, "agreement")
    assert ran == ["agreement"] * 2
    assert path.read_bytes() == whole


def test_patterns_are_always_read_anew(made, finished, ran, tmp_path):
    first = (finished / "patterns.json").read_bytes()
    for _ in range(2):
        measure(made, tmp_path, "patterns", corpus=None)
        assert (tmp_path / "patterns.json").read_bytes() == first
    assert ran == ["patterns"] * 2
    assert "fingerprint" not in json.loads(first)


def test_figures_that_a_stop_kept_from_being_drawn_are_drawn(made, tmp_path, ran):
    measure(made, tmp_path, "agreement")
    (tmp_path / "agreement.svg").unlink()
    measure(made, tmp_path, "agreement")
    assert ran == ["agreement"]
    assert (tmp_path / "agreement.svg").read_text().startswith("<svg")


def test_threads_are_those_asked_for_and_afterwards_as_before(made, tmp_path, monkeypatch):
    before, seen = torch.get_num_threads(), []

    def note(context):
        seen.append(torch.get_num_threads())
        return agreement.measure(context)

    agreement = find("agreement")
    change(monkeypatch, "agreement", note)
    measure(made, tmp_path, "agreement", threads=before + 1)
    assert (seen, torch.get_num_threads()) == ([before + 1], before)
    with pytest.raises(FfmemError, match="`threads` 0"):
        measure(made, tmp_path, "agreement", threads=0)
