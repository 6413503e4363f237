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
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from jaxtyping import Float32, Int64
from numpy import ndarray

from ffmem.cli_options import check_options, option
from ffmem.errors import FfmemError, StoreError
from ffmem.files import write_text
from ffmem.models.arguments import MAX_THREADS
from ffmem.text import MISSING, format_number

if TYPE_CHECKING:
    from ffmem.experiments.charts import Chart
    from ffmem.experiments.context import ExperimentContext
    from ffmem.indexing.store import Index

Row = dict[str, Any]

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

SOFTMAX, PERSISTENT, LAMBDA = "softmax", "persistent", "lambda"
"""Kinds of memory, as an index's manifest names them, whose coefficients are not activations.

softmax      m = softmax(x · Kᵀ):                                m > 0,  Σ m = 1
persistent   m = attention on slots, in one softmax with tokens: m > 0,  Σ m < 1 in each head
lambda       m = x · k where a token lies at that distance, else 0; no static value
"""

DRAWS = ("sentences", "tokens")


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """The choices of a measurement: options of `ffmem experiment` and `ffmem report`."""

    sample: int | str = option(
        "Prefixes to sample for Section 5.", 4000, minimum=1, choices=("all",)
    )
    draw: str = option(
        "Draw one prefix per sentence, or draw from all prefixes.", "sentences", choices=DRAWS
    )
    seed: int = option("Random seed.", 0, minimum=0)
    per_layer: int = option(
        "Memories per layer for token removal; the paper took 100.", 10, minimum=1
    )
    triggers: int = option(
        "Triggers per memory for token removal; the paper took 50.", 20, minimum=1
    )
    threads: int | None = option(
        "CPU threads. The last bits of a number may depend on it.",
        None,
        minimum=1,
        maximum=MAX_THREADS,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def n_prefixes(self) -> int | None:
        """How many prefixes to sample; None for all."""
        return self.sample if isinstance(self.sample, int) else None


FIELDS = ("experiment", "paper", "settings", "rows", "quoted")


@dataclass(frozen=True)
class ExperimentResult:
    """One experiment on one model: `OUT/NAME.json`."""

    experiment: str
    paper: str
    """Figure, table or section of the paper."""
    settings: Row
    rows: list[Row]
    also: Row = field(default_factory=dict)
    """What belongs to no row, such as `auc`; it stands beside `rows` in the file."""
    fingerprint: str | None = None
    """SHA-256 of everything that decides the numbers; None if they are always measured again."""

    @property
    def quoted(self) -> list[dict[str, str]]:
        """The paper's own values."""
        return [value._asdict() for value in find(self.experiment).paper_values]

    def to_dict(self) -> Row:
        """Return the content of the file."""
        main = (self.experiment, self.paper, self.settings, self.rows, self.quoted)
        content = dict(zip(FIELDS, main, strict=True))
        if self.fingerprint is not None:
            content["fingerprint"] = self.fingerprint
        return content | self.also

    def __str__(self) -> str:
        experiment = find(self.experiment)
        claims = [f"{one.verdict} ({one.n}): {one.claim}" for one in check_claims([self])]
        return "\n".join([f"{experiment.title} ({self.paper})", experiment.summary(self), *claims])

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
        return cls(main[0], main[1], main[2], main[3], content, fingerprint)


def _layout(part: Any) -> str:
    """Return JSON with one line for each row of a table, and one for each setting."""
    dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return "[\n " + ",\n ".join(map(dump, part)) + "\n]"
    if isinstance(part, dict) and part:
        items = [f"{dump(name)}: {dump(value)}" for name, value in part.items()]
        return "{\n " + ",\n ".join(items) + "\n}"
    return dump(part)


class Measurement(NamedTuple):
    """What an experiment measured."""

    rows: list[Row]
    also: Row = {}  # noqa: RUF012  (never written to)
    """What belongs to no row."""


class PaperValue(NamedTuple):
    """A value that the paper's text states; none is read off a figure."""

    quantity: str
    value: str
    where: str


SECTION_5_SAMPLE = PaperValue("sample of Section 5", "4,000 validation prefixes", "Sec. 5.1")


class LayerWork(NamedTuple):
    """What one layer does on some prefixes."""

    coefficients: Float32[ndarray, "row memory"]
    gate: Float32[ndarray, "row memory"] | None
    """The gate's pre-activation, in gated models."""
    contributions: Float32[ndarray, "row memory"] | None
    """|m|·‖v‖; None where values are not static."""
    ff_top: Int64[ndarray, " row"] | None
    """top(y); None where no metric of the pass reads predictions."""
    output_top: Int64[ndarray, " row"] | None
    """top(o)."""
    trace: Any
    """The rows' `LayerTrace`: tensors on the model's device."""


class SampleMetric:
    """Numbers by prefix and layer, filled in by one forward pass over Section 5's sample.

    An experiment that needs something new of the pass subclasses this in its own file.
    """

    needs_values: ClassVar[bool] = False
    """Whether it reads static values."""
    needs_predictions: ClassVar[bool] = False
    """Whether it reads top(y) and top(o)."""

    def __init__(self, context: "ExperimentContext", n_prefixes: int) -> None:
        raise NotImplementedError

    def read(self, prefixes: Int64[ndarray, " row"], layer: int, work: LayerWork) -> None:
        """Take in what a layer does on some prefixes, given by their numbers in the sample."""
        raise NotImplementedError


HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold"
INCOMPARABLE = "cannot be compared"
VERDICTS = (HOLDS, PARTLY, FAILS, INCOMPARABLE)
NO_NUMBER = "no number in the text"

MIN_CASES = 30
"""Memories, prefixes or triggers that a verdict needs at least."""

MIN_LAYERS = 6
"""Layers that a claim about depth needs: with five, chance alone gives a correlation of 0.5 in
almost one model out of four."""


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


@dataclass(frozen=True, kw_only=True)
class ClaimCheck:
    """A claim of the paper, and the rule that decides from the rows whether a model supports it."""

    claim: str
    rule: str
    """Continues "Holds if …"."""
    check: Callable[[ExperimentResult], Evidence | None]
    """Returns None where the rows have nothing to compare."""
    values: tuple[int, ...] = ()
    """Which of the experiment's `paper_values` belong to it."""
    min_cases: int = MIN_CASES
    over_depth: bool = False
    """Whether it compares layers, and so needs `MIN_LAYERS`."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper beside what a model shows."""

    claim: str
    experiment: str
    paper: str
    """The value in the paper's text, with its place."""
    model: str
    n: str
    """How many cases the verdict rests on, in words."""
    verdict: str
    rule: str
    """How the verdict follows from the rows."""


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
    measure: Callable[["ExperimentContext"], Measurement]
    chart: Callable[[ExperimentResult], "Chart"]
    summary: Callable[[ExperimentResult], str]
    """What this model shows, in one or two sentences."""
    paper_values: tuple[PaperValue, ...] = ()
    claims: tuple[ClaimCheck, ...] = ()
    metrics: tuple[type[Any], ...] = ()
    """What it needs of the forward pass over the sample; nothing if it reads the index alone."""
    needs_model: bool = True
    needs_values: bool = False
    """Whether it reads static values, which memories of a lambda layer do not have."""
    options: tuple[str, ...] = ()
    """Settings of the context that this experiment alone reads."""
    notes: dict[str, str] = field(default_factory=dict)
    """What to know about its numbers, by kind of memory."""

    def run(self, context: "ExperimentContext") -> ExperimentResult:
        """Measure it."""
        measured = self.measure(context)
        settings = context.settings(self.needs_model)
        settings |= {name: getattr(context, name) for name in self.options}
        if self.metrics:
            settings |= {"sample": context.sample_settings(), "threads": context.threads}
        note = self.notes.get(settings["kind"] or "")
        also = measured.also | ({"note": note} if note else {})
        return ExperimentResult(self.name, self.paper, settings, measured.rows, also)

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


def check_claims(results: Sequence[ExperimentResult]) -> list[Claim]:
    """Return the claims that some results speak to, in the paper's order."""
    by_name = {result.experiment: result for result in results}
    return [
        _judge(experiment, check, by_name[experiment.name])
        for experiment in find_all(by_name)
        for check in experiment.claims
    ]


def _judge(experiment: Experiment, check: ClaimCheck, result: ExperimentResult) -> Claim:
    from ffmem.experiments.rows import count_layers

    evidence = check.check(result)
    shown, n, verdict = MISSING, MISSING, INCOMPARABLE
    if evidence is not None:
        shown, n = evidence.shown, f"n = {format_number(evidence.n)} {evidence.unit}"
        layers = count_layers(result)
        if evidence.incomparable:
            shown = f"{shown}; {evidence.incomparable}" if shown else evidence.incomparable
        elif evidence.n < check.min_cases:
            shown += f"; too few to judge, {check.min_cases} are needed"
        elif check.over_depth and layers < MIN_LAYERS:
            shown += f"; too few layers to judge, {MIN_LAYERS} are needed"
        else:
            verdict = HOLDS if evidence.holds else PARTLY if evidence.partly else FAILS
    values = [experiment.paper_values[place] for place in check.values]
    texts = [f"{one.quantity}: {one.value}" if len(values) > 1 else one.value for one in values]
    paper = f"{'; '.join(texts)} ({values[0].where})" if values else NO_NUMBER
    rule = f"Holds if {check.rule}."
    return Claim(check.claim, experiment.name, paper, shown, n, verdict, rule)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def index_settings(index: "Index", dtype: str | None, seed: int) -> dict[str, Any]:
    """Return what every result says about its index; `dtype` is of the model, if one ran."""
    manifest = index.manifest
    return {
        "model": manifest.model.source,
        "model_hash": manifest.model.hash,
        "layers": manifest.model.layers,
        "memories": manifest.model.layout.per_layer,
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
