"""The shared folder: files that every worker sees, each whole or not there.

It is a folder of this machine, of a network file system, or a place in an object store by its URL.
A file is written beside itself and appears under its name at once; written twice, one of both
stands there, whole. Names are flat: a shared folder has no folders inside.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from ffmem.errors import StoreError
from ffmem.files import committing, storage_errors, write_text


class SharedFolder:
    """A folder by path. `at` gives the kind that a place asks for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def at(cls, place: str | Path, *inside: str) -> "SharedFolder":
        """Return the shared folder at a path or URL, or at a folder inside it."""
        if "://" not in str(place):
            return SharedFolder(Path(place, *inside))
        url = str(place)
        if url.startswith("file://"):
            return SharedFolder(Path(_path_of(url), *inside))
        from ffmem.cluster.object_store import ObjectStore

        folder, mark, query = url.partition("?")
        folder = "/".join([folder.rstrip("/"), *inside]) if inside else folder
        return ObjectStore(folder + mark + query)

    @property
    def place(self) -> str:
        """Where it is, so that another process can open it; a URL may hold a password."""
        return str(self.path.absolute())

    @property
    def shown(self) -> str:
        """Where it is, for people: without any password."""
        return self.place

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Give a local path to write to; what stands there is committed when the block ends."""
        with committing(self.path / name) as temporary:
            yield temporary

    @contextmanager
    def reading(self, name: str) -> Iterator[pa.NativeFile]:
        """Open a file at any position; FileNotFoundError if it is not there."""
        with self._reading_errors(name):
            opened = pa.memory_map(str(self.path / name))
        with opened as file:
            yield file

    @contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        """Give a path of this machine where a file can be read; FileNotFoundError if missing."""
        self.size(name)
        yield self.path / name

    def put(self, path: Path, name: str) -> None:
        """Commit a file that lies on this machine."""
        with suppress(OSError):
            # Renaming one link of a file to another does nothing, and both names would stay.
            if path.samefile(self.path / name):
                return
        with committing(self.path / name) as temporary:
            try:
                temporary.hardlink_to(path)
            except OSError:  # another disk, or one without links
                shutil.copyfile(path, temporary)

    def write_text(self, name: str, text: str) -> None:
        """Commit a small text file."""
        write_text(self.path / name, text)

    def read_text(self, name: str) -> str | None:
        """Return a small text file, None if it is not there."""
        try:
            with self._reading_errors(name):
                return (self.path / name).read_bytes().decode("utf-8")  # line ends as they are
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        with self._reading_errors(name):
            return (self.path / name).is_file()

    def size(self, name: str) -> int:
        """Return a file's size in bytes; FileNotFoundError if it is not there."""
        with self._reading_errors(name):
            return (self.path / name).stat().st_size

    def names(self) -> list[str]:
        """Return the files' names in order; what is being written has none yet."""
        try:
            with self._reading_errors(), os.scandir(self.path) as entries:
                found = [entry.name for entry in entries if entry.is_file()]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if not name.startswith("."))

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        with storage_errors(self.path / name):
            (self.path / name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the folder with everything in it."""
        with storage_errors(self.path), suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    @contextmanager
    def _reading_errors(self, name: str = "") -> Iterator[None]:
        """Turn what hinders reading into an error that says so; a missing file is told as such."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(
                f"Cannot read {self.path / name}: {error.strerror or error}."
                " Choose a place that you may read."
            ) from None


def _path_of(url: str) -> str:
    """Return the path that a file:// URL names."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise StoreError(
            f"Cannot open the shared folder {url}: it names another machine or no path."
            " Write file:///path, or the path alone."
        )
    return unquote(parts.path)
