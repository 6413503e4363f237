"""The demonstration: a real model over real text, from nothing to its memories in one command."""

from pathlib import Path

from ffmem import api, measuring, patterning
from ffmem.corpus.corpus import Corpus
from ffmem.indexing.store import Index
from ffmem.progress import Progress

MODEL, CORPUS, VALID = "smollm2-135m", "wikitext-2:train", "wikitext-2:valid"

SIZES = {"sample": 400, "per_layer": 2, "triggers": 5}
"""Of the demonstration's report: a minute or two; `ffmem report` takes ten times as much."""

WORDS = ("percent", "Sunday", "ship")
"""Tokens whose values the demonstration looks for."""


def demo(out: Path, limit: int) -> Index:
    """Index a part of WikiText-2, show a few memories, measure the paper, say what to type next."""
    progress = Progress()
    progress.say(f"Indexing every memory of {MODEL} over {limit:,} sentences of {CORPUS}.")
    index = api.index(MODEL, Corpus(CORPUS, limit=limit), out, progress=progress)
    print(repr(index))
    for word in WORDS:
        for hit in api.search(index, word, limit=1):
            print(f"\n── A value that has {word.strip()!r} among its tokens:\n")
            print(index[hit.cell])
    progress.say("\nLooking for patterns in the triggers of every memory.")
    print(patterning.detect(index, workers=2, progress=progress))
    progress.say("\nMeasuring the paper's figures on a small sample.")
    page = measuring.report(
        index, out.with_name(f"{out.name}-report"), VALID, progress=progress, **SIZES
    )
    print(f"\nThe paper's figures, measured on this model: {page}")
    print(f"\nNow ask any of the {len(index):,} memories:\n")
    print(f"    ffmem show {out} L12N34")
    print(f"    ffmem search {out} river")
    print(f"    ffmem search {out} 'in the summer of' --in triggers")
    print(f"    ffmem search {out} ship --in patterns")
    print(f"    ffmem trace {out} 'In the last election the party won 48' --off L22N873")
    print(f"    ffmem effect {out} 'The capital of France is'")
    print(f"    ffmem serve {out}")
    return index


def explore(out: Path) -> None:
    """Open the explorer on what was made; if its port is taken, on another."""
    import webbrowser

    from ffmem.acting import serve
    from ffmem.web.serving import PORT, is_free

    def ready(address: str) -> None:
        print(f"\nThe explorer is at {address}\nCtrl-C stops it.")
        webbrowser.open(address)

    serve([out], port=PORT if is_free(PORT) else 0, ready=ready)
