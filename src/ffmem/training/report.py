"""The readable output of a run: progress lines, the model card, the figure of the curve."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from ffmem.experiments.charts import (
    BLUE,
    VERMILION,
    Chart,
    chart_svg,
    layered,
    plot,
    series,
    series_color,
    styled,
    svg_file,
)
from ffmem.files import write_text
from ffmem.text import pluralize
from ffmem.training.config import TrainConfig
from ffmem.training.data import StreamStats
from ffmem.training.run_dir import TrainPlan, TrainResult

MAX_POINTS = 500
"""Losses of a long run are averaged down to this many points, so that the figure stays small."""

Row = dict[str, Any]


def format_plan(config: TrainConfig, plan: TrainPlan) -> list[str]:
    """Return what will be trained, and on what, one sentence per line."""
    train, valid = plan.train, plan.valid
    lines = [f"Training on {_format_stream(train)}; validating on {_format_stream(valid)}."]
    if valid.held_out:
        lines.append("No --valid was given: the last sentences of the corpus are held out.")
    control = train.control + valid.control
    if control:
        lines.append(
            f"The text contains {pluralize(control, 'control tokens')}, such as </s>: they are read"
            " as control tokens."
        )
    if left_out := _format_left_out(train):
        lines.append(f"Dropped from the corpus: {left_out}.")
    if not valid.held_out and (left_out := _format_left_out(valid)):
        lines.append(f"Dropped from the validation corpus: {left_out}.")
    words = config.tokenizer == "words"
    n_entries = plan.vocabulary - (4 if words else 0)
    if n_entries < config.vocabulary_size:
        what = "different words" if words else "learnable tokens"
        lines.append(
            f"The corpus has {n_entries:,} {what}, fewer than the {config.vocabulary_size:,} that"
            " the vocabulary could hold."
        )
    limit = "at most " if config.stops_early else ""
    lines.append(
        f"{pluralize(config.layers, 'layers')} of width {config.width} with"
        f" {format_memories(config, plan)}, vocabulary {plan.vocabulary:,}:"
        f" {_format_parameters(config, plan)};"
        f" {limit}{pluralize(plan.steps, 'steps')} of {config.tokens_per_step:,} tokens,"
        f" {plan.steps_per_epoch:,} per epoch."
    )
    return lines


def _format_stream(stats: StreamStats) -> str:
    return (
        f"{pluralize(stats.sentences, 'sentences')}, {pluralize(stats.tokens, 'tokens')}"
        f" ({stats.unknown_share:.2%} <unk>)"
    )


def _format_left_out(stats: StreamStats) -> str:
    counts = {"headings": stats.headings_dropped, "empty sentences": stats.without_tokens}
    return ", ".join(pluralize(n, what) for what, n in counts.items() if n)


def _format_parameters(config: TrainConfig, plan: TrainPlan) -> str:
    """Return the parameters: all, those that one token reaches, those of the model to match."""
    text = f"{plan.parameters:,} parameters"
    if plan.active_parameters < plan.parameters:
        text += f", {plan.active_parameters:,} active"
    if plan.matched_parameters is not None:
        text += f" ({plan.matched_parameters:,} with {config.match} memories)"
    return text


def format_memories(config: TrainConfig, plan: TrainPlan) -> str:
    """Return how many memories of which kind a layer has."""
    if config.memory == "persistent":
        return f"{pluralize(plan.memories, 'persistent memories')} per head"
    if config.memory == "moe":
        shared = ", and a shared one" if config.shared_expert else ""
        return (
            f"{pluralize(config.experts, 'experts')} of {pluralize(plan.memories, 'memories')},"
            f" {config.top_experts} per token{shared}"
        )
    if config.memory != "lambda":
        return pluralize(plan.memories, f"{config.memory} memories")
    heads, distances = config.n_heads, config.n_distances
    cut = f", limited by the context of {config.context}" if distances < config.distances else ""
    return (
        f"{pluralize(heads * distances, 'lambda memories')} ({pluralize(heads, 'heads')} ×"
        f" {pluralize(distances, 'distances')}{cut}) and"
        f" {pluralize(plan.memories, 'relu memories')}"
    )


def format_result(result: TrainResult) -> str:
    """Return a summary of a finished run, in two sentences."""
    config = result.run.config
    unknown = ""
    if config.tokenizer == "words":
        unknown = f"; {result.plan.valid.unknown_share:.2%} of the validation tokens are <unk>"
    stopped = ", when validation stopped improving" if result.stopped_early else ""
    return (
        f"Trained {result.plan.parameters:,} parameters with {config.memory} memories for"
        f" {pluralize(result.steps, 'steps')} ({result.epochs:.2f} epochs,"
        f" {result.tokens:,} tokens){stopped}, at {result.tokens_per_second:,.0f} tokens/s."
        f" Validation perplexity {result.valid_perplexity:,.2f} after step {result.best_step:,}"
        f"{unknown}."
    )


def model_card(result: TrainResult) -> str:
    """Return `README.md` of a trained model, with the header that the Hub reads."""
    run, plan, config = result.run, result.plan, result.run.config
    valid = "its last sentences, held out" if run.valid is None else f"`{run.valid['source']}`"
    tokens = "words" if config.tokenizer == "words" else "tokens of a byte-level BPE"
    facts = {
        "memories per layer": format_memories(config, plan),
        "layers, width, heads": f"{config.layers}, {config.width}, {config.n_heads}",
        "size": _format_parameters(config, plan),
        "vocabulary": f"{plan.vocabulary:,} {tokens}",
        "adaptive softmax cutoffs": ", ".join(f"{n:,}" for n in config.cutoffs or []) or "none",
        "context": f"{config.context} tokens",
        "trained on": f"`{run.corpus['source']}`: {plan.train.sentences:,} sentences,"
        f" {plan.train.tokens:,} tokens, {plan.train.unknown_share:.2%} `<unk>`",
        "validation": f"{valid}: {plan.valid.tokens:,} tokens,"
        f" {plan.valid.unknown_share:.2%} `<unk>`",
        "steps": f"{result.steps:,} of {config.tokens_per_step:,} tokens"
        f" ({result.epochs:.2f} epochs)",
        "AdamW": f"learning rate {config.learning_rate:g}, {plan.warmup:,} warm-up steps,"
        f" cosine to a tenth, weight decay {config.weight_decay:g}, dropout {config.dropout:g}",
        "numbers": f"{config.dtype}, seed {config.seed}, {pluralize(run.threads, 'threads')},"
        f" {run.device}",
        "versions": ", ".join(f"{name} {number}" for name, number in run.versions.items()),
        "**validation perplexity**": f"**{result.valid_perplexity:,.2f}**"
        f" after step {result.best_step:,}",
    }
    rows = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    summary = format_result(result).replace("<unk>", "`<unk>`")
    return _CARD.format(memory=config.memory, rows=rows, summary=summary)


_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [ffmem, key-value-memories]
---

# A language model with {memory} memories

{summary}

| | |
|---|---|
{rows}

Perplexity is per token of this vocabulary, over the whole validation text in blocks of the context
above, including the tokens that start sentences. Do not compare it across vocabularies.

![Training loss and validation over tokens read](curve.svg)

Made by `ffmem train`. `training.json` has every setting and result, `curve.jsonl` the curve.

```python
import ffmem

memories = ffmem.load("THIS FOLDER")
```

With plain transformers: `import ffmem.networks.model` registers the model; then use
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.
"""


def draw_curve(rows: Sequence[Row], folder: Path, result: TrainResult) -> None:
    """Write curve.svg."""
    config = result.run.config
    title = (
        f"Training {pluralize(config.layers, 'layers')} of width {config.width} with"
        f" {config.memory} memories on {result.run.corpus['source']}"
    )
    description = (
        "Mean negative log-probability per token over the tokens read: of training steps, averaged"
        " over some of them, and of the whole validation text."
    )
    svg = chart_svg("curve", title, description, curve_chart(rows))
    write_text(folder / "curve.svg", svg_file(svg))


def curve_chart(rows: Sequence[Row]) -> Chart:
    """Return the chart of training loss and validation."""
    training = _average([row for row in rows if "loss" in row])
    validation = [
        {"tokens": row["tokens"], "nats": math.log(row["valid_perplexity"])}
        for row in rows
        if "valid_perplexity" in row
    ]
    nats = [point["nats"] for point in training + validation]
    x = alt.X("tokens:Q", title="tokens read", axis=alt.Axis(format="~s", tickCount=6))
    scale = alt.Scale(domain=[math.floor(min(nats)), math.ceil(max(nats))])
    y = alt.Y("nats:Q", title="−log p per token", scale=scale, axis=alt.Axis(tickCount=5))
    color = series_color({"training": BLUE, "validation": VERMILION})
    steps = plot(series(training, "training")).mark_line(strokeWidth=1.2)
    evaluations = plot(series(validation, "validation"))
    return styled(
        layered(
            steps.encode(x=x, y=y, color=color),
            evaluations.mark_line().encode(x=x, y=y, color=color),
            evaluations.mark_point().encode(x=x, y=y, color=color),
        )
    )


def _average(rows: list[Row]) -> list[Row]:
    """Return the loss over tokens; of many rows, the means of neighbors."""
    size = max(1, -(-len(rows) // MAX_POINTS))
    points = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        mean = math.fsum(row["loss"] for row in part) / len(part)
        points.append({"tokens": part[-1]["tokens"], "nats": mean})
    return points
