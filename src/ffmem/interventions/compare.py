"""Two indexes of one architecture over one corpus, compared memory by memory.

jaccard, rbo                 overlap of the triggers;  negative_*: of the second list, gated models
change                       1 − rbo, the mean over the lists that exist
value_tokens                 Jaccard overlap of the ten tokens that the value promotes most;
                             negative_value_tokens: of −v, gated models
value_cosine, value_norm_ratio, value_change    of the values themselves, if models are read
active_change                active share, second − first
max_ratio, min_ratio         largest coefficient, second / first; smallest, gated models

What does not exist is NaN here and null in files: for a lambda layer, everything about values.
Memories correspond by their place and triggers by the number of their prefix, so model, corpus and
settings must be the same; only the weights differ.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int, Int64
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.errors import FfmemError, ModelError, StoreError
from ffmem.files import storage_errors
from ffmem.indexing.manifest import Manifest
from ffmem.indexing.memory import NO_VALUES, Trigger, visible
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index, check_weights
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.indexing.verify import damaged_files
from ffmem.models.arguments import index_model_errors, resolve_model
from ffmem.progress import Progress
from ffmem.stats import share, spread
from ffmem.text import shorten_prefix

if TYPE_CHECKING:
    from ffmem.interventions.comparison import Comparison
    from ffmem.models.memories import Memories

VALUE_TOKENS = 10
"""Tokens of a value whose overlap is measured."""

P = 0.9
"""Weight of each rank relative to the one before; the first ten ranks have 86 % of the weight."""

MAX_PAIRS = 1 << 22
"""Pairs of triggers to compare at once."""

RULES = {
    "changed": "1 - rbo, mean over the lists that exist; ties: smaller value_cosine, lower cell",
    "changed_values": "value_change; ties: lower cell",
}

Columns = dict[str, ndarray]


def compare(
    first: Index,
    second: Index,
    out: Path,
    *,
    models: bool = True,
    first_model: "Memories | str | Path | None" = None,
    second_model: "Memories | str | Path | None" = None,
    top: int = 50,
    device: str = "auto",
    progress: Progress | None = None,
) -> "Comparison":
    """Compare two indexes memory by memory; write numbers and figure to a folder."""
    from ffmem.interventions.comparison import Comparison

    check_comparable(first, second)
    if top < 1:
        raise FfmemError(f"top must be 1 or more; got {top!r}.")
    if not models and (first_model is not None or second_model is not None):
        raise FfmemError("Pass either models, or models=False (--no-models).")
    for index in (first, second):
        if wrong := damaged_files(index):
            raise StoreError(f"The index {index.folder} is damaged: {' '.join(wrong[:3])}")
    say = progress or Progress(quiet=True)
    for name, (one, other) in differences(first.manifest, second.manifest).items():
        say.say(f"The indexes differ in {name}: {one} and {other}.")
    has_values = first.manifest.model.has_values
    if not has_values:
        say.say(f"{NO_VALUES} Values are not compared, and no model is read.")
    elif not models:
        say.say("The models are not read: value_cosine, value_norm_ratio, value_change are null.")
    reads_models = models and has_values
    sides = (
        _Side(first, first_model, "--first-model"),
        _Side(second, second_model, "--second-model"),
    )
    reading = _read_values(*sides, out, device, say) if reads_models else nullcontext()
    layers: list[Columns] = []
    with reading as values_of_layer, say.bar("Comparing", len(first), "memories") as step:
        for layer, width in enumerate(first.layout.widths):
            values = None if values_of_layer is None else value_change(*values_of_layer(layer))
            layers.append(layer_changes(first, second, layer, values))
            step(width)
    numbers = {name: np.concatenate([layer[name] for layer in layers]) for name in layers[0]}

    @cache  # many memories are in both lists, and their triggers are read from the folders
    def describe(place: int) -> dict[str, Any]:
        return describe_memory(first, second, numbers, place)

    found = Comparison(
        settings=_settings(first, second, reads_models, top),
        rows=[{"layer": layer} | summarize(layers[layer]) for layer in first.layout.memory_layers],
        overall=summarize(numbers),
        changed=[describe(place) for place in most_changed(numbers, top).tolist()],
        changed_values=[describe(place) for place in most_changed_values(numbers, top).tolist()],
        numbers=numbers,
        layout=first.layout,
    )
    found.write(out)
    return found


# Whether two indexes can be compared


def check_comparable(first: Index, second: Index) -> None:
    """Raise unless memories and prefixes of two indexes correspond; name both values."""
    one, other = _binding(first.manifest), _binding(second.manifest)
    for group, advice in (
        ("model", "Only models of one architecture have memories that correspond."),
        ("corpus", "Index both models over the same corpus, read in the same way."),
        ("settings", "Index one of them again with the settings of the other."),
    ):
        unlike = [
            f"{name}: {shown} in the first, {other[group][name][1]} in the second"
            for name, (value, shown) in one[group].items()
            if value != other[group][name][0]
        ]
        if unlike:
            raise StoreError(
                f"{first.folder} and {second.folder} cannot be compared. {'; '.join(unlike)}."
                f" {advice}"
            )


def _binding(manifest: Manifest) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return what two indexes must have in common: each value, and how it is shown."""
    model, corpus, start = manifest.model, manifest.corpus, manifest.start
    names = ", ".join(source.source for source in corpus.sources)
    shape = {
        name: getattr(model, name) for name in ("family", "layers", "hidden", "vocabulary", "gated")
    }
    shape["memories"] = model.layout.per_layer
    # Older indexes of our own models name the activation alone.
    shape["memory"] = model.memory or model.activation
    settings = {name: getattr(manifest, name) for name in ("t", "prefixes", "projection")}
    shown = f"{names} ({corpus.sentences:,} sentences, hash {corpus.hash[:12]})"
    return {
        "model": {name: (value, value) for name, value in shape.items()},
        "corpus": {"corpus": (corpus.hash, shown)},
        "settings": {
            "start token": (start.id, "none" if start.token is None else repr(start.token)),
            "compat": (manifest.compat, manifest.compat or "none"),
            **{name: (value, value) for name, value in settings.items()},
        },
    }


def differences(first: Manifest, second: Manifest) -> dict[str, list[Any]]:
    """Return what may differ and does, by name: both values."""

    def free(manifest: Manifest) -> dict[str, Any]:
        sources = manifest.corpus.sources
        run = {
            name: [getattr(source, name) for source in sources]
            for name in ("chunk_tokens", "batch_tokens", "threads", "device")
        }
        versions = {f"version of {name}": version for name, version in manifest.versions.items()}
        return {"dtype": manifest.dtype, "tokenizer": manifest.tokenizer, **run, **versions}

    one, other = free(first), free(second)
    return {
        name: [one.get(name), other.get(name)]
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    }


def _settings(first: Index, second: Index, models: bool, top: int) -> dict[str, Any]:
    """Return everything that determines the numbers."""

    def side(index: Index) -> dict[str, Any]:
        return {
            "index": str(index.folder),
            "model": index.manifest.model.source,
            "model_hash": index.manifest.model.hash,
            "dtype": index.manifest.dtype,
        }

    manifest = first.manifest
    corpus = manifest.corpus
    return {
        "first": side(first),
        "second": side(second),
        "differences": differences(first.manifest, second.manifest),
        "family": manifest.model.family,
        "layers": manifest.model.layers,
        "memories": first.layout.per_layer,
        "gated": manifest.model.gated,
        "corpus": {
            "sources": [source.source for source in corpus.sources],
            "hash": corpus.hash,
            "sentences": corpus.sentences,
            "tokens": corpus.tokens,
        },
        "start": manifest.start.token,
        "t": manifest.t,
        "prefixes": manifest.prefixes,
        "compat": manifest.compat,
        "projection": manifest.projection,
        "models": models,
        "values": "static" if manifest.model.has_values else "input",
        "p": P,
        "value_tokens": VALUE_TOKENS,
        "top": top,
        "rules": RULES,
    }


# What changed in every memory


class ValueChange(NamedTuple):
    """From the values of one model to another's; NaN where a number does not exist."""

    cosine: Float64[ndarray, " memory"]
    norm_ratio: Float64[ndarray, " memory"]
    change: Float64[ndarray, " memory"]


def layer_changes(
    first: Index, second: Index, layer: int, values: ValueChange | None
) -> dict[str, Float64[ndarray, " memory"]]:
    """Return what changed in the memories of a layer."""
    model = first.manifest.model
    missing = np.full(first.layout.widths[layer], np.nan)
    signs = ("", "negative_") if model.gated else ("",)
    found: Columns = {}

    def read(kind: str, names: list[str]) -> list[Columns]:
        return [read_columns(i.folder / layer_file(kind, layer), names) for i in (first, second)]

    one, other = read("triggers", [f"{sign}prefix" for sign in signs])
    for sign in signs:
        overlap = measure_overlap(one[f"{sign}prefix"], other[f"{sign}prefix"])
        found |= {f"{sign}jaccard": overlap.jaccard, f"{sign}rbo": overlap.rbo}
    changes = np.stack([1 - found[f"{sign}rbo"] for sign in signs])
    n_lists = (~np.isnan(changes)).sum(axis=0)
    found["change"] = np.where(n_lists, np.nansum(changes, axis=0) / np.maximum(n_lists, 1), np.nan)

    sides = dict(zip(signs, ("top_ids", "bottom_ids"), strict=False))
    if model.has_values:
        one, other = read("values", list(sides.values()))
    for sign, ids in sides.items():
        found[f"{sign}value_tokens"] = missing
        if model.has_values:
            ends = [side[ids][:, :VALUE_TOKENS] for side in (one, other)]
            found[f"{sign}value_tokens"] = measure_overlap(*ends).jaccard
    for name in ValueChange._fields:
        found[f"value_{name}"] = missing if values is None else getattr(values, name)

    one, other = read("stats", ["active", "max", "min"])
    n_prefixes = max(first.manifest.corpus.prefixes, 1)
    found["active_change"] = (other["active"] - one["active"]) / n_prefixes
    found["max_ratio"] = _positive_ratio(one["max"], other["max"])
    if model.gated:
        found["min_ratio"] = _positive_ratio(-one["min"], -other["min"])
    return found


def _positive_ratio(first: ndarray, second: ndarray) -> Float64[ndarray, " memory"]:
    """Return second / first where both are positive, else NaN."""
    both = (first > 0) & (second > 0)
    ratio: ndarray = np.where(both, second / np.where(both, first, 1.0).astype(float), np.nan)
    return ratio


def summarize(numbers: Columns) -> dict[str, Any]:
    """Return mean, quartiles and n of every column, without missing numbers."""
    known = {name: column[~np.isnan(column)] for name, column in numbers.items()}
    below_half = {
        name.replace("jaccard", "below_half"): share(int((column < 0.5).sum()), len(column))
        for name, column in known.items()
        if name.endswith("jaccard")
    }
    return {name: spread(column) for name, column in known.items()} | below_half


# The overlap of ranked lists


class Overlap(NamedTuple):
    """Of each row's two lists; NaN if both are empty."""

    jaccard: Float64[ndarray, " row"]
    rbo: Float64[ndarray, " row"]


def measure_overlap(first: Int[ndarray, "row rank"], second: Int[ndarray, "row rank"]) -> Overlap:
    """Return the overlap of the lists in each row: no entry twice, empty slots last.

    X_d is the number of entries that the first d of both lists share; s and l are the lengths of
    the shorter and the longer list.

        Jaccard = X_l / (s + l − X_l)
        RBO = (1 − p)/p · (Σ_{d ≤ l} X_d/d · p^d + Σ_{s < d ≤ l} X_s·(d − s)/(s·d) · p^d)
              + ((X_l − X_s)/l + X_s/s) · p^l

    RBO is rank-biased overlap, extrapolated (Webber et al. 2010, equation 32): disagreement at the
    top weighs most, and a list that ends goes on as it began. If one list is empty, both are 0.
    """
    shared = _count_shared(first, second)
    lengths = np.stack([(lists != NO_PREFIX).sum(axis=1) for lists in (first, second)])
    shorter, longer = lengths.min(axis=0), lengths.max(axis=0)
    union = shorter + longer - shared[:, -1]
    jaccard = np.where(union > 0, shared[:, -1] / np.maximum(union, 1), np.nan)

    depths = np.arange(1, first.shape[1] + 1)
    s, l = (np.maximum(n, 1)[:, None] for n in (shorter, longer))  # noqa: E741
    at_s, at_l = (np.take_along_axis(shared, n - 1, axis=1) for n in (s, l))
    seen = np.where(depths <= l, shared / depths, 0.0)
    assumed = np.where((depths > s) & (depths <= l), at_s * (depths - s) / (s * depths), 0.0)
    series = ((seen + assumed) * P**depths).sum(axis=1)
    rbo = (1 - P) / P * series + (((at_l - at_s) / l + at_s / s) * P**l)[:, 0]
    # The sum would leave 1e-16 where nothing differs, and 1 must mean exactly that.
    same = (shared == np.minimum(depths, shorter[:, None])).all(axis=1) & (shorter > 0)
    rbo = np.where(same, 1.0, np.clip(rbo, 0.0, 1.0))
    return Overlap(jaccard, np.where(longer > 0, rbo, np.nan))


def _count_shared(
    first: Int[ndarray, "row rank"], second: Int[ndarray, "row rank"]
) -> Int64[ndarray, "row rank"]:
    """Return X_d of each row, at every depth d."""
    n, width = first.shape
    entered = np.zeros((n, width), np.int64)
    step = max(1, MAX_PAIRS // (width * width))
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        equal = first[part, :, None] == second[part, None, :]
        row, one, other = np.nonzero(equal & (first[part, :, None] != NO_PREFIX))
        # An entry is shared from the depth at which the later list has it.
        counted = np.bincount(row * width + np.maximum(one, other), minlength=len(equal) * width)
        entered[part] = counted.reshape(-1, width)
    return entered.cumsum(axis=1)


# The values of two models


def value_change(
    first: Float[ndarray, "memory hidden"], second: Float[ndarray, "memory hidden"]
) -> ValueChange:
    """Return how each value of a layer changed.

    cosine = v₁·v₂ / (‖v₁‖·‖v₂‖),  norm ratio = ‖v₂‖/‖v₁‖,  change = ‖v₂ − v₁‖ / max(‖v₁‖, ‖v₂‖)

    A value of zeros has no direction. The change is 0 for equal values, 1 if one was switched off,
    2 for opposite ones.
    """
    one, other = first.astype(np.float64), second.astype(np.float64)
    squares = [(values * values).sum(axis=1) for values in (one, other)]

    def ratio(part: ndarray, whole: ndarray) -> ndarray:
        return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), np.nan)

    # √(a·a) is a, but √a·√a need not be: the cosine of equal values must be 1.
    cosine = ratio((one * other).sum(axis=1), np.sqrt(squares[0] * squares[1]))
    apart = np.sqrt(((other - one) ** 2).sum(axis=1))
    change = ratio(apart, np.sqrt(np.maximum(*squares)))
    return ValueChange(
        np.clip(cosine, -1.0, 1.0),
        ratio(np.sqrt(squares[1]), np.sqrt(squares[0])),
        np.nan_to_num(change, nan=0.0),
    )


@dataclass(frozen=True)
class _Side:
    """One index, and where its model is."""

    index: Index
    model: "Memories | str | Path | None"
    """None: where the index says."""
    option: str
    """The option of the command line that gives the model's place."""

    @property
    def place(self) -> "Memories | str | Path":
        return self.index.manifest.model.source if self.model is None else self.model

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Say what to do if the model is not where the index says."""
        if self.model is not None:
            yield
            return
        source, folder = self.index.manifest.model.source, self.index.folder
        try:
            with index_model_errors(source, folder, self.option):
                yield
        except ModelError as error:
            raise ModelError(
                f"{error} --no-models (models=False in Python) compares the indexes alone."
            ) from None

    def load(self, device: str, progress: Progress) -> "Memories":
        """Return the model of the index; raise if it is another one."""
        memories = self.place
        if isinstance(memories, str | Path):
            from ffmem.models.load import load

            progress.say(f"Loading {memories}.")
            with self.explain_errors():
                # Whatever the index was made in: float32 holds the weights as they are stored.
                memories = load(memories, dtype="float32", device=device)
        check_weights(self.index, memories.fingerprint())
        return memories


ValuesOfLayer = Callable[[int], tuple[ndarray, ndarray]]


@contextmanager
def _read_values(
    first: _Side, second: _Side, folder: Path, device: str, progress: Progress
) -> Iterator[ValuesOfLayer]:
    """Give the values of both models, layer by layer, with one model in memory at a time."""
    for side in (first, second):  # before the first is loaded
        if isinstance(side.place, str | Path):
            with side.explain_errors():
                resolve_model(str(side.place))
    same_hash = first.index.manifest.model.hash == second.index.manifest.model.hash
    if same_hash and first.place == second.place:
        memories = first.load(device, progress)
        yield lambda layer: (_values(memories, layer), _values(memories, layer))
        return
    with storage_errors(folder):
        temporary = tempfile.TemporaryDirectory(dir=folder, prefix=".values-")
    with temporary as kept:
        files = []
        with storage_errors(folder):
            memories = first.load(device, progress)
            for layer in range(memories.n_layers):
                files.append(Path(kept) / f"layer-{layer:03d}.npy")
                np.save(files[-1], _values(memories, layer))
        del memories  # before the second is loaded
        memories = second.load(device, progress)
        yield lambda layer: (np.load(files[layer]), _values(memories, layer))


def _values(memories: "Memories", layer: int) -> Float[ndarray, "memory hidden"]:
    values: ndarray = memories.values(layer).detach().float().cpu().numpy()
    return values


# The memories that changed most


def most_changed(numbers: Columns, top: int) -> Int64[ndarray, " place"]:
    """Return the places of the memories whose triggers changed most.

    By change, ties to the smaller cosine of the values, then to the lower cell. A missing change
    counts as 0; the cosine with a value of zeros counts as smaller than any.
    """
    change = np.nan_to_num(numbers["change"], nan=0.0)
    moved = np.nan_to_num(numbers["value_change"], nan=0.0)
    cosine = numbers["value_cosine"]
    cosine = np.where(np.isnan(cosine), np.where(moved > 0, -2.0, 1.0), cosine)
    order = np.lexsort((cosine, -change))  # stable: the lower cell first
    found: ndarray = order[((change > 0) | (moved > 0))[order]][:top]
    return found


def most_changed_values(numbers: Columns, top: int) -> Int64[ndarray, " place"]:
    """Return the places of the memories whose values changed most, ties to the lower cell."""
    moved = np.nan_to_num(numbers["value_change"], nan=0.0)
    order = np.argsort(-moved, kind="stable")
    found: ndarray = order[(moved > 0)[order]][:top]
    return found


def describe_memory(first: Index, second: Index, numbers: Columns, place: int) -> dict[str, Any]:
    """Return a memory with its numbers, best triggers and value tokens on both sides."""
    cell = first.layout.at(place)
    return {
        "cell": str(cell),
        "layer": cell.layer,
        "memory": cell.memory,
        **{
            name: None if np.isnan(column[place]) else float(column[place])
            for name, column in numbers.items()
        },
        "first": _describe_side(first, cell),
        "second": _describe_side(second, cell),
    }


def _describe_side(index: Index, cell: Cell) -> dict[str, Any]:
    def best(triggers: list[Trigger]) -> dict[str, Any] | None:
        if not triggers:
            return None
        return {
            "coefficient": triggers[0].coefficient,
            "prefix": visible(shorten_prefix(triggers[0].prefix)),
            "next_token": triggers[0].next_token,
        }

    memory = index.memory(cell)
    found = {
        "trigger": best(memory.triggers),
        "tokens": [token.token for token in memory.value.top[:VALUE_TOKENS]],
        "active_share": memory.stats.active_share,
        "max": memory.stats.max,
    }
    if memory.gated:
        found |= {
            "negative_trigger": best(memory.negative_triggers),
            "negative_tokens": [token.token for token in memory.value.bottom[:VALUE_TOKENS]],
            "min": memory.stats.min,
        }
    return found
