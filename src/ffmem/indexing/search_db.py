"""`search.sqlite`: the inverted lists of an index.

Tokens lead to the values that list them, and sentences to the memories that they trigger, with the
character where each prefix ends. The file is derived from the index, and is made again when it is
missing, damaged, or of another index.
"""

import errno
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
from numpy import ndarray

from ffmem.errors import StorageFull, StoreError
from ffmem.files import committing, sha256
from ffmem.indexing.memory import is_flat
from ffmem.indexing.query import end_of_word
from ffmem.indexing.sentences import NO_PREFIX, StoredSentence
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns

VERSION = 4

WORDS = """tokenize="unicode61 remove_diacritics 2 categories 'L* N* Co Mn Mc'\""""
"""How FTS5 finds words. Marks (Mn, Mc) belong to them; otherwise, Devanagari words would fall apart
into consonants."""

SCHEMA = f"""
CREATE TABLE tokens (id INTEGER PRIMARY KEY, token TEXT, folded TEXT, postings BLOB);
CREATE TABLE sentences (sentence INTEGER PRIMARY KEY, text TEXT, ends BLOB, postings BLOB);
CREATE VIRTUAL TABLE words USING fts5(text, content='sentences', content_rowid='sentence',
    {WORDS});
"""

PRAGMAS = "PRAGMA page_size = 16384; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
"""Large pages: the postings of a token or sentence may take many."""

VALUE_POSTING = np.dtype([("cell", "<i4"), ("rank", "<i4"), ("side", "<i1")])
"""A token at rank `rank` (from 1) of a value's top (side 1) or bottom (side −1)."""

TRIGGER_POSTING = np.dtype([("cell", "<i4"), ("rank", "<i2"), ("side", "<i1")])
"""A trigger at rank `rank` of a positive (1) or negative (−1) list.

A sentence's triggers are sorted by where their prefixes end, the last first: those that contain a
match are the first ones."""

TRIGGER_END = np.dtype([("end", "<i4"), ("n", "<i4")])
"""Characters of a prefix, and how many triggers of its sentence end there or later."""

DAMAGED = (sqlite3.DatabaseError, LookupError, TypeError, ValueError, AttributeError)
"""What a search raises on a damaged file; the file is then made again, once."""

# Marks that FTS5 puts around a match. No corpus contains them on purpose.
OPEN, CLOSE = (f"\x01{secrets.token_hex(8)}{side}" for side in "()")

Origin = tuple[int, str]
"""Version of the schema, and what the file was made from."""

Result = TypeVar("Result")

_making = threading.Lock()


class NotSearchable(StoreError):
    """The index has no search file, and its folder is read-only."""


class SearchFile:
    """A search file that is made again when it is missing, damaged or out of date."""

    def __init__(self, path: Path, origin: Origin, make: Callable[[Path], None]) -> None:
        self._path, self._make = path, make
        with _making:  # of two threads, one makes it and the other finds it made
            if not is_current(path, origin):
                make(path)
        self.db = connect(path)

    def close(self) -> None:
        """Close the file."""
        self.db.close()

    def search(self, search: Callable[[sqlite3.Connection], Result]) -> Result:
        """Return what a search finds; if the file is damaged, make it again first."""
        try:
            return search(self.db)
        except DAMAGED:
            self.close()
            with _making:
                self._make(self._path)
            self.db = connect(self._path)
            return search(self.db)


def is_current(path: Path, origin: Origin) -> bool:
    """Return whether the file was made from what is there now."""
    if not path.exists():
        return False
    try:
        with closing(connect(path)) as db:
            return bool(db.execute("SELECT version, state FROM origin").fetchone() == origin)
    except sqlite3.DatabaseError:
        return False  # damaged


def index_origin(index: Index) -> Origin:
    """Return what tells the search file of this index from others."""
    return VERSION, sha256(index.folder / "manifest.json")


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for reading."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def make_search_db(path: Path, index: Index) -> None:
    """Write the inverted lists of an index."""

    def fill(db: sqlite3.Connection) -> None:
        db.executemany("INSERT INTO tokens VALUES (?, ?, ?, ?)", _tokens(index))
        db.execute("CREATE INDEX by_token ON tokens (folded)")
        db.executemany("INSERT INTO sentences VALUES (?, ?, ?, ?)", _sentences(index))

    missing = f"The index at {index.folder} has no search file (search.sqlite) yet"
    write_search_file(path, index_origin(index), SCHEMA, fill, missing)


def write_search_file(
    path: Path,
    origin: Origin,
    schema: str,
    fill: Callable[[sqlite3.Connection], None],
    missing: str,
) -> None:
    """Write a search file: `fill` inserts the texts that the table `words` of the schema indexes.

    `missing` says what the file is needed for, in case it cannot be written.
    """
    with committing(path) as temporary:
        check_writable(temporary, missing)
        db = sqlite3.connect(temporary)
        try:
            db.executescript(PRAGMAS + schema)
            fill(db)
            db.execute("INSERT INTO words (words) VALUES ('rebuild')")
            db.execute("CREATE TABLE origin (version INTEGER, state TEXT)")
            db.execute("INSERT INTO origin VALUES (?, ?)", origin)
            db.commit()
        except sqlite3.OperationalError as error:
            if "full" in str(error):
                raise StorageFull(
                    f"The disk is full: cannot write {path}. Free some space and search again; the"
                    " index itself is unchanged."
                ) from None
            raise
        finally:
            db.close()


def highlighted_span(marked: str, n_words: int) -> tuple[int, int]:
    """Return where the first match of n words is in a text that FTS5 has marked."""
    begin = marked.index(OPEN)
    match = marked[begin + len(OPEN) : marked.index(CLOSE)]
    # FTS5 marks overlapping matches as one.
    return begin, begin + (end_of_word(match, n_words) if n_words > 1 else len(match))


def restore_search(index: Index) -> bool:
    """Make the search file again if it does not fit the index; return whether it was replaced."""
    return restore(index.folder / "search.sqlite", lambda path: make_search_db(path, index))


def restore(path: Path, make: Callable[[Path], None]) -> bool:
    """Replace a derived file unless `make` writes the same bytes; return whether it was replaced.

    A missing file stays missing; the first search makes it.
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


def check_writable(temporary: Path, reason: str) -> None:
    """Raise, before any work, if a folder is read-only; `reason` says why a file is needed."""
    try:
        temporary.touch()
    except OSError as error:
        if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise
        raise NotSearchable(
            f"{reason}, and the folder is not writable: {error.strerror}. Search once where it is"
            " writable, or search a copy of the index."
        ) from None


def _tokens(index: Index) -> Iterator[tuple[int, str, str, bytes]]:
    """Yield every token that a value lists, with its postings."""
    if not index.manifest.model.has_values:
        return
    ids, postings = [], []
    for layer in range(index.n_layers):
        names = [f"{side}_{what}" for side in ("top", "bottom") for what in ("ids", "logits")]
        columns = read_columns(index.folder / layer_file("values", layer), names)
        flat = is_flat(columns["top_logits"], columns["bottom_logits"])
        for side, name in ((1, "top_ids"), (-1, "bottom_ids")):
            rows = columns[name]
            part = np.empty(rows.size, VALUE_POSTING)
            part["cell"], part["rank"] = _cells_and_ranks(index, layer, rows)
            part["side"] = side
            listed = ~np.repeat(flat, rows.shape[1])
            ids.append(rows.reshape(-1)[listed])
            postings.append(part[listed])
    every, entries = _sort(np.concatenate(ids), np.concatenate(postings))
    distinct, first = np.unique(every, return_index=True)
    for id, part in zip(distinct.tolist(), np.split(entries, first[1:]), strict=True):
        token = index.token(id)
        yield id, token, token.casefold(), part.tobytes()


def _sentences(index: Index) -> Iterator[tuple[int, str, bytes, bytes]]:
    """Yield every sentence that triggers a memory, with its text, prefix ends and postings."""
    prefixes, postings = [], []
    signs = [(1, "prefix"), (-1, "negative_prefix")][: 2 if index.manifest.model.gated else 1]
    for layer in range(index.n_layers):
        columns = read_columns(
            index.folder / layer_file("triggers", layer), [name for _, name in signs]
        )
        for side, name in signs:
            rows = columns[name]
            part = np.empty(rows.size, TRIGGER_POSTING)
            part["cell"], part["rank"] = _cells_and_ranks(index, layer, rows)
            part["side"] = side
            filled = rows.reshape(-1) != NO_PREFIX
            prefixes.append(rows.reshape(-1)[filled])
            postings.append(part[filled])
    every, entries = _sort(np.concatenate(prefixes), np.concatenate(postings))
    begin = 0
    for sentence in index.sentences.rows(0, index.sentences.n_sentences):
        past = sentence.offset + len(sentence.ids) + 1
        end = begin + int(np.searchsorted(every[begin:], past))
        if end > begin:
            text, ends = _prefix_ends(index, sentence)
            own_ends = ends[every[begin:end] - sentence.offset]
            order = np.argsort(-own_ends, kind="stable")
            distinct, counts = np.unique(own_ends, return_counts=True)
            table = np.empty(len(distinct), TRIGGER_END)
            table["end"], table["n"] = distinct[::-1], np.cumsum(counts[::-1])
            postings_blob = entries[begin:end][order].tobytes()
            yield sentence.sentence, text, table.tobytes(), postings_blob
        begin = end


def _prefix_ends(index: Index, sentence: StoredSentence) -> tuple[str, ndarray]:
    """Return a sentence's text, and the number of characters of its prefix of each length."""
    text, starts, ends = sentence.text, sentence.starts, sentence.ends
    if text is None or starts is None or ends is None:
        shown = [index.token(id) for id in sentence.ids]
        return "".join(shown), np.cumsum([0, *map(len, shown)])
    characters = [0, *ends]
    for length in range(1, len(ends)):
        if starts[length] < ends[length - 1]:  # inside a character, which is not in the prefix
            characters[length] = min(characters[length - 1], starts[length - 1])
    return text, np.asarray(characters)


def _cells_and_ranks(index: Index, layer: int, rows: ndarray) -> tuple[ndarray, ndarray]:
    """Return the cell number and the rank of every entry of a layer's lists (memory, rank)."""
    n_memories, n_ranks = rows.shape
    cells = index.layout.starts[layer] + np.arange(n_memories)
    return np.repeat(cells, n_ranks), np.tile(np.arange(1, n_ranks + 1), n_memories)


def _sort(keys: ndarray, entries: ndarray) -> tuple[ndarray, ndarray]:
    """Return keys and their entries in ascending order of key."""
    order = np.argsort(keys, kind="stable")
    return keys[order], entries[order]
