"""The studies of a site: next to each index, or one file for all of them."""

from ffmem.annotation import study as annotation
from ffmem.annotation.study import AnnotationStudy, study_path
from ffmem.web.library import Shelf
from ffmem.web.limits import NotHere


class NoStudy(NotHere):
    """There is no study of this index yet."""


class Studies:
    """Opens the study of an index for each request, so a new or restored file is found."""

    def __init__(self, db: str | None = None) -> None:
        self.db = db

    def of(self, shelf: Shelf) -> AnnotationStudy:
        """Return the study of an index."""
        try:
            return AnnotationStudy.open(self.db or study_path(shelf.index.folder))
        except annotation.NoStudy:
            raise NoStudy(
                f"There is no study of {shelf.name} yet. Create one with"
                f" `ffmem annotate init {shelf.name}`."
            ) from None
