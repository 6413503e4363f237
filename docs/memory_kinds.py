"""Writes docs/results/memory-kinds: seven kinds of memory, each at its best learning rate.

    PYTHONPATH=. .venv/bin/python docs/memory_kinds.py WORK

Trains every kind at equal (moe: equal active) parameters and equal tokens on WikiText-2, with every
rate of one grid; then two more seeds at the best rate of each kind. Then persistent memory in other
shapes and with other initial scales, and a ReLU model of the same depth beside each depth.

Each run is recorded in results.json when it ends, and a recorded run is not made again: the script
may be stopped at any time. WORK holds the run that was stopped. Runs go one after the other.
"""

import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import altair as alt
from scipy.stats import t as student_t

from docs.result_pages import table, write_sections
from ffmem.corpus.corpus import Corpus
from ffmem.experiments.charts import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    chart_svg,
    plot,
    series_color,
    styled,
    svg_file,
)
from ffmem.files import write_text
from ffmem.networks.memories import PersistentKeys, PersistentValues
from ffmem.progress import Progress
from ffmem.records import check_same_settings
from ffmem.training.config import TrainConfig
from ffmem.training.train import train

OUT = Path(__file__).parent / "results" / "memory-kinds"
KINDS = ("relu", "gelu", "swiglu", "softmax", "persistent", "lambda", "moe")
COLORS = dict(zip(KINDS, (BLUE, ORANGE, GREEN, GRAY, VERMILION, PURPLE, SKY), strict=True))
RATES = (3e-3, 1e-2, 3e-2)
SEEDS = (0, 1, 2)
SETTINGS: dict[str, Any] = {
    "layers": 4,
    "width": 64,
    "heads": 2,
    "vocabulary": 10_000,
    "cutoffs": [2000],
    "batch_tokens": 1024,
    "pass_tokens": 1024,
    "dropout": 0.0,
    "epochs": 1,
    "evaluate_every": 500,
    "threads": 1,
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One model to train; fields that are None are as in SETTINGS."""

    kind: str
    rate: float
    seed: int = 0
    heads: int | None = None
    layers: int | None = None
    memories: int | None = None
    """Memories per layer (persistent: per head). None: as many parameters as relu has."""
    key_scale: float = 1.0
    """Factor of the initial keys of persistent slots."""
    value_scale: float = 1.0
    epochs: int | None = None

    @property
    def name(self) -> str:
        """Name of its folder."""
        parts = (f"{name}={value}" for name, value in asdict(self).items() if name != "kind")
        return "-".join([self.kind, *parts])

    def config(self) -> TrainConfig:
        """Return the options of its training."""
        changed = {name: getattr(self, name) for name in ("heads", "layers", "memories", "epochs")}
        options = SETTINGS | {name: value for name, value in changed.items() if value is not None}
        matches = self.kind != "relu" and self.memories is None
        return TrainConfig(
            memory=self.kind,
            match="relu" if matches else None,
            seed=self.seed,
            learning_rate=self.rate,
            **options,
        )


SHAPES: dict[str, dict[str, Any]] = {
    "as above (2 heads, 4 layers)": {},
    "initial values × 4": {"value_scale": 4.0},
    "initial values × 1/4": {"value_scale": 0.25},
    "4 heads": {"heads": 4},
    "8 layers, fewer slots": {"layers": 8, "memories": 66},
    "1 head": {"heads": 1},
    "initial keys × 1/4": {"key_scale": 0.25},
    "twice the slots (more parameters)": {"memories": 522},
    "6 layers, fewer slots": {"layers": 6, "memories": 131},
}
"""Persistent memory in other shapes."""

DEEPER_RELU: dict[str, dict[str, Any]] = {
    "relu, 6 layers": {"layers": 6, "memories": 130},
    "relu, 8 layers": {"layers": 8, "memories": 66},
}
"""The ReLU model at the same depths, with as many parameters."""


class Results:
    """The recorded runs; asking for another one trains it."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.path = OUT / "results.json"
        self.rows: list[Row] = []
        if self.path.exists():
            recorded = json.loads(self.path.read_text("utf-8"))
            check_same_settings(f"{self.path} has runs", recorded["settings"], SETTINGS)
            self.rows = recorded["runs"]

    def of(self, trial: Trial) -> Row:
        """Return what came of a trial, recorded or made now."""
        for row in self.rows:
            if row["trial"] == asdict(trial):
                return row
        folder = self.work / trial.name
        with scaled_slots(trial.key_scale, trial.value_scale):
            result = train(
                trial.config(),
                Corpus("wikitext-2:train"),
                folder,
                Corpus("wikitext-2:valid"),
                progress=Progress(),
            )
        curve = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
        row = {
            "trial": asdict(trial),
            "parameters": result.plan.parameters,
            "active_parameters": result.plan.active_parameters,
            "memories": result.plan.memories,
            "tokens": result.tokens,
            "seconds": round(result.seconds, 1),
            "valid_perplexity": result.last_valid_perplexity,
            "curve": [
                [one["tokens"], one["valid_perplexity"]]
                for one in curve
                if "valid_perplexity" in one
            ],
        }
        self.rows.append(row)
        self.write()
        shutil.rmtree(folder)
        return row

    def write(self) -> None:
        """Record the runs, a line each."""
        head = json.dumps({"settings": SETTINGS, "rates": RATES, "seeds": SEEDS})
        runs = ",\n".join(map(json.dumps, self.rows))
        write_text(self.path, f'{head[:-1]}, "runs": [\n{runs}\n]}}\n')


@contextmanager
def scaled_slots(key_scale: float, value_scale: float) -> Iterator[None]:
    """Multiply the initial keys and values of persistent slots by these factors."""
    before = {PersistentKeys: PersistentKeys.__init__, PersistentValues: PersistentValues.__init__}

    def make(kind: Any, factor: float) -> Any:
        def init(self: Any, config: Any) -> None:
            before[kind](self, config)
            self.init_std *= factor

        return init

    try:
        for kind, factor in ((PersistentKeys, key_scale), (PersistentValues, value_scale)):
            kind.__init__ = make(kind, factor)  # type: ignore[method-assign]
        yield
    finally:
        for kind, init in before.items():
            kind.__init__ = init  # type: ignore[method-assign]


# What the page says, from the recorded runs alone


def runs_of(found: Row, **values: Any) -> list[Row]:
    """Return the runs whose trial has these values, and the defaults elsewhere."""
    wanted = asdict(Trial("", 0.0)) | values
    free = {"kind", "rate", "seed"} - values.keys()
    return [
        row
        for row in found["runs"]
        if all(row["trial"][name] == value for name, value in wanted.items() if name not in free)
    ]


def best_rate(found: Row, kind: str) -> float:
    """Return the rate of lowest perplexity with the first seed."""
    tried = runs_of(found, kind=kind, seed=SEEDS[0])
    rate: float = min(tried, key=lambda row: row["valid_perplexity"])["trial"]["rate"]
    return rate


def tuned(found: Row, kind: str, **values: Any) -> list[float]:
    """Return the perplexities of a kind at its best rate, by seed."""
    runs = runs_of(found, kind=kind, rate=best_rate(found, kind), **values)
    runs.sort(key=lambda row: int(row["trial"]["seed"]))
    return [row["valid_perplexity"] for row in runs]


def interval(numbers: list[float]) -> float:
    """Return half the width of the 95 % interval of a mean (Student's t)."""
    if len(numbers) < 2:
        return float("nan")
    error = statistics.stdev(numbers) / len(numbers) ** 0.5
    return float(student_t.ppf(0.975, len(numbers) - 1)) * error


def spread(numbers: list[float]) -> str:
    """Return mean ± half the interval; a single number has none."""
    if len(numbers) < 2:
        return f"{numbers[0]:.1f}"
    return f"{statistics.mean(numbers):.1f} ± {interval(numbers):.1f}"


def sections(found: Row) -> dict[str, str]:
    """Return the tables of the page."""
    ranked = sorted(KINDS, key=lambda kind: statistics.mean(tuned(found, kind)))
    head = ["memory", "active parameters", "memories per layer", "best rate", "perplexity", "seeds"]
    kinds = [head]
    for kind in ranked:
        numbers = tuned(found, kind)
        run = runs_of(found, kind=kind)[0]
        each = ", ".join(f"{number:.1f}" for number in numbers)
        rate = f"{best_rate(found, kind):g}"
        cells = [kind, f"{run['active_parameters']:,}", memories_shown(kind, run), rate]
        kinds.append([*cells, spread(numbers), each])
    rates = [["memory", *(f"{rate:g}" for rate in found["rates"])]]
    for kind in ranked:
        by_rate = {row["trial"]["rate"]: row for row in runs_of(found, kind=kind, seed=SEEDS[0])}
        best = best_rate(found, kind)
        cells = [f"{by_rate[rate]['valid_perplexity']:.1f}" for rate in found["rates"]]
        cells = [
            f"**{cell}**" if rate == best else cell
            for rate, cell in zip(found["rates"], cells, strict=True)
        ]
        rates.append([kind, *cells])
    shapes = [["model", "parameters", "slots or memories", "perplexity"]]
    for kind, named in (("persistent", SHAPES), ("relu", DEEPER_RELU)):
        for name, changes in named.items():
            rate = best_rate(found, kind)
            for run in runs_of(found, kind=kind, seed=SEEDS[0], rate=rate, **changes):
                cells = [name, f"{run['parameters']:,}", f"{run['memories']:,}"]
                shapes.append([*cells, f"{run['valid_perplexity']:.1f}"])
    return {
        "kinds": table(kinds),
        "rates": table(rates),
        "shapes": table(shapes),
        "answer": answer(found),
        "depth": depth(found),
    }


def memories_shown(kind: str, run: Row) -> str:
    """Return how many memories a layer has, in words."""
    n = f"{run['memories']:,}"
    heads, distances = SETTINGS["heads"], TrainConfig.distances
    words = {
        "persistent": f"{n} in each of {heads} heads",
        "lambda": f"{n} in its feed-forward layer, {heads} × {distances} static keys",
        "moe": f"{n} in each of {TrainConfig.experts} experts, top {TrainConfig.top_experts}",
    }
    return words.get(kind, n)


def answer(found: Row) -> str:
    """Return how far persistent memory is from the feed-forward layer, at the best rates."""
    relu, persistent = tuned(found, "relu"), tuned(found, "persistent")
    gaps = [two - one for one, two in zip(relu, persistent, strict=True)]
    gap, half = statistics.mean(gaps), interval(gaps)
    side = "behind" if gap > 0 else "ahead of"
    text = (
        f"At its best rate, persistent memory is **{abs(gap):.1f} points of perplexity {side}"
        f" ReLU** ({len(gaps)} seeds, paired, 95 % interval ± {half:.1f};"
        f" {abs(gap) / statistics.mean(relu):.0%} of ReLU's {statistics.mean(relu):.1f})."
    )
    untuned = runs_of(found, kind="relu", rate=3e-3), runs_of(found, kind="persistent", rate=3e-3)
    if all(untuned):
        one, two = (runs[0]["valid_perplexity"] for runs in untuned)
        text += f" With one rate for all, 0.003, it would be {two - one:.1f} points."
    return text + "\n"


def depth(found: Row) -> str:
    """Return how far persistent memory is behind a ReLU model of the same depth, with one seed."""
    gaps = []
    for layers in (SETTINGS["layers"], 6, 8):
        shapes = {kind: {} for kind in ("relu", "persistent")}
        if layers != SETTINGS["layers"]:
            shapes = {
                "relu": DEEPER_RELU[f"relu, {layers} layers"],
                "persistent": SHAPES[f"{layers} layers, fewer slots"],
            }
        one, two = (tuned(found, kind, seed=SEEDS[0], **of)[0] for kind, of in shapes.items())
        gaps.append(f"{two - one:.1f} points with {layers} layers")
    return f"The distance to a ReLU model of the same depth is {', '.join(gaps)} (seed 0).\n"


def draw(found: Row) -> None:
    """Write the curves of validation at the best rates, one line for each run."""
    points = [
        {"tokens": tokens, "perplexity": number, "series": kind, "run": f"{kind} {number_of}"}
        for kind in KINDS
        for number_of, row in enumerate(runs_of(found, kind=kind, rate=best_rate(found, kind)))
        for tokens, number in row["curve"]
    ]
    x = alt.X("tokens:Q", title="tokens read", axis=alt.Axis(format="~s", tickCount=5))
    numbers = [point["perplexity"] for point in points]
    ends = [min(numbers) * 0.97, max(numbers) * 1.03]
    ticks = [tick for tick in range(10, 1000, 20) if ends[0] <= tick <= ends[1]]
    y = alt.Y(
        "perplexity:Q",
        title="validation perplexity",
        scale=alt.Scale(type="log", domain=ends, nice=False),
        axis=alt.Axis(values=ticks),
    )
    lines = plot(points).mark_line(point=True, strokeWidth=1.2)
    chart = styled(lines.encode(x=x, y=y, color=series_color(COLORS), detail="run:N"))
    title = "Seven kinds of memory at equal active parameters on WikiText-2"
    text = "Validation perplexity over the tokens read; one line for each kind and seed."
    write_text(OUT / "curves.svg", svg_file(chart_svg("curves", title, text, chart)))


def main() -> None:
    """Train what is missing, then write what was found."""
    OUT.mkdir(parents=True, exist_ok=True)
    results = Results(Path(sys.argv[1]))
    for rate in RATES:
        for kind in KINDS:
            results.of(Trial(kind, rate))
    found = {"rates": list(RATES), "runs": results.rows}
    for kind in ("relu", "persistent"):
        for seed in SEEDS[1:]:
            results.of(Trial(kind, best_rate(found, kind), seed))
    for kind, named in (("persistent", SHAPES), ("relu", DEEPER_RELU)):
        for changes in named.values():
            results.of(Trial(kind, best_rate(found, kind), **changes))
    for seed in SEEDS[1:]:
        for kind in KINDS:
            results.of(Trial(kind, best_rate(found, kind), seed))
    results.write()
    write_sections(OUT / "README.md", sections(found))
    draw(found)


if __name__ == "__main__":
    main()
