"""Results of every experiment without a model: curves like the paper's, for any depth."""

import math
import random

from ffmem.experiments.base import ExperimentResult
from ffmem.stats import wilson

PAPERS = {
    "patterns": "Fig. 2",
    "token-removal": "Fig. 3",
    "agreement": "Fig. 4",
    "next-token-rank": "Fig. 5",
    "max-probability": "Fig. 6",
    "predictive-values": "Sec. 4, Table 2",
    "active-memories": "Fig. 7",
    "zero-agreement": "Fig. 8",
    "stop-words": "Sec. 5.1",
    "residual-prediction": "Fig. 9",
    "residual-probability": "Fig. 10",
    "prediction-cases": "Fig. 11",
    "last-layer-composition": "Sec. 5.2",
    "neural-memory": "Eq. 1, 2",
}
N = 4000


def settings(n_layers=30, gated=True, model="smollm2-135m", memories=1536):
    return {
        "model": model,
        "model_hash": "ab" * 32,
        "dtype": "float32",
        "projection": "folded",
        "corpus": {
            "sources": ["wikitext-2:train"],
            "hash": "cd" * 32,
            "sentences": 30000,
            "tokens": 812345,
        },
        "seed": 0,
        "gated": gated,
        "layers": n_layers,
        "memories": memories,
    }


SAMPLE = {
    "corpus": "wikitext-2:valid",
    "requested": N,
    "prefixes": 3760,
    "sentences": 3760,
    "draw": "sentences",
    "cut": 0,
    "lengths": {"1": 170, "2": 160, "3": 150},
}


def depth(layer, n_layers):
    """Return how deep a layer lies, from 0 to 1."""
    return layer / max(1, n_layers - 1)


def rise(x, middle=0.62, sharp=9):
    return 1 / (1 + math.exp(-sharp * (x - middle)))


def quartiles(middle, width, n=N, low=-math.inf, high=math.inf):
    def cut(number):
        return min(high, max(low, number))

    return {
        "mean": cut(middle + 0.1 * width),
        "q1": cut(middle - width),
        "median": cut(middle),
        "q3": cut(middle + width),
        "n": n,
    }


def token_removal(n_layers, gated, chance):
    rows = []
    for layer in range(n_layers):
        x = depth(layer, n_layers)
        for token, base in (("first", -0.09), ("last", -0.7 + 0.5 * x), ("random", -0.16)):
            for how, factor in (("removed", 1), ("replaced", 0.8)):
                middle = base * factor + chance.uniform(-0.02, 0.02)
                raw = (
                    {"raw_mean": None, "raw_median": None}
                    if gated
                    else {
                        "raw_mean": middle * 1.1,
                        "raw_median": middle * 1.05,
                    }
                )
                rows.append(
                    {"layer": layer, "token": token, "how": how} | quartiles(middle, 0.1, 200) | raw
                )
    also = {"interior": [], "excluded": [0] * n_layers, "replacement": "drawn from the corpus"}
    return rows, also


def agreement(n_layers, gated, chance):
    rows = []
    for layer in range(n_layers):
        n = 1500
        hits = round(n * (0.001 + 0.04 * rise(depth(layer, n_layers)) * chance.uniform(0.8, 1.1)))
        low, high = wilson(hits, n)
        rows.append(
            {
                "layer": layer,
                "rate": hits / n,
                "low": low,
                "high": high,
                "n": n,
                "no_next": 30,
                "no_trigger": 6,
                "uniform": 1 / 49152,
                "unigram": 0.031 + chance.uniform(-0.006, 0.006),
                "permutation": 0.002 + 0.004 * rise(depth(layer, n_layers)),
                "last_token_rate": 0.004 + 0.01 * (1 - depth(layer, n_layers)),
                "rate_at_10": 3 * hits / n,
                "positive_rate": hits / n if gated else None,
                "negative_rate": hits / n / 2 if gated else None,
                "positive_n": 760 if gated else None,
                "negative_n": 740 if gated else None,
                "head_band_share": None,
            }
        )
    return rows, {"unigram_token": " the"}


def next_token_rank(n_layers, gated, chance):
    rows = []
    for layer in range(n_layers):
        middle = 12000 * (1 - rise(depth(layer, n_layers))) + 300
        row = quartiles(middle, 0.8 * middle, 1500, low=0)
        rows.append({"layer": layer} | row | {"head_band_median": None})
    return rows, {}


def max_probability(n_layers, gated, chance):
    counts = [30000, 9000, 4000, 1500, 500, 160, 40, 6]
    rows = []
    for i, n in enumerate(counts):
        hits = round(n * (0.005 + 0.1 * i))
        low, high = wilson(hits, n)
        edges = {"low": 0.0001 + 0.004 * i, "high": 0.0001 + 0.004 * (i + 1)}
        rows.append(edges | {"n": n, "rate": hits / n, "low_rate": low, "high_rate": high})
    return rows, {"auc": 0.81}


def predictive_values(n_layers, gated, chance):
    rows = []
    for i in range(100):
        layer = min(n_layers - 1, round((n_layers - 1) * min(1.0, chance.betavariate(6, 1.6))))
        agreeing = max(0, chance.randint(-15, 40))
        rows.append(
            {
                "cell": f"L{layer}N{i}",
                "layer": layer,
                "memory": i,
                "sign": -1 if gated and i % 3 == 0 else 1,
                "token": f" w{i}",
                "token_id": i,
                "probability": 0.3 - 0.002 * i,
                "precision": agreeing / 50,
                "n_triggers": 50,
                "agreeing": agreeing,
            }
        )
    agreeing = sum(row["agreeing"] > 0 for row in rows)
    return rows, {
        "upper_share": 0.93,
        "with_agreeing_trigger": agreeing,
        "layer_histogram": [sum(row["layer"] == i for row in rows) for i in range(n_layers)],
        "random_control": {"n": 100, "with_agreeing_trigger": 12, "mean_precision": 0.01},
        "mean_precision": 0.2,
    }


def active_memories(n_layers, gated, chance):
    rows = []
    for layer in range(n_layers):
        x = depth(layer, n_layers)
        dip = 0.45 - 0.33 * math.exp(-(((x - 0.6) / 0.2) ** 2))
        rows.append(
            {"layer": layer, "definition": "positive"} | quartiles(0.5 if gated else dip, 0.04)
        )
        if gated:
            rows.append({"layer": layer, "definition": "gate"} | quartiles(dip, 0.05))
        rows.append({"layer": layer, "definition": "effect"} | quartiles(0.55 - 0.2 * x, 0.06))
    return rows, {}


def zero_agreement(n_layers, gated, chance):
    rows = []
    for target, shift in (("y", 0.0), ("o", 0.06)):
        for memories, more in (("all", 0.0), ("active", 0.09)):
            for layer in range(n_layers):
                x = depth(layer, n_layers)
                share = 0.68 + shift + more + 0.12 * math.sin(math.pi * x)
                low, high = wilson(round(share * N), N)
                rows.append(
                    {
                        "layer": layer,
                        "target": target,
                        "memories": memories,
                        "share": share,
                        "n": N,
                        "chance": 0.9 - 0.1 * x + more / 2,
                        "low": low,
                        "high": high,
                        "agreeing": 1.4,
                        "carried": 0.012,
                    }
                )
    return rows, {}


def stop_words(n_layers, gated, chance):
    def row(group, stop, short, following):
        return {
            "group": group,
            "stop_word_share": stop,
            "short_prefix_share": short,
            "n": 900 if group == "agreeing" else N,
            "next_stop_word_share": following,
            "next_n": 850 if group == "agreeing" else N - 200,
        }

    return [row("agreeing", 0.57, 0.39, 0.41), row("all", 0.48, 0.21, 0.35)], {
        "variants": [],
        "stop_words": "ffmem's list of 179",
    }


def residual_prediction(n_layers, gated, chance):
    rows = []
    for layer in range(n_layers):
        share = 0.12 + 0.83 * rise(depth(layer, n_layers), 0.6, 7)
        low, high = wilson(round(share * N), N)
        rows.append(
            {
                "layer": layer,
                "residual_share": share,
                "output_share": min(1.0, share * 1.07),
                "decided_share": share * 0.9,
                "n": N,
                "low": low,
                "high": high,
            }
        )
    return rows, {}


def residual_probability(n_layers, gated, chance):
    rows = []
    for layer in range(n_layers):
        middle = 0.02 + 0.6 * rise(depth(layer, n_layers), 0.7)
        rows.append({"layer": layer} | quartiles(middle, 0.4 * middle, low=0, high=1))
    return rows, {}


def prediction_cases(n_layers, gated, chance):
    rows = []
    for layer in range(n_layers):
        x = depth(layer, n_layers)
        ffn, agreeing = 0.04 + 0.03 * x, 0.03 + 0.12 * x
        composition = 0.3 - 0.2 * x
        rows.append(
            {
                "layer": layer,
                "residual": 1 - ffn - agreeing - composition,
                "agreement": agreeing,
                "ffn": ffn,
                "composition": composition,
                "broken_agreement": 0.001,
                "n": N,
                "veto_rank_median": 30000,
                "kept_rank_median": 12000,
            }
        )
    return rows, {}


def neural_memory(n_layers, gated, chance):
    rows = []
    for layer in range(n_layers):
        x = depth(layer, n_layers)
        cosine = 0.2 + 0.3 * math.sin(3 * x)
        rows.append(
            {
                "layer": layer,
                "cosine": cosine,
                "entropy": 6.5 - 3 * x,
                "top1_mass": 0.05 + 0.4 * x,
                "n": N,
                "distance": 0.98,
                "cosine_q1": cosine - 0.1,
                "cosine_q3": cosine + 0.1,
                "effective": math.exp(6.5 - 3 * x),
            }
        )
    return rows, {"max_entropy": math.log(1536)}


def last_layer_composition(n_layers, gated, chance):
    rows = []
    for i in range(100):
        similarity = chance.betavariate(2, 5)
        rows.append(
            {
                "prefix": f"The album was released by the band in the year {i}",
                "residual_top": " people",
                "ff_top": ",",
                "output_top": " same",
                "similarity": similarity,
                "related": similarity >= 0.35,
                "length": 11,
                "next_token": " and",
                "residual_top5": [" people", " men", " the", " a", " one"],
                "ff_top5": [",", ".", ";", " and", " or"],
                "output_top5": [" same", " people", " first", " only", " other"],
            }
        )
    share = sum(row["related"] for row in rows) / 100
    return rows, {"related_share": share, "threshold": 0.35, "compositions": 412, "n": 100}


def patterns(n_layers, gated, chance):
    rows = []
    for layer in range(n_layers):
        x = depth(layer, n_layers)
        semantic = 0.1 + 0.5 * x
        rows.append(
            {
                "layer": layer,
                "source": "automatic",
                "shallow": 0.65 - 0.5 * x,
                "both": 0.05,
                "semantic": semantic,
                "uncovered": 0.2,
                "patterns_per_key": 3.1,
                "n": 250,
                "keys": 10,
                "with_pattern": 0.9,
                "covered": 0.8,
                "low": 0.7,
                "high": 0.9,
                "patterns_min": 0,
                "patterns_max": 6,
            }
        )
    also = {"sources": {"automatic": {"seed": 0}}, "agreement": {}, "protocol": "…"}
    return rows, also


SECTION_5 = tuple(PAPERS)[6:]


def result(name, n_layers=30, gated=True, **changed):
    """Return an experiment's result; `changed` goes to its settings."""
    measure = globals()[name.replace("-", "_")]
    rows, also = measure(n_layers, gated, random.Random(name))
    sample = {"sample": SAMPLE} if name in SECTION_5 else {}
    return ExperimentResult(
        name, PAPERS[name], settings(n_layers, gated) | sample | changed, rows, also
    )


def results(n_layers=30, gated=True, **changed):
    """Return the results of all experiments."""
    return [result(name, n_layers, gated, **changed) for name in PAPERS]
