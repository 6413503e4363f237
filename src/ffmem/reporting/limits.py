"""What a reader must know to judge the numbers of a report."""

from ffmem.experiments.kinds import LAMBDA, PERSISTENT, SOFTMAX
from ffmem.experiments.result import Row

_NOTATION = (
    "Notation: x is the input of a feed-forward layer, K its keys, V its values, m = f(x·Kᵀ) the"
    " coefficients; y = m·V + b is what the layer adds to the residual r, and o = r + y its"
    " output."
)
_NOTATIONS = {
    SOFTMAX: "Notation: x is the input of a softmax memory, K its keys, V its values,"
    " m = softmax(x·Kᵀ) the coefficients; y = m·V is what the layer adds to the residual r, and"
    " o = r + y its output.",
    PERSISTENT: "Notation: the layer is attention with persistent memory. Each head has one softmax"
    " over the tokens and its own slots; x is its input, a slot's score is x·k, the coefficient m"
    " is the attention on the slot, and v what the slot adds at m = 1. y = m·V is what all slots"
    " add, r the residual with what was read from the tokens, and o = r + y. r is not free of the"
    " slots: what they take of the attention is missing there.",
    LAMBDA: "Notation: memories are the static keys of lambda layers, one for each head and"
    " distance. x is the layer's input, the coefficient m is x·k where a token lies at that"
    " distance in front, and 0 elsewhere. It multiplies a vector of that token, another one in"
    " every text: there is no static value v, and whatever reads values is left out. y is what the"
    " static keys add, r all else, the feed-forward layer's output too, and o = r + y.",
}
_AGREEMENT = (
    "A memory's head is its strongest trigger that has a next token. Baselines of agreement: the"
    " same next tokens permuted among a layer's memories, the most frequent token for all of them,"
    " and the trigger's last token in place of the next."
)
_ALWAYS = (
    "top(h) is the token of largest logit. r and o are read by the model's own output head, its"
    " final norm included.",
    "Intervals are Wilson's at 95 %; they speak of memories or prefixes drawn at random, not of"
    " another corpus, another model or another seed. Boxes go from the first to the third quartile"
    " with the median between.",
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


_SIGNS = {
    SOFTMAX: "Every weight of a softmax is above 0: all memories are active on every prefix, unless"
    " a weight rounds to 0, and a trigger is a prefix of large weight.",
    LAMBDA: "Coefficients are linear in x and of either sign; only those above 0 trigger, though"
    " those below do as much.",
}
_SIGNS[PERSISTENT] = _SIGNS[SOFTMAX]


def limits(settings: Row) -> list[str]:
    """Return the definitions and limits that belong to a model."""
    kind = str(settings.get("kind"))
    projection = _PROJECTIONS.get(str(settings.get("projection")))
    signs = _SIGNS.get(kind, _GATED if settings.get("gated") else _UNGATED)
    notation = _NOTATIONS.get(kind, _NOTATION)
    agreement = None if kind == LAMBDA else _AGREEMENT
    found = (notation, _ALWAYS[0], projection, signs, _ALWAYS[1], agreement, *_ALWAYS[2:])
    return [line for line in found if line is not None]
