"""How many threads torch computes with: what the last bits of a number may depend on."""

from collections.abc import Iterator
from contextlib import contextmanager

from ffmem.errors import FfmemError

MOST = 1_024
"""Threads that may be asked for: with tens of thousands, the system kills the process."""


def check_threads(n: int | None) -> None:
    """Raise if a number of threads cannot be."""
    if n is not None and not 1 <= n <= MOST:
        raise FfmemError(f"--threads {n} is out of range; use 1 to {MOST:,}.")


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Run with a number of threads, and leave the process as it was."""
    import torch

    check_threads(n)
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
