"""Reports of several models side by side: the paper's claims, kinds of memory, figures.

    comparison = ReportComparison([read_report(folder) for folder in folders])

A report is the folder of JSON that `ffmem report` writes; neither index nor model is needed. Every
verdict is that of the report: `check_claims` on the model's own results. A model that lacks an
experiment is named as not measured. `render.py` lays a comparison out.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ffmem.errors import FfmemError, StoreError
from ffmem.experiments.base import (
    INCOMPARABLE,
    NAMES,
    VERDICTS,
    Claim,
    Experiment,
    ExperimentResult,
    check_claims,
    find_all,
)
from ffmem.experiments.definitions import KINDS, kind_definitions
from ffmem.experiments.report import TITLE, sample_line
from ffmem.experiments.rows import Row
from ffmem.indexing.memory import visible
from ffmem.text import MISSING, format_number, pluralize

FORMAT = 1
"""File format of comparison.json."""

NOT_MEASURED = "not measured"
"""The verdict where a model's report lacks the experiment of a claim."""

GROUPS = ("ReLU", "GELU", "gated", "experts")
"""Kinds of memory in the order of the page; others follow."""

UNRECORDED = "kind not recorded"

_ACTIVATIONS = {"relu": "ReLU", "silu": "SiLU", "swish": "SiLU", "relu2": "squared ReLU"}


# One model


class MemoryKind(NamedTuple):
    """The kind of a model's memories, by the settings of its results."""

    group: str
    """ReLU, GELU, gated, experts, or another kind."""
    text: str
    """The same with the activation."""


def memory_kind(settings: Row) -> MemoryKind:
    """Return the kind of memory that a result's settings name."""
    name = str(settings.get("activation") or "")
    # A config says silu or gelu_new; a module of its own, SiLUActivation.
    plain = name.lower().removesuffix("activation")
    activation = "GELU" if "gelu" in plain else _ACTIVATIONS.get(plain, name)
    within = f" ({activation})" if activation else ""
    if settings.get("kind") in KINDS:
        return MemoryKind(str(settings["kind"]), KINDS[str(settings["kind"])])
    gated = settings.get("gated")
    if settings.get("experts"):
        return MemoryKind("experts", f"experts{', gated' if gated else ''}{within}")
    if gated:
        return MemoryKind("gated", f"gated{within}")
    if activation:
        return MemoryKind(activation, activation)
    return MemoryKind(UNRECORDED, UNRECORDED if gated is None else "ungated, activation unknown")


@dataclass(frozen=True)
class ModelReport:
    """The results of one model."""

    name: str
    folder: Path
    results: dict[str, ExperimentResult]
    """By experiment, in the paper's order."""
    claims: dict[str, list[Claim]]
    """By experiment, in the order of its file."""
    summaries: dict[str, str]

    @property
    def settings(self) -> Row:
        """What the results say about the model; one that it ran for also says its dtype."""
        return min(self.results.values(), key=lambda one: one.experiment == "patterns").settings

    @property
    def kind(self) -> MemoryKind:
        """The kind of its memories."""
        return memory_kind(self.settings)

    @property
    def label(self) -> str:
        """Its name in charts."""
        return f"{self.name} ({self.kind.group})"

    @property
    def missing(self) -> list[Experiment]:
        """The experiments that the report lacks."""
        return [one for one in find_all() if one.name not in self.results]

    @property
    def facts(self) -> list[str]:
        """What a reader must know of the model to compare it: a row of the table of models."""
        settings, memories = self.settings, self.settings.get("memories")
        n_layers = max(result.n_layers for result in self.results.values())
        width = format_number(sum(memories) if isinstance(memories, list) else memories)
        shape = f"{n_layers} × {width}"
        if isinstance(memories, list):
            shape = f"{n_layers} layers, {width} in all"
        if routed := settings.get("experts"):
            shape += f", {pluralize(sum(routed), 'routed experts')}"
        corpus = settings.get("corpus") or {}
        sources = ", ".join(map(str, corpus.get("sources") or [])) or MISSING
        index = f"{sources}: {format_number(corpus.get('tokens'))} tokens"
        samples = [one for one in self.results.values() if one.settings.get("sample")]
        facts = [
            self.kind.text,
            shape,
            format_number(settings.get("vocabulary")),
            index,
            sample_line(samples[0]) if samples else MISSING,
            f"{settings.get('dtype', MISSING)}, seed {settings.get('seed', MISSING)}",
        ]
        return [visible(str(fact)) for fact in facts]


FACTS = (
    "kind of memory",
    "layers × memories",
    "vocabulary",
    "index over",
    "Section 5 prefixes",
    "settings",
)
"""What `ModelReport.facts` are."""


def read_report(folder: Path, name: str | None = None) -> ModelReport:
    """Return the results in a folder; the model is called by `name`, or as its results say."""
    if not folder.is_dir():
        raise StoreError(f"There is no folder {folder}. Give a folder that `ffmem report` wrote.")
    paths = {one: folder / f"{one}.json" for one in NAMES}
    results = {one: ExperimentResult.read(path) for one, path in paths.items() if path.is_file()}
    if not results:
        index = (
            " It is an index: run `ffmem report` on it first."
            * (folder / "manifest.json").is_file()
        )
        raise StoreError(
            f"{folder} has no results: none of {', '.join(f'{one}.json' for one in NAMES)} is"
            f" there.{index} Give a folder that `ffmem report` wrote."
        )
    for one, result in results.items():
        if result.experiment != one:
            raise StoreError(
                f"{paths[one]} holds the experiment {result.experiment!r}. Files are named by their"
                " experiment: rename it, or measure it again."
            )
    models = {
        (str(result.settings.get("model")), str(result.settings.get("model_hash")))
        for result in results.values()
    }
    if len(models) > 1:
        raise StoreError(
            f"{folder} has results of {len(models)} models:"
            f" {', '.join(f'{model} ({hash_[:12]})' for model, hash_ in sorted(models))}."
            " Give every model a folder of its own."
        )
    ((source, _),) = models
    claims, summaries = {}, {}
    for experiment in find_all(results):
        with _reading(paths[experiment.name]):
            result = results[experiment.name]
            claims[experiment.name] = check_claims([result])
            summaries[experiment.name] = visible(experiment.summary(result))
            for panel in experiment.panels:
                panel.points(result)
    # The last part of a path or a Hub id is what people call a model.
    own = visible(name or Path(source).name or source)
    report = ModelReport(own, folder, results, claims, summaries)
    with _reading(folder):
        _ = report.facts  # settings that are not what they should be
    return report


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn rows that are not what an experiment's file says into an error that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StoreError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged, or another"
            " version of ffmem wrote it. Measure it again with `ffmem experiment`."
        ) from None


# Several models


class Answer(NamedTuple):
    """What one model shows about a claim."""

    model: str
    kind: str
    verdict: str
    shows: str
    n: str


@dataclass(frozen=True)
class ComparedClaim:
    """A claim of the paper beside what every model shows."""

    id: str
    claim: str
    experiment: str
    paper: str
    rule: str
    answers: list[Answer]

    def by_kind(self) -> dict[str, list[Answer]]:
        """Return the answers by kind of memory."""
        return {
            kind: [one for one in self.answers if one.kind == kind]
            for kind in dict.fromkeys(one.kind for one in self.answers)
        }

    @property
    def kinds_line(self) -> str:
        """The verdicts by kind of memory, with the models that got them."""
        parts = []
        for kind, answers in self.by_kind().items():
            given = dict.fromkeys(one.verdict for one in answers)
            each = [
                f"{verdict} ({', '.join(one.model for one in answers if one.verdict == verdict)})"
                for verdict in given
            ]
            parts.append(f"{kind}: {', '.join(each)}")
        return "; ".join(parts)

    @property
    def differs(self) -> bool | None:
        """Whether kinds of memory got different verdicts; None if fewer than two were judged."""
        judged = {
            kind: {one.verdict for one in answers} - {INCOMPARABLE, NOT_MEASURED}
            for kind, answers in self.by_kind().items()
        }
        sets = [verdicts for verdicts in judged.values() if verdicts]
        return None if len(sets) < 2 else any(one != sets[0] for one in sets)


@dataclass(frozen=True)
class ComparedFigure:
    """One experiment on all models that have it."""

    experiment: Experiment
    results: dict[str, ExperimentResult]
    """By the models' labels."""
    shows: list[tuple[str, str]]
    """Each model, and its summary."""
    missing: list[str]


class ReportComparison:
    """Everything that a page says about several models."""

    def __init__(self, reports: Sequence[ModelReport]) -> None:
        if not reports:
            raise FfmemError("No report was given. Name at least one folder of `ffmem report`.")
        folders: dict[str, Path] = {}
        for report in reports:
            if report.name in folders:
                raise FfmemError(
                    f"{folders[report.name]} and {report.folder} are both reports of"
                    f" {report.name}. Leave one out, or name them: NAME={report.folder}."
                )
            folders[report.name] = report.folder

        def place(report: ModelReport) -> int:
            group = report.kind.group
            return GROUPS.index(group) if group in GROUPS else len(GROUPS)

        self.models = sorted(reports, key=place)

    @property
    def title(self) -> str:
        """What the page is."""
        return f"The paper's claims on {pluralize(len(self.models), 'models')}"

    @property
    def lead(self) -> str:
        """How the page was made, in two sentences."""
        return (
            f"{TITLE} on {', '.join(model.name for model in self.models)}: each claim with each"
            " model's result, by the same rules. `ffmem report --compare` makes this page from the"
            " JSON of the models' reports."
        )

    @property
    def claims_note(self) -> str:
        """How to read the table of claims."""
        return (
            "Verdicts come from each model's report. Rule, n, intervals, baselines and controls are"
            " listed with each claim below. The paper's model has 16 layers, which are compared"
            " with those at the same relative depth."
            f" {NOT_MEASURED[0].upper()}{NOT_MEASURED[1:]}: the report lacks the experiment."
        )

    @property
    def kinds_note(self) -> str:
        """What a difference between kinds means, and what it does not."""
        listed = "; ".join(
            f"{kind}: {', '.join(model.name for model in models)}"
            for kind, models in self.kinds.items()
        )
        return (
            f"{listed}. Models differ in more than their memories (size, depth, training text,"
            " tokenizer, sample): with few models of a kind, a difference between kinds is an"
            " observation, not an effect of the kind."
        )

    @property
    def figures_note(self) -> str:
        """How to read the figures."""
        return (
            "One color per model in all figures. The relative depth of layer ℓ of n, counted from"
            " 1, is (ℓ − ½)/n. Values from the paper's text are gray, at its layers; none is read"
            " off a figure."
        )

    @property
    def by_difference(self) -> list[tuple[str, list[ComparedClaim]]]:
        """The claims by whether kinds of memory got different verdicts."""
        titles = {
            True: "Different verdicts",
            False: "The same verdict in every kind that can be judged",
            None: "Judged in fewer than two kinds",
        }
        return [
            (title, [claim for claim in self.claims if claim.differs is differs])
            for differs, title in titles.items()
        ]

    @property
    def kinds(self) -> dict[str, list[ModelReport]]:
        """The models by kind of memory."""
        kinds: dict[str, list[ModelReport]] = {}
        for model in self.models:
            kinds.setdefault(model.kind.group, []).append(model)
        return kinds

    @cached_property
    def claims(self) -> list[ComparedClaim]:
        """Every claim of an experiment that some model has, in the paper's order."""
        found: list[ComparedClaim] = []
        for experiment in find_all():
            given = [
                one.claims[experiment.name] for one in self.models if experiment.name in one.claims
            ]
            for number, claim in enumerate(given[0] if given else []):
                answers = [_answer(model, experiment.name, number) for model in self.models]
                name = f"claim-{len(found) + 1}"
                found.append(
                    ComparedClaim(
                        name, claim.claim, experiment.name, claim.paper, claim.rule, answers
                    )
                )
        return found

    @property
    def tally(self) -> list[tuple[ModelReport, list[int]]]:
        """How many claims got each of `verdicts`, by model."""
        return [
            (
                model,
                [
                    sum(claim.answers[number].verdict == verdict for claim in self.claims)
                    for verdict in self.verdicts
                ],
            )
            for number, model in enumerate(self.models)
        ]

    @property
    def verdicts(self) -> list[str]:
        """The verdicts, and `NOT_MEASURED` if some claim has it."""
        given = {answer.verdict for claim in self.claims for answer in claim.answers}
        return [*VERDICTS, *([NOT_MEASURED] if NOT_MEASURED in given else [])]

    @cached_property
    def figures(self) -> list[ComparedFigure]:
        """The experiments that some model has."""
        figures = []
        for experiment in find_all():
            having = [model for model in self.models if experiment.name in model.results]
            if having:
                results = {model.label: model.results[experiment.name] for model in having}
                shows = [(model.name, model.summaries[experiment.name]) for model in having]
                missing = [model.name for model in self.models if model not in having]
                figures.append(ComparedFigure(experiment, results, shows, missing))
        return figures

    @property
    def labels(self) -> list[str]:
        """The models' names in charts."""
        return [model.label for model in self.models]

    @property
    def missing(self) -> list[str]:
        """What is missing, model by model."""
        lines = []
        for model in self.models:
            if names := [one.name for one in model.missing]:
                why = ""
                if model.kind.group == "lambda":
                    why = " Memories of a lambda layer have no static values to read."
                elif "patterns" in names:
                    why = " Run `ffmem patterns detect DIR` first."
                lines.append(f"{model.name}: {', '.join(names)}.{why}")
        return lines

    @property
    def definitions(self) -> list[tuple[str, list[str]]]:
        """What a coefficient means in each kind of memory."""
        firsts = {kind: models[0].settings for kind, models in self.kinds.items()}
        return [
            (kind, kind_definitions(str(settings.get("kind") or "none"), settings))
            for kind, settings in firsts.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of comparison.json."""
        return {
            "format": FORMAT,
            "models": [
                {
                    "name": model.name,
                    "kind": model.kind.group,
                    "memories": model.kind.text,
                    "model_hash": model.settings.get("model_hash"),
                    "experiments": list(model.results),
                    "missing": [one.name for one in model.missing],
                }
                for model in self.models
            ],
            "claims": [
                {
                    "claim": claim.claim,
                    "experiment": claim.experiment,
                    "paper": claim.paper,
                    "rule": claim.rule,
                    "models": {
                        one.model: {"verdict": one.verdict, "shows": one.shows, "n": one.n}
                        for one in claim.answers
                    },
                }
                for claim in self.claims
            ],
        }


def _answer(model: ModelReport, experiment: str, number: int) -> Answer:
    kind = model.kind.group
    if experiment not in model.claims:
        return Answer(model.name, kind, NOT_MEASURED, MISSING, MISSING)
    claim = model.claims[experiment][number]
    return Answer(model.name, kind, claim.verdict, visible(claim.model), claim.n)


def link_to(model: ModelReport, out: Path, suffix: str) -> str | None:
    """Return the URL of a model's own report from a folder; None if it has no page.

    `suffix` is that of the page with the link, which is preferred.
    """
    pages = [model.folder / f"report{one}" for one in (suffix, ".md", ".html")]
    found = next((page for page in pages if page.is_file()), None)
    return None if found is None else quote(Path(os.path.relpath(found, out)).as_posix())
