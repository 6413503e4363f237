"""Puts the benchmarks' results into the README and docs/speed.md: `python benchmarks/table.py`."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- benchmarks/table.py writes from here -->\n", "<!-- to here -->"


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return found


def rows() -> list[tuple[str, str, str]]:
    """Return (what, figure, target or limit) of every benchmark."""
    best, every, values, lookups = map(result, ("best", "all", "values", "lookups"))
    effect = result("effect")
    speed, over, peak = best["tokens_per_second"], best["index_over"], best["peak_gemm_gflops"]
    found = [
        (
            "index pass, `--prefixes best`",
            f"{speed['index']:,.0f} tokens/s",
            "SmolLM2-135M, float32",
        ),
        ("… over the trunk's forward pass", f"{over['trunk']:.3f}×", "target 0.95"),
        (
            "… `--prefixes all` over the trunk's",
            f"{every['index_over']['trunk']:.3f}×",
            "target 0.90",
        ),
        ("… over the plain forward pass with logits", f"{over['plain']:.2f}×", "target 1.15"),
        ("… over hooks and `torch.topk`", f"{over['hooks and topk']:.2f}×", ""),
    ]
    if "TransformerLens and topk" in over:
        found.append(
            (
                "… over TransformerLens 4, cached activations and `torch.topk`",
                f"{over['TransformerLens and topk']:.2f}×",
                "",
            )
        )
    linear = best["trunk_gflops_in_linear_maps"]
    found += [
        ("trunk's linear maps", f"{linear:,.0f} GFLOP/s", f"peak GEMM {peak:,.0f} in the same run"),
        (
            "peak memory of a pass, 10× the corpus over 1×",
            f"{result('memory')['ratio']:.3f}×",
            "target within 1.05",
        ),
        (
            "values of all memories",
            f"{values['seconds']:,.0f} s, {values['mib_over_the_model']:,} MiB over the model",
            f"{values['share_of_peak']:.0%} of peak GEMM ({values['best_layer_gflops']:,.0f} of"
            f" {values['peak_gemm_gflops']:,.0f} GFLOP/s); target 70 %, < 1 GB",
        ),
        (
            f"{effect['ablations']} exact ablations of a {effect['tokens']}-token prompt",
            f"{effect['seconds']:.1f} s, {effect['ratio']:.1f}× one forward pass each",
            f"target 5; largest difference {effect['largest_difference']:.0e}",
        ),
        (
            "`ffmem show`, whole process",
            f"{lookups['show_process_seconds']:.2f} s",
            "target 0.3 s",
        ),
        ("show within a process, p95", f"{lookups['show_ms']['p95']:.0f} ms", "target 30 ms"),
        (
            "search of a rare word in triggers, p95",
            f"{lookups['search_rare_word_in_triggers_ms']['p95']:.1f} ms",
            "target 50 ms",
        ),
        (
            "search of a token in values, p95",
            f"{lookups['search_values_ms']['p95']:.1f} ms",
            "target 50 ms",
        ),
    ]
    parallel = _workers(result("workers"))
    rest = _pages(result("explorer"))
    return found + _experts(result("experts")) + parallel + _training(result("training")) + rest


def _experts(experts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return how fast experts are read, and, once it was measured, what a large index costs."""
    over = experts["index_over"]
    found = [
        (
            f"index pass over {experts['layers']} × {experts['experts']} experts of"
            f" {experts['size']}, over the model's own grouped forward pass",
            f"{over['own grouped pass']:.2f}×",
            f"target 0.90; over our trunk {over['trunk']:.2f}×",
        )
    ]
    if not (ROOT / "benchmarks/results/million.json").exists():
        return found
    million = result("million")
    return [
        *found,
        (
            f"index of {million['memories']:,} memories in experts, {million['tokens']:,} tokens",
            f"{million['index_bytes'] / 1e9:.1f} GB, {million['build_cpu_seconds'] / 60:,.0f}"
            f" minutes of CPU, {million['build_peak_mib']:,} MiB",
            f"target 12 GB of memory; its search file takes {million['search_file_seconds']:,.0f}"
            " s, once",
        ),
        (
            "… open; `ffmem show`, whole process",
            f"{million['open_seconds'] * 1e3:.0f} ms; {million['show_process_seconds']:.2f} s",
            "target 0.3 s",
        ),
        (
            "… search everywhere, in values, in triggers, p95",
            " and ".join(
                f"{million[f'search_{place}_p95_ms']:.0f} ms"
                for place in ("everywhere", "values", "triggers")
            ),
            "target 50 ms",
        ),
        (
            "… page of a layer, of an expert, p95",
            f"{million['layer_page_p95_ms']:.0f} and {million['expert_page_p95_ms']:.0f} ms",
            "target 300 ms; first visits included",
        ),
    ]


def _workers(workers: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return what workers cost and bring."""
    speed = workers["tokens_per_second"]
    return [
        (
            "one Ray worker over the plain pass, one thread each",
            f"{workers['one_ray_worker_over_plain']:.2f}×",
            f"target 0.9; {speed['one Ray worker']:,.0f} and {speed['plain']:,.0f} tokens/s",
        ),
        (
            "two processes of one thread over one",
            f"{workers['two_processes_over_one']:.2f}×",
            f"target 1.7; two Ray workers over one: {workers['two_ray_workers_over_one']:.2f}×",
        ),
    ]


def _training(training: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return what the training loop costs beside a bare one."""
    speed = training["tokens_per_second"]
    return [
        (
            f"`ffmem train`, {training['layers']} × {training['width']},"
            " over a bare loop with the same passes",
            f"{training['over_bare_same_passes']:.3f}×",
            f"target {training['least_ratio']}; over one pass per step:"
            f" {training['over_bare']:.2f}×",
        ),
        (
            "… with dropout, float32",
            f"{speed['ffmem train']:,.0f} tokens/s, {training['share_of_peak']:.0%} of peak GEMM",
            f"{training['gflops_in_products']:,.0f} of {training['peak_gemm_gflops']:,.0f} GFLOP/s",
        ),
    ]


def _pages(explorer: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return how long pages of the explorer take."""
    alone, crowd = explorer["alone_ms"], explorer["under_load_ms"]
    page, typed, trace = "memory page", "search at every keystroke", "trace as JSON"
    wrong = len(explorer["errors"]) + len(explorer["wrong_answers"])
    sizes = explorer["server_rss_mib_every_10_s"]
    return [
        (
            "page of a memory over HTTP, p50 and p95",
            f"{alone[page]['p50']:.0f} and {alone[page]['p95']:.0f} ms",
            "target p95 30 ms",
        ),
        (
            "search at every keystroke, p50 and p95",
            f"{alone[typed]['p50']:.0f} and {alone[typed]['p95']:.0f} ms",
            "of rare and frequent words; one letter is the slowest",
        ),
        (
            "trace of a short prompt with its grid, p50",
            f"{alone[trace]['p50'] / 1000:.1f} s",
            "not seen before, model loaded",
        ),
        (
            f"{explorer['visitors']} visitors for {explorer['seconds']:.0f} s on these two cores:"
            " page of a memory, p50 and p95",
            f"{crowd[page]['p50']:.0f} and {crowd[page]['p95']:.0f} ms",
            f"{sum(explorer['answers'].values()):,} answers, {wrong} wrong or refused; server"
            f" {sizes[0]:,} MiB before, {sizes[-1]:,} after",
        ),
    ]


def headlines() -> list[tuple[str, str, str]]:
    """Return the four rows that the README shows."""
    best, effect, lookups = map(result, ("best", "effect", "lookups"))
    over, alone = best["index_over"], result("explorer")["alone_ms"]["memory page"]
    return [
        (
            "index pass",
            f"{best['tokens_per_second']['index']:,.0f} tokens/s",
            f"{over['trunk']:.2f}× the speed of the bare forward pass, {over['plain']:.2f}× of one"
            " with logits",
        ),
        (
            "values of all 46,080 memories",
            f"{result('values')['seconds']:,.0f} s",
            f"{result('values')['share_of_peak']:.0%} of peak GEMM",
        ),
        (
            f"{effect['ablations']} exact ablations",
            f"{effect['seconds']:.1f} s",
            f"{effect['ratio']:.1f}× faster than a forward pass each",
        ),
        (
            "`ffmem show`; page of a memory",
            f"{lookups['show_process_seconds']:.2f} s; {alone['p50']:.0f} ms",
            "without torch",
        ),
    ]


def table(header: str, rows: list[tuple[str, str, str]]) -> str:
    """Return rows as a table in Markdown."""
    lines = [header, "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


TABLES = {
    "README.md": lambda: table("| | | |", headlines()),
    "docs/speed.md": lambda: table("| what | measured | notes |", rows()),
}
"""The documents with a table of measurements, and the table of each."""


def main() -> None:
    """Write the tables into the documents."""
    for name, made in TABLES.items():
        before, rest = (ROOT / name).read_text().split(BEGIN)
        (ROOT / name).write_text(before + BEGIN + made() + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
