"""Running experiments: finished ones are kept, each result is written once, as soon as it is there.

A result carries a fingerprint: the SHA-256 of everything that decides its numbers. A file NAME.json
with the fingerprint that a measurement would have now stands for that measurement.
"""

from dataclasses import replace
from pathlib import Path

from ffmem.errors import StoreError
from ffmem.experiments.base import Experiment, ExperimentResult, digest
from ffmem.experiments.charts import write_figure
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.patterns import NoPatterns, has_patterns


def run_experiments(
    context: ExperimentContext, experiments: list[Experiment], out: Path
) -> list[ExperimentResult]:
    """Measure experiments, and write JSON, SVG and PDF of each as soon as it is measured.

    Those that are finished in `out` are read from there. Among others, `patterns` is left out where
    nobody has looked for any; alone, that is an error.
    """
    done = {one.name: found for one in experiments if (found := finished(context, one, out))}
    if done:
        context.progress.say(f"Already measured in {out}, not measured again: {', '.join(done)}.")
    left = [one for one in experiments if one.name not in done]
    context.metrics = {metric for one in left for metric in one.metrics}
    results = []
    try:
        for experiment in experiments:
            result = done.get(experiment.name)
            if result is None:
                optional = experiment.name == "patterns" and len(experiments) > 1
                if optional and not has_patterns(context.index):
                    context.progress.say(f"Figure 2 is left out. {NoPatterns(context.index)}")
                    continue
                context.progress.say(f"Measuring {experiment.name}.")
                result = experiment.run(context)
                if experiment.needs_model:
                    result = replace(result, fingerprint=fingerprint(context, experiment))
                result.write(out)
                write_figure(result, out)
            elif not all((out / f"{experiment.name}.{end}").is_file() for end in ("svg", "pdf")):
                write_figure(result, out)  # a stop came between
            results.append(result)
    except KeyboardInterrupt:
        context.progress.say(f"Stopped. Rerun the command: experiments finished in {out} are kept.")
        raise
    return results


def finished(
    context: ExperimentContext, experiment: Experiment, out: Path
) -> ExperimentResult | None:
    """Return the result in a folder, if it is what would be measured now.

    `patterns` reads what people said as well, and is quick: it is always measured.
    """
    if not experiment.needs_model or not (out / f"{experiment.name}.json").is_file():
        return None
    try:
        result = ExperimentResult.read(out / f"{experiment.name}.json")
    except StoreError:
        return None  # half a file, or another program's
    if result.fingerprint is None or result.fingerprint != fingerprint(context, experiment):
        return None
    return result


def fingerprint(context: ExperimentContext, experiment: Experiment) -> str:
    """Return the SHA-256 of everything that decides the numbers of an experiment."""
    decides = [
        experiment.name,
        context.fingerprint,
        *(getattr(context, option) for option in experiment.options),
    ]
    if experiment.metrics:
        decides.append(context.sample_fingerprint)
    return digest(decides)
