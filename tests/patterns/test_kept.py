"""Patterns are kept beside an index as they were given, or refused: never half, never stale."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.cells import Cell
from ffmem.errors import FfmemError, StoreError
from ffmem.patterns.kept import Patterns, Writing, damaged, is_stale, kept
from ffmem.patterns.pattern import LABELS, Examined, Pattern, labels
from tests.conftest import text_model


@pytest.fixture
def index(tiny_index, tmp_path):
    shutil.copytree(tiny_index.folder, tmp_path / "index")
    return ffmem.open(tmp_path / "index")


def pattern(cell=(1, 2), sign=1, number=1, **fields):
    given = {
        "kind": "shallow",
        "description": "ends with “ base”",
        "rule": "last-token",
        "what": " base",
        "ranks": (1, 2, 5),
    }
    return Pattern(Cell(*cell), sign, number, **(given | fields))


SOME = [
    pattern(number=2, kind="semantic", description="über 船 🚢", held_ranks=(26, 30), held=25),
    pattern(number=1, precision=0.9, recall=0.5, base=0.01, lift=50.0, p_value=1e-9, q_value=0.0),
    pattern(sign=-1),
    pattern(cell=(1, 0)),
]


def write(index, source="automatic", patterns=SOME, settings=None):
    writing = Writing(index, source)
    lists = {Examined(one.cell, one.sign, 6) for one in patterns} | {Examined(Cell(1, 7), 1, 4)}
    writing.layer(1, lists, patterns)
    writing.commit(settings or {"alpha": 0.05})


def test_what_was_written_is_read_back_in_order(index):
    write(index)
    patterns = Patterns(index, "automatic")
    assert patterns.of("L1N2") == [SOME[1], SOME[0], SOME[2]]
    assert patterns.of((1, 0)) == [SOME[3]]
    assert patterns.of("L0N0") == []
    assert patterns.settings == {"alpha": 0.05}
    assert patterns.lists(0) == []
    assert patterns.lists(1)[-1] == Examined(Cell(1, 7), 1, 4)
    assert [(one.cell.memory, one.sign) for one in patterns.lists(1)] == [
        (0, 1),
        (2, 1),
        (2, -1),
        (7, 1),
    ]


def test_the_same_findings_give_the_same_bytes_in_any_order(index):
    def content():
        folder = index.folder / "patterns"
        return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    write(index)
    first = content()
    write(index, patterns=SOME[::-1])
    assert content() == first


def test_patterns_of_another_state_of_the_index_are_refused_and_not_listed(index):
    write(index)
    write(index, "human")
    assert [patterns.source for patterns in kept(index)] == ["human", "automatic"]
    manifest = index.folder / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    assert kept(index) == []
    assert is_stale(index, "automatic")
    with pytest.raises(StoreError, match=r"another state of the index.*ffmem patterns detect"):
        Patterns(index, "automatic")


def test_an_index_that_is_extended_keeps_its_patterns_but_does_not_show_them(
    index_of, tokenizer, tmp_path, corpus_file
):
    lines = corpus_file.read_text(encoding="utf-8").splitlines()
    for name, part in (("one", lines[:20]), ("two", lines[20:40])):
        (tmp_path / name).with_suffix(".txt").write_text("\n".join(part), encoding="utf-8")
    one, two = (ffmem.Corpus(str(tmp_path / f"{name}.txt"), unit="line") for name in ("one", "two"))
    index = index_of("gpt2", one, tmp_path / "made", start="eos")
    write(index)
    memories = ffmem.load(text_model("gpt2"), tokenizer)
    extended = ffmem.extend(index.folder, two, model=memories)
    assert is_stale(extended, "automatic")
    assert damaged(extended) == []


def test_a_writing_that_stops_leaves_the_old_patterns(index):
    write(index)
    writing = Writing(index, "automatic")
    writing.layer(0, [], [])
    assert Patterns(index, "automatic").of("L1N2") == [SOME[1], SOME[0], SOME[2]]


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', '{"format": 1, "index": 3}'])
def test_a_manifest_that_is_none_is_an_error_that_names_the_command(index, content):
    write(index)
    (index.folder / "patterns/automatic/manifest.json").write_text(content)
    with pytest.raises(StoreError, match="ffmem patterns detect"):
        Patterns(index, "automatic")


def test_a_damaged_file_is_found_and_told(index):
    write(index)
    assert damaged(index) == [] == ffmem.verify(index.folder)
    path = index.folder / "patterns/automatic/found/layer-001.parquet"
    path.write_bytes(path.read_bytes()[:-7])
    assert "found/layer-001.parquet was changed" in damaged(index)[0]
    assert "found/layer-001.parquet was changed" in ffmem.verify(index.folder)[0]
    with pytest.raises(StoreError, match="ffmem patterns detect"):
        Patterns(index, "automatic").of("L1N2")
    path.unlink()
    assert "found/layer-001.parquet is missing" in damaged(index)[0]


def test_a_manifest_that_is_missing_or_says_too_little_is_told(index):
    write(index)
    path = index.folder / "patterns/automatic/manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    del manifest["files"]["found/layer-001.parquet"]
    path.write_text(json.dumps(manifest), encoding="utf-8")
    (wrong,) = ffmem.verify(index.folder)
    assert "patterns/automatic/found/layer-001.parquet is not in its manifest." in wrong
    path.write_text("{}")
    (wrong,) = ffmem.verify(index.folder)
    assert "manifest.json is not a readable list of patterns" in wrong
    path.unlink()
    (wrong,) = ffmem.verify(index.folder)
    assert "patterns/automatic/manifest.json is missing." in wrong
    assert "ffmem patterns detect" in wrong


def test_patterns_that_are_not_there_or_of_nobody_are_errors(index):
    with pytest.raises(StoreError, match=r"no patterns in .*ffmem annotate publish"):
        Patterns(index, "human")
    with pytest.raises(StoreError, match="Unknown source of patterns 'oracle'"):
        Patterns(index, "oracle")


@given(st.data())
def test_every_trigger_has_the_label_of_the_kinds_that_it_shows(data):
    n = data.draw(st.integers(1, 25))
    shown = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["shallow", "semantic"]), st.sets(st.integers(1, n))),
            max_size=5,
        )
    )
    given_labels = labels(n, shown)
    for rank, found in enumerate(given_labels, start=1):
        kinds = {kind for kind, ranks in shown if rank in ranks}
        name = {0: "uncovered", 2: "both"}.get(len(kinds)) or kinds.pop()
        assert found == name
        assert found in LABELS


def test_a_layer_that_the_model_does_not_have_is_refused(index):
    write(index)
    patterns = Patterns(index, "automatic")
    for look in (patterns.layer, patterns.lists):
        with pytest.raises(FfmemError, match="no layer 2: the model has layers 0 to 1"):
            look(2)
