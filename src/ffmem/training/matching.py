"""How many memories of one kind give a model as many parameters as it has with another kind.

n* = argmin_n |parameters(kind, n) − parameters(other, m)|,    parameters(kind, n) = a + b·n
"""

from typing import NamedTuple

from ffmem.errors import ModelError
from ffmem.training.network import config_of, default_memories, n_parameters
from ffmem.training.settings import Settings


class Matched(NamedTuple):
    """A number of memories, and what it gives."""

    memories: int
    parameters: int
    aim: int | None
    """The parameters of the model that was to be matched; None if there was none."""


def matched(settings: Settings, vocabulary: int, start: int) -> Matched:
    """Return how many memories a layer of the model to be trained has."""

    def count(memory: str, memories: int) -> int:
        return n_parameters(config_of(settings, vocabulary, start, memory, memories))

    given = default_memories(settings)
    if settings.match is None:
        return Matched(given, count(settings.memory, given), None)
    aim = count(settings.match, given)
    least = count(settings.memory, 1)
    slope = count(settings.memory, 2) - least
    if least > aim:
        raise ModelError(
            f"--match {settings.match}: that model has {aim:,} parameters, and one with"
            f" {settings.memory} memories has {least:,} even with a single one per layer."
            " Give more --memories."
        )
    memories = 1 + round((aim - least) / slope)
    return Matched(memories, count(settings.memory, memories), aim)
