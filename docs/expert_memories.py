"""Makes docs/results/moe: `python docs/expert_memories.py WORK`.

Trains a dense ReLU model and a mixture of experts of equal active parameters on WikiText-2, indexes
both, detects patterns, measures agreement, and asks what decides a token's expert: the token itself
or what the text is about. What is in WORK already is taken as it is, what was stopped goes on.

    I(E; X) = Σ p(e, x) · log₂ p(e, x) / p(e)p(x)
    beyond chance = (I(E; X) − I(E′; X)) / (H(E) − I(E′; X))

E is the expert of largest weight of a token, E′ the same experts dealt out at random: counts of few
tokens have some information by chance. For `article given token` they are dealt out among the
occurrences of each token, so that what remains is what the token does not say.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray

import ffmem
from ffmem.corpus import sources, wikitext
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import sentences_of_line
from ffmem.files import write_text
from ffmem.networks.experts import Router, reading_routes
from ffmem.patterns.store import TOP_TRIGGERS
from ffmem.progress import Progress
from ffmem.training.config import TrainConfig
from ffmem.training.run_dir import TrainResult
from ffmem.training.train import train

OUT = Path(__file__).parent / "results" / "moe"
KINDS = ("relu", "moe")
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
    "steps": 1200,
    "evaluate_every": 400,
    "threads": 1,
}
INDEXED = 4000
"""Sentences of the training set that are indexed."""
ROUTED = 3000
"""Sentences whose routes are read."""
SHUFFLES = 3
Row = dict[str, Any]


def train_model(work: Path, kind: str) -> TrainResult:
    """Return what came of one training, made now or found."""
    match = None if kind == "relu" else "relu"
    config = TrainConfig(memory=kind, match=match, **SIZES)
    corpora = Corpus("wikitext-2:train"), Corpus("wikitext-2:valid")
    return train(config, corpora[0], work / kind, corpora[1], progress=Progress())


def measure(work: Path, kind: str) -> Row:
    """Return what was found of one model: perplexity, patterns, agreement."""
    result = train_model(work, kind)
    corpus = Corpus("wikitext-2:train", limit=INDEXED)
    index = ffmem.index(work / kind, corpus, work / f"{kind}-index", threads=1, progress=Progress())
    detected = ffmem.detect(index, progress=Progress())
    (agreement,) = ffmem.experiment("agreement", index, work / f"{kind}-agreement", threads=1)
    last = [json.loads(line) for line in (work / kind / "curve.jsonl").read_text().splitlines()]
    return {
        "kind": kind,
        "parameters": result.plan.parameters,
        "active_parameters": result.plan.active_parameters,
        "memories_per_bank": result.plan.memories,
        "memories": len(index),
        "tokens": result.tokens,
        "valid_perplexity": result.valid_perplexity,
        "balance_loss": [row["balance_loss"] for row in last if "balance_loss" in row][-1:],
        "patterns": detected.to_dict(),
        "layers": [pattern_row(index, layer) for layer in range(SIZES["layers"])],
        "agreement": [
            {name: row[name] for name in ("layer", "rate", "n", "permutation", "rate_at_10")}
            for row in agreement.rows
        ],
    }


def pattern_row(index: ffmem.Index, layer: int) -> Row:
    """Return patterns per memory, and the share of the first triggers that show one."""
    patterns = ffmem.patterns_of(index)
    found, lists = patterns.layer(layer), patterns.lists(layer)
    shown = dict.fromkeys(("any", "shallow", "semantic"), 0)
    for one in lists:
        own = found.get(one.cell.memory, [])
        for name in shown:
            ranks = {
                rank
                for pattern in own
                if name in ("any", pattern.kind)
                for rank in pattern.ranks
                if rank <= TOP_TRIGGERS
            }
            shown[name] += len(ranks)
    n_triggers = sum(one.n for one in lists)
    return {
        "layer": layer,
        "memories": index.layout.widths[layer],
        "with_triggers": len(lists),
        "with_pattern": len(found),
        "patterns": sum(map(len, found.values())),
        "coverage": {name: count / n_triggers for name, count in shown.items()},
    }


# What decides the expert of a token


def articles() -> list[tuple[int, str]]:
    """Return the first sentences of the training set, each with the number of its article."""
    found: list[tuple[int, str]] = []
    article = -1
    for line in sources.lines("wikitext-2:train", "text"):
        text = line.text or ""
        if wikitext.is_heading(text):
            article += text.split()[:2].count("=") == 1  # not the title of a section
            continue
        found += [(article, one.text or "") for one in sentences_of_line(line, "sentence")]
        if len(found) >= ROUTED:
            break
    return found[:ROUTED]


def read_routes(folder: Path) -> tuple[dict[str, ndarray], ndarray, ndarray]:
    """Return what is known of every token, its first expert, and all its experts, by layer."""
    memories = ffmem.load(folder, device="cpu")
    routers = [one for one in memories.model.modules() if isinstance(one, Router)]
    columns: dict[str, list[int]] = {
        name: [] for name in ("token", "previous token", "position", "sentence", "article")
    }
    experts = []
    for number, (article, text) in enumerate(articles()):
        ids = [2, *memories.tokenizer.encode([text])[0].ids][: memories.context]
        with torch.no_grad(), reading_routes(routers) as routes:
            memories.forward(torch.tensor([ids]))
        experts.append(torch.stack([one.experts[1:] for one in routes], dim=1))
        columns["token"] += ids[1:]
        columns["previous token"] += ids[:-1]
        columns["position"] += range(len(ids) - 1)
        columns["sentence"] += [number] * (len(ids) - 1)
        columns["article"] += [article] * (len(ids) - 1)
    chosen = torch.cat(experts).numpy()  # token, layer, choice
    return {name: np.array(column) for name, column in columns.items()}, chosen[..., 0], chosen


def information(experts: ndarray, other: ndarray) -> float:
    """Return I(E; X) in bits, of counts."""
    _, rows = np.unique(other, return_inverse=True)
    counts = np.zeros((rows.max() + 1, experts.max() + 1))
    np.add.at(counts, (rows, experts), 1)
    p = counts / counts.sum()
    independent = p.sum(1, keepdims=True) * p.sum(0)
    there = p > 0
    return float((p[there] * np.log2(p[there] / independent[there])).sum())


def shuffled(experts: ndarray, groups: ndarray, rng: np.random.Generator) -> ndarray:
    """Return experts dealt out at random within groups."""
    places = np.argsort(groups, kind="stable")
    dealt = np.lexsort((rng.random(len(experts)), groups))
    result = np.empty_like(experts)
    result[places] = experts[dealt]
    return result


def explained(experts: ndarray, columns: dict[str, ndarray]) -> Row:
    """Return the share of H(E) that each column explains beyond chance."""
    rng = np.random.default_rng(0)
    entropy = information(experts, experts)
    all_alike = np.zeros(len(experts), int)
    pair = columns["token"] * (columns["article"].max() + 1) + columns["article"]
    cases = {name: (column, all_alike) for name, column in columns.items()}
    cases["article given token"] = pair, columns["token"]
    found: Row = {"entropy": entropy}
    for name, (column, groups) in cases.items():
        own = information(experts, column)
        chance = [information(shuffled(experts, groups, rng), column) for _ in range(SHUFFLES)]
        mean = float(np.mean(chance))
        found[name] = {
            "beyond_chance": (own - mean) / (entropy - mean),
            "plain": own / entropy,
            "shuffled": mean / entropy,
        }
    return found


def routing(work: Path) -> Row:
    """Return shares of experts, what explains them, and tokens that they take, by layer."""
    columns, first, chosen = read_routes(work / "moe")
    index = ffmem.open(work / "moe-index")
    layers = []
    for layer in range(first.shape[1]):
        n_experts = TrainConfig.experts
        counts = np.bincount(chosen[:, layer].ravel(), minlength=n_experts)
        tokens, total = np.unique(columns["token"], return_counts=True)
        frequent = {int(t): int(n) for t, n in zip(tokens, total, strict=True) if n >= 50}
        taken = []
        for expert in range(n_experts):
            own = columns["token"][first[:, layer] == expert]
            here = dict(zip(*(a.tolist() for a in np.unique(own, return_counts=True)), strict=True))
            shares = {token: here.get(token, 0) / n for token, n in frequent.items()}
            best = sorted(shares, key=lambda token: (-shares[token], token))[:6]
            taken.append(
                [
                    [index.token(token), round(shares[token], 2)]
                    for token in best
                    if shares[token] >= 0.1
                ]
            )
        layers.append(
            {
                "layer": layer,
                "shares": (counts / counts.sum()).tolist(),
                "explained": explained(first[:, layer], columns),
                "tokens": taken,
            }
        )
    return {
        "tokens": len(first),
        "sentences": ROUTED,
        "articles": len(np.unique(columns["article"])),
        "layers": layers,
    }


def main() -> None:
    """Train what is missing, then write what was found."""
    work = Path(sys.argv[1])
    found = [measure(work, kind) for kind in KINDS]
    settings = SIZES | {"indexed_sentences": INDEXED}
    content = {"settings": settings, "models": found, "routing": routing(work)}
    OUT.mkdir(parents=True, exist_ok=True)
    write_text(OUT / "results.json", json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
