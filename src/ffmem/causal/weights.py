"""An edit of coefficients, written into weights.

    off    v → 0        scale    v → a · v        set    v → 0,  b → b + c · v

A coefficient acts through its value alone, m · v, so what is done to m can be done to v, and a
constant part to b, the bias of the value map. That is exact for every activation and in every
family: post-norms and multipliers come behind, and a softmax, in front, is not taken anew, so that
the other coefficients stay what they are. A lambda layer has no v to change: there the static key
is, in which m is linear (`causal.rows`). The original is never touched: a twin shares its tensors,
all but those rewritten.
"""

import copy
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ffmem.causal.edits import Edits
from ffmem.causal.rows import rows, rows_path
from ffmem.errors import ModelError
from ffmem.models.families import Family
from ffmem.models.memories import Memories
from ffmem.models.modules import get_module, is_split, linear_bias


class LayerChange(NamedTuple):
    """What becomes of the rows of some memories of a layer, and of its bias."""

    layer: int
    memories: list[int]
    before: Float[Tensor, "edit width"]
    after: Float[Tensor, "edit width"]
    bias_before: Float[Tensor, " hidden"] | None = None
    bias_after: Float[Tensor, " hidden"] | None = None

    def back(self) -> "LayerChange":
        """Return the change that undoes this one."""
        return self._replace(
            before=self.after,
            after=self.before,
            bias_before=self.bias_after,
            bias_after=self.bias_before,
        )


class Change(NamedTuple):
    """An edit as a change of weights."""

    layers: list[LayerChange]
    flag: str | None
    """The switch of the config that must be on, and is off, for the bias of the value maps."""
    rounding: float
    """The largest error of a rewritten number, as a share of the largest one of its tensor."""


def changed(memories: Memories, edits: Edits) -> Change:
    """Return the change of weights that an edit is; refuse what weights cannot say."""
    edits = edits.resolve(memories.layout)
    _refuse(memories, edits)
    layers, errors, flag = [], [0.0], None
    for layer, some in edits.by_layer().items():
        cells = [edit.cell.memory for edit in some]
        # On the CPU in float64, so that an edit rounds once, to the dtype of the weights.
        before = rows(_map(memories, layer))[cells].detach().cpu()
        factor = torch.tensor([edit.factor for edit in some], dtype=torch.float64)[:, None]
        constant = torch.tensor([edit.constant for edit in some], dtype=torch.float64)
        exact = torch.where(factor == 0, 0.0, factor * before.double())  # no −0
        change = LayerChange(layer, cells, before, exact.to(before.dtype))
        errors.append(_error(change.after, exact))
        if constant.any():
            flag = _switch(memories, layer, edits) or flag
            old = memories.bias(layer).detach().cpu().clone()
            wanted = old.double() + constant @ before.double()
            change = change._replace(bias_before=old, bias_after=wanted.to(old.dtype))
            errors.append(_error(change.bias_after, wanted))
        _refuse_overflow(memories, change)
        layers.append(change)
    return Change(layers, flag, max(errors))


def twin(model: PreTrainedModel, flag: str | None = None, on: bool = True) -> PreTrainedModel:
    """Return a second model of the same tensors, with a switch of its config turned.

    Biases that the switch brings are zeros; those that it takes away are gone.
    """
    shared: dict[int, object] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    if flag is None:
        return other
    setattr(other.config.get_text_config(), flag, on)
    with torch.device("meta"):
        built = type(model)(copy.deepcopy(other.config))
    wanted = {name: tensor.shape for name, tensor in built.named_parameters()}
    there = {name: tensor.shape for name, tensor in other.named_parameters()}
    for name in wanted.keys() ^ there.keys():
        path, _, leaf = name.rpartition(".")
        if leaf != "bias":
            raise ModelError(
                f"With {flag} = {on} this model would have other weights than biases ({name})."
                " ffmem will not write the edit; off and scale need no switch."
            )
        owner = other.get_submodule(path)
        zeros = owner.get_parameter("weight").new_zeros(wanted.get(name, ()))
        owner.register_parameter("bias", _frozen(zeros) if name in wanted else None)
    return other


@torch.no_grad()
def rewrite(model: PreTrainedModel, row: Family, change: LayerChange) -> None:
    """Give a twin its own rows of a layer, changed."""
    linear = get_module(model, rows_path(row, change.layer))
    linear.register_parameter("weight", _frozen(linear.get_parameter("weight").clone()))
    written = rows(linear)
    written[change.memories] = change.after.to(written.device)
    if change.bias_after is not None and linear.bias is not None:
        linear.register_parameter("bias", _frozen(change.bias_after.to(written.device)))


def value_bias(model: PreTrainedModel, row: Family, layer: int) -> Float[Tensor, " hidden"]:
    """Return b of a layer of a twin."""
    return linear_bias(get_module(model, f"{row.blocks}.{layer}.{row.values}"))


def _map(memories: Memories, layer: int) -> nn.Module:
    """Return the map that a layer's edits are written into."""
    return get_module(memories.model, rows_path(memories.row, layer))


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _error(rounded: Tensor | None, exact: Tensor) -> float:
    assert rounded is not None
    largest = exact.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((rounded.double() - exact).abs().max() / largest)


def _refuse(memories: Memories, edits: Edits) -> None:
    """Raise where no weights can hold the edits."""
    if not edits:
        raise ModelError("No edit was asked for. Give off, set, scale or mean, or a patch.")
    if edits.positions is not None:
        raise ModelError(
            "An edit at some positions was asked for; weights act at every position."
            " Leave the positions away, or try the edit on a prompt with trace."
        )
    refuse_split(memories)
    names: dict[int, list[str]] = {}
    for name, tensor in memories.model.named_parameters(remove_duplicate=False):
        names.setdefault(tensor.data_ptr(), []).append(name)
    for layer in edits.by_layer():
        same = names[_map(memories, layer).get_parameter("weight").data_ptr()]
        if len(same) > 1:
            what = "values" if memories.has_values else "keys"
            raise ModelError(
                f"The {what} of layer {layer} are shared: {', '.join(same)} are one tensor. An edit"
                " of one layer would change the others too; try it on a prompt with trace."
            )


def refuse_split(memories: Memories) -> None:
    """Raise if the weights do not lie in one place, to be written there."""
    if is_split(memories.model):
        raise ModelError(
            "An edit was to be written into the weights of a model that is split over devices."
            " Load it on one device, such as --device cpu, to write it; trace edits it as it is."
        )


def _switch(memories: Memories, layer: int, edits: Edits) -> str | None:
    """Return the switch that gives the value maps a bias; None where the layer's has one."""
    if getattr(memories.bank(layer).values, "bias", None) is not None:
        return None
    flag = memories.row.bias_flag
    if flag is None:
        fixed = next(edit for edit in edits if edit.constant)
        raise ModelError(
            f"{fixed} was asked for. A fixed coefficient is written into the bias of the value"
            f" map, and this {memories.family!r} model has none there, nor a switch for one in its"
            " config. off and scale can be written; for set and mean use trace."
        )
    return flag


def _refuse_overflow(memories: Memories, change: LayerChange) -> None:
    for tensor in (change.after, change.bias_after):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise ModelError(
                f"The edits of layer {change.layer} give numbers that {tensor.dtype} cannot hold."
                " Give smaller numbers."
            )
