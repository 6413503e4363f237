"""Patterns are stored as they were given, or refused: never half, never stale."""

import csv
import json
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.cells import Cell
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.tables import fixed, layer_file, read_columns, write_table
from ffmem.indexing.tidy import SCHEMAS
from ffmem.patterns.labels import LABELS, labels
from ffmem.patterns.store import (
    ExaminedList,
    NoPatterns,
    Pattern,
    Patterns,
    PatternWriter,
    damaged_files,
    export_patterns,
    is_stale,
    main_sign,
    open_patterns,
)
from tests.conftest import text_model
from tests.indexing.folders import indexed, memories, write_corpus
from tests.patterns.planting import pattern as plain_pattern
from tests.patterns.planting import plant
from tests.tiny import TINY


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


def stored(one, source="automatic"):
    """Return a pattern as it is read: with its source and the size of its list."""
    return one._replace(source=source, of=6)


def write(index, source="automatic", patterns=SOME, settings=None):
    writing = PatternWriter(index, source)
    lists = {ExaminedList(one.cell, one.sign, 6) for one in patterns} | {
        ExaminedList(Cell(1, 7), 1, 4)
    }
    writing.layer(1, lists, patterns)
    writing.commit(settings or {"alpha": 0.05})


def test_what_was_written_is_read_back_in_order(index):
    write(index)
    patterns = Patterns(index, "automatic")
    assert patterns.of("L1N2") == [stored(SOME[place]) for place in (1, 0, 2)]
    assert patterns.of((1, 0)) == [stored(SOME[3])]
    assert patterns.of("L0N0") == []
    assert patterns.settings == {"alpha": 0.05}
    assert patterns.lists(0) == []
    assert patterns.lists(1)[-1] == ExaminedList(Cell(1, 7), 1, 4)
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
    assert [patterns.source for patterns in open_patterns(index)] == ["human", "automatic"]
    manifest = index.folder / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    assert open_patterns(index) == []
    assert is_stale(index, "automatic")
    with pytest.raises(StoreError, match=r"earlier version of the index.*ffmem patterns detect"):
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
    assert damaged_files(extended) == []


def test_a_writing_that_stops_leaves_the_old_patterns(index):
    write(index)
    writing = PatternWriter(index, "automatic")
    writing.layer(0, [], [])
    before = [stored(SOME[place]) for place in (1, 0, 2)]
    assert Patterns(index, "automatic").of("L1N2") == before


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 2, "index": 3}'])
def test_a_manifest_that_is_none_is_an_error_that_names_the_command(index, content):
    write(index)
    (index.folder / "patterns/automatic/manifest.json").write_text(content)
    with pytest.raises(StoreError, match="ffmem patterns detect"):
        Patterns(index, "automatic")


def test_a_damaged_file_is_found_and_told(index):
    write(index)
    assert damaged_files(index) == [] == ffmem.verify(index.folder)
    path = index.folder / "patterns/automatic/found/layer-001.parquet"
    path.write_bytes(path.read_bytes()[:-7])
    assert "found/layer-001.parquet was changed" in damaged_files(index)[0]
    assert "found/layer-001.parquet was changed" in ffmem.verify(index.folder)[0]
    with pytest.raises(StoreError, match="ffmem patterns detect"):
        Patterns(index, "automatic").of("L1N2")
    path.unlink()
    assert "found/layer-001.parquet is missing" in damaged_files(index)[0]


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
    assert "Cannot read the patterns in" in wrong
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


@pytest.mark.parametrize(
    ("held_ranks", "base", "scores"),
    [
        ((2, 4, 6, 8, 10), 0.1, (25 / 35, 0.25, 2.5)),
        ((2, 4, 6, 8, 10), 0.0, (1.0, 0.25, None)),
        ((), 0.0, (None, 0.0, None)),
    ],
)
def test_scores_are_those_of_the_formulas_and_none_without_a_value(held_ranks, base, scores):
    one = pattern(held_ranks=held_ranks, held=20).with_scores(base, 0.5)
    assert (one.precision, one.recall, one.lift) == pytest.approx(scores)
    assert (one.base, one.p_value, one.q_value) == (base, 0.5, None)
    json.dumps(one.to_dict(), allow_nan=False)


@pytest.fixture
def planted(index):
    scored = plain_pattern(
        "L1N2", description="ends with “a, b”", sign=-1, base=0.5, held=25, lift=None
    )
    first = plain_pattern("L0N3")
    plant(index, "automatic", first, first._replace(number=2), scored)
    return index


def test_every_format_has_the_rows_of_the_table(planted, tmp_path):
    for ending in (".parquet", ".jsonl", ".csv"):
        assert export_patterns(planted, tmp_path / f"out{ending}") == 3
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["cell"], row["sign"], row["number"]) for row in rows] == [
        ("L0N3", 1, 1),
        ("L0N3", 1, 2),
        ("L1N2", -1, 1),
    ]
    assert (rows[2]["base"], rows[2]["lift"]) == (0.5, None)
    assert rows[0]["base"] is None
    assert rows[0]["source"] == "automatic"
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == rows
    assert planted.table("patterns").to_pylist() == rows
    assert planted.table("patterns", layer=1).to_pylist() == rows[2:]
    assert planted.table("patterns", layer=1, columns=["what"]).num_rows == 1
    assert planted.table("patterns").schema == SCHEMAS["patterns"]
    ffmem.export(planted, "parquet", tmp_path / "tables")
    assert pq.read_table(tmp_path / "tables" / "patterns.parquet").to_pylist() == rows
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert read[2]["description"] == "ends with “a, b”"
    assert read[2]["ranks"] == "1 2 3"
    assert list(read[0]) == list(rows[0])


def test_no_cell_of_a_csv_is_a_formula(index, tmp_path):
    plant(index, "automatic", plain_pattern("L0N3", description="=HYPERLINK(1)", sign=-1))
    export_patterns(index, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["description"], row["sign"]) == ("'=HYPERLINK(1)", "-1")


@pytest.mark.parametrize("form", [".parquet", ".jsonl", ".csv"])
def test_a_link_is_refused_and_what_it_points_to_stays_as_it_was(planted, tmp_path, form):
    (tmp_path / "target").write_text("mine")
    (tmp_path / f"link{form}").symlink_to("target")
    with pytest.raises(FfmemError, match="is a symbolic link to target"):
        export_patterns(planted, tmp_path / f"link{form}")
    assert (tmp_path / f"link{form}").is_symlink()
    assert (tmp_path / "target").read_text() == "mine"


def test_another_ending_is_refused(planted, tmp_path):
    with pytest.raises(FfmemError, match=r"must end in \.parquet, \.jsonl or \.csv"):
        export_patterns(planted, tmp_path / "out.xlsx")


def test_an_index_without_patterns_says_how_to_find_them_wherever_one_asks(index, tmp_path):
    def ways():
        yield lambda: index.table("patterns")
        yield lambda: ffmem.search(index, "a", "patterns")
        yield lambda: export_patterns(index, tmp_path / "out.csv")

    for ask in ways():
        with pytest.raises(NoPatterns, match=r"no patterns yet\. Find them with `ffmem patt"):
            ask()
    ffmem.export(index, "parquet", tmp_path / "tables")
    assert not (tmp_path / "tables" / "patterns.parquet").exists()
    write(index, patterns=[])
    assert index.table("patterns").num_rows == 0  # one has looked
    manifest = index.folder / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    changed = f"index has changed since .* again with `ffmem patterns detect {index.folder}`"
    for ask in ways():
        with pytest.raises(NoPatterns, match=changed):
            ask()


def test_the_evidence_is_said_in_words(index):
    scored = plain_pattern("L0N3", ranks=(1, 2, 4, 30), held_ranks=(2, 4, 30), held=20)
    plant(
        index,
        "automatic",
        scored._replace(base=0.01, recall=0.15, lift=15.0),
        scored._replace(number=2, base=0.0, recall=0.15),
        scored._replace(number=3, base=0.5, recall=0.15, lift=0.3),
    )
    shown = "shown by 3 of the first 6 triggers, 3 of 20 held out"
    assert [one.evidence for one in Patterns(index, "automatic").of("L0N3")] == [
        f"{shown}; 15 × more often than by chance",
        f"{shown}; by no random prefix",
        f"{shown}; no more often than by chance",
    ]


def main_sign_of(memory):
    """Return the sign of a memory's main list as the definition says it."""
    up, down = memory.triggers, memory.negative_triggers
    if not up and not down:
        return 0
    return 1 if not down or (up and up[0].coefficient >= -down[0].coefficient) else -1


def compare(index):
    for layer in range(index.n_layers):
        signs = main_sign(index, layer)
        for memory in index.memories(layer):
            assert signs[memory.cell.memory] == main_sign_of(memory)


def test_the_main_list_is_the_one_with_the_strongest_trigger(tiny_index):
    compare(tiny_index)


@pytest.mark.parametrize("name", ["arcee", "bloom", "gemma2", "opt", "qwen3"])
def test_every_kind_of_family_has_main_lists(name, tmp_path):
    assert name in TINY
    made = indexed(tmp_path / "index", write_corpus(tmp_path / "lines.txt", 20), memories(name))
    compare(made)


def test_equals_go_to_the_positive_list_and_nothing_has_no_sign(tiny_index, tmp_path):
    shutil.copytree(tiny_index.folder, tmp_path / "index")
    path = tmp_path / "index" / layer_file("triggers", 0)
    columns = {name: column.copy() for name, column in read_columns(path).items()}
    firsts = {
        "coefficient": [2.0, 1.0, 0.0, 0.0],
        "prefix": [7, 7, NO_PREFIX, NO_PREFIX],
        "negative_coefficient": [-2.0, -3.0, -0.5, 0.0],
        "negative_prefix": [9, 9, 9, NO_PREFIX],
    }
    for name, values in firsts.items():
        columns[name][:4, 0] = values
        if name.endswith("prefix"):
            columns[name][:4, 1:] = NO_PREFIX
    table = {name: fixed(c) if c.ndim == 2 else c for name, c in columns.items()}
    write_table(path, pa.table(table))
    index = ffmem.open(tmp_path / "index")
    assert main_sign(index, 0)[:4].tolist() == [1, -1, -1, 0]


def test_reading_patterns_needs_neither_torch_nor_scikit_learn():
    slow = "{'torch', 'sklearn', 'scipy', 'pyarrow.compute'}"
    code = f"import sys, ffmem.patterns.store; assert not {slow} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_patterns_of_a_memory_are_read_without_heavy_libraries(planted):
    code = (
        "import sys\nfrom ffmem.indexing.store import Index\n"
        "from ffmem.patterns.store import open_patterns\n"
        "print(len(open_patterns(Index(sys.argv[1]))[0].of('L0N3')))\n"
        "slow = {'torch', 'pandas', 'sklearn', 'scipy', 'jaxtyping', 'pyarrow.compute'}\n"
        "print(sorted(slow & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code, str(planted.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["2", "[]"]
