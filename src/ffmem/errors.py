"""Everything that ffmem raises on purpose.

A message says what was asked, what was found, and what to do. The command line shows it alone,
without a traceback; anything else that is raised is a bug and keeps its traceback.
"""

from collections.abc import Iterable


def one_line(error: Exception, most: int = 300) -> str:
    """Return what a library says in an error, on one line and without its longer lists."""
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return reason if len(reason) <= most else reason[:most] + "…"


class FfmemError(Exception):
    """Base class of every error that is an answer and not a crash."""


class UnknownCell(FfmemError):
    """The text names no memory of this model."""


class ModelError(FfmemError):
    """The model cannot be loaded, or not be read as key-value memories."""


class UnknownFamily(ModelError):
    """The model belongs to a family whose memories ffmem cannot find."""

    def __init__(self, name: str, known: Iterable[str], reason: str) -> None:
        super().__init__(
            f"Cannot find the memories of a {name!r} model: {reason}."
            f" Known families: {', '.join(sorted(known))}."
        )


class NoStaticValues(ModelError):
    """The model's memories have keys and coefficients, but values that come from the input."""

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"{asked} A lambda layer has static keys, which have triggers; what they multiply comes"
            " from the input, another vector at every position. trace shows those of a prompt."
        )


class MixtureOfExperts(ModelError):
    """The model spreads its memories over experts, which ffmem does not read yet."""

    def __init__(self, name: str, found: str) -> None:
        super().__init__(
            f"{name!r} is a mixture of experts ({found})."
            " ffmem reads dense feed-forward layers only, for now: give it a dense model."
        )


class SelfCheckFailed(ModelError):
    """The paper's equations do not hold on this model as ffmem reads it."""


class ForwardError(ModelError):
    """The forward pass fails on some text, or gives numbers that are not finite."""


class BadSentenceError(ModelError):
    """Some sentences of the corpus cannot be read, and were not to be skipped."""


class WorkerError(FfmemError):
    """Workers cannot start, keep dying, or the cluster that they ran on is gone."""


class CorpusError(FfmemError):
    """The corpus cannot be read, or holds nothing to read."""


class StoreError(FfmemError):
    """The index folder is missing, damaged, foreign, or made with other settings."""


class StorageFull(FfmemError):
    """There is no room left to write to; what was committed before is kept."""
