"""The explorer's answers: how long one visitor waits, and each of twenty for a minute.

The server is a process of its own (`ffmem serve`), the visitors are threads of this one, on the
same cores. Every answer is checked against what the library itself says, so that a fast wrong one
does not count.
"""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np

import ffmem

PROMPTS = (
    "In the last election the party won 48",
    "The capital of France is",
    "She was born on the 14th of",
    "The river flows into the",
)
WORDS = ("regiment", "percent", "Sunday", "hurricane", "summer of", "the", "L12N345")
VISITORS, SECONDS = 20, 60.0

Check = Callable[[bytes], bool]


def explorer_of_smollm2(seconds: float = SECONDS, visitors: int = VISITORS) -> dict[str, Any]:
    """Latencies of every kind of page, alone and under load; memory before and after."""
    folder = os.environ.get("FFMEM_BENCH_INDEX") or "demo"
    index = ffmem.open(folder)
    asked = {
        "memory page": _memories(index),
        "memory as JSON": _memories_as_json(index),
        "search at every keystroke": _keystrokes(),
        "layer page": _layers(index),
        "trace as JSON": _traces(index),
    }
    with _serving(folder) as (address, process):
        begin = time.perf_counter()
        _get(address, asked["trace as JSON"][0][0])
        first_trace = time.perf_counter() - begin
        first = _alone(address, asked["memory page"][:150])
        alone = {name: _alone(address, questions[-150:]) for name, questions in asked.items()}
        alone["memory page, the first 150"] = first
        loaded = _crowd(address, asked, visitors, seconds, lambda: _rss(process))
    return {
        "sentences": index.manifest.corpus.sentences,
        "first_trace_with_loading_seconds": first_trace,
        "alone_ms": {name: _quantiles(times) for name, times in alone.items()},
        "visitors": visitors,
        "seconds": seconds,
        "under_load_ms": {name: _quantiles(times) for name, times in loaded["times"].items()},
        "answers": {name: len(times) for name, times in loaded["times"].items()},
        "errors": loaded["errors"],
        "wrong_answers": loaded["wrong"],
        "server_rss_mib_every_10_s": loaded["rss"],
    }


Questions = list[tuple[str, Check]]


def _memories(index: ffmem.Index) -> Questions:
    cells = random.Random(0).sample(list(index), 450)
    return [(f"/m/{cell}", _holds(f">{cell}<".encode())) for cell in cells]


def _memories_as_json(index: ffmem.Index) -> Questions:
    cells = random.Random(1).sample(list(index), 150)
    return [(f"/api/m/{cell}", _equals(index[cell].to_dict())) for cell in cells]


def _layers(index: ffmem.Index) -> Questions:
    layers = random.Random(2).sample(range(index.n_layers), min(12, index.n_layers))
    return [(f"/layer/{layer}", _holds(f">L{layer}N0<".encode())) for layer in layers]


def _keystrokes() -> Questions:
    """Return every beginning of some words, as somebody types them."""
    typed = [word[:length] for word in WORDS for length in range(1, len(word) + 1)]
    return [(f"/api/search?prefix=true&q={quote(text)}", _holds(b'"groups"')) for text in typed]


def _traces(index: ffmem.Index) -> Questions:
    """Return traces with and without edits, which the library answers beforehand."""
    found = []
    memories = ffmem.load(index.manifest.model.source)
    for prompt in PROMPTS:
        for cell in (None, "L22N873", "L20N5", "L13N77", "L29N1501", "L8N900"):
            edits = {"off": [cell]} if cell else {}
            expected = ffmem.trace(index, prompt, model=memories, grid=True, **edits).to_dict()
            query = f"text={quote(prompt)}" + (f"&off={cell}" if cell else "")
            found.append((f"/api/trace?{query}&generate=0", _equals(expected)))
    return found


def _holds(part: bytes) -> Check:
    return lambda answer: part in answer


def _equals(expected: Any) -> Check:
    plain = json.loads(json.dumps(expected))
    return lambda answer: _alike(json.loads(answer), plain)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(other, float):
        return bool(np.isclose(one, other, rtol=1e-3, atol=1e-5))
    if isinstance(other, dict):
        return all(key in one and _alike(one[key], other[key]) for key in other)
    if isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _alone(address: str, questions: Questions) -> list[float]:
    times = []
    for path, check in questions:
        taken, answer = _get(address, path)
        assert check(answer), f"a wrong answer to {path}"
        times.append(taken)
    return times


def _crowd(
    address: str,
    asked: dict[str, Questions],
    visitors: int,
    seconds: float,
    rss: Callable[[], int],
) -> dict[str, Any]:
    """Let visitors browse at random for some time; about one in five of their pages is a trace."""
    times: dict[str, list[float]] = {name: [] for name in asked}
    errors: list[str] = []
    given: list[tuple[str, Check, bytes]] = []
    until = time.perf_counter() + seconds

    def visit(number: int) -> None:
        chance = random.Random(number)
        while time.perf_counter() < until:
            name = chance.choices(list(asked), [4, 2, 6, 1, 3])[0]
            path, check = chance.choice(asked[name])
            try:
                taken, answer = _get(address, path)
            except OSError as error:
                errors.append(f"{path}: {error}")
                continue
            times[name].append(taken)
            given.append((path, check, answer))

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(visitors)]
    sizes = [rss()]
    for thread in threads:
        thread.start()
    while time.perf_counter() < until:
        time.sleep(min(10.0, max(0.0, until - time.perf_counter())))
        sizes.append(rss())
    for thread in threads:
        thread.join()
    # Afterwards, so that the cores are the server's while it is measured.
    wrong = [path for path, check, answer in given if not check(answer)]
    return {"times": times, "errors": errors, "wrong": wrong, "rss": sizes}


@contextmanager
def _serving(folder: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "ffmem", "serve", folder, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://\S+[^/\s]", said)
        assert found, f"the server said {said!r}"
        try:
            yield found[0], process
        finally:
            process.terminate()


def _get(address: str, path: str) -> tuple[float, bytes]:
    begin = time.perf_counter()
    with urlopen(address + path, timeout=300) as answer:
        content: bytes = answer.read()
    return time.perf_counter() - begin, content


def _rss(process: subprocess.Popen[str]) -> int:
    import psutil

    return int(psutil.Process(process.pid).memory_info().rss) >> 20


def _quantiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    half, most = np.quantile(np.asarray(seconds) * 1000, [0.5, 0.95])
    return {"p50": round(float(half), 1), "p95": round(float(most), 1), "n": len(seconds)}
