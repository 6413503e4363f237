"""What each experiment measures, what the paper says of it, and what a model shows.

Quoted are only numbers of the paper's text; what a model shows is computed from the rows.
"""

from collections.abc import Callable

from ffmem.experiments.quoted import QUOTED
from ffmem.experiments.result import Result
from ffmem.reporting import key_findings, mixing_findings
from ffmem.reporting.claims import VERDICTS, Claim, claims

__all__ = ["VERDICTS", "Claim", "claims", "measured", "paper_says", "shows", "title"]

TITLES = {
    "patterns": "Patterns in triggers",
    "token-removal": "Removing a token of a trigger",
    "agreement": "Agreement of keys and values",
    "next-token-rank": "Rank of the next token",
    "max-probability": "Agreement by largest probability",
    "predictive-values": "The most predictive values",
    "active-memories": "Active memories",
    "zero-agreement": "Layers that no memory agrees with",
    "stop-words": "Stop words and short prefixes",
    "residual-prediction": "Predictions that stand in the residual",
    "residual-probability": "The prediction's probability in the residual",
    "prediction-cases": "Residual, feed-forward, or both",
    "last-layer-composition": "Compositions of the last layer",
    "neural-memory": "The layer beside a softmax memory",
}
"""In the order of the paper."""

_MEASURED = {
    "patterns": "Share of a layer's trigger examples (the first 25 of a memory) that show a shallow"
    " pattern (such as a shared last word), a semantic one (a shared topic), both, or none."
    " Source human: people's labels, the paper's protocol. Sources automatic (a detector) and"
    " explained (a language model) are not that protocol.",
    "token-removal": "Relative change of a memory's coefficient m on its trigger when the first,"
    " the last or a random token is removed, or replaced in its place.",
    "agreement": "Share of a layer's memories whose value v, read as a distribution over the"
    " vocabulary, has on top the token that follows the memory's strongest trigger.",
    "next-token-rank": "Rank of the token that follows a memory's strongest trigger in the"
    " distribution of its value; 0 is the top.",
    "max-probability": "Share of memories that agree, among memories whose value's largest"
    " probability lies in the same bin; all layers together.",
    "predictive-values": "The 100 values with the largest probability of one token: their layers,"
    " and precision, the share of a memory's triggers that this token follows.",
    "active-memories": "Share of a layer's memories that are active on a prefix: by a coefficient"
    " m > 0, by an open gate (gated models), or in the smallest set that carries 90 % of Σ|m|·‖v‖.",
    "zero-agreement": "Share of examples in which no memory's top token is the layer's: top(y) of"
    " the feed-forward output y, or top(o) of the layer's output o = r + y, r being the residual.",
    "stop-words": "Among the pairs of example and layer in which some memory agrees with the"
    " layer: how often the target is a stop word, and the prefix shorter than five tokens.",
    "residual-prediction": "Share of examples in which the top token of a layer's residual r, or"
    " of its output o, is the model's prediction; decided for good: no later layer changes it.",
    "residual-probability": "Probability of the model's prediction when a layer's residual r is"
    " read by the output head.",
    "prediction-cases": "Whether the top token of a layer's output o is that of the residual r, of"
    " the feed-forward output y (ffn), of both (agreement), or of neither (composition).",
    "last-layer-composition": "Where the last layer's top(o) is neither top(r) nor top(y): the"
    " cosine of the embeddings of top(r) and top(o).",
    "neural-memory": "FF(x) = f(x·Kᵀ)·V beside MN(x) = softmax(x·Kᵀ)·V with the same keys K and"
    " values V: cosine of the outputs, entropy of the softmax, and its largest weight.",
}

_SHOWS: dict[str, Callable[[Result], str]] = {
    "patterns": key_findings.patterns,
    "token-removal": key_findings.token_removal,
    "agreement": key_findings.agreement,
    "next-token-rank": key_findings.next_token_rank,
    "max-probability": key_findings.max_probability,
    "predictive-values": key_findings.predictive_values,
    "active-memories": mixing_findings.active_memories,
    "zero-agreement": mixing_findings.zero_agreement,
    "stop-words": mixing_findings.stop_words,
    "residual-prediction": mixing_findings.residual_prediction,
    "residual-probability": mixing_findings.residual_probability,
    "prediction-cases": mixing_findings.prediction_cases,
    "last-layer-composition": mixing_findings.last_layer_composition,
    "neural-memory": mixing_findings.neural_memory,
}


def title(name: str) -> str:
    """Return the title of an experiment."""
    return TITLES.get(name, name)


def measured(result: Result) -> str:
    """Return what an experiment measures, and what that means for memories of this kind."""
    told = _MEASURED.get(result.experiment, "")
    return f"{told} {note}" if (note := result.also.get("note")) else told


def paper_says(name: str) -> str:
    """Return the numbers of the paper's text on an experiment, if there are any."""
    quotes = QUOTED.get(name, [])
    if not quotes:
        return "No number in the text."
    told = "; ".join(f"{q['quantity']}: {q['value']} ({q['where']})" for q in quotes)
    return f"{told[0].upper()}{told[1:]}."


def shows(result: Result) -> str:
    """Return one or two sentences of what a model shows."""
    return _SHOWS[result.experiment](result)
