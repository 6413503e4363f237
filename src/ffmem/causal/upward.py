"""A prompt run once, and then again from any layer upward with coefficients changed.

    clean:    x₀ → block 0 → x₁ → … → block L−1 → o_last          every x_ℓ is kept
    changed:  x_ℓ → block ℓ → … → o_last                          blocks below ℓ do not run

A change in layer ℓ leaves everything below it as it was, so nothing below has to be computed
again. The model's own forward runs, with the blocks below ℓ replaced for as long as it does: masks,
positions and windows stay its own business. Law: it equals a whole forward pass, changed by hooks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffmem.causal.prompt_values import PromptValues
from ffmem.errors import ModelError
from ffmem.models.memories import Memories
from ffmem.models.modules import first_tensor
from ffmem.models.selfcheck import BOUND, HALF_BOUND
from ffmem.models.trace import LayerTrace

BATCH_TOKENS = 1024
"""How many tokens run at once: enough to keep the processor busy, little memory."""

Change = Callable[[Tensor], Tensor]
"""From a layer's coefficients, "row position memory", to those that take their place."""


class Upward:
    """One prompt up to the position where it is read; what follows does not reach that place."""

    def __init__(self, memories: Memories, ids: list[int], at: int) -> None:
        self.memories = memories
        self.tokens = torch.tensor([ids[: at + 1]])
        self.layers: list[LayerTrace] = []
        """What every layer computed at the position: one row."""
        self.values = PromptValues(memories)
        """What the coefficients multiply there."""
        self._inputs: list[Tensor] = []
        self._forms: list[Any] = []
        self._run_clean()
        self._refuse_other_paths()

    @property
    def n_tokens(self) -> int:
        """How many tokens run, the start token included."""
        return self.tokens.shape[1]

    @property
    def n_rows(self) -> int:
        """How many changed copies of the prompt run at once."""
        return max(1, BATCH_TOKENS // self.n_tokens)

    @property
    def output(self) -> Float[Tensor, "1 hidden"]:
        """The last layer's output at the position, unchanged."""
        return self.layers[-1].layer_output

    def outputs(
        self, lowest: int, n_rows: int, changes: Mapping[int, Change]
    ) -> Float[Tensor, "row hidden"]:
        """Return the last layer's output at the position, of so many copies of the prompt.

        Each layer in `changes` runs with changed coefficients; none may be below `lowest`.
        Gradients flow from the changed coefficients on, where torch keeps them.
        """
        assert all(layer >= lowest for layer in changes), "a change below the lowest layer"
        memories, found = self.memories, []

        def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found.append(first_tensor(output, {})[:, -1].clone())

        with ExitStack() as undone:
            for layer in range(lowest):
                stub = self._stub(layer, lowest, n_rows)
                undone.enter_context(_replaced(memories.blocks[layer], stub))
            for layer, change in changes.items():
                hook = self._changing(change, n_rows)
                handle = memories.bank(layer).values.register_forward_pre_hook(hook)
                undone.callback(handle.remove)
            undone.callback(memories.blocks[-1].register_forward_hook(keep).remove)
            tokens = self.tokens.repeat(n_rows, 1).to(memories.device)
            memories.model.base_model(tokens, use_cache=False)
        return found[0]

    def _run_clean(self) -> None:
        """Run the prompt once; keep every block's input, and the form of what blocks give."""

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs.append(first_tensor(args, kwargs).detach().clone())

        def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._forms.append(None if isinstance(output, Tensor) else tuple(output[1:]))

        def read(_: int, trace: LayerTrace) -> None:
            self.layers.append(trace)

        place = torch.tensor([[0, self.n_tokens - 1]])
        with ExitStack() as hooks:
            hooks.enter_context(self.memories.trace_layers(read, self.tokens, place))
            hooks.enter_context(self.values.watching())
            for block in self.memories.blocks:
                handle = block.register_forward_pre_hook(enter, with_kwargs=True)
                hooks.callback(handle.remove)
                hooks.callback(block.register_forward_hook(leave).remove)
            self.memories.forward(self.tokens)

    def _refuse_other_paths(self) -> None:
        """Raise if blocks hand anything but their output on, which a stub would lose."""
        last = self.memories.n_layers - 1
        with torch.no_grad():
            found = self.outputs(last, 1, {}).float()
        clean = self.output.float()
        bound = BOUND if self.memories.dtype in (torch.float32, torch.float64) else HALF_BOUND
        error = float((found - clean).abs().max() / clean.abs().max())
        if not error <= bound:
            raise ModelError(
                f"This {self.memories.family!r} model's last layer, run alone on its own input, is"
                f" off by {error:.1e} of the largest number, where {bound:.0e} is allowed: its"
                " layers pass on more than their output. Its effects cannot be measured so."
            )

    def _stub(self, layer: int, lowest: int, n_rows: int) -> Callable[..., Any]:
        """Return what runs instead of a block below the lowest layer of interest."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = first_tensor(args, kwargs)  # only the highest stub replaces it
            if layer == lowest - 1:
                # A copy, for Falcon changes what it is given.
                hidden = self._inputs[lowest].repeat(n_rows, 1, 1)
            rest = self._forms[layer]
            return hidden if rest is None else (hidden, *rest)

        return forward

    def _changing(self, change: Change, n_rows: int) -> Callable[..., tuple[Any, ...]]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            rows = args[0].reshape(n_rows, self.n_tokens, -1)  # OPT flattens them
            return (change(rows).reshape(args[0].shape), *args[1:])

        return hook


@contextmanager
def _replaced(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Run another function in place of a block, and leave the block as it was."""
    own = block.__dict__
    before = own.get("forward")  # libraries that move weights around keep theirs here
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
