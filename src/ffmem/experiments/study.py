"""What an experiment works on: an index, its model, a sample of prefixes; each read once.

What several experiments need is computed when the first asks for it, and kept for the others. What
takes long is laid out as tasks, which this process does, or others.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import TokenSentence, refuse_foreign
from ffmem.errors import CorpusError, FfmemError, NoStaticValues
from ffmem.experiments.cost import inference_cost
from ffmem.experiments.drawn import Drawn, Example, draw
from ffmem.experiments.heads import Heads, corpus_tokens, heads
from ffmem.experiments.inference import PARTS, VALUE_PARTS, Inference, groups
from ffmem.experiments.settings import settings
from ffmem.experiments.sharing import sample_arrays
from ffmem.experiments.value_readings import ValueReadings
from ffmem.experiments.value_tops import PlainTops
from ffmem.experiments.workplace import Labour, Workplace
from ffmem.indexing.finished import refuse_other_weights
from ffmem.indexing.store import Index
from ffmem.models.memories import Memories
from ffmem.models.threads import threads
from ffmem.progress import Progress

DRAWS = ("sentences", "tokens")


@dataclass(kw_only=True)
class Study:
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
    labour: Labour = field(default_factory=Labour)
    """Who does what takes long; others only within a `with`, which lets them go."""
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))

    def __post_init__(self) -> None:
        refuse_other_weights(self.index, self.memories.fingerprint())
        if self.draw not in DRAWS:
            raise FfmemError(f"Cannot draw {self.draw!r}. Draw {' or '.join(DRAWS)}.")
        for name in ("sample", "per_layer", "triggers"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise FfmemError(f"{name} = {number!r} was asked for. Give 1 or more.")
        if self.prompt is not None and self.corpus is not None:
            raise FfmemError("Both a prompt and a corpus were given. Give one of them.")
        self.workplace = Workplace(self.memories, self.labour, self.progress)
        self._entered = ExitStack()

    def __enter__(self) -> "Study":
        # What this process computes by itself has the workers' threads, too.
        self._entered.enter_context(threads(self.workplace.n_threads))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is KeyboardInterrupt:
            self.progress.say("Stopped. The same command goes on with what was measured.")
        with self._entered:
            self.workplace.close(is_done=kind is None)

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
        return {**source, **self.drawn.describe()}

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
    def heads(self) -> list[Heads]:
        """The one trigger of every memory that stands for it, layer by layer."""
        return [heads(self.index, layer) for layer in range(self.index.n_layers)]

    @cached_property
    def values(self) -> list[ValueReadings]:
        """What every value predicts, layer by layer."""
        tasks = [
            self.workplace.task(
                f"values of layer {layer}",
                "values",
                self.index.n_memories,
                self.workplace.lay_out("heads", heads._asdict()),
                layer=layer,
            )
            for layer, heads in enumerate(self.heads)
        ]
        outcomes = self.workplace.outcomes("values", "values", tasks)
        return [ValueReadings(**columns) for columns in outcomes]

    @cached_property
    def drawn(self) -> Drawn:
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
            return Drawn([Example(0, sentence, [len(sentence.ids)])], 1, 0)
        if self.corpus is None:
            raise CorpusError(
                "This experiment looks at the model at work and needs prefixes to do so."
                " Give a corpus, such as --corpus wikitext-2:valid, or one --prompt."
            )
        # The authors' code draws the empty prefix as well.
        shortest = 0 if self.index.manifest.compat and start is not None else 1
        reading = self.corpus.sentences(memories.tokenizer)
        known = refuse_foreign(reading, memories.vocabulary)
        drawn = draw(known, self.draw, self.sample, self.seed, shortest, longest)
        found = len(drawn.lengths)
        if self.sample is not None and found < self.sample:
            what = "sentences" if self.draw == "sentences" else "prefixes"
            self.progress.say(
                f"{self.sample:,} prefixes were asked for; {self.corpus.source} has {found:,}"
                f" {what} to draw from. All are taken."
            )
        if drawn.cut:
            self.progress.say(f"Cut at the model's context: {drawn.cut:,} sentences.")
        return drawn

    @cached_property
    def inference(self) -> Inference:
        """What the model does on the sample, measured in one pass."""
        if not self.memories.has_values and (needing := set(self.parts) & set(VALUE_PARTS)):
            raise NoStaticValues(
                f"A pass over the sample was to measure {', '.join(sorted(needing))} of static"
                " values, of which there are none. Leave that out of its parts."
            )
        drawn = self.drawn
        self.progress.say(f"Section 5: {inference_cost(self.memories, drawn, self.parts)}")
        start = self.index.manifest.start.id
        rows = [
            np.concatenate([some.examples for some in group])
            for group in groups(drawn, start, self.memories)
        ]
        sample = self.workplace.lay_out("sample", sample_arrays(drawn, start) | self._measures())
        tasks = [
            self.workplace.task(
                f"group {number} of Section 5", "section5", len(some), sample, group=number
            )
            for number, some in enumerate(rows)
        ]
        outcomes = self.workplace.outcomes("Section 5", "prefixes", tasks)
        found = Inference.empty(self.memories, len(drawn.lengths), self.parts, self.frequencies)
        for some, columns in zip(rows, outcomes, strict=True):
            for name, table in found.tables().items():
                table[some] = columns[name]
        return found

    def _measures(self) -> dict[str, ndarray]:
        """Return what a pass must know beside the sample: what to measure, and for votes more."""
        found = {"parts": np.array(sorted(self.parts)), "frequencies": self.frequencies}
        if "votes" in self.parts and not self.memories.head.adaptive:
            tops = [PlainTops.read(self.index, layer) for layer in range(self.index.n_layers)]
            found["plain"] = np.stack([layer.plain for layer in tops])
            found["negative"] = np.stack([layer.negative for layer in tops])
        return found
