"""Progress lines, progress bars with rate and time left, and waits with the elapsed time."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ffmem.text import format_rate

Step = Callable[[int], None]
"""Called with how much was done since the last call."""

WAIT_SECONDS = 2.0
"""A wait that took longer says how long it took."""

LINE_SECONDS = 60.0
"""Time between two lines of a bar, if stderr is not a terminal."""


class TaskProgress:
    """What a task has reported of its share of a bar."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._reported = 0

    def advance(self, n: int) -> None:
        """Report that n more units are done."""
        self._reported += n
        self._step(n)

    def take_back(self) -> None:
        """Take back what has been reported: the task failed, or starts again."""
        self.advance(-self._reported)

    def complete(self, size: int) -> None:
        """Report what is missing of the task's size."""
        self.advance(size - self._reported)


class Progress:
    """Writes lines to stderr, and bars if it is a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def say(self, line: str) -> None:
        """Write one line."""
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what takes a while; on a terminal show the elapsed time, and at last how long it was.

        Code further down adds what it is doing with `report_step`.
        """
        if self.quiet:
            yield
            return
        started = time.monotonic()
        with self._live_wait(what) if sys.stderr.isatty() else self._plain_wait(what):
            yield
        if (seconds := time.monotonic() - started) >= WAIT_SECONDS:
            self.say(f"{what}: {seconds:.0f} s.")

    @contextmanager
    def _plain_wait(self, what: str) -> Iterator[None]:
        self.say(f"{what}.")
        with _steps_to(lambda step: self.say(f"{step}.")):
            yield

    @contextmanager
    def _live_wait(self, what: str) -> Iterator[None]:
        from rich.console import Console
        from rich.progress import Progress as Bars
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        console = Console(file=sys.stderr)  # also while a library's own bars are hidden
        with Bars(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
            task = bars.add_task(what, total=None)
            with _steps_to(lambda step: bars.update(task, description=f"{what}: {step}")):
                yield

    @contextmanager
    def bar(
        self,
        title: str,
        total: int,
        unit: str,
        done: int = 0,
        note: Callable[[], str] | None = None,
    ) -> Iterator[Step]:
        """Show a bar of `total` units, of which `done` are done already.

        `note` returns what to show instead of the rate. Without a terminal, there is a line now and
        then instead of the bar.
        """
        if self.quiet or not sys.stderr.isatty():
            yield self._line_step(title, total, unit, done, note)
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        title_column = TextColumn("{task.description} {task.completed:,.0f}/{task.total:,.0f}")
        columns = (BarColumn(bar_width=20), TextColumn("{task.fields[note]}"))
        every = (title_column, *columns, TimeRemainingColumn(elapsed_when_finished=True))
        with Bars(*every, console=Console(stderr=True)) as bars:
            task = bars.add_task(title, total=total, completed=done, note="")

            def step(n: int) -> None:
                bars.advance(task, n)
                speed = bars.tasks[task].speed
                rate = format_rate(speed, unit) if speed and speed > 0 else ""  # not taken back
                bars.update(task, note=rate if note is None else note())

            yield step

    def _line_step(
        self, title: str, total: int, unit: str, done: int, note: Callable[[], str] | None
    ) -> Step:
        """Return the step of a bar that writes lines."""
        before = done
        started = last_line = time.monotonic()

        def step(n: int) -> None:
            nonlocal done, last_line
            done += n
            now = time.monotonic()
            if now - last_line >= LINE_SECONDS and done > before:
                last_line = now
                rate = format_rate((done - before) / (now - started), unit)
                self.say(f"{title} {done:,}/{total:,}: {rate if note is None else note()}")

        return step


_report: Callable[[str], None] | None = None
"""Shows a step of the current wait."""


@contextmanager
def _steps_to(report: Callable[[str], None]) -> Iterator[None]:
    global _report
    before, _report = _report, report
    try:
        yield
    finally:
        _report = before


def report_step(step: str) -> None:
    """Say what a caller who waits is waiting for now; silent unless inside `Progress.waiting`."""
    if _report is not None:
        _report(step)
