"""Where the values that coefficients multiply come from: the weights, or the input.

Results say `"values": "input"` for lambda layers; all others have static values, and say nothing.
"""

from ffmem.indexing.memory import NO_VALUES

STATIC = "static"
INPUT = "input"

INPUT_VALUES = (
    f"{NO_VALUES} Tokens beside a memory are what those vectors promote here; ff is their sum, what"
    " the static keys read."
)


def said(source: str) -> dict[str, str]:
    """Return what JSON says of it."""
    return {} if source == STATIC else {"values": source}
