"""Section 5.2: what the last layer makes of two candidates when it takes neither.

    composition: top(o) ≠ top(r) and top(o) ≠ top(y)

The paper's authors judged by eye whether top(o) is related to top(r). Here a fixed rule stands in
for them, and says so: related, if the two tokens' embeddings have a larger cosine than 95 % of
random pairs of tokens that the last layer predicts. So of unrelated words 5 % would pass.
"""

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import altair as alt
import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from ffmem.experiments import charts
from ffmem.experiments.base import (
    Evidence,
    Experiment,
    ExperimentResult,
    Panel,
    PaperMark,
    PaperValue,
    claim,
)
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.metrics import STREAM_NOTES, Predictions
from ffmem.experiments.rows import Row
from ffmem.indexing.sentences import StoredSentence, split_text
from ffmem.stats import share, wilson
from ffmem.text import format_interval, format_number, format_share

if TYPE_CHECKING:
    from ffmem.models.memories import Memories

CASES = 100
PAIRS = 10_000
LEVEL = 0.95
FIRST = 5
"""Tokens shown of each of the three vectors."""

STEP = 0.05
"""Width of a bin of similarities in the figure."""

RULE = (
    "cosine of the two tokens' embeddings above that of 95 % of random pairs of different tokens"
    " that the last layer predicts on the sample; the paper's authors judged by eye"
)

PAPER_VALUES = (
    PaperValue("of 100 compositions in the last layer, to a distant word", "66", "Sec. 5.2"),
    PaperValue("to a related word", "34", "Sec. 5.2"),
)


class Case(NamedTuple):
    """One composition: the number of its prefix, and the first tokens of each vector."""

    number: int
    residual: list[int]
    ff: list[int]
    output: list[int]


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure some compositions of the last layer, for people to judge, and judge them by rule."""
    predictions = context.measured(Predictions)
    layer = context.memories.layout.memory_layers[-1]
    compositions = np.flatnonzero(predictions.cases()["composition"][:, layer])
    rng = np.random.default_rng(context.config.seed)
    chosen = np.sort(rng.permutation(compositions)[:CASES])
    vectors = embeddings(context.memories)
    threshold = _threshold(vectors, predictions.output_top[:, layer], rng)
    rows = [_row(context, case, vectors, threshold) for case in first_tokens(context, chosen)]
    related = [row["related"] for row in rows if row["related"] is not None]
    also = {
        "related_share": share(sum(related), len(related)),
        "n": len(rows),
        "compositions": len(compositions),
        "of": len(context.prompt_sample.lengths),
        "threshold": threshold,
        "chance": round(1 - LEVEL, 6),
        "rule": RULE,
    }
    if layer != context.memories.n_layers - 1:
        also["layer"] = layer  # the last one with memories
    return rows, also


def embeddings(memories: "Memories") -> Any:
    """Return the vectors by which tokens are compared, [vocab, width]: the output embedding.

    An adaptive softmax has none; there, the vectors by which words enter the model.
    """
    import torch

    if not memories.head.adaptive:
        return memories.head.embedding.float().cpu()
    words = torch.arange(memories.vocabulary)[None]
    with torch.inference_mode():
        return memories.model.get_input_embeddings()(words.to(memories.device))[0].float().cpu()


def cosines(vectors: Any, left: Int64[ndarray, " pair"], right: Int64[ndarray, " pair"]) -> Any:
    """Return the cosine of each pair of tokens."""
    import torch
    from torch.nn import functional

    first, second = (vectors[torch.from_numpy(side)] for side in (left, right))
    return functional.cosine_similarity(first, second)


def _threshold(
    vectors: Any, tokens: Int64[ndarray, " prefix"], rng: np.random.Generator
) -> float | None:
    """Return the cosine that 95 % of random pairs of different predicted tokens stay below."""
    pairs = rng.choice(tokens, (2, PAIRS))
    left, right = pairs[:, pairs[0] != pairs[1]]
    if not len(left):
        return None
    return float(np.quantile(cosines(vectors, left, right).numpy(), LEVEL))


def first_tokens(context: ExperimentContext, chosen: Int64[ndarray, " case"]) -> list[Case]:
    """Return the first tokens of the last layer's three vectors, on some prefixes of the sample."""
    import torch

    from ffmem.experiments.forward import prefix_batches

    memories, wanted = context.memories, set(chosen.tolist())
    head, first = memories.head, min(FIRST, memories.vocabulary)
    found = []
    for some in prefix_batches(context.prompt_sample, context.index.manifest.start.id, memories):
        rows = [row for row, number in enumerate(some.prefixes.tolist()) if number in wanted]
        if not rows:
            continue
        # Only the sentences with a chosen prefix run again.
        at = some.at[rows]
        kept, sentence = at[:, 0].unique(return_inverse=True)
        with torch.inference_mode():
            traces = memories.trace(some.tokens[kept], torch.stack([sentence, at[:, 1]], dim=1))
            last = traces[memories.layout.memory_layers[-1]]
            logits = (
                head.logits(last.residual),
                head.folded(last.ff_output),
                head.logits(last.layer_output),
            )
            tops = [one.topk(first, dim=1).indices.tolist() for one in logits]
        numbers = some.prefixes[rows].tolist()
        found += [Case(*case) for case in zip(numbers, *tops, strict=True)]
    return sorted(found)


def _row(context: ExperimentContext, case: Case, vectors: Any, threshold: float | None) -> Row:
    shown = context.index.token
    (number, tokens, _), length = context.prompt_sample.prefixes()[case.number]
    sentence = StoredSentence(number, 0, 0, *tokens)
    pair = (np.array([case.residual[0]]), np.array([case.output[0]]))
    similarity = float(cosines(vectors, *pair))
    tops = {"residual": case.residual, "ff": case.ff, "output": case.output}
    return {
        "sentence": number,
        "length": length,
        "prefix": split_text(sentence, length, shown)[0],
        "next_token": shown(sentence.ids[length]) if length < len(sentence.ids) else None,
        **{f"{name}_top": shown(top[0]) for name, top in tops.items()},
        **{f"{name}_top5": [shown(id) for id in top] for name, top in tops.items()},
        "similarity": similarity,
        "related": None if threshold is None else similarity > threshold,
    }


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw how close the new prediction is to the residual's."""
    colors = {"related": charts.GREEN, "distant": charts.GRAY, "not judged": charts.SKY}
    kinds = {True: "related", False: "distant", None: "not judged"}
    # Bins are half-open, [low, high); the tiny step keeps 0.3 out of the bin that ends there.
    counts = Counter(
        (math.floor(row["similarity"] / STEP + 1e-9), kinds[row.get("related")])
        for row in result.rows_with("similarity")
    )
    if not counts:
        return charts.empty_plot()
    rows = [
        {"low": place * STEP, "high": (place + 1) * STEP, "kind": kind, "n": n}
        for (place, kind), n in sorted(counts.items())
    ]
    there = {kind: color for kind, color in colors.items() if any(k == kind for _, k in counts)}
    title = "cosine of the residual's and the output's top token"
    bar = charts.plot(rows).mark_bar()
    bar = bar.encode(
        x=alt.X("low:Q", bin="binned", title=title, scale=alt.Scale(zero=False)),
        x2="high:Q",
        y=alt.Y("n:Q", title="compositions", stack="zero", axis=alt.Axis(tickMinStep=1)),
        color=charts.series_color(there, "kind"),
    )
    threshold = [{"at": at} for at in [result.also.get("threshold")] if at is not None]
    rule = charts.plot(threshold).mark_rule(strokeDash=[4, 3]).encode(x="at:Q")
    return charts.layered(bar, rule)


def summary(result: ExperimentResult) -> str:
    """Say how many compositions go to a related token."""
    rows = result.rows_with("related")
    if not rows:
        return "The sample has no composition in the last layer that can be judged."
    related = sum(bool(row["related"]) for row in rows)
    layer = result.also.get("layer", result.n_layers - 1) + 1
    return (
        f"Of {format_number(len(rows))} compositions in layer {layer} (of"
        f" {format_number(result.also.get('compositions'))} in the sample), {related} go to a"
        f" related token, {format_share(related / len(rows))}"
        f" ({format_interval(*wilson(related, len(rows)))}). Related is judged by a rule, not by"
        f" people: {RULE} (threshold {format_number(result.also.get('threshold'))})."
    )


@claim(
    "Most compositions of the last layer go to a distant word",
    "the interval of the distant share is above 50 %; in part if only the share is (only human"
    " judgments can be compared with the paper's)",
    *PAPER_VALUES,
)
def _distant(result: ExperimentResult) -> Evidence | None:
    rows = result.rows_with("related")
    if not rows:
        return None
    distant = sum(not row["related"] for row in rows)
    low, high = wilson(distant, len(rows))
    shown = f"{distant} of {len(rows)} distant by embeddings ({format_interval(low, high)})"
    good = low is not None and low > 0.5, distant / len(rows) > 0.5
    why = "the paper's words were judged by people, these by a rule"
    return Evidence(shown, len(rows), "compositions", *good, why)


def _together(result: ExperimentResult) -> list[Row]:
    """Return the share of all compositions, without the layer: it is always the last."""
    return [{name: result.also.get(name) for name in ("related_share", "chance")}]


EXPERIMENT = Experiment(
    name="last-layer-composition",
    paper="Sec. 5.2",
    title="Compositions of the last layer",
    description="Where the last layer's top(o) is neither top(r) nor top(y): the cosine of the"
    " embeddings of top(r) and top(o).",
    finding="The paper's authors judged 100 compositions of the last layer by eye: most go to a"
    " word that is not related to the residual's.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(Predictions,),
    paper_values=PAPER_VALUES,
    claims=(_distant,),
    panels=(
        Panel(
            title="compositions that go to a related token",
            value="related_share",
            rows=_together,
            control=("chance", "unrelated tokens"),
            paper=(PaperMark(PAPER_VALUES[1], 0.34),),
        ),
    ),
    notes=STREAM_NOTES,
)
