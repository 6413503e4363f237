"""A prompt continued by the model, token by token, with a cache of what was read.

Greedy, ties to the lower id; or sampled at a temperature, the same seed giving the same text. An
edit in force (`editing`) acts on the prompt and on every token behind it, unless it names
positions.
"""

from numbers import Real
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.causal.prompt import Prompt
from ffmem.errors import FfmemError, ModelError
from ffmem.models.memories import Memories

OVERFLOW = (
    "The model computes numbers that its dtype cannot hold. If coefficients are set or scaled, give"
    " smaller numbers."
)


class Continuation(NamedTuple):
    """What the model wrote behind a prompt."""

    text: str
    ids: list[int]
    ended: str
    """length: as long as asked; end: the model ended the text; context: no room for more."""


@torch.inference_mode()
def continued(
    memories: Memories,
    prompt: Prompt,
    n: int,
    temperature: float | None = None,
    seed: int = 0,
) -> Continuation:
    """Return up to `n` tokens behind a prompt; greedy without a temperature."""
    refuse_odd(temperature, seed)
    generator = torch.Generator().manual_seed(seed)
    steps = _Steps(memories)
    found: list[int] = []
    read, ended = list(prompt.ids), "length"
    while len(found) < n:
        if memories.context is not None and len(prompt.ids) + len(found) > memories.context:
            ended = "context"
            break
        token = _pick(steps.next_logits(read), temperature, generator)
        if token == memories.tokenizer.eos:
            ended = "end"
            break
        found.append(token)
        read = [token]
    return Continuation(memories.tokenizer.decode(found), found, ended)


def refuse_odd(temperature: float | None, seed: int) -> None:
    """Raise unless a continuation can be sampled so."""
    if temperature is not None and not (
        isinstance(temperature, Real) and 1e-3 <= temperature <= 1e3
    ):
        raise FfmemError(
            f"Temperature {temperature} was asked for. Give a number from 0.001 to 1000; without"
            " one the continuation is greedy."
        )
    if not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise FfmemError(f"Seed {seed} was asked for. Give a whole number from 0 to 2⁶³ − 1.")


class _Steps:
    """The model, fed a few tokens at a time; what it read before is kept."""

    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self.cache: Any = None
        self.read: list[int] = []

    def next_logits(self, ids: list[int]) -> Float[Tensor, " vocab"]:
        """Return the logits of what follows, after some more tokens."""
        self.read += ids
        given: dict[str, Any] = {"use_cache": True}
        if self.cache is None:
            ids = self.read
        else:
            given["past_key_values"] = self.cache
        tokens = torch.tensor([ids], device=self.memories.device)
        found = self.memories.model(tokens, **given)
        # The paper's model and GPT-1 keep nothing: they read the whole text for every token.
        self.cache = getattr(found, "past_key_values", None)
        logits: Tensor = found.logits[0, -1].float()
        return logits


def _pick(
    logits: Float[Tensor, " vocab"], temperature: float | None, generator: torch.Generator
) -> int:
    logits = logits.float().cpu()
    if not torch.isfinite(logits).all():
        raise ModelError(OVERFLOW)
    if temperature is None:
        return int(logits.numpy().argmax())
    shares = (logits / temperature).softmax(dim=0)
    return int(torch.multinomial(shares, 1, generator=generator))
