"""Files that are either complete or absent.

A file is written under a temporary name, flushed to disk, and renamed. A full disk becomes an error
that says what to do, and leaves committed files as they are.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ffmem.errors import FfmemError, StorageFull, StoreError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def committing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; rename it to `path` when the block ends without error.

    A symbolic link at `path` is replaced; its target stays as it was.
    """
    # Not the process id, which two hosts of a shared disk may both have.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):  # report the first error
            temporary.unlink()
        raise


@contextmanager
def committing_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to write to; rename it to `folder` when the block ends without error.

    Raise if there is a folder with files already.
    """
    place = folder.absolute()
    # mkdtemp would make a folder that nobody else can read.
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
    with storage_errors(folder):
        try:
            temporary.mkdir()
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
            temporary.replace(place)
            sync(place.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def check_output_file(path: Path) -> None:
    """Raise unless this is a new or an ordinary file: not a folder, a device, or a link.

    Following a link would overwrite a file that the user did not name; replacing one such as
    `/dev/stdout` would break the system.
    """
    if path.is_symlink():
        raise FfmemError(
            f"{path} is a symbolic link to {path.readlink()}. Name the file itself, or remove the"
            " link."
        )
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "not an ordinary file"
        raise FfmemError(f"{path} is {what}. Name a file to write.")
    if not path.absolute().parent.is_dir():
        raise FfmemError(
            f"There is no folder {path.absolute().parent}. Create it first, or name another file."
        )


_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def csv_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a CSV row in which no text is a spreadsheet formula: `=1+1` → `'=1+1`.

    Text that begins with = + - @, a tab or a carriage return, even after apostrophes, gets an
    apostrophe in front: removing one restores the text. Numbers stay numbers.
    """
    return {
        name: f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell
        for name, cell in row.items()
    }


def check_writable(folder: Path) -> None:
    """Raise unless files can be written to a folder, which is created if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{secrets.token_hex(8)}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StoreError(
            f"Cannot write to the folder {folder}: {error.strerror}. Choose another folder."
        ) from None


@contextmanager
def make_folder(folder: Path) -> Iterator[None]:
    """Create a folder to write to; if the block fails and leaves it empty, remove it again."""
    new = not folder.exists()
    check_writable(folder)
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        raise


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, or a path that cannot be written, into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                f"The disk is full: cannot write {path}. Committed files are kept. Free some space"
                " and rerun the command."
            ) from None
        raise StoreError(
            f"Cannot write {path}: {error.strerror or error}. Choose a path that you can write to."
        ) from None


def remove_temporaries(folder: Path, *names: str) -> None:
    """Remove temporary files that a killed process left in a folder and some subfolders."""
    for place in (folder, *(folder / name for name in names)):
        for path in place.glob(".*.tmp"):
            path.unlink(missing_ok=True)


def open_lock(path: Path) -> IO[str]:
    """Open a lock file, created if needed; never follow a link or truncate a file."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file, in a folder created if needed; raise `busy` if another process holds it."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(busy) from None
        yield


@contextmanager
def try_locked(path: Path) -> Iterator[bool]:
    """Hold a lock file if it exists; yield False if another process holds it."""
    try:
        lock = path.open("r+")
    except FileNotFoundError:  # no lock file, so no lock
        yield True
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Commit a small text file."""
    with committing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
