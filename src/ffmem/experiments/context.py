"""What experiments share (an index, its model, a sample of prefixes), and how several of them run.

What several experiments need is computed once, on first use.
A result carries a fingerprint: the SHA-256 of everything that decides its numbers. A file NAME.json
with the fingerprint that a measurement would have now stands for that measurement.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import check_token_ids
from ffmem.errors import CorpusError, StoreError
from ffmem.experiments.base import (
    READ_AS,
    Experiment,
    ExperimentConfig,
    ExperimentResult,
    corpus_like,
    digest,
    index_settings,
)
from ffmem.experiments.sample import PromptSample, draw_sample
from ffmem.files import sha256
from ffmem.indexing.store import Index, check_weights
from ffmem.indexing.triggers import TopTriggers, corpus_tokens, top_triggers
from ffmem.progress import Progress

if TYPE_CHECKING:
    from ffmem.experiments.values import ValueReadings
    from ffmem.models.memories import Memories

VERSIONS = ("ffmem", "torch", "transformers", "numpy", "scipy", "scikit-learn")
"""The libraries that compute the numbers."""

T = TypeVar("T")


@dataclass(kw_only=True)
class ExperimentContext:
    """One index and its model, with the settings of the experiments."""

    index: Index
    model: "Memories | Callable[[], Memories]"
    """The index's model, or a function that loads it on first use."""
    corpus: Corpus | None = None
    """Source of Section 5's sample; the other experiments read the index."""
    config: ExperimentConfig = field(default_factory=ExperimentConfig)
    metrics: Collection[type[Any]] = ()
    """Further metrics of the forward pass, so that one pass serves several experiments."""
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))

    def __post_init__(self) -> None:
        self._measured: dict[type[Any], Any] = {}

    @cached_property
    def memories(self) -> "Memories":
        """The model, which must be the index's own."""
        from ffmem.models.memories import Memories

        memories = self.model if isinstance(self.model, Memories) else self.model()
        check_weights(self.index, memories.fingerprint())
        return memories

    @property
    def threads(self) -> int:
        """CPU threads that compute the numbers."""
        import torch

        return torch.get_num_threads()

    def settings(self, needs_model: bool = True) -> dict[str, Any]:
        """Return what a result says about how it was made."""
        dtype = str(self.memories.dtype).removeprefix("torch.") if needs_model else None
        return index_settings(self.index, dtype, self.config.seed)

    def sample_settings(self) -> dict[str, Any]:
        """Return what a result of Section 5 says about its sample."""
        corpus = self.section_5_corpus
        # How the corpus is read, where that differs from the index's own.
        usual = corpus_like(self.index, corpus.source)
        read = {name: getattr(corpus, name) for name in READ_AS}
        return {
            "corpus": corpus.source,
            "requested": self.config.sample,
            "draw": self.config.draw,
            **{name: value for name, value in read.items() if value != getattr(usual, name)},
            **self.prompt_sample.describe(),
        }

    @cached_property
    def _base_fingerprint(self) -> str:
        """SHA-256 of what decides all numbers: index, model, how it runs, versions, seed.

        The manifest holds the hash of the weights and of every file of the index.
        """
        return digest(
            {
                "index": sha256(self.index.folder / "manifest.json"),
                "config": self.memories.config.to_json_string(),
                "tokenizer": self.memories.tokenizer.fingerprint,
                "dtype": str(self.memories.dtype),
                "device": self.memories.device.type,
                "threads": self.threads,
                "versions": {library: version(library) for library in VERSIONS},
                "seed": self.config.seed,
            }
        )

    @cached_property
    def _sample_fingerprint(self) -> str:
        """SHA-256 of the sample: its options, and every prefix in it."""
        return digest([self.sample_settings(), self.prompt_sample.digest()])

    def fingerprint(self, experiment: Experiment) -> str:
        """Return the SHA-256 of all inputs of an experiment."""
        options = [getattr(self.config, option) for option in experiment.options]
        sample = [self._sample_fingerprint] if experiment.metrics else []
        return digest([experiment.name, self._base_fingerprint, *options, *sample])

    @cached_property
    def frequencies(self) -> Int64[ndarray, " vocab"]:
        """How often each token occurs in the index's corpus."""
        ids = corpus_tokens(self.index).ids
        return np.bincount(ids, minlength=self.memories.vocabulary)

    @cached_property
    def top_triggers(self) -> list[TopTriggers]:
        """The top trigger of every memory, layer by layer."""
        return [top_triggers(self.index, layer) for layer in range(self.index.n_layers)]

    @cached_property
    def values(self) -> "list[ValueReadings]":
        """What every value predicts, layer by layer, and how it ranks its top trigger's next token.

        A value is read with the sign of its memory's top trigger; +1 where there is none.
        """
        from ffmem.experiments.values import read_values

        found = []
        with self.progress.bar("values", len(self.index), "values") as step:
            for layer, triggers in enumerate(self.top_triggers):
                sign = np.where(triggers.exists, triggers.sign, 1).astype(np.int8)
                found.append(read_values(self.memories, layer, sign, triggers.next_token))
                step(self.index.layout.widths[layer])
        return found

    @property
    def section_5_corpus(self) -> Corpus:
        """The source of Section 5's sample."""
        if self.corpus is None:
            raise CorpusError(
                "This experiment runs the model on prefixes. Use a corpus, such as --corpus"
                " wikitext-2:valid."
            )
        return self.corpus

    @cached_property
    def prompt_sample(self) -> PromptSample:
        """The sample of prefixes."""
        memories, config, corpus = self.memories, self.config, self.section_5_corpus
        longest = None if memories.context is None else memories.context - 1
        # The authors' code draws the empty prefix as well.
        manifest = self.index.manifest
        shortest = 0 if manifest.compat and manifest.start.id is not None else 1
        known = check_token_ids(corpus.sentences(memories.tokenizer), memories.vocabulary)
        size = config.sample if isinstance(config.sample, int) else None
        sample = draw_sample(known, config.draw, size, config.seed, shortest, longest)
        found = len(sample.lengths)
        if size is not None and found < size:
            what = "sentences" if config.draw == "sentences" else "prefixes"
            self.progress.say(
                f"{size:,} prefixes were requested; {corpus.source} has {found:,} {what} to draw"
                " from. Using all of them."
            )
        if sample.n_cut:
            self.progress.say(f"Truncated to the model's context: {sample.n_cut:,} sentences.")
        return sample

    def measured(self, metric: type[T]) -> T:
        """Return what the forward pass over the sample measured; run it if it has not run yet."""
        if metric not in self._measured:
            from ffmem.experiments.forward import evaluate_sample

            kinds = {metric, *self.metrics} - set(self._measured)
            self._measured |= evaluate_sample(self, kinds)
        found: T = self._measured[metric]
        return found


def run_experiments(
    context: ExperimentContext, experiments: list[Experiment], out: Path
) -> list[ExperimentResult]:
    """Measure experiments, and write JSON, SVG and PDF of each as soon as it is measured.

    Those that are finished in `out` are read from there. Without patterns in the index,
    `patterns` is skipped, or an error if it is the only experiment.
    """
    from ffmem.experiments.charts import write_figure
    from ffmem.patterns.store import NoPatterns

    done = {one.name: found for one in experiments if (found := finished(context, one, out))}
    if done:
        context.progress.say(f"Not measured again, as {out} has the results: {', '.join(done)}.")
    context.metrics = {m for one in experiments if one.name not in done for m in one.metrics}
    results = []
    for experiment in experiments:
        result = done.get(experiment.name)
        if result is None:
            context.progress.say(f"Measuring {experiment.name}.")
            try:
                result = experiment.run(context)
            except NoPatterns as error:
                if len(experiments) == 1:
                    raise
                context.progress.say(f"Skipping Figure 2. {error}")
                continue
            if experiment.needs_model:
                result = replace(result, fingerprint=context.fingerprint(experiment))
            result.write(out)
            write_figure(result, out)
        elif not all((out / f"{experiment.name}.{end}").is_file() for end in ("svg", "pdf")):
            write_figure(result, out)  # a stop came between
        results.append(result)
    return results


def finished(
    context: ExperimentContext, experiment: Experiment, out: Path
) -> ExperimentResult | None:
    """Return the result in a folder, if it is what would be measured now.

    `patterns` also reads annotations, and is fast: it is always measured again.
    """
    path = out / f"{experiment.name}.json"
    if not experiment.needs_model or not path.is_file():
        return None
    try:
        result = ExperimentResult.read(path)
    except StoreError:
        return None  # half a file, or another program's
    return result if result.fingerprint == context.fingerprint(experiment) else None
