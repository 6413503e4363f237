"""All benchmarks: `python benchmarks/run.py [NAME…]` writes `benchmarks/results/NAME.json`.

Machines are noisy: only ratios within one process count, and the limit stands beside each figure.
`benchmarks/table.py` puts the results into the README and docs/speed.md.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
MODEL = "smollm2-135m"

sys.path.insert(0, str(Path(__file__).parent))
import effect  # noqa: E402
import experts  # noqa: E402
import explorer  # noqa: E402
import passes  # noqa: E402
import patterns  # noqa: E402
import section5  # noqa: E402
import training  # noqa: E402
import workers  # noqa: E402

import ffmem  # noqa: E402


def passes_best(rounds: int = 5) -> dict[str, Any]:
    """Index pass, trunk, plain forward, straightforward hooks, TransformerLens: one process."""
    memories = ffmem.load(MODEL)

    def others() -> dict[str, Callable[[Any], None]]:
        found = {
            "plain": passes.plain(memories),
            "hooks and topk": passes.straightforward(memories),
        }
        try:
            lens = passes.transformer_lens(_hugging_face_folder(), memories)
        except ImportError:
            return found  # pip install 'ffmem[bench]'
        return found | {"TransformerLens and topk": lens}

    report = _raced(memories, "best", others(), rounds)
    parameters = sum(
        weight.numel() for name, weight in memories.model.named_parameters() if "embed" not in name
    )
    report["peak_gemm_gflops"] = passes.peak_gemm()
    trunk = report["tokens_per_second"]["trunk"]
    report["trunk_gflops_in_linear_maps"] = 2 * parameters * trunk / 1e9
    return report


def passes_all(rounds: int = 3) -> dict[str, Any]:
    """Index pass with every prefix, and trunk."""
    return _raced(ffmem.load(MODEL), "all", {}, rounds)


def passes_bfloat16(rounds: int = 3) -> dict[str, Any]:
    """Index pass and trunk in bfloat16."""
    return _raced(ffmem.load(MODEL, dtype="bfloat16"), "best", {}, rounds)


def _raced(
    memories: ffmem.Memories, prefixes: str, others: dict[str, Callable[[Any], None]], rounds: int
) -> dict[str, Any]:
    """Return the speeds of index pass, trunk and others on a few batches of a warm index."""
    bench = passes.Bench(memories, passes.corpus_ids(memories, 5_000), prefixes)
    bench.warm(1)
    chunk = bench.chunks[1]
    batched = bench.batches(chunk)[3::7]
    variants = {"trunk": passes.trunk(memories), "index": passes.indexing(bench, chunk), **others}
    speeds = passes.race(variants, batched, rounds)
    return {
        "warmed_tokens": bench.chunks[0].n_tokens,
        "tokens": sum(sum(batch.lengths) for batch in batched),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "tokens_per_second": speeds,
        "index_over": {name: speeds["index"] / speed for name, speed in speeds.items()},
    }


def memory_of_a_pass() -> dict[str, Any]:
    """Peak resident memory of a pass over a corpus, and over one ten times as large."""
    script = (
        "import sys, resource, random, ffmem, torch\n"
        "sys.path.insert(0, '.')\n"
        "from tests.tiny import tiny, tiny_tokenizer\n"
        "n, folder = int(sys.argv[1]), sys.argv[2]\n"
        "words = random.Random(0)\n"
        "with open(folder + '.txt', 'w') as file:\n"
        "    for _ in range(n):\n"
        "        row = [f'w{words.randint(3, 60)}' for _ in range(words.randint(1, 40))]\n"
        "        file.write(' '.join(row) + '\\n')\n"
        "model = ffmem.load(tiny('llama'), tiny_tokenizer())\n"
        "corpus = ffmem.Corpus(folder + '.txt', unit='line')\n"
        "ffmem.index(model, corpus, folder, start='bos', chunk_tokens=8192)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)\n"
    )
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, n in (("1x", 10_000), ("10x", 100_000)):
            done = subprocess.run(
                [sys.executable, "-c", script, str(n), f"{folder}/{name}"],
                check=True,
                capture_output=True,
                text=True,
                cwd=Path(__file__).parent.parent,
            )
            peaks[name] = int(done.stdout)
    return {"peak_mib": peaks, "ratio": peaks["10x"] / peaks["1x"]}


def values_of_smollm2() -> dict[str, Any]:
    """The streamed projection of all values: time, and memory over the model's."""
    from ffmem.indexing.values import write_values

    memories = ffmem.load(MODEL)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, peaks = [], []
    with tempfile.TemporaryDirectory() as folder:
        for layer in range(memories.n_layers):
            path = Path(folder) / f"{layer}.parquet"
            seconds.append(_timed(lambda: write_values(path, memories, layer)))  # noqa: B023
            peaks.append(passes.peak_gemm(rounds=3))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flops = 2 * memories.layout.widths[0] * memories.hidden * memories.vocabulary
    best = flops / min(seconds) / 1e9
    return {
        "seconds": sum(seconds),
        "best_layer_gflops": best,
        "peak_gemm_gflops": max(peaks),
        "share_of_peak": best / max(peaks),
        "mib_over_the_model": (after - before) // 1024,
    }


def look_ups(folder: str | None = None) -> dict[str, Any]:
    """`show` of a cold index as a process; show and search within a process."""
    where = folder or os.environ.get("FFMEM_BENCH_INDEX") or "demo"
    index = ffmem.open(where)
    random = np.random.default_rng(0)
    cells = [
        f"L{random.integers(index.n_layers)}N{random.integers(index.layout.widths[0])}"
        for _ in range(200)
    ]
    show = [str(Path(sys.executable).with_name("ffmem")), "show", where, cells[0]]
    cold = min(
        _timed(lambda: subprocess.run(show, check=True, capture_output=True)) for _ in range(7)
    )
    ffmem.search(index, "river")  # the derived file is there from here on
    from ffmem.indexing.search import Search

    search = Search(index)
    words = _rare_words(index, random)
    return {
        "memories": len(index),
        "sentences": index.manifest.corpus.sentences,
        "show_process_seconds": cold,
        "show_ms": _quantiles(lambda cell: index[cell], cells),
        "search_values_ms": _quantiles(search.find, words),
        "search_rare_word_in_triggers_ms": _quantiles(
            lambda word: search.find(word, place="triggers"), words
        ),
        "search_the_in_triggers_ms": _timed(lambda: search.find("the", place="triggers")) * 1e3,
    }


def agreement_with_transformer_lens() -> dict[str, Any]:
    """Coefficients by ffmem and by TransformerLens, on tiny random models of two families."""
    from transformer_lens.model_bridge import TransformerBridge

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.tiny import tiny, tiny_tokenizer

    tokens = torch.tensor([[0, 3, 14, 15, 9, 26], [0, 5, 35, 8, 9, 7]])
    report = {}
    for name in ("gpt2", "llama"):
        with tempfile.TemporaryDirectory() as folder:
            tiny(name).save_pretrained(folder)
            tiny_tokenizer().tokenizer.save_pretrained(folder)
            memories = ffmem.load(folder)
            _, cache = TransformerBridge.boot_transformers(folder).run_with_cache(tokens)
        ours = [layer.coefficients for layer in memories.trace(tokens)]
        differences = [
            float((cache[f"blocks.{layer}.mlp.hook_post"] - m).abs().max())
            for layer, m in enumerate(ours)
        ]
        report[name] = {
            "largest_difference": max(differences),
            "largest_coefficient": max(float(m.abs().max()) for m in ours),
        }
    return report


def _rare_words(index: ffmem.Index, random: np.random.Generator) -> list[str]:
    """Words that occur in few sentences of the corpus."""
    counts: dict[str, int] = {}
    for row in index.sentences.rows(0, index.sentences.n_sentences):
        for word in set((row.text or "").split()):
            if word.isalpha():
                counts[word] = counts.get(word, 0) + 1
    rare = sorted(word for word, n in counts.items() if n <= 5)
    return [str(word) for word in random.choice(rare, 100, replace=False)]


def _quantiles(run: Callable[[str], Any], arguments: list[str]) -> dict[str, float]:
    taken = [_timed(lambda argument=argument: run(argument)) * 1e3 for argument in arguments]
    return {"p50": float(np.quantile(taken, 0.5)), "p95": float(np.quantile(taken, 0.95))}


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _hugging_face_folder() -> str:
    from ffmem.models.arguments import NAMED_MODELS
    from ffmem.models.checkpoint import convert_gguf
    from ffmem.registry import fetch

    return str(convert_gguf(fetch(NAMED_MODELS[MODEL])))


BENCHMARKS: dict[str, Callable[[], dict[str, Any]]] = {
    "best": passes_best,
    "all": passes_all,
    "bfloat16": passes_bfloat16,
    "memory": memory_of_a_pass,
    "values": values_of_smollm2,
    "experts": experts.experts_pass,
    "million": experts.million,
    "section5": section5.section5,
    "effect": effect.effect_of_smollm2,
    "lookups": look_ups,
    "patterns": patterns.patterns,
    "training": training.training,
    "workers": workers.workers,
    "explorer": explorer.explorer_of_smollm2,
    "agreement": agreement_with_transformer_lens,
}


def main() -> None:
    """Run the named benchmarks, or all."""
    RESULTS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or BENCHMARKS:
        result = BENCHMARKS[name]()
        machine = {"machine": platform.machine(), "cores": os.cpu_count()}
        text = json.dumps({"benchmark": name, **machine, **result}, indent=2)
        (RESULTS / f"{name}.json").write_text(text + "\n")
        print(text)


if __name__ == "__main__":
    main()
