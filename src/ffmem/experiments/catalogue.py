"""All experiments by name, in the paper's order; finished ones are not measured again.

A result carries a fingerprint: the SHA-256 of everything that decides its numbers. A file NAME.json
with the fingerprint that a measurement would have now stands for that measurement.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ffmem.errors import FfmemError, NoStaticValues, StoreError
from ffmem.experiments.agreement import agreement, next_token_rank
from ffmem.experiments.composition import last_layer_composition
from ffmem.experiments.context import ExperimentContext, digest
from ffmem.experiments.kinds import note_on
from ffmem.experiments.names import FROM_FOLDER, FROM_VALUES, NAMES
from ffmem.experiments.pattern_shares import NoPatterns, has_patterns, patterns
from ffmem.experiments.predictive import max_probability, predictive_values
from ffmem.experiments.removal import token_removal
from ffmem.experiments.result import Result
from ffmem.experiments.section5 import (
    active_memories,
    neural_memory,
    prediction_cases,
    residual_prediction,
    residual_probability,
    stop_words,
    zero_agreement,
)
from ffmem.indexing.store import Index
from ffmem.progress import Progress


class Experiment(NamedTuple):
    """How one experiment is measured."""

    measure: Callable[[ExperimentContext], Result]
    parts: tuple[str, ...] = ()
    """What it needs of the pass over the sample; nothing if it reads the index alone."""
    options: tuple[str, ...] = ()
    """Settings of the context that it alone reads."""


_PREDICTIONS = ("predictions",)
_TOKEN_HITS = ("predictions", "token_hits")


def _patterns(context: ExperimentContext) -> Result:
    return patterns(context.index, context.seed)


EXPERIMENTS: dict[str, Experiment] = {
    "patterns": Experiment(_patterns),
    "token-removal": Experiment(token_removal, options=("per_layer", "triggers")),
    "agreement": Experiment(agreement),
    "next-token-rank": Experiment(next_token_rank),
    "max-probability": Experiment(max_probability),
    "predictive-values": Experiment(predictive_values),
    "active-memories": Experiment(active_memories, ("activity",)),
    "zero-agreement": Experiment(zero_agreement, _TOKEN_HITS),
    "stop-words": Experiment(stop_words, _TOKEN_HITS),
    "residual-prediction": Experiment(residual_prediction, _PREDICTIONS),
    "residual-probability": Experiment(residual_probability, _PREDICTIONS),
    "prediction-cases": Experiment(prediction_cases, _PREDICTIONS),
    "last-layer-composition": Experiment(last_layer_composition, _PREDICTIONS),
    "neural-memory": Experiment(neural_memory, ("softmax",)),
}
"""Those of `names.NAMES`, in the same order."""


FROM_FOLDER_ALONE: dict[str, Callable[[Index, int], Result]] = {"patterns": patterns}
"""How those of `names.FROM_FOLDER` are measured without a model."""


def known(names: Iterable[str]) -> list[str]:
    """Return the names in the paper's order; an unknown one is an error."""
    asked = set(names)
    for name in asked - set(EXPERIMENTS):
        raise FfmemError(f"Unknown experiment {name!r}. Experiments: {', '.join(NAMES)}.")
    return [name for name in EXPERIMENTS if name in asked]


def parts(names: Iterable[str]) -> frozenset[str]:
    """Return what some experiments need of the pass over the sample."""
    return frozenset(part for name in names for part in EXPERIMENTS[name].parts)


def refuse_without_values(names: Iterable[str], model: str) -> None:
    """Raise where one of these reads static values, of a model that has none."""
    needing = [name for name in known(names) if name in FROM_VALUES]
    if needing:
        others = ", ".join(name for name in NAMES if name not in FROM_VALUES)
        raise NoStaticValues(
            f"{', '.join(needing)} reads static values, and memories of {model} have none."
            f" Experiments that need none: {others}."
        )


def measure(
    context: ExperimentContext, names: Iterable[str], out: Path | None = None
) -> Iterator[Result]:
    """Return the results one by one; those that are finished in `out` are read from there.

    Among others, `patterns` is left out where nobody has looked for any; alone, that is an error.
    """
    asked = known(names)
    if not context.memories.has_values:
        refuse_without_values(asked, context.memories.source)
    done = {} if out is None else finished(context, asked, out)
    if done:
        context.progress.say(f"Already measured in {out}, not measured again: {', '.join(done)}.")
    context.parts = parts(name for name in asked if name not in done)
    for name in asked:
        if name in done:
            yield done[name]
        elif name == "patterns" and len(asked) > 1 and not has_patterns(context.index):
            context.progress.say(f"Figure 2 is left out. {NoPatterns(context.index)}")
        else:
            context.progress.say(f"Measuring {name}.")
            result = noted(EXPERIMENTS[name].measure(context))
            if name not in FROM_FOLDER:
                result = replace(result, fingerprint=fingerprint(context, name))
            yield result


def finished(context: ExperimentContext, names: Iterable[str], out: Path) -> dict[str, Result]:
    """Return the results in a folder that are what would be measured now."""
    found = {}
    for name in names:
        try:
            result = Result.read(out / f"{name}.json")
        except StoreError:
            continue  # not there, or not a result
        if result.fingerprint is not None and result.fingerprint == fingerprint(context, name):
            found[name] = result
    return found


def fingerprint(context: ExperimentContext, name: str) -> str:
    """Return the SHA-256 of everything that decides the numbers of an experiment.

    `patterns` reads what people said as well, and is quick: its results have no fingerprint.
    """
    experiment = EXPERIMENTS[name]
    decides = [
        name,
        context.fingerprint,
        *(getattr(context, option) for option in experiment.options),
    ]
    if experiment.parts:
        decides.append(context.sample_fingerprint)
    return digest(decides)


def noted(result: Result) -> Result:
    """Return a result with what must be known of it on memories of its kind, if anything."""
    note = note_on(result.experiment, result.settings["kind"])
    return result if note is None else replace(result, also=result.also | {"note": note})


def read(index: Index, names: Iterable[str], seed: int, progress: Progress) -> Iterator[Result]:
    """Return the results of experiments that need no model (`names.FROM_FOLDER`)."""
    for name in known(names):
        progress.say(f"Measuring {name}.")
        yield FROM_FOLDER_ALONE[name](index, seed)
