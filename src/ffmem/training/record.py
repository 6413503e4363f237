"""What decides the weights of a run, and what came of it.

`Asked` is written before the first step: a run with other settings is refused in the same folder.
`Trained` is `training.json`, written last: it exists only when the rest is whole.
"""

import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from ffmem.corpus.corpus import Corpus
from ffmem.errors import StoreError
from ffmem.files import write_text
from ffmem.records import AnyRecord, Record
from ffmem.training.settings import Settings
from ffmem.training.stream import StreamRecord

TRAINING = "training.json"

Described = dict[str, str | int | None]


@dataclass(frozen=True, kw_only=True)
class Asked(Record):
    """Everything that decides the weights, before the corpus is read."""

    settings: Settings
    corpus: Described
    digest: str | None
    valid: Described | None
    valid_digest: str | None
    threads: int
    device: str
    versions: dict[str, str]

    @classmethod
    def of_run(
        cls, settings: Settings, corpus: Corpus, valid: Corpus | None, threads: int, device: str
    ) -> "Asked":
        """Return what is asked of a new run."""
        return cls(
            settings=settings,
            corpus=corpus.describe(),
            digest=corpus.digest(),
            valid=None if valid is None else valid.describe(),
            valid_digest=None if valid is None else valid.digest(),
            threads=threads,
            device=device,
            versions={name: version(name) for name in ("ffmem", "torch", "transformers")},
        )

    def differences(self, before: "Asked") -> list[str]:
        """Return how this differs from what was asked before, field by field."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(before))
        ignored = {"settings.threads"}  # `threads` is how many there were
        for digest, source in (("digest", "corpus.source"), ("valid_digest", "valid.source")):
            if mine[digest] is not None and mine[digest] == theirs[digest]:
                ignored.add(source)  # the same files, by another path
        return [
            f"{_shown(name)}: {_short(theirs.get(name))} → {_short(mine.get(name))}"
            for name in {**mine, **theirs}
            if name not in ignored and mine.get(name) != theirs.get(name)
        ]


def _flat(content: dict[str, object], place: str = "") -> dict[str, object]:
    """Return every field that is no dictionary, by its dotted name."""
    found: dict[str, object] = {}
    for name, value in content.items():
        found |= (
            _flat(value, f"{place}{name}.") if isinstance(value, dict) else {place + name: value}
        )
    return found


def _short(value: object) -> object:
    """Return a value as it is told; of a digest its beginning."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else value


def _shown(name: str) -> str:
    digests = {"digest": "the corpus' files have changed, digest"}
    digests["valid_digest"] = "the validation files have changed, digest"
    return digests.get(name, name.removeprefix("settings."))


@dataclass(frozen=True, kw_only=True)
class Prepared(Record):
    """What is known once the streams are made, before the first step."""

    vocabulary: int
    start: int
    memories: int
    """Per layer; with persistent memory, per head."""
    parameters: int
    matched_parameters: int | None
    """Of the model that was to be matched, if one was."""
    steps: int
    """At most."""
    steps_of_an_epoch: int
    warmup: int
    train: StreamRecord
    valid: StreamRecord
    files: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of each file of the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Trained(Record):
    """What was asked, what was made of it, and the figures."""

    asked: Asked
    prepared: Prepared
    steps: int
    """Done."""
    epochs: float
    tokens: int
    seconds: float
    """Spent on steps; evaluations and checkpoints are not counted."""
    tokens_per_second: float
    best_step: int
    valid_perplexity: float
    """Of the weights that are kept."""
    last_valid_perplexity: float
    last_loss: float
    stopped_early: bool

    def write(self, folder: Path) -> None:
        """Commit training.json."""
        write_text(folder / TRAINING, self.to_json())


def read_record(kind: type[AnyRecord], path: Path) -> AnyRecord:
    """Return a record that a run committed to a file."""
    try:
        return kind.of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path} is damaged, or was written by another version of ffmem ({error})."
            " Delete the folder and train again."
        ) from None
