"""`search.sqlite`: the inverted lists of an index.

They lead from a token to the values at whose ends it stands, and from a sentence to the memories
that it triggers, with the character where each prefix ends. The file is derived from the index,
and made again when it is missing, damaged, or of another index.
"""

import errno
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy import ndarray

from ffmem.errors import StorageFull, StoreError
from ffmem.files import committing, sha256
from ffmem.indexing.memory import is_flat
from ffmem.indexing.sentences import NO_PREFIX, StoredSentence
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns

VERSION = 2

SCHEMA = """
CREATE TABLE origin (version INTEGER, manifest TEXT);
CREATE TABLE tokens (id INTEGER PRIMARY KEY, token TEXT, folded TEXT, postings BLOB);
CREATE TABLE sentences (sentence INTEGER PRIMARY KEY, text TEXT, postings BLOB);
CREATE VIRTUAL TABLE words USING fts5(text, content='sentences', content_rowid='sentence',
    tokenize="unicode61 remove_diacritics 2 categories 'L* N* Co Mn Mc'");
"""
# Marks (Mn, Mc) belong to words: without them Devanagari words would fall into consonants.

VALUE_POSTING = np.dtype([("cell", "<i4"), ("rank", "<i4"), ("side", "<i1")])
"""A token at rank `rank` (from 1) of a value's top (side 1) or bottom (side −1)."""

TRIGGER_POSTING = np.dtype([("cell", "<i4"), ("rank", "<i4"), ("side", "<i1"), ("end", "<i4")])
"""A trigger of rank `rank` in a positive (1) or negative (−1) list; where its prefix ends."""


DAMAGED = (sqlite3.DatabaseError, LookupError, TypeError, ValueError, AttributeError)
"""What a search raises on a damaged file; the file is then made again, once."""


class NotSearchable(StoreError):
    """The index has no search file, and its folder is read-only."""


def is_current(path: Path, index: Index) -> bool:
    """Whether the file was made from this index."""
    if not path.exists():
        return False
    try:
        with closing(connect(path)) as base:
            origin = base.execute("SELECT version, manifest FROM origin").fetchone()
    except sqlite3.DatabaseError:
        return False  # damaged: it is made again
    return bool(origin == (VERSION, sha256(index.folder / "manifest.json")))


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for reading."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def make_search_db(path: Path, index: Index) -> None:
    """Write the inverted lists of an index."""
    with committing(path) as temporary:
        check_writable(
            temporary, f"The index at {index.folder} has no search file (search.sqlite) yet"
        )
        base = sqlite3.connect(temporary)
        try:
            base.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + SCHEMA)
            base.executemany("INSERT INTO tokens VALUES (?, ?, ?, ?)", _tokens(index))
            base.execute("CREATE INDEX by_token ON tokens (folded)")
            base.executemany("INSERT INTO sentences VALUES (?, ?, ?)", _sentences(index))
            base.execute("INSERT INTO words (words) VALUES ('rebuild')")
            base.execute(
                "INSERT INTO origin VALUES (?, ?)",
                (VERSION, sha256(index.folder / "manifest.json")),
            )
            base.commit()
        except sqlite3.OperationalError as error:
            if "full" in str(error):
                raise StorageFull(
                    f"The disk is full while writing {path}. Free some space and search again; the"
                    " index itself is unchanged."
                ) from None
            raise
        finally:
            base.close()


def restore_search(index: Index) -> bool:
    """Make the search file again if it does not fit the index; return whether it did not."""
    return restore(index.folder / "search.sqlite", lambda path: make_search_db(path, index))


def restore(path: Path, make: Callable[[Path], None]) -> bool:
    """Replace a derived file unless it is, byte for byte, what `make` writes; return if it was not.

    A missing file stays missing: the first search makes it.
    """
    if not path.exists():
        return False
    with TemporaryDirectory() as folder:
        fresh = Path(folder) / path.name
        make(fresh)
        if path.is_file() and sha256(path) == sha256(fresh):
            return False
        with committing(path) as temporary:
            shutil.copyfile(fresh, temporary)
    return True


def check_writable(temporary: Path, lacking: str) -> None:
    """Raise if a folder is read-only, before any work; `lacking` says why it is written to."""
    try:
        temporary.touch()
    except OSError as error:
        if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise
        raise NotSearchable(
            f"{lacking}, and the folder is not writable: {error.strerror}. Search once where it is,"
            " or search a copy of the index."
        ) from None


def _tokens(index: Index) -> Iterator[tuple[int, str, str, bytes]]:
    """Return every token at an end of a value, with its postings."""
    ids, postings = [], []
    if not index.manifest.model.has_values:
        return
    for layer in range(index.n_layers):
        names = [f"{side}_{what}" for side in ("top", "bottom") for what in ("ids", "logits")]
        columns = read_columns(index.folder / layer_file("values", layer), names)
        flat = is_flat(columns["top_logits"], columns["bottom_logits"])
        for side, name in ((1, "top_ids"), (-1, "bottom_ids")):
            rows = columns[name]
            part = np.empty(rows.size, VALUE_POSTING)
            part["cell"], part["rank"] = _numbered(index, layer, rows)
            part["side"] = side
            listed = ~np.repeat(flat, rows.shape[1])
            ids.append(rows.reshape(-1)[listed])
            postings.append(part[listed])
    for id, entries in _grouped(np.concatenate(ids), np.concatenate(postings)):
        token = index.token(id)
        yield id, token, token.casefold(), entries.tobytes()


def _sentences(index: Index) -> Iterator[tuple[int, str, bytes]]:
    """Return every sentence that triggers a memory, with its text and postings."""
    prefixes, postings = [], []
    signs = [(1, "prefix"), (-1, "negative_prefix")][: 2 if index.manifest.model.gated else 1]
    for layer in range(index.n_layers):
        columns = read_columns(
            index.folder / layer_file("triggers", layer), [name for _, name in signs]
        )
        for side, name in signs:
            rows = columns[name]
            part = np.empty(rows.size, TRIGGER_POSTING)
            part["cell"], part["rank"] = _numbered(index, layer, rows)
            part["side"], part["end"] = side, 0
            filled = rows.reshape(-1) != NO_PREFIX
            prefixes.append(rows.reshape(-1)[filled])
            postings.append(part[filled])
    every, entries = np.concatenate(prefixes), np.concatenate(postings)
    order = np.argsort(every, kind="stable")
    every, entries = every[order], entries[order]
    begin = 0
    for sentence in index.sentences.rows(0, index.sentences.n_sentences):
        past = sentence.offset + len(sentence.ids) + 1
        end = begin + int(np.searchsorted(every[begin:], past))
        if end > begin:
            text, ends = _text(index, sentence)
            entries["end"][begin:end] = ends[every[begin:end] - sentence.offset]
            yield sentence.sentence, text, entries[begin:end].tobytes()
        begin = end


def _text(index: Index, sentence: StoredSentence) -> tuple[str, ndarray]:
    """Return a sentence's text, and how many characters the prefix of each length has."""
    text, starts, ends = sentence.text, sentence.starts, sentence.ends
    if text is None or starts is None or ends is None:
        shown = [index.token(id) for id in sentence.ids]
        return "".join(shown), np.cumsum([0, *map(len, shown)])
    reached = [0, *ends]
    for length in range(1, len(ends)):
        if starts[length] < ends[length - 1]:  # inside a character, which is not in the prefix
            reached[length] = min(reached[length - 1], starts[length - 1])
    return text, np.asarray(reached)


def _numbered(index: Index, layer: int, rows: ndarray) -> tuple[ndarray, ndarray]:
    """Return the cell number and the rank of every entry of a layer's (memory, rank) lists."""
    n_memories, n_ranks = rows.shape
    cells = index.layout.starts[layer] + np.arange(n_memories)
    return np.repeat(cells, n_ranks), np.tile(np.arange(1, n_ranks + 1), n_memories)


def _grouped(keys: ndarray, entries: ndarray) -> Iterator[tuple[int, ndarray]]:
    order = np.argsort(keys, kind="stable")
    keys, entries = keys[order], entries[order]
    found, first = np.unique(keys, return_index=True)
    yield from zip(found.tolist(), np.split(entries, first[1:]), strict=True)
