"""Text of any origin as GitHub-flavoured Markdown that shows it and does nothing else."""

import re
from typing import Any

from markupsafe import Markup

from ffmem.indexing.memory import visible

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"[\\`*_\[\]|~$#@]|:(?=//)|(?<=www)\.")


def markdown(value: Any) -> Markup:
    """Return a value as Markdown; what is already Markdown (`Markup`) stays as it is."""
    if isinstance(value, Markup):
        return value
    text = "".join(_ENTITIES.get(character, character) for character in str(value))
    return Markup(_SPECIAL.sub(r"\\\g<0>", text))


def fenced(line: str) -> Markup:
    """Return a line that stands as it is in a fence of ```."""
    return Markup(visible(line).replace("```", "` ` `"))
