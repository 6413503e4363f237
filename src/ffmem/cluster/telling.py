"""A state of a run, as people read it: how far, how fast, who is slow, what went wrong.

time left = units left / rate,    rate = units done over the last minutes / those minutes
"""

from collections.abc import Iterable, Sequence
from statistics import quantiles

from ffmem.cluster.status import STALE, Status, WorkerStatus
from ffmem.counted import counted

MOST_ROWS = 40
"""Workers up to which each has its row."""

SLOWEST = 10
"""Of more workers, those that have one."""


def told(status: Status, now: float) -> str:
    """Return a state in words and one table, at a time in seconds since 1970."""
    parts = [
        [_far(status), _tasks(status), _trouble(status), _news(status, now)],
        _workers(status),
        ["What went wrong, the latest last:", *map(_indented, status.said)] if status.said else [],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _far(status: Status) -> str:
    """Return how far the work is, how fast it goes and when it will be done."""
    share = f" ({_percent(status.units_done / status.units)})" if status.units else ""
    all_units = counted(status.units, status.unit)
    line = f"{status.phase.capitalize()}: {status.units_done:,} of {all_units}"
    rate = "no rate yet" if status.rate is None else f"{_number(status.rate)} {status.unit}/s"
    left = ""
    if status.seconds_left is not None and status.units_done < status.units:
        left = f", about {duration(status.seconds_left)} left"
    return f"{line}{share}, {rate}{left}; running for {duration(status.seconds)}"


def _tasks(status: Status) -> str:
    return (
        f"{counted(status.tasks_done, 'tasks')} done, {status.running:,} running,"
        f" {status.waiting:,} ready, {status.given_up:,} given up"
    )


def _trouble(status: Status) -> str:
    return f"{counted(status.failures, 'failures')}, {counted(status.losses, 'lost workers')}"


def _news(status: Status, now: float) -> str:
    """Return who said so and when; what to do if that is long ago."""
    age = now - status.written
    if age < -STALE:
        return (
            f"Said by {status.leader}, whose clock is {duration(-age)} ahead of this one:"
            " whether it still lives cannot be told."
        )
    said = f"Said by {status.leader}, {duration(max(age, 0.0))} ago"
    if status.ended is not None:
        return f"{said}, at its end: {status.ended} Run the same command again to go on."
    if age <= STALE:
        return f"{said}."
    return (
        f"{said}: it seems to be dead or cut off."
        " Run the same command again: it goes on from what is done."
    )


def _workers(status: Status) -> list[str]:
    """Return a row per worker, or what is worth knowing of very many."""
    n = len(status.workers)
    if not n:
        return ["No worker has joined yet, or all are lost."]
    measured = sorted((w for w in status.workers if w.rate is not None), key=_rate)
    differ = bool(measured) and _rate(measured[0]) < _rate(measured[-1])
    slowest = measured[0].name if differ else None
    missing = []
    if n < status.size:
        missing = [f"{n:,} of {counted(status.size, 'workers')} have begun; the others load."]
    if n <= MOST_ROWS:
        return [*_table(status.workers, status.unit, slowest), *missing]
    return [*_crowd(status, measured, slowest), *missing]


def _crowd(status: Status, measured: list[WorkerStatus], slowest: str | None) -> list[str]:
    """Return how the rates of very many workers lie, and the slowest of them."""
    n = len(status.workers)
    waiting = sum(worker.task is None for worker in status.workers)
    lines = [f"{counted(n, 'workers')}, {waiting:,} of them without a task"]
    if len(measured) > 1:
        rates = [_rate(worker) for worker in measured]
        places = (rates[0], *quantiles(rates, n=4, method="inclusive"), rates[-1])
        named = zip(
            ("lowest", "quarter", "median", "three quarters", "highest"), places, strict=True
        )
        spread = ", ".join(f"{name} {_number(rate)}" for name, rate in named)
        lines.append(f"Their rates in {status.unit}/s: {spread}")
    if len(measured) < n:
        lines.append(f"{counted(n - len(measured), 'workers')} without a rate yet")
    if measured:
        shown = measured[:SLOWEST]
        lines += [f"The slowest {len(shown)}:", *_table(shown, status.unit, slowest)]
    return lines


def _rate(worker: WorkerStatus) -> float:
    return worker.rate or 0.0


def _table(workers: Sequence[WorkerStatus], unit: str, slowest: str | None) -> list[str]:
    """Return lines with one worker each, numbers flush right."""
    rows = [("worker", "where", "task", "for", "of it", f"{unit}/s", "done", "")]
    for worker in workers:
        rows.append(
            (
                worker.name,
                worker.where,
                worker.task or "–",
                duration(worker.seconds) if worker.task else "–",
                _percent(worker.share, 0) if worker.task else "–",
                "–" if worker.rate is None else _number(worker.rate),
                f"{worker.done:,}",
                "slowest" if worker.name == slowest else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_row(row, widths) for row in rows]


def _row(cells: Iterable[str], widths: Sequence[int]) -> str:
    sides = "<<<>>>><"
    padded = (f"{c:{side}{width}}" for c, side, width in zip(cells, sides, widths, strict=True))
    return "  ".join(padded).rstrip()


def _indented(text: str) -> str:
    return "  " + text.strip().replace("\n", "\n    ")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(share: float, digits: int = 1) -> str:
    """Return a share in %, never 100 before all is done."""
    floor = 10 ** (digits + 2)
    return f"{int(share * floor) / floor * 100:.{digits}f} %"


def duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    left, parts = round(seconds), list[str]()
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        n, left = divmod(left, size)
        if n or parts or unit == "s":
            parts.append(f"{n:,} {unit}")
    return " ".join(parts[:2])
