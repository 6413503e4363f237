"""What a report says, before it is HTML or Markdown: one object that both templates read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any, NamedTuple

from ffmem.cells import Cell
from ffmem.experiments.kinds import LAMBDA, PERSISTENT, SOFTMAX
from ffmem.experiments.names import FROM_VALUES, NO_STATIC_VALUES
from ffmem.experiments.result import Result, Row
from ffmem.indexing.memory import visible, visible_token
from ffmem.indexing.store import Index
from ffmem.reporting.commands import index_commands, report_command
from ffmem.reporting.examples import (
    Card,
    Predictive,
    Shared,
    cards,
    predictive_examples,
    shared_tokens,
    shortened,
)
from ffmem.reporting.findings import TITLES, VERDICTS, Claim, claims, measured, paper_says, shows
from ffmem.reporting.limits import limits
from ffmem.reporting.numbers import MISSING, deep, n_layers_of, number, span
from ffmem.reporting.pattern_examples import KeyExample, KeyTable, kept_examples

_TOKENS = ("token", "unigram_token", "residual_top", "ff_top", "output_top", "next_token")
_COMMON = (
    *("model", "model_hash", "dtype", "projection", "corpus", "seed", "gated", "kind", "layers"),
    *("memories", "sample", "vocabulary", "activation", "start", "t", "prefixes", "compat"),
)
_KINDS = {
    SOFTMAX: "softmax",
    PERSISTENT: "persistent slots in attention",
    LAMBDA: "static keys of lambda layers, without static values",
}
_SUBJECTS = {
    SOFTMAX: "Its softmax memories",
    PERSISTENT: "The persistent slots of its attention",
    LAMBDA: "The static keys of its lambda layers",
}
_READ = {LAMBDA: "y is read"}
_ATTRIBUTIONS = {
    "wikitext": "WikiText: text of Wikipedia's contributors, under CC BY-SA; excerpts of at most"
    " ten words."
}


class Entry(NamedTuple):
    """One entry of a table of data."""

    text: str
    link: str | None
    """The memory whose card it names."""
    is_number: bool


@dataclass(frozen=True)
class Section:
    """One experiment of the report."""

    name: str
    title: str
    paper: str
    measured: str
    paper_says: str
    shows: str
    settings: str
    sample: str
    columns: list[str]
    entries: list[list[Entry]]


class Page:
    """Everything that a report shows of one model."""

    def __init__(
        self, results: Sequence[Result], index: Index | None = None, command: str | None = None
    ) -> None:
        self.results = sorted(results, key=lambda result: list(TITLES).index(result.experiment))
        self.index = index
        # Figure 2 is read from the index: the others say in which dtype the model ran.
        self.settings = min(self.results, key=lambda one: one.experiment == "patterns").settings
        self.command = command or report_command(self.results)
        self.index_commands = index_commands(self.settings, index)
        self.version = version("ffmem")

    @property
    def model(self) -> str:
        """The model's name."""
        return visible(str(self.settings.get("model", "a model")))

    @property
    def corpus(self) -> str:
        """The sources of the index."""
        return visible(", ".join(self._sources()))

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return max(n_layers_of(result) for result in self.results)

    @property
    def gated(self) -> bool:
        """Whether coefficients have signs to tell apart."""
        return bool(self.settings.get("gated"))

    @property
    def kind(self) -> str:
        """The kind of its memories, of a model of ours."""
        return str(self.settings.get("kind"))

    @property
    def subject(self) -> str:
        """What of the model is read as memories."""
        return _SUBJECTS.get(self.kind, "Its feed-forward layers")

    @property
    def facts(self) -> list[tuple[str, str]]:
        """How the report was made, as pairs of what and how."""
        settings, corpus = self.settings, self._corpus()
        memories, projection = settings.get("memories"), settings.get("projection", MISSING)
        gated = _KINDS.get(self.kind, "gated" if self.gated else "ungated")
        if isinstance(memories, list):
            shape = f"{self.n_layers} layers with {number(sum(memories))} memories in all"
        else:
            shape = f"{self.n_layers} layers × {number(memories)} memories"
        read = [
            f"{number(corpus[what])} {what}" for what in ("sentences", "tokens") if what in corpus
        ]
        facts = [
            (
                "Model",
                f"{self.model} ({shape}, {gated}; hash {str(settings.get('model_hash', ''))[:12]})",
            ),
            ("Index over", ", ".join([self.corpus, *read])),
            ("Sample of Section 5", self._sample()),
            ("Arithmetic", str(settings.get("dtype", MISSING))),
            (_READ.get(self.kind, "Values and y are read"), str(projection)),
            ("Start token", _start(settings)),
            ("Seed", str(settings.get("seed", MISSING))),
            ("ffmem", self.version),
        ]
        return [(what, how) for what, how in facts if how]

    @cached_property
    def claims(self) -> list[Claim]:
        """The table at the top."""
        return claims(self.results)

    @property
    def verdicts(self) -> list[tuple[str, int]]:
        """How many claims got each verdict."""
        given = [claim.verdict for claim in self.claims]
        return [(verdict, given.count(verdict)) for verdict in VERDICTS]

    @property
    def missing(self) -> list[str]:
        """Titles of the experiments that were not measured; `patterns` is told apart."""
        known = {"patterns", *self._unmeasurable, *(one.experiment for one in self.results)}
        return [title for name, title in TITLES.items() if name not in known]

    @property
    def left_out(self) -> str:
        """Which experiments cannot be measured on memories of this kind, and why."""
        if not self._unmeasurable:
            return ""
        titles = [f"{TITLES[name]} ({name})" for name in self._unmeasurable]
        why = f"{NO_STATIC_VALUES[0].upper()}{NO_STATIC_VALUES[1:]}, and these read values"
        also = "so does the definition “effect” of active memories"
        return f"{why}: {'; '.join(titles)}; {also}. They are left out."

    @property
    def _unmeasurable(self) -> tuple[str, ...]:
        return FROM_VALUES if self.kind == LAMBDA else ()

    @property
    def has_patterns(self) -> bool:
        """Whether patterns were measured."""
        return any(result.experiment == "patterns" for result in self.results)

    @property
    def depths(self) -> str:
        """Which layers stand for the paper's upper ones."""
        n_layers = self.n_layers
        return f"{span(deep(n_layers, 10))} and {span(deep(n_layers, 11))} of {n_layers}"

    @cached_property
    def sections(self) -> list[Section]:
        """The experiments that there are, in the paper's order."""
        return [self._section(result) for result in self.results]

    @cached_property
    def shared(self) -> list[Shared]:
        """What stands for Table 1 where nobody has looked for patterns."""
        return shared_tokens(self.index) if self.index and not self.keys else []

    @cached_property
    def keys(self) -> list[KeyExample]:
        """Table 1, where patterns are kept."""
        return self._examples[0]

    @cached_property
    def key_table(self) -> KeyTable | None:
        """Table 3, where patterns are kept."""
        return self._examples[1]

    @cached_property
    def _examples(self) -> tuple[list[KeyExample], KeyTable | None]:
        return kept_examples(self.index) if self.index and self.has_patterns else ([], None)

    @cached_property
    def predictive(self) -> list[Predictive]:
        """Table 2."""
        return [
            example
            for result in self.results
            if result.experiment == "predictive-values"
            for example in predictive_examples(self.index, result)
        ]

    @cached_property
    def cards(self) -> list[Card]:
        """Every memory that the report names."""
        if self.index is None:
            return []
        cited = [(row.cell, row.sign) for row in self.keys]
        cited += [(row.cell, row.sign) for row in self.shared]
        cited += [(row.cell, row.sign) for row in self.predictive]
        for result in self.results:
            cited += [(r["cell"], int(r.get("sign") or 1)) for r in result.rows if "cell" in r]
        return cards(self.index, cited)

    @cached_property
    def linked(self) -> frozenset[str]:
        """The cells that have a card."""
        return frozenset(card.cell for card in self.cards)

    @cached_property
    def featured(self) -> frozenset[str]:
        """The cells of Tables 1 and 2 that have a card."""
        named = {row.cell for row in self.shared} | {row.cell for row in self.predictive}
        named |= {row.cell for row in self.keys}
        return frozenset(named & self.linked)

    @property
    def limits(self) -> list[str]:
        """What a reader must know to judge the numbers."""
        return limits(self.settings)

    @property
    def attributions(self) -> list[str]:
        """Whose text the excerpts are."""
        sources = " ".join([*self._sources(), self._sample()])
        return [whose for name, whose in _ATTRIBUTIONS.items() if name in sources]

    def _corpus(self) -> Row:
        corpus = self.settings.get("corpus")
        return corpus if isinstance(corpus, dict) else {"sources": [str(corpus or MISSING)]}

    def _sources(self) -> list[str]:
        return [str(source) for source in self._corpus().get("sources", [])]

    def _sample(self) -> str:
        for result in self.results:
            if result.settings.get("sample"):
                return visible(sample_line(result))
        return ""

    def _section(self, result: Result) -> Section:
        columns = list(dict.fromkeys(name for row in result.rows for name in row))
        name = result.experiment
        return Section(
            name=name,
            title=TITLES[name],
            paper=visible(result.paper),
            measured=measured(result),
            paper_says=paper_says(name),
            shows=visible(shows(result)),
            settings=visible(settings_line(result)),
            sample=visible(sample_line(result)),
            columns=columns,
            entries=[[self._entry(column, row) for column in columns] for row in result.rows],
        )

    def _entry(self, column: str, row: Row) -> Entry:
        value = row.get(column)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        link = str(Cell.parse(value)) if column == "cell" and isinstance(value, str) else None
        return Entry(_shown(column, value), link if link in self.linked else None, is_number)


def settings_line(result: Result) -> str:
    """Return the settings of one experiment, those of the whole report aside."""
    own = {k: v for k, v in result.settings.items() if k not in _COMMON}
    found = own | {k: v for k, v in result.also.items() if not isinstance(v, list | dict)}
    for said in ("rule", "protocol", "note"):  # by its section
        found.pop(said, None)
    common = [str(result.settings[k]) for k in ("dtype", "projection") if k in result.settings]
    pairs = [
        f"{name.replace('_', ' ')} {_shown('layer' if name == 'upper_from' else name, value)}"
        for name, value in found.items()
        if not isinstance(value, dict)
    ]
    return " · ".join([*common, f"seed {result.settings.get('seed', MISSING)}", *pairs])


def sample_line(result: Result) -> str:
    """Return what the rows are computed over."""
    sample = result.settings.get("sample")
    if not sample:
        sizes = [row["n"] for row in result.rows if row.get("n") is not None]
        if not sizes:
            return f"{number(len(result.rows))} rows"
        low, high = min(sizes), max(sizes)
        return f"n = {number(low)}" + (f" to {number(high)} per row" if high > low else " per row")
    prefixes = number(sample.get("prefixes"))
    if "prompt" in sample:
        return f"one prompt, {prefixes} prefix"
    asked = sample.get("asked")
    drawn = "one per sentence" if sample.get("draw") == "sentences" else "over all tokens"
    told = "all" if asked == "all" else f"{number(asked)} asked for, {drawn}"
    cut = f"; {number(sample['cut'])} sentences cut at the context" if sample.get("cut") else ""
    return f"{prefixes} prefixes of {sample.get('corpus', MISSING)} ({told}{cut})"


def _start(settings: Row) -> str:
    if "start" not in settings:
        return ""
    return "none" if settings["start"] is None else visible_token(str(settings["start"]))


def _shown(column: str, value: Any) -> str:
    """Return an entry of a row as text; layers as figures count them."""
    if column in _TOKENS and (value is None or isinstance(value, str)):
        return visible_token(value)
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−")
    if isinstance(value, list):
        return "  ".join(visible_token(str(one)) for one in value)
    if isinstance(value, int):
        return str(value + 1 if column == "layer" else value).replace("-", "−")
    return visible(shortened(str(value)))
