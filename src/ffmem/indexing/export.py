"""Exporting an index for other programs.

parquet       a folder with the tidy tables of `index.table`: OUT/stats.parquet, …
jsonl         one line per memory, as `ffmem show --json` prints it
csv           the table of triggers, with the top tokens of the value; texts that a spreadsheet
              would take for a formula get a leading apostrophe
neuronpedia   a folder in the layout that Neuronpedia exports and imports, one source per layer:

    OUT/v1/MODEL/SOURCE/{model,release,sourceset,source}.jsonl
    OUT/v1/MODEL/SOURCE/features/batch-N.jsonl.gz       one line per memory
    OUT/v1/MODEL/SOURCE/activations/batch-N.jsonl.gz    one line per trigger

In Neuronpedia a coefficient is positive. A negative one is a positive one of the negated value,
m · v = (−m) · (−v), so the negative triggers of a gated model are a source of their own,
`…-negative`, with both signs flipped. Fields that an index does not have are empty or left out;
`README.md` in OUT says which.
"""

import csv
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow.parquet as pq
from numpy import ndarray

from ffmem.errors import FfmemError
from ffmem.files import check_output_file, committing, committing_folder, csv_row, sha256
from ffmem.indexing.memory import NO_VALUE
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index
from ffmem.indexing.tables import GROUP, layer_file, read_group
from ffmem.indexing.tidy import SCHEMAS, layer_tables
from ffmem.progress import Step

FORMATS = ("parquet", "jsonl", "csv", "neuronpedia")

CSV_TOKENS = 10
"""Tokens of each side of a value in a row of a CSV."""


def export(index: Index, to: str, out: Path, step: Step) -> None:
    """Write every memory of an index to a file, or to a new folder (parquet, neuronpedia)."""
    if to not in FORMATS:
        raise FfmemError(f"--to {to}: unknown format. Use one of {', '.join(FORMATS)}.")
    if str(out) == "-":
        raise FfmemError("Exports cannot write to standard output. Use a path instead of -.")
    if to in ("neuronpedia", "parquet"):
        if out.exists() or out.is_symlink():
            raise FfmemError(f"{out} exists already. Choose a new folder.")
        if not out.absolute().parent.is_dir():
            raise FfmemError(
                f"There is no folder {out.absolute().parent}. Create it, or choose another folder."
            )
        with committing_folder(out) as folder:
            write_folder = _write_neuronpedia if to == "neuronpedia" else _write_parquet
            write_folder(index, folder, step)
        return
    check_output_file(out)
    # newline="": a CSV writes its own line ends, and those within a text must stay.
    with committing(out) as path, path.open("w", encoding="utf-8", newline="") as file:
        if to == "csv":
            _write_csv(index, file, step)
            return
        for layer in range(index.n_layers):
            for memory in index.memories(layer):
                file.write(json.dumps(memory.to_dict(), ensure_ascii=False) + "\n")
                step(1)


def _write_parquet(index: Index, folder: Path, step: Step) -> None:
    """Write every table that the index has, a row group per layer."""
    from ffmem.patterns.store import open_patterns

    for name, schema in SCHEMAS.items():
        if name == "values" and not index.manifest.model.has_values:
            continue
        if name == "patterns" and not open_patterns(index):
            continue
        with pq.ParquetWriter(folder / f"{name}.parquet", schema, compression="zstd") as writer:
            for layer, table in layer_tables(index, name):
                writer.write_table(table, row_group_size=max(len(table), 1))
                if name == "triggers":  # by far the slowest table
                    step(index.layout.widths[layer])


def _write_csv(index: Index, file: IO[str], step: Step) -> None:
    """Write a row per trigger, and one without a trigger for a memory that has none."""
    kind = index.manifest.model.kind
    columns = [*SCHEMAS["triggers"].names, "value_top", "value_bottom"]
    columns += [] if kind.head_slot(0) is None else ["place"]
    columns += [] if kind.has_values else ["value_note"]
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    for layer, table in layer_tables(index, "triggers"):
        values = _value_texts(index, layer)
        rows = table.to_pylist()
        triggered = {row["memory"] for row in rows}
        for memory in set(range(index.layout.widths[layer])) - triggered:
            cell = index.layout.cell(layer, memory)
            place = {"cell": str(cell), "layer": layer, "bank": cell.bank or "dense"}
            rows.append({**place, "memory": memory})
        rows.sort(key=lambda row: row["memory"])
        for row in rows:
            memory = row["memory"]
            row |= values.get(memory, {})
            if (slot := kind.head_slot(memory)) is not None:
                row["place"] = str(slot)
            if not kind.has_values:
                row["value_note"] = NO_VALUE
            writer.writerow(csv_row(row))
        step(index.layout.widths[layer])


def _value_texts(index: Index, layer: int) -> dict[int, dict[str, str]]:
    """Return each memory's first tokens of both sides, as JSON strings with spaces between."""
    if not index.manifest.model.has_values:
        return {}
    texts: dict[int, dict[str, str]] = {}
    columns = ["memory", "side", "token"]
    for row in index.table("values", layer=layer, top=CSV_TOKENS, columns=columns).to_pylist():
        sides = texts.setdefault(row["memory"], {"value_top": "", "value_bottom": ""})
        token = json.dumps(row["token"], ensure_ascii=False)
        side = f"value_{row['side']}"
        sides[side] = f"{sides[side]} {token}".lstrip()
    return texts


# Neuronpedia

CREATOR = "clkht01d40000jv08hvalcvly"
"""The user whom Neuronpedia's importers make the owner of imported data."""

BATCH = 1024
"""Memories per file, as in Neuronpedia's public exports."""

EMPTY = (
    *("topkCosSimIndices", "topkCosSimValues"),
    *("neuron_alignment_indices", "neuron_alignment_values", "neuron_alignment_l1"),
    *("correlated_neurons_indices", "correlated_neurons_pearson", "correlated_neurons_l1"),
    *("correlated_features_indices", "correlated_features_pearson", "correlated_features_l1"),
    *("freq_hist_data_bar_heights", "freq_hist_data_bar_values"),
    *("logits_hist_data_bar_heights", "logits_hist_data_bar_values", "decoder_weights_dist"),
)
"""Fields of a feature that an index does not have."""


class Side(NamedTuple):
    """One sign of a model's coefficients, and the columns that belong to it."""

    prefix: str
    """Prefix of the trigger columns."""
    suffix: str
    """Suffix of the source set's name."""
    sign: int
    top: str
    bottom: str


class _PrefixEnd(NamedTuple):
    """Where a prefix ends in its sentence, counting the start token."""

    shared: str
    """JSON fields that all activations on the sentence share."""
    n_tokens: int
    last: int


POSITIVE = Side("", "", 1, "top", "bottom")
NEGATIVE = Side("negative_", "-negative", -1, "bottom", "top")


def _write_neuronpedia(index: Index, folder: Path, step: Step) -> None:
    """Write an index in Neuronpedia's layout."""
    exporter = _NeuronpediaExporter(index, folder)
    (folder / "README.md").write_text(exporter.readme(), encoding="utf-8")
    for layer in range(index.n_layers):
        exporter.write_layer(layer, step)


class _NeuronpediaExporter:
    """Writes one index in Neuronpedia's layout."""

    def __init__(self, index: Index, folder: Path) -> None:
        self.index = index
        manifest = index.manifest
        self.model = model_id(manifest.model.source)
        self.set = f"ffmem-{sha256(index.folder / 'manifest.json')[:8]}"
        self.corpus = ", ".join(source.source for source in manifest.corpus.sources)
        self.sides = (POSITIVE, NEGATIVE) if manifest.model.gated else (POSITIVE,)
        self._folder = folder / "v1" / self.model
        self._tokens = list(index.tokens)
        start = manifest.start.token
        self._start = [] if start is None else [start]

    def source(self, layer: int, side: Side) -> str:
        """Return the name of a layer's source."""
        return f"{layer}-{self.set}{side.suffix}"

    def readme(self) -> str:
        """Return the README of the folder."""
        manifest = self.index.manifest
        gated, has_values = manifest.model.gated, manifest.model.has_values
        text = (files("ffmem.indexing") / "neuronpedia.md").read_text(encoding="utf-8")
        return text.format(
            model=manifest.model.source,
            title=manifest.model.kind.title,
            unit=manifest.model.kind.unit,
            note="".join(f"\n{line}\n" for line in manifest.model.kind.notes),
            memories=self._about_memories(),
            corpus=self.corpus,
            sentences=manifest.corpus.sentences,
            tokens=manifest.corpus.tokens,
            t=manifest.t,
            prefixes=manifest.prefixes,
            promotes=_PROMOTES.format(manifest.projection) if has_values else _NONE,
            suppresses="the tokens that it suppresses most" if has_values else _NONE,
            dtype=manifest.dtype,
            set=self.set,
            id=self.model,
            first=self.source(0, POSITIVE),
            share="its gate's pre-activation is above 0" if gated else "its coefficient is above 0",
            negative=_NEGATIVE.format(source=self.source(0, NEGATIVE)) if gated else _NO_NEGATIVE,
        )

    def _about_memories(self) -> str:
        """Return how many memories there are, and in layers with experts which is which."""
        layout = self.index.layout
        if len(set(layout.widths)) == 1:
            text = f"{layout.n_layers} layers of {layout.widths[0]:,} memories"
        else:
            text = f"{layout.n_layers} layers with {len(layout):,} memories in total"
        return f"{text}, some in experts" if layout.has_experts else text

    def _about_banks(self, layer: int) -> str:
        """Return which features of a layer are in which expert; empty in a dense layer."""
        banks = [bank for bank in self.index.layout.banks(layer) if bank.name]
        spans = [f"{bank.name} {bank.offset} to {bank.offset + bank.size - 1}" for bank in banks]
        return f"Features by expert: {', '.join(spans)}." if spans else ""

    def write_layer(self, layer: int, step: Step) -> None:
        """Write the sources of one layer."""
        for side in self.sides:
            self._write_source(layer, side)
        width = self.index.layout.widths[layer]
        for batch, first in enumerate(range(0, width, BATCH)):
            past = min(first + BATCH, width)
            groups = range(first // GROUP, -(-past // GROUP))
            triggers = {group: self._columns("triggers", layer, group) for group in groups}
            places = self._places(triggers.values())
            for side in self.sides:
                folder = self._folder / self.source(layer, side)
                name = f"batch-{batch}.jsonl.gz"
                with _gzip_lines(folder / "features" / name) as lines:
                    for group in groups:
                        lines.writelines(self._features(layer, group, side))
                with _gzip_lines(folder / "activations" / name) as lines:
                    for group, columns in triggers.items():
                        lines.writelines(self._activations(layer, group, side, columns, places))
            step(past - first)

    def _write_source(self, layer: int, side: Side) -> None:
        """Write the four small files about model, release, source set and source."""
        manifest, owner_fields = self.index.manifest, {"creatorId": CREATOR, "visibility": "PUBLIC"}
        name = f"{self.set}{side.suffix}"
        description = f"{manifest.model.kind.title} of {manifest.model.source}, read by ffmem"
        content = "Triggers and values" if manifest.model.has_values else "Triggers"
        signs = " (coefficients below 0, signs flipped)" if side is NEGATIVE else ""
        rows: dict[str, dict[str, Any]] = {
            "model": {
                "id": self.model,
                "displayName": self.model,
                "displayNameShort": self.model,
                "layers": self.index.n_layers,
                "neuronsPerLayer": max(self.index.layout.widths),
                "dimension": manifest.model.hidden,
                "owner": owner(manifest.model.source),
            },
            "release": {
                "name": self.set,
                "description": description,
                "descriptionShort": description,
                "creatorName": "ffmem",
                "urls": [],
            },
            "sourceset": {
                "modelId": self.model,
                "name": name,
                "releaseName": self.set,
                "description": f"{content} over {self.corpus}{signs}",
                "type": "neurons",
                "creatorName": "ffmem",
                "urls": [],
            },
            "source": {
                "id": self.source(layer, side),
                "modelId": self.model,
                "setName": name,
                "hasDashboards": True,
                "inferenceEnabled": False,
                "dataset": self.corpus,
                "num_prompts": manifest.corpus.sentences,
                "notes": " ".join(
                    note
                    for note in (_UNKNOWN, *manifest.model.kind.notes, self._about_banks(layer))
                    if note
                ),
            },
        }
        folder = self._folder / self.source(layer, side)
        folder.mkdir(parents=True)
        for kind, row in rows.items():
            (folder / f"{kind}.jsonl").write_text(_json_line(row | owner_fields), encoding="utf-8")

    def _features(self, layer: int, group: int, side: Side) -> Iterator[str]:
        """Yield a line for each memory of a row group."""
        has_values = self.index.manifest.model.has_values
        stats = self._columns("stats", layer, group)
        largest = stats["max" if side is POSITIVE else "min"]
        ends: dict[str, list[Any]] = {
            name: [[]] * len(largest) for name in ("pos_str", "pos_values", "neg_str", "neg_values")
        }
        if has_values:
            values = self._columns("values", layer, group)
            for name, end in (("pos", side.top), ("neg", side.bottom)):
                ids = values[f"{end}_ids"].tolist()
                ends[f"{name}_str"] = [[self._tokens[id] for id in row] for row in ids]
                ends[f"{name}_values"] = (side.sign * values[f"{end}_logits"]).tolist()
        # By TransformerLens' name of the hook that reads the coefficients, if there is one.
        hook = f"blocks.{layer}.mlp.hook_post"
        if self.index.manifest.model.kind.head_slot(0) is not None:
            hook = f"model.layers.{layer}.memory.values"
        elif self.index.layout.banks(layer)[0].name:
            hook = ""  # of m, without the router's weight
        for row in range(len(largest)):
            yield _json_line(
                {
                    "modelId": self.model,
                    "layer": self.source(layer, side),
                    "index": str(group * GROUP + row),
                    "sourceSetName": f"{self.set}{side.suffix}",
                    "creatorId": CREATOR,
                    "maxActApprox": side.sign * float(largest[row]),
                    "frac_nonzero": int(stats["active"][row]) / self.index.manifest.corpus.prefixes,
                    **{name: rows[row] for name, rows in ends.items()},
                    "hookName": hook,
                    "hasVector": False,
                    "vector": [],
                }
                | {name: [] for name in EMPTY}
            )

    def _activations(
        self,
        layer: int,
        group: int,
        side: Side,
        columns: dict[str, ndarray],
        places: dict[int, _PrefixEnd],
    ) -> Iterator[str]:
        """Yield a line for each trigger of the memories of a row group."""
        prefixes = columns[f"{side.prefix}prefix"].tolist()
        coefficients = (side.sign * columns[f"{side.prefix}coefficient"]).tolist()
        for row, ranked in enumerate(zip(prefixes, coefficients, strict=True)):
            memory = group * GROUP + row
            common = {
                "modelId": self.model,
                "layer": self.source(layer, side),
                "index": str(memory),
            }
            for rank, (prefix, coefficient) in enumerate(zip(*ranked, strict=True), start=1):
                if prefix == NO_PREFIX:
                    break
                own = {"id": f"{self.set}{side.suffix}-{layer}-{memory}-{rank}", **common}
                yield _activation(own, places[prefix], coefficient)

    def _places(self, triggers: Iterable[dict[str, ndarray]]) -> dict[int, _PrefixEnd]:
        """Return where the prefixes of some triggers end, reading every sentence once."""
        prefixes = {
            prefix
            for columns in triggers
            for side in self.sides
            for prefix in columns[f"{side.prefix}prefix"].reshape(-1).tolist()
        }
        owners = self.index.sentences.at(prefixes - {NO_PREFIX})
        shared: dict[int, tuple[str, int]] = {}
        for sentence in owners.values():
            if sentence.sentence in shared:
                continue
            tokens = [*self._start, *(self._tokens[id] for id in sentence.ids)]
            fields = {
                "dataSource": self.index.manifest.corpus.sources[sentence.source].source,
                "dataIndex": str(sentence.sentence),
                "tokens": tokens,
            }
            shared[sentence.sentence] = _json_fields(fields), len(tokens)
        # With a start token at 0, the prefix of length p ends at p; without one, at p − 1.
        shift = len(self._start) - 1
        return {
            prefix: _PrefixEnd(*shared[sentence.sentence], prefix - sentence.offset + shift)
            for prefix, sentence in owners.items()
        }

    def _columns(self, kind: str, layer: int, group: int) -> dict[str, ndarray]:
        return read_group(self.index.folder / layer_file(kind, layer), group)


_NEGATIVE = (
    "In this gated model, coefficients below 0 trigger as well. Sources that end in `-negative`\n"
    "(`{source}`) hold those triggers with the signs of coefficient and value flipped: what is\n"
    "positive there is −m, and `pos_str` is what the value promotes when m < 0."
)
_PROMOTES = "the tokens that the value promotes most, with their logits (projection: {})"
_NONE = "empty: there is no static value"
_UNKNOWN = (
    "Only the coefficient at a trigger's last token is known; all other values are written as 0."
)
_NO_NEGATIVE = "This model is not gated: only coefficients above 0 trigger."


def _json_line(row: dict[str, Any]) -> str:
    return "{" + _json_fields(row) + "}\n"


def _json_fields(row: dict[str, Any]) -> str:
    """Return the JSON of an object without its braces."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)[1:-1]


_EMPTY_FIELDS = _json_fields(
    {
        "creatorId": CREATOR,
        "dfaValues": [],
        "dfaMaxValue": None,
        "dfaTargetIndex": None,
        "lossValues": [],
        "logitContributions": None,
        "binMin": None,
        "binMax": None,
        "binContains": None,
        "qualifyingTokenIndex": None,
    }
)
"""JSON fields of every activation that an index does not know."""


def _activation(fields: dict[str, str], place: _PrefixEnd, coefficient: float) -> str:
    """Return the line of one trigger; only the value of its last token is known."""
    own = {
        **fields,
        "maxValue": coefficient,
        "minValue": coefficient if place.n_tokens == 1 else 0.0,
        "maxValueTokenIndex": place.last,
    }
    # Not through `json`: there is a value for every token of every trigger.
    after = place.n_tokens - 1 - place.last
    values = f'"values":[{"0," * place.last}{coefficient!r}{",0" * after}]'
    return f"{{{_json_fields(own)},{place.shared},{values},{_EMPTY_FIELDS}}}\n"


def model_id(source: str) -> str:
    """Return a model's name for Neuronpedia: lower case, digits, dashes, underscores."""
    name = re.split(r"[/\\]", source.rstrip("/\\"))[-1].partition("@")[0].removesuffix(".gguf")
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-") or "model"


def owner(source: str) -> str:
    """Return the owner of a model, if its name is a Hub id."""
    match = re.fullmatch(r"([\w.-]+)/[\w.-]+(@.*)?", source)
    return match[1] if match and not Path(source).exists() else "unknown"


@contextmanager
def _gzip_lines(path: Path) -> Iterator[IO[str]]:
    """Open a gzip file to write lines to; the same lines give the same bytes."""
    path.parent.mkdir(exist_ok=True)
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="") as lines,
    ):
        yield lines
