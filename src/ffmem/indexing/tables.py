"""Parquet files of the index: one row per memory, lists of fixed size, small row groups."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.files import committing

GROUP = 128
"""Memories in a row group: what a look-up of one memory reads."""


def fixed(rows: ndarray) -> pa.Array:
    """Return a matrix as a column of fixed-size lists."""
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])


def write_table(path: Path, table: pa.Table) -> None:
    """Commit a table to a file; the same table gives the same bytes."""
    with committing(path) as temporary:
        pq.write_table(
            table, temporary, row_group_size=GROUP, compression="zstd", use_dictionary=False
        )


def open_table(path: Path) -> pq.ParquetFile:
    """Open a file of the index for reading."""
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreError(
            f"Cannot read {path}: {error}. A file of the index is damaged or missing:"
            " `ffmem verify` tells which; make the index again."
        ) from None


def read_row(file: pq.ParquetFile, row: int) -> dict[str, ndarray]:
    """Return one row, each list as an array, reading one row group."""
    group, place = divmod(row, GROUP)
    table = file.read_row_group(group).slice(place, 1)
    return {name: _array(table.column(name)) for name in table.column_names}


def read_columns(path: Path, names: list[str] | None = None) -> dict[str, ndarray]:
    """Return whole columns: matrices for lists, vectors otherwise."""
    table = open_table(path).read(columns=names)
    return {name: _array(table.column(name)) for name in table.column_names}


def _array(column: pa.ChunkedArray) -> ndarray:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # a column of no chunks stays chunked
        array = pa.concat_arrays(array.chunks) if array.chunks else pa.array([], array.type)
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return np.asarray(array.flatten().to_numpy(zero_copy_only=False)).reshape(-1, size)
    return np.asarray(array.to_numpy(zero_copy_only=False))
