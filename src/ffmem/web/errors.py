"""Errors of the explorer, and the HTTP status of every error."""

from dataclasses import dataclass

from ffmem.errors import FfmemError, StorageFull, StoreError, UnknownCell


class LimitExceeded(FfmemError):
    """The request asks for more than one request may."""


class NotFound(FfmemError):
    """There is no such index, layer, figure or page."""


class NoStudy(NotFound):
    """There is no annotation study of this index yet."""


class NotReady(FfmemError):
    """The index has been started, but there is nothing to show yet."""


class Busy(FfmemError):
    """Too many requests wait for the model."""


class ClientGone(FfmemError):
    """The client closed the connection before its request was processed."""


@dataclass(frozen=True)
class ErrorResponse:
    """The body of every error below /api."""

    error: str


def http_status(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, UnknownCell | NotFound):
        return 404
    if isinstance(error, Busy | NotReady | StorageFull | ClientGone):
        return 503
    if isinstance(error, StoreError):  # the server's own files
        return 500
    return 422 if isinstance(error, FfmemError) else 500
