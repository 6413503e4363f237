"""The figures of Section 5, each as rows computed from one pass over the sample."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Shaped
from numpy import ndarray

from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.evaluation import measured
from ffmem.experiments.predictions import CASES
from ffmem.experiments.result import Result, Row
from ffmem.stats import share, spread, wilson

SHORT = 5
"""A prefix of fewer tokens is short (Section 5.1)."""

STOP_WORDS = "scikit-learn's ENGLISH_STOP_WORDS, of tokens without case and surrounding space"


def active_memories(context: ExperimentContext) -> Result:
    """Return how many memories are at work (Figure 7)."""
    activity = measured(context.metrics.activity, "activity")
    return _result(context, "active-memories", "Fig. 7", activity.rows())


def neural_memory(context: ExperimentContext) -> Result:
    """Return how the feed-forward layer differs from a softmax over its keys (Eq. 1, 2)."""
    softmax = measured(context.metrics.softmax, "softmax")
    also = {
        "keys": "gate" if context.memories.gated else "keys",
        "max_entropy": float(np.log(max(context.memories.layout.widths) / softmax.groups)),
    }
    return _result(context, "neural-memory", "Eq. 1, 2", softmax.rows(), also)


def zero_agreement(context: ExperimentContext) -> Result:
    """Return how often no single memory says what its layer says (Figure 8)."""
    token_hits = measured(context.metrics.token_hits, "token_hits")
    rows = []
    for layer in context.memories.layout.memory_layers:
        for target, memories, place in token_hits.variants():
            agreeing = token_hits.agreeing[place][:, layer]
            n, none = len(agreeing), int((agreeing == 0).sum())
            low, high = wilson(none, n)
            rows.append(
                {
                    "layer": layer,
                    "target": target,
                    "memories": memories,
                    "share": share(none, n),
                    "low": low,
                    "high": high,
                    "n": n,
                    "chance": float(token_hits.chance[place][:, layer].mean()),
                    "agreeing": float(agreeing.mean()),
                    "carried": float(token_hits.carried[place][:, layer].mean()),
                }
            )
    return _result(context, "zero-agreement", "Fig. 8", rows)


def stop_words(context: ExperimentContext) -> Result:
    """Return what is special about examples in which a memory agrees with its layer."""
    predictions = measured(context.metrics.predictions, "predictions")
    token_hits = measured(context.metrics.token_hits, "token_hits")
    is_stop = are_stop_words(context.memories.tokenizer.token_texts(context.memories.vocabulary))
    layers = context.memories.layout.memory_layers
    tokens = {"y": predictions.ff_top[:, layers], "o": predictions.output_top[:, layers]}

    def rows(target: str, agreeing: Bool[ndarray, "example layer"]) -> list[Row]:
        groups = {"agreeing": agreeing, "all": np.ones_like(agreeing)}
        return [
            {"group": group, **_group(context, is_stop, tokens[target], some)}
            for group, some in groups.items()
        ]

    variants = [
        {"target": target, "memories": memories, **row}
        for target, memories, place in token_hits.variants()
        for row in rows(target, token_hits.agreeing[place][:, layers] > 0)
    ]
    main = [row for row in variants if (row["target"], row["memories"]) == ("y", "all")]
    kept = [{k: v for k, v in row.items() if k not in ("target", "memories")} for row in main]
    also = {"variants": variants, "stop_words": STOP_WORDS, "short": f"fewer than {SHORT} tokens"}
    return _result(context, "stop-words", "Sec. 5.1", kept, also)


def _group(
    context: ExperimentContext,
    is_stop: Bool[ndarray, " vocab"],
    tokens: Shaped[ndarray, "example layer"],
    some: Bool[ndarray, "example layer"],
) -> Row:
    """Return the shares of stop words and short prefixes among some (example, layer) cases."""
    shape = some.shape
    short = np.broadcast_to((context.prompt_sample.lengths < SHORT)[:, None], shape)
    following = context.prompt_sample.next_tokens()
    has_next = np.broadcast_to((following >= 0)[:, None], shape) & some
    next_stop = np.broadcast_to(is_stop[following][:, None], shape)
    n, next_n = int(some.sum()), int(has_next.sum())
    return {
        "stop_word_share": share(int(is_stop[tokens][some].sum()), n),
        "short_prefix_share": share(int(short[some].sum()), n),
        "n": n,
        "next_stop_word_share": share(int(next_stop[has_next].sum()), next_n),
        "next_n": next_n,
    }


def are_stop_words(tokens: list[str]) -> Bool[ndarray, " token"]:
    """Return which tokens, as they are shown, are common English stop words."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    return np.array([token.strip().lower() in ENGLISH_STOP_WORDS for token in tokens])


def residual_prediction(context: ExperimentContext) -> Result:
    """Return how often the residual already predicts what the model will (Figure 9)."""
    found = measured(context.metrics.predictions, "predictions")
    final = found.final[:, None]
    residual, output = found.residual_top == final, found.output_top == final
    decided = np.logical_and.accumulate(output[:, ::-1], axis=1)[:, ::-1]
    rows = []
    for layer in range(context.memories.n_layers):
        n, part = len(residual), int(residual[:, layer].sum())
        low, high = wilson(part, n)
        rows.append(
            {
                "layer": layer,
                "residual_share": share(part, n),
                "low": low,
                "high": high,
                "output_share": share(int(output[:, layer].sum()), n),
                "decided_share": share(int(decided[:, layer].sum()), n),
                "n": n,
            }
        )
    return _result(context, "residual-prediction", "Fig. 9", rows)


def residual_probability(context: ExperimentContext) -> Result:
    """Return how probable the residual finds the model's prediction (Figure 10)."""
    found = measured(context.metrics.predictions, "predictions")
    columns = found.residual_final_probability.T
    rows = [{"layer": layer, **spread(column)} for layer, column in enumerate(columns)]
    return _result(context, "residual-probability", "Fig. 10", rows)


def prediction_cases(context: ExperimentContext) -> Result:
    """Return who decides a layer's prediction: residual, feed-forward part, or both (Fig. 11)."""
    found = measured(context.metrics.predictions, "predictions")
    cases = found.cases()
    broken = cases["composition"] & (found.residual_top == found.ff_top)
    kept = cases["residual"] | cases["agreement"]
    rows = []
    for layer in context.memories.layout.memory_layers:
        n = len(kept)
        under_y = found.ff_residual_rank[:, layer]
        rows.append(
            {
                "layer": layer,
                **{name: share(int(cases[name][:, layer].sum()), n) for name in CASES},
                "broken_agreement": share(int(broken[:, layer].sum()), n),
                "n": n,
                "veto_rank_median": spread(under_y[~kept[:, layer]])["median"],
                "kept_rank_median": spread(under_y[kept[:, layer]])["median"],
            }
        )
    return _result(context, "prediction-cases", "Fig. 11", rows)


def _result(
    context: ExperimentContext, name: str, paper: str, rows: list[Row], also: Row | None = None
) -> Result:
    settings: dict[str, Any] = context.settings(sample=context.sample_settings())
    return Result(name, paper, settings, rows, also or {})
