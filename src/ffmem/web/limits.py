"""How much one request may ask for, and the errors of those that ask for more.

A page on a laptop and a page that a group shares run the same model: every request is small enough
that the next in line does not wait long.
"""

from dataclasses import dataclass

from ffmem.errors import FfmemError, ModelError, StorageFull, StoreError, UnknownCell

MOST_ADDRESS = 16_000
"""Bytes of a path with its query: prompts and edits live there."""

MOST_BODY = 131_072
"""Bytes of a request's body: a sheet full of long descriptions has fewer."""

MOST_CHARACTERS = 4_000
"""Of a prompt."""

MOST_TOKENS = 256
"""Of a prompt: every layer is read at every one of them."""

MOST_EDITS = 64

MOST_GENERATED = 64
"""Tokens of a continuation."""

MOST_WAITING = 64
"""Requests that may wait for the model, however fast it is."""

MOST_SECONDS = 20.0
"""How long a request may have to wait for the model: who would wait longer gets 503 at once."""

RETRY_SECONDS = 5
"""What a refused visitor is told to wait before the next try."""

MOST_RESULTS = 200
"""Entries of one page of anything."""


class TooMuch(FfmemError):
    """More was asked for than one request may."""


class NotHere(FfmemError):
    """There is no such index, layer, figure or page."""


class Busy(FfmemError):
    """Too many requests wait for the model."""


class ClientGone(FfmemError):
    """The visitor closed the connection before the work began."""


def refuse_long(text: str) -> str:
    """Return a prompt that is not too long to be read."""
    if len(text) > MOST_CHARACTERS:
        raise TooMuch(
            f"The prompt has {len(text):,} characters; the page takes {MOST_CHARACTERS:,}."
            " Shorten it, or use `ffmem trace`, which has no limit."
        )
    return text


@dataclass(frozen=True)
class Refusal:
    """What a program gets instead of an answer."""

    error: str


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, UnknownCell | NotHere):
        return 404
    if isinstance(error, Busy | StorageFull | ClientGone):
        return 503
    if isinstance(error, StoreError):  # the server's own files
        return 500 if not isinstance(error, ModelError) else 422
    return 422 if isinstance(error, FfmemError) else 500
