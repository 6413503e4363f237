import csv
import json
import os
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ffmem
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.export import export
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.tables import fixed, layer_file, read_columns, write_table
from ffmem.indexing.tidy import SCHEMAS

TRIGGERS = layer_file("triggers", 1)


@pytest.fixture(scope="module")
def awkward(index_of, tmp_path_factory):
    """An index over windows of text with line ends, quotes and commas in them."""
    folder = tmp_path_factory.mktemp("export")
    text = 'He said "no",\nand, left;\r\nthen "yes"\n' * 3
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in "ab"))
    corpus = ffmem.Corpus(str(folder / "texts.jsonl"), unit="window:20")
    return index_of("llama", corpus, folder / "index", start="none")


@pytest.fixture(params=["tiny_index", "ungated_index", "awkward"])
def any_index(request):
    return request.getfixturevalue(request.param)


def test_a_line_of_jsonl_is_what_show_prints(any_index, tmp_path):
    ffmem.export(any_index.folder, "jsonl", tmp_path / "out.jsonl")
    content = (tmp_path / "out.jsonl").read_bytes().decode()
    lines = content.removesuffix("\n").split("\n")
    assert len(lines) == len(any_index)
    assert [json.loads(line) for line in lines] == [any_index[c].to_dict() for c in any_index]


def as_it_was(cell):
    """Return a text without the apostrophe that keeps a spreadsheet from computing it."""
    assert not cell.startswith(tuple("=+-@\t\r"))
    return cell[1:] if re.match(r"''*[=+\-@\t\r]", cell) else cell


def test_no_cell_of_a_csv_is_a_formula_and_numbers_are_numbers(index_of, tmp_path):
    lines = ["=1+1 is two", "+a", "-b and @c", "@SUM(A1)", "'=x", "\t=y", "plain"]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    corpus = ffmem.Corpus(str(tmp_path / "text.txt"), unit="line")
    made = index_of("llama", corpus, tmp_path / "index", start="none")
    ffmem.export(made, "csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    texts = ["cell", "prefix", "last_token", "next_token", "value_top", "value_bottom"]
    assert {as_it_was(row["prefix"])[:1] for row in rows} >= {"=", "+", "-", "@"}
    assert all(as_it_was(row[name]) is not None for row in rows for name in texts)
    assert any(row["coefficient"].startswith("-") for row in rows)
    assert all(float(row["coefficient"]) for row in rows if row["coefficient"])


def test_csv_reads_back_one_row_per_trigger(any_index, tmp_path):
    ffmem.export(any_index.folder, "csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [*SCHEMAS["triggers"].names, "value_top", "value_bottom"]
    expected = []
    for cell in any_index:
        memory = any_index[cell]
        lists = (("1", memory.triggers), ("-1", memory.negative_triggers))
        shown = [(name, trigger) for name, triggers in lists for trigger in triggers]
        first = memory.value.top[0].token
        expected += [(str(cell), name, trigger, first) for name, trigger in shown]
        if not shown:
            expected.append((str(cell), "", None, first))
    assert len(rows) == len(expected)
    for row, (cell, name, trigger, first) in zip(rows, expected, strict=True):
        found = dict(zip(header, row, strict=True))
        assert (found["cell"], found["sign"]) == (cell, name)
        if trigger is not None:
            assert as_it_was(found["prefix"]) == trigger.prefix
            assert float(found["coefficient"]) == trigger.coefficient
            assert as_it_was(found["next_token"]) == (trigger.next_token or "")
            assert found["gate"] == ("" if trigger.gate is None else str(trigger.gate))
        assert found["value_top"].startswith(json.dumps(first, ensure_ascii=False))


def test_a_memory_without_triggers_has_a_row_of_its_own(tiny_index, tmp_path):
    folder = shutil.copytree(tiny_index.folder, tmp_path / "index")
    columns = {name: np.array(c) for name, c in read_columns(folder / TRIGGERS).items()}
    for sign in ("", "negative_"):
        columns[f"{sign}prefix"][3] = NO_PREFIX
    arrays = {name: fixed(c) if c.ndim == 2 else pa.array(c) for name, c in columns.items()}
    write_table(folder / TRIGGERS, pa.table(arrays))
    ffmem.export(folder, "csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["cell"] == "L1N3"]
    assert len(rows) == 1
    assert (rows[0]["sign"], rows[0]["prefix"], rows[0]["rank"]) == ("", "", "")
    assert rows[0]["value_top"]


def test_line_ends_and_quotes_are_within_these_texts(awkward):
    texts = [row.text for row in awkward.sentences.rows(0, awkward.sentences.n_sentences)]
    assert any("\n" in text and '"' in text for text in texts)


@pytest.mark.parametrize("to", ["xml", "", "JSONL"])
def test_an_unknown_format_is_refused(tiny_index, tmp_path, to):
    with pytest.raises(FfmemError, match=r"unknown format\. Use one of parquet, jsonl, csv"):
        ffmem.export(tiny_index.folder, to, tmp_path / "out")


def test_a_folder_is_no_file_to_write_to(tiny_index, tmp_path):
    with pytest.raises(FfmemError, match="is a folder"):
        ffmem.export(tiny_index.folder, "csv", tmp_path)


def test_parquet_holds_the_tables_of_the_index(any_index, tmp_path):
    ffmem.export(any_index, "parquet", tmp_path / "out")
    names = set(SCHEMAS) - {"patterns"}
    assert {path.stem for path in (tmp_path / "out").iterdir()} == names
    for name in names:
        written = pq.read_table(tmp_path / "out" / f"{name}.parquet")
        assert written.equals(any_index.table(name).combine_chunks()), name


def test_standard_output_is_no_file_to_write_to(tiny_index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for to in ("parquet", "jsonl", "csv", "neuronpedia"):
        with pytest.raises(FfmemError, match="cannot write to standard output"):
            ffmem.export(tiny_index, to, "-")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_leaves_nothing_behind(tiny_index, tmp_path):
    shutil.copytree(tiny_index.folder, tmp_path / "index")
    (tmp_path / "index/values/layer-001.parquet").write_bytes(b"nonsense")
    with pytest.raises(StoreError):
        ffmem.export(tmp_path / "index", "jsonl", tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("to", ["parquet", "jsonl", "csv", "neuronpedia"])
@pytest.mark.parametrize("target", ["target", "folder", "nowhere"])
def test_a_link_is_refused_and_what_it_points_to_stays_as_it_was(tiny_index, tmp_path, to, target):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(FfmemError, match=r"is a symbolic link to|exists already"):
        ffmem.export(tiny_index, to, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "link", "target"]


def test_what_is_no_file_is_left_alone(tiny_index, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FfmemError, match="is not an ordinary file"):
        ffmem.export(tiny_index, "csv", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(FfmemError, match="There is no folder"):
        ffmem.export(tiny_index, "csv", tmp_path / "nowhere" / "out.csv")


def test_every_memory_is_told_of(tiny_index, tmp_path):
    steps = []
    export(tiny_index, "jsonl", tmp_path / "out", steps.append)
    assert sum(steps) == len(tiny_index)
