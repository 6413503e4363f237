"""The indexes that the explorer shows, each with the experiments measured on it."""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from ffmem.errors import FfmemError, StoreError
from ffmem.experiments.base import NAMES, ExperimentResult
from ffmem.indexing.search import Search
from ffmem.indexing.store import Index
from ffmem.web.limits import NotHere


class Shelf:
    """One index, by the name that addresses give it."""

    def __init__(self, name: str, index: Index, results: dict[str, ExperimentResult]) -> None:
        self.name = name
        self.index = index
        self.results = results
        self._own = threading.local()
        self._making = threading.Lock()

    @cached_property
    def title(self) -> str:
        """Model and corpus in a few words."""
        manifest = self.index.manifest
        sources = ", ".join(short(source.source) for source in manifest.corpus.sources)
        return f"{short(manifest.model.source)} · {sources}"

    @property
    def model(self) -> str:
        """The model's name, without the folders that it lies in."""
        return short(self.index.manifest.model.source)

    def prepare(self) -> str | None:
        """Make the search file if it is missing; return why it cannot be made, if so."""
        try:
            with self.searching():
                return None
        except FfmemError as error:
            return str(error)

    @contextmanager
    def searching(self) -> Iterator[Search]:
        """Yield a search of this index for the calling thread."""
        if not hasattr(self._own, "search"):
            with self._making:  # the first one may have to make search.sqlite
                self._own.search = Search(self.index)
        yield self._own.search


class Library:
    """All indexes of a site; addresses that name none mean the first."""

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        self.shelves = {shelf.name: shelf for shelf in shelves}

    @classmethod
    def of(cls, folders: Sequence[Path], reports: Sequence[Path] = ()) -> "Library":
        """Open indexes, and the experiments in `reports` or beside each index (`DIR-report`)."""
        shelves: list[Shelf] = []
        used: set[Path] = set()
        for folder in folders:
            index = Index(folder)
            results: dict[str, ExperimentResult] = {}
            for place in (folder.resolve().with_name(f"{folder.resolve().name}-report"), *reports):
                found = measured(index, place)
                if found:
                    used.add(place)
                results |= found
            name = _name(folder, {shelf.name for shelf in shelves})
            shelves.append(Shelf(name, index, results))
        for place in reports:
            if place not in used:
                raise StoreError(
                    f"{place} holds no experiment on these indexes: no result of the same model and"
                    " corpus. Measure with `ffmem report DIR --out FOLDER`."
                )
        return cls(shelves)

    def shelf(self, name: str | None = None) -> Shelf:
        """Return one shelf; without a name, the first."""
        if name is None:
            return next(iter(self.shelves.values()))
        if name not in self.shelves:
            raise NotHere(f"There is no index {name!r} here. There are: {', '.join(self.shelves)}.")
        return self.shelves[name]


def measured(index: Index, folder: Path) -> dict[str, ExperimentResult]:
    """Return the results in a folder that are of this very model and corpus, by experiment."""
    found = {}
    for name in NAMES:
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        result = ExperimentResult.read(path)
        settings = result.settings
        corpus = settings.get("corpus")
        hashes = (settings.get("model_hash"), isinstance(corpus, dict) and corpus.get("hash"))
        if hashes == (index.manifest.model.hash, index.manifest.corpus.hash):
            found[name] = result
    return found


def short(source: str) -> str:
    """Return a source without its folders, which visitors need not know."""
    return source if ":" in source else Path(source).name or source


def _name(folder: Path, taken: set[str]) -> str:
    """Return a name for addresses: the folder's own, in plain letters, once only."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "index"
    name, count = plain, 1
    while name in taken:
        count += 1
        name = f"{plain}-{count}"
    return name
