"""The indexes of the explorer, each with the experiments measured on it.

An index may be unfinished, and reports and patterns may arrive while the server runs. Every request
asks its `ServedFolder` for the `ServedIndex` of the moment, which does not change while the request
uses it. Once a second, a request checks the folder for changes; others get the previous state, so
none waits.
"""

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from numpy import ndarray

from ffmem.errors import FfmemError, StoreError
from ffmem.experiments.base import NAMES, ExperimentResult, find_all
from ffmem.indexing.config import CORPUS_FILE
from ffmem.indexing.filters import NO_FILTERS, Filters
from ffmem.indexing.query import Query
from ffmem.indexing.search import Search, SearchResult, search_values
from ffmem.indexing.status import Status, status
from ffmem.indexing.store import Index
from ffmem.web.errors import NotFound, NotReady
from ffmem.web.patterns import stored_patterns

REFRESH_SECONDS = 1.0
"""Minimum time between two checks for changes."""


class IndexSearch:
    """Searches one index in any thread."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._thread = threading.local()
        self._lock = threading.Lock()
        self.values_only = index.live is not None
        """Whether there is no search file yet: the index is unfinished, or the file is made."""

    def prepare(self) -> str | None:
        """Make the search file if it is missing; return why it cannot be made, if so."""
        try:
            self._open()
            return None
        except FfmemError as error:
            return str(error)
        finally:
            self.values_only = False

    def search(
        self,
        query: Query,
        place: str,
        filters: Filters = NO_FILTERS,
        offset: int = 0,
        limit: int = 20,
        among: ndarray | None = None,
    ) -> SearchResult:
        """Search in values or triggers."""
        if self.values_only and place == "values":
            return search_values(self._index, query, filters, offset, limit, among)
        return self._open().search(query, place, filters, offset, limit, among)

    def _open(self) -> Search:
        """Return the search of the calling thread."""
        if not hasattr(self._thread, "search"):
            with self._lock:  # the first one may have to make search.sqlite
                self._thread.search = Search(self._index)
        found: Search = self._thread.search
        return found


@dataclass(frozen=True)
class IndexProgress:
    """How far an index is that was unfinished when the server started."""

    state: str
    """preparing (the corpus is read), running, stopped or finished."""
    tokens: int
    tokens_read: int
    layers: int
    value_layers: int
    """Layers whose values are computed."""
    triggers_searchable: bool
    patterns: bool
    figures: int
    done: bool
    """Whether everything is there: index, patterns, figures."""
    version: str
    """Changes when pages have something new to show."""
    message: str

    @property
    def share(self) -> float:
        """Share of the tokens that are read."""
        return self.tokens_read / self.tokens if self.tokens else 0.0


class ServedIndex:
    """An index as one request sees it."""

    def __init__(
        self,
        name: str,
        index: Index,
        results: dict[str, ExperimentResult],
        search: IndexSearch | None = None,
        status: Status | None = None,
        is_growing: bool = False,
    ) -> None:
        self.name = name
        """Its name in URLs."""
        self.index = index
        self.results = results
        """Results by experiment."""
        self.search = search or IndexSearch(index)
        self._status = status
        """Status of the run, if the index is unfinished."""
        self._is_growing = is_growing

    def holds(
        self, index: Index, results: dict[str, ExperimentResult], status: Status | None
    ) -> bool:
        """Return whether this is what it shows already."""
        return self.index is index and self.results is results and self._status == status

    @cached_property
    def title(self) -> str:
        """Model and corpus in a few words."""
        sources = self.index.manifest.corpus.sources
        return f"{self.model} · {', '.join(short_source(one.source) for one in sources)}"

    @property
    def model(self) -> str:
        """The model's name, without the folders that it is in."""
        return short_source(self.index.manifest.model.source)

    @property
    def progress(self) -> IndexProgress | None:
        """How far the index is; None if it was finished when the server started."""
        if not self._is_growing:
            return None
        status, corpus = self._status, self.index.manifest.corpus
        has_patterns = bool(stored_patterns(self.index).sources)
        searchable = not self.search.values_only
        n_figures = len(self.results)
        if status is None:
            n_all = len(NAMES)
            if not self.index.manifest.model.has_values:
                n_all = sum(not experiment.needs_values for experiment in find_all())
            figures = f"figures ({n_figures} of {n_all} measured)" if n_figures else "figures"
            parts = {
                "search in triggers": searchable,
                "patterns": has_patterns,
                figures: n_figures >= n_all,
            }
            missing = [name for name, is_there in parts.items() if not is_there]
            read, value_layers, state = corpus.tokens, self.index.n_layers, "finished"
            message = f"All {corpus.tokens:,} tokens have been read."
            message += f" Not there yet: {', '.join(missing)}." if missing else ""
        else:
            missing = ["tokens"]
            read, value_layers, state = status.tokens_read, status.values, status.state
            message = f"So far: {read:,} of {corpus.tokens:,} tokens"
            if value_layers < self.index.n_layers and self.index.manifest.model.has_values:
                message += f", values of {value_layers} of {self.index.n_layers} layers"
            if state == "stopped":
                message += ". The run is stopped: rerun its command to resume it"
            message += "."
        all_values = value_layers >= self.index.n_layers
        version = (status is None, read, all_values, searchable, has_patterns, n_figures)
        return IndexProgress(
            state=state,
            tokens=corpus.tokens,
            tokens_read=read,
            layers=self.index.n_layers,
            value_layers=value_layers,
            triggers_searchable=searchable,
            patterns=has_patterns,
            figures=n_figures,
            done=not missing,
            version="-".join(str(int(part)) for part in version),
            message=message,
        )


class ServedFolder:
    """The folder of an index, finished or not, and what was read from it last."""

    def __init__(
        self, name: str, folder: Path, reports: Sequence[Path] = (), wait: bool = False
    ) -> None:
        self.name = name
        self.folder = folder
        self.reports = (folder.resolve().with_name(f"{folder.resolve().name}-report"), *reports)
        self.is_growing = False
        """Whether the index was unfinished when the server started, so that more may come."""
        self._lock = threading.Lock()
        self._current: ServedIndex | None = None
        self._error = ""
        """Why the index could not be read last time."""
        self._result_files: list[tuple[Path, int, int]] = []
        """Results that were read: path, time and size."""
        try:
            self._read()
        except StoreError as error:
            if not wait and not (folder / "partials").is_dir():
                raise
            self.is_growing = True
            self._error = str(error)
        self._checked = time.monotonic()

    @property
    def title(self) -> str:
        """Its name, model and corpus."""
        return f"{self.name} · {self._current.title}" if self._current else self.name

    def current(self) -> ServedIndex:
        """Return the index as it is now."""
        if time.monotonic() - self._checked >= REFRESH_SECONDS:
            self.refresh()
        if self._current is None:
            # Before the corpus is read there is nothing to open; after that, an error is one.
            reason = self._error if (self.folder / CORPUS_FILE).exists() else ""
            waits = "the model is loading, or the corpus is being read."
            raise NotReady(f"The index {self.name} is being prepared: {reason or waits}")
        return self._current

    def refresh(self) -> bool:
        """Check for changes, unless another thread does; return whether the index has changed."""
        if not self._lock.acquire(blocking=False):
            return False
        before = self._current
        try:
            self._read()
        except (StoreError, OSError) as error:  # keep what was there before
            self._error = str(error)
            return False
        finally:
            self._checked = time.monotonic()
            self._lock.release()
        return before is None or self._current is None or self._current.index is not before.index

    def _read(self) -> None:
        """Read what has changed since the last time."""
        before = self._current
        index = None if before is None else before.index
        if index is None or index.live is not None:
            opened = Index(self.folder, unfinished=True)
            if index is None or not _same_run(opened, index):
                index = opened
        self.is_growing = self.is_growing or index.live is not None
        files = self._find_results()
        if before is not None and index is before.index:
            results, search = before.results, before.search
        else:
            results, search = {}, IndexSearch(index)
            self._result_files = []
        if files != self._result_files:
            results = read_results(index, [path for path, _, _ in files])
            self._result_files = files
        if self.is_growing and index.live is None and search is not (before and before.search):
            # Making the search file may take a while. Until then, values are searched without it.
            search.values_only = True
            threading.Thread(target=search.prepare, daemon=True).start()
        how_far = None if index.live is None else status(self.folder)
        if before is not None and before.holds(index, results, how_far):
            return
        self._current = ServedIndex(self.name, index, results, search, how_far, self.is_growing)

    def _find_results(self) -> list[tuple[Path, int, int]]:
        found = []
        for path in (folder / f"{name}.json" for folder in self.reports for name in NAMES):
            with suppress(OSError):
                stat = path.stat()
                found.append((path, stat.st_mtime_ns, stat.st_size))
        return found


def _same_run(one: Index, other: Index) -> bool:
    """Return whether two readings of an unfinished index hold the same."""
    if one.live is None or other.live is None:
        return False
    mine, theirs = one.live, other.live
    return (mine.committed, mine.value_layers) == (theirs.committed, theirs.value_layers)


class Catalog:
    """All indexes of a server; URLs that name none mean the first."""

    def __init__(self, folders: Sequence[ServedFolder]) -> None:
        self.folders = {folder.name: folder for folder in folders}

    @classmethod
    def open(
        cls, folders: Sequence[Path], reports: Sequence[Path] = (), wait: bool = False
    ) -> "Catalog":
        """Open indexes, and the experiments in `reports` or next to each index (`DIR-report`).

        With `wait`, folders may not exist yet.
        """
        served: list[ServedFolder] = []
        for folder in folders:
            name = _unique_name(folder, {one.name for one in served})
            served.append(ServedFolder(name, folder, reports, wait))
        for report in reports:
            paths = [path for name in NAMES if (path := report / f"{name}.json").is_file()]
            is_used = any(
                one.is_growing or read_results(one.current().index, paths) for one in served
            )
            if not is_used:
                raise StoreError(
                    f"{report} holds no experiment on these indexes: no result of the same model"
                    " and corpus. Measure with `ffmem report DIR --out FOLDER`."
                )
        return cls(served)

    def folder(self, name: str | None = None) -> ServedFolder:
        """Return one folder; without a name, the first."""
        if name is None:
            return next(iter(self.folders.values()))
        if name not in self.folders:
            raise NotFound(f"There is no index {name!r}. There are: {', '.join(self.folders)}.")
        return self.folders[name]

    def get(self, name: str | None = None) -> ServedIndex:
        """Return one index as it is now; without a name, the first."""
        return self.folder(name).current()


def read_results(index: Index, paths: Sequence[Path]) -> dict[str, ExperimentResult]:
    """Return the results that are of this model and corpus, by experiment."""
    found = {}
    for path in paths:
        result = ExperimentResult.read(path)
        corpus = result.settings.get("corpus")
        hashes = (
            result.settings.get("model_hash"),
            isinstance(corpus, dict) and corpus.get("hash"),
        )
        if hashes == (index.manifest.model.hash, index.manifest.corpus.hash):
            found[path.stem] = result
    return found


def short_source(source: str) -> str:
    """Return a source without its folders, which visitors need not know."""
    return source if ":" in source else Path(source).name or source


def _unique_name(folder: Path, taken: set[str]) -> str:
    """Return a name for URLs: the folder's own, in plain letters, unique."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "index"
    name, count = plain, 1
    while name in taken:
        count += 1
        name = f"{plain}-{count}"
    return name
