"""Writing files so that they are whole or not there.

A file is written under a temporary name, flushed to the disk, and renamed. A full disk becomes
an error that says what to do; nothing that was committed before is touched.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ffmem.errors import FfmemError, StorageFull, StoreError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def committing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; rename it to `path` when the block ends well.

    A symbolic link at `path` is replaced; what it points to stays as it was.
    """
    # Not by the process's number: on a shared disk, two hosts may have the same.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell
            temporary.unlink()
        raise


def check_output_file(path: Path) -> None:
    """Raise unless a user may have meant to write this file: no folder, no device, no link.

    Following a link would overwrite a file that nobody named; replacing it would, for a link
    such as `/dev/stdout`, break the system.
    """
    if path.is_symlink():
        raise FfmemError(
            f"{path} is a symbolic link to {path.readlink()}: name the file itself, or remove the"
            " link."
        )
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no ordinary file"
        raise FfmemError(f"{path} is {what}: name a file to write to.")
    if not path.absolute().parent.is_dir():
        raise FfmemError(
            f"There is no folder {path.absolute().parent}: make it first, or name another file."
        )


_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def csv_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for a CSV in which no text is a formula to a spreadsheet: `=1+1` → `'=1+1`.

    Texts that begin with = + - @, a tab or a carriage return get an apostrophe in front, and so
    do those that begin so after apostrophes: taking one away gives every text back. Numbers stay
    numbers.
    """
    return {
        name: f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell
        for name, cell in row.items()
    }


def refuse_unwritable(folder: Path) -> None:
    """Raise unless files can be written to a folder, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{secrets.token_hex(8)}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StoreError(
            f"Cannot write to the folder {folder}: {error.strerror}. Choose another one."
        ) from None


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder to write to, if it is not there; when nothing comes of it, remove it again."""
    new = not folder.exists()
    refuse_unwritable(folder)
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):  # what is in it stays
                folder.rmdir()
        raise


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, or a place that cannot be written to, into an error that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                f"No room left on the disk while writing {path}. What was committed before is"
                " kept: free some space and run the same command again."
            ) from None
        raise StoreError(
            f"Cannot write {path}: {error.strerror or error}. Choose a place that you may write to."
        ) from None


def remove_temporaries(folder: Path, *names: str) -> None:
    """Remove what `committing` left half-written in a killed process: here, and in subfolders."""
    for place in (folder, *(folder / name for name in names)):
        for path in place.glob(".*.tmp"):
            path.unlink(missing_ok=True)


def open_lock(path: Path) -> IO[str]:
    """Open a lock file, made if it is not there; never through a link, and nothing is emptied."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file, whose folder is made if it is not there; raise `busy` if another does."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(busy) from None
        yield


def sync(path: Path) -> None:
    """Force a file or folder to the disk."""
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
