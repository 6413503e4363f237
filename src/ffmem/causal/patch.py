"""An edit as a small file that applies it to a model and undoes it.

    applied(model) = edited        undone(edited) = model        byte for byte

`edit.safetensors` holds, of every edited layer, by the names of the model's own tensors:

    <value map>.weight/memories, /before, /after    <value map>.bias/before, /after

(the key map's, where values come from the input: `causal.rows`), and in its metadata the edits, the
switch of the config that they needed, and the SHA-256 of all weights before and after. A model of
another hash is refused, and so is a file that says anything else than an edit of the memories it
names.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ffmem.causal.edits import Edit, Edits
from ffmem.causal.rows import rows, rows_path
from ffmem.causal.weights import (
    LayerChange,
    changed,
    refuse_split,
    rewrite,
    twin,
    value_bias,
)
from ffmem.cells import Cell
from ffmem.errors import FfmemError, ModelError, StoreError
from ffmem.files import committing
from ffmem.models.memories import Memories, fingerprint
from ffmem.models.modules import get_module
from ffmem.records import NotARecord, Record

NAME = "edit.safetensors"
FORMAT = "ffmem-edit-1"


@dataclass(frozen=True, kw_only=True)
class EditRecord(Record):
    """One memory, and what became of its coefficient: m → factor · m + constant."""

    cell: str
    how: str
    factor: float
    constant: float


@dataclass(frozen=True, kw_only=True)
class PatchRecord(Record):
    """What a patch says about itself."""

    format: str
    edits: list[EditRecord]
    flag: str | None
    """The switch of the config that the edit turned on."""
    before: str
    """SHA-256 of the weights without the edit."""
    after: str


class DamagedPatch(StoreError):
    """The file is no patch, or says what no edit says."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(
            f"{path} is not a patch that ffmem can use: {reason}. Nothing was written."
            f" Give the {NAME} that ffmem edit wrote."
        )


@dataclass(frozen=True)
class Patch:
    """An edit of one model, with what it replaced."""

    record: PatchRecord
    tensors: dict[str, Tensor]
    path: Path | str = "The patch"

    @property
    def edits(self) -> Edits:
        """The edits of the memories."""
        stored = self.record.edits
        found = [Edit(Cell.parse(row.cell), row.how, row.factor, row.constant) for row in stored]
        return Edits(tuple(found))

    def write(self, path: Path) -> None:
        """Write the patch to a file."""
        metadata = {"ffmem": json.dumps(json.loads(self.record.to_json()), ensure_ascii=False)}
        with committing(path) as temporary:
            save_file(self.tensors, temporary, metadata)

    @classmethod
    def read(cls, path: Path) -> "Patch":
        """Return a patch from its file, or from the folder that it lies in."""
        place = path / NAME if path.is_dir() else path
        if not place.is_file():
            raise StoreError(f"There is no patch {place}. Give the {NAME} of an edited model.")
        try:
            with safe_open(place, framework="pt") as file:
                stored = (file.metadata() or {}).get("ffmem")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedPatch(place, f"it cannot be read ({error})") from None
        if stored is None:
            raise DamagedPatch(place, "it holds tensors, and no edit")
        try:
            record = PatchRecord.of(json.loads(stored))
            patch = cls(record, tensors, place)
            patch._refuse_nonsense()
        except (NotARecord, ValueError, RecursionError, FfmemError) as error:
            raise DamagedPatch(place, str(error).rstrip(".")) from None
        return patch

    def _refuse_nonsense(self) -> None:
        """Raise ValueError unless the patch is one of finite numbers, each memory edited once."""
        if self.record.format != FORMAT:
            raise ValueError(f"its format is {self.record.format!r}, this is {FORMAT!r}")
        cells = [edit.cell for edit in self.edits]
        if not cells or len(set(cells)) != len(cells):
            raise ValueError("it names no memory, or one twice")
        for edit in self.edits:
            numbers_fit = math.isfinite(edit.factor) and math.isfinite(edit.constant)
            if edit.how not in ("off", "set", "scale", "mean") or not numbers_fit:
                raise ValueError(f"{edit.how} {edit.cell} is no edit")
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(f"{name} holds numbers that are not finite")


class Rewritten(NamedTuple):
    """A model of the same tensors as another, but for an edit; the patch between the two."""

    model: PreTrainedModel
    patch: Patch
    rounding: float
    """The largest error of a rewritten number, as a share of the largest of its tensor."""


def edited(memories: Memories, edits: Edits) -> Rewritten:
    """Return the model with edits written into its weights, and their patch."""
    _refuse_cast(memories)
    change = changed(memories, edits)
    model = twin(memories.model, change.flag)
    for layer in change.layers:
        rewrite(model, memories.row, layer)
    records = [
        EditRecord(cell=str(edit.cell), how=edit.how, factor=edit.factor, constant=edit.constant)
        for edit in edits
    ]
    record = PatchRecord(
        format=FORMAT,
        edits=records,
        flag=change.flag,
        before=memories.fingerprint(),
        after=fingerprint(model),
    )
    return Rewritten(model, Patch(record, _tensors(memories, change.layers)), change.rounding)


def applied(memories: Memories, patch: Patch) -> Rewritten:
    """Return the model with a patch applied to it."""
    return _turned(memories, patch, undo=False)


def undone(memories: Memories, patch: Patch) -> Rewritten:
    """Return the model as it was before a patch was applied to it."""
    return _turned(memories, patch, undo=True)


def _turned(memories: Memories, patch: Patch, undo: bool) -> Rewritten:
    """Apply a patch forwards or backwards, comparing all that it replaces."""
    _refuse_cast(memories)
    refuse_split(memories)
    record = patch.record
    here, there = (record.after, record.before) if undo else (record.before, record.after)
    if memories.fingerprint() != here:
        other = memories.fingerprint() == there
        hint = "It is done already." if other else "Give the model that the patch was made for."
        raise StoreError(
            f"The patch {'undoes an edit' if undo else 'is for a model'} of hash {here}; the model"
            f" has the hash {memories.fingerprint()}. {hint}"
        )
    changes = _changes(memories, patch)
    changes = [change.back() for change in changes] if undo else changes
    _refuse_flag(memories, patch, undo)
    # The biases that the switch brings must be there before the change, and go after it.
    model = twin(memories.model, None if undo else record.flag)
    for change in changes:
        _refuse_other_numbers(memories, model, patch, change)
        rewrite(model, memories.row, change)
    model = twin(model, record.flag, on=False) if undo else model
    found = fingerprint(model)
    if found != there:
        raise DamagedPatch(
            patch.path, f"it promises the hash {there}, and gives a model of hash {found}"
        )
    return Rewritten(model, patch, 0.0)


def _tensors(memories: Memories, layers: list[LayerChange]) -> dict[str, Tensor]:
    """Return the tensors of a patch."""
    found = {}
    for change in layers:
        path = rows_path(memories.row, change.layer)
        found[f"{path}.weight/memories"] = torch.tensor(change.memories)
        found[f"{path}.weight/before"] = change.before.contiguous()
        found[f"{path}.weight/after"] = change.after.contiguous()
        if change.bias_before is not None and change.bias_after is not None:
            found[f"{path}.bias/before"] = change.bias_before.contiguous()
            found[f"{path}.bias/after"] = change.bias_after.contiguous()
    return found


def _changes(memories: Memories, patch: Patch) -> list[LayerChange]:
    """Return the changes of a patch, refusing all that does not fit the model and the edits."""
    left, found = dict(patch.tensors), []

    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = left.pop(name, None)
        if tensor is None:
            raise DamagedPatch(patch.path, f"it has no tensor {name}")
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise DamagedPatch(
                patch.path,
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, where the model asks for"
                f" {dtype} of shape {shape}",
            )
        return tensor

    for layer, edits in patch.edits.resolve(memories.layout).by_layer().items():
        path = rows_path(memories.row, layer)
        written = rows(get_module(memories.model, path))
        width, dtype = written.shape[1], written.dtype
        cells = [edit.cell.memory for edit in edits]
        if take(f"{path}.weight/memories", (len(cells),), torch.int64).tolist() != cells:
            raise DamagedPatch(
                patch.path, f"it changes other memories of layer {layer} than it says"
            )
        both = [f"{path}.weight/before", f"{path}.weight/after"]
        numbers = [take(name, (len(cells), width), dtype) for name in both]
        biases = [f"{path}.bias/before", f"{path}.bias/after"]
        if any(edit.constant for edit in edits):
            numbers += [take(name, (memories.hidden,), dtype) for name in biases]
        found.append(LayerChange(layer, cells, *numbers))
    if left:
        raise DamagedPatch(
            patch.path, f"it holds {sorted(left)[0]}, which is part of no edit it names"
        )
    return found


def _refuse_cast(memories: Memories) -> None:
    """Raise if the model in memory is not the one that is stored."""
    if fingerprint(memories.model) != memories.fingerprint():
        raise ModelError(
            f"The weights in memory are {memories.dtype}, and not those that are stored."
            " Load the model as it is stored: load(model, dtype='auto')."
        )


def _refuse_flag(memories: Memories, patch: Patch, undo: bool) -> None:
    """Raise if a patch would turn another switch than that of the bias."""
    flag = patch.record.flag
    if flag is None:
        return
    if flag != memories.row.bias_flag or bool(getattr(memories.config, flag)) is not undo:
        raise DamagedPatch(
            patch.path, f"it turns {flag!r} of the config, which is not what its edits need"
        )


def _refuse_other_numbers(
    memories: Memories, model: PreTrainedModel, patch: Patch, change: LayerChange
) -> None:
    """Raise if a patch replaces other numbers than the model has."""
    written = rows(get_module(model, rows_path(memories.row, change.layer)))
    same = torch.equal(written[change.memories].cpu(), change.before)
    if change.bias_before is not None:
        old = value_bias(model, memories.row, change.layer)
        same = same and torch.equal(old.cpu(), change.bias_before)
    if not same:
        raise DamagedPatch(
            patch.path, f"what it replaces in layer {change.layer} is not what the model has"
        )
