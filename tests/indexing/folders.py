"""What tests of index folders share: a small corpus, how to index it, the bytes of a folder."""

import random
from contextlib import contextmanager
from pathlib import Path

import ffmem
from ffmem.progress import Progress
from tests.tiny import tiny, tiny_tokenizer


def write_corpus(path: Path, n: int = 60, seed: int = 0) -> Path:
    """Write n lines of a few words each."""
    words = random.Random(seed)
    lines = [
        " ".join(f"w{words.randint(3, 30)}" for _ in range(words.randint(1, 9))) for _ in range(n)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def memories(name: str = "llama", seed: int = 0):
    return ffmem.load(tiny(name, seed), tiny_tokenizer())


def indexed(folder: Path, corpus: Path, model=None, **options):
    """Index a corpus in small chunks."""
    settings = {"t": 3, "chunk_tokens": 50, "batch_tokens": 40, "start": "bos"} | options
    return ffmem.index(
        model or memories(), ffmem.Corpus(str(corpus), unit="line"), folder, **settings
    )


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder by name; search.sqlite is derived and does not count."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "search.sqlite"
    }


class Steps(Progress):
    """Keeps the steps of every bar, by its title."""

    def __init__(self):
        super().__init__(quiet=True)
        self.of = {}

    @contextmanager
    def bar(self, title, total, unit, done=0, note=None):
        yield self.of.setdefault(title, []).append
