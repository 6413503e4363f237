"""The paper's figures and tables, measured on an indexed model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ffmem.config_fields import from_parameters
from ffmem.errors import NoStaticValues, StoreError
from ffmem.experiments.base import NAMES, ExperimentConfig, corpus_like, find_all
from ffmem.indexing.store import Index, as_index, output_folder
from ffmem.models.arguments import check_loaded, require_models, use_threads
from ffmem.progress import Progress
from ffmem.signatures import check_arguments

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.experiments.base import ExperimentResult
    from ffmem.experiments.context import ExperimentContext
    from ffmem.models.memories import Memories


@check_arguments
def experiment(
    names: str | Sequence[str],
    folder: str | Path | Index,
    out: str | Path,
    *,
    corpus: "Corpus | str | Path | None" = None,
    sample: int | str = ExperimentConfig.sample,
    draw: str = ExperimentConfig.draw,
    seed: int = ExperimentConfig.seed,
    per_layer: int = ExperimentConfig.per_layer,
    triggers: int = ExperimentConfig.triggers,
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    threads: int | None = ExperimentConfig.threads,
    progress: Progress | None = None,
) -> "list[ExperimentResult]":
    """Measure figures or tables of the paper, and return their results.

    Writes JSON, SVG and PDF of each to `out`. An experiment that is finished there, with the same
    index, settings and versions, is not measured again.

    Args:
        names: One or several experiments, named as in `ffmem experiment`.
        folder: The index.
        out: Folder to write.
        corpus: Corpus to draw Section 5's prefixes from. If given by name, it is read like the
            index's first corpus.
        sample: Number of prefixes for Section 5, or "all".
        draw: "sentences" draws one prefix per sentence, "tokens" uniformly over all prefixes.
        seed: Random seed.
        per_layer: Memories per layer for token removal; the paper used 100.
        triggers: Triggers per memory for token removal; the paper used 50.
        model: The model, or its location. Default: the one recorded in the index.
        adapter: Location of its adapter. Default: the one recorded in the index.
        dtype: Number format of the model. Default: that of the index.
        device: Where the model runs.
        threads: CPU threads; the last bits of a result may depend on it.
        progress: Progress reporter. Default: none.
    """
    config = from_parameters(ExperimentConfig, locals())
    index, progress = as_index(folder), progress or Progress(quiet=True)
    source = corpus_like(index, corpus) if isinstance(corpus, str | Path) else corpus
    context = _context(index, config, source, model, adapter, dtype, device, progress)
    return _measure(context, [names] if isinstance(names, str) else names, Path(out))


@check_arguments
def report(
    folder: str | Path | Index,
    out: str | Path,
    corpus: "Corpus | str | Path",
    *,
    sample: int | str = ExperimentConfig.sample,
    draw: str = ExperimentConfig.draw,
    seed: int = ExperimentConfig.seed,
    per_layer: int = ExperimentConfig.per_layer,
    triggers: int = ExperimentConfig.triggers,
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    threads: int | None = ExperimentConfig.threads,
    progress: Progress | None = None,
) -> Path:
    """Measure every figure and table of the paper, and return the path of the report.

    The parameters are those of `experiment`. A stopped report keeps the experiments that it has
    finished. If memories have no static values, experiments on values are skipped.
    """
    config = from_parameters(ExperimentConfig, locals())
    index, progress = as_index(folder), progress or Progress(quiet=True)
    source = corpus_like(index, corpus) if isinstance(corpus, str | Path) else corpus
    context = _context(index, config, source, model, adapter, dtype, device, progress)
    names = list(NAMES)
    if not index.manifest.model.has_values:
        names = [one.name for one in find_all() if not one.needs_values]
        left_out = ", ".join(name for name in NAMES if name not in names)
        progress.say(f"Skipped (memories of a lambda layer have no static values): {left_out}.")
    results = _measure(context, names, Path(out))
    from ffmem.experiments.render import write_report

    return write_report(Path(out), results, index)


@check_arguments
def compare_reports(reports: Sequence[str | Path], out: str | Path) -> Path:
    """Set the reports of several models side by side, and return the path of the page.

    Writes comparison.html, comparison.md, comparison.json, and one SVG per experiment with all
    models in one chart. Reads the JSON of the reports alone: neither index nor model.

    Args:
        reports: Folders that `report` wrote, each of another model; "NAME=FOLDER" gives a model
            another name than its results do.
        out: Folder to write.
    """
    from ffmem.experiments.comparison import ReportComparison, read_report
    from ffmem.experiments.render import write_comparison

    found = []
    for report in reports:
        name, _, folder = str(report).partition("=")
        is_named = bool(name and folder) and not Path(report).is_dir()
        found.append(read_report(Path(folder), name) if is_named else read_report(Path(report)))
    comparison = ReportComparison(found)
    if own := [f"{name}.json" for name in NAMES if (Path(out) / f"{name}.json").exists()]:
        raise StoreError(
            f"{out} holds results of experiments ({', '.join(own)}), whose figures would be"
            " overwritten. Choose another folder for the comparison."
        )
    with output_folder(Path(out)):
        return write_comparison(Path(out), comparison)


def _context(
    index: Index,
    config: ExperimentConfig,
    corpus: "Corpus | None",
    model: "Memories | str | Path | None",
    adapter: str | Path | None,
    dtype: str | None,
    device: str,
    progress: Progress,
) -> "ExperimentContext":
    """Return what experiments work on; the model is loaded when the first one asks for it."""
    if model is not None and not isinstance(model, str | Path):
        check_loaded(model, adapter, dtype)
    require_models()
    from ffmem.experiments.context import ExperimentContext

    def load_model() -> "Memories":
        from ffmem.interventions.forward import open_model

        opened = open_model(
            index, model=model, adapter=adapter, dtype=dtype, device=device, progress=progress
        )
        return opened.memories

    return ExperimentContext(
        index=index, model=load_model, corpus=corpus, config=config, progress=progress
    )


def _measure(
    context: "ExperimentContext", names: Sequence[str], out: Path
) -> "list[ExperimentResult]":
    """Measure experiments; raise on what can be known before the model is loaded."""
    experiments = find_all(names)
    with output_folder(out):
        needing = [one.name for one in experiments if one.needs_values]
        if needing and not context.index.manifest.model.has_values:
            others = ", ".join(one.name for one in find_all() if not one.needs_values)
            raise NoStaticValues(
                f"{', '.join(needing)} needs static values, but memories of"
                f" {context.index.manifest.model.source} have none. Experiments that need none:"
                f" {others}."
            )
        if context.corpus is not None or any(one.metrics for one in experiments):
            context.section_5_corpus.check()
        import torch

        from ffmem.experiments.context import run_experiments

        with use_threads(context.config.threads or torch.get_num_threads()):
            return run_experiments(context, experiments, out)
