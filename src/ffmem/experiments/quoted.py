"""The numbers that may be quoted as the paper's: those of its text, none read off a figure."""

_SAMPLE = {
    "quantity": "sample of Section 5",
    "value": "4,000 validation prefixes",
    "where": "Sec. 5.1",
}


def _quote(quantity: str, value: str, where: str) -> dict[str, str]:
    return {"quantity": quantity, "value": value, "where": where}


QUOTED: dict[str, list[dict[str, str]]] = {
    "patterns": [
        _quote(
            "keys analysed by people",
            "160 (10 per layer), top 25 prefixes, a pattern occurs in 3 or more, one annotator",
            "Sec. 3.1",
        ),
        _quote("patterns per key", "3.6", "Sec. 3.2"),
        _quote("prefixes covered by a pattern", "65–80 %", "Fig. 2"),
        _quote("layers of shallow and of semantic patterns", "1–9 and 10–16", "Sec. 3.2"),
    ],
    "token-removal": [
        _quote("sample", "1,600 keys (100 per layer) × their top 50 prefixes", "Sec. 3.2, Fig. 3")
    ],
    "agreement": [
        _quote("agreement rate, layers 1–10", "about 0 %", "Sec. 4, Fig. 4"),
        _quote("agreement rate, layers 11–16", "up to 3.5 %", "Sec. 4, Fig. 4"),
        _quote("agreement of a random token", "0.0004 %", "Sec. 4"),
    ],
    "predictive-values": [
        _quote("of the 100 most predictive values, in layers 11–16", "97", "Sec. 4"),
        _quote("of them, with an agreeing trigger among 50", "46", "Sec. 4"),
        _quote("precision of six examples", "68, 16, 4, 92, 84, 4 %", "Table 2"),
    ],
    "active-memories": [
        _SAMPLE,
        _quote("active memories", "10–50 % of 4,096, with a drop towards layer 10", "Fig. 7"),
    ],
    "zero-agreement": [
        _SAMPLE,
        _quote(
            "examples in which no memory agrees with the layer",
            "at least ~68 % in every layer",
            "Fig. 8",
        ),
    ],
    "stop-words": [
        _quote("agreeing cases whose target is a stop word", "60 %", "Sec. 5.1"),
        _quote("agreeing cases with a prefix of less than 5 tokens", "43 %", "Sec. 5.1"),
    ],
    "residual-prediction": [
        _SAMPLE,
        _quote(
            "predictions that stand in the residual of the bottom few layers",
            "about a third",
            "Fig. 9",
        ),
        _quote("fast growth", "from layer 10 on", "Fig. 9"),
    ],
    "residual-probability": [_SAMPLE],
    "prediction-cases": [_SAMPLE],
    "last-layer-composition": [
        _quote("of 100 compositions in the last layer, to a distant word", "66", "Sec. 5.2"),
        _quote("to a related word", "34", "Sec. 5.2"),
    ],
}
"""By experiment; what is not here was printed in figures only, and is nobody's to quote."""
