"""A number of things, in words: one of them is `1 layer`, two are `2 layers`."""


def counted(n: int | float, things: str) -> str:
    """Return a number and what there is of it; `things` is the plural, its last word counted."""
    shown = f"{n:,}" if isinstance(n, int) else f"{n:,g}"
    return f"{shown} {_one(things) if n == 1 else things}"


def _one(things: str) -> str:
    return things.removesuffix("ies") + "y" if things.endswith("ies") else things.removesuffix("s")
