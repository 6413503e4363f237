"""A lease that fails: halved until the sentences that fail by themselves are known.

Each half is read on its own, by any worker; what fails is halved again. A sentence that fails
alone is bad. If all parts of a lease can be read, its failures were accidents.
"""

from typing import NamedTuple

from ffmem.indexing.leases import Lease

MOST = 8
"""Bad sentences of a lease; more of them, and it is the model, not a sentence."""


class Span(NamedTuple):
    """Some consecutive sentences."""

    first: int
    n: int


class Suspect:
    """One lease under suspicion."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.bad: dict[int, str] = {}
        """The sentences that cannot be read, and why."""
        self._spans = _halves(Span(lease.first_sentence, lease.n_sentences))

    def next(self) -> Span | None:
        """Return what to read next by itself; None when the bad sentences are known."""
        return self._spans[-1] if self._spans and not self.is_hopeless else None

    def could(self) -> None:
        """The span could be read."""
        self._spans.pop()

    def could_not(self, why: str) -> None:
        """The span could not be read."""
        span = self._spans.pop()
        if span.n == 1:
            self.bad[span.first] = why
        else:
            self._spans += _halves(span)

    @property
    def is_hopeless(self) -> bool:
        """Whether too many sentences fail for a fault of theirs."""
        return len(self.bad) > MOST


def _halves(span: Span) -> list[Span]:
    """Return the two halves of a span, the first one last; a single sentence as it is."""
    if span.n == 1:
        return [span]
    half = span.n // 2
    return [Span(span.first + half, span.n - half), Span(span.first, half)]
