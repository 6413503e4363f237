"""What an experiment works on: an index, its model, a sample of prefixes; each read once.

What several experiments need is computed when the first asks for it, and kept for the others.
"""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from numpy import ndarray

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import TokenSentence, check_token_ids
from ffmem.errors import CorpusError, FfmemError, NoStaticValues
from ffmem.experiments.config import DRAWS
from ffmem.experiments.evaluation import PARTS, VALUE_PARTS, SampleEvaluator, SampleMetrics, groups
from ffmem.experiments.prompt_sample import Example, PromptSample, draw
from ffmem.experiments.settings import settings
from ffmem.experiments.top_triggers import TopTriggers, corpus_tokens, top_triggers
from ffmem.experiments.value_readings import ValueReadings, read_values
from ffmem.experiments.value_tops import AdaptiveTops, PlainTops, ValueTops
from ffmem.files import sha256
from ffmem.indexing.store import Index, check_weights
from ffmem.models.memories import Memories
from ffmem.progress import Progress

VERSIONS = ("ffmem", "torch", "transformers", "numpy", "scipy", "scikit-learn")
"""Of the libraries that compute the numbers."""


@dataclass(kw_only=True)
class ExperimentContext:
    """One index and its model, with the settings of the experiments."""

    index: Index
    memories: Memories
    corpus: Corpus | None = None
    """Of Section 5's sample; the others read the index."""
    prompt: str | None = None
    """One text instead of a sample: its longest prefix."""
    sample: int | None = 4000
    """Prefixes of the sample; None for all."""
    draw: str = "sentences"
    seed: int = 0
    per_layer: int = 10
    """Memories of each layer for token removal."""
    triggers: int = 20
    """Triggers of each for token removal."""
    parts: Collection[str] = PARTS
    """What the pass over the sample is to measure."""
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))

    def __post_init__(self) -> None:
        check_weights(self.index, self.memories.fingerprint())
        if self.draw not in DRAWS:
            raise FfmemError(f"Cannot draw {self.draw!r}. Draw {' or '.join(DRAWS)}.")
        for name in ("sample", "per_layer", "triggers"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise FfmemError(f"{name} = {number!r} was asked for. Give 1 or more.")
        if self.prompt is not None and self.corpus is not None:
            raise FfmemError("Both a prompt and a corpus were given. Give one of them.")

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return what a result says about how it was made."""
        dtype = str(self.memories.dtype).removeprefix("torch.")
        return settings(self.index, dtype, self.seed) | more

    def sample_settings(self) -> dict[str, Any]:
        """Return what a result of Section 5 says about its sample."""
        source: dict[str, Any] = {"prompt": self.prompt}
        if self.corpus is not None:
            asked = "all" if self.sample is None else self.sample
            source = {"corpus": self.corpus.source, "asked": asked, "draw": self.draw}
            source |= self._read_otherwise(self.corpus)
        return {**source, **self.prompt_sample.describe()}

    @cached_property
    def fingerprint(self) -> str:
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
                "threads": torch.get_num_threads(),
                "versions": {library: version(library) for library in VERSIONS},
                "seed": self.seed,
            }
        )

    @cached_property
    def sample_fingerprint(self) -> str:
        """SHA-256 of the sample: how it was asked for, and every prefix of it."""
        return digest([self.sample_settings(), self.prompt_sample.digest()])

    def _read_otherwise(self, corpus: Corpus) -> dict[str, Any]:
        """Return how the sample's corpus is read where that differs from the index's own."""
        first = self.index.manifest.corpus.sources[0]
        usual = {"unit": first.unit, "column": first.column, "limit": None}
        return {
            name: value
            for name, usually in usual.items()
            if (value := getattr(corpus, name)) != usually
        }

    @cached_property
    def frequencies(self) -> Int64[ndarray, " vocab"]:
        """How often each token stands in the index's corpus."""
        ids = corpus_tokens(self.index).ids
        return np.bincount(ids, minlength=self.memories.vocabulary)

    @cached_property
    def top_triggers(self) -> list[TopTriggers]:
        """The one trigger of every memory that stands for it, layer by layer."""
        return [top_triggers(self.index, layer) for layer in range(self.index.n_layers)]

    @cached_property
    def values(self) -> list[ValueReadings]:
        """What every value predicts, layer by layer."""
        found = []
        with self.progress.bar("values", len(self.index), "values") as step:
            for layer, top_triggers in enumerate(self.top_triggers):
                found.append(read_values(self.memories, top_triggers, layer))
                step(self.index.layout.widths[layer])
        return found

    @cached_property
    def prompt_sample(self) -> PromptSample:
        """The sample of prefixes."""
        memories = self.memories
        start = self.index.manifest.start.id
        longest = None if memories.context is None else memories.context - 1
        if self.prompt is not None:
            (encoding,) = memories.tokenizer.encode([self.prompt])
            sentence = TokenSentence(self.prompt, *encoding)
            if not sentence.ids or (longest is not None and len(sentence.ids) > longest):
                raise CorpusError(
                    f"The prompt has {len(sentence.ids):,} tokens; the model reads 1 to"
                    f" {longest or 'any number'} behind the start token."
                )
            return PromptSample([Example(0, sentence, [len(sentence.ids)])], 1, 0)
        if self.corpus is None:
            raise CorpusError(
                "This experiment looks at the model at work and needs prefixes to do so."
                " Give a corpus, such as --corpus wikitext-2:valid, or one --prompt."
            )
        # The authors' code draws the empty prefix as well.
        shortest = 0 if self.index.manifest.compat and start is not None else 1
        reading = self.corpus.sentences(memories.tokenizer)
        known = check_token_ids(reading, memories.vocabulary)
        sample = draw(known, self.draw, self.sample, self.seed, shortest, longest)
        found = len(sample.lengths)
        if self.sample is not None and found < self.sample:
            what = "sentences" if self.draw == "sentences" else "prefixes"
            self.progress.say(
                f"{self.sample:,} prefixes were asked for; {self.corpus.source} has {found:,}"
                f" {what} to draw from. All are taken."
            )
        if sample.cut:
            self.progress.say(f"Cut at the model's context: {sample.cut:,} sentences.")
        return sample

    @cached_property
    def metrics(self) -> SampleMetrics:
        """What the model does on the sample, measured in one pass."""
        if not self.memories.has_values and (needing := set(self.parts) & set(VALUE_PARTS)):
            raise NoStaticValues(
                f"A pass over the sample was to measure {', '.join(sorted(needing))} of static"
                " values, of which there are none. Leave that out of its parts."
            )
        sample, start = self.prompt_sample, self.index.manifest.start.id
        n_prefixes = len(sample.lengths)
        found = SampleMetrics.empty(self.memories, n_prefixes, self.parts, self.frequencies)
        self.progress.say(f"Running the model on {n_prefixes:,} prefixes.")
        evaluator = SampleEvaluator(self.memories, self.parts, self._value_tops, self.frequencies)
        with self.progress.bar("Section 5", n_prefixes, "prefixes") as step:
            for group in groups(sample, start, self.memories):
                rows = np.concatenate([some.examples for some in group])
                part = evaluator.read(group).tables()
                for name, table in found.tables().items():
                    table[rows] = part[name]
                step(len(rows))
        return found

    def _value_tops(self, layer: int) -> ValueTops:
        """Return what the values of a layer promote."""
        if self.memories.head.adaptive:
            return AdaptiveTops(self.memories, layer)
        return PlainTops.read(self.index, layer)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
