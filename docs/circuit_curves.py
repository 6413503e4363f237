"""Makes docs/results/circuits: `python -m docs.circuit_curves WORK MODEL_OR_DIR…`.

Finds the circuits of ten prompts in each model: 64 nodes with their edges, and how much of the
target's logit the first 1, 2, 4, … 65,536 nodes carry, beside random sets. Coefficients are ablated
to 0 and, where an index is given, to their mean in it. A prompt that is in WORK is not measured
again: run it again after an interruption.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import altair as alt

from docs.result_pages import code, percent, table, write_sections
from ffmem.experiments.charts import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    VERMILION,
    chart_svg,
    layered,
    panels,
    plot,
    quantity,
    same_axis,
    series_color,
    styled,
    svg_file,
)
from ffmem.files import write_text
from ffmem.interventions.circuit import choose_nodes, circuit
from ffmem.interventions.circuit_ablations import (
    RANDOM_SETS,
    CircuitQuestion,
    measure_faithfulness,
    target_logit,
)
from ffmem.interventions.circuit_results import CircuitResult, FaithfulnessPoint
from ffmem.interventions.circuit_svg import draw_circuit
from ffmem.interventions.forward import LoadedModel, find_target, open_model
from ffmem.progress import Progress

OUT = Path(__file__).parent / "results" / "circuits"
NODES = 64
"""Of a circuit whose edges are found and measured."""
LONGEST = 2**16
"""Nodes at the end of the curve."""
SHOWN_SIZES = (1, 4, 16, 64, 256, 1024, 4096, 2**14, 2**16)
TOLD_NODES = 8
"""Nodes that are named in results.json."""
ENOUGH = 0.8
"""Faithfulness that counts as most of the logit."""

PROMPTS = [
    ("fact", "The Eiffel Tower is located in the city of", " Paris"),
    ("fact", "Shakespeare wrote the play Romeo and", " Juliet"),
    ("opposite", "The opposite of hot is", " cold"),
    ("analogy", "Paris is to France as Rome is to", " Italy"),
    ("grammar", "She told me that she had never", " been"),
    ("numbers", "Two plus two equals", " four"),
    ("list", "One, two, three, four, five,", " six"),
    ("list", "Monday, Tuesday, Wednesday,", " Thursday"),
    ("copy", "When Mary and John went to the store, John gave a drink to", " Mary"),
    ("copy", "def add(a, b): return a +", " b"),
]
"""Kind, prompt and target: what both models predict."""
TOLD = {"smollm2-135m, mean": 7, "gemma-3-270m, zero": 0}
"""The prompts whose circuits the page tells."""
FIELDS = ("faithfulness", "random_faithfulness", "completeness", "random_completeness")
"""Of a point of a curve, after its number of nodes."""
Row = dict[str, Any]


def faithfulness_curve(
    loaded: LoadedModel,
    prompt: str,
    *,
    target: str,
    nodes: int,
    ablation: str = "auto",
    progress: Progress,
) -> list[FaithfulnessPoint]:
    """Return how much of the target's logit the first 1, 2, 4, … nodes carry, up to `nodes`.

    Edges are not found, and single nodes not ablated, so thousands of nodes take seconds.
    """
    id = find_target(loaded.memories, target)
    question = CircuitQuestion.of(loaded, prompt, id, -1, ablation)
    logit = float(target_logit(loaded.memories.head, question.forward.output, id)[0])
    places = choose_nodes(question, nodes).places
    return measure_faithfulness(question, places, logit, seed=0, say=progress)[0]


def measure(loaded: LoadedModel, work: Path, number: int, ablation: str) -> Row:
    """Return what was found for one prompt, and leave its drawing in WORK."""
    kind, prompt, target = PROMPTS[number]
    name = f"{loaded.memories.source.replace('/', '-')}-{ablation}-{number}"
    done = work / f"{name}.json"
    if done.exists():
        found: Row = json.loads(done.read_text(encoding="utf-8"))
        if (found["prompt"], found["target"]) == (prompt, target):
            return found
    before = time.perf_counter(), time.process_time()
    options = {"target": target, "ablation": ablation, "progress": Progress()}
    result = circuit(loaded, prompt, nodes=NODES, **options)
    seconds, cpu_seconds = time.perf_counter() - before[0], time.process_time() - before[1]
    curve = faithfulness_curve(loaded, prompt, nodes=LONGEST, **options)
    found = {
        "model": loaded.memories.source,
        "kind": kind,
        "prompt": prompt,
        "target": target,
        "tokens": len(result.tokens),
        "memories": len(loaded.memories.layout),
        "rank": result.target.rank,
        "probability": result.target.probability,
        "logit": result.logit,
        "ablated_logit": result.ablated_logit,
        "ablation": result.ablation,
        "estimated_by": result.estimated_by,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "faithfulness": result.faithfulness,
        "completeness": result.completeness,
        "correlation": result.correlation,
        "edge_correlation": result.edge_correlation,
        "edges_found": result.edges_found,
        "nodes_by_layer": _count([node.layer for node in result.nodes], result.layers),
        "nodes_at_last_token": sum(node.position == result.position for node in result.nodes),
        "opposing_nodes": sum(node.exact < 0 for node in result.nodes),
        "nodes": _told_nodes(result),
        "curve": [[one.nodes, *(_short(getattr(one, field)) for field in FIELDS)] for one in curve],
    }
    found = {
        field: _short(value) if isinstance(value, float) else value
        for field, value in found.items()
    }
    write_text(work / f"{name}.svg", draw_circuit(result) + "\n")
    write_text(done, json.dumps(found, ensure_ascii=False) + "\n")
    return found


def _count(layers: list[int], n: int) -> list[int]:
    return [layers.count(layer) for layer in range(n)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _told_nodes(result: CircuitResult) -> list[Row]:
    """Return the first nodes with what they promote and which node they feed most."""
    feeds: dict[str, str] = {}
    for edge in result.edges:  # the largest first
        feeds.setdefault(edge.source, edge.target)
    return [
        {
            "id": node.id,
            "token": result.tokens[node.position],
            "coefficient": _short(node.coefficient),
            "baseline": _short(node.baseline),
            "estimate": _short(node.estimate),
            "exact": _short(node.exact),
            "feeds": feeds.get(node.id),
            "promotes": node.value_top[:3],
        }
        for node in result.nodes[:TOLD_NODES]
    ]


# The page


def spread(numbers: list[float]) -> str:
    """Return median and range in percent."""
    low, high = percent(min(numbers)), percent(max(numbers))
    return f"{percent(statistics.median(numbers))} ({low} to {high})"


def at(run: Row, size: int) -> dict[str, float]:
    """Return a point of a run's curve."""
    (point,) = [one for one in run["curve"] if one[0] == size]
    return dict(zip(FIELDS, point[1:], strict=True))


def enough(run: Row) -> int | None:
    """Return the size from which on the curve stays at most of the logit; None if it does not."""
    few = [size for size, faithfulness, *_ in run["curve"] if faithfulness < ENOUGH]
    more = [size for size, *_ in run["curve"] if size > max(few, default=0)]
    return more[0] if more else None


def by_series(results: Row) -> dict[str, list[Row]]:
    """Return the runs of each model and ablation."""
    found: dict[str, list[Row]] = {}
    for run in results["runs"]:
        found.setdefault(f"{run['model']}, {run['ablation']}", []).append(run)
    return found


def sections(results: Row) -> dict[str, str]:
    """Return the tables and sentences of the page, from results.json alone."""
    series = by_series(results)
    return {
        "setting": _setting(results),
        "curves": _curves(series),
        "findings": _findings(series),
        "prompts": _prompts(series),
        "estimates": _estimates(series),
        "told": _told(series),
    }


def _setting(results: Row) -> str:
    indexes = "; ".join(
        f"{name}: {one['sentences']:,} sentences, {one['tokens']:,} tokens of {one['corpus']}"
        for name, one in results["indexes"].items()
    )
    return (
        f"Circuits of {results['nodes']} nodes, curves to {results['longest']:,}. Random sets: mean"
        f" of {results['random_sets']}, of other active memories at the same layers and positions."
        f" An ablated coefficient becomes 0 (zero), or its mean in an index (mean; {indexes}).\n"
    )


def _curves(series: dict[str, list[Row]]) -> str:
    parts = []
    for field in ("faithfulness", "completeness"):
        rows = [[f"{field}: nodes", *series]]
        for size in SHOWN_SIZES:
            points = [[at(run, size)[field] for run in runs] for runs in series.values()]
            rows.append([f"{size:,}", *map(spread, points)])
        random = [
            statistics.median(at(run, size)[f"random_{field}"] for run in runs)
            for runs in series.values()
            for size in SHOWN_SIZES
            if size <= 4096
        ]
        parts.append(
            f"{table(rows)}\nRandom sets of up to 4,096 nodes: {field} of"
            f" {percent(min(random), 1)} to {percent(max(random), 1)} (medians).\n"
        )
    # The start token's coefficients are no nodes.
    shares = [
        LONGEST / (run["memories"] * (run["tokens"] - 1))
        for runs in series.values()
        for run in runs
    ]
    return (
        f"Median over the prompts, and range. {LONGEST:,} nodes are {percent(min(shares))} to"
        f" {percent(max(shares))} of all memories at all positions.\n\n" + "\n".join(parts)
    )


def _findings(series: dict[str, list[Row]]) -> str:
    def medians(field: str, size: int) -> str:
        numbers = [[at(run, size)[field] for run in runs] for runs in series.values()]
        return ", ".join(percent(statistics.median(of)) for of in numbers)

    sizes = [enough(run) for runs in series.values() for run in runs]
    few = [size for size in sizes if size is not None and size <= 4096]
    return (
        f"- **{NODES} nodes do not carry a prediction.** With every other memory ablated, they"
        f" carry {medians('faithfulness', NODES)} of the logit (medians; {'; '.join(series)});"
        f" 4,096 nodes {medians('faithfulness', 4096)}; {LONGEST:,} nodes"
        f" {medians('faithfulness', LONGEST)}. Only in {len(few)} of {len(sizes)} circuits,"
        f" faithfulness stays at {percent(ENOUGH)} or more from 4,096 nodes or fewer on.\n"
        f"- **But the prediction depends on them.** Without these {NODES} alone, it loses"
        f" {medians('completeness', NODES)}; without {NODES} random ones, which are active too,"
        f" {medians('random_completeness', NODES)}.\n"
    )


def _prompts(series: dict[str, list[Row]]) -> str:
    rows = [["", "prompt", "target", "p by model", *series]]
    for runs in zip(*series.values(), strict=True):
        chances = {run["model"]: percent(run["probability"]) for run in runs}
        cells = [
            f"{percent(run['faithfulness'])}, {percent(run['completeness'])};"
            f" {f'{size:,}' if (size := enough(run)) else f'> {LONGEST:,}'}"
            for run in runs
        ]
        first = runs[0]
        names = [first["kind"], f"{first['prompt']} …", code(first["target"])]
        rows.append([*names, ", ".join(chances.values()), *cells])
    return (
        f"Faithfulness and completeness of {NODES} nodes; the number of nodes from which on"
        f" faithfulness stays at {percent(ENOUGH)} or more.\n\n{table(rows)}"
    )


def _estimates(series: dict[str, list[Row]]) -> str:
    rows = [["median over prompts (range)", *series]]

    def add(name: str, numbers: list[list[float]], digits: int) -> None:
        shown = [
            f"{statistics.median(of):.{digits}f} ({min(of):.{digits}f} to {max(of):.{digits}f})"
            for of in numbers
        ]
        rows.append([name, *(one.replace("-", "−") for one in shown)])

    runs = list(series.values())
    for name, field in (("nodes", "correlation"), ("edges shown", "edge_correlation")):
        numbers = [[run[field] for run in of] for of in runs]
        add(f"rank correlation of estimates with exact numbers, {name}", numbers, 2)
    last = [[100 * run["nodes_at_last_token"] / NODES for run in of] for of in runs]
    add(f"of {NODES} nodes, % at the last token", last, 0)
    thirds = [[100 * _upper(run["nodes_by_layer"]) for run in of] for of in runs]
    add("… % in the last third of the layers", thirds, 0)
    opposing = [[100 * run["opposing_nodes"] / NODES for run in of] for of in runs]
    add("… % that oppose the target (exact < 0)", opposing, 0)
    add(f"seconds for {NODES} nodes", [[run["seconds"] for run in of] for of in runs], 0)
    add("… CPU seconds", [[run["cpu_seconds"] for run in of] for of in runs], 0)
    ratios = [[_exact_over_estimate(of, first) for of in runs] for first in (True, False)]
    rows.append(
        [
            f"first {TOLD_NODES} nodes: exact / estimate in layer 0, in others (medians)",
            *(f"{zero:.1f}, {others:.1f}" for zero, others in zip(*ratios, strict=True)),
        ]
    )
    return table(rows)


def _exact_over_estimate(runs: list[Row], first_layer: bool) -> float:
    nodes = [node for run in runs for node in run["nodes"]]
    own = [node for node in nodes if node["id"].startswith("L0N") == first_layer]
    return statistics.median(node["exact"] / node["estimate"] for node in own)


def _upper(counts: list[int]) -> float:
    """Return the share of nodes in the last third of the layers."""
    n = len(counts)
    return sum(counts[n - n // 3 :]) / sum(counts)


def _told(series: dict[str, list[Row]]) -> str:
    parts = []
    for name, number in TOLD.items():
        run = series[name][number]
        parts.append(f"{name}, `{run['prompt']}` → {code(run['target'])}, the first nodes:\n")
        rows = [["node", "after", "m", "mean", "estimate", "exact", "feeds most", "m · v promotes"]]
        for node in run["nodes"]:
            numbers = [node[name] for name in ("coefficient", "baseline", "estimate", "exact")]
            rows.append(
                [
                    node["id"],
                    code(node["token"]),
                    *(f"{number:+.3g}".replace("-", "−") if number else "0" for number in numbers),
                    node["feeds"] or "",
                    " ".join(map(code, node["promotes"])),
                ]
            )
        parts.append(table(rows))
    return "\n".join(parts)


def draw(series: dict[str, list[Row]]) -> alt.VConcatChart:
    """Return faithfulness and completeness over nodes: median and range, and random sets."""
    colors = dict(zip(series, (BLUE, ORANGE, GREEN, VERMILION), strict=False))
    colors["random nodes"] = GRAY
    charts = []
    for field in ("faithfulness", "completeness"):
        bands, lines = [], []
        for name, runs in series.items():
            for size, *_ in runs[0]["curve"]:
                own = [100 * at(run, size)[field] for run in runs]
                random = [100 * at(run, size)[f"random_{field}"] for run in runs]
                bands.append({"nodes": size, "low": min(own), "high": max(own), "series": name})
                for line, of, numbers in (name, name, own), (name + " r", "random nodes", random):
                    median = statistics.median(numbers)
                    lines.append({"nodes": size, "median": median, "series": of, "line": line})
        x = alt.X(
            "nodes:Q",
            title="nodes",
            scale=alt.Scale(type="log", base=2, nice=False),
            axis=alt.Axis(values=[16**power for power in range(5)], format=",d", labelFlush=True),
        )
        y = quantity("low", f"{field}, %", (-40, 140))
        color = series_color(colors)
        color["legend"]["symbolOpacity"] = 1
        band = plot(bands).mark_area(opacity=0.13).encode(x=x, y=y, y2="high:Q", color=color)
        line = plot(lines).mark_line(point=True)
        charts.append(
            layered(band, line.encode(x=x, y=same_axis(y, "median"), color=color, detail="line:N"))
        )
    return panels(charts)


def write_page(results: Row) -> None:
    """Write chart and sections, from results.json alone."""
    title = "Faithfulness and completeness of circuits over the number of nodes"
    text = f"Median and range (cut) over {len(PROMPTS)} prompts; grey: random sets of memories."
    chart = styled(draw(by_series(results)))
    write_text(OUT / "curves.svg", svg_file(chart_svg("curves", title, text, chart)))
    write_sections(OUT / "README.md", sections(results))


def main() -> None:
    """Measure what is missing, then write what was found."""
    work = Path(sys.argv[1])
    work.mkdir(parents=True, exist_ok=True)
    runs, indexes = [], {}
    for model_or_index in sys.argv[2:]:
        loaded = open_model(model_or_index)
        numbers = range(len(PROMPTS))
        if loaded.index is not None:
            runs += [measure(loaded, work, number, "mean") for number in numbers]
            corpus = loaded.index.manifest.corpus
            indexes[loaded.memories.source] = {
                "corpus": corpus.sources[0].source,
                "sentences": corpus.sentences,
                "tokens": corpus.tokens,
            }
        runs += [measure(loaded, work, number, "zero") for number in numbers]
    head = {"nodes": NODES, "longest": LONGEST, "random_sets": RANDOM_SETS, "indexes": indexes}
    text = json.dumps(head, ensure_ascii=False)
    lines = ",\n".join(json.dumps(run, ensure_ascii=False) for run in runs)  # a line each
    write_text(OUT / "results.json", f'{text[:-1]}, "runs": [\n{lines}\n]}}\n')
    for name, number in TOLD.items():
        drawing = work / f"{name.replace(', ', '-').replace('/', '-')}-{number}.svg"
        write_text(OUT / drawing.name, drawing.read_text(encoding="utf-8"))
    write_page(json.loads((OUT / "results.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
