"""What an experiment is, what it returns, and which ones there are.

An experiment is one file of this package. It holds what the experiment measures, its chart, its
summary sentence, the paper's values, and how the paper's claims are checked:

    EXPERIMENT = Experiment(name="agreement", measure=measure, chart=chart, summary=summary, …)

`MODULES` lists the files in the paper's order. This module imports neither torch nor altair, and no
experiment imports torch before it measures: pages draw charts without it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ffmem.config_fields import check_options, option
from ffmem.errors import FfmemError, StoreError
from ffmem.experiments.rows import PAPER_LAYERS, Row, layer_of, rows_with, smallest_n, trend
from ffmem.files import write_text
from ffmem.models.arguments import MAX_THREADS
from ffmem.text import MISSING, format_number

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.experiments.charts import Chart
    from ffmem.experiments.context import ExperimentContext
    from ffmem.indexing.store import Index

MODULES = (
    "patterns",
    "token_removal",
    "agreement",
    "next_token_rank",
    "max_probability",
    "predictive_values",
    "active_memories",
    "zero_agreement",
    "stop_words",
    "residual_prediction",
    "residual_probability",
    "prediction_cases",
    "last_layer_composition",
    "neural_memory",
)
"""The file of every experiment, in the paper's order."""

NAMES = tuple(module.replace("_", "-") for module in MODULES)


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """The choices of a measurement: options of `ffmem experiment` and `ffmem report`."""

    sample: int | str = option(
        "Prefixes to sample for Section 5.", 4000, minimum=1, choices=("all",)
    )
    draw: str = option(
        "Draw one prefix per sentence, or draw from all prefixes.",
        "sentences",
        choices=("sentences", "tokens"),
    )
    seed: int = option("Random seed.", 0, minimum=0)
    per_layer: int = option(
        "Memories per layer for token removal; the paper used 100.", 10, minimum=1
    )
    triggers: int = option(
        "Triggers per memory for token removal; the paper used 50.", 20, minimum=1
    )
    threads: int | None = option(
        "CPU threads. The last bits of a result may depend on it.",
        None,
        minimum=1,
        maximum=MAX_THREADS,
    )

    def __post_init__(self) -> None:
        check_options(self)


# Results

FIELDS = ("experiment", "paper", "settings", "rows", "quoted")

FORMAT = 1
"""File format, in the settings of a result; the default of files without one."""


@dataclass(frozen=True)
class ExperimentResult:
    """One experiment on one model: `OUT/NAME.json`."""

    experiment: str
    paper: str
    """Figure, table or section of the paper."""
    settings: Row
    rows: list[Row]
    also: Row = field(default_factory=dict)
    """Values outside of rows, such as `auc`; in the file, they are next to `rows`."""
    fingerprint: str | None = None
    """SHA-256 of everything that determines the numbers; None if the experiment is never cached."""

    @property
    def quoted(self) -> list[dict[str, str]]:
        """The paper's own values."""
        return [value._asdict() for value in find(self.experiment).paper_values]

    @property
    def kind(self) -> str:
        """The kind of memory as the index names it, such as softmax; none in other families.

        softmax      m = softmax(x · Kᵀ):                                m > 0,  Σ m = 1
        persistent   m = attention on slots, in one softmax with tokens: m > 0,  Σ m < 1 in a head
        lambda       m = x · k where a token lies at that distance, else 0; no static value
        """
        return str(self.settings.get("kind") or "none")

    @property
    def n_layers(self) -> int:
        """How many layers the model has."""
        layers = [int(row["layer"]) + 1 for row in rows_with(self.rows, "layer")]
        return max([int(self.settings.get("layers") or 1), *layers])

    def rows_with(self, *fields: str, **values: Any) -> list[Row]:
        """Return the rows with all of these fields, and these values in others."""
        return rows_with(self.rows, *fields, **values)

    def to_dict(self) -> Row:
        """Return the content of the file."""
        main = (self.experiment, self.paper, self.settings, self.rows, self.quoted)
        content = dict(zip(FIELDS, main, strict=True))
        if self.fingerprint is not None:
            content["fingerprint"] = self.fingerprint
        return content | self.also

    def __str__(self) -> str:
        experiment = find(self.experiment)
        claims = [
            f"{one.claim}: {one.verdict} ({one.n}). {one.rule}" for one in check_claims([self])
        ]
        return "\n".join([f"{experiment.title} ({self.paper})", experiment.summary(self), *claims])

    __repr__ = __str__  # what a terminal shows

    def _repr_html_(self) -> str:
        from ffmem.experiments.render import result_html

        return result_html(self)

    def write(self, folder: Path) -> Path:
        """Write the result to its file, one row per line; the same result gives the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.experiment}.json"
        lines = [f"{json.dumps(name)}: {_layout(part)}" for name, part in self.to_dict().items()]
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
        return path

    @classmethod
    def read(cls, path: Path) -> "ExperimentResult":
        """Return the result in a file."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            main = [content.pop(name) for name in FIELDS]
            fingerprint = content.pop("fingerprint", None)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise StoreError(
                f"{path} is not an experiment's result ({type(error).__name__}: {error})."
                " Run `ffmem experiment` again."
            ) from None
        name, paper, settings, rows, _ = main
        if not (
            isinstance(settings, dict)
            and isinstance(rows, list)
            and all(isinstance(row, dict) for row in rows)
        ):
            raise StoreError(
                f"{path} is not an experiment's result: settings must be an object, and rows a list"
                " of objects. Run `ffmem experiment` again."
            )
        if (found := settings.get("format", FORMAT)) != FORMAT:
            raise StoreError(
                f"{path} has format {found}; this version of ffmem reads format {FORMAT}."
                " Measure it again with `ffmem experiment`, or use the version that wrote it."
            )
        return cls(str(name), str(paper), settings, rows, content, fingerprint)


def _layout(part: Any) -> str:
    """Return JSON with one line for each row of a table, and one for each setting."""
    dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return "[\n " + ",\n ".join(map(dump, part)) + "\n]"
    if isinstance(part, dict) and part:
        items = [f"{dump(name)}: {dump(value)}" for name, value in part.items()]
        return "{\n " + ",\n ".join(items) + "\n}"
    return dump(part)


READ_AS = ("unit", "column", "detokenize", "limit", "content_only")
"""The options that say how a corpus is read."""


def corpus_like(index: "Index", name: str | Path, **given: Any) -> "Corpus":
    """Return a corpus that is read as the index's first one was, but for what is given."""
    from ffmem.corpus.corpus import Corpus
    from ffmem.corpus.sources import is_wikitext

    first = index.manifest.corpus.sources[0]
    inherited: dict[str, Any] = {"unit": first.unit, "column": first.column}
    inherited["content_only"] = first.content_only
    if not is_wikitext(first.source):  # whose name implies it
        inherited["detokenize"] = first.detokenize
    return Corpus(str(name), **(inherited | given))


def index_settings(index: "Index", dtype: str | None, seed: int) -> dict[str, Any]:
    """Return what every result says about its index; `dtype` is of the model, if one ran."""
    manifest, layout = index.manifest, index.layout
    return {
        "format": FORMAT,
        "model": manifest.model.source,
        "model_hash": manifest.model.hash,
        "layers": manifest.model.layers,
        "memories": layout.per_layer,
        **({"experts": layout.n_experts} if layout.has_experts else {}),
        "vocabulary": manifest.model.vocabulary,
        "activation": manifest.model.activation,
        "gated": manifest.model.gated,
        "kind": manifest.model.memory,
        "dtype": dtype or manifest.dtype,
        # Where an index has no values to project, y is still read so.
        "projection": manifest.projection if manifest.model.has_values else "folded",
        "start": manifest.start.token,
        "corpus": {
            "sources": [source.source for source in manifest.corpus.sources],
            "hash": manifest.corpus.hash,
            "sentences": manifest.corpus.sentences,
            "tokens": manifest.corpus.tokens,
            "limited": any(source.limit is not None for source in manifest.corpus.sources),
        },
        "t": manifest.t,
        "prefixes": manifest.prefixes,
        "compat": manifest.compat,
        "seed": seed,
    }


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# Claims

HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold"
INCOMPARABLE = "cannot be compared"
VERDICTS = (HOLDS, PARTLY, FAILS, INCOMPARABLE)

MIN_CASES = 30
"""Memories, prefixes or triggers that a verdict needs at least."""

MIN_LAYERS = 6
"""Layers that a claim about depth needs: with five, chance alone gives a correlation of 0.5 in
almost one model out of four."""


class PaperValue(NamedTuple):
    """A value that the paper's text states; none is read off a figure."""

    quantity: str
    value: str
    where: str


class Evidence(NamedTuple):
    """What a model shows about a claim."""

    shown: str
    n: int
    """Cases behind it: the smallest number behind any of the compared numbers."""
    unit: str
    """What the cases are: memories, prefixes, …"""
    holds: bool
    partly: bool
    incomparable: str | None = None
    """Why this does not mean what the paper's number does."""

    @classmethod
    def by_layer(
        cls, shown: str, rows: Sequence[Row], unit: str, inside: Sequence[bool]
    ) -> "Evidence":
        """Return evidence of a rule per layer: it holds in all, or in part in half of them."""
        return cls(shown, smallest_n(rows), unit, all(inside), 2 * sum(inside) >= len(inside))

    @classmethod
    def of_trend(
        cls,
        rows: Sequence[Row],
        field: str,
        sign: int,
        unit: str,
        name: str = "",
        form: Callable[[Any], str] = format_number,
    ) -> "Evidence | None":
        """Return evidence that a field rises (+1) or falls (−1) with depth: Spearman's ρ of 0.5."""
        along = trend([row[field] for row in rows])
        if along is None:
            return None
        first, last = rows[0], rows[-1]
        shown = (
            f"{name}{form(first[field])} in {layer_of(first)} and {form(last[field])} in"
            f" {layer_of(last)}; correlation with depth {format_number(along)}"
        )
        return cls(shown, smallest_n(rows), unit, sign * along >= 0.5, sign * along > 0)


@dataclass(frozen=True)
class ClaimCheck:
    """A claim of the paper, and the rule that decides from the rows whether a model supports it."""

    claim: str
    rule: str
    """Continues "Holds if …"."""
    check: Callable[[ExperimentResult], Evidence | None]
    """Returns None where the rows have nothing to compare."""
    values: tuple[PaperValue, ...]
    over_depth: bool


def claim(
    text: str, rule: str, *values: PaperValue, over_depth: bool = False
) -> Callable[[Callable[[ExperimentResult], Evidence | None]], ClaimCheck]:
    """Declare the check of a claim, as a decorator; `rule` continues "Holds if …".

    `values` are the paper's own that belong to it. A claim that compares layers (`over_depth`)
    needs `MIN_LAYERS` of them.
    """
    return lambda check: ClaimCheck(text, rule, check, values, over_depth)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper beside what a model shows."""

    claim: str
    experiment: str
    paper: str
    """The value in the paper's text, with its place."""
    model: str
    n: str
    """The number of cases behind the verdict, in words."""
    verdict: str
    rule: str
    """How the verdict follows from the rows."""


def check_claims(results: Sequence[ExperimentResult]) -> list[Claim]:
    """Return the claims that some results speak to, in the paper's order."""
    by_name = {result.experiment: result for result in results}
    return [
        _judge(check, by_name[experiment.name])
        for experiment in find_all(by_name)
        for check in experiment.claims
    ]


def _judge(check: ClaimCheck, result: ExperimentResult) -> Claim:
    evidence = check.check(result)
    shown, n, verdict = MISSING, MISSING, INCOMPARABLE
    if evidence is not None:
        shown, n = evidence.shown, f"n = {format_number(evidence.n)} {evidence.unit}"
        if evidence.incomparable:
            shown = f"{shown}; {evidence.incomparable}" if shown else evidence.incomparable
        elif evidence.n < MIN_CASES:
            shown += f"; too few: {MIN_CASES} are needed"
        elif check.over_depth and result.n_layers < MIN_LAYERS:
            shown += f"; too few layers: {MIN_LAYERS} are needed"
        else:
            verdict = HOLDS if evidence.holds else PARTLY if evidence.partly else FAILS
    values = check.values
    texts = [f"{one.quantity}: {one.value}" if len(values) > 1 else one.value for one in values]
    paper = f"{'; '.join(texts)} ({values[0].where})" if values else "no number in the text"
    rule = f"Holds if {check.rule}."
    return Claim(check.claim, result.experiment, paper, shown, n, verdict, rule)


# Several models in one chart


class PaperMark(NamedTuple):
    """A value of the paper's text as a chart shows it: a number or a range, at some layers."""

    value: PaperValue
    low: float
    high: float | None = None
    """The upper end of a range; None for one number."""
    layers: tuple[int, int] = (1, PAPER_LAYERS)
    """The paper's layers that it is about."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One column of an experiment's rows in the chart of several models.

    Rows of layers become a curve per model over relative depth; a row without a layer, a bar.
    """

    title: str
    value: str
    """The column."""
    rows: Callable[[ExperimentResult], Sequence[Row]] = lambda result: result.rows
    """Which rows are shown."""
    interval: tuple[str, str] | None = None
    """The columns of its 95 % interval."""
    control: tuple[str, str] | None = None
    """The column of a baseline or control, and what it is."""
    percent: bool = True
    """Whether it is a share, which charts show in %."""
    log: bool = False
    paper: tuple[PaperMark, ...] = ()

    def points(self, result: ExperimentResult) -> list[Row]:
        """Return the rows that have the column, under the names that the chart knows."""
        names = dict(zip(("low", "high"), self.interval or (), strict=False))
        names |= {"control": self.control[0]} if self.control else {}
        return [
            ({"layer": row["layer"]} if "layer" in row else {})
            | {"value": row[self.value]}
            | {name: row.get(column) for name, column in names.items()}
            for row in rows_with(self.rows(result), self.value)
        ]


# Experiments


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table of the paper."""

    name: str
    paper: str
    title: str
    description: str
    """What is measured."""
    finding: str
    """What the paper found, in one sentence."""
    measure: Callable[["ExperimentContext"], tuple[list[Row], Row]]
    """Returns the rows, and what belongs to no row."""
    chart: Callable[[ExperimentResult], "Chart"]
    summary: Callable[[ExperimentResult], str]
    """What this model shows, in one or two sentences."""
    paper_values: tuple[PaperValue, ...] = ()
    claims: tuple[ClaimCheck, ...] = ()
    panels: tuple[Panel, ...] = ()
    """What `ffmem report --compare` shows of it for several models in one chart."""
    metrics: tuple[type[Any], ...] = ()
    """Metrics of the forward pass over the sample; none if it reads only the index."""
    needs_model: bool = True
    needs_values: bool = False
    """Whether it reads static values, which memories of a lambda layer do not have."""
    options: tuple[str, ...] = ()
    """Options of the config that this experiment alone reads."""
    notes: dict[str, str] = field(default_factory=dict)
    """What to know about its numbers, by kind of memory; `experts` of mixtures of experts."""

    def run(self, context: "ExperimentContext") -> ExperimentResult:
        """Measure it."""
        rows, also = self.measure(context)
        settings = context.settings(self.needs_model)
        settings |= {name: getattr(context.config, name) for name in self.options}
        if self.metrics:
            settings |= {"sample": context.sample_settings(), "threads": context.threads}
        note = self.notes.get("experts" if "experts" in settings else settings["kind"] or "")
        if note:
            also = also | {"note": note}
        return ExperimentResult(self.name, self.paper, settings, rows, also)

    def describe(self, result: ExperimentResult) -> str:
        """Return what was measured, and what that means for memories of this kind."""
        note = result.also.get("note")
        return f"{self.description} {note}" if note else self.description

    @property
    def paper_says(self) -> str:
        """What the paper found, with the values of its text."""
        values = "; ".join(
            f"{one.quantity}: {one.value} ({one.where})" for one in self.paper_values
        )
        return f"{self.finding} {values[0].upper()}{values[1:]}." if values else self.finding


def find(name: str) -> Experiment:
    """Return the experiment of a name."""
    if name not in NAMES:
        raise FfmemError(f"Unknown experiment {name!r}. Experiments: {', '.join(NAMES)}.")
    module = import_module(f"ffmem.experiments.{name.replace('-', '_')}")
    experiment: Experiment = module.EXPERIMENT
    return experiment


def find_all(names: Iterable[str] = NAMES) -> list[Experiment]:
    """Return the experiments of some names, in the paper's order."""
    found = {name: find(name) for name in names}
    return [found[name] for name in NAMES if name in found]
