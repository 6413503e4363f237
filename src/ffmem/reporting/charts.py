"""The figure of every experiment, drawn from its result alone.

    chart(Result.read(Path("OUT/agreement.json")))

So whoever has the JSON can redraw, and change, every figure.
"""

from collections.abc import Callable

from ffmem.errors import FfmemError
from ffmem.experiments.result import Result
from ffmem.reporting import key_charts, mixing_charts
from ffmem.reporting.style import Chart, styled

CHARTS: dict[str, Callable[[Result], Chart]] = {
    "patterns": key_charts.patterns,
    "token-removal": key_charts.token_removal,
    "agreement": key_charts.agreement,
    "next-token-rank": key_charts.next_token_rank,
    "max-probability": key_charts.max_probability,
    "predictive-values": key_charts.predictive_values,
    "active-memories": mixing_charts.active_memories,
    "zero-agreement": mixing_charts.zero_agreement,
    "stop-words": mixing_charts.stop_words,
    "residual-prediction": mixing_charts.residual_prediction,
    "residual-probability": mixing_charts.residual_probability,
    "prediction-cases": mixing_charts.prediction_cases,
    "last-layer-composition": mixing_charts.last_layer_composition,
    "neural-memory": mixing_charts.neural_memory,
}
"""In the order of the paper."""


def chart(result: Result) -> Chart:
    """Return the figure of an experiment in the house style."""
    if result.experiment not in CHARTS:
        raise FfmemError(
            f"There is no figure of an experiment {result.experiment!r}."
            f" Figures are drawn of: {', '.join(CHARTS)}."
        )
    return styled(CHARTS[result.experiment](result))
