"""MODEL_OR_DIR: a model alone, or an index that names its model and knows how texts start."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ffmem.errors import ModelError
from ffmem.indexing.start import choose_start
from ffmem.indexing.store import Index, check_weights, recover
from ffmem.models.arguments import index_model_errors
from ffmem.models.load import load
from ffmem.models.memories import Memories
from ffmem.progress import Progress

OPENINGS = (
    "The town lies on the eastern bank of the river, about forty miles from the coast.",
    "She opened the window, looked down at the street and waved to the children below.",
    "In the second half of the century the price of wheat fell by more than a third.",
    "He had not expected an answer, but the letter came back within a week.",
    "Most of these birds build their nests in old trees and feed on insects and seeds.",
    "The committee will meet again in September to decide how the money should be spent.",
)
"""What the start token is measured on where there is no index that has measured it."""


@dataclass(frozen=True)
class Opened:
    """A model ready to run prompts."""

    memories: Memories
    index: Index | None
    asked: str | None
    """How prompts are to start, as `--start` says it; None: as the index, or `auto`."""

    @cached_property
    def start(self) -> int | None:
        """The token in front of every prompt; measured only when somebody asks."""
        if self.index is not None and self.asked is None:
            return self.index.manifest.start.id
        sentences = [encoding.ids for encoding in self.memories.tokenizer.encode(list(OPENINGS))]
        return choose_start(self.memories, sentences, self.asked or "auto")[0].id


def is_index(place: str | Path) -> bool:
    """Return whether a folder is an index; one that was interrupted is put back first."""
    folder = Path(place)
    recover(folder)
    return (folder / "manifest.json").exists()


def opened(
    place: Memories | Index | str | Path,
    *,
    start: str | None = None,
    model: Memories | str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Opened:
    """Return a model, with its index if a folder of one is given; `model` says where it is now."""
    index: Index | None = None
    wanted: Memories | str | Path
    if isinstance(place, Index):
        index, wanted = place, model or place.manifest.model.source
    elif isinstance(place, str | Path) and is_index(place):
        index = Index(place)
        wanted = model or index.manifest.model.source
    elif model is None:
        wanted = place
    else:
        raise ModelError("A model was named beside a model. Give one, or the folder of an index.")
    if not isinstance(wanted, Memories):
        own = index is not None and model is None
        with index_model_errors(str(wanted), index.folder) if index and own else nullcontext():
            (progress or Progress(quiet=True)).say(f"Loading {wanted}.")
            stored = "float32" if index is None else index.manifest.dtype
            wanted = load(wanted, dtype=dtype or stored, device=device)
    memories = wanted
    if index is not None:
        check_weights(index, memories.fingerprint())
    return Opened(memories, index, start)
