"""The demonstration: a real model over real text, from nothing to its memories in one command."""

from pathlib import Path

from ffmem import api
from ffmem.corpus.corpus import Corpus
from ffmem.indexing.store import Index
from ffmem.progress import Progress

MODEL, CORPUS = "smollm2-135m", "wikitext-2:train"

WORDS = ("percent", "Sunday", "ship")
"""Tokens whose values the demonstration looks for."""


def demo(out: Path, limit: int) -> Index:
    """Index a part of WikiText-2, show a few memories, and say what to type next."""
    progress = Progress()
    progress.say(f"Indexing every memory of {MODEL} over {limit:,} sentences of {CORPUS}.")
    index = api.index(MODEL, Corpus(CORPUS, limit=limit), out, progress=progress)
    print(repr(index))
    shown = 0
    for word in WORDS:
        for hit in api.search(index, word, limit=1):
            print(f"\n── A value that has {word.strip()!r} among its tokens:\n")
            print(index[hit.cell])
            shown += 1
    print(f"\nNow ask any of the {len(index):,} memories:\n")
    print(f"    ffmem show {out} L12N34")
    print(f"    ffmem search {out} river")
    print(f"    ffmem search {out} 'in the summer of' --in triggers")
    return index
