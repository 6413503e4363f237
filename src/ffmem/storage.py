"""A folder of files, each whole or absent: on a disk that all workers see, or in an object store.

    open_storage("runs/demo")                    a local or network folder
    open_storage("s3://bucket/runs?region=…")    whatever pyarrow or fsspec can open

A file is written under a temporary name and appears at once: by a rename on a disk, by the end of
the upload in S3, Google's and Azure's stores, by a move elsewhere. If two processes write the same
name, one of their files wins, complete. Names may have one folder: `values/a`. Credentials come
from where each library looks for them; those in a URL are never shown.
"""

import errno
import io
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from ffmem.errors import FfmemError, StoreError
from ffmem.files import committing, storage_errors

ATOMIC_UPLOADS = frozenset({"s3", "gcs", "abfs"})
"""File systems whose objects appear when their upload is complete; they have buckets."""

READ_AHEAD = 1 << 20
"""Bytes to fetch for a small read of an object: the next read is probably nearby."""

HIDDEN = "…"


class Storage:
    """A folder by its path; `ObjectStorage` is one by its URL."""

    is_remote = False

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def url(self) -> str:
        """The path or URL with which another process opens it; a URL may hold a password."""
        return str(self.path.absolute())

    @property
    def shown(self) -> str:
        """The path or URL for messages, without any password."""
        return self.url

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Give a local path to write to; the file is committed when the block ends well."""
        with committing(self.path / name) as temporary:
            yield temporary

    @contextmanager
    def reading(self, name: str) -> Iterator[pa.NativeFile]:
        """Open a file for random access; FileNotFoundError if it is absent."""
        with self._read_errors(name):
            opened = pa.memory_map(str(self.path / name))
        with opened as file:
            yield file

    def upload(self, path: Path, name: str) -> None:
        """Commit a copy of a local file."""
        with committing(self.path / name) as temporary:
            shutil.copyfile(path, temporary)

    def write_text(self, name: str, text: str) -> None:
        """Commit a small text file."""
        with self.writing(name) as path:
            path.write_text(text, encoding="utf-8")

    def read_text(self, name: str) -> str | None:
        """Return a small text file, None if it is absent."""
        try:
            with self._read_errors(name):
                return (self.path / name).read_bytes().decode("utf-8")
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """Return whether a file is there."""
        with self._read_errors(name):
            return (self.path / name).is_file()

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files in a folder, sorted; unfinished ones have none yet."""
        try:
            with self._read_errors(folder), os.scandir(self.path / folder) as entries:
                found = [entry.name for entry in entries if entry.is_file()]
        except FileNotFoundError:
            return []
        return sorted(_joined(folder, name) for name in found if not name.startswith("."))

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        with storage_errors(self.path / name):
            (self.path / name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the folder with everything in it."""
        with storage_errors(self.path), suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    @contextmanager
    def _read_errors(self, name: str) -> Iterator[None]:
        """Explain why a file cannot be read; an absent file raises FileNotFoundError."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(
                f"Cannot read {self.path / name}: {error.strerror or error}."
                " Check its permissions, or choose another folder."
            ) from None


def open_storage(place: str | Path, folder: str = "") -> Storage:
    """Return the storage at a path or URL, or in a folder inside it."""
    url = str(place)
    if "://" not in url:
        return Storage(Path(url, folder))
    if url.startswith("file://"):
        return Storage(Path(_path_of(url), folder))
    base, mark, query = url.partition("?")
    inside = _joined(base.rstrip("/"), folder) if folder else base
    return ObjectStorage(inside + mark + query)


def _path_of(url: str) -> str:
    """Return the path that a file:// URL names."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise StoreError(
            f"Cannot open {url}: it names another machine or no path. Write file:///path, or the"
            " path alone."
        )
    return unquote(parts.path)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


class ObjectStorage(Storage):
    """A folder of an object store: S3, Google's, Azure's, HDFS, and whatever fsspec knows.

    s3://bucket/run?endpoint_override=host:9000&scheme=http    gs://…    hdfs://…    abfs://…
    """

    is_remote = True

    def __init__(self, url: str) -> None:
        self._address = _Address(url)
        self._filesystem, root = _open_filesystem(self._address)
        self._root = root.rstrip("/")
        self._uploads_are_atomic = self._filesystem.type_name in ATOMIC_UPLOADS
        bucket, _, folder = self._root.partition("/")
        if not self._root or (self._uploads_are_atomic and not folder):
            raise StoreError(
                f"Cannot use {self.shown}: it is a whole store, and a run deletes its folder when"
                " it is done. Name a folder inside it."
            )
        if self._uploads_are_atomic:
            self._check_bucket(bucket)

    def _check_bucket(self, bucket: str) -> None:
        from pyarrow import fs

        with self._errors("open"):
            try:
                found = self._filesystem.get_file_info(bucket).type
            except OSError as error:
                if "ACCESS_DENIED" in str(error):
                    return  # access to a folder need not include its bucket
                raise
        if found == fs.FileType.NotFound:
            raise StoreError(
                f"Cannot open {self.shown}: there is no bucket {bucket!r}."
                " Create it first, or name another one."
            )

    @property
    def url(self) -> str:
        """The URL with which another process opens it; it may hold a password."""
        return self._address.url

    @property
    def shown(self) -> str:
        """The URL for messages, without any password."""
        return self._address.shown

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Give a local path to write to; the file is uploaded when the block ends well."""
        try:
            scratch = tempfile.TemporaryDirectory(prefix="ffmem-", ignore_cleanup_errors=True)
        except OSError as error:
            raise StoreError(
                f"Cannot create a temporary folder: {error.strerror}."
                " Set TMPDIR to a local folder with enough space."
            ) from None
        with scratch as folder:
            path = Path(folder) / Path(name).name
            with storage_errors(path):
                yield path
            self.upload(path, name)

    @contextmanager
    def reading(self, name: str) -> Iterator[pa.NativeFile]:
        """Open a file for random access; FileNotFoundError if it is absent."""
        with self._errors("read", name):
            opened = self._filesystem.open_input_file(self._path(name))
        raw = _RemoteFile(self, name, opened)
        with opened, pa.PythonFile(io.BufferedReader(raw, READ_AHEAD)) as file:
            yield file

    def upload(self, path: Path, name: str) -> None:
        """Commit a copy of a local file."""
        with self._errors("write", name):
            if not path.is_file():
                raise StoreError(f"Cannot write {self.shown}/{name}: {path} does not exist.")
            if self._uploads_are_atomic:
                self._copy(path, self._path(name))
                return
            self._filesystem.create_dir(self._path(name).rpartition("/")[0], recursive=True)
            folder, _, last = name.rpartition("/")
            temporary = self._path(_joined(folder, f".{last}.{secrets.token_hex(8)}.tmp"))
            try:
                self._copy(path, temporary)
                self._move(temporary, self._path(name))
            except BaseException:
                with suppress(Exception):  # report the first error
                    self._filesystem.delete_file(temporary)
                raise

    def _copy(self, path: Path, target: str) -> None:
        from pyarrow import fs

        # Not through our own stream: closing it after an interrupt would commit a part of the file.
        try:
            fs.copy_files(
                str(path),
                target,
                source_filesystem=fs.LocalFileSystem(),
                destination_filesystem=self._filesystem,
            )
        except FileNotFoundError as error:
            raise OSError(str(error)) from None

    def _move(self, temporary: str, path: str) -> None:
        """Move a temporary file to its name; if that fails, the file of that name stays."""
        try:
            self._filesystem.move(temporary, path)
            return
        except Exception:  # some file systems refuse to replace a file, each with its own error
            new, old = self._filesystem.get_file_info([temporary, path])
            if not new.is_file or not old.is_file:
                raise
        replaced = f"{temporary}.old"
        self._filesystem.move(path, replaced)
        try:
            self._filesystem.move(temporary, path)
        except BaseException:
            self._filesystem.move(replaced, path)
            raise
        self._filesystem.delete_file(replaced)

    def read_text(self, name: str) -> str | None:
        """Return a small text file, None if it is absent."""
        try:
            with self.reading(name) as file:
                text: str = file.read().decode("utf-8")
                return text
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """Return whether a file is there."""
        with self._errors("read", name):
            is_file: bool = self._filesystem.get_file_info(self._path(name)).is_file
            return is_file

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files in a folder, sorted; unfinished ones have none yet."""
        from pyarrow import fs

        with self._errors("read"):
            self._filesystem.get_file_info(self._root)  # fsspec lists nothing on a dead connection
            selector = fs.FileSelector(self._path(folder), allow_not_found=True)
            found = self._filesystem.get_file_info(selector)
        files = [one.base_name for one in found if one.is_file]
        return sorted(_joined(folder, name) for name in files if not name.startswith("."))

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError), self._errors("delete", name):
            self._filesystem.delete_file(self._path(name))

    def clear(self) -> None:
        """Remove the folder with everything in it."""
        with suppress(FileNotFoundError), self._errors("delete"):
            self._filesystem.delete_dir(self._root)

    def _path(self, name: str) -> str:
        return _joined(self._root, name)

    @contextmanager
    def _errors(self, action: str, name: str = "") -> Iterator[None]:
        """Explain errors of the store; an absent file raises FileNotFoundError."""
        what = _joined(self.shown, name)
        try:
            try:
                yield
            except FileNotFoundError:
                if not self._uploads_are_atomic:
                    # fsspec reports a dead connection as an absent file; this raises then.
                    self._filesystem.get_file_info(self._path(name))
                raise
        except FfmemError:
            raise
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), what) from None
        except Exception as error:  # each library has its own errors
            reason = self._address.redact(f"{error}" or type(error).__name__)
            raise StoreError(
                f"Cannot {action} {what}: {reason.rstrip('.')}. Check the URL, your permissions"
                " and the network, then rerun the command."
            ) from None


class _RemoteFile(io.RawIOBase):
    """An open object that explains its read errors."""

    def __init__(self, storage: ObjectStorage, name: str, opened: pa.NativeFile) -> None:
        self._storage, self._name, self._opened = storage, name, opened

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
            with self._storage._errors("read", self._name):
                yield
        except FileNotFoundError as error:
            raise StoreError(
                f"Cannot read {error.filename}: it was deleted in the meantime."
            ) from None


class _Address:
    """A URL that may hold a password. It hides too much rather than too little."""

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

    def redact(self, text: str) -> str:
        """Return a library's message on one line, without passwords."""
        text = text.replace(self.url, self.shown)
        for one in self._hidden:
            text = text.replace(one, HIDDEN)
        return " ".join(text.split())

    def error(self, error: Exception) -> StoreError:
        """Return the error for a URL that a library does not accept."""
        reason = self.redact(str(error)).rstrip(".")
        if self._has_password:  # the library may quote any part of it
            reason = "the URL is invalid, or its user is unknown there"
        return StoreError(
            f"Cannot open {self.shown}: {reason}. Check the URL and your permissions."
        )


def _open_filesystem(address: _Address) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from pyarrow import fs

    try:
        opened: tuple[Any, str] = fs.FileSystem.from_uri(address.url)
        return opened
    except pa.ArrowNotImplementedError:
        pass  # this pyarrow was built without it
    except (pa.ArrowInvalid, OSError) as error:
        if "Unrecognized filesystem type" not in str(error):
            raise address.error(error) from None
    from fsspec import available_protocols, registry  # type: ignore[import-untyped]
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    if address.scheme not in {*available_protocols(), *registry}:
        raise StoreError(
            f"Cannot open {address.shown}: {address.scheme}:// is not a scheme that pyarrow or"
            " fsspec knows. Use a path, or a URL such as s3://, gs://, abfs:// or hdfs://."
        )
    try:
        filesystem, root = url_to_fs(address.url)
    except ImportError as error:
        raise StoreError(
            f"Cannot open {address.shown}: a package is missing ({address.redact(str(error))})."
            " Install it on every machine of the run."
        ) from None
    except Exception as error:  # each library has its own errors
        raise address.error(error) from None
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), root
