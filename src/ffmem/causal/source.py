"""Where the values that coefficients multiply come from: the weights, or the input.

Results say `"values": "input"` for lambda layers; all others have static values, and say nothing.
"""

STATIC = "static"
INPUT = "input"

INPUT_VALUES = (
    "These memories have no static values: a lambda layer multiplies their coefficients with"
    " vectors of the input. Tokens beside a memory are what those vectors promote here."
)


def said(source: str) -> dict[str, str]:
    """Return what JSON says of it."""
    return {} if source == STATIC else {"values": source}
