"""Reading an index: any memory in a few milliseconds, without torch.

index = ffmem.open("DIR");  index["L5N1234"].triggers[0].prefix
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.errors import HubError, StoreError
from ffmem.files import make_folder, storage_errors, try_locked
from ffmem.hub import HubFolder
from ffmem.indexing.manifest import Manifest
from ffmem.indexing.memory import (
    NO_KEY_TOKENS,
    NO_KEYS_YET,
    NO_VALUE,
    NO_VALUE_YET,
    ZERO_KEY,
    ZERO_VALUE,
    ExpertStats,
    Keys,
    KeyToken,
    Memory,
    MemoryStats,
    Trigger,
    Value,
    ValueToken,
    is_flat,
)
from ffmem.indexing.sentences import NO_PREFIX, Sentences, StoredSentence, split_text
from ffmem.indexing.tables import (
    GROUP,
    SAMPLED_PREFIXES,
    UNIT,
    TableFile,
    layer_file,
    read_columns,
    read_errors,
    read_group,
    read_rows,
    read_strings,
)
from ffmem.indexing.weights import CLASSES, COSINES, weight_classes
from ffmem.models.arguments import IN_MEMORY
from ffmem.signatures import check_arguments
from ffmem.text import html_table, pluralize

if TYPE_CHECKING:
    from ffmem.indexing.status import LiveRun

CACHED_GROUPS = 128
"""Row groups of all kinds to keep in memory, at about a quarter of a megabyte each."""

KINDS = ("triggers", "stats", "samples", "keys", "values")
"""What each layer has a file of, in row groups; no values if memories have no static ones."""

SHARED_FILE = "partials/shared.txt"
"""Names the storage of an unfinished run, if that is not the index folder itself."""

SWAP_SECONDS = 10.0
"""How long to wait for another process that swaps folders."""

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.9, 0.99)


class PrefixText(NamedTuple):
    """A prefix as text: what precedes and follows its end, as text and as tokens."""

    prefix: str
    rest: str
    last_token: str | None
    next_token: str | None


class Tokens(Sequence[str]):
    """The displayed form of every token, by id; decoded on access."""

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
        token: str = self.column[id].as_py()
        return token

    def __iter__(self) -> Iterator[str]:
        for chunk in self.column.chunks:
            yield from chunk.to_pylist()

    def __repr__(self) -> str:
        return f"Tokens({len(self)}: {str(self[:5])[1:-1]}, …)"


class Index:
    """An index: `index["L5N1234"]` is a `Memory`.

    With `unfinished`, you can also open one that is still being built: it holds what its workers
    have committed so far. With `remote`, the files are on the Hub, and it fetches the parts that
    you look at.
    """

    @check_arguments
    def __init__(
        self, folder: str | Path, *, unfinished: bool = False, remote: HubFolder | None = None
    ) -> None:
        self.folder = Path(folder)
        """Where it is; of an index on the Hub, its address (hf:org/name)."""
        self.remote = remote
        """The repository of an index on the Hub; None if the index is on this machine."""
        self.live: LiveRun | None = None
        """The committed part of an unfinished index; None if it is finished."""
        if remote is None:
            self.manifest = self._open_folder(unfinished)
        else:
            self.manifest = _read_remote_manifest(remote)
        self.n_prefixes = self.manifest.corpus.prefixes
        """Prefixes that were read."""
        if self.live is not None:
            self.n_prefixes = self.live.n_prefixes
        self.n_layers = self.manifest.model.layers
        self.layout = self.manifest.model.layout
        """The banks of each layer, and the number of every memory."""
        self.kinds = KINDS if self.manifest.model.has_values else KINDS[:-1]
        # After one memory, people often look at its neighbors or its sample.
        self._group = lru_cache(CACHED_GROUPS)(self._read_group)

    def _open_folder(self, unfinished: bool) -> Manifest:
        if self.folder.is_file():
            raise StoreError(
                f"{self.folder} is a file, not an index folder. Pass the folder that `ffmem index"
                " --out` made."
            )
        recover(self.folder)
        if unfinished and not (self.folder / "manifest.json").exists():
            from ffmem.indexing.status import open_live

            self.live = open_live(self.folder)
            if (self.folder / "manifest.json").exists():  # it has just been finished
                self.live = None
        return Manifest.read(self.folder) if self.live is None else self.live.manifest

    def file(self, name: str, sha256: str | None = None) -> TableFile:
        """Return a Parquet file of the index, to be read by the functions of `tables`.

        On the Hub it must have this hash; by default, the one in the manifest.
        """
        if self.remote is None:
            return self.folder / name
        return self.remote.file(name, sha256 or self.manifest.files.get(name, "not in it"))

    def has_file(self, name: str) -> bool:
        """Return whether the folder has a file of this name."""
        if self.remote is None:
            return (self.folder / name).exists()
        return name in self.remote.files

    def check_files(self) -> None:
        """Raise if a file of a layer is missing, as reading it would."""
        for kind in self.kinds:
            for layer in range(self.n_layers):
                path = self.file(layer_file(kind, layer))
                with read_errors(path):
                    if not self.has_file(layer_file(kind, layer)):
                        raise FileNotFoundError("no such file")

    def read_bytes(self, name: str) -> bytes:
        """Return a small file of the folder."""
        if self.remote is None:
            return (self.folder / name).read_bytes()
        return self.remote.read(name)

    def __len__(self) -> int:
        return len(self.layout)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self.layout)

    def __getitem__(self, cell: str | tuple[int, int] | Cell) -> Memory:
        return self.memory(self.layout.resolve(cell))

    def __repr__(self) -> str:
        source, corpus = self.manifest.model.source, self.manifest.corpus
        model = "a model in memory" if source == IN_MEMORY else self.manifest.model.shown
        so_far = "" if self.live is None else f"; unfinished, {self.live.progress}"
        return (
            f"Index({str(self.folder)!r}: {self.layout.shown} of {model}"
            f" over {pluralize(corpus.sentences, 'sentences')},"
            f" {pluralize(corpus.tokens, 'tokens')}{so_far})"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        manifest = self.manifest
        corpus = manifest.corpus
        facts: list[tuple[str, object]] = [
            ("folder", self.folder),
            ("model", manifest.model.shown),
            ("memories", self.layout.shown),
            ("corpus", ", ".join(source.source for source in corpus.sources)),
            ("size", f"{corpus.sentences:,} sentences, {corpus.tokens:,} tokens"),
            ("triggers", f"{manifest.t} per memory and sign, prefixes: {manifest.prefixes}"),
        ]
        facts += [] if self.live is None else [("unfinished", self.live.progress)]
        return html_table(facts)

    @cached_property
    def sentences(self) -> Sentences:
        """The sentences of the corpus."""
        return Sentences(self.file("sentences.parquet"))

    @cached_property
    def tokens(self) -> Tokens:
        """The displayed form of every token, by id."""
        return Tokens(read_strings(self.file("vocabulary.parquet"), "token"))

    def token(self, id: int) -> str:
        """Return the displayed form of a token."""
        return self.tokens[id]

    def memory(self, cell: Cell) -> Memory:
        """Return a memory with its triggers, value and statistics."""
        cell = self.layout.resolve(cell)
        group, row = divmod(cell.memory, GROUP)
        return next(self._memories(cell.layer, group, [row]))

    def sample(self, cell: Cell) -> ndarray:
        """Return a memory's coefficients on the sampled prefixes."""
        cell = self.layout.resolve(cell)
        group, row = divmod(cell.memory, GROUP)
        return np.asarray(self._group("samples", cell.layer, group)["coefficient"][row])

    def memories(self, layer: int) -> Iterator[Memory]:
        """Yield all memories of a layer in order, reading one row group at a time."""
        self.layout.check_layer(layer)
        width = self.layout.widths[layer]
        return (
            memory
            for group in range(-(-width // GROUP))
            for memory in self._memories(layer, group, range(min(GROUP, width - group * GROUP)))
        )

    @check_arguments
    def table(
        self,
        name: str,
        *,
        layer: int | None = None,
        top: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Return a tidy table of all memories, or of one layer.

        `name` is stats, values, keys, triggers, samples or patterns. `top` limits the tokens of
        each key or side of a value, or the triggers of each list. `columns` names the columns that
        you need; without the text of the prefixes, triggers and samples take a fraction of the
        time.

            index.table("values", top=10).to_pandas()
        """
        from ffmem.indexing.tidy import table

        return table(self, name, layer=layer, top=top, columns=columns)

    def columns(
        self, kind: str, layer: int, names: Sequence[str] | None = None
    ) -> dict[str, ndarray]:
        """Return columns of a layer's file of one kind (`KINDS`, agreement), or all of them."""
        self.layout.check_layer(layer)
        if self.live is None:
            path = self.file(layer_file(kind, layer))
            return read_columns(path, None if names is None else list(names))
        columns = self.live.columns(kind, layer)
        return {name: columns[name] for name in names or columns}

    def columns_at(
        self, kind: str, layer: int, names: Sequence[str], memories: Sequence[int]
    ) -> dict[str, ndarray]:
        """Return columns of some memories of a layer, in any order, reading their row groups."""
        rows = np.asarray(memories, np.int64)
        if self.live is None:
            return read_rows(self.file(layer_file(kind, layer)), rows, list(names))
        return {name: column[rows] for name, column in self.columns(kind, layer, names).items()}

    def rows(self, kind: str, layer: int, memories: slice) -> dict[str, ndarray]:
        """Return the columns of consecutive memories of a layer, reading their row groups only."""
        first, last = memories.start // GROUP, (memories.stop - 1) // GROUP
        groups = [self._group(kind, layer, group) for group in range(first, last + 1)]
        inside = slice(memories.start - first * GROUP, memories.stop - first * GROUP)
        return {
            name: np.concatenate([group[name] for group in groups])[inside] for name in groups[0]
        }

    @cached_property
    def sampled_prefixes(self) -> ndarray:
        """The prefixes whose coefficients `samples` holds, in order; of a finished index."""
        if self.live is not None:
            raise StoreError(f"{self.folder} is unfinished: its sample has not been drawn yet.")
        return read_columns(self.file(SAMPLED_PREFIXES), ["prefix"])["prefix"]

    @cached_property
    def active_shares(self) -> ndarray:
        """Share of prefixes on which each memory is active (gated: its gate is open), by number."""
        shares = [np.zeros(0)]
        for layer in range(self.n_layers):
            stats = self.columns("stats", layer, ["active"])
            shares.append(stats["active"] / max(self.n_prefixes, 1))
        return np.concatenate(shares)

    def _read_group(self, kind: str, layer: int, group: int) -> dict[str, ndarray]:
        if self.live is not None:
            return self.live.group(kind, layer, group)
        return read_group(self.file(layer_file(kind, layer)), group)

    def _groups(self, layer: int, group: int) -> dict[str, dict[str, ndarray]]:
        """Return a row group of every kind; from the Hub, all of them at the same time."""
        if self.remote is None:
            return {kind: self._group(kind, layer, group) for kind in self.kinds}
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(self.kinds) + 2) as pool:
            pool.submit(lambda: self.sentences)  # their headers will be needed next
            pool.submit(lambda: self.tokens)
            found = pool.map(lambda kind: self._group(kind, layer, group), self.kinds)
            return dict(zip(self.kinds, found, strict=True))

    def _memories(self, layer: int, group: int, rows: Sequence[int]) -> Iterator[Memory]:
        """Yield the memories at some rows of a row group."""
        kinds = self._groups(layer, group)
        signs = ["", "negative_"] if self.manifest.model.gated else [""]
        prefixes = np.concatenate(
            [kinds["triggers"][f"{sign}prefix"][rows].reshape(-1) for sign in signs]
        )
        owners = self.sentences.at(prefixes[prefixes != NO_PREFIX].tolist())
        for row in rows:
            fields = {
                kind: {name: column[row] for name, column in columns.items()}
                for kind, columns in kinds.items()
            }
            lists = [self._triggers(fields["triggers"], sign, owners) for sign in signs]
            cell = self.layout.cell(layer, group * GROUP + row)
            yield Memory(
                cell,
                lists[0],
                lists[1] if len(lists) > 1 else [],
                self._value(fields.get("values")),
                self._stats(cell, fields["stats"], fields["samples"]["coefficient"]),
                self.manifest.model.kind,
                self._keys(fields["keys"]),
                self._case_counts(fields["stats"]),
                bool(fields["stats"].get("n_prefixes", self.n_prefixes)),
            )

    def _triggers(
        self, row: dict[str, Any], sign: str, owners: dict[int, StoredSentence]
    ) -> list[Trigger]:
        gated = self.manifest.model.gated
        columns = (row[f"{sign}{name}"].tolist() for name in ("coefficient", "prefix", "gate"))
        triggers = []
        for rank, (coefficient, prefix, gate) in enumerate(zip(*columns, strict=True), start=1):
            if prefix == NO_PREFIX:
                break
            sentence = owners[prefix]
            length = prefix - sentence.offset
            triggers.append(
                Trigger(
                    rank=rank,
                    coefficient=coefficient,
                    sentence=sentence.sentence,
                    length=length,
                    gate=gate if gated else None,
                    **self.prefix_text(sentence, length)._asdict(),
                )
            )
        return triggers

    def prefix_text(self, sentence: StoredSentence, length: int) -> PrefixText:
        """Return the first `length` tokens of a sentence, and what follows, as text."""
        ids = sentence.ids
        last = self.token(ids[length - 1]) if length else None
        following = self.token(ids[length]) if length < len(ids) else None
        before, after = split_text(sentence, length, self.token)
        return PrefixText(before, after, last, following)

    def _value(self, row: dict[str, Any] | None) -> Value:
        if row is None:
            return Value(self.manifest.projection, [], [], NO_VALUE)
        if not len(row["top_ids"]):
            return Value(self.manifest.projection, [], [], NO_VALUE_YET)
        if is_flat(row["top_logits"], row["bottom_logits"]):
            return Value(self.manifest.projection, [], [], ZERO_VALUE)

        def end(side: str) -> list[ValueToken]:
            columns = (
                row[f"{side}_{name}"].tolist() for name in ("ids", "probabilities", "logits")
            )
            return [
                ValueToken(self.token(id), id, probability, logit)
                for id, probability, logit in zip(*columns, strict=True)
            ]

        return Value(self.manifest.projection, end("top"), end("bottom"))

    def _keys(self, row: dict[str, Any]) -> Keys:
        cosines = {name: row[name][None] for name in COSINES if name in row}
        numbers = weight_classes(cosines)
        shown = {name: float(cosine[0]) for name, cosine in cosines.items()}
        weight_class = None if numbers is None else CLASSES[int(numbers[0])]
        if "ids" not in row:
            note = NO_KEY_TOKENS if self.live is None else NO_KEYS_YET
            return Keys([], shown, weight_class, note)
        if row["scores"][0] == row["scores"][-1]:
            return Keys([], shown, weight_class, ZERO_KEY)
        ids, scores = row["ids"].tolist(), row["scores"].tolist()
        ups = row["up_scores"].tolist() if "up_scores" in row else [None] * len(ids)
        tokens = [
            KeyToken(self.token(id), id, score, up)
            for id, score, up in zip(ids, scores, ups, strict=True)
        ]
        return Keys(tokens, shown, weight_class)

    def _case_counts(self, row: dict[str, Any]) -> tuple[int, int, int, int] | None:
        """Return the counts of the four sign cases of a gated memory."""
        if "positive" not in row:
            return None
        n_prefixes = int(row.get("routed", row.get("n_prefixes", self.n_prefixes)))
        active, positive, both = (int(row[n]) for n in ("active", "positive", "open_positive"))
        return both, active - both, positive - both, n_prefixes - active - positive + both

    def _stats(self, cell: Cell, row: dict[str, Any], sample: ndarray) -> MemoryStats:
        sampled = np.sort(sample) if len(sample) else np.zeros(1, np.float32)
        # The same as `np.quantile`, which would load numpy.ma.
        at = np.multiply(QUANTILES, len(sampled) - 1)
        quantiles: Any = np.interp(at, np.arange(len(sampled)), sampled)
        named = {f"{q:g}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)}
        # Workers go on: a live row brings the number that belongs to it.
        n_prefixes, active = int(row.get("n_prefixes", self.n_prefixes)), int(row["active"])
        expert = None
        if cell.bank:
            routed = int(row["routed"])
            weight = float(row["weight_sum"]) * UNIT / max(routed, 1)
            expert = ExpertStats(routed / max(n_prefixes, 1), weight, active / max(routed, 1))
        return MemoryStats(
            active_share=active / max(n_prefixes, 1),
            max=float(row["max"]) if n_prefixes else 0.0,  # −∞ and ∞ before the first prefix
            min=float(row["min"]) if n_prefixes else 0.0,
            mean=float(row["mean"]),
            quantiles=named,
            expert=expert,
        )


def _read_remote_manifest(remote: HubFolder) -> Manifest:
    """Return the manifest of an index on the Hub; raise if the repository is not an index."""
    if "manifest.json" not in remote.files:
        raise HubError(
            f"{remote.shown} is a dataset, but not an ffmem index: it has no manifest.json."
            " Check the name; `ffmem push` creates such a dataset from an index."
        )
    advice = "Ask the dataset's owner to push the index again."
    content = remote.read("manifest.json")
    return Manifest.parse(content, f"{remote.shown}/manifest.json", advice)


def check_weights(index: Index, weights: str) -> None:
    """Raise if an index was made with another model than the loaded one."""
    if weights != index.manifest.model.hash:
        raise StoreError(
            f"{index.folder} was built from a model whose weights have the hash"
            f" {index.manifest.model.hash}; the loaded one has {weights}. Use the model that the"
            " index was built from, or another index."
        )


def recover(folder: Path) -> None:
    """Restore a folder after an `extend` that was killed between its two renames.

    A complete folder stays as it is: another process may be working on it. If an `extend` runs, its
    second rename follows the first at once, so wait for it.
    """
    deadline = time.monotonic() + SWAP_SECONDS
    while _find_complete(folder) is not None and time.monotonic() < deadline:
        with storage_errors(folder), try_locked(sibling(folder, "extending") / "lock") as is_free:
            if is_free:
                finish_swap(folder)
                return
        time.sleep(0.01)


def remove_old_index(folder: Path) -> None:
    """Remove the index as it was before an `extend` that was killed just before it did so."""
    if sibling(folder, "before").exists():
        with suppress(OSError), try_locked(sibling(folder, "extending") / "lock") as is_free:
            if is_free:
                finish_swap(folder)


def as_index(folder: str | Path | Index) -> Index:
    """Return the finished index of a folder; an `Index` is returned as it is.

    Raise if it is unfinished: a live `Index` has only a part of the corpus, and not all files.
    """
    if isinstance(folder, Index) and (folder.live is not None or folder.remote is not None):
        folder = folder.folder  # which says why
    if isinstance(folder, Index):
        return folder
    remove_old_index(Path(folder))
    return Index(folder)


@contextmanager
def output_folder(out: Path) -> Iterator[None]:
    """Make a folder for results; raise at once if it is an index or cannot be written to."""
    if (out / "manifest.json").exists():
        raise StoreError(f"{out} is an index. Choose another folder for the results.")
    with make_folder(out):
        yield


def finish_swap(folder: Path) -> None:
    """Do what a killed `extend` has left to do; call it with the lock of `extend`."""
    if (complete := _find_complete(folder)) is not None:
        complete.rename(folder)
    if folder.exists():
        shutil.rmtree(sibling(folder, "before"), ignore_errors=True)


def _find_complete(folder: Path) -> Path | None:
    """Return the complete index that belongs in a folder which does not exist, if there is one."""
    if folder.exists():
        return None
    both = sibling(folder, "extended"), sibling(folder, "before")
    return next((one for one in both if (one / "manifest.json").exists()), None)


def sibling(folder: Path, name: str) -> Path:
    """Return the hidden folder next to an index that `extend` works in."""
    return folder.with_name(f".{folder.name}.{name}")
