import csv
import json
import shutil

import pyarrow.parquet as pq
import pytest

import ffmem
from ffmem.errors import FfmemError
from ffmem.patterns.export import export
from ffmem.patterns.kept import Patterns
from tests.patterns.planting import pattern, plant


@pytest.fixture
def patterns(tiny_index, tmp_path):
    shutil.copytree(tiny_index.folder, tmp_path / "index")
    index = ffmem.open(tmp_path / "index")
    scored = pattern(
        "L1N2", description="ends with “a, b”", sign=-1, base=0.5, held=25, lift=float("inf")
    )
    plant(index, "automatic", pattern("L0N3"), pattern("L0N3", number=2), scored)
    return Patterns(index, "automatic")


def test_every_form_holds_the_same_rows(patterns, tmp_path):
    assert [
        export([patterns], tmp_path / f"out{form}") for form in (".parquet", ".jsonl", ".csv")
    ] == [
        3,
        3,
        3,
    ]
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
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert read[2]["description"] == "ends with “a, b”"
    assert read[2]["ranks"] == "1 2 3"
    assert list(read[0]) == list(rows[0])


def test_no_cell_of_a_csv_is_a_formula(tiny_index, tmp_path):
    shutil.copytree(tiny_index.folder, tmp_path / "index")
    index = ffmem.open(tmp_path / "index")
    plant(index, "automatic", pattern("L0N3", description="=HYPERLINK(1)", sign=-1))
    export([Patterns(index, "automatic")], tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["description"], row["sign"]) == ("'=HYPERLINK(1)", "-1")


@pytest.mark.parametrize("form", [".parquet", ".jsonl", ".csv"])
def test_a_link_is_refused_and_what_it_points_to_stays_as_it_was(patterns, tmp_path, form):
    (tmp_path / "target").write_text("mine")
    (tmp_path / f"link{form}").symlink_to("target")
    with pytest.raises(FfmemError, match="is a symbolic link to target"):
        export([patterns], tmp_path / f"link{form}")
    assert (tmp_path / f"link{form}").is_symlink()
    assert (tmp_path / "target").read_text() == "mine"


def test_another_ending_is_refused(patterns, tmp_path):
    with pytest.raises(FfmemError, match=r"must end in \.parquet, \.jsonl or \.csv"):
        export([patterns], tmp_path / "out.xlsx")
