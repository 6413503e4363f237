"""From the words of `ffmem plan` to a plan, and to lines that people read."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ffmem.cluster.limits import duration, limits, size
from ffmem.cluster.planning import Asked, Plan, plan
from ffmem.cluster.shape import shape_of
from ffmem.errors import CorpusError, FfmemError, ModelError
from ffmem.models import argument

TOKENS_PER_WORD = 1.15
"""Tokens of a subword model per word of WikiText; SmolLM2's on WikiText-2: 2,393,808 / 2,088,628,
titles left out of the former."""

SENTENCE = 32.0
"""Tokens of a sentence there."""

WORDS = {"wikitext-2": 2_088_628, "wikitext-103": 103_227_021}
"""Words of the training part, as its authors count them."""

_ASSUMED = f"{TOKENS_PER_WORD} tokens in a word, {SENTENCE:.0f} in a sentence, assumed"


class Counted(NamedTuple):
    """How large a corpus is, and how that is known."""

    tokens: int
    sentence_tokens: float
    how: str


@dataclass(frozen=True)
class Planned:
    """A plan with what it rests on."""

    asked: Asked
    counted: Counted
    speed: str
    """Where the tokens per second come from."""
    plan: Plan
    limits: list[str]
    """What will not go well."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON."""
        shape = self.asked.shape
        return {
            "model": {
                **asdict(shape),
                "parameters": shape.parameters,
                "block_parameters": shape.block_parameters,
                "flop_per_token": shape.flops(self.asked.sentence_tokens / 2),
            },
            "corpus": self.counted._asdict(),
            "workers": self.asked.workers,
            "t": self.asked.t,
            "lease_tokens": self.asked.lease_tokens,
            "dtype": self.asked.dtype,
            "bandwidth": self.asked.bandwidth,
            "tokens_per_second": self.asked.tokens_per_second,
            "speed": self.speed,
            **self.plan.to_dict(),
            "limits": self.limits,
        }


def planned(
    model: str,
    corpus: str | None = None,
    *,
    tokens: float | None = None,
    tokens_per_second: float | None = None,
    flops: float | None = None,
    measure: bool = False,
    **options: Any,
) -> Planned:
    """Return the plan for a model and a corpus."""
    for name, value in (("tokens-per-second", tokens_per_second), ("flops", flops)):
        if value is not None and not value > 0:
            raise FfmemError(f"--{name} {value:g} was given; give a number above 0.")
    if options.get("bandwidth") is not None and not options["bandwidth"] > 0:
        raise FfmemError(f"--bandwidth {options['bandwidth']:g} was given; give more than 0.")
    shape = shape_of(model)
    counted = count(corpus, tokens, model)
    rate, speed = tokens_per_second, "as given"
    if rate is None and measure:
        rate = measured(model, options.get("dtype", "float32"), options.get("t", 50))
        speed = "measured here, one process"
    elif rate is None:
        speed = "FLOP/s as given, over the FLOP of a token" if flops else "unknown"
    asked = Asked(
        shape=shape,
        tokens=counted.tokens,
        sentence_tokens=counted.sentence_tokens,
        rate=rate,
        flops=flops,
        **options,
    )
    made = plan(asked)
    return Planned(asked, counted, speed, made, limits(asked, made))


def count(corpus: str | None, tokens: float | None, model: str) -> Counted:
    """Return the size of a corpus: given, known by name, of an index, or counted."""
    if tokens is not None:
        if tokens < 1:
            raise CorpusError(f"--tokens {tokens:g} was given; give a number of at least 1.")
        return Counted(int(tokens), SENTENCE, "tokens as given; 32 in a sentence, assumed")
    if corpus is None:
        raise CorpusError("Of which corpus? Give CORPUS, or its size with --tokens.")
    if corpus in WORDS:
        n = int(WORDS[corpus] * TOKENS_PER_WORD)
        return Counted(n, SENTENCE, f"{WORDS[corpus]:,} words; {_ASSUMED}")
    path = Path(corpus).expanduser()
    if (path / "manifest.json").is_file():
        from ffmem.indexing.manifest import Manifest

        known = Manifest.read(path).corpus
        return Counted(known.tokens, known.tokens / known.sentences, "as the index says")
    if not path.exists() and (number := _number(corpus)) is not None:
        return count(None, number, model)
    return _read(corpus, model)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(corpus: str, model: str) -> Counted:
    """Return the size of a corpus, read once; in words where the model has no tokenizer here."""
    from ffmem.corpus.corpus import Corpus

    source = Corpus(corpus)
    source.refuse_missing()
    if Path(model).expanduser().is_dir():
        from transformers import AutoTokenizer

        from ffmem.models.tokenizer import SubwordTokenizer

        tokenizer = SubwordTokenizer(AutoTokenizer.from_pretrained(model))
        reading = source.sentences(tokenizer)
        n_tokens = sum(len(sentence.ids) for sentence in reading)
        return Counted(n_tokens, n_tokens / reading.n_sentences, "counted")
    from ffmem.corpus import sources

    n_words = sum(len((line.text or "").split()) for line in sources.lines(corpus, source.column))
    if not n_words:
        raise CorpusError(f"There is no word in {corpus!r}. Give a corpus that holds text.")
    how = f"{n_words:,} words, counted; {_ASSUMED}"
    return Counted(int(n_words * TOKENS_PER_WORD), SENTENCE, how)


def measured(model: str, dtype: str, t: int) -> float:
    """Return the tokens per second of the index pass over random sentences, the best of three."""
    import time

    import numpy as np

    from ffmem.indexing import sample
    from ffmem.indexing.leases import Lease, batches
    from ffmem.indexing.scan import Scan, reach
    from ffmem.models.load import load

    if not Path(model).expanduser().exists() and model not in argument.NAMED:
        raise ModelError(f"--measure needs a model, and {model!r} is only a shape. Give a folder.")
    memories = load(model, dtype=dtype)
    random = np.random.default_rng(0)
    length, n = 32, 128
    rows = [
        (i * (length + 1), random.integers(0, memories.vocabulary, length).tolist())
        for i in range(n)
    ]
    lease = Lease(0, 0, n, 0, n * length)
    scan = Scan(memories, t, "best", reach(has_start=True, empty_prefix=False))
    shape = (memories.n_layers, memories.n_memories)
    floors = [np.zeros(shape, np.float32) for _ in range(2 if memories.gated else 1)]
    drawn = sample.draw("0" * 64, [np.full(n, length)], False)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        *_, found = scan.lease(lease, batches(rows, 0, 4096), floors, drawn)
        seconds.append(time.perf_counter() - begin)
        floors = [one.weakest() for one in found.lists()]  # type: ignore[union-attr]
    return n * length / min(seconds)


def told(found: Planned) -> list[str]:
    """Return the plan in lines."""
    asked, made = found.asked, found.plan
    shape = asked.shape
    gates = "gated" if shape.gated else "ungated"
    lines = [
        f"Model    {shape.name}: {shape.layers} × {shape.memories:,} memories, {gates},"
        f" {shape.parameters / 1e9:.3g} B parameters,"
        f" {shape.flops(asked.sentence_tokens / 2) / 1e9:.3g} GFLOP per token",
        f"Corpus   {asked.tokens:,} tokens ({found.counted.how})",
        f"Leases   {made.leases:,} of {asked.lease_tokens:,} tokens,"
        f" {made.merges:,} merges in {made.levels} levels",
        f"Segment  {size(made.segment['full'])} when full, {size(made.segment['empty'])} without"
        f" triggers, {size(made.segment['mean'])} on average",
        _line("Memory", made.memory, ("worker", "model", "lists", "batch", "merge", "leader")),
        _line("Disk", made.disk, ("index", *_PARTS, "shared_folder")),
        _line("Traffic", made.traffic, tuple(made.traffic)),
        *_time(found),
    ]
    return lines + [f"Beware   {limit}" for limit in found.limits]


_PARTS = ("triggers", "values", "samples", "stats", "sentences")


def _line(title: str, bytes_of: dict[str, float], names: tuple[str, ...]) -> str:
    shown = (f"{name.replace('_', ' ')} {size(bytes_of[name])}" for name in names)
    return f"{title:8} {', '.join(shown)}"


def _time(found: Planned) -> list[str]:
    asked, made = found.asked, found.plan
    rate = asked.tokens_per_second
    if rate is None:
        return ["Time     unknown: give --tokens-per-second, --flops or --measure."]
    parts = {name: taken for name, taken in made.seconds.items() if name != "in_all"}
    listed = ", ".join(f"{name.replace('_', ' ')} {duration(n)}" for name, n in parts.items())
    return [
        f"Speed    {rate:,.4g} tokens/s per worker ({found.speed}), {asked.workers:,} workers;"
        f" the leader hears of {made.events_per_second:,.3g} tasks/s",
        f"Time     {duration(made.seconds['in_all'])}: {listed}",
        f"Longest  {str(made.bottleneck).replace('_', ' ')}",
    ]
