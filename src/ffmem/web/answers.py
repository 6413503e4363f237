"""Errors as answers: a sentence on a page, or `{"error": "…"}` for a program."""

from typing import Any

from typing_extensions import TypedDict

from ffmem.errors import FfmemError, ModelError, StorageFull, StoreError, UnknownCell
from ffmem.web.limits import Busy, NotHere


class Refusal(TypedDict):
    """What a program gets instead of an answer."""

    error: str


def status_of(error: Exception) -> int:
    """Return the status code of an error that is an answer."""
    if isinstance(error, UnknownCell | NotHere):
        return 404
    if isinstance(error, Busy | StorageFull):
        return 503
    if isinstance(error, StoreError):  # the server's own files
        return 500 if not isinstance(error, ModelError) else 422
    return 422 if isinstance(error, FfmemError) else 500


REFUSALS: dict[int | str, dict[str, Any]] = {
    404: {"model": Refusal, "description": "There is no such memory, layer, figure or index."},
    422: {"model": Refusal, "description": "What was asked makes no sense, or is too much."},
    503: {"model": Refusal, "description": "Too many requests wait for the model."},
}
"""What every route of the API may answer beside its own answer."""


def in_words(errors: list[dict[str, Any]]) -> str:
    """Return what FastAPI found wrong with a request as one sentence."""
    found = []
    for error in errors:
        name = ".".join(str(part) for part in error["loc"] if part not in ("query", "path", "body"))
        found.append(f"{name or 'the request'}: {error['msg']}")
    return f"The request was not understood. {'; '.join(found)}."
