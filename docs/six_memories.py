"""Makes docs/results/six-memories: `python docs/six_memories.py WORK [SEED…]`.

Trains six kinds of memory at equal parameters and equal tokens on WikiText-2, once for each
seed, into WORK/KIND-SEED; what is there already is taken as it is, what was stopped goes on. Then
writes the table, the curves and their figure. Runs go one after the other.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import altair as alt

from ffmem.corpus.corpus import Corpus
from ffmem.experiments.charts import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILION,
    chart_svg,
    plot,
    series_color,
    styled,
    svg_file,
)
from ffmem.files import write_text
from ffmem.progress import Progress
from ffmem.training.config import TrainConfig
from ffmem.training.train import train

OUT = Path(__file__).parent / "results" / "six-memories"
KINDS = ("relu", "gelu", "swiglu", "softmax", "persistent", "lambda")
COLORS = dict(zip(KINDS, (BLUE, ORANGE, GREEN, GRAY, VERMILION, PURPLE), strict=True))
SIZES = {
    "layers": 4,
    "width": 64,
    "heads": 2,
    "vocabulary": 10_000,
    "cutoffs": [2000],
    "batch_tokens": 1024,
    "pass_tokens": 1024,
    "learning_rate": 3e-3,
    "dropout": 0.0,
    "epochs": 2,
    "evaluate_every": 500,
    "threads": 1,
}
Row = dict[str, Any]


def run(work: Path, kind: str, seed: int) -> Row:
    """Return what came of one training, made now or found."""
    folder = work / f"{kind}-{seed}"
    match = None if kind == "relu" else "relu"
    config = TrainConfig(memory=kind, match=match, seed=seed, **SIZES)
    corpora = Corpus("wikitext-2:train"), Corpus("wikitext-2:valid")
    result = train(config, corpora[0], folder, corpora[1], progress=Progress())
    rows = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    return {
        "kind": kind,
        "seed": seed,
        "parameters": result.plan.parameters,
        "memories": result.plan.memories,
        "tokens": result.tokens,
        "tokens_per_second": result.tokens_per_second,
        "valid_perplexity": result.last_valid_perplexity,
        "curve": [
            {"tokens": row["tokens"], "valid_perplexity": row["valid_perplexity"]}
            for row in rows
            if "valid_perplexity" in row
        ],
        "loss": [[row["step"], round(row["loss"], 4)] for row in rows if "loss" in row],
    }


def table(found: list[Row]) -> list[str]:
    """Return the Markdown table: one line per kind, the best first."""
    lines = []
    for kind in KINDS:
        own = [row for row in found if row["kind"] == kind]
        numbers = [row["valid_perplexity"] for row in own]
        each = ", ".join(f"{number:.1f}" for number in numbers)
        cells = [kind, f"{own[0]['parameters']:,}", f"{own[0]['memories']:,}"]
        lines.append((statistics.mean(numbers), [*cells, f"{statistics.mean(numbers):.1f}", each]))
    head = ["memory", "parameters", "memories", "validation perplexity", "by seed"]
    rows = [head, ["---"] * len(head), *(cells for _, cells in sorted(lines))]
    return ["| " + " | ".join(row) + " |" for row in rows]


def draw(found: list[Row]) -> None:
    """Write the curves of validation, one line for each run."""
    points = [
        point | {"series": row["kind"], "run": f"{row['kind']} {row['seed']}"}
        for row in found
        for point in row["curve"]
    ]
    x = alt.X("tokens:Q", title="tokens read", axis=alt.Axis(format="~s", tickCount=5))
    numbers = [point["valid_perplexity"] for point in points]
    ends = [min(numbers) * 0.97, max(numbers) * 1.03]
    ticks = [tick for tick in range(10, 1000, 20) if ends[0] <= tick <= ends[1]]
    y = alt.Y(
        "valid_perplexity:Q",
        title="validation perplexity",
        scale=alt.Scale(type="log", domain=ends, nice=False),
        axis=alt.Axis(values=ticks),
    )
    lines = plot(points).mark_line(point=True, strokeWidth=1.2)
    chart = styled(lines.encode(x=x, y=y, color=series_color(COLORS), detail="run:N"))
    title = "Six kinds of memory at equal parameters on WikiText-2"
    text = "Validation perplexity over the tokens read; one line for each kind and seed."
    write_text(OUT / "curves.svg", svg_file(chart_svg("curves", title, text, chart)))


def main() -> None:
    """Train what is missing, then write what was found."""
    work, *others = sys.argv[1:]
    seeds = [int(seed) for seed in others] or [0, 1]
    found = [run(Path(work), kind, seed) for seed in seeds for kind in KINDS]
    OUT.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"settings": SIZES, "seeds": seeds})
    runs = ",\n".join(map(json.dumps, found))  # a line each
    write_text(OUT / "results.json", f'{head[:-1]}, "runs": [\n{runs}\n]}}\n')
    write_text(OUT / "table.md", "\n".join(table(found)) + "\n")
    draw(found)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
