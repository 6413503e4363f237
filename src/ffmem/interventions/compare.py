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

OUT/compare.json      settings, rows (one per layer), overall, changed, changed_values
OUT/memories.parquet  one row per memory, all numbers
OUT/compare.svg, compare.pdf
"""

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import pyarrow as pa
from jaxtyping import Float, Float64, Int, Int64
from numpy import ndarray

from ffmem.cells import Cell, Layout
from ffmem.errors import FfmemError, ModelError, StoreError
from ffmem.experiments.charts import (
    VERMILION,
    Chart,
    boxes,
    chart_svg,
    empty_plot,
    figure_rows,
    layer_axis,
    panels,
    plot,
    quantity,
    same_axis,
    series_color,
    styled,
    write_svg_and_pdf,
)
from ffmem.experiments.rows import rows_with
from ffmem.files import storage_errors, write_text
from ffmem.indexing.manifest import Manifest
from ffmem.indexing.memory import NO_VALUES, Trigger, visible, visible_token
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index, as_index, output_folder
from ffmem.indexing.tables import layer_file, read_columns, write_table
from ffmem.indexing.verify import damaged_files
from ffmem.interventions.results import TableResult
from ffmem.progress import Progress
from ffmem.signatures import check_arguments
from ffmem.stats import ratio, share, spread
from ffmem.text import format_number, format_share, pluralize, shorten_prefix

if TYPE_CHECKING:
    from ffmem.models.memories import Memories

VALUE_TOKENS = 10
"""Tokens of a value whose overlap is measured."""

P = 0.9
"""Weight of each rank relative to the one before; the first ten ranks have 86 % of the weight."""

MAX_PAIRS = 1 << 22
"""Pairs of triggers to compare at once."""

LISTED = 10
"""Memories in the readable summary."""

PANEL_HEIGHT = 84
JACCARD = "Jaccard, median"
DESCRIPTION = (
    "By layer, median and quartiles over memories: rank-biased overlap of the triggers in both"
    " indexes with the median Jaccard overlap, cosine of the values of both models, change of the"
    " share of prefixes on which a memory is active."
)

OF_VALUES = ("value_cosine", "value_norm_ratio", "value_change")
"""Columns that need the models."""

Row = dict[str, Any]
Columns = dict[str, ndarray]


@check_arguments
def compare(
    first: str | Path | Index,
    second: str | Path | Index,
    out: str | Path,
    *,
    models: bool = True,
    first_model: "Memories | str | Path | None" = None,
    second_model: "Memories | str | Path | None" = None,
    top: int = 50,
    device: str = "auto",
    progress: Progress | None = None,
) -> "Comparison":
    """Compare two indexes of one architecture over one corpus; return the comparison.

    Its numbers and figure are written to `out`.

    Args:
        first: An index.
        second: The index to compare with it.
        out: Folder to write.
        models: Whether to load the models and compare the directions of values.
        first_model: The model of the first index, or where it is now.
        second_model: The model of the second index, or where it is now.
        top: Most changed memories to list.
        device: Where the models run.
        progress: Where progress is shown. Default: nowhere.
    """
    one, other, folder = as_index(first), as_index(second), Path(out)
    with output_folder(folder):
        check_comparable(one, other)
        if top < 1:
            raise FfmemError(f"top must be 1 or more; got {top!r}.")
        if not models and (first_model is not None or second_model is not None):
            raise FfmemError("Pass either models, or --no-models.")
        for index in (one, other):
            if wrong := damaged_files(index):
                raise StoreError(f"The index {index.folder} is damaged: {' '.join(wrong[:3])}")
        say = progress or Progress(quiet=True)
        for name, both in differences(one.manifest, other.manifest).items():
            say.say(f"The indexes differ in {name}: {both[0]} and {both[1]}.")
        has_values = one.manifest.model.has_values
        if not has_values:
            say.say(f"{NO_VALUES} Values are not compared, and no model is read.")
        elif not models:
            say.say(f"The models are not read: {', '.join(OF_VALUES)} are null.")
        of_values: list[Columns | None] = [None] * one.n_layers
        if models and has_values:
            sides = (one, first_model, "--first-model"), (other, second_model, "--second-model")
            of_values = [*value_changes(*sides, folder, device, say)]
        layers = []
        with say.bar("Comparing", len(one), "memories") as step:
            for layer, width in enumerate(one.layout.widths):
                layers.append(layer_changes(one, other, layer, of_values[layer]))
                step(width)
        numbers = {name: np.concatenate([layer[name] for layer in layers]) for name in layers[0]}

        @cache  # many memories are in both lists, and their triggers are read from the folders
        def describe(place: int) -> dict[str, Any]:
            return describe_memory(one, other, numbers, place)

        found = Comparison(
            settings=_settings(one, other, models and has_values, top),
            rows=[{"layer": n} | summarize(layers[n]) for n in one.layout.memory_layers],
            overall=summarize(numbers),
            changed=[describe(place) for place in most_changed(numbers, top).tolist()],
            changed_values=[
                describe(place) for place in most_changed_values(numbers, top).tolist()
            ],
            numbers=numbers,
            layout=one.layout,
        )
        found.write(folder)
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
        pairs = {name: (shown, other[group][name][1]) for name, (_, shown) in one[group].items()}
        unequal = [
            name for name, (value, _) in one[group].items() if value != other[group][name][0]
        ]
        unlike = [
            f"{name}: {pairs[name][0]} in the first, {pairs[name][1]} in the second"
            for name in unequal
            if pairs[name][0] != pairs[name][1]
        ]
        if unequal and not unlike:
            unlike = [f"They differ in {', '.join(unequal)}"]
        if unlike:
            raise StoreError(
                f"{first.folder} and {second.folder} cannot be compared. {'; '.join(unlike)}."
                f" {advice}"
            )


def _binding(manifest: Manifest) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return what two indexes must have in common: each value, and how it is shown."""
    model, corpus, start = manifest.model, manifest.corpus, manifest.start
    names = ", ".join(source.source for source in corpus.sources)
    shape: dict[str, Any] = {
        name: getattr(model, name) for name in ("family", "layers", "hidden", "vocabulary")
    }
    shape["gated"] = "yes" if model.gated else "no"
    shape["memories"] = model.layout.per_layer
    banks = [[(bank.kind, bank.size, bank.count) for bank in one] for one in model.layout.layers]
    # Older indexes of our own models name the activation alone.
    shape["kind of memory"] = model.memory or model.activation
    settings = {name: getattr(manifest, name) for name in ("t", "prefixes", "projection")}
    shown = f"{names} ({corpus.sentences:,} sentences, hash {corpus.hash[:12]})"
    return {
        "model": {name: (value, value) for name, value in shape.items()}
        | {"banks": (banks, _describe_banks(model.layout))},
        "corpus": {"corpus": (corpus.hash, shown)},
        "settings": {
            "start token": (start.id, "none" if start.token is None else repr(start.token)),
            "compat": (manifest.compat, manifest.compat or "none"),
            **{name: (value, value) for name, value in settings.items()},
        },
    }


def _describe_banks(layout: Layout) -> str:
    """Return the experts of a model in words, layers that are alike once."""
    found: dict[str, None] = {}
    for layer in layout.layers:
        parts = [
            f"{bank.count} {bank.kind}s of {bank.size}" for bank in layer if bank.kind != "dense"
        ]
        found[" and ".join(parts)] = None
    return ", ".join(filter(None, found)) or "no experts"


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


def _settings(first: Index, second: Index, models: bool, top: int) -> Row:
    """Return everything that determines the numbers."""

    def side(index: Index) -> Row:
        model = index.manifest.model
        return {
            "index": str(index.folder),
            "model": model.source,
            "adapter": None if model.adapter is None else model.adapter.source,
            "model_hash": model.hash,
            "dtype": index.manifest.dtype,
        }

    manifest = first.manifest
    model, corpus = manifest.model, manifest.corpus
    return {
        "first": side(first),
        "second": side(second),
        "differences": differences(first.manifest, second.manifest),
        **{name: getattr(model, name) for name in ("family", "layers", "gated")},
        "memories": first.layout.per_layer,
        "corpus": {
            "sources": [source.source for source in corpus.sources],
            **{name: getattr(corpus, name) for name in ("hash", "sentences", "tokens")},
        },
        "start": manifest.start.token,
        **{name: getattr(manifest, name) for name in ("t", "prefixes", "compat", "projection")},
        "models": models,
        "values": "static" if model.has_values else "input",
        "p": P,
        "value_tokens": VALUE_TOKENS,
        "top": top,
    }


# What changed in every memory


def layer_changes(
    first: Index, second: Index, layer: int, values: Columns | None
) -> dict[str, Float64[ndarray, " memory"]]:
    """Return what changed in the memories of a layer; `values` is what changed in their values."""
    model = first.manifest.model
    missing = np.full(first.layout.widths[layer], np.nan)
    signs = ("", "negative_") if model.gated else ("",)
    found: Columns = {}

    def read(kind: str, names: list[str]) -> list[Columns]:
        return [read_columns(i.folder / layer_file(kind, layer), names) for i in (first, second)]

    one, other = read("triggers", [f"{sign}prefix" for sign in signs])
    for sign in signs:
        overlap = measure_overlap(one[f"{sign}prefix"], other[f"{sign}prefix"])
        found |= dict(zip((f"{sign}jaccard", f"{sign}rbo"), overlap, strict=True))
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
            found[f"{sign}value_tokens"], _ = measure_overlap(*ends)
    found |= dict.fromkeys(OF_VALUES, missing) if values is None else values

    one, other = read("stats", ["active", "max", "min"])
    n_prefixes = max(first.manifest.corpus.prefixes, 1)
    found["active_change"] = (other["active"] - one["active"]) / n_prefixes
    found["max_ratio"] = _positive_ratio(one["max"], other["max"])
    if model.gated:
        found["min_ratio"] = _positive_ratio(-one["min"], -other["min"])
    return found


def _positive_ratio(first: ndarray, second: ndarray) -> Float64[ndarray, " memory"]:
    """Return second / first where both are positive, else NaN."""
    return np.where((first > 0) & (second > 0), ratio(second, first), np.nan)


def summarize(numbers: Columns) -> dict[str, Any]:
    """Return mean, quartiles and n of every column, without missing numbers."""
    columns = {name: column[~np.isnan(column)] for name, column in numbers.items()}
    below_half = {
        name.replace("jaccard", "below_half"): share(int((column < 0.5).sum()), len(column))
        for name, column in columns.items()
        if name.endswith("jaccard")
    }
    return {name: spread(column) for name, column in columns.items()} | below_half


# The overlap of ranked lists


def measure_overlap(
    first: Int[ndarray, "row rank"], second: Int[ndarray, "row rank"]
) -> tuple[Float64[ndarray, " row"], Float64[ndarray, " row"]]:
    """Return Jaccard and RBO of the lists in each row: no entry twice, empty slots last.

    X_d is the number of entries that the first d of both lists share; s and l are the lengths of
    the shorter and the longer list.

        Jaccard = X_l / (s + l − X_l)
        RBO = (1 − p)/p · (Σ_{d ≤ l} X_d/d · p^d + Σ_{s < d ≤ l} X_s·(d − s)/(s·d) · p^d)
              + ((X_l − X_s)/l + X_s/s) · p^l

    RBO is rank-biased overlap, extrapolated (Webber et al. 2010, equation 32): disagreement at the
    top weighs most, and shorter lists are extrapolated. If one list is empty, both are 0; if
    both are, NaN.
    """
    shared = _count_shared(first, second)
    lengths = np.stack([(lists != NO_PREFIX).sum(axis=1) for lists in (first, second)])
    shorter, longer = lengths.min(axis=0), lengths.max(axis=0)
    union = shorter + longer - shared[:, -1]
    jaccard = np.where(union > 0, shared[:, -1] / np.maximum(union, 1), np.nan)

    depths = np.arange(1, first.shape[1] + 1)
    s, l = (np.maximum(n, 1)[:, None] for n in (shorter, longer))  # noqa: E741
    at_s, at_l = (np.take_along_axis(shared, n - 1, axis=1) for n in (s, l))
    agreement = np.where(depths <= l, shared / depths, 0.0)
    assumed = np.where((depths > s) & (depths <= l), at_s * (depths - s) / (s * depths), 0.0)
    series = ((agreement + assumed) * P**depths).sum(axis=1)
    rbo = (1 - P) / P * series + (((at_l - at_s) / l + at_s / s) * P**l)[:, 0]
    # The sum would leave 1e-16 where nothing differs, and 1 must mean exactly that.
    same = (shared == np.minimum(depths, shorter[:, None])).all(axis=1) & (shorter > 0)
    rbo = np.where(same, 1.0, np.clip(rbo, 0.0, 1.0))
    return jaccard, np.where(longer > 0, rbo, np.nan)


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
) -> Columns:
    """Return how each value of a layer changed, by the names of `OF_VALUES`.

    cosine = v₁·v₂ / (‖v₁‖·‖v₂‖),  norm ratio = ‖v₂‖/‖v₁‖,  change = ‖v₂ − v₁‖ / max(‖v₁‖, ‖v₂‖)

    A value of zeros has no direction: NaN. The change is 0 for equal values, 1 if one was switched
    off, 2 for opposite ones.
    """
    one, other = first.astype(np.float64), second.astype(np.float64)
    squares = [(values * values).sum(axis=1) for values in (one, other)]
    # √(a·a) is a, but √a·√a need not be: the cosine of equal values must be 1.
    cosine = ratio((one * other).sum(axis=1), np.sqrt(squares[0] * squares[1]))
    apart = np.sqrt(((other - one) ** 2).sum(axis=1))
    change = ratio(apart, np.sqrt(np.maximum(*squares)))
    columns = (
        np.clip(cosine, -1.0, 1.0),
        ratio(np.sqrt(squares[1]), np.sqrt(squares[0])),
        np.nan_to_num(change, nan=0.0),
    )
    return dict(zip(OF_VALUES, columns, strict=True))


Side = tuple[Index, "Memories | str | Path | None", str]
"""An index; its model, if it is not where the index says; and the option that says where it is."""


def value_changes(
    first: Side, second: Side, folder: Path, device: str, progress: Progress
) -> Iterator[Columns]:
    """Yield how the values of each layer changed, with one model in memory at a time."""
    with storage_errors(folder):
        temporary = tempfile.TemporaryDirectory(dir=folder, prefix=".values-")
    with temporary as name:
        files = []
        with storage_errors(folder):
            memories = _load(*first, device, progress)
            for layer in range(memories.n_layers):
                files.append(Path(name) / f"layer-{layer:03d}.npy")
                with files[-1].open("wb") as file:
                    for values in _values(memories, layer):
                        np.save(file, values)
        del memories  # before the second is loaded
        memories = _load(*second, device, progress)
        for layer, path in enumerate(files):
            with path.open("rb") as file:
                parts = [value_change(np.load(file), now) for now in _values(memories, layer)]
            none = np.zeros(0)
            yield {
                name: np.concatenate([none, *(one[name] for one in parts)]) for name in OF_VALUES
            }


def _load(
    index: Index, model: "Memories | str | Path | None", option: str, device: str, say: Progress
) -> "Memories":
    """Return the model of an index; raise if it is another one, or not where the index says."""
    from ffmem.interventions.forward import open_model

    try:
        # Whatever the index was made in: float32 holds the weights as they are stored.
        dtype = "float32" if model is None or isinstance(model, str | Path) else None
        return open_model(index, None, model, None, dtype, device, say, option).memories
    except ModelError as error:
        if model is not None:
            raise
        raise ModelError(f"{error} --no-models compares the indexes alone.") from None


def _values(memories: "Memories", layer: int) -> Iterator[Float[ndarray, "memory hidden"]]:
    for values in memories.value_parts(layer):
        yield values.detach().float().cpu().numpy()


# The memories that changed most


def most_changed(numbers: Columns, top: int) -> Int64[ndarray, " place"]:
    """Return the places of the memories whose triggers changed most.

    By change, ties to the smaller cosine of the values, then to the lower cell. A missing change
    counts as 0; the cosine with a value of zeros counts as smaller than any.
    """
    change = np.nan_to_num(numbers["change"], nan=0.0)
    value_changes = np.nan_to_num(numbers["value_change"], nan=0.0)
    cosine = numbers["value_cosine"]
    cosine = np.where(np.isnan(cosine), np.where(value_changes > 0, -2.0, 1.0), cosine)
    order = np.lexsort((cosine, -change))  # stable: the lower cell first
    found: ndarray = order[((change > 0) | (value_changes > 0))[order]][:top]
    return found


def most_changed_values(numbers: Columns, top: int) -> Int64[ndarray, " place"]:
    """Return the places of the memories whose values changed most, ties to the lower cell."""
    value_changes = np.nan_to_num(numbers["value_change"], nan=0.0)
    order = np.argsort(-value_changes, kind="stable")
    found: ndarray = order[(value_changes > 0)[order]][:top]
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


# The result


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(TableResult):
    """Two indexes of one architecture over one corpus, memory by memory."""

    settings: Row
    """Both indexes with their models, what they have in common, and how they were compared."""
    rows: list[Row]
    """Per layer: mean, q1, median, q3 and n of every number; below_half of the Jaccard overlaps."""
    overall: Row
    """The same over all memories."""
    changed: list[Row]
    """Memories whose triggers changed most, most changed first."""
    changed_values: list[Row]
    """Memories whose values changed most; none if the models were not read."""
    numbers: dict[str, ndarray]
    """One column per number, one row per memory; NaN where a number does not exist."""
    layout: Layout

    def to_dict(self) -> Row:
        """Return the content of compare.json."""
        return {
            "settings": self.settings,
            "rows": self.rows,
            "overall": self.overall,
            "changed": self.changed,
            "changed_values": self.changed_values,
        }

    def write(self, folder: Path) -> None:
        """Write all files; the same comparison gives the same bytes."""
        write_table(folder / "memories.parquet", self.table())
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)
        write_text(folder / "compare.json", text + "\n")
        write_svg_and_pdf("compare", self.to_svg(), folder)

    def table(self) -> pa.Table:
        """Return all numbers of all memories."""
        widths = self.layout.widths
        layers = np.repeat(np.arange(len(widths), dtype=np.int32), widths)
        memories = np.concatenate([np.arange(width, dtype=np.int32) for width in widths])
        columns = {
            name: pa.array(column, mask=np.isnan(column)) for name, column in self.numbers.items()
        }
        return pa.table({"layer": pa.array(layers), "memory": pa.array(memories), **columns})

    def to_svg(self) -> str:
        """Return the figure."""
        sides = [self.settings[which] for which in ("second", "first")]
        names = [f"{side['index']} ({side['model']})" for side in sides]
        heading = f"Memories of {names[0]} compared with {names[1]}"
        return chart_svg("compare", heading, DESCRIPTION, draw_chart(self.settings, self.rows))

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Return both indexes; the medians of every layer; the memories that changed most."""
        settings = self.settings
        columns = {"rbo": "rbo", "jaccard": "jaccard"}
        if settings["gated"]:
            columns |= {"negative_rbo": "rbo m<0", "negative_jaccard": "jaccard m<0"}
        if settings["values"] == "static":
            columns["value_tokens"] = "tokens"
        if settings["models"]:
            columns |= {"value_cosine": "cosine", "value_norm_ratio": "norm"}
        columns["max_ratio"] = "max"
        table = [["layer", *columns.values(), "active", "below half"]]
        for row in (*self.rows, {"layer": "all", **self.overall}):
            medians = [format_number(row[name]["median"]) for name in columns]
            active = format_share(row["active_change"]["median"], signed=True)
            table.append([str(row["layer"]), *medians, active, format_share(row["below_half"])])
        heading = [*_heading(settings), "Medians over the memories of each layer:"]
        return heading, table, _most_changed(self)


def _model_name(side: Row) -> str:
    """Return the model of an index, with its adapter."""
    return f"{side['model']} + {side['adapter']}" if side["adapter"] else str(side["model"])


def _heading(settings: Row) -> list[str]:
    corpus, memories = settings["corpus"], settings["memories"]
    layers = pluralize(settings["layers"], "layers")
    if isinstance(memories, list):
        shape = f"{layers} with {pluralize(sum(memories), 'memories')} in total"
    else:
        shape = f"{layers} × {pluralize(memories, 'memories')}"
    lines = [
        f"{shape}, over {pluralize(corpus['sentences'], 'sentences')},"
        f" {pluralize(corpus['tokens'], 'tokens')}"
    ]
    for which in ("first", "second"):
        side = settings[which]
        lines.append(
            f"{which:8}{side['index']}: {_model_name(side)}, weights {side['model_hash'][:12]},"
            f" {side['dtype']}"
        )
    if settings["values"] == "input":
        lines.append(NO_VALUES)
    elif not settings["models"]:
        lines.append("The models were not read, so the directions of values are not compared.")
    return lines


def _most_changed(comparison: Comparison) -> list[str]:
    """Return the memories that changed most, with what triggers them on both sides."""
    models = comparison.settings["models"]
    if not comparison.changed:
        return [f"No memory's triggers changed{', nor its value' if models else ''}."]
    lines = [f"Most changed memories (1 − rbo{'; ties: cosine of the values' if models else ''})"]
    for row in comparison.changed[:LISTED]:
        lines.append(
            f"{row['cell']:10} change {format_number(row['change'])}"
            f"  cosine {format_number(row['value_cosine'], 4)}"
            f"  active {format_share(row['active_change'], signed=True)}"
            f"  max × {format_number(row['max_ratio'])}"
        )
        lines += [
            _format_side(which, row[which], sign)
            for sign in ("", "negative_")
            for which in ("first", "second")
            if f"{sign}trigger" in row[which]
        ]
    if values := comparison.changed_values[:LISTED]:
        lines += ["", "Most changed values (‖v₂ − v₁‖ over the longer)"]
        lines += [
            f"{row['cell']:10} {format_number(row['value_change'])}"
            f"  cosine {format_number(row['value_cosine'], 4)}"
            f"  norm × {format_number(row['value_norm_ratio'])}"
            for row in values
        ]
    return lines


def _format_side(which: str, side: Row, sign: str) -> str:
    trigger, shown = side[f"{sign}trigger"], "no trigger"
    if trigger is not None:
        number = f"{format_number(trigger['coefficient']):>9}"
        shown = f"{number}  {trigger['prefix']} → {visible_token(trigger['next_token'])}"
    tokens = "  ".join(map(visible_token, side[f"{sign}tokens"][:4]))
    return f"  {which:7}{shown}{f'   ⇒ {tokens}' if tokens else ''}"


# The figure


def draw_chart(settings: Row, rows: list[Row]) -> Chart:
    """Return the figure: per layer, overlap of triggers, cosine of values, change of activity.

    Boxes reach from the lower to the upper quartile of a layer's memories, with the median.
    """
    n_layers, gated = settings["layers"], settings["gated"]
    drawn: list[tuple[str, Chart]] = []
    for sign, which in [("", ", m > 0"), ("negative_", ", m < 0")] if gated else [("", "")]:
        if any(row[f"{sign}rbo"]["n"] for row in rows):
            chart = _trigger_panel(rows, sign, n_layers)
            drawn.append((f"rank-biased overlap of triggers{which}", chart))
    if any(row["value_cosine"]["n"] for row in rows):
        spread = _quartiles(rows, "value_cosine")
        lowest = min(row["q1"] for row in spread)
        # Small changes are visible, and large ones fit.
        floor = 0.99 if lowest >= 0.99 else min(0.9, math.floor(10 * lowest) / 10)
        y = quantity("q1", "cosine", (floor, 1), tickCount=4)
        drawn.append(("cosine of the two values", boxes(spread, n_layers, y, None)))
    what = "share of prefixes with open gate" if gated else "share of prefixes that activate"
    spread = _quartiles(rows, "active_change", percent=True)
    drawn.append(
        (
            f"change of the {what}",
            boxes(spread, n_layers, quantity("q1", "points of %", tickCount=4)),
        )
    )
    charts = [one.properties(height=PANEL_HEIGHT, title=title) for title, one in drawn]
    return styled(panels(charts) if charts else empty_plot())


def _trigger_panel(rows: list[Row], sign: str, n_layers: int) -> Chart:
    y = quantity("q1", "overlap", (0, 1), values=[0, 0.5, 1])
    box = boxes(_quartiles(rows, f"{sign}rbo"), n_layers, y, None)
    medians = [
        {"layer": row["layer"] + 1, "jaccard": row[f"{sign}jaccard"]["median"], "series": JACCARD}
        for row in rows
    ]
    points = plot(rows_with(medians, "jaccard")).mark_point(size=22)
    marks = points.encode(
        x=layer_axis(n_layers, None),
        y=same_axis(y, "jaccard"),
        color=series_color({JACCARD: VERMILION}),
    )
    return alt.LayerChart(layer=[box, marks])


def _quartiles(rows: list[Row], name: str, percent: bool = False) -> list[Row]:
    """Return a number's quartiles per layer, as figures show them."""
    ends = ("q1", "median", "q3")
    spreads = [{"layer": row["layer"], **row[name]} for row in rows]
    found = figure_rows(spreads, ends) if percent else figure_rows(spreads, (), ends)
    return rows_with(found, *ends)
