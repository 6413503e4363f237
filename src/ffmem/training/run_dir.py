"""The folder of a training run: what is recorded, checkpointed and resumed.

    FOLDER/checkpoint/prepared.safetensors  token ids of both streams; as JSON, config and plan
    FOLDER/checkpoint/tokenizer files       dict.txt, tokenizer.json, tokenizer_config.json
    FOLDER/checkpoint/state.safetensors     weights, optimizer and RNG states; as JSON, TrainState
    FOLDER/checkpoint/best-N.safetensors    weights of the best evaluation so far, at step N
    FOLDER/curve.jsonl                      one row every few steps, one for every evaluation
    FOLDER/training.json                    the result; written last, so the run is finished

Every file is complete or absent. The best weights are written before the state that names them, and
older ones are deleted after it: killed at any moment, a run can be resumed. Nothing is unpickled.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ffmem.corpus.corpus import Corpus
from ffmem.errors import FfmemError, StoreError
from ffmem.files import (
    check_writable,
    committing,
    locked,
    sha256,
    storage_errors,
    sync,
    write_text,
)
from ffmem.records import Record
from ffmem.training.config import TrainConfig
from ffmem.training.data import StreamStats

TOKENIZER_FILES = ("dict.txt", "tokenizer.json", "tokenizer_config.json")
START_AGAIN = "Delete the folder and train again."


# Records


@dataclass(frozen=True, kw_only=True)
class TrainRunConfig(Record):
    """Everything that decides the weights: the same TrainRunConfig gives the same bytes."""

    config: TrainConfig
    corpus: dict[str, str | int | bool | None]
    """Settings, and the SHA-256 of its files."""
    valid: dict[str, str | int | bool | None] | None
    threads: int
    device: str
    versions: dict[str, str]

    @classmethod
    def make(
        cls, config: TrainConfig, corpus: Corpus, valid: Corpus | None, threads: int, device: str
    ) -> "TrainRunConfig":
        """Return the TrainRunConfig of a new run."""
        return cls(
            config=config,
            corpus=corpus.identify(),
            valid=None if valid is None else valid.identify(),
            threads=threads,
            device=device,
            versions={name: version(name) for name in ("ffmem", "torch", "transformers")},
        )

    def settings(self) -> dict[str, Any]:
        """Return what a resumed run must agree with; the options of `TrainConfig` by their name."""
        compared = [one.name for one in fields(TrainConfig) if one.compare]
        settings = asdict(self)
        del settings["config"]
        return {name: getattr(self.config, name) for name in compared} | settings


@dataclass(frozen=True, kw_only=True)
class TrainPlan(Record):
    """Sizes and counts that are known once the corpus is read, before the first step."""

    vocabulary: int
    start: int
    """The start token."""
    memories: int
    """Per layer; with persistent memory, per head; with experts, per expert."""
    parameters: int
    active_parameters: int
    """Those that one token reaches: fewer than all if there are experts."""
    matched_parameters: int | None
    """Active parameters of the model to match, if any."""
    steps: int
    """At most: validation may stop improving earlier."""
    steps_per_epoch: int
    warmup: int
    train: StreamStats
    valid: StreamStats
    tokenizer_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file of the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class TrainState(Record):
    """How far a run is."""

    step: int = 0
    """Steps done."""
    seconds: float = 0.0
    """Spent on steps, over all processes of the run."""
    rows: int = 0
    """Rows of the curve."""
    best_step: int | None = None
    best_perplexity: float | None = None
    evaluations_since_best: int = 0
    stopped_early: bool = False
    """Whether validation stopped improving."""


@dataclass(frozen=True, kw_only=True)
class TrainResult(Record):
    """`training.json`: the configuration and the outcome."""

    run: TrainRunConfig
    plan: TrainPlan
    steps: int
    """Steps done."""
    epochs: float
    tokens: int
    seconds: float
    """Spent on steps, without evaluations and checkpoints."""
    tokens_per_second: float
    best_step: int
    valid_perplexity: float
    """Of the weights that are kept: those of the best step."""
    last_valid_perplexity: float
    last_loss: float
    stopped_early: bool


def _damaged(path: Path, error: object) -> StoreError:
    return StoreError(
        f"{path} is damaged, or from another version of ffmem ({error}). {START_AGAIN}"
    )


class PreparedRun(NamedTuple):
    """What a run needs before its first step."""

    run: TrainRunConfig
    plan: TrainPlan
    train: Int[Tensor, " token"]
    valid: Int[Tensor, " token"]


# Tensor files


def write_tensors(path: Path, tensors: Mapping[str, Tensor], records: Mapping[str, str]) -> None:
    """Write tensors and JSON records to a safetensors file, with the hash of its content."""
    content = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    metadata = {**records, "sha256": _content_hash(content, records)}
    with committing(path) as temporary:
        # Write the bytes ourselves, so that a full disk raises OSError.
        temporary.write_bytes(save(content, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and JSON records of a file; raise if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            records = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None
    if records.pop("sha256", None) != _content_hash(tensors, records):
        raise _damaged(path, "its content does not match its hash")
    return tensors, records


def _content_hash(tensors: Mapping[str, Tensor], records: Mapping[str, str]) -> str:
    """Return the SHA-256 of the names and bytes of tensors and records."""
    found = hashlib.sha256(json.dumps(sorted(records.items())).encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


# The folder


class RunDir:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint"
        self.result_path = path / "training.json"
        self.prepared_path = self.checkpoint / "prepared.safetensors"
        self.state_path = self.checkpoint / "state.safetensors"

    @property
    def is_finished(self) -> bool:
        """Whether a run has finished here."""
        return self.result_path.is_file()

    def check_usable(self) -> None:
        """Raise unless the folder is new, empty or a training run."""
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is a file. Use a new or an empty folder as --out.")
        if not self.path.exists() or self.is_finished or self.checkpoint.is_dir():
            return
        if any(self.path.iterdir()):
            raise StoreError(
                f"{self.path} is not empty and is not a training run. Use a new or an empty folder"
                " as --out."
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder; if the run is refused, remove a folder that is new."""
        self.check_usable()
        is_new = not self.path.exists()
        check_writable(self.path)
        busy = f"Another process is training in {self.path}. Wait for it, or use another --out."
        with locked(self.checkpoint / "lock", busy):
            try:
                yield
            except FfmemError:
                if is_new and not self.prepared_path.exists():
                    shutil.rmtree(self.path)
                raise

    def write_prepared(self, prepared: PreparedRun) -> None:
        """Write what a run needs before its first step; the tokenizer's files are already there."""
        records = {"run": prepared.run.to_json(), "plan": prepared.plan.to_json()}
        write_tensors(
            self.prepared_path, {"train": prepared.train, "valid": prepared.valid}, records
        )

    def read_prepared(self) -> PreparedRun | None:
        """Return what a run needs, if it was written; raise if a file changed since then."""
        if not self.prepared_path.is_file():
            return None
        streams, records = read_tensors(self.prepared_path)
        try:
            run = TrainRunConfig.of(json.loads(records["run"]))
            plan = TrainPlan.of(json.loads(records["plan"]))
        except (KeyError, ValueError) as error:
            raise _damaged(self.prepared_path, error) from None
        for name, expected in plan.tokenizer_files.items():
            path = self.checkpoint / name
            if not path.is_file() or sha256(path) != expected:
                problem = "damaged" if path.is_file() else "missing"
                raise StoreError(
                    f"{path} is {problem}, so the run cannot be resumed. {START_AGAIN}"
                )
        return PreparedRun(run, plan, streams["train"], streams["valid"])

    def read_result(self) -> TrainResult:
        """Return the result of a finished run."""
        try:
            return TrainResult.of(json.loads(self.result_path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise _damaged(self.result_path, error) from None

    def check_model_files(self) -> None:
        """Raise if a file of a finished run's model is missing."""
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            if not (self.path / name).is_file():
                raise StoreError(
                    f"{self.path} holds a trained model, but {name} is missing. {START_AGAIN}"
                )

    def write_state(
        self, state: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Write a checkpoint."""
        tensors = {f"model.{name}": weight for name, weight in _weights(model).items()}
        for number, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in moments.items()}
        tensors["rng.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            for number, rng_state in enumerate(torch.cuda.get_rng_state_all()):
                tensors[f"rng.cuda.{number}"] = rng_state
        write_tensors(self.state_path, tensors, {"state": state.to_json()})
        for path in self.checkpoint.glob("best-*.safetensors"):
            if path != self.best_path(state.best_step):
                path.unlink()

    def read_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
        """Restore model, optimizer and random number generators from the last checkpoint."""
        tensors, records = read_tensors(self.state_path)
        groups: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "rng": {}}
        try:
            state = TrainState.of(json.loads(records["state"]))
            for name, tensor in tensors.items():
                group, _, rest = name.partition(".")
                groups[group][rest] = tensor
            _set_weights(model, groups["model"])
            moments: dict[int, dict[str, Tensor]] = {}
            for name, tensor in groups["optimizer"].items():
                number, _, moment = name.partition(".")
                moments.setdefault(int(number), {})[moment] = tensor
            optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
            torch.set_rng_state(groups["rng"]["cpu"])
            for name, tensor in groups["rng"].items():
                if name != "cpu" and torch.cuda.is_available():
                    torch.cuda.set_rng_state(tensor, int(name.removeprefix("cuda.")))
        except (KeyError, ValueError, RuntimeError) as error:
            raise _damaged(self.state_path, error) from None
        if state.best_step is not None:
            read_tensors(self.best_path(state.best_step))  # fail now, not after the last step
        return state

    def best_path(self, step: int | None) -> Path:
        """Return the file of the best weights, those after a step."""
        return self.checkpoint / f"best-{step}.safetensors"

    def write_best(self, step: int, model: nn.Module) -> None:
        """Write the weights of the best evaluation, before a state names them."""
        write_tensors(self.best_path(step), _weights(model), {})

    def read_best(self, state: TrainState, model: nn.Module) -> None:
        """Load the weights of the best evaluation."""
        path = self.best_path(state.best_step)
        tensors, _ = read_tensors(path)
        try:
            _set_weights(model, tensors)
        except (KeyError, RuntimeError) as error:
            raise _damaged(path, error) from None


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight of a model; tied ones once."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


@torch.no_grad()
def _set_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model."""
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])


class Curve:
    """The rows of `curve.jsonl`.

    A row is written as soon as it is known. A killed run may have written more rows than its last
    checkpoint knows of, or half a row: resuming drops those, and the run writes them again.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "curve.jsonl"
        self.rows: list[dict[str, Any]] = []

    def start(self) -> None:
        """Begin an empty curve."""
        write_text(self.path, "")

    def resume(self, n_rows: int) -> None:
        """Read the first `n_rows` rows, and drop the others."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()[:n_rows]
            self.rows = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.path} cannot be read ({error}). {START_AGAIN}") from None
        if len(self.rows) < n_rows:
            raise StoreError(
                f"{self.path} has {len(self.rows)} rows, the checkpoint expects {n_rows}."
                f" {START_AGAIN}"
            )
        write_text(self.path, "".join(f"{line}\n" for line in lines))

    def add(self, row: dict[str, Any]) -> None:
        """Append a row."""
        self.rows.append(row)
        with storage_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        """Force the rows to the disk, before a checkpoint relies on them."""
        with storage_errors(self.path):
            sync(self.path)
