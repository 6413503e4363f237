"""Progress lines, and progress bars with rate and time left."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[int], None]
"""Called with how much was done since the last call."""


class Progress:
    """Writes lines to stderr, and bars if it is a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def say(self, line: str) -> None:
        """Write one line."""
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, title: str, total: int, unit: str, done: int = 0) -> Iterator[Step]:
        """Show a bar of `total` units, of which `done` are done already."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda n: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        rate = TextColumn("{task.fields[rate]}")
        columns = (TextColumn("{task.description}"), BarColumn(), rate, TimeRemainingColumn())
        with Bars(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task(title, total=total, completed=done, rate="")

            def step(n: int) -> None:
                bars.advance(task, n)
                speed = bars.tasks[task].speed
                shown = f"{speed:,.0f} {unit}/s" if speed else ""
                bars.update(task, rate=f"{bars.tasks[task].completed:,.0f}/{total:,} {shown}")

            yield step
