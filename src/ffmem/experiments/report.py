"""What a report says about one model: claims, examples, figures, how it was made.

`Report` is the content; `render.py` lays it out as HTML and as Markdown. Web pages show its
sections.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any, NamedTuple

from ffmem.cells import Cell
from ffmem.corpus.corpus import Corpus
from ffmem.experiments import base
from ffmem.experiments.base import (
    READ_AS,
    VERDICTS,
    Claim,
    ExperimentResult,
    check_claims,
    find,
    find_all,
)
from ffmem.experiments.definitions import KINDS, SUBJECTS, definitions
from ffmem.experiments.examples import (
    Excerpt,
    KeyExample,
    KeyTable,
    MemoryCard,
    PredictiveExample,
    memory_cards,
    pattern_tables,
    predictive_examples,
)
from ffmem.experiments.rows import format_layers, upper_layers
from ffmem.indexing.config import IndexConfig
from ffmem.indexing.memory import visible, visible_token
from ffmem.indexing.store import Index
from ffmem.models.arguments import IN_MEMORY
from ffmem.text import MISSING, format_number, format_share, pluralize, shorten_prefix

TITLE = "“Transformer Feed-Forward Layers Are Key-Value Memories” (Geva et al., 2021)"


# One experiment


class Entry(NamedTuple):
    """One entry of a table of data."""

    text: str
    cell: str | None
    """The memory that it names."""
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


def section_of(result: ExperimentResult) -> Section:
    """Return what a report says about an experiment."""
    experiment = find(result.experiment)
    columns = list(dict.fromkeys(field for row in result.rows for field in row))
    return Section(
        name=experiment.name,
        title=experiment.title,
        paper=visible(result.paper),
        measured=experiment.describe(result),
        paper_says=experiment.paper_says,
        shows=visible(experiment.summary(result)),
        settings=visible(settings_line(result)),
        sample=visible(sample_line(result)),
        columns=columns,
        entries=[[_entry(column, row.get(column)) for column in columns] for row in result.rows],
    )


def _entry(column: str, value: Any) -> Entry:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    cell = str(Cell.parse(value)) if column == "cell" and isinstance(value, str) else None
    return Entry(format_entry(column, value), cell, is_number)


_TOKENS = ("token", "unigram_token", "residual_top", "ff_top", "output_top", "next_token")


def format_entry(column: str, value: Any) -> str:
    """Return a value of a row as people read it; layers as figures count them."""
    if column in _TOKENS and (value is None or isinstance(value, str)):
        return visible_token(value)
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return format_number(value + 1 if column == "layer" else value, digits=4)
    if isinstance(value, list):
        return "  ".join(visible_token(str(one)) for one in value)
    return visible(shorten_prefix(str(value)))


def settings_line(result: ExperimentResult) -> str:
    """Return the settings of one experiment, and its numbers that belong to no row."""
    own = (*find(result.experiment).options, "threads")
    found = {name: result.settings[name] for name in own if name in result.settings}
    found |= {
        name: value
        for name, value in result.also.items()
        if name not in ("rule", "protocol", "note") and not isinstance(value, list | dict)
    }
    pairs = [
        f"{name.replace('_', ' ')} {format_entry('layer' if name == 'upper_from' else name, value)}"
        for name, value in found.items()
    ]
    common = [str(result.settings[name]) for name in ("dtype", "projection")]
    return " · ".join([*common, f"seed {result.settings['seed']}", *pairs])


def sample_line(result: ExperimentResult) -> str:
    """Return what the rows are computed over."""
    sample = result.settings.get("sample")
    if not sample:
        sizes = [row["n"] for row in result.rows_with("n")]
        if not sizes:
            return f"{format_number(len(result.rows))} rows"
        low, high = format_number(min(sizes)), format_number(max(sizes))
        return f"n = {low} per row" if low == high else f"n = {low} to {high} per row"
    prefixes = format_number(sample["prefixes"])
    drawn = "one per sentence" if sample["draw"] == "sentences" else "over all tokens"
    requested = sample["requested"]
    how = "all" if requested == "all" else f"{format_number(requested)} requested, {drawn}"
    if sample["cut"]:
        how += f"; {format_number(sample['cut'])} sentences cut at the context"
    return f"{prefixes} prefixes of {sample['corpus']} ({how})"


# Tables


class Link(NamedTuple):
    """The name of a memory, which leads to its card where there is one."""

    cell: str


class Token(NamedTuple):
    """A token as the model has it."""

    text: str


class Small(NamedTuple):
    """A side remark."""

    text: str


Piece = str | Excerpt | Link | Token | Small
"""A part of a table's entry; each kind of piece has its look in HTML and in Markdown."""


@dataclass(frozen=True)
class Table:
    """A table of examples."""

    id: str
    title: str
    source: str
    note: list[Piece]
    columns: list[str]
    rows: list[list[list[Piece]]]
    legend: list[list[Piece]] = field(default_factory=list)
    """A list above the table."""


# The report


class Report:
    """Everything that a report says about one model."""

    def __init__(self, results: Sequence[ExperimentResult], index: Index) -> None:
        self.results = sorted(results, key=lambda result: base.NAMES.index(result.experiment))
        self.index = index
        # Figure 2 is read from the index: the others say in which dtype the model ran.
        self.settings = min(self.results, key=lambda one: one.experiment == "patterns").settings
        self.commands = [*index_commands(index), report_command(self.results)]
        self.version = version("ffmem")
        self.model = visible(str(self.settings["model"]))
        self.n_layers = max(result.n_layers for result in self.results)
        self.gated = bool(self.settings["gated"])
        self.kind = self.results[0].kind
        self.sources = visible(", ".join(map(str, self.settings["corpus"]["sources"])))
        self.sample = next(
            (visible(sample_line(one)) for one in self.results if one.settings.get("sample")), ""
        )
        self.sections = [section_of(result) for result in self.results]
        self.claims: list[Claim] = check_claims(self.results)
        self.definitions = definitions(self.kind, self.settings)

    @property
    def lead(self) -> str:
        """What the report is, in one sentence."""
        subject = SUBJECTS.get(self.kind, "Its feed-forward layers")
        figures = "all figures that need no values" if self.left_out else "every figure"
        return (
            f"{subject} read as key-value memories over {self.sources}: {figures} of {TITLE},"
            " measured on this model."
        )

    @property
    def verdicts(self) -> list[tuple[str, int]]:
        """How many claims got each verdict, those that some got."""
        given = [claim.verdict for claim in self.claims]
        return [(verdict, given.count(verdict)) for verdict in VERDICTS if verdict in given]

    @property
    def claims_note(self) -> str:
        """How to read the table of claims."""
        n = self.n_layers
        depths = f"{format_layers(upper_layers(n, 10))} and {format_layers(upper_layers(n, 11))}"
        return (
            "The paper’s model has 16 layers; its layers are compared with those of the same"
            f" relative depth. Its layers 10–16 and 11–16 are {depths} of {n} here. The paper's"
            " numbers are those in its text. A verdict follows from the data by the rule listed"
            " with its claim, and is based on the n listed with it."
        )

    @property
    def figures_note(self) -> str:
        """How to read the figures, and what is not there."""
        there = {result.experiment for result in self.results}
        missing = [
            one.title
            for one in find_all()
            if one.name not in {*there, "patterns"}
            and not (one.needs_values and self.kind == "lambda")
        ]
        parts = ["Layers count from 1 as in the paper; names of memories, such as L0N12, from 0."]
        if "patterns" not in there:
            parts.append(
                "Figure 2 and Tables 1 and 3 (patterns that people or programs find in triggers)"
                " are missing: this index has no patterns yet. Find them with `ffmem patterns"
                " detect DIR`."
            )
        if self.left_out:
            parts.append(self.left_out)
        if missing:
            parts.append(f"Not measured: {'; '.join(missing)}.")
        return " ".join(parts)

    @property
    def left_out(self) -> str:
        """Which experiments cannot be measured on memories of this kind, and why."""
        if self.kind != "lambda":
            return ""
        titles = [f"{one.title} ({one.name})" for one in find_all() if one.needs_values]
        return (
            "Memories of a lambda layer have no static values, but these experiments need them:"
            f" {'; '.join(titles)}; so does the definition “effect” of active memories. They are"
            " skipped."
        )

    @property
    def facts(self) -> list[tuple[str, str]]:
        """How the report was made, as pairs of what and how."""
        settings, corpus = self.settings, self.settings["corpus"]
        memories = settings["memories"]
        shape = (
            f"{self.n_layers} layers with {format_number(sum(memories))} memories in total"
            if isinstance(memories, list)
            else f"{self.n_layers} layers × {format_number(memories)} memories"
        )
        if routed := settings.get("experts"):
            within = pluralize(sum(n > 0 for n in routed), "layers")
            shape += f", {pluralize(sum(routed), 'routed experts')} in {within}"
        gated = KINDS.get(self.kind, "gated" if self.gated else "ungated")
        start = settings.get("start")
        threads = next((r.settings["threads"] for r in self.results if "threads" in r.settings), "")
        projected = "y is read" if self.kind == "lambda" else "Values and y are read"
        facts = {
            "Model": f"{self.model} ({shape}, {gated}; hash {settings['model_hash'][:12]})",
            "Index over": f"{self.sources}, {format_number(corpus.get('sentences'))} sentences,"
            f" {format_number(corpus.get('tokens'))} tokens",
            "Sample of Section 5": self.sample,
            "Arithmetic": settings["dtype"],
            projected: settings["projection"],
            "Start token": "none" if start is None else visible_token(str(start)),
            "Seed": str(settings["seed"]),
            "CPU threads": str(threads),
            "ffmem": self.version,
        }
        return [(what, how) for what, how in facts.items() if how]

    # Tables 1, 3 and 2

    @cached_property
    def _keys(self) -> tuple[list[KeyExample], KeyTable | None]:
        measured = any(result.experiment == "patterns" for result in self.results)
        return pattern_tables(self.index) if measured else ([], None)

    @cached_property
    def _predictive(self) -> list[PredictiveExample]:
        results = [one for one in self.results if one.experiment == "predictive-values"]
        return [row for one in results for row in predictive_examples(self.index, one)]

    @cached_property
    def tables(self) -> list[Table]:
        """The paper's tables of examples, those that there are."""
        examples, key = self._keys
        tables = [self._pattern_table(examples)] if examples else []
        tables += [self._key_table(key)] if key else []
        tables += [self._predictive_table()] if self._predictive else []
        return tables

    def _place(self, row: Any) -> list[Piece]:
        """Return a memory's name, its layer, and the sign of the coefficient in gated models."""
        sign = f" · m {'>' if row.sign > 0 else '<'} 0" if self.gated else ""
        return [Link(row.cell), Small(f"layer {row.layer + 1}{sign}")]

    def _pattern_table(self, examples: list[KeyExample]) -> Table:
        source = examples[0].source
        note = (
            "For each of five evenly spaced layers, one shallow and one semantic pattern, if there"
            " are any: the one that most of a memory’s first triggers show; ties go to the memory"
            " with more patterns, then to the lower number."
        )
        if source != "human":
            note += " Automatic labels are not the paper’s protocol."
        rows: list[list[list[Piece]]] = [
            [
                self._place(row),
                [
                    visible(row.description),
                    Small(f"{row.kind} · {row.marked} of {row.of} triggers"),
                ],
                [*row.excerpts],
            ]
            for row in examples
        ]
        columns = ["Memory", "Pattern", "Three triggers, and what follows"]
        title = "Keys and the patterns of their triggers"
        return Table("table-1", title, f"Table 1 · source: {source}", [note], columns, rows)

    def _key_table(self, key: KeyTable) -> Table:
        note: list[Piece] = [
            Link(key.cell),
            f", layer {key.layer + 1}: of the memories above, one with patterns of both kinds, if"
            " any, then the one with the most patterns.",
        ]
        legend: list[list[Piece]] = [
            [f"{one.number}: {visible(one.description)}", Small(one.kind)] for one in key.patterns
        ]
        rows: list[list[list[Piece]]] = [
            [[str(rank)], [", ".join(map(str, numbers)) or MISSING], [text]]
            for rank, text, numbers in key.lines
        ]
        columns = ["Rank", "Patterns", "Trigger, and what follows"]
        title, source = "One key with all its triggers", f"Table 3 · source: {key.source}"
        return Table("table-3", title, source, note, columns, rows, legend)

    def _predictive_table(self) -> Table:
        note = (
            "The most predictive values: first those that a trigger confirms, then by probability."
            " Precision is the share of a memory’s triggers that the predicted token follows."
        )
        rows: list[list[list[Piece]]] = []
        for row in self._predictive:
            trigger: list[Piece] = [row.excerpt] if row.excerpt else []
            if not row.agrees:
                trigger.append(Small("predicts none of its triggers"))
            rows.append(
                [
                    self._place(row),
                    [Token(row.token), Small(format_share(row.probability))],
                    [format_share(row.precision), Small(f"{row.n_triggers} triggers")],
                    trigger,
                ]
            )
        columns = ["Value", "Predicts", "Precision", "A trigger, and what follows"]
        title = "Values and what they predict"
        return Table("table-2", title, "Table 2", [note], columns, rows)

    @property
    def excerpts_note(self) -> str:
        """How to read excerpts, and whose text they are."""
        note = (
            "Excerpts: at most the last ten words of a prefix; its last token is marked, the next"
            " one follows. ␣ is a space, ↵ a line end, ∎ the end of the sentence."
        )
        if "wikitext" in self.sources + self.sample:
            note += (
                " WikiText is by Wikipedia's contributors, CC BY-SA; excerpts have at most ten"
                " words."
            )
        return note

    # Memories

    @property
    def _featured_rows(self) -> list[Any]:
        return [*self._keys[0], *self._predictive]

    @cached_property
    def cards(self) -> list[MemoryCard]:
        """Every memory that the report names."""
        cited = [(row.cell, row.sign) for row in self._featured_rows]
        for result in self.results:
            cited += [(row["cell"], int(row.get("sign") or 1)) for row in result.rows_with("cell")]
        return memory_cards(self.index, cited)

    @cached_property
    def linked(self) -> frozenset[str]:
        """The cells that have a card."""
        return frozenset(card.cell for card in self.cards)

    @cached_property
    def featured(self) -> frozenset[str]:
        """The cells of Tables 1 and 2: Markdown shows no other cards."""
        return frozenset(row.cell for row in self._featured_rows)


# Commands


def report_command(results: Sequence[ExperimentResult]) -> str:
    """Return the command that measures all this again."""
    options: dict[str, Any] = {"corpus": "VALID", "out": "OUT"}
    samples = [one.settings["sample"] for one in results if one.settings.get("sample")]
    if samples:
        sample = samples[0]
        options |= {"corpus": sample["corpus"], "sample": sample["requested"]}
        options["draw"] = None if sample["draw"] == "sentences" else sample["draw"]
        options |= {name: sample.get(name) for name in READ_AS}
    options["seed"] = results[0].settings["seed"]
    for result in results:
        for name in ("per_layer", "triggers"):  # of token removal
            options[name] = result.settings.get(name, options.get(name))
    # The first is Figure 2, which no model ran for.
    options["dtype"] = results[-1].settings["dtype"]
    return shlex.join(["ffmem", "report", "DIR", *_option_words(options)])


def index_commands(index: Index) -> list[str]:
    """Return the commands that make the index: one for each source of its corpus."""
    manifest, adapter = index.manifest, index.manifest.model.adapter
    model = "MODEL" if manifest.model.source == IN_MEMORY else manifest.model.source
    commands = []
    for number, source in enumerate(manifest.corpus.sources):
        words, options = ["ffmem", "extend", "DIR", source.source], {}
        if number == 0:
            words = ["ffmem", "index", model, source.source, "--out", "DIR", "-t", str(manifest.t)]
            options = {
                "adapter": adapter and adapter.source,
                "prefixes": manifest.prefixes,
                "compat": manifest.compat,
                "dtype": manifest.dtype,
                "start": manifest.start.requested,
                "threads": source.threads,
                **_differences(source, IndexConfig, ("batch_tokens", "chunk_tokens")),
            }
        options |= {"unit": source.unit} | _differences(source, Corpus, READ_AS)
        commands.append(shlex.join([*words, *_option_words(options)]))
    return commands


def _differences(values: object, usual: type, names: Sequence[str]) -> dict[str, Any]:
    """Return the values that differ from the defaults of a dataclass."""
    found = {name: getattr(values, name) for name in names}
    return {name: value for name, value in found.items() if value != getattr(usual, name)}


def _option_words(options: Mapping[str, Any]) -> list[str]:
    """Return options as on the command line; None and False leave one out."""
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words
