"""A dataset repository of the Hugging Face Hub, read in parts over HTTP.

    folder = HubFolder("hf:org/name@revision")
    folder.read("manifest.json")                            a small file, whole
    folder.file("triggers/layer-005.parquet", sha256)       a Parquet file, by row groups

A branch is resolved to its commit once, so all parts belong together. The Hub lists the SHA-256 of
every large file; it must be the one that the index's manifest has, before a byte of the file is
read. A part that arrives short is an error, and Parquet's checksums tell a changed byte. Tokens
come from where huggingface_hub looks for them (`hf auth login`, HF_TOKEN) and are never shown.
"""

import errno
import hashlib
import mmap
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ffmem.errors import HubError, StorageFull, one_line

PREFIX = "hf:"

CONNECTIONS = 8
"""Parts to fetch at the same time."""

NEAR = 1 << 16
"""Parts at most this many bytes apart are fetched as one: a request costs more than they do."""

CACHED_BYTES = 64 << 20
"""Bytes of one file to keep in memory, about: after that, it begins anew."""

FOOTER = 1 << 14
"""Bytes to fetch first from the end of a Parquet file, where it says where its row groups are."""

MAGIC = b"PAR1"
"""The first and the last bytes of a Parquet file."""

_REPOSITORY = re.compile(r"(?:hf:)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)


def is_hub_address(place: object) -> bool:
    """Return whether an argument names an index on the Hub, like hf:org/name."""
    return isinstance(place, str | Path) and str(place).startswith(PREFIX)


def parse_repository(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return repository and revision of `org/name`, `hf:org/name` or `org/name@revision`."""
    found = _REPOSITORY.fullmatch(name)
    if found is None or ".." in name:
        raise HubError(
            f"{name!r} is not the name of a dataset on the Hub. Write org/name, with a revision as"
            " org/name@revision."
        )
    if revision is not None and found[2] is not None and found[2] != revision:
        raise HubError(f"{name} names a different revision than --revision {revision}. Keep one.")
    return found[1], revision or found[2]


def hub_address(repository: str, revision: str | None) -> str:
    """Return the address of an index on the Hub, which `ffmem show` and `ffmem.open` take."""
    return PREFIX + repository + (f"@{revision}" if revision else "")


def require_hub() -> None:
    """Raise if huggingface_hub is not installed; imports nothing."""
    if find_spec("huggingface_hub") is None:
        raise HubError(
            "The Hub needs the package huggingface_hub. Install it: pip install 'ffmem[hub]'."
        )


@contextmanager
def hub_errors(repository: str, action: str = "read") -> Iterator[None]:
    """Turn what huggingface_hub raises into an error that says what to do."""
    from httpx2 import HTTPError
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise HubError(
            f"Cannot {action} {repository}: its owner must grant you access. Ask for it on the"
            " dataset's page, then log in with `hf auth login`."
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"There is no dataset {repository} on the Hub, or you may not {action} it. Check the"
            " name; if it is private, log in with `hf auth login` or set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(
            f"The dataset {repository} has no such revision. Use a branch, a tag or a commit."
        ) from None
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise HubError(
                f"You may not {action} {repository}: the Hub rejects your token, or you have none."
                f" Log in with `hf auth login` or set HF_TOKEN, as a user who may {action} it."
            ) from None
        raise HubError(f"Cannot {action} {repository}: {one_line(error)}.") from None
    except (HTTPError, OSError, RuntimeError, errors.HFValidationError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise StorageFull(
                f"The disk is full: cannot {action} {repository}. Free some space and rerun the"
                " command."
            ) from None
        reason = one_line(error)
        if isinstance(error, RuntimeError):  # of an upload, which says why in its cause
            reason += f" ({one_line(error.__cause__)})" if error.__cause__ else ""
        raise HubError(
            f"Cannot {action} {repository}: {reason}. Check the network and rerun the command."
        ) from None


class FileInfo(NamedTuple):
    """What the Hub says about a file."""

    size: int
    sha256: str | None
    """None for a small file, which git itself stores."""


class HubFolder:
    """A dataset repository at one commit."""

    def __init__(self, address: str) -> None:
        require_hub()
        self.repository, self.revision = parse_repository(address)
        self.shown = hub_address(self.repository, self.revision)
        from huggingface_hub import HfApi

        with hub_errors(self.repository):
            api = HfApi(library_name="ffmem")
            info = api.dataset_info(self.repository, revision=self.revision, files_metadata=True)
        self.commit: str = info.sha or ""
        self.files = {
            one.rfilename: FileInfo(one.size or 0, None if one.lfs is None else one.lfs.sha256)
            for one in info.siblings or ()
        }
        self._read: dict[str, bytes] = {}
        self._opened: dict[str, HubFile] = {}
        self._lock = threading.Lock()

    def read(self, name: str, sha256: str | None = None) -> bytes:
        """Return a whole small file; raise if it is absent, or does not have this hash."""
        size = self._info(name).size
        if name not in self._read:
            self._read[name] = self.fetch(name, 0, size)
        content = self._read[name]
        if sha256 is not None:
            self.check_content(name, content, sha256)
        return content

    def file(self, name: str, sha256: str) -> "HubFile":
        """Return a Parquet file to read in parts; raise if it is not the one with this hash."""
        with self._lock:
            if name not in self._opened:
                info = self.check(name, sha256)
                self._opened[name] = HubFile(self, name, info.size, sha256)
                if info.sha256 is None:  # the Hub does not know its hash, but it is small
                    self._opened[name].open_table()
            return self._opened[name]

    def fetch(self, name: str, start: int, end: int) -> bytes:
        """Return some bytes of a file, from `start` up to `end`."""
        if start >= end:
            return b""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        url = hf_hub_url(self.repository, name, repo_type="dataset", revision=self.commit)
        headers = build_hf_headers(library_name="ffmem")
        headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        with hub_errors(self.repository):
            answer = http_backoff("GET", url, headers=headers)
            hf_raise_for_status(answer)
        content = answer.content
        if answer.status_code == 200:  # the server does not know ranges, and sent everything
            content = content[start:end]
        if len(content) != end - start:
            raise HubError(
                f"Cannot read {self.shown}/{name}: {len(content):,} of {end - start:,} bytes"
                " arrived. Rerun the command."
            )
        return content

    def fetch_all(self, name: str, parts: Iterable[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Return some parts of a file as (start, bytes), fetched at the same time."""
        joined: list[tuple[int, int]] = []
        for start, end in sorted(parts):
            if joined and start - joined[-1][1] <= NEAR:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((start, end))
        if len(joined) < 2:
            return [(start, self.fetch(name, start, end)) for start, end in joined]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            contents = pool.map(lambda part: self.fetch(name, *part), joined)
            return [(start, content) for (start, _), content in zip(joined, contents, strict=True)]

    def check(self, name: str, sha256: str) -> FileInfo:
        """Raise if a file is absent, or if the Hub lists another hash of it."""
        info = self._info(name)
        if info.sha256 is not None and info.sha256 != sha256:
            raise HubError(
                f"{self.shown}/{name} is damaged: its hash differs from the manifest's. Ask the"
                " dataset's owner to push the index again."
            )
        return info

    def check_content(self, name: str, content: bytes, sha256: str) -> None:
        """Raise if a whole file arrived with another hash than this."""
        if hashlib.sha256(content).hexdigest() != sha256:
            raise HubError(
                f"{self.shown}/{name} arrived damaged: the hash differs from the manifest's. Rerun"
                " the command. If that does not help, ask the dataset's owner to push again."
            )

    def _info(self, name: str) -> FileInfo:
        if name not in self.files:
            raise HubError(
                f"{self.shown} lacks the file {name}, so it is not an index, or it is incomplete."
                " Name another dataset, or ask its owner to push the index again."
            )
        return self.files[name]


class HubFile:
    """A Parquet file on the Hub, of which only some row groups are fetched.

    They go to their places in a map of memory as large as the file, whose other pages are never
    touched and so take no room. Arrow reads the map like a file; what was not fetched is zeros.
    """

    def __init__(self, folder: HubFolder, name: str, size: int, sha256: str) -> None:
        self._folder, self._name, self._size, self._sha256 = folder, name, size, sha256
        self._metadata: pq.FileMetaData | None = None
        self._lock = threading.Lock()
        self._forget()

    def __str__(self) -> str:
        return f"{self._folder.shown}/{self._name}"

    def open_table(self, groups: Iterable[int] | None = None) -> pq.ParquetFile:
        """Return the table to read some row groups of it, or all; they are fetched at once."""
        if groups is None and self._size > NEAR:  # too large to keep
            content = self._folder.fetch(self._name, 0, self._size)
            self._folder.check_content(self._name, content, self._sha256)
            return pq.ParquetFile(pa.BufferReader(content))
        with self._lock:
            if sum(end - start for start, end in self._fetched) > CACHED_BYTES:
                self._forget()
            if self._size <= NEAR:
                self._fetch([(0, self._size)])
            if self._metadata is None:
                self._metadata = self._read_metadata()
            spans = (_group_span(self._metadata.row_group(group)) for group in groups or ())
            self._fetch(spans)
            return pq.ParquetFile(
                pa.BufferReader(pa.py_buffer(self._map)),
                metadata=self._metadata,
                page_checksum_verification=True,
            )

    def _forget(self) -> None:
        """Begin with an empty map; tables that were opened keep theirs."""
        self._map = mmap.mmap(-1, max(self._size, 1))
        self._fetched: list[tuple[int, int]] = []

    def _fetch(self, parts: Iterable[tuple[int, int]]) -> None:
        """Fetch the parts that are not there yet."""
        missing = [
            (start, end)
            for start, end in parts
            if not any(first <= start and end <= last for first, last in self._fetched)
        ]
        for start, content in self._folder.fetch_all(self._name, missing):
            if len(content) == self._size:
                self._folder.check_content(self._name, content, self._sha256)
            self._map[start : start + len(content)] = content
            self._fetched.append((start, start + len(content)))

    def _read_metadata(self) -> pq.FileMetaData:
        """Return what the end of the file says: metadata, its length (4 bytes), MAGIC."""
        first = max(0, self._size - FOOTER)
        self._fetch([(first, self._size)])
        length = int.from_bytes(self._map[self._size - 8 : self._size - 4], "little") + 8
        if self._size < 12 or self._map[self._size - 4 :] != MAGIC or length > self._size:
            raise pa.ArrowInvalid("it does not end like a Parquet file")
        self._fetch([(min(self._size - length, first), first)])
        return pq.read_metadata(pa.BufferReader(MAGIC + self._map[self._size - length :]))


def _group_span(group: Any) -> tuple[int, int]:
    """Return where a row group begins and ends: its columns follow one another."""
    columns = [group.column(number) for number in range(group.num_columns)]
    starts = [
        min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
        for column in columns
    ]
    ends = [
        start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)
    ]
    return (min(starts), max(ends)) if columns else (0, 0)
