"""What a reader must know to judge the numbers of a report."""

from ffmem.experiments.result import Row

_ALWAYS = (
    "Notation: x is the input of a feed-forward layer, K its keys, V its values, m = f(x·Kᵀ) the"
    " coefficients; y = m·V + b is what the layer adds to the residual r, and o = r + y its"
    " output.",
    "top(h) is the token of largest logit. r and o are read by the model's own output head, its"
    " final norm included.",
    "Intervals are Wilson's at 95 %; they speak of memories or prefixes drawn at random, not of"
    " another corpus, another model or another seed. Boxes go from the first to the third quartile"
    " with the median between.",
    "A memory's head is its strongest trigger that has a next token. Baselines of agreement: the"
    " same next tokens permuted among a layer's memories, the most frequent token for all of them,"
    " and the trigger's last token in place of the next.",
    "Section 5's prefixes are drawn one per sentence unless the settings say otherwise, so short"
    " prefixes are more frequent than in running text.",
    "Sentences are read on their own, as in the paper: no memory sees text before its sentence.",
    "The paper's model reads whole words of WikiText-103; a subword model's next token may be a"
    " piece of a word, and shares of agreement and of stop words shift for that reason alone.",
    "No number was read off a figure of the paper: where its text has none, there is none here.",
)
_PROJECTIONS = {
    "folded": "Parts of the residual stream (values v and the output y) are read “folded”: with the"
    " gain of the final norm, without its denominator and bias. The paper's model has no final"
    " norm.",
    "raw": "Parts of the residual stream (values v and the output y) are read “raw”: by the output"
    " embedding alone, without the final norm. The paper's model has none.",
}
_GATED = (
    "The model is gated: m = f(g·x)·(u·x) has either sign, and a sign means nothing by itself."
    " Triggers are kept for m > 0 and m < 0, a value is read for the sign of its coefficient, and"
    " the memory's head is the one of larger |m|. Active is an open gate, g·x > 0, where one"
    " definition is needed; the paper's m > 0 stands beside it."
)
_UNGATED = (
    "The model is ungated: only coefficients m > 0 trigger, and active means m > 0. Where f lets"
    " small negative coefficients through, they count as inactive, but not for the effect."
)


def limits(settings: Row) -> list[str]:
    """Return the definitions and limits that belong to a model."""
    projection = _PROJECTIONS.get(str(settings.get("projection")))
    gated = _GATED if settings.get("gated") else _UNGATED
    return [*_ALWAYS[:2], *([projection] if projection else []), gated, *_ALWAYS[2:]]
