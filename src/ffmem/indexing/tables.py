"""Parquet tables of an index: one row per memory, lists of fixed size, small row groups."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.files import committing
from ffmem.hub import HubFile

GROUP = 128
"""Memories in a row group, which is what a look-up of one memory reads."""

UNIT = 2.0**-20
"""Sums in tables are integer multiples of this."""

SAMPLED_PREFIXES = "samples/prefixes.parquet"

TableFile = Path | HubFile
"""A Parquet file, on this machine or on the Hub."""


WRITING: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": False,
    "write_page_checksum": True,  # who reads a part of a file cannot check the file's hash
}


def fixed(rows: ndarray) -> pa.Array:
    """Return a matrix as a column of fixed-size lists."""
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])


def write_table(path: Path, table: pa.Table, group: int = GROUP) -> None:
    """Commit a table to a file; the same table gives the same bytes."""
    with committing(path) as temporary:
        write_parquet(temporary, table, group)


def write_parquet(path: Path, table: pa.Table, group: int = GROUP) -> None:
    """Write a table to a path that the caller commits."""
    pq.write_table(table, path, row_group_size=group, **WRITING)


def layer_file(kind: str, layer: int) -> str:
    """Return the path of a layer's file within the index folder."""
    return f"{kind}/layer-{layer:03d}.parquet"


def open_table(path: TableFile, groups: Iterable[int] | None = None) -> pq.ParquetFile:
    """Open a table to read some row groups, or all of them."""
    with read_errors(path):
        if isinstance(path, HubFile):
            return path.open_table(groups)
        found = path.stat()
        version = (found.st_ino, found.st_size, found.st_mtime_ns)
        return pq.ParquetFile(path, memory_map=True, metadata=_footer(path, version))


@lru_cache(maxsize=128)
def _footer(path: Path, version: tuple[int, ...]) -> pq.FileMetaData:
    """Return a file's footer. Parsing that of 65,536 memories takes longer than reading one."""
    return pq.read_metadata(path, memory_map=True)


def read_group(path: TableFile, group: int, names: list[str] | None = None) -> dict[str, ndarray]:
    """Return the columns of one row group, in the form of `read_columns`."""
    with read_errors(path):
        table = open_table(path, [group]).read_row_group(group, names, use_threads=False)
    return {name: as_array(table[name]) for name in table.column_names}


def read_columns(path: TableFile, names: list[str] | None = None) -> dict[str, ndarray]:
    """Return whole columns: matrices for lists, vectors for numbers."""
    with read_errors(path):
        table = open_table(path).read(columns=names)
    return {name: as_array(table[name]) for name in table.column_names}


def read_rows(path: TableFile, rows: ndarray, names: list[str]) -> dict[str, ndarray]:
    """Return some rows of columns, in any order, reading their row groups only."""
    groups, place = np.unique(rows // GROUP, return_inverse=True)
    with read_errors(path):
        file = open_table(path, groups.tolist())
        table = file.read_row_groups(groups.tolist(), names, use_threads=False)
    # Every row group has GROUP rows, except the last of the file, which is the last here too.
    place = place * GROUP + rows % GROUP
    return {name: as_array(table[name])[place] for name in table.column_names}


def read_strings(path: TableFile, name: str) -> pa.ChunkedArray:
    """Return a whole column of text, to be decoded on access."""
    with read_errors(path):
        return open_table(path).read([name])[name]


@contextmanager
def read_errors(path: TableFile) -> Iterator[None]:
    """Turn what Arrow raises on an unreadable file into an error that says what to do."""
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        if isinstance(path, HubFile):
            raise StoreError(
                f"Cannot read {path}: {reason}. The download is damaged: rerun the command. If that"
                " does not help, ask the dataset's owner to push the index again."
            ) from None
        raise StoreError(
            f"Cannot read {path}: {reason}. A file of the index is damaged or missing. Run `ffmem"
            " verify` to see which, and build the index again."
        ) from None


def as_array(column: pa.Array | pa.ChunkedArray) -> ndarray:
    """Return a column as a vector, or as a matrix if it has fixed-size lists."""
    # Arrow's own `flatten` would import all of pyarrow.compute: too slow for `ffmem show`.
    size = column.type.list_size if pa.types.is_fixed_size_list(column.type) else None
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if size is not None:
        chunks = [chunk.values.slice(chunk.offset * size, len(chunk) * size) for chunk in chunks]
    parts = [_as_vector(chunk) for chunk in chunks]
    if not parts:  # a layer without memories
        value = column.type if size is None else column.type.value_type
        parts = [np.zeros(0, value.to_pandas_dtype())]
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return flat if size is None else flat.reshape(len(column), size)


def _as_vector(array: pa.Array) -> ndarray:
    """Return an array as numpy, without `to_numpy` for numbers: that imports pandas if it can."""
    is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if not is_number or array.null_count or not len(array):
        vector: ndarray = array.to_numpy(zero_copy_only=False)
        return vector
    dtype = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
