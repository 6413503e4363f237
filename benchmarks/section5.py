"""The pass of Section 5 beside peak GEMM, and beside what no reading could be faster than.

Groups of prefixes are read in turn by each variant, and of each group the best of several rounds
counts. `bare` is the floor: the model's own forward pass over the same batches without a hook, and
the same vocabulary products, of which nothing is read.
"""

import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import passes
import torch

import ffmem

MODEL = "smollm2-135m"


def section5(rounds: int = 2, prefixes: int = 1500) -> dict[str, Any]:
    """Time and share of peak GEMM of the pass, and of the floor."""
    from ffmem.experiments.forward import groups
    from ffmem.experiments.sample import draw_sample

    index = ffmem.open(os.environ.get("FFMEM_BENCH_INDEX") or "demo")
    memories = ffmem.load(MODEL)
    sentences = ffmem.Corpus("wikitext-2:valid").sentences(memories.tokenizer)
    drawn = draw_sample(sentences, "sentences", prefixes, 0, 1, None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    variants: dict[str, Callable[[Sequence[Any]], Any]] = {
        "pass": _pass(index, memories, len(drawn.lengths)),
        "bare trunk": lambda group: [memories.forward(some.tokens) for some in group],
        "bare projections": _projections(memories),
    }
    # A machine that is shared is slower over minutes than at its best moment: the same product
    # between the groups tells what it gave meanwhile.
    seconds, meanwhile, peak = dict.fromkeys(variants, 0.0), [], 0.0
    for group in groups(drawn, index.manifest.start.id, memories):
        best = dict.fromkeys(variants, float("inf"))
        for _ in range(rounds):
            for name, run in variants.items():
                begin = time.perf_counter()
                run(group)
                best[name] = min(best[name], time.perf_counter() - begin)
                meanwhile.append(passes.peak_gemm(rounds=5, best=False))
                peak = max(peak, passes.peak_gemm(rounds=3))
        seconds = {name: seconds[name] + best[name] for name in variants}
    tokens = sum(example.lengths[-1] + 1 for example in drawn.sentences)
    trunk = tokens * _trunk_flop(memories) / 1e9
    heads = len(drawn.lengths) * _projection_flop(memories) / 1e9
    rate = (trunk + heads) / seconds["pass"]
    floor = seconds["bare trunk"] + seconds["bare projections"]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "prefixes": len(drawn.lengths),
        "tokens": tokens,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "seconds": seconds["pass"],
        "prefixes_per_second": len(drawn.lengths) / seconds["pass"],
        "gflops": rate,
        "peak_gemm_gflops": peak,
        "share_of_peak": rate / peak,
        "gemm_meanwhile_gflops": float(np.mean(meanwhile)),
        "share_of_gemm_meanwhile": rate / float(np.mean(meanwhile)),
        "bare_trunk_share_of_peak": trunk / seconds["bare trunk"] / peak,
        "bare_projections_share_of_peak": heads / seconds["bare projections"] / peak,
        "bare_share_of_peak": (trunk + heads) / floor / peak,
        "over_bare": floor / seconds["pass"],
        "mib_over_the_model": (after - before) // 1024,
    }


def _trunk_flop(memories: Any) -> float:
    """The floating-point operations of all layers' linear maps, for one token."""
    weights = {id(w): w.numel() for block in memories.blocks for w in block.parameters()}
    return 2.0 * sum(weights.values())


def _projection_flop(memories: Any) -> float:
    """Those of the projections of one prefix: three per layer, one for the prediction."""
    output = sum(weight.numel() for weight in memories.head.output.parameters())
    return 2.0 * output * (3 * memories.n_layers + 1)


def _pass(index: Any, memories: Any, n_prefixes: int) -> Callable[[Sequence[Any]], Any]:
    """What the report asks for."""
    from ffmem.experiments.base import find_all
    from ffmem.experiments.context import ExperimentContext
    from ffmem.experiments.forward import SampleEvaluator
    from ffmem.experiments.metrics import Predictions

    context = ExperimentContext(index=index, model=memories)
    kinds = {metric for one in find_all() for metric in one.metrics} - {Predictions}
    metrics = [kind(context, n_prefixes) for kind in kinds]
    predictions = Predictions.empty(n_prefixes, memories.n_layers)
    return SampleEvaluator(memories, metrics, predictions).read


def _projections(memories: Any) -> Callable[[Sequence[Any]], None]:
    """Three products per layer and one for the prediction, as the pass makes them."""
    from ffmem.experiments.projection import SLICE, Projector

    projector, weight = Projector(memories), memories.head.embedding
    width = weight.shape[1]

    def run(group: Sequence[Any]) -> None:
        rows = [len(some) for some in projector._parts(sum(len(some.prefixes) for some in group))]
        for n in [*(3 * n for _ in range(memories.n_layers) for n in rows), *rows]:
            for first in range(0, len(weight), SLICE):
                torch.mm(weight[first : first + SLICE], torch.ones(width, n))

    return run
