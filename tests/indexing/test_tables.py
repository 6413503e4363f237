import re

import numpy as np
import pyarrow as pa
import pytest

from ffmem.errors import StoreError
from ffmem.indexing import tables
from ffmem.indexing.tables import (
    GROUP,
    fixed,
    layer_file,
    read_columns,
    read_group,
    read_rows,
    read_strings,
    write_table,
)

MATRIX = np.arange((2 * GROUP + 9) * 3, dtype=np.int64).reshape(-1, 3)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "table.parquet"
    vector = np.linspace(-1, 1, len(MATRIX), dtype=np.float32)
    words = pa.array([f"w{n}" for n in range(len(MATRIX))])
    write_table(path, pa.table({"rows": fixed(MATRIX), "vector": vector, "word": words}))
    return path


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_row_group_is_read_as_it_was_written(path, group):
    inside = slice(group * GROUP, (group + 1) * GROUP)
    found = read_group(path, group)
    np.testing.assert_array_equal(found["rows"], MATRIX[inside])
    assert found["rows"].dtype == np.int64
    assert found["vector"].dtype == np.float32
    assert found["word"].tolist() == [f"w{row}" for row in range(len(MATRIX))[inside]]


def test_columns_are_read_as_they_were_written(path):
    columns = read_columns(path, ["rows", "vector"])
    assert list(columns) == ["rows", "vector"]
    np.testing.assert_array_equal(columns["rows"], MATRIX)
    assert columns["vector"].shape == (len(MATRIX),)
    assert read_strings(path, "word")[GROUP + 3].as_py() == f"w{GROUP + 3}"


@pytest.mark.parametrize(
    "rows",
    [
        [0],
        [2 * GROUP + 8, 3, 2 * GROUP],
        [GROUP + 1, GROUP, GROUP + 1],
        range(2 * GROUP + 8, -1, -1),
    ],
)
def test_some_rows_of_columns_are_those_rows_in_their_order(path, rows):
    found = read_rows(path, np.array(rows), ["vector", "rows"])
    assert set(found) == {"rows", "vector"}
    np.testing.assert_array_equal(found["rows"], MATRIX[list(rows)])
    np.testing.assert_array_equal(found["vector"], read_columns(path)["vector"][list(rows)])


def test_a_part_of_a_column_is_that_part():
    part = pa.chunked_array([fixed(MATRIX)[2:5], fixed(MATRIX)[7:9]])
    np.testing.assert_array_equal(tables.as_array(part), MATRIX[[2, 3, 4, 7, 8]])


@pytest.mark.parametrize(("group", "groups"), [(GROUP, 3), (len(MATRIX), 1)])
def test_a_table_has_row_groups_of_the_size_asked_for(tmp_path, group, groups):
    write_table(tmp_path / "table", pa.table({"rows": fixed(MATRIX)}), group)
    assert tables.open_table(tmp_path / "table").metadata.num_row_groups == groups
    np.testing.assert_array_equal(read_columns(tmp_path / "table")["rows"], MATRIX)


def test_the_same_table_gives_the_same_bytes(path, tmp_path):
    again = pa.table({"rows": fixed(np.asfortranarray(MATRIX))})
    for name in ("one", "two"):
        write_table(tmp_path / name, again)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("read", [lambda path: read_group(path, 0), read_columns])
@pytest.mark.parametrize("damage", ["missing", "truncated", "inside"])
def test_a_damaged_file_is_an_error_that_names_it(path, damage, read):
    whole = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(whole[:-20])
    if damage == "inside":
        path.write_bytes(whole[:4] + bytes(200) + whole[204:])
    with pytest.raises(StoreError, match=rf"Cannot read {re.escape(str(path))}.*ffmem verify"):
        read(path)


def test_a_layers_file_is_named_by_three_digits():
    assert layer_file("values", 7) == "values/layer-007.parquet"


def test_a_table_that_was_replaced_is_read_anew(tmp_path):
    path = tmp_path / "table.parquet"
    for width in (3, 5):
        write_table(path, pa.table({"rows": fixed(np.ones((GROUP + 1, width), np.int32))}))
        assert read_group(path, 1)["rows"].shape == (1, width)
