"""An index folder, opened for reading: any memory in a few milliseconds, without torch.

index = ffmem.open("DIR");  index["L5N1234"].triggers[0].prefix
"""

import shutil
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.errors import StoreError
from ffmem.indexing.kind import NO_VALUE, ZERO_VALUE
from ffmem.indexing.manifest import Manifest
from ffmem.indexing.memory import Behaviour, Memory, TokenShare, Trigger, Value, is_flat
from ffmem.indexing.sentences import NO_PREFIX, Sentences, StoredSentence, divided
from ffmem.indexing.tables import GROUP, layer_file, read_group, read_strings
from ffmem.models.arguments import IN_MEMORY
from ffmem.storage import Storage, open_storage
from ffmem.text import pluralize

if TYPE_CHECKING:
    from ffmem.indexing.live import LiveRun

KEPT = 128
"""Row groups of all kinds kept in memory: a quarter of a megabyte each, or so."""

KINDS = ("triggers", "stats", "samples", "values")
"""Files of each layer; no values where memories have no static ones."""

SHARED = "partials/shared.txt"
"""Where the workers of an unfinished run meet, if not in the index's own folder."""

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.9, 0.99)


class Place(NamedTuple):
    """A prefix within its sentence: the text on both sides, and the tokens that meet there."""

    prefix: str
    rest: str
    last_token: str | None
    next_token: str | None


class Tokens(Sequence[str]):
    """The vocabulary as a sequence of text, decoded where it is looked at."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    @overload
    def __getitem__(self, id: int) -> str: ...
    @overload
    def __getitem__(self, id: slice) -> list[str]: ...
    def __getitem__(self, id: int | slice) -> str | list[str]:
        if isinstance(id, slice):
            return [self[one] for one in range(*id.indices(len(self)))]
        shown: str = self.column[id].as_py()
        return shown

    def __iter__(self) -> Iterator[str]:
        for chunk in self.column.chunks:
            yield from chunk.to_pylist()

    def __repr__(self) -> str:
        return f"Tokens({len(self)}: {str(self[:5])[1:-1]}, …)"


class Index:
    """An index: `index["L5N1234"]` is a `Memory`.

    With `unfinished`, one that is still being made may be opened, too: it holds what its workers
    had committed by then.
    """

    def __init__(self, folder: str | Path, *, unfinished: bool = False) -> None:
        self.folder = Path(folder)
        recover(self.folder)
        self.live: LiveRun | None = None
        """What an unfinished index has so far; None if it is finished."""
        if unfinished and not (self.folder / "manifest.json").exists():
            from ffmem.indexing.live import open_live

            self.live = open_live(self.folder)
        self.manifest = Manifest.read(self.folder) if self.live is None else self.live.manifest
        self.n_prefixes = self.manifest.corpus.prefixes
        """How many prefixes were read."""
        if self.live is not None:
            self.n_prefixes = self.live.n_prefixes
        self.n_layers = self.manifest.model.layers
        self.layout = self.manifest.model.layout
        """Where each memory stands, and how many each layer has."""
        self.kinds = KINDS if self.manifest.model.has_values else KINDS[:-1]
        # Whoever looks at one memory often looks at its neighbours, or at its sample, next.
        self._group = lru_cache(KEPT)(self._read_group)

    def __len__(self) -> int:
        return len(self.layout)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self.layout)

    def __getitem__(self, cell: str | tuple[int, int] | Cell) -> Memory:
        return self.memory(self.layout.resolve(cell))

    def __repr__(self) -> str:
        source, corpus = self.manifest.model.source, self.manifest.corpus
        model = "a model in memory" if source == IN_MEMORY else source
        so_far = "" if self.live is None else f"; unfinished, {self.live.progress}"
        return (
            f"Index({str(self.folder)!r}: {self.layout.shown} of {model}"
            f" over {pluralize(corpus.sentences, 'sentences')},"
            f" {pluralize(corpus.tokens, 'tokens')}{so_far})"
        )

    @cached_property
    def sentences(self) -> Sentences:
        """The corpus that was read."""
        return Sentences(self.folder / "sentences.parquet")

    @cached_property
    def tokens(self) -> Tokens:
        """Every token as it is shown, by id."""
        return Tokens(read_strings(self.folder / "vocabulary.parquet", "token"))

    def token(self, id: int) -> str:
        """Return a token as it is shown."""
        return self.tokens[id]

    def memory(self, cell: Cell) -> Memory:
        """Return a memory with its triggers, value and behaviour."""
        cell = self.layout.resolve(cell)
        group, place = divmod(cell.memory, GROUP)
        return next(self._memories(cell.layer, group, [place]))

    def sample(self, cell: Cell) -> ndarray:
        """Return a memory's coefficients on the sample of prefixes."""
        cell = self.layout.resolve(cell)
        group, place = divmod(cell.memory, GROUP)
        return np.asarray(self._group("samples", cell.layer, group)["coefficient"][place])

    def memories(self, layer: int) -> Iterator[Memory]:
        """Return all memories of a layer in order, many at a time."""
        self.layout.check_layer(layer)
        width = self.layout.widths[layer]
        return (
            memory
            for group in range(-(-width // GROUP))
            for memory in self._memories(layer, group, range(min(GROUP, width - group * GROUP)))
        )

    def _read_group(self, kind: str, layer: int, group: int) -> dict[str, ndarray]:
        if self.live is not None and kind != "values":
            return self.live.group(kind, layer, group)
        return read_group(self.folder / layer_file(kind, layer), group)

    def _memories(self, layer: int, group: int, places: Sequence[int]) -> Iterator[Memory]:
        """Return the memories at some places of a row group."""
        kinds = {kind: self._group(kind, layer, group) for kind in self.kinds}
        signs = ["", "negative_"] if self.manifest.model.gated else [""]
        wanted = [kinds["triggers"][f"{sign}prefix"][places].reshape(-1) for sign in signs]
        prefixes = np.concatenate(wanted)
        owners = self.sentences.at(prefixes[prefixes != NO_PREFIX].tolist())
        for place in places:
            rows = {
                kind: {name: column[place] for name, column in columns.items()}
                for kind, columns in kinds.items()
            }
            lists = [self._triggers(rows["triggers"], sign, owners) for sign in signs]
            yield Memory(
                self.layout.cell(layer, group * GROUP + place),
                lists[0],
                lists[1] if len(lists) > 1 else [],
                self._value(rows.get("values")),
                self._behaviour(rows["stats"], rows["samples"]["coefficient"]),
                self.manifest.model.kind,
            )

    def _triggers(
        self, row: dict[str, Any], sign: str, owners: dict[int, StoredSentence]
    ) -> list[Trigger]:
        gated = self.manifest.model.gated
        columns = (row[f"{sign}{name}"].tolist() for name in ("coefficient", "prefix", "gate"))
        found = []
        for rank, (coefficient, prefix, gate) in enumerate(zip(*columns, strict=True), start=1):
            if prefix == NO_PREFIX:
                break
            sentence = owners[prefix]
            length = prefix - sentence.offset
            place = self.place(sentence, length)
            found.append(
                Trigger(
                    rank=rank,
                    coefficient=coefficient,
                    sentence=sentence.sentence,
                    length=length,
                    prefix=place.prefix,
                    last_token=place.last_token,
                    next_token=place.next_token,
                    rest=place.rest,
                    gate=gate if gated else None,
                )
            )
        return found

    def place(self, sentence: StoredSentence, length: int) -> Place:
        """Return what stands before and after the first `length` tokens of a sentence."""
        ids = sentence.ids
        last = self.token(ids[length - 1]) if length else None
        following = self.token(ids[length]) if length < len(ids) else None
        before, after = divided(sentence, length, self.token)
        return Place(before, after, last, following)

    def _value(self, row: dict[str, Any] | None) -> Value:
        if row is None:
            return Value(self.manifest.projection, [], [], NO_VALUE)
        if is_flat(row["top_logits"], row["bottom_logits"]):
            return Value(self.manifest.projection, [], [], ZERO_VALUE)

        def end(side: str) -> list[TokenShare]:
            columns = (
                row[f"{side}_{name}"].tolist() for name in ("ids", "probabilities", "logits")
            )
            return [
                TokenShare(self.token(id), id, probability, logit)
                for id, probability, logit in zip(*columns, strict=True)
            ]

        return Value(self.manifest.projection, end("top"), end("bottom"))

    def _behaviour(self, row: dict[str, Any], sample: ndarray) -> Behaviour:
        sampled = np.sort(sample) if len(sample) else np.zeros(1, np.float32)
        # What `np.quantile` gives; that one would load numpy.ma on its way.
        places = np.multiply(QUANTILES, len(sampled) - 1)
        quantiles: Any = np.interp(places, np.arange(len(sampled)), sampled)
        named = {f"{q:g}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)}
        return Behaviour(
            active_share=int(row["active"]) / max(self.n_prefixes, 1),
            max=float(row["max"]),
            min=float(row["min"]),
            mean=float(row["mean"]),
            quantiles=named,
        )


def check_weights(index: Index, weights: str) -> None:
    """Refuse an index of another model than the one that is loaded."""
    if weights != index.manifest.model.hash:
        raise StoreError(
            f"{index.folder} was made with a model whose weights have the hash"
            f" {index.manifest.model.hash}; the loaded one has {weights}. Use the model that the"
            " index was made with, or another index."
        )


def open_run(folder: Path) -> Storage:
    """Return where the files of the unfinished run in a folder are."""
    path = folder / SHARED
    return open_storage(path.read_text(encoding="utf-8")) if path.exists() else Storage(folder)


def recover(folder: Path) -> None:
    """Put a folder back in its place after an `extend` that was killed while it swapped folders."""
    after, before = beside(folder, "extended"), beside(folder, "before")
    if not folder.exists():
        for whole in (after, before):
            if (whole / "manifest.json").exists():
                whole.rename(folder)
                break
    if (folder / "manifest.json").exists():
        shutil.rmtree(before, ignore_errors=True)
        # A run that was killed after its last step; another process may hold its lock.
        shutil.rmtree(folder / "partials", ignore_errors=True)


def beside(folder: Path, what: str) -> Path:
    """Return the sibling folder that `extend` uses for its halves."""
    return folder.with_name(f".{folder.name}.{what}")
