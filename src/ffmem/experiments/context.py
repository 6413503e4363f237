"""What experiments share: an index, its model, a sample of prefixes; each is read once.

Anything several experiments need is computed when the first asks for it, and kept for the others.
"""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int64
from numpy import ndarray

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import TokenSentence, check_token_ids
from ffmem.errors import CorpusError, FfmemError
from ffmem.experiments.base import DRAWS, digest, index_settings
from ffmem.experiments.forward import evaluate_sample
from ffmem.experiments.sample import Example, PromptSample, draw_sample
from ffmem.experiments.triggers import TopTriggers, corpus_tokens, top_triggers
from ffmem.experiments.values import AdaptiveTops, PlainTops, ValueReadings, ValueTops, read_values
from ffmem.files import sha256
from ffmem.indexing.sentences import hash_input
from ffmem.indexing.store import Index, check_weights
from ffmem.models.memories import Memories
from ffmem.progress import Progress

VERSIONS = ("ffmem", "torch", "transformers", "numpy", "scipy", "scikit-learn")
"""The libraries that compute the numbers."""

T = TypeVar("T")


@dataclass(kw_only=True)
class ExperimentContext:
    """One index and its model, with the settings of the experiments."""

    index: Index
    model: Memories | Callable[[], Memories]
    """The index's model, or what loads it when the first experiment asks."""
    corpus: Corpus | None = None
    """Source of Section 5's sample; the other experiments read the index."""
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
    metrics: Collection[type[Any]] = ()
    """What the forward pass measures beside what is asked for: so one pass serves several."""
    details: bool = False
    """Whether predictions have the columns that no figure shows."""
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))

    def __post_init__(self) -> None:
        if self.draw not in DRAWS:
            raise FfmemError(f"Cannot draw {self.draw!r}. Draw {' or '.join(DRAWS)}.")
        for name in ("sample", "per_layer", "triggers"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise FfmemError(f"{name} = {number!r} was asked for. Give 1 or more.")
        if self.prompt is not None and self.corpus is not None:
            raise FfmemError("Both a prompt and a corpus were given. Give one of them.")
        self._measured: dict[type[Any], Any] = {}

    @cached_property
    def memories(self) -> Memories:
        """The model, which must be the index's own."""
        memories = self.model if isinstance(self.model, Memories) else self.model()
        check_weights(self.index, memories.fingerprint())
        return memories

    @property
    def threads(self) -> int:
        """CPU threads that compute the numbers."""
        return torch.get_num_threads()

    def settings(self, needs_model: bool = True) -> dict[str, Any]:
        """Return what a result says about how it was made."""
        dtype = str(self.memories.dtype).removeprefix("torch.") if needs_model else None
        return index_settings(self.index, dtype, self.seed)

    def sample_settings(self) -> dict[str, Any]:
        """Return what a result of Section 5 says about its sample."""
        source: dict[str, Any] = {"prompt": self.prompt}
        if self.corpus is not None:
            asked = "all" if self.sample is None else self.sample
            source = {"corpus": self.corpus.source, "asked": asked, "draw": self.draw}
            # How the corpus is read, where that differs from the index's own.
            first = self.index.manifest.corpus.sources[0]
            usual = {"unit": first.unit, "column": first.column, "limit": None}
            read = {name: getattr(self.corpus, name) for name in usual}
            source |= {name: value for name, value in read.items() if value != usual[name]}
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
                "threads": self.threads,
                "versions": {library: version(library) for library in VERSIONS},
                "seed": self.seed,
            }
        )

    @cached_property
    def sample_fingerprint(self) -> str:
        """SHA-256 of the sample: how it was asked for, and every prefix of it."""
        return digest([self.sample_settings(), self.prompt_sample.digest()])

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
    def values(self) -> list[ValueReadings]:
        """What every value predicts, layer by layer."""
        found = []
        with self.progress.bar("values", len(self.index), "values") as step:
            for layer, triggers in enumerate(self.top_triggers):
                found.append(read_values(self.memories, triggers, layer))
                step(self.index.layout.widths[layer])
        return found

    def value_tops(self, layer: int) -> ValueTops:
        """Return what the values of a layer promote."""
        if self.memories.head.adaptive:
            return AdaptiveTops(self.memories, layer)
        return PlainTops.read(self.index, layer)

    @cached_property
    def prompt_sample(self) -> PromptSample:
        """The sample of prefixes."""
        memories = self.memories
        longest = None if memories.context is None else memories.context - 1
        if self.prompt is not None:
            return self._one_prompt(self.prompt, longest)
        if self.corpus is None:
            raise CorpusError(
                "This experiment runs the model on prefixes. Give a corpus, such as --corpus"
                " wikitext-2:valid, or one --prompt."
            )
        # The authors' code draws the empty prefix as well.
        manifest = self.index.manifest
        shortest = 0 if manifest.compat and manifest.start.id is not None else 1
        reading = self.corpus.sentences(memories.tokenizer)
        known = check_token_ids(reading, memories.vocabulary)
        sample = draw_sample(known, self.draw, self.sample, self.seed, shortest, longest)
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

    def _one_prompt(self, prompt: str, longest: int | None) -> PromptSample:
        (encoding,) = self.memories.tokenizer.encode([prompt])
        sentence = TokenSentence(prompt, *encoding)
        if not sentence.ids or (longest is not None and len(sentence.ids) > longest):
            raise CorpusError(
                f"The prompt has {len(sentence.ids):,} tokens; the model reads 1 to"
                f" {longest or 'any number'} behind the start token."
            )
        hashed = hashlib.sha256(hash_input(prompt, sentence.ids)).hexdigest()
        return PromptSample([Example(0, sentence, [len(sentence.ids)])], 1, 0, hashed)

    def measured(self, metric: type[T]) -> T:
        """Return what the forward pass over the sample measured; run it if it has not run yet."""
        if metric not in self._measured:
            kinds = {metric, *self.metrics} - set(self._measured)
            self._measured |= evaluate_sample(self, kinds)
        found: T = self._measured[metric]
        return found
