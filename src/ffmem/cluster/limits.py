"""What will not go well at some size of a run, in sentences that say what to do about it."""

import math
from collections.abc import Callable

from ffmem.cluster.planning import EVENTS, FOOTER, GROUP, Asked, Plan

LARGEST = 2**31
"""Bytes of a Parquet file's table of contents: its length is a signed integer of 32 bits."""

SLOW = 2**27
"""Bytes of one that are felt when it is opened."""


def limits(asked: Asked, plan: Plan) -> list[str]:
    """Return what breaks or waits, what breaks first."""
    return [said for look in _LOOKS if (said := look(asked, plan)) is not None]


def _contents(asked: Asked, plan: Plan) -> str | None:
    groups = asked.tokens / asked.sentence_tokens / GROUP
    contents = size(groups * FOOTER)
    if groups * FOOTER > LARGEST:
        return (
            f"sentences.parquet would have {groups:,.0f} row groups and a table of contents of"
            f" {contents}; Parquet's ends at 2.1 GB, and every worker reads it."
            " Index parts of the corpus, each by itself."
        )
    if groups * FOOTER > SLOW:
        return f"Every worker reads {contents} when it opens sentences.parquet."
    return None


def _leader(asked: Asked, plan: Plan) -> str | None:
    events = plan.events_per_second
    if events is None or events <= EVENTS:
        return None
    enough = 1 << math.ceil(math.log2(asked.lease_tokens * events / EVENTS))
    return (
        f"The leader would hear of {events:,.0f} tasks per second; it can take {EVENTS:,.0f}."
        f" Give --lease-tokens {enough} or more."
    )


def _segments(asked: Asked, plan: Plan) -> str | None:
    if not plan.seconds:
        return None
    beside = plan.seconds["moving"] + plan.seconds["merging"]
    if beside <= 0.2 * plan.seconds["reading"]:
        return None
    return (
        f"Moving and merging segments takes {beside / plan.seconds['reading']:.0%} of the time of"
        f" reading. Give longer leases than {asked.lease_tokens:,} tokens."
    )


def _preparation(asked: Asked, plan: Plan) -> str | None:
    if not plan.seconds or plan.seconds["preparing"] <= 0.5 * plan.seconds["reading"]:
        return None
    return (
        "One process prepares the corpus before anybody reads it:"
        f" {duration(plan.seconds['preparing'])}, against {duration(plan.seconds['reading'])} of"
        " reading. Index parts of the corpus at once, and merge."
    )


def _idle(asked: Asked, plan: Plan) -> str | None:
    if plan.leases >= asked.workers:
        return None
    fewer = max(1, asked.tokens // (4 * asked.workers))
    leases = "is 1 lease" if plan.leases == 1 else f"are {plan.leases:,} leases"
    return (
        f"There {leases} for {asked.workers:,} workers: the others have nothing"
        f" to do. Give --lease-tokens {fewer}, or fewer workers."
    )


def _room(asked: Asked, plan: Plan) -> str | None:
    shared, index = plan.disk["shared_folder"], plan.disk["index"]
    if shared <= 10 * index:
        return None
    return (
        f"The shared folder may hold {size(shared)}, the finished index {size(index)}: up to one"
        " full segment per worker waits to be merged."
    )


_LOOKS: tuple[Callable[[Asked, Plan], str | None], ...] = (
    *(_contents, _leader, _idle),
    *(_preparation, _segments, _room),
)


def size(n: float | int) -> str:
    """Return bytes as people write them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} PB" if n < 999.5 else f"{n:,.0f} PB"


def duration(seconds: float | int) -> str:
    """Return seconds as people write them."""
    for limit, unit, one in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / one:.3g} {unit}"
    days = seconds / 86_400
    if days < 730:
        return f"{days:.3g} days"
    return f"{days / 365.25:,.0f} years" if days > 365_250 else f"{days / 365.25:.3g} years"
