"""Where the studies of annotators are: beside each index, or in a database that somebody named.

A study is opened when it is first asked for, and then shared by all threads. One that is made
while the server runs is found at the next visit.
"""

import threading
from pathlib import Path

from ffmem.annotation.database import beside
from ffmem.annotation.study import AnnotationStudy
from ffmem.web.library import Shelf
from ffmem.web.limits import NotHere


class NoStudy(NotHere):
    """Nobody has made a study of this index yet."""


class Studies:
    """The studies of a site, by shelf; with an address of a database, that one for all."""

    def __init__(self, url: str | None = None) -> None:
        self.url = url
        self._opened: dict[str | Path, AnnotationStudy] = {}
        self._opening = threading.Lock()

    def of(self, shelf: Shelf) -> AnnotationStudy:
        """Return the study of an index."""
        place = self.url or beside(shelf.index.folder)
        if isinstance(place, Path) and not place.exists():
            raise NoStudy(
                f"There is no study of {shelf.name} yet. Make one with"
                f" `ffmem annotate init {shelf.name}`."
            )
        with self._opening:
            if place not in self._opened:
                self._opened[place] = AnnotationStudy.open(place)
            return self._opened[place]
