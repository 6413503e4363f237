"""Definitions and limits that a reader of a report needs, by kind of memory."""

from ffmem.experiments.rows import Row

SUBJECTS = {
    "softmax": "Its softmax memories",
    "persistent": "The persistent slots of its attention",
    "lambda": "The static keys of its lambda layers",
}
"""What of a model is read as memories, where it is not the feed-forward layers."""

KINDS = {
    "softmax": "softmax",
    "persistent": "persistent slots in attention",
    "lambda": "static keys of lambda layers, without static values",
}

_NOTATION = (
    "Notation: x is the input of a feed-forward layer, K its keys, V its values, m = f(x·Kᵀ) the"
    " coefficients; y = m·V + b is what the layer adds to the residual r, and o = r + y its"
    " output."
)
_NOTATIONS = {
    "softmax": "Notation: x is the input of a softmax memory, K its keys, V its values,"
    " m = softmax(x·Kᵀ) the coefficients; y = m·V is what the layer adds to the residual r, and"
    " o = r + y its output.",
    "persistent": "Notation: the layer is attention with persistent memory. Each head has one"
    " softmax over the tokens and its own slots; x is its input, a slot's score is x·k, the"
    " coefficient m is the attention on the slot, and v what the slot adds at m = 1. y = m·V is"
    " what all slots add, r the residual plus what was read from the tokens, and o = r + y. r"
    " still depends on the slots, because they take attention away from the tokens.",
    "lambda": "Notation: memories are the static keys of lambda layers, one for each head and"
    " distance. x is the layer's input, the coefficient m is x·k where a token is that far back,"
    " and 0 elsewhere. It multiplies a vector of that token, which differs between texts: there"
    " is no static value v, so experiments on values are skipped. y is what the static keys add,"
    " r everything else, including the feed-forward layer's output, and o = r + y.",
}
_EXPERTS = (
    "The model is a mixture of experts: where a layer has several, y = Σ w·(m·V + b) over the"
    " experts that a prefix is routed to, with the router's weights w. The coefficient of a memory"
    " is w·m, and 0 on prefixes that do not reach its expert; such prefixes count in every share"
    " unless stated otherwise, and never trigger it. Names include the expert: L5E12N345 is memory"
    " 345 of expert 12, L5SN7 one of the shared expert."
)
_AGREEMENT = (
    "A memory's top trigger is its strongest trigger that has a next token. Baselines of agreement:"
    " the same next tokens permuted among a layer's memories, the most frequent token for all of"
    " them, and the trigger's last token in place of the next."
)
_PROJECTIONS = {
    "folded": "Parts of the residual stream (values v and the output y) are read “folded”: with the"
    " gain of the final norm, without its denominator and bias. The paper's model has no final"
    " norm.",
    "raw": "Parts of the residual stream (values v and the output y) are read “raw”: by the output"
    " embedding alone, without the final norm. The paper's model has none.",
}
_GATED = (
    "The model is gated: m = f(g·x)·(u·x) can have either sign, and a sign means nothing by"
    " itself. Triggers are stored for m > 0 and m < 0, a value is read with the sign of its"
    " coefficient, and the top trigger is the one with the larger |m|. Where one definition of"
    " active is needed, it is an open gate, g·x > 0; the paper's m > 0 is shown next to it."
)
_UNGATED = (
    "The model is ungated: only coefficients m > 0 trigger, and active means m > 0. Small negative"
    " coefficients that f lets through count as inactive, except in the effect."
)
_ALL_POSITIVE = (
    "Every softmax weight is above 0: all memories are active on every prefix, unless a weight"
    " rounds to 0, and a trigger is a prefix with a large weight."
)
_SIGNS = {
    "softmax": _ALL_POSITIVE,
    "persistent": _ALL_POSITIVE,
    "lambda": "Coefficients are linear in x and can have either sign; only positive ones trigger,"
    " although negative ones have as much effect.",
}


def kind_definitions(kind: str, settings: Row) -> list[str]:
    """Return what a coefficient and its sign mean in memories of a kind."""
    experts = [_EXPERTS] if settings.get("experts") else []
    is_known = kind in _SIGNS or settings.get("gated") is not None
    return [*experts, _signs(kind, settings)] if is_known else experts


def _signs(kind: str, settings: Row) -> str:
    return _SIGNS.get(kind, _GATED if settings["gated"] else _UNGATED)


def definitions(kind: str, settings: Row) -> list[str]:
    """Return the definitions and limits that belong to a model, by its kind of memory."""
    lines = [
        _NOTATIONS.get(kind, _NOTATION),
        _EXPERTS if settings.get("experts") else None,
        "top(h) is the token with the largest logit. r and o are read by the model's own output"
        " head, including its final norm.",
        _PROJECTIONS[settings["projection"]],
        _signs(kind, settings),
        "Intervals are 95 % Wilson intervals; they cover the random draw of memories or prefixes,"
        " not another corpus, model or seed. Boxes show the quartiles and the median.",
        "A verdict needs at least 30 cases, and one about depth at least 6 layers. Automatic"
        " labels are never compared with human ones.",
        None if kind == "lambda" else _AGREEMENT,
        "Section 5's prefixes are drawn one per sentence unless the settings say otherwise, so"
        " short prefixes are more frequent than in running text.",
        "Sentences are read in isolation, as in the paper: no memory sees what precedes them.",
        "The paper's model reads whole words of WikiText-103; a subword model's next token may be"
        " part of a word, which alone shifts the shares of agreement and stop words.",
        "No number is read off a figure of the paper: only numbers in its text are quoted.",
    ]
    return [line for line in lines if line is not None]
