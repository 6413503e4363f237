"""Push an index to the Hub, and pull one from there.

    push(index, "org/name")      one commit: readers see the old dataset or the new one
    pull("org/name", DIR)        into .DIR.pulling, every hash checked, then renamed to DIR

The dataset has the files of the folder as they are, with a card. Search files are left out: they
follow from the rest, and the first search makes them again.
"""

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ffmem.errors import HubError, StoreError
from ffmem.files import locked, sha256, storage_errors, sync
from ffmem.hub import (
    CONNECTIONS,
    HubFolder,
    hub_address,
    hub_errors,
    parse_repository,
    require_hub,
)
from ffmem.indexing.manifest import Manifest
from ffmem.indexing.store import Index, as_index, sibling
from ffmem.indexing.verify import damaged_files
from ffmem.patterns import store as pattern_store
from ffmem.progress import Progress
from ffmem.sharing.card import write_card
from ffmem.signatures import check_arguments
from ffmem.text import pluralize

if TYPE_CHECKING:
    from huggingface_hub import HfApi

UNKNOWN = "unknown"
"""What the card says of a text whose license nobody named."""

CARD = "README.md"

_INDEX_FILE = re.compile(
    r"(sentences|vocabulary)\.parquet|(triggers|stats|samples|values|keys|agreement)/[\w-]+\.parquet",
    re.ASCII,
)
_PATTERN_FILE = re.compile(r"patterns/(human|explained|automatic)/(\w+/)?[\w-]+\.(parquet|json)")


class Pushed(NamedTuple):
    """What a push did."""

    repository: str
    revision: str | None
    """The branch; None for the main one."""
    url: str
    """URL of the dataset's page."""
    files: int
    bytes: int

    def __str__(self) -> str:
        size = f"{pluralize(self.files, 'files')}, {self.bytes / 1e6:,.1f} MB"
        return (
            f"Pushed {size}, to {self.url}\n"
            f"Others open it with: ffmem show {hub_address(self.repository, self.revision)} L0N0"
        )


@check_arguments
def push(
    folder: str | Path | Index,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license: str = UNKNOWN,
    replace: bool = False,
    progress: Progress | None = None,
) -> Pushed:
    """Push a finished index to the Hugging Face Hub as a dataset; return where it is.

    The dataset has the files of the index, including patterns, and a card. It is one commit, so
    readers see the old dataset or the new one. Log in first: `hf auth login`, or HF_TOKEN.

    Args:
        folder: The index.
        repository: Name of the dataset: "org/name".
        private: Create a private dataset.
        revision: Branch to push to, created if necessary. Default: the main one.
        license: License of the text, as an id of the Hub, such as "cc-by-sa-4.0".
        replace: Replace another index in the dataset.
        progress: Progress reporter. Default: none.
    """
    index, progress = as_index(folder), progress or Progress(quiet=True)
    require_hub()
    name, branch = parse_repository(repository, revision)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise HubError(
            f"--license {license!r} is not a license id of the Hub. Use one such as cc-by-sa-4.0,"
            " apache-2.0, other or unknown."
        )
    with progress.waiting("Checking hashes"):
        if wrong := [*damaged_files(index), *pattern_store.damaged_files(index)]:
            raise StoreError(
                f"{index.folder} is damaged, so it was not pushed: {' '.join(wrong[:3])}"
            )
    manifest = index.manifest
    named = [manifest.model.source, *(source.source for source in manifest.corpus.sources)]
    for path in filter(os.path.isabs, named):
        progress.say(f"Note: the manifest names {path}, which readers will see.")
    files = _files_of(index)
    card = write_card(index, name, branch, license, sorted(files))
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(library_name="ffmem")
    there, is_new_branch = _find_repository(api, name, branch, private)
    old = set() if there is None else _check_replaceable(there, index, replace or is_new_branch)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(path_in_repo=file, path_or_fileobj=str(path))
        for file, path in files.items()
    ]
    operations += [CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=card.encode())]
    operations += [CommitOperationDelete(path_in_repo=file) for file in sorted(old - files.keys())]
    n_bytes = sum(path.stat().st_size for path in files.values())
    progress.say(f"Uploading {pluralize(len(files) + 1, 'files')}, {n_bytes / 1e6:,.1f} MB.")
    with hub_errors(name, "write to"), _hub_bars(progress):
        url = api.create_repo(name, repo_type="dataset", private=private or None, exist_ok=True)
        if branch is not None and (there is None or is_new_branch):
            api.create_branch(name, branch=branch, repo_type="dataset", exist_ok=True)
        api.create_commit(
            name,
            operations,
            commit_message=f"Add an index of {index.manifest.model.family} memories",
            repo_type="dataset",
            revision=branch,
            parent_commit=None if there is None else there.commit,
        )
    return Pushed(name, branch, str(url), len(files) + 1, n_bytes)


def _files_of(index: Index) -> dict[str, Path]:
    """Return the files that make up an index, by their name in the folder."""
    names = ["manifest.json", *index.manifest.files]
    for patterns in pattern_store.open_patterns(index):
        inside = ["manifest.json", *patterns.manifest["files"]]
        names += [f"patterns/{patterns.source}/{name}" for name in inside]
    return {name: index.folder / name for name in names}


def _find_repository(
    api: "HfApi", name: str, branch: str | None, private: bool
) -> tuple[HubFolder | None, bool]:
    """Return what is in the repository, None if it does not exist; and whether the branch is new.

    A new branch begins as a copy of the main one, which keeps what it has.
    """
    with hub_errors(name, "write to"):
        if not api.repo_exists(name, repo_type="dataset"):
            return None, False
        if private and not api.dataset_info(name).private:
            raise HubError(
                f"{name} exists and is public, so --private would not hide what you push. Make it"
                " private in its settings on the Hub first, or choose another name."
            )
        is_new = branch is not None and not api.revision_exists(name, branch, repo_type="dataset")
    return HubFolder(name if branch is None or is_new else f"{name}@{branch}"), is_new


def _check_replaceable(there: HubFolder, index: Index, replace: bool) -> set[str]:
    """Return the files of the index in a repository; raise if it may not be replaced."""
    if "manifest.json" not in there.files:
        if others := sorted(there.files.keys() - {".gitattributes", CARD}):
            raise HubError(
                f"{there.shown} is a dataset, but not an ffmem index: it has {others[0]}. Choose"
                " another name; ffmem does not overwrite it."
            )
        return set()
    content = there.read("manifest.json")
    ours = [file for file in there.files if _INDEX_FILE.fullmatch(file)]
    ours += [file for file in there.files if _PATTERN_FILE.fullmatch(file)]
    if hashlib.sha256(content).hexdigest() == sha256(index.folder / "manifest.json"):
        return set(ours)
    if not replace:
        raise HubError(
            f"{there.shown} already has another index: {_describe(there, content)}. Choose another"
            " name or --revision BRANCH, or replace it with --replace (its history stays)."
        )
    return set(ours)


def _describe(there: HubFolder, content: bytes) -> str:
    """Return the model and the corpus of an index, in a few words."""
    try:
        manifest = Manifest.parse(content, f"{there.shown}/manifest.json", "")
    except StoreError:
        return "one that this version of ffmem cannot read"
    corpus = manifest.corpus
    sources = ", ".join(source.source for source in corpus.sources)
    return f"{manifest.model.source} over {sources} ({pluralize(corpus.tokens, 'tokens')})"


@contextmanager
def _hub_bars(progress: Progress) -> Iterator[None]:
    """Let huggingface_hub show its bars only where ffmem would show its own."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    hide = progress.quiet or not sys.stderr.isatty()
    if not hide or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


# Pulling


@check_arguments
def pull(
    repository: str,
    folder: str | Path,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Index:
    """Pull an index from the Hugging Face Hub to a new folder; return it.

    Every hash is checked before the folder appears. An interrupted download resumes.

    Args:
        repository: Name of the dataset: "org/name".
        folder: Folder of the index, which must not exist.
        revision: Branch, tag or commit. Default: the main branch.
        progress: Progress reporter. Default: none.
    """
    folder, progress = Path(folder), progress or Progress(quiet=True)
    name, revision = parse_repository(repository, revision)
    there = HubFolder(hub_address(name, revision))
    remote = Index(there.shown, remote=there)
    hashes = _expected_hashes(there, remote)
    if (folder / "manifest.json").exists():
        if sha256(folder / "manifest.json") == hashes["manifest.json"]:
            progress.say(f"{folder} already has this index: nothing to do.")
            return Index(folder)
        raise StoreError(f"{folder} has another index. Choose another folder, or delete it.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} exists and is not empty. Choose a new folder.")
    pulling = sibling(folder.absolute(), "pulling")
    busy = f"Another process is pulling to {folder}. Wait for it, or choose another folder."
    with locked(pulling / "lock", busy):
        _download(there, list(hashes), pulling, progress)
        _check_arrival(hashes, pulling, there.shown, progress)
        with storage_errors(folder):
            for path in pulling.iterdir():
                if path.name in (".cache", "lock"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            sync(pulling)
            pulling.rename(folder.absolute())
            sync(folder.absolute().parent)
    return Index(folder)


def _expected_hashes(there: HubFolder, index: Index) -> dict[str, str]:
    """Return the hash of every file to fetch; raise if the repository cannot be a whole index."""
    hashes = dict(index.manifest.files)
    for patterns in pattern_store.open_patterns(index):
        manifest = f"patterns/{patterns.source}/manifest.json"
        hashes[manifest] = hashlib.sha256(there.read(manifest)).hexdigest()
        files = patterns.manifest["files"].items()
        hashes |= {f"patterns/{patterns.source}/{name}": hash for name, hash in files}
    for file, expected in hashes.items():
        if not _INDEX_FILE.fullmatch(file) and not _PATTERN_FILE.fullmatch(file):
            raise HubError(f"{there.shown}: its manifest names {file!r}, which no index has.")
        there.check(file, expected)
    # The manifest comes last, as in every index: before it, the rest is there.
    return hashes | {"manifest.json": hashlib.sha256(there.read("manifest.json")).hexdigest()}


def _download(there: HubFolder, names: list[str], pulling: Path, progress: Progress) -> None:
    """Fetch the files of a repository to a folder; those that are there already are kept."""
    from huggingface_hub import hf_hub_download

    def fetch(name: str) -> int:
        hf_hub_download(
            there.repository,
            name,
            repo_type="dataset",
            revision=there.commit,
            local_dir=pulling,
            library_name="ffmem",
        )
        return there.files[name].size

    total = sum(there.files[name].size for name in names)
    progress.say(f"Downloading {pluralize(len(names), 'files')}, {total / 1e6:,.1f} MB.")
    with (
        hub_errors(there.repository),
        _hub_bars(Progress(quiet=True)),
        progress.bar("Downloading", total, "bytes") as step,
        ThreadPoolExecutor(CONNECTIONS) as pool,
    ):
        try:
            for size in pool.map(fetch, names):
                step(size)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _check_arrival(hashes: dict[str, str], pulling: Path, shown: str, progress: Progress) -> None:
    """Raise if a file is not the one that the manifest names; only whole files stay."""
    with progress.waiting("Checking hashes"):
        damaged = [name for name, hash in hashes.items() if sha256(pulling / name) != hash]
    for name in damaged:
        (pulling / name).unlink()
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise HubError(
            f"{shown}/{damaged[0]}{more} arrived damaged: the hash differs from the manifest's."
            " It was deleted. Rerun the command to fetch it again."
        )
    known = {pulling / name for name in hashes} | {pulling / "lock"}
    for path in pulling.rglob("*"):  # of another pull to the same folder
        if path.is_file() and path not in known and ".cache" not in path.parts:
            path.unlink()
