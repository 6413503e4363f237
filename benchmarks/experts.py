"""Mixtures of experts: the index pass beside the model's own grouped pass, and a large index.

Both models have random weights: speed does not depend on what they say.
"""

import copy
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import passes
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import ffmem
from ffmem.indexing.chunks import Batch

TOKENIZER = "smollm2-135m"
WORDS = ["river", "army", "percent", "born", "Sunday", "ship", "music", "church", "season"]
MILLION_SENTENCES = 6_400
"""Sentences of WikiText-2 with 206,000 tokens."""


def random_mixture(layers: int, experts: int, size: int, hidden: int) -> PreTrainedModel:
    """Return a mixture of experts with random weights, top 8, for SmolLM2's tokens."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=49_152,
        hidden_size=hidden,
        intermediate_size=size,
        moe_intermediate_size=size,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
    )
    return Qwen3MoeForCausalLM(config).eval()


def own_pass(model: PreTrainedModel) -> Callable[[Batch], None]:
    """The model's own forward pass without logits, its experts by transformers' grouped product."""
    model.set_experts_implementation("grouped_mm")

    def run(batch: Batch) -> None:
        model.base_model(batch.tokens, use_cache=False)

    return run


def experts_pass(rounds: int = 3) -> dict[str, Any]:
    """8 layers of 64 experts of 256 memories, hidden 512: index pass over the grouped pass."""
    model = random_mixture(layers=8, experts=64, size=256, hidden=512)
    own = copy.deepcopy(model)
    memories = ffmem.load(model, ffmem.load(TOKENIZER).tokenizer.tokenizer)
    bench = passes.Bench(memories, passes.corpus_ids(memories, 5_000), "best")
    bench.warm(1)
    chunk = bench.chunks[1]
    batched = bench.batches(chunk)[3::7]
    variants = {
        "own grouped pass": own_pass(own),
        "trunk": passes.trunk(memories),
        "index": passes.indexing(bench, chunk),
    }
    speeds = passes.race(variants, batched, rounds)
    return {
        "layers": 8,
        "experts": 64,
        "size": 256,
        "hidden": 512,
        "tokens": sum(sum(batch.lengths) for batch in batched),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "tokens_per_second": speeds,
        "index_over": {name: speeds["index"] / speed for name, speed in speeds.items()},
    }


def million(folder: str | None = None) -> dict[str, Any]:
    """16 layers of 64 experts of 1,024 memories over 206,000 tokens: build, open, look up.

    FFMEM_BENCH_MILLION names a folder where the index stays, so that a stopped build resumes.
    """
    where = Path(folder or os.environ.get("FFMEM_BENCH_MILLION") or tempfile.mkdtemp())
    out = where / "million"
    report = where / "built.json"
    if not report.exists():
        subprocess.run([sys.executable, __file__, str(where)], check=True)
    built = json.loads(report.read_text())
    begin = time.perf_counter()
    index = ffmem.open(out)
    opened = time.perf_counter() - begin
    random = np.random.default_rng(0)
    cells = [
        f"L{random.integers(16)}E{random.integers(64)}N{random.integers(1024)}" for _ in range(100)
    ]
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {
        "memories": len(index),
        "tokens": index.manifest.corpus.tokens,
        **built,
        "index_bytes": size,
        "open_seconds": opened,
        **_look_ups(index, out, cells),
        **_pages(out, cells),
    }


def _look_ups(index: ffmem.Index, out: Path, cells: list[str]) -> dict[str, Any]:
    """Time `ffmem show` as a process, and searches within one."""
    from ffmem.indexing.search import Search

    show = [str(Path(sys.executable).with_name("ffmem")), "show", str(out)]
    cold = [
        _timed(lambda cell=cell: subprocess.run([*show, cell], check=True, capture_output=True))
        for cell in cells[:7]
    ]
    begin = time.perf_counter()
    ffmem.search(index, "river")  # makes the derived file
    derived = time.perf_counter() - begin
    search = Search(index)
    finds: dict[str, Callable[[str], Any]] = {
        "values": search.find,
        "triggers": lambda word: search.find(word, place="triggers"),
        "everywhere": lambda word: ffmem.search(index, word),
    }
    taken = {
        f"search_{name}_p95_ms": float(
            np.quantile([_timed(partial(find, word)) * 1e3 for word in WORDS * 5], 0.95)
        )
        for name, find in finds.items()
    }
    return {"show_process_seconds": min(cold), "search_file_seconds": derived, **taken}


def _pages(out: Path, cells: list[str]) -> dict[str, Any]:
    """Time pages over HTTP."""
    import httpx2

    from ffmem.web.server import start_server

    server = start_server(out)
    names = ("layer", "expert", "memory", "search", "typing")
    taken: dict[str, list[float]] = {name: [] for name in names}
    try:
        with httpx2.Client(base_url=server.url, timeout=120) as client:
            for number, cell in enumerate(cells[:40]):
                layer, expert = cell[1:].split("N")[0].split("E")
                word = WORDS[number % len(WORDS)]
                for name, path in (
                    ("layer", f"/layer/{layer}"),
                    ("expert", f"/layer/{layer}/E{expert}"),
                    ("memory", f"/m/{cell}"),
                    ("search", f"/search?q={word}"),
                    ("typing", f"/api/search?q={word[:4]}&prefix=1"),
                ):
                    begin = time.perf_counter()
                    answer = client.get(path)
                    if number >= 4:  # the first visits open files
                        taken[name].append((time.perf_counter() - begin) * 1e3)
                    assert answer.status_code == 200, (path, answer.status_code)
    finally:
        server.stop()
    return {f"{name}_page_p95_ms": float(np.quantile(ms, 0.95)) for name, ms in taken.items()}


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def build_million(where: Path) -> None:
    """Build the index, or resume it; write the time of this process, and its peak memory."""
    from ffmem.progress import Progress

    where.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    model = random_mixture(layers=16, experts=64, size=1024, hidden=256)
    memories = ffmem.load(model, ffmem.load(TOKENIZER).tokenizer.tokenizer)
    corpus = ffmem.Corpus("wikitext-2:train", limit=MILLION_SENTENCES)
    ffmem.index(memories, corpus, where / "million", progress=Progress())
    built = {
        "build_seconds": time.perf_counter() - begin,
        "build_cpu_seconds": time.process_time(),
        "build_threads": torch.get_num_threads(),
        "build_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    (where / "built.json").write_text(json.dumps(built))


if __name__ == "__main__":
    build_million(Path(sys.argv[1]))
