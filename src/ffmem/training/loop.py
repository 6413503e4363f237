"""The loop: one step of AdamW after the other over the blocks of a stream.

    θ ← AdamW(θ, clip(∇ mean −log p(next token), 1)),   what a step reads follows from its number

Losses stay on the device until somebody asks for them: an accelerator never waits for a step.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.errors import FfmemError
from ffmem.networks.model import AdaptiveLM
from ffmem.training.blocks import Blocks
from ffmem.training.checkpoint import Standing
from ffmem.training.optimizer import adamw
from ffmem.training.schedule import default_warmup, learning_rate
from ffmem.training.settings import Settings

LARGEST_GRADIENT = 1.0


class Diverged(FfmemError):
    """The loss or its gradient is not a number any more."""

    def __init__(self, step: int, found: str, kept: int) -> None:
        start = f"The checkpoint after step {kept:,} is kept" if kept else "There is no checkpoint"
        super().__init__(
            f"Training was stopped: in step {step:,}, {found}. {start}. Delete the folder or"
            " take another one, and train again with a lower --learning-rate or a longer --warmup."
        )


class Loop:
    """A model on its way."""

    def __init__(self, model: AdaptiveLM, settings: Settings, blocks: Blocks, steps: int) -> None:
        self.model = model
        self.settings = settings
        self.blocks = blocks
        self.steps = steps
        self.warmup = default_warmup(steps) if settings.warmup is None else settings.warmup
        self.optimizer = adamw(model, settings.weight_decay)
        self.weights = list(model.parameters())
        self.standing = Standing()
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    def step(self) -> None:
        """Make the next step."""
        settings, number = self.settings, self.standing.step
        rate = learning_rate(number, self.steps, self.warmup, settings.learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        inputs, targets = self.blocks.batch(number, settings.blocks_of_a_step)
        self._losses.append(self._backward(inputs, targets))
        self._norms.append(
            torch.nn.utils.clip_grad_norm_(self.weights, LARGEST_GRADIENT, foreach=True)
        )
        self.optimizer.step()
        self.standing = replace(self.standing, step=number + 1)

    def _backward(
        self, inputs: Int[Tensor, "block position"], targets: Int[Tensor, "block position"]
    ) -> Float[Tensor, ""]:
        """Leave the gradient of a step's mean loss in the weights; return the loss."""
        device = self.model.device
        size = self.settings.blocks_of_a_pass(device.type)
        total = torch.zeros((), device=device)
        for tokens, following in zip(inputs.split(size), targets.split(size), strict=True):
            low = self.settings.dtype == "bfloat16"
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                loss = self.model.loss(tokens.to(device), following.to(device))
            share = loss * (len(tokens) / len(inputs))
            share.backward()
            total += share.detach()
        return total

    def settle(self, kept: int) -> None:
        """Turn what steps left on the device into numbers; raise if one is not finite."""
        if not self._losses:
            return
        losses, norms = torch.stack(self._losses).tolist(), torch.stack(self._norms).tolist()
        first = self.standing.step - len(losses)
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=first + 1):
            if not math.isfinite(loss):
                raise Diverged(number, f"the loss was {loss}", kept)
            if not math.isfinite(norm):
                raise Diverged(number, f"the gradient's norm was {norm}", kept)
        self._losses, self._norms = [], []
        self.standing = replace(self.standing, pending=[*self.standing.pending, *losses])
