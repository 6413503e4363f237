"""The paper's claims beside a model's numbers, each judged by a rule that stands beside it.

A rule is mechanical: it reads rows and compares numbers, so that nobody's wish decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ffmem.experiments.quoted import QUOTED
from ffmem.experiments.result import Result
from ffmem.reporting import judges, pattern_judges
from ffmem.reporting.judges import Judged
from ffmem.reporting.numbers import MISSING

HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold"
INCOMPARABLE = "cannot be compared"
VERDICTS = (HOLDS, PARTLY, FAILS, INCOMPARABLE)
NO_NUMBER = "no number in the text"


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, and whether a model bears it out."""

    claim: str
    experiment: str
    paper: str
    """The number in the paper's text, with its place."""
    model: str
    verdict: str
    rule: str
    """How the verdict follows from the rows."""


@dataclass(frozen=True)
class _Rule:
    experiment: str
    claim: str
    quoted: tuple[int, ...]
    """Places in QUOTED of the numbers that belong to the claim."""
    rule: str
    judge: Callable[[Result], Judged | None]


def claims(results: Sequence[Result]) -> list[Claim]:
    """Return the claims that these results speak of, in the order of the paper."""
    by_name = {result.experiment: result for result in results}
    return [
        _judged(rule, by_name[rule.experiment]) for rule in _RULES if rule.experiment in by_name
    ]


def _judged(rule: _Rule, result: Result) -> Claim:
    judged = rule.judge(result)
    if judged is None:
        model, verdict = MISSING, INCOMPARABLE
    else:
        model = judged.model
        verdict = HOLDS if judged.holds else PARTLY if judged.partly else FAILS
        verdict = verdict if judged.comparable else INCOMPARABLE
    return Claim(
        rule.claim, rule.experiment, _quoted(rule), model, verdict, f"Holds if {rule.rule}."
    )


def _quoted(rule: _Rule) -> str:
    if not rule.quoted:
        return NO_NUMBER
    quotes = [QUOTED[rule.experiment][place] for place in rule.quoted]
    values = [
        f"{quoted['quantity']}: {quoted['value']}" if len(quotes) > 1 else quoted["value"]
        for quoted in quotes
    ]
    return f"{'; '.join(values)} ({quotes[0]['where']})"


_RULES = (
    _Rule(
        "patterns",
        "Lower layers catch shallow patterns, upper layers semantic ones",
        (3,),
        "semantic patterns outnumber shallow ones in at most 20 % of the lower layers and at least"
        " 80 % of the upper (the paper's 10–16); in part if in a larger share of the upper than of"
        " the lower",
        pattern_judges.patterns,
    ),
    _Rule(
        "patterns",
        "The share of semantic triggers grows through the layers",
        (),
        "Spearman's correlation of layer and semantic share is 0.5 or higher; in part if positive",
        pattern_judges.rising_semantic,
    ),
    _Rule(
        "patterns",
        "Every key has a pattern that people see",
        (),
        "all memories have one; in part if nine in ten (labels of programs are not the paper's"
        " protocol)",
        pattern_judges.every_key,
    ),
    _Rule(
        "patterns",
        "A key has several patterns",
        (1,),
        "the mean is within 1 of the paper's; in part if above 1",
        pattern_judges.several_patterns,
    ),
    _Rule(
        "patterns",
        "Most of a key's triggers show a pattern",
        (2,),
        "the share of all layers together lies within the paper's range; in part if above 50 %",
        pattern_judges.covered,
    ),
    _Rule(
        "token-removal",
        "The last token matters most to a key, less so in upper layers",
        (),
        "removing the last token lowers the median most in at least 80 % of the layers, and less on"
        " average in the upper layers (the paper's 10–16); in part if one of the two",
        judges.last_token,
    ),
    _Rule(
        "agreement",
        "Values predict what follows their keys' triggers in upper layers, not in lower ones",
        (0, 1),
        "the mean rate of the upper layers (the paper's 11–16) is at least twice that of the lower"
        " ones, and the highest layer's interval lies above the permuted baseline; in part if one"
        " of the two",
        judges.agreement,
    ),
    _Rule(
        "agreement",
        "This agreement is far above chance",
        (1, 2),
        "the highest layer's interval lies above always guessing the most frequent token; in part"
        " if above a random token",
        judges.above_chance,
    ),
    _Rule(
        "next-token-rank",
        "The next token's rank improves through the layers",
        (),
        "Spearman's correlation of layer and median rank is −0.5 or lower; in part if negative",
        judges.falling_rank,
    ),
    _Rule(
        "max-probability",
        "The larger a value's maximum, the more often it agrees",
        (),
        "the area under the curve is 0.7 or more; in part if above 0.5",
        judges.detected,
    ),
    _Rule(
        "predictive-values",
        "The most predictive values lie in the upper layers",
        (0,),
        "the share in the upper layers is at most 10 points below the paper's; in part if its"
        " interval lies above an even spread over layers",
        judges.predictive_layers,
    ),
    _Rule(
        "predictive-values",
        "Many of them have a trigger that they predict",
        (1,),
        "the share is at most 10 points below the paper's, and its interval lies above the share of"
        " values drawn at random; in part if only the latter",
        judges.predictive_triggers,
    ),
    _Rule(
        "active-memories",
        "A tenth to a half of a layer's memories are active",
        (1,),
        "the median lies between 10 and 50 % in every layer; in part if in half of them (gated"
        " models: active is an open gate)",
        judges.active,
    ),
    _Rule(
        "active-memories",
        "Fewest memories are active where semantic patterns take over",
        (1,),
        "the layer with the lowest median lies within an eighth of the depth of the paper's layer"
        " 10; in part if in the middle half",
        judges.dip,
    ),
    _Rule(
        "zero-agreement",
        "In most examples no single memory predicts what the layer does",
        (1,),
        "the share reaches 68 % in every layer (all memories against top(y)); in part if in half"
        " of them",
        judges.zero,
    ),
    _Rule(
        "stop-words",
        "Where a memory does agree, the target is mostly a stop word",
        (0,),
        "the share is at most 10 points below the paper's and its interval above the share of all"
        " cases; in part if only the latter",
        judges.stop_word,
    ),
    _Rule(
        "stop-words",
        "… and the prefix often very short",
        (1,),
        "the share is at most 10 points below the paper's and its interval above the share of all"
        " cases; in part if only the latter",
        judges.short_prefix,
    ),
    _Rule(
        "residual-prediction",
        "A third of the predictions stand in the bottom few layers",
        (1,),
        "a quarter or more stand in some layer of the bottom quarter; in part if an eighth",
        judges.early,
    ),
    _Rule(
        "residual-prediction",
        "From the paper's layer 10 on their number grows fast",
        (2,),
        "the mean step per layer from there on is at least 1.5 times that before; in part if"
        " it is larger and a growth",
        judges.late_growth,
    ),
    _Rule(
        "residual-probability",
        "The residual grows surer of the prediction through the layers",
        (),
        "Spearman's correlation of layer and median probability is 0.5 or higher; in part if"
        " positive",
        judges.rising_probability,
    ),
    _Rule(
        "prediction-cases",
        "Layers mostly keep the residual's prediction",
        (),
        "residual and agreement together exceed 50 % in every layer; in part if in half of them",
        judges.residual_wins,
    ),
    _Rule(
        "prediction-cases",
        "A changed prediction is rarely the feed-forward part's own, mostly a composition",
        (),
        "composition is the majority of changes in every layer; in part if in half of them",
        judges.composes,
    ),
    _Rule(
        "last-layer-composition",
        "Most compositions of the last layer go to a distant word",
        (0, 1),
        "the interval of the distant share lies above 50 %; in part if the share does (the paper's"
        " words were judged by people, these by the cosine of embeddings)",
        judges.distant,
    ),
)
