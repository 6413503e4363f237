"""Where a run stands, in one file that is whole or not there.

    checkpoint/state.safetensors   weights, moments, random generators; as JSON, where the run is
    checkpoint/best-N.safetensors  the weights of the best evaluation so far, after step N
    checkpoint/stream.safetensors  the token ids of both streams

The best weights are there before the state that names them, and older ones go after it: killed at
any moment, the last state and all it names can be read. Nothing is ever unpickled.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ffmem.errors import StoreError
from ffmem.files import committing
from ffmem.records import NotARecord, Record

FOLDER = "checkpoint"
STATE = "state.safetensors"
DIGEST = "sha256"
"""In a file of tensors: the hash of its content, for what is damaged must not be gone on with."""

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, kw_only=True)
class Standing(Record):
    """Where a run is."""

    step: int = 0
    """Steps done."""
    seconds: float = 0.0
    """Spent on steps, over all starts of the run."""
    rows: int = 0
    """Of the curve."""
    pending: list[float] = field(default_factory=list)
    """Losses of steps that no row of the curve tells yet."""
    best_step: int | None = None
    best_perplexity: float | None = None
    without_gain: int = 0
    """Evaluations since the best one."""
    finished: bool = False
    """Whether validation stopped improving."""


class Checkpoint:
    """The checkpoint folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER

    @property
    def exists(self) -> bool:
        """Whether there is a state to go on from."""
        return (self.folder / STATE).is_file()

    def write(self, standing: Standing, model: nn.Module, optimizer: Optimizer) -> None:
        """Commit where a run stands."""
        tensors = {f"model.{name}": weight for name, weight in weights_of(model).items()}
        for number, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
        tensors |= _random_states()
        write_tensors(self.folder / STATE, tensors, {"standing": standing.to_json()})
        for path in self.folder.glob("best-*.safetensors"):
            if path.name != best_name(standing.best_step):
                path.unlink()

    def write_best(self, step: int, model: nn.Module) -> None:
        """Commit the weights of the best evaluation, before a state names it."""
        write_tensors(self.folder / best_name(step), weights_of(model))

    def read(self, model: nn.Module, optimizer: Optimizer) -> Standing:
        """Bring model, optimizer and random generators to where the run stands."""
        tensors, metadata = read_tensors(self.folder / STATE)
        try:
            standing = Standing.of(json.loads(metadata["standing"]))
            put_weights(model, _below("model", tensors))
            _put_optimizer(optimizer, _below("optimizer", tensors))
            _put_random_states(_below("random", tensors))
        except (KeyError, NotARecord, ValueError, RuntimeError) as error:
            raise _damaged(self.folder / STATE, error) from None
        return standing

    def refuse_damaged_best(self, standing: Standing) -> None:
        """Raise if the best weights so far cannot be read: before, not after, the rest is run."""
        if standing.best_step is not None:
            read_tensors(self.folder / best_name(standing.best_step))

    def read_best(self, standing: Standing, model: nn.Module) -> None:
        """Give a model the weights of the best evaluation."""
        path = self.folder / best_name(standing.best_step)
        tensors, _ = read_tensors(path)
        try:
            put_weights(model, tensors)
        except (KeyError, RuntimeError) as error:
            raise _damaged(path, error) from None


def best_name(step: int | None) -> str:
    """Return the name of the file of the best weights."""
    return f"best-{step}.safetensors"


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight of a model, tied ones once."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


@torch.no_grad()
def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a model its weights."""
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Commit tensors to a file."""
    content = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    metadata = {**(metadata or {}), DIGEST: _digest(content)}
    with committing(path) as temporary:
        # By our own hand: of a full disk, safetensors says it in its own way.
        temporary.write_bytes(save(content, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, and what is said of them."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None
    if metadata.pop(DIGEST, None) != _digest(tensors):
        raise _damaged(path, ValueError("its content does not have the hash that it names"))
    return tensors, metadata


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors: their names and their bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _damaged(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"{path} is damaged, or was written by another version of ffmem ({error})."
        " Delete the folder and train again."
    )


def _below(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a part, without it."""
    start = f"{part}."
    return {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith(start)
    }


def _put_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer its moments."""
    content = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, kind = name.partition(".")
        state.setdefault(int(number), {})[kind] = tensor
    optimizer.load_state_dict(content | {"state": state})


def _random_states() -> dict[str, Tensor]:
    """Return the state of every generator that torch draws from."""
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"random.cuda.{number}"] = state
    return states


def _put_random_states(tensors: Mapping[str, Tensor]) -> None:
    """Bring every generator to its state."""
    torch.set_rng_state(tensors["cpu"])
    others = [tensors[name] for name in sorted(tensors) if name.startswith("cuda.")]
    if others and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(others)
