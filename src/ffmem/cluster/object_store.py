"""A shared folder in an object store: S3, Google's, Azure's, HDFS, and whatever fsspec knows.

    s3://bucket/run?endpoint_override=host:9000&scheme=http    gs://…    hdfs://…    abfs://…

A file is written on this machine and then uploaded. In S3, Google's and Azure's stores an object
appears when its upload is complete; elsewhere it is uploaded under another name and moved.
Credentials come from where each library looks for them. Those in a URL are never shown.
"""

import errno
import io
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from ffmem.cluster.shared import SharedFolder
from ffmem.errors import FfmemError, StoreError
from ffmem.files import storage_errors

WHOLE = frozenset({"s3", "gcs", "abfs"})
"""File systems whose objects appear when they are complete. They know buckets."""

BLOCK = 1 << 20
"""Bytes that a small read asks for: the next one is probably beside it."""

HIDDEN = "…"


class ObjectStore(SharedFolder):
    """A folder by URL."""

    def __init__(self, url: str) -> None:
        self._address = _Address(url)
        self._filesystem, root = _opened(self._address)
        self._root = root.rstrip("/")
        self._is_whole = self._filesystem.type_name in WHOLE
        bucket, _, folder = self._root.partition("/")
        if not self._root or (self._is_whole and not folder):
            raise StoreError(
                f"Cannot use {self.shown} as shared folder: it is all of a store, and a run"
                " removes its folder at the end. Name a folder inside it."
            )
        if self._is_whole:
            self._refuse_missing(bucket)

    def _refuse_missing(self, bucket: str) -> None:
        with self._errors("open"):
            try:
                found = self._filesystem.get_file_info(bucket).type
            except OSError as error:
                if "ACCESS_DENIED" in str(error):
                    return  # who may use a folder need not see its bucket; the first use will tell
                raise
        if found == fs.FileType.NotFound:
            raise StoreError(
                f"Cannot open the shared folder {self.shown}: there is no bucket {bucket!r}."
                " Make it first, or name another one."
            )

    @property
    def place(self) -> str:
        """Where it is, so that another process can open it; it may hold a password."""
        return self._address.url

    @property
    def shown(self) -> str:
        """Where it is, for people: without any password."""
        return self._address.shown

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Give a local path to write to; what stands there is uploaded when the block ends."""
        with _temporary(name) as path:
            with storage_errors(path):
                yield path
            self.put(path, name)

    @contextmanager
    def reading(self, name: str) -> Iterator[pa.NativeFile]:
        """Open a file at any position; FileNotFoundError if it is not there."""
        with self._errors("read", name):
            opened = self._filesystem.open_input_file(self._path(name))
        with opened, pa.PythonFile(io.BufferedReader(_Bytes(self, name, opened), BLOCK)) as file:
            yield file

    @contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        """Give a path of this machine where a file can be read; FileNotFoundError if missing."""
        with _temporary(name) as path:
            with self._errors("read", name):
                try:
                    fs.copy_files(
                        self._path(name),
                        str(path),
                        source_filesystem=self._filesystem,
                        destination_filesystem=fs.LocalFileSystem(),
                    )
                except OSError as error:
                    if error.errno in (None, errno.ENOENT):
                        raise
                    with storage_errors(path):  # the store has no such errors: it is the disk here
                        raise
            yield path

    def put(self, path: Path, name: str) -> None:
        """Commit a file that lies on this machine."""
        with self._errors("write", name):
            if not path.is_file():
                raise StoreError(f"Cannot write {self.shown}/{name}: nothing stands at {path}.")
            if self._is_whole:
                self._upload(path, self._path(name))
                return
            self._filesystem.create_dir(self._root, recursive=True)
            temporary = self._path(f".{name}.{secrets.token_hex(8)}.tmp")
            try:
                self._upload(path, temporary)
                self._move(temporary, self._path(name))
            except BaseException:
                with suppress(Exception):  # the first error is the one to tell
                    self._filesystem.delete_file(temporary)
                raise

    def _upload(self, path: Path, to: str) -> None:
        # Not through a stream of ours: to close it after an interrupt would commit a part.
        try:
            fs.copy_files(
                str(path),
                to,
                source_filesystem=fs.LocalFileSystem(),
                destination_filesystem=self._filesystem,
            )
        except FileNotFoundError as error:
            raise OSError(str(error)) from None

    def _move(self, temporary: str, path: str) -> None:
        try:
            self._filesystem.move(temporary, path)
        except Exception:  # some refuse to replace a file, each in its own words
            self._filesystem.delete_file(path)
            self._filesystem.move(temporary, path)

    def write_text(self, name: str, text: str) -> None:
        """Commit a small text file."""
        with self.writing(name) as path:
            path.write_text(text, encoding="utf-8")

    def read_text(self, name: str) -> str | None:
        """Return a small text file, None if it is not there."""
        try:
            with self.reading(name) as file:
                text: str = file.read().decode("utf-8")
                return text
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        with self._errors("read", name):
            is_there: bool = self._filesystem.get_file_info(self._path(name)).is_file
            return is_there

    def size(self, name: str) -> int:
        """Return a file's size in bytes; FileNotFoundError if it is not there."""
        with self._errors("read", name):
            found = self._filesystem.get_file_info(self._path(name))
            if not found.is_file:
                raise FileNotFoundError
            size: int = found.size
            return size

    def names(self) -> list[str]:
        """Return the files' names in order; what is being written has none yet."""
        with self._errors("read"):
            self._filesystem.get_file_info(self._root)  # fsspec would list a dead line as empty
            found = self._filesystem.get_file_info(
                fs.FileSelector(self._root, allow_not_found=True)
            )
        files = (one.base_name for one in found if one.is_file)
        return sorted(name for name in files if not name.startswith("."))

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError), self._errors("delete", name):
            self._filesystem.delete_file(self._path(name))

    def clear(self) -> None:
        """Remove the folder with everything in it."""
        with suppress(FileNotFoundError), self._errors("delete"):
            self._filesystem.delete_dir(self._root)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self, doing: str, name: str = "") -> Iterator[None]:
        """Turn what a store answers into an error that says so; a missing file is told as such."""
        what = f"{self.shown}/{name}" if name else self.shown
        try:
            try:
                yield
            except FileNotFoundError:
                if not self._is_whole:  # fsspec may take a dead line for a missing file: look again
                    self._filesystem.get_file_info(self._path(name).rstrip("/"))
                raise
        except FfmemError:
            raise
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), what) from None
        except Exception as error:  # each library has errors of its own
            reason = self._address.cleaned(f"{error}" or type(error).__name__)
            raise StoreError(
                f"Cannot {doing} {what}: {reason.rstrip('.')}."
                " Check the address, your rights there and the network; then run the same"
                " command again."
            ) from None


class _Bytes(io.RawIOBase):
    """An open file of a store, whose errors are ours while it is read."""

    def __init__(self, store: ObjectStore, name: str, opened: pa.NativeFile) -> None:
        self._store, self._name, self._opened = store, name, opened

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        position: int = self._opened.tell()
        return position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with self._errors():
            position: int = self._opened.seek(offset, whence)
            return position

    def readinto(self, buffer: Any) -> int:
        with self._errors():
            n: int = self._opened.readinto(buffer)
            return n

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with self._store._errors("read", self._name):
                yield
        except FileNotFoundError as error:
            raise StoreError(f"Cannot read {error.filename}: it was removed meanwhile.") from None


@contextmanager
def _temporary(name: str) -> Iterator[Path]:
    """Give a path on this machine that is removed in any case."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="ffmem-", ignore_cleanup_errors=True)
    except OSError as error:
        raise StoreError(
            f"Cannot write to a temporary folder: {error.strerror}."
            " Set TMPDIR to a folder of this machine with room for a file of the run."
        ) from None
    with folder:
        yield Path(folder.name) / name


class _Address:
    """A URL that may hold a password. More of it is hidden than need be, rather than less."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.scheme, _, rest = url.partition("://")
        user, at, after = rest.rpartition("@")
        if self.scheme.startswith("abfs") and not re.search(r"[:/?]", user):
            user, at, after = "", "", rest  # container@account
        folder, _, query = after.partition("?")
        self.shown = f"{self.scheme}://{HIDDEN if at else ''}{at}{folder}"
        values = [part.partition("=")[2] or part for part in query.split("&")]
        hidden = {user, *user.split(":"), *values} - {""}
        self._hidden = sorted({unquote(one) for one in hidden} | hidden, key=len, reverse=True)
        self._has_password = bool(at)

    def cleaned(self, text: str) -> str:
        """Return a message of a library in one line, without what must not be shown."""
        text = text.replace(self.url, self.shown)
        for one in self._hidden:
            text = text.replace(one, HIDDEN)
        return " ".join(text.split())

    def refused(self, error: Exception) -> StoreError:
        """Return what to say of an address that a library does not take."""
        reason = self.cleaned(str(error)).rstrip(".")
        if self._has_password:  # the library may quote any part of it
            reason = "the address is not understood, or its user is not known there"
        return StoreError(
            f"Cannot open the shared folder {self.shown}: {reason}."
            " Check the address and your rights there."
        )


def _opened(address: _Address) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    try:
        opened: tuple[Any, str] = fs.FileSystem.from_uri(address.url)
        return opened
    except pa.ArrowNotImplementedError:
        pass  # this pyarrow was built without it
    except (pa.ArrowInvalid, OSError) as error:
        if "Unrecognized filesystem type" not in str(error):
            raise address.refused(error) from None
    from fsspec import available_protocols, registry  # type: ignore[import-untyped]
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    if address.scheme not in {*available_protocols(), *registry}:
        raise StoreError(
            f"Cannot open the shared folder {address.shown}: nothing is known of"
            f" {address.scheme}://. Give a path, or a URL that begins with s3://, gs://, abfs://,"
            " hdfs:// or with another scheme that fsspec knows."
        )
    try:
        filesystem, root = url_to_fs(address.url)
    except ImportError as error:
        raise StoreError(
            f"Cannot open the shared folder {address.shown}: a package is missing"
            f" ({address.cleaned(str(error))}). Install it on every machine of the run."
        ) from None
    except Exception as error:  # each library has errors of its own
        raise address.refused(error) from None
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), root
