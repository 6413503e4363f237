"""How to index: what a user may choose, told without loading anything."""

from dataclasses import dataclass

from ffmem.errors import FfmemError

COMPAT = "ff-layers"

LEASE_TOKENS = 65_536

MOST = {"t": 10_000, "threads": 1_024}
"""Triggers of a memory that fit in memory, and threads that a machine can have: far above use."""


@dataclass(frozen=True)
class Options:
    """The choices of a run; every one is recorded."""

    t: int = 50
    prefixes: str = "best"
    compat: str | None = None
    start: str = "auto"
    batch_tokens: int = 4096
    lease_tokens: int = LEASE_TOKENS
    threads: int | None = None
    """None: as many as torch takes, or as many as an interrupted run had."""

    def __post_init__(self) -> None:
        for name in ("t", "batch_tokens", "lease_tokens", "threads"):
            value, most = getattr(self, name), MOST.get(name)
            if value is not None and value < 1:
                raise FfmemError(f"{name} = {value} was asked for; give a number of at least 1.")
            if value is not None and most is not None and value > most:
                raise FfmemError(f"{name} = {value} was asked for; give at most {most:,}.")
        if self.prefixes not in {"best", "all"}:
            raise FfmemError(f"--prefixes takes best or all; {self.prefixes!r} was given.")
        if self.compat not in {None, COMPAT}:
            raise FfmemError(f"--compat takes {COMPAT}; {self.compat!r} was given.")
        if self.compat and self.prefixes != "best":
            raise FfmemError(f"--compat {COMPAT} keeps the best prefix of a sentence, not all.")
