"""One prompt, run again from any layer up: the passes behind ablations, estimates and circuits.

`PartialForward` runs a prompt once, and then again from any layer up:

    clean:    x₀ → block 0 → x₁ → … → block L−1 → o_last          every x_ℓ is kept
    changed:  x_ℓ → block ℓ → … → o_last                          blocks below ℓ do not run

A change in layer ℓ leaves everything below as it was. The model's own forward runs with the blocks
below ℓ replaced, so masks, positions and windows are its own. If layers pass on more than their
output, all blocks run. Law: the result equals that of a whole forward pass under hooks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffmem.cells import Cell
from ffmem.interventions.forward import (
    BATCH_TOKENS,
    HEAD_ROWS,
    BankRows,
    Change,
    Place,
    change_coefficients,
    record_values,
)
from ffmem.models.head import Head
from ffmem.models.memories import Memories
from ffmem.models.modules import first_tensor
from ffmem.models.selfcheck import BOUND, HALF_BOUND
from ffmem.models.trace import LayerTrace
from ffmem.progress import Step

OVERHEAD = 40
"""What a batch costs in each layer beside its tokens, in tokens. Measured on SmolLM2-135M, one
core: a prompt of 20 tokens takes 117 ms alone and 54 ms in a batch; the head comes on top."""


class PartialForward:
    """One prompt up to the position where it is read; later tokens cannot reach that position."""

    def __init__(self, memories: Memories, ids: list[int], position: int) -> None:
        self.memories = memories
        self.tokens = torch.tensor([ids[: position + 1]])
        self.layers: list[LayerTrace] = []
        """What every layer computed at the position: one row each."""
        self._inputs: dict[int, Tensor] = {}
        """The input of every block that ran, by layer: text alone does not run all of them."""
        self._extras: dict[int, tuple[Any, ...] | None] = {}
        """What every block returned after its output; None if it returned a tensor."""
        self._is_chain = True
        """Whether the output of each block that ran is the input of the next."""
        self._run_clean()
        self.skips_blocks = self._is_chain
        """Whether blocks below a change need not run."""
        self.skips_blocks = self.skips_blocks and self._can_skip_blocks()

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

    def values_of(self, places: Sequence[Cell | Place]) -> Float[Tensor, "place hidden"]:
        """Return the values of some memories, as they reach the stream."""
        found = torch.zeros(len(places), self.memories.hidden, device=self.memories.device)
        for layer in {place.layer for place in places}:
            begin = 0
            for part in self.values(layer):
                for number, place in enumerate(places):
                    if place.layer == layer and begin <= place.memory < begin + len(part):
                        found[number] = part[place.memory - begin].float()
                begin += len(part)
        return found

    def run(
        self,
        first_layer: int,
        n_rows: int,
        changes: Mapping[int, Change],
        layers: int | None = None,
    ) -> Float[Tensor, "row hidden"]:
        """Return the last layer's output at the position, for `n_rows` copies of the prompt.

        Each layer in `changes` runs with changed coefficients; none may be below `first_layer`.
        Gradients flow from the changed coefficients on, if torch keeps them. With `layers`, only
        the first so many run.
        """
        assert all(layer >= first_layer for layer in changes), "a change below the first layer"
        memories, found = self.memories, []
        first_layer = first_layer if self.skips_blocks else 0

        def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found.append(memories.streams.collapse(first_tensor(output, {}))[:, -1].clone())

        last = memories.n_layers if layers is None else layers
        with ExitStack() as stack:
            for layer in range(first_layer):
                stub = partial(self._skip_block, layer, first_layer, n_rows)
                stack.enter_context(_replace_forward(memories.blocks[layer], stub))
            for layer, change in changes.items():
                stack.enter_context(change_coefficients(memories, layer, change))
            stack.callback(memories.blocks[last - 1].register_forward_hook(keep).remove)
            stack.enter_context(memories.stop_after(last))
            tokens = self.tokens.repeat(n_rows, 1).to(memories.device)
            memories.trunk(tokens, use_cache=False)
        return found[0]

    def _run_clean(self) -> None:
        """Run the prompt once; keep the input of every block, and what it returns."""
        output: Tensor | None = None

        def enter(layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = first_tensor(args, kwargs).detach()
            if output is not None and not torch.equal(given, output.to(given.device)):
                self._is_chain = False
            self._inputs[layer] = given.clone()

        def leave(layer: int, _: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
            nonlocal output
            output = first_tensor(returned, {})
            self._extras[layer] = None if isinstance(returned, Tensor) else tuple(returned[1:])

        def read(_: int, trace: LayerTrace) -> None:
            self.layers.append(trace)

        last = torch.tensor([[0, self.n_tokens - 1]])
        with ExitStack() as hooks:
            hooks.enter_context(self.memories.trace_layers(read, self.tokens, last))
            self.values = hooks.enter_context(record_values(self.memories))
            """The values of a layer, bank by bank."""
            for layer, block in enumerate(self.memories.blocks):
                handle = block.register_forward_pre_hook(partial(enter, layer), with_kwargs=True)
                hooks.callback(handle.remove)
                hooks.callback(block.register_forward_hook(partial(leave, layer)).remove)
            self.memories.forward(self.tokens)

    def _can_skip_blocks(self) -> bool:
        """Return whether blocks pass on nothing but their output, which a stub would lose.

        The last block runs alone on its own input, twice in one batch. Where later layers use what
        earlier ones made, such as the keys of their attention, it breaks or gives something else.
        """
        try:
            with torch.no_grad():
                found = self.run(self.memories.n_layers - 1, 2, {}).float()
        except (LookupError, RuntimeError, TypeError, ValueError):
            return False
        clean = self.output.float()
        bound = BOUND if self.memories.dtype in (torch.float32, torch.float64) else HALF_BOUND
        return bool((found - clean).abs().max() <= bound * clean.abs().max())

    def _skip_block(
        self, layer: int, first_layer: int, n_rows: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Run instead of a block below the first layer: the highest one gives its input."""
        hidden = first_tensor(args, kwargs)
        if layer == max(one for one in self._inputs if one < first_layer):
            # A copy, because Falcon changes its input in place.
            axis = self.memories.streams.batch_axis
            hidden = self._inputs[first_layer].repeat_interleave(n_rows, dim=axis)
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


# Many changed copies of a prompt


def run_copies(
    forward: PartialForward,
    first_layers: Sequence[int],
    changes: Callable[[list[int]], Mapping[int, Change]],
    step: Step = lambda n: None,
    layers: int | None = None,
) -> Iterator[tuple[list[int], Float[Tensor, "copy hidden"]]]:
    """Run many changed copies of a prompt; yield the numbers of some copies, and their outputs.

    `first_layers` is the lowest layer that each copy changes. Copies with similar ones run
    together, from the lowest up. `changes` returns those of some copies. With `layers`, only the
    first so many run.
    """
    n_layers = forward.memories.n_layers if layers is None else layers
    order = sorted(range(len(first_layers)), key=lambda number: first_layers[number])
    lowest = [first_layers[number] for number in order]
    for begin, end in pairwise(cheapest_cuts(lowest, n_layers, forward.n_tokens, forward.n_rows)):
        batch = order[begin:end]
        yield batch, forward.run(lowest[begin], len(batch), changes(batch), layers)
        step(len(batch))


def cheapest_cuts(layers: list[int], n_layers: int, n_tokens: int, max_rows: int) -> list[int]:
    """Return where to cut rows, sorted by layer, into batches of at most `max_rows`: 0, …, n.

    A batch of n rows from layer ℓ up costs (layers left + 1) · (n · tokens + OVERHEAD).
    """
    cheapest, before = [0.0], [0]
    for end in range(1, len(layers) + 1):
        first = max(0, end - max_rows)
        costs = [
            cheapest[begin] + (n_layers - layers[begin] + 1) * ((end - begin) * n_tokens + OVERHEAD)
            for begin in range(first, end)
        ]
        best = min(range(len(costs)), key=costs.__getitem__)
        cheapest.append(costs[best])
        before.append(first + best)
    cuts = [len(layers)]
    while cuts[-1] > 0:
        cuts.append(before[cuts[-1]])
    return cuts[::-1]


def switch_off(
    cells: Sequence[Cell], n_tokens: int, positions: Sequence[int] | None
) -> dict[int, Change]:
    """Return the changes that switch off, in sentence b of a batch, the b-th memory."""

    def change(layer: int, rows: BankRows) -> Tensor:
        device = rows.tokens.device
        own = [cell.memory if cell.layer == layer else -1 for cell in cells]
        memory = torch.tensor(own, device=device)[rows.tokens // n_tokens] - rows.memories.start
        off = (memory >= 0) & (memory < len(rows.memories))
        if positions is not None:
            off &= torch.isin(rows.tokens % n_tokens, torch.tensor(positions, device=device))
        changed = rows.coefficients.clone()
        changed[off.nonzero()[:, 0], memory[off]] = 0
        return changed

    return {layer: partial(change, layer) for layer in {cell.layer for cell in cells}}


# From the last layer's output to log p, in a form that has a gradient (`Head` works in place)


def log_probabilities(
    head: Head,
    stream: Float[Tensor, "row hidden"],
    sigma: Float[Tensor, " row"] | None = None,
) -> Float[Tensor, "row vocab"]:
    """Return log p of every token, in float64 from the logits on.

    log p(w | h) = log softmax(cap(s · (U · P · N(h) + b)))[w]

    Of an adaptive softmax, they are what `uncapped_logits` returns.
    """
    z = uncapped_logits(head, stream, sigma)
    if head.adaptive:
        return z
    if head.cap is not None:
        z = head.cap * (z / head.cap).tanh()
    return z.log_softmax(dim=1)


def uncapped_logits(
    head: Head,
    stream: Float[Tensor, "row hidden"],
    sigma: Float[Tensor, " row"] | None = None,
) -> Float[Tensor, "row vocab"]:
    """Return s · (U · P · N(h) + b) in float64.

    With `sigma`, the final norm divides by it, so that everything is linear:
    N₀(h) = γ ⊙ (h − mean(h)) / σ₀ + β.
    """
    if sigma is None:
        normed = head.norm.apply(stream.to(next(head.output.parameters()).dtype))
    else:
        normed = head.norm.fold(stream) / sigma[:, None].to(stream.device)
        normed = normed + head.norm.offset.to(normed.device)
    z = head.raw(normed).double()
    if head.adaptive:
        return z
    return (z if head.bias is None else z + head.bias.double()) * head.scale


def log_probability(
    head: Head, stream: Float[Tensor, "row hidden"], target: int
) -> Float[Tensor, " row"]:
    """Return log p of one token for each vector."""
    parts = stream.split(HEAD_ROWS)
    return torch.cat([log_probabilities(head, rows)[:, target] for rows in parts])
