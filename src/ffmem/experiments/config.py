"""The configuration of experiments: which prefixes and memories they look at.

The options of `ffmem experiment` and `ffmem report`, and the parameters of `ffmem.experiment` and
`ffmem.report`, follow from `ExperimentConfig`. This module imports no torch.
"""

from dataclasses import dataclass

from ffmem.cli_options import check_options, option
from ffmem.models.arguments import MAX_THREADS

DRAWS = ("sentences", "tokens")


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """The choices of a measurement."""

    sample: int | str = option(
        "Prefixes to sample for Section 5.", 4000, minimum=1, choices=("all",)
    )
    draw: str = option(
        "Draw one prefix per sentence, or draw from all prefixes.", "sentences", choices=DRAWS
    )
    seed: int = option("Random seed.", 0, minimum=0)
    per_layer: int = option(
        "Memories per layer for token removal; the paper took 100.", 10, minimum=1
    )
    triggers: int = option(
        "Triggers per memory for token removal; the paper took 50.", 20, minimum=1
    )
    threads: int | None = option(
        "CPU threads. The last bits of a number may depend on it.",
        None,
        minimum=1,
        maximum=MAX_THREADS,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def n_prefixes(self) -> int | None:
        """How many prefixes to sample; None for all."""
        return self.sample if isinstance(self.sample, int) else None
