"""The demo: index a model, show some memories, measure the paper, and explore it meanwhile."""

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import ffmem
from ffmem.corpus.corpus import Corpus
from ffmem.errors import FfmemError
from ffmem.indexing.status import status
from ffmem.indexing.store import Index
from ffmem.progress import Progress

if TYPE_CHECKING:
    from ffmem.web.server import RunningServer

CHUNK_TOKENS = 8192
"""Chunks of about 20 s on two cores, so that triggers reach the explorer while the index runs."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What a demo indexes and shows."""

    model: str
    corpus: str
    valid: str
    """Corpus of the report's prefixes."""
    limit: int | None
    """Sentences to read by default; None for all."""
    out: Path
    words: tuple[str, ...]
    """Tokens to search values for."""
    prompts: tuple[str, str]
    """For `trace` and `effect`."""
    searches: tuple[str, str, str]
    """Queries for values, triggers and patterns."""
    cells: tuple[str, str]
    """A memory to show, and one to switch off in the trace."""
    sizes: Mapping[str, int] = field(
        default_factory=lambda: {"sample": 400, "per_layer": 2, "triggers": 5}
    )
    """Options of the report: a tenth of the defaults, for a minute or two."""


FULL = DemoConfig(
    model="smollm2-135m",
    corpus="wikitext-2:train",
    valid="wikitext-2:valid",
    limit=2000,
    out=Path("demo"),
    words=("percent", "Sunday", "ship"),
    prompts=("In the last election the party won 48", "The capital of France is"),
    searches=("river", "in the summer of", "ship"),
    cells=("L12N34", "L22N873"),
)
TINY = DemoConfig(
    model="mini-wiki",
    corpus="mini-wiki:train",
    valid="mini-wiki:valid",
    limit=None,
    out=Path("demo-tiny"),
    words=("percent", "Sunday", "ship"),
    prompts=("It was released in the summer of", "The bridge was opened on 2"),
    searches=("river", "part of the", "months"),
    cells=("L11N388", "L13N271"),  # both promote years
    sizes={"sample": 100, "per_layer": 2, "triggers": 5},  # valid has few sentences
)


def demo(config: DemoConfig, out: Path, limit: int | None, serve: bool = False) -> Index:
    """Index a text, show a few memories, measure the paper, and suggest what to type next.

    With `serve`, the explorer opens as soon as the first values can be read, fills up while the
    rest is computed, and stays until Ctrl-C.
    """
    with _explorer(out) if serve else nullcontext() as server:
        index = _run(config, out, limit)
        if server is not None:
            print(f"\nThe explorer is at {server.url}\nPress Ctrl-C to stop it.", flush=True)
            server.wait()
    return index


def _run(config: DemoConfig, out: Path, limit: int | None) -> Index:
    """Make index, patterns and report, and print examples on the way."""
    progress = Progress()
    read = "all" if limit is None else f"{limit:,}"
    progress.say(
        f"Indexing every memory of {config.model} over {read} sentences of {config.corpus}."
    )
    corpus = Corpus(config.corpus, limit=limit)
    index = ffmem.index(config.model, corpus, out, chunk_tokens=CHUNK_TOKENS, progress=progress)
    print(repr(index))
    for word in config.words:
        for hit in ffmem.search(index, word, limit=1)["values"]:
            print(f"\n── A value with the token {word.strip()!r}:\n")
            print(index[hit.cell])
    progress.say("\nLooking for patterns in the triggers of every memory.")
    print(ffmem.detect(index, workers=2, progress=progress))
    progress.say("\nMeasuring the paper's figures on a small sample.")
    page = ffmem.report(
        index,
        out.with_name(f"{out.name}-report"),
        config.valid,
        sample=config.sizes["sample"],
        per_layer=config.sizes["per_layer"],
        triggers=config.sizes["triggers"],
        progress=progress,
    )
    print(f"\nThe paper's figures, measured on this model: {page}")
    print(f"\nTry these on any of the {len(index):,} memories:\n")
    for line in _next_commands(config, out):
        print(f"    ffmem {line}")
    return index


def _next_commands(config: DemoConfig, out: Path) -> list[str]:
    """Return commands to try next."""
    value, trigger, pattern = config.searches
    (shown, off), (traced, asked) = config.cells, config.prompts
    return [
        f"show {out} {shown}",
        f"search {out} {value}",
        f"search {out} '{trigger}' --in triggers",
        f"search {out} {pattern} --in patterns",
        f"trace {out} '{traced}' --off {off}",
        f"effect {out} '{asked}'",
        f"serve {out}",
    ]


@contextmanager
def _explorer(out: Path) -> "Iterator[RunningServer]":
    """Serve an index that is being made; open the page when there is something to see."""
    from ffmem.web.server import start_server

    server = start_server(out)

    def open_when_readable() -> None:
        while not _is_readable(out):
            time.sleep(0.5)
        print(f"The explorer is at {server.url} and fills in as indexing runs.", file=sys.stderr)
        if _has_screen():
            import webbrowser

            webbrowser.open(server.url)

    threading.Thread(target=open_when_readable, daemon=True).start()
    try:
        yield server
    finally:
        server.stop()


def _is_readable(out: Path) -> bool:
    """Return whether an index has the values of a layer, or is finished."""
    try:
        now = status(out)
    except FfmemError:  # nothing is there yet
        return False
    return now.state == "finished" or now.values > 0


def _has_screen() -> bool:
    """Return whether a browser would open a window, not take over this terminal."""
    return sys.platform != "linux" or any(
        os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    )
