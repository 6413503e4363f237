"""The Hugging Face Hub: push an index as a dataset, pull one."""

from pathlib import Path
from typing import TYPE_CHECKING

from ffmem.api.index import as_index
from ffmem.indexing.store import Index
from ffmem.progress import Progress

if TYPE_CHECKING:
    from ffmem.sharing.transfer import Pushed


def push(
    folder: str | Path | Index,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license: str = "unknown",
    replace: bool = False,
    progress: Progress | None = None,
) -> "Pushed":
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
    from ffmem.sharing.transfer import push as push_index

    return push_index(
        as_index(folder),
        repository,
        private=private,
        revision=revision,
        license=license,
        replace=replace,
        progress=progress or Progress(quiet=True),
    )


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
    from ffmem.sharing.transfer import pull as pull_index

    progress = progress or Progress(quiet=True)
    return pull_index(repository, Path(folder), revision=revision, progress=progress)
