"""The key side of memories: how keys act on the residual stream, and the tokens they match.

    k · N(h) = k̃ · h / σ(h) + k · β,    k̃ = γ ⊙ k, minus its mean under LayerNorm

N is the norm in front of a bank, so k̃ is the key as it acts on the stream h. A token's score is
what its input embedding e alone would give, without β and the key's own bias:

    score(token) = k̃ · e / σ(e)

A gated memory has two keys, the gate's and `up`. Cosines compare k̃, ũ and the value as it is
written to the stream.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.nn import functional

from ffmem.models.banks import Bank, DenseBank
from ffmem.models.head import TILE, Norm
from ffmem.models.memories import Memories
from ffmem.models.modules import device_of, first_tensor, linear_weight

N_PROBES = 8
"""Tokens to run when the norms in front of banks are looked for."""

TOLERANCE = 1e-2
"""Largest relative error of a module that counts as a norm; half precision rounds by 2⁻⁹."""


class BankKeys(NamedTuple):
    """The keys of one bank as they act on the residual stream, and how they compare."""

    keys: Float32[Tensor, "memory hidden"]
    up: Float32[Tensor, "memory hidden"] | None
    norm: Norm
    """The norm in front of the bank."""
    cosines: dict[str, Float32[Tensor, " memory"]]


class KeySide:
    """Reads the keys of a model."""

    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self.norms = find_input_norms(memories)
        self._no_norm = Norm(None, memories.hidden)
        self.embedding = InputEmbedding.find(memories)
        """None if ffmem cannot tell how the input embedding reaches the stream."""

    def banks(self, layer: int) -> Iterator[BankKeys]:
        """Yield the keys of every bank of a layer; one bank is held at a time."""
        memories = self.memories
        banks = memories.banks[layer]
        values: Iterable[Tensor | None] = [None] * len(banks)
        if memories.has_values:
            values = memories.direction_parts(layer)
        for bank, directions in zip(banks, values, strict=True):
            norm = self.norms.get(bank, self._no_norm)
            keys = norm.fold_keys(bank.key_rows())
            up = norm.fold_keys(bank.up_rows()) if bank.gated else None
            yield BankKeys(keys, up, norm, _cosines(keys, up, directions))


def _cosines(
    keys: Tensor, up: Tensor | None, values: Tensor | None
) -> dict[str, Float32[Tensor, " memory"]]:
    """Return the cosines between the vectors of each memory; 0 where one of them is zero."""
    pairs = {"cos_key_value": (keys, values)}
    if up is not None:
        pairs = {
            "cos_gate_up": (keys, up),
            "cos_gate_value": (keys, values),
            "cos_up_value": (up, values),
        }
    return {
        name: functional.cosine_similarity(one, other.to(one.device).float(), dim=1, eps=1e-30)
        for name, (one, other) in pairs.items()
        if other is not None
    }


class InputEmbedding:
    """What a token puts into the residual stream: e = P · E[token], without its position."""

    def __init__(
        self, matrix: Float[Tensor, "token width"], scale: float, project_in: nn.Module | None
    ) -> None:
        self.matrix = matrix
        self.scale = scale
        """What the model multiplies the rows with."""
        self.project_in = project_in
        """The linear map P, if the rows are not as wide as the stream."""

    @classmethod
    @torch.inference_mode()
    def find(cls, memories: Memories) -> "InputEmbedding | None":
        """Return the input embedding of a model; None if its rows do not reach the stream."""
        module = memories.model.get_input_embeddings()
        device, scale = device_of(module), 1.0
        first = torch.arange(min(N_PROBES, memories.vocabulary), device=device)
        rows: Tensor = module(first[None])[0]
        if isinstance(module, nn.Embedding):
            matrix: Tensor = module.weight[: memories.vocabulary]
            plain = matrix[: len(rows)]
            scale = float(rows.float().norm() / plain.float().norm().clamp(min=1e-30))
            if not torch.allclose(rows.float(), scale * plain.float(), rtol=1e-2, atol=1e-6):
                matrix, scale = _embed(module, len(matrix)), 1.0
        else:  # such as adaptive input, whose rows differ in width
            matrix = _embed(module, memories.vocabulary)
        if matrix.shape[1] == memories.hidden:
            return cls(matrix, scale, None)
        inside = {part for block in memories.blocks for part in block.modules()}
        shape = (matrix.shape[1], memories.hidden)
        projections = [
            one
            for one in memories.model.modules()
            if isinstance(one, nn.Linear)
            and one not in inside
            and (one.in_features, one.out_features) == shape
        ]
        return cls(matrix, scale, projections[0]) if len(projections) == 1 else None

    def denominators(self, norm: Norm) -> Float32[Tensor, " token"]:
        """Return σ(e) of every token over the scale of its row."""
        parts = []
        for rows in self.matrix.split(TILE):
            vectors = rows.float() * self.scale
            if self.project_in is not None:
                vectors = vectors @ linear_weight(self.project_in).T.to(vectors.device).float()
            parts.append(norm.denominator(vectors).to(self.matrix.device))
        # A row of zeros has no direction: its score is 0 whatever σ is.
        return torch.cat(parts).clamp(min=1e-30) / self.scale

    def before(self, keys: Float32[Tensor, "row hidden"]) -> Float[Tensor, "row width"]:
        """Return keys as they act on rows of the matrix, in its dtype and on its device."""
        if self.project_in is not None:
            keys = keys @ linear_weight(self.project_in).to(keys.device).float()
        return keys.to(self.matrix.device, self.matrix.dtype).contiguous()

    def score_tiles(
        self,
        keys: Float[Tensor, "row width"],
        denominators: Float32[Tensor, " token"],
        tiles: Float32[Tensor, "tile row size"],
    ) -> Iterator[int]:
        """Write the scores of all tokens in tiles, and yield the number of each in turn.

        `keys` are what `before` gave; entries beyond the last token stay as they are.
        """
        size = tiles.shape[2]
        parts = zip(self.matrix.split(size), denominators.split(size), strict=True)
        for number, (tokens, sigma) in enumerate(parts):
            tile = tiles[number, :, : len(tokens)]
            if self.matrix.dtype == tile.dtype and self.matrix.device == tile.device:
                torch.mm(keys, tokens.T, out=tile)
            else:
                tile.copy_(keys @ tokens.T)
            tile.div_(sigma.to(tile.device))
            yield number

    def scores_at(
        self,
        keys: Float[Tensor, "row width"],
        denominators: Float32[Tensor, " token"],
        ids: Int64[Tensor, "row n"],
    ) -> Float32[Tensor, "row n"]:
        """Return the scores of some tokens of each key."""
        ids = ids.to(self.matrix.device)
        found = torch.einsum("rnw,rw->rn", self.matrix[ids].float(), keys.float())
        return found / denominators[ids]


def _embed(module: nn.Module, n_tokens: int) -> Tensor:
    ids = torch.arange(n_tokens, device=device_of(module))
    return torch.cat([module(part[None])[0] for part in ids.split(TILE)])


@torch.inference_mode()
def find_input_norms(memories: Memories, layer: int | None = None) -> dict[Bank, Norm]:
    """Return the norm in front of each bank, of one layer or of all.

    A bank that reads the stream itself has the identity; one that reads neither the stream nor a
    norm of it, such as a multiple of the stream, is missing. Families do not name norms alike, so a
    few tokens run through the model: it is the module whose output is what the bank reads.
    """
    layers = range(memories.n_layers) if layer is None else [layer]
    inputs: dict[nn.Module, Tensor] = {}
    passed: dict[int, dict[nn.Module, tuple[Tensor, Tensor]]] = {}
    generator = torch.Generator().manual_seed(0)
    size = getattr(memories.model.get_input_embeddings(), "num_embeddings", memories.vocabulary)
    length = min(N_PROBES, memories.context or N_PROBES)
    tokens = torch.randint(min(size, memories.vocabulary), (1, length), generator=generator)
    with ExitStack() as hooks:
        for one in layers:
            for reader in {_reader(memories, bank) for bank in memories.banks[one]}:
                hooks.callback(_save_input(reader, inputs).remove)
            passed[one] = {}
            for module in memories.blocks[one].modules():
                if not any(True for _ in module.children()):
                    hooks.callback(_save_both(module, passed[one]).remove)
        traces = memories.trace(tokens, layers=None if layer is None else layer + 1)
    found: dict[Bank, Norm] = {}
    for one in layers:
        known: dict[nn.Module, Norm | None] = {}  # the experts of a layer share theirs
        for bank in memories.banks[one]:
            reader = _reader(memories, bank)
            if reader not in known and reader in inputs:
                x, stream = inputs[reader], traces[one].residual
                known[reader] = _norm_before(x, stream, passed[one], memories.hidden)
            if (norm := known.get(reader)) is not None:
                found[bank] = norm
    return found


def _reader(memories: Memories, bank: Bank) -> nn.Module:
    """Return the module whose input is what a bank reads."""
    module = bank.keys if isinstance(bank, DenseBank) else memories.banks[bank.layer].input
    assert module is not None
    return module


def _save_input(module: nn.Module, into: dict[nn.Module, Tensor]) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        into[module] = first_tensor(args, kwargs).detach().clone()

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _save_both(module: nn.Module, into: dict[nn.Module, tuple[Tensor, Tensor]]) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, Tensor) and (args or kwargs):
            given = first_tensor(args, kwargs)
            if isinstance(given, Tensor) and given.shape == output.shape:
                into[module] = given.detach().clone(), output.detach().clone()

    return module.register_forward_hook(hook, with_kwargs=True)


def _norm_before(
    x: Tensor, stream: Tensor, passed: dict[nn.Module, tuple[Tensor, Tensor]], hidden: int
) -> Norm | None:
    """Return the norm whose output is x: the identity if x is the stream, None if there is none."""
    x, stream = x.reshape(-1, hidden), stream.reshape(-1, hidden)
    along = bool((functional.cosine_similarity(x.float(), stream.float(), dim=1) > 1 - 1e-6).all())
    for module, (given, output) in passed.items():
        if output.shape[-1] != hidden or not torch.equal(output.reshape(-1, hidden), x):
            continue
        h = given.reshape(-1, hidden)
        if torch.equal(h, x) or (along and not torch.equal(h, stream)):
            continue  # dropout; or a norm that made the stream what it is
        norm = Norm(module, hidden)
        normed = norm.fold(h) / norm.denominator(h)[:, None] + norm.offset
        if bool((normed - x.float()).abs().max() <= TOLERANCE * x.abs().max()):
            return norm
    return Norm(None, hidden) if torch.equal(x, stream) else None
