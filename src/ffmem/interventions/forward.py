"""Forward passes with changed coefficients.

`apply_edits` edits every pass of a model: one hook on the input of the value map replaces m by
a · m + c. Weights are never touched. Where coefficients are weights of a softmax, the others stay
as they are: the softmax is not computed again.

`PartialForward` runs a prompt once, and then again from any layer up:

    clean:    x₀ → block 0 → x₁ → … → block L−1 → o_last          every x_ℓ is kept
    changed:  x_ℓ → block ℓ → … → o_last                          blocks below ℓ do not run

A change in layer ℓ leaves everything below as it was. The model's own forward runs with the blocks
below ℓ replaced, so masks, positions and windows are its own. Law: the result equals that of a
whole forward pass under hooks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache

from ffmem.errors import ModelError
from ffmem.interventions.edits import Edit, Edits
from ffmem.models.head import Head, Norm
from ffmem.models.memories import Memories
from ffmem.models.modules import first_tensor, get_module
from ffmem.models.selfcheck import BOUND, HALF_BOUND
from ffmem.models.trace import LayerTrace

BATCH_TOKENS = 1024
"""Tokens to run at once: enough to keep the processor busy, with little memory."""

HEAD_ROWS = 64
"""Vectors whose logits are held at once if no gradient is needed."""

Change = Callable[[Tensor], Tensor]
"""Maps a layer's coefficients, "row position memory", to those that replace them."""


# Edits of every pass


@contextmanager
def apply_edits(memories: Memories, edits: Edits) -> Iterator[None]:
    """Run every forward pass of a model with edited coefficients.

    Positions count from the first token of the text, also if earlier tokens are in a cache.
    """
    edits = edits.resolve(memories.layout)
    past, shape = 0, torch.Size()

    def save_past(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal past
        # Our own model passes its cache on as a positional argument.
        given = (kwargs.get("past_key_values"), *(one for one in args if isinstance(one, Cache)))
        cache = next((one for one in given if one is not None), None)
        past = 0 if cache is None else int(cache.get_seq_length())

    def save_shape(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal shape
        shape = first_tensor(args, kwargs).shape[:2]

    def edited_rows(n_rows: int) -> Tensor:
        """Return the rows at the edited positions; OPT flattens batch and position."""
        if edits.positions is None:
            return torch.arange(n_rows)
        batch, length = shape
        here = [p - past for p in edits.positions if 0 <= p - past < length]
        return (
            torch.arange(batch)[:, None] * length + torch.tensor(here, dtype=torch.long)
        ).flatten()

    def change(of_layer: list[Edit], _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        coefficients: Tensor = args[0].clone()
        flat = coefficients.view(-1, coefficients.shape[-1])
        # In float32 at least, so that a half-precision model rounds once.
        exact = torch.promote_types(flat.dtype, torch.float32)
        rows = edited_rows(len(flat)).to(flat.device)[:, None]
        memory = torch.tensor([edit.cell.memory for edit in of_layer], device=flat.device)
        numbers = [(edit.factor, edit.constant) for edit in of_layer]
        factor, constant = torch.tensor(numbers, dtype=exact, device=flat.device).T
        flat[rows, memory] = (flat[rows, memory].to(exact) * factor + constant).to(flat.dtype)
        return (coefficients, *args[1:])

    with ExitStack() as hooks:
        if edits.positions is not None:
            # OPT's language model calls its decoder past its own trunk, so both are hooked.
            for module, hook in (
                (memories.model, save_past),
                (memories.model.base_model, save_past),
                (memories.blocks[0], save_shape),
            ):
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                hooks.callback(handle.remove)
        for layer, of_layer in edits.by_layer().items():
            values = memories.bank(layer).values
            hooks.callback(values.register_forward_pre_hook(partial(change, of_layer)).remove)
        yield


# The vectors that coefficients multiply


class PromptValues:
    """The values that act at the last token of a prompt, as they reach the residual stream.

    Static values are in the weights. Those of a lambda layer are computed from the prompt: `record`
    keeps what they are computed from while it runs.
    """

    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self._inputs: dict[int, Tensor] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep what is needed of a pass over the prompt."""

        def keep(layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs[layer] = first_tensor(args, kwargs)[0].detach()

        with ExitStack() as hooks:
            if not self.memories.has_values:
                for bank in filter(None, self.memories.banks):
                    hook = partial(keep, bank.layer)
                    handle = bank.keys.register_forward_pre_hook(hook, with_kwargs=True)
                    hooks.callback(handle.remove)
            yield

    def of_layer(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return the values of a layer."""
        if self.memories.has_values:
            return self.memories.output_directions(layer)
        x = self._inputs[layer]
        return self.memories.values_at(layer, x, len(x) - 1)


def post_norm_sigma(memories: Memories, layer: int, trace: LayerTrace) -> float:
    """Return what the post-norm divides y by at a traced position; 1 if there is none."""
    path = memories.row.post_norm
    if path is None or memories.banks[layer] is None:
        return 1.0
    norm = Norm(get_module(memories.blocks[layer], path), memories.hidden)
    return float(norm.denominator(trace.value_output)[0])


@torch.no_grad()
def promoted_tokens(
    memories: Memories,
    values: Float[Tensor, "memory hidden"],
    coefficients: Float[Tensor, " memory"],
    n: int = 5,
) -> list[list[str]]:
    """Return the tokens that each m · v promotes most; if m = 0, those of v.

    A value of zeros promotes nothing, such as that of a token beyond the prompt in a lambda layer.
    """
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    factors = torch.where(coefficients == 0, 1.0, coefficients).to(values.device)
    logits = memories.head.folded(values.float() * factors[:, None])
    ids = logits.topk(min(n, logits.shape[1]), dim=1).indices.tolist()
    nonzero = values.any(dim=1).tolist()
    return [
        [shown[id] for id in row] if there else [] for row, there in zip(ids, nonzero, strict=True)
    ]


# Passes from a layer up


class PartialForward:
    """One prompt up to the position where it is read; later tokens cannot reach that position."""

    def __init__(self, memories: Memories, ids: list[int], position: int) -> None:
        self.memories = memories
        self.tokens = torch.tensor([ids[: position + 1]])
        self.layers: list[LayerTrace] = []
        """What every layer computed at the position: one row each."""
        self.values = PromptValues(memories)
        self._inputs: list[Tensor] = []
        self._extras: list[tuple[Any, ...] | None] = []
        """What every block returned after its output; None if it returned a tensor."""
        self._run_clean()
        self._check_blocks()

    @property
    def n_tokens(self) -> int:
        """Tokens that run, including the start token."""
        return self.tokens.shape[1]

    @property
    def n_rows(self) -> int:
        """Changed copies of the prompt that run at once."""
        return max(1, BATCH_TOKENS // self.n_tokens)

    @property
    def output(self) -> Float[Tensor, "1 hidden"]:
        """The last layer's output at the position, unchanged."""
        return self.layers[-1].layer_output

    def run(
        self, first_layer: int, n_rows: int, changes: Mapping[int, Change]
    ) -> Float[Tensor, "row hidden"]:
        """Return the last layer's output at the position, for `n_rows` copies of the prompt.

        Each layer in `changes` runs with changed coefficients; none may be below `first_layer`.
        Gradients flow from the changed coefficients on, if torch keeps them.
        """
        assert all(layer >= first_layer for layer in changes), "a change below the first layer"
        memories, found = self.memories, []

        def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found.append(first_tensor(output, {})[:, -1].clone())

        def change(how: Change, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            rows = args[0].reshape(n_rows, self.n_tokens, -1)  # OPT flattens them
            return (how(rows).reshape(args[0].shape), *args[1:])

        with ExitStack() as stack:
            for layer in range(first_layer):
                stub = partial(self._skip_block, layer, first_layer, n_rows)
                stack.enter_context(_replace_forward(memories.blocks[layer], stub))
            for layer, how in changes.items():
                values = memories.bank(layer).values
                stack.callback(values.register_forward_pre_hook(partial(change, how)).remove)
            stack.callback(memories.blocks[-1].register_forward_hook(keep).remove)
            tokens = self.tokens.repeat(n_rows, 1).to(memories.device)
            memories.model.base_model(tokens, use_cache=False)
        return found[0]

    def _run_clean(self) -> None:
        """Run the prompt once; keep the input of every block, and what it returns."""

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs.append(first_tensor(args, kwargs).detach().clone())

        def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._extras.append(None if isinstance(output, Tensor) else tuple(output[1:]))

        def read(_: int, trace: LayerTrace) -> None:
            self.layers.append(trace)

        last = torch.tensor([[0, self.n_tokens - 1]])
        with ExitStack() as hooks:
            hooks.enter_context(self.memories.trace_layers(read, self.tokens, last))
            hooks.enter_context(self.values.record())
            for block in self.memories.blocks:
                handle = block.register_forward_pre_hook(enter, with_kwargs=True)
                hooks.callback(handle.remove)
                hooks.callback(block.register_forward_hook(leave).remove)
            self.memories.forward(self.tokens)

    def _check_blocks(self) -> None:
        """Raise if blocks pass on anything but their output, which a replaced block would lose."""
        with torch.no_grad():
            found = self.run(self.memories.n_layers - 1, 1, {}).float()
        clean = self.output.float()
        bound = BOUND if self.memories.dtype in (torch.float32, torch.float64) else HALF_BOUND
        error = float((found - clean).abs().max() / clean.abs().max())
        if not error <= bound:
            raise ModelError(
                f"The last layer of this {self.memories.family!r} model, run alone on its own"
                f" input, is off by {error:.1e} of the largest number; at most {bound:.0e} is"
                " allowed. Its layers pass on more than their output, so ffmem cannot run them"
                " separately."
            )

    def _skip_block(
        self, layer: int, first_layer: int, n_rows: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Run instead of a block below the first layer: the highest one gives its input."""
        hidden = first_tensor(args, kwargs)
        if layer == first_layer - 1:
            # A copy, because Falcon changes its input in place.
            hidden = self._inputs[first_layer].repeat(n_rows, 1, 1)
        extra = self._extras[layer]
        return hidden if extra is None else (hidden, *extra)


@contextmanager
def _replace_forward(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Run another function in place of a block, and leave the block as it was."""
    own = block.__dict__
    before = own.get("forward")  # set by libraries that move weights between devices
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


# From the last layer's output to log p, in a form that has a gradient (`Head` works in place)


def log_probabilities(
    head: Head,
    stream: Float[Tensor, "row hidden"],
    sigma: Float[Tensor, " row"] | None = None,
) -> Float[Tensor, "row vocab"]:
    """Return log p of every token, in float64 from the logits on.

    log p(w | h) = log softmax(cap(s · (U · P · N(h) + b)))[w]

    With `sigma`, the final norm divides by it, so that everything before cap and softmax is linear:
    N₀(h) = γ ⊙ (h − mean(h)) / σ₀ + β.
    """
    if sigma is None:
        normed = head.norm.apply(stream.to(next(head.output.parameters()).dtype))
    else:
        normed = head.norm.fold(stream) / sigma[:, None].to(stream.device)
        normed = normed + head.norm.offset.to(normed.device)
    z = head.raw(normed).double()
    if head.adaptive:
        return z  # log-probabilities already
    if head.bias is not None:
        z = z + head.bias.double()
    z = z * head.scale
    if head.cap is not None:
        z = head.cap * (z / head.cap).tanh()
    return z.log_softmax(dim=1)


def log_probability(
    head: Head, stream: Float[Tensor, "row hidden"], target: int
) -> Float[Tensor, " row"]:
    """Return log p of one token for each vector."""
    parts = stream.split(HEAD_ROWS)
    return torch.cat([log_probabilities(head, rows)[:, target] for rows in parts])
