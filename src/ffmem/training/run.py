"""A run: the loop with its curve, its evaluations and its checkpoints.

Law: stopped anywhere and gone on from its last checkpoint, a run makes the same steps, bit for bit,
as one that was never stopped (on one machine, with as many threads).
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Int
from numpy import ndarray

from ffmem.training.checkpoint import Checkpoint, Standing
from ffmem.training.curve import Curve
from ffmem.training.evaluation import perplexity
from ffmem.training.live import Live
from ffmem.training.loop import Diverged, Loop
from ffmem.training.schedule import learning_rate
from ffmem.training.settings import PATIENCE

ROW_STEPS = 10
"""Steps that one row of the curve tells of, in the mean."""


@dataclass(frozen=True)
class Saving:
    """How often a checkpoint is written; evaluations write one as well."""

    minutes: float = 5.0
    steps: int | None = None


class Run:
    """A loop with its curve, its evaluations and its checkpoints."""

    def __init__(
        self,
        loop: Loop,
        valid: Int[ndarray, " token"],
        checkpoint: Checkpoint,
        curve: Curve,
        saving: Saving,
    ) -> None:
        self.loop = loop
        self.valid = valid
        self.checkpoint = checkpoint
        self.curve = curve
        self.saving = saving
        settings = loop.settings
        an_epoch = loop.blocks.steps(1, settings.blocks_of_a_step)
        self.evaluate_every = settings.evaluate_every or an_epoch
        self._kept = 0
        self._saved = time.monotonic()
        self._row_seconds, self._row_steps = 0.0, 0

    def take_up(self) -> None:
        """Go on from the last checkpoint."""
        self.loop.standing = self.checkpoint.read(self.loop.model, self.loop.optimizer)
        self.checkpoint.refuse_damaged_best(self.loop.standing)
        self._kept = self.loop.standing.step
        self.curve.take_up(self.loop.standing.rows)

    def go(self, shown: Live, say: Callable[[str], None]) -> Standing:
        """Train to the end, and return where that is."""
        loop = self.loop
        loop.model.train()
        for _ in self._steps():
            step = loop.standing.step
            if step % ROW_STEPS == 0 or self._is_evaluated(step):
                loop.settle(self._kept)
                self._row(shown)
            if self._is_evaluated(step):
                self._evaluate(say)
            elif self._is_saved(step):
                self.save()
        return loop.standing

    def _steps(self) -> Iterator[None]:
        """Yield after every step, timed."""
        loop = self.loop
        while loop.standing.step < loop.steps and not loop.standing.finished:
            begin = time.perf_counter()
            loop.step()
            taken = time.perf_counter() - begin
            self._row_seconds += taken
            self._row_steps += 1
            loop.standing = replace(loop.standing, seconds=loop.standing.seconds + taken)
            yield

    def _is_evaluated(self, step: int) -> bool:
        return step % self.evaluate_every == 0 or step == self.loop.steps

    def _is_saved(self, step: int) -> bool:
        every = self.saving.steps
        if every is not None and step % every == 0:
            return True
        return time.monotonic() - self._saved >= 60 * self.saving.minutes

    def save(self) -> None:
        """Write a checkpoint."""
        self.loop.settle(self._kept)
        self.curve.keep()
        self.checkpoint.write(self.loop.standing, self.loop.model, self.loop.optimizer)
        self._kept = self.loop.standing.step
        self._saved = time.monotonic()

    def _row(self, shown: Live) -> None:
        """Tell of the steps since the last row, in the curve and to who looks on."""
        standing, settings = self.loop.standing, self.loop.settings
        if not standing.pending:
            return
        loss = math.fsum(standing.pending) / len(standing.pending)
        tokens = settings.blocks_of_a_step * settings.context
        # Of a run gone on with, the first steps of a row may have been another process's.
        rate = self._row_steps * tokens / self._row_seconds
        number = standing.step - 1
        self._add(
            loss=loss,
            learning_rate=learning_rate(
                number, self.loop.steps, self.loop.warmup, settings.learning_rate
            ),
            tokens_per_second=round(rate, 1),
        )
        self.loop.standing = replace(self.loop.standing, pending=[])
        self._row_seconds, self._row_steps = 0.0, 0
        shown.show(standing.step, loss, standing.best_perplexity, rate)

    def _add(self, **numbers: Any) -> None:
        standing, settings = self.loop.standing, self.loop.settings
        blocks = standing.step * settings.blocks_of_a_step
        self.curve.add(
            {
                "step": standing.step,
                "epoch": blocks / self.loop.blocks.of_an_epoch,
                "tokens": blocks * settings.context,
                **numbers,
            }
        )
        self.loop.standing = replace(standing, rows=len(self.curve.rows))

    def _evaluate(self, say: Callable[[str], None]) -> None:
        """Measure validation perplexity; keep the weights if they are the best."""
        loop, settings = self.loop, self.loop.settings
        n_blocks = settings.blocks_of_a_pass(loop.model.device.type)
        found = perplexity(loop.model, self.valid, settings.context, n_blocks)
        before = loop.standing
        if not math.isfinite(found):
            raise Diverged(before.step, f"the validation perplexity was {found}", self._kept)
        self._add(valid_perplexity=found)
        best = before.best_perplexity is None or found < before.best_perplexity
        if best:
            self.checkpoint.write_best(before.step, loop.model)
            loop.standing = replace(
                loop.standing, best_step=before.step, best_perplexity=found, without_gain=0
            )
        else:
            loop.standing = replace(loop.standing, without_gain=before.without_gain + 1)
        if settings.stops_early and loop.standing.without_gain >= PATIENCE:
            loop.standing = replace(loop.standing, finished=True)
        self.save()
        epoch = before.step * settings.blocks_of_a_step / loop.blocks.of_an_epoch
        say(
            f"Step {before.step:,} of {loop.steps:,} (epoch {epoch:.2f}): validation perplexity"
            f" {found:,.2f}{', the best so far' if best else ''}."
        )
