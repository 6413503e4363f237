"""A small text that a tiny model can learn, and runs that take a moment."""

import json
from pathlib import Path

from ffmem.corpus.corpus import Corpus
from ffmem.progress import Progress
from ffmem.training.config import TrainConfig
from ffmem.training.train import train

THINGS = ["river", "base", "city", "press", "tower", "bridge", "garden"]
PLACES = ["Prague", "Vienna", "Rome", "Oslo"]


def sentence(n):
    thing, place = THINGS[n % len(THINGS)], PLACES[n * 3 % len(PLACES)]
    return f"The {thing} of {place} was built in {1900 + n % 5} , and the {thing} stands ."


def write_corpus(path, n=60, first=0):
    path.write_text("".join(sentence(k) + "\n" for k in range(first, first + n)))
    return path


def tiny_config(**other):
    few = {
        "memory": "relu",
        "layers": 2,
        "width": 16,
        "heads": 2,
        "memories": 12,
        "context": 16,
        "batch_tokens": 64,
        "steps": 12,
        "evaluate_every": 5,
        "cutoffs": [10, 20],
        "distances": 4,
        "key_width": 4,
        "device": "cpu",
        "threads": 1,
    }
    return TrainConfig(**(few | other))


def run(folder: Path, corpus: Path, *, valid=None, progress=None, **options):
    """Train a tiny model; `options` are those of `TrainConfig`."""
    return train(
        tiny_config(**options),
        Corpus(str(corpus), unit="line"),
        folder,
        None if valid is None else Corpus(str(valid), unit="line"),
        progress=progress,
    )


class Stopped(Exception):
    pass


class Stopping(Progress):
    """Stops the run at the n-th line that it says."""

    def __init__(self, n):
        super().__init__()
        self.left = n
        self.lines = []

    def say(self, line):
        self.lines.append(line)
        self.left -= 1
        if self.left == 0:
            raise Stopped


def curve(folder):
    """The rows of a run's curve, without the speed."""
    lines = (folder / "curve.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def weights(folder):
    return (folder / "model.safetensors").read_bytes()
