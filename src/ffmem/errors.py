"""The errors that ffmem raises.

A message says what was requested, what was found, and what to do. The command line prints it
without a traceback. Any other exception is a bug, and keeps its traceback.

Messages are written with the options of the command line. Python callers, and visitors of the
explorer, read the names of the parameters instead:

    Use fewer --batch-tokens.      Use fewer `batch_tokens`.
    Drop --no-models.              Drop `models=False`.
"""

import copyreg
import re
from typing import Any

import click

_OPTION = re.compile(r"`[^`]*`|(?<![^\s(])(?:--([a-z][a-z-]*)|-(t)\b)")
"""An option, unless it is in a command (between backticks), which is the same for everyone."""

_PARAMETERS = {
    "in": "place",
    "chat": "chat=True",
    "force": "force=True",
    "replace": "replace=True",
    "no-models": "models=False",
    "no-report": "corpus=None",
}
"""The parameters that are not named like their options."""


def name_parameters(message: str) -> str:
    """Return a message with the parameter of the Python function for each option."""

    def parameter(found: re.Match[str]) -> str:
        option = found[1] or found[2]
        return f"`{_PARAMETERS.get(option, option.replace('-', '_'))}`" if option else found[0]

    return _OPTION.sub(parameter, message)


def one_line(error: BaseException, most: int = 300) -> str:
    """Return the message of an error on one line, cut where a library adds long lists."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error  # no quotes
    reason = " ".join(str(message).split()).rstrip(".") or type(error).__name__
    return reason if len(reason) <= most else reason[:most] + "…"


class FfmemError(Exception):
    """Base class of all errors that ffmem raises on purpose."""

    def __init__(self, message: str) -> None:
        in_command = click.get_current_context(silent=True) is not None
        super().__init__(message if in_command else name_parameters(message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message: workers send errors whose `__init__` takes other arguments."""
        return copyreg.__newobj__, (type(self), *self.args)  # type: ignore[attr-defined]


class UnknownCell(FfmemError):
    """The model has no memory of this name."""


class ModelError(FfmemError):
    """The model cannot be loaded, or cannot be read as key-value memories."""


class ModelsMissing(ModelError):
    """The libraries that run models are not installed."""

    def __init__(self) -> None:
        super().__init__(
            "This needs a model: pip install 'ffmem[models]'. (Without it, ffmem only reads"
            " indexes.)"
        )


class UnknownFamily(ModelError):
    """The model belongs to a family whose memories ffmem cannot find."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Cannot find the memories of a {name!r} model: {reason}.")


class NoStaticValues(ModelError):
    """The model's memories have keys and coefficients, but their values come from the input."""

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"{asked} Lambda layers have static keys, which have triggers, but their values come"
            " from the input and differ at every position. Use trace to see those of a prompt."
        )


class MixtureOfExperts(ModelError):
    """The model has experts whose weights ffmem cannot read."""

    def __init__(self, name: str, found: str) -> None:
        super().__init__(
            f"ffmem cannot read the experts of this {name!r} model ({found}): it needs stacks of"
            " plain weights, which the model's own code runs. Load it dequantized, in float32 or"
            " bfloat16, without kernels that replace its experts."
        )


class SelfCheckFailed(ModelError):
    """The paper's equations do not hold on this model as ffmem reads it."""


class ForwardError(ModelError):
    """The forward pass fails on some text, or gives numbers that are not finite."""


class BadSentenceError(ModelError):
    """The model cannot read some sentences of the corpus."""


class WorkerError(FfmemError):
    """Workers cannot start or keep dying, or their cluster is gone."""


class ClusterGone(WorkerError):
    """No node of the Ray cluster answers any more."""


class CorpusError(FfmemError):
    """The corpus cannot be read, or has no text."""


class StoreError(FfmemError):
    """The folder is missing, damaged, not an index, or made with other settings."""


class StorageFull(FfmemError):
    """The disk is full; committed files are kept."""


class HubError(FfmemError):
    """The Hub cannot be reached, rejects the request, or does not have the dataset."""
