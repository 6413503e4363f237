"""Words for numbers: `1 layer`, `2 layers`."""


def pluralize(n: int | float, plural: str) -> str:
    """Return a number with its noun, in the singular for 1: `pluralize(1, "memories")`."""
    shown = f"{n:,}" if isinstance(n, int) else f"{n:,g}"
    return f"{shown} {_singular(plural) if n == 1 else plural}"


def _singular(plural: str) -> str:
    return plural.removesuffix("ies") + "y" if plural.endswith("ies") else plural.removesuffix("s")
