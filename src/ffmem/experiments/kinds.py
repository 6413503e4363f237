"""Kinds of memory in which numbers mean something else than in a feed-forward layer.

softmax      m = softmax(x · Kᵀ):                                m > 0,  Σ m = 1
persistent   m = attention on slots, in one softmax with tokens: m > 0,  Σ m < 1 in each head
lambda       m = x · k where a token lies so far in front, else 0; no static value
"""

SOFTMAX, PERSISTENT, LAMBDA = "softmax", "persistent", "lambda"
"""As an index's manifest names them."""

_ALL_POSITIVE = (
    "Coefficients are weights of a softmax, all of them positive: m > 0 holds of every memory,"
    " whatever the model does, unless a weight rounds to 0."
)
_ALL_VOTE = (
    "Coefficients are weights of a softmax, all of them positive: every memory is active, and as"
    " such votes for top(m·v) in place of top(v)."
)
_SLOTS_ADD = (
    "Here y is what the slots add, and r holds what the same attention read from the tokens; there"
    " is no feed-forward layer."
)
_KEYS_ADD = (
    "Here y is what the static keys of the lambda layer add, and r holds all else, the feed-forward"
    " layer's output too."
)

NOTES: dict[str, dict[str, str]] = {
    SOFTMAX: {
        "token-removal": "A coefficient is a weight of a softmax over the layer's memories: it also"
        " changes where only the scores of others do. raw_mean and raw_median are of the memory's"
        " own score x·k.",
        "active-memories": _ALL_POSITIVE,
        "zero-agreement": _ALL_VOTE,
        "neural-memory": "This memory is a neural memory itself, FF(x) = MN(x): a cosine of 1 and a"
        " distance of 0 are its definition, not a finding.",
    },
    PERSISTENT: {
        "token-removal": "A coefficient is the attention on a slot, in one softmax with every token"
        " of the context: it depends on all of them, and what a token no longer takes is shared"
        " among the others and the slots. raw_mean and raw_median are of the slot's own score x·k.",
        "active-memories": _ALL_POSITIVE,
        "zero-agreement": _ALL_VOTE,
        "residual-prediction": _SLOTS_ADD,
        "residual-probability": _SLOTS_ADD,
        "prediction-cases": _SLOTS_ADD,
        "last-layer-composition": _SLOTS_ADD,
        "neural-memory": "FF(x) is what the slots add. MN is the softmax over the slots of each"
        " head alone, without the tokens; entropy, largest weight and effective number are means"
        " over heads. slot_mass is the part of the attention that slots get beside the tokens.",
    },
    LAMBDA: {
        "token-removal": "A coefficient is x·k where a token lies at the key's distance, and 0"
        " where none does: a trigger that becomes too short loses it wholly (−100 %). raw_mean and"
        " raw_median are of x·k, whether there is a token or not.",
        "active-memories": "Coefficients are linear in x: a negative one does as much as a positive"
        " one, and all are 0 where no token lies so far in front. The definition “effect” is left"
        " out: it needs static values, which memories of a lambda layer do not have.",
        "residual-prediction": _KEYS_ADD,
        "residual-probability": _KEYS_ADD,
        "prediction-cases": _KEYS_ADD,
        "last-layer-composition": _KEYS_ADD,
    },
}
"""What a reader must know of an experiment's numbers, by kind of memory and experiment."""


def note_on(experiment: str, kind: str | None) -> str | None:
    """Return what must be known of an experiment on memories of a kind, if anything."""
    return NOTES.get(kind or "", {}).get(experiment)
