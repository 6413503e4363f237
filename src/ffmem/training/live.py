"""What a run shows while it trains: one changing line on a terminal, a line a minute otherwise."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ffmem.progress import Progress

EVERY = 60.0
"""Seconds between two lines where there is no terminal."""


class Live:
    """Takes every few steps how the run stands."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self.progress = progress
        self.steps = steps
        self._said = time.monotonic()

    def show(self, step: int, loss: float, perplexity: float | None, rate: float) -> None:
        """Tell of a step; `perplexity` is the last validation's, `rate` tokens per second."""
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            self.progress.say(f"Step {step:,} of {self.steps:,}: {told(loss, perplexity, rate)}")


class OnTerminal(Live):
    """The same on a terminal, with a bar and the time left."""

    def __init__(self, progress: Progress, steps: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        super().__init__(progress, steps)
        columns = (
            TextColumn("Training {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self.bars = Bars(*columns, console=Console(stderr=True))
        self.task = self.bars.add_task("", total=steps, completed=done, told="")

    def show(self, step: int, loss: float, perplexity: float | None, rate: float) -> None:
        """Tell of a step."""
        self.bars.update(self.task, completed=step, told=told(loss, perplexity, rate))


@contextmanager
def live(progress: Progress, steps: int, done: int) -> Iterator[Live]:
    """Show how a run of so many steps stands, as long as the block lasts."""
    if progress.quiet or not sys.stderr.isatty():
        yield Live(progress, steps)
        return
    shown = OnTerminal(progress, steps, done)
    with shown.bars:
        yield shown


def told(loss: float, perplexity: float | None, rate: float) -> str:
    """Return how a run stands, in a few words."""
    training = f"{math.exp(loss):,.1f}" if loss < 700 else "∞"
    valid = "" if perplexity is None else f", valid {perplexity:,.1f}"
    return f"loss {loss:.3f}, perplexity {training}{valid}, {rate:,.0f} tokens/s"
