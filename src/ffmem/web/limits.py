"""How much one visitor may ask for at once, and the answers to those who ask for more.

A page that one person opens on a laptop and a page that a group shares run the same model: each
request is small enough that the next in the queue does not wait long.
"""

from ffmem.errors import FfmemError

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
"""Requests that wait for the model; the next one is told to come again."""

MOST_RESULTS = 200
"""Entries of one page of anything."""


class TooMuch(FfmemError):
    """More was asked for than one request may."""


class NotHere(FfmemError):
    """There is no such index, layer, figure or page."""


class Busy(FfmemError):
    """Too many requests wait for the model."""


def refuse_long(text: str) -> str:
    """Return a prompt that is not too long to be read."""
    if len(text) > MOST_CHARACTERS:
        raise TooMuch(
            f"The prompt has {len(text):,} characters; the page takes {MOST_CHARACTERS:,}."
            " Shorten it, or use `ffmem trace`, which has no limit."
        )
    return text
