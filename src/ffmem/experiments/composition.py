"""What the last layer makes of two candidates when it takes neither (Section 5.2).

    composition: top(o) ≠ top(r) and top(o) ≠ top(y)

The paper's authors judged by eye whether top(o) is related to top(r). Here a fixed rule stands in
for them, and says so: related, if the two tokens' embeddings have a larger cosine than 95 % of
random pairs of tokens that the last layer predicts. So of unrelated words 5 % would pass.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy import ndarray
from torch import Tensor
from torch.nn import functional

from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.evaluation import places
from ffmem.experiments.prompt_sample import Example, PromptSample
from ffmem.experiments.result import Result, Row
from ffmem.indexing.sentences import StoredSentence, split_text
from ffmem.models.memories import Memories
from ffmem.stats import share

CASES = 100
PAIRS = 10_000
LEVEL = 0.95
FIRST = 5
"""Tokens shown of each of the three vectors."""

RULE = (
    "cosine of the two tokens' embeddings above that of 95 % of random pairs of different tokens"
    " that the last layer predicts on the sample; the paper's authors judged by eye"
)


class Case(NamedTuple):
    """One composition: the number of its prefix, and the first tokens of each vector."""

    number: int
    residual: list[int]
    ff: list[int]
    output: list[int]


def last_layer_composition(context: ExperimentContext) -> Result:
    """Return some compositions of the last layer, for people to judge, and a rule's judgement."""
    predictions = context.metrics.predictions
    assert predictions is not None
    layer = context.memories.layout.memory_layers[-1]
    compositions = np.flatnonzero(predictions.cases()["composition"][:, layer])
    rng = np.random.default_rng(context.seed)
    chosen = np.sort(rng.permutation(compositions)[:CASES])
    vectors = embeddings(context.memories)
    threshold = _threshold(vectors, predictions.output_top[:, layer], rng)
    prefixes = list(context.prompt_sample.prefixes())
    rows = [
        _row(context, prefixes[case.number], case, vectors, threshold)
        for case in first_tokens(
            context.memories, context.prompt_sample, chosen, context.index.manifest.start.id
        )
    ]
    related = [row["related"] for row in rows if row["related"] is not None]
    also = {
        "related_share": share(sum(related), len(related)),
        "n": len(rows),
        "compositions": len(compositions),
        "of": len(context.prompt_sample.lengths),
        "threshold": threshold,
        "chance": round(1 - LEVEL, 6),
        "rule": RULE,
    }
    if layer != context.memories.n_layers - 1:
        also["layer"] = layer  # the last one with memories
    settings = context.settings(sample=context.sample_settings())
    return Result("last-layer-composition", "Sec. 5.2", settings, rows, also)


def embeddings(memories: Memories) -> Float[Tensor, "vocab width"]:
    """Return the vectors of all tokens by which they are compared: the output embedding.

    An adaptive softmax has none; there, the vectors by which words enter the model.
    """
    if not memories.head.adaptive:
        return memories.head.embedding.float().cpu()
    words = torch.arange(memories.vocabulary)[None]
    with torch.inference_mode():
        vectors: Tensor = memories.model.get_input_embeddings()(words.to(memories.device))
    return vectors[0].float().cpu()


def cosines(
    vectors: Float[Tensor, "vocab width"],
    left: Int64[ndarray, " pair"],
    right: Int64[ndarray, " pair"],
) -> Float[Tensor, " pair"]:
    """Return the cosine of each pair of tokens."""
    first, second = (vectors[torch.from_numpy(side)] for side in (left, right))
    return functional.cosine_similarity(first, second)


def _threshold(
    vectors: Float[Tensor, "vocab width"],
    tokens: Int64[ndarray, " example"],
    rng: np.random.Generator,
) -> float | None:
    """Return the cosine that 95 % of random pairs of different predicted tokens stay below."""
    pairs = rng.choice(tokens, (2, PAIRS))
    left, right = pairs[:, pairs[0] != pairs[1]]
    if not len(left):
        return None
    return float(np.quantile(cosines(vectors, left, right).numpy(), LEVEL))


@torch.inference_mode()
def first_tokens(
    memories: Memories, sample: PromptSample, chosen: Int64[ndarray, " case"], start: int | None
) -> list[Case]:
    """Return the first tokens of the last layer's three vectors, on some prefixes of the sample."""
    wanted = set(chosen.tolist())
    found = []
    head, first = memories.head, min(FIRST, memories.vocabulary)
    for some in places(sample, start, memories):
        rows = [row for row, number in enumerate(some.examples.tolist()) if number in wanted]
        if not rows:
            continue
        # Only the sentences with a chosen prefix run again.
        at = some.at[rows]
        kept, sentence = at[:, 0].unique(return_inverse=True)
        traces = memories.trace(some.tokens[kept], torch.stack([sentence, at[:, 1]], dim=1))
        last = traces[memories.layout.memory_layers[-1]]
        readings = (
            head.logits(last.residual),
            head.folded(last.ff_output),
            head.logits(last.layer_output),
        )
        tops = [logits.topk(first, dim=1).indices.tolist() for logits in readings]
        numbers = some.examples[rows].tolist()
        found += [Case(*case) for case in zip(numbers, *tops, strict=True)]
    return sorted(found)


def _row(
    context: ExperimentContext,
    prefix: tuple[Example, int],
    case: Case,
    vectors: Float[Tensor, "vocab width"],
    threshold: float | None,
) -> Row:
    shown = context.index.token
    example, length = prefix
    text, ids, starts, ends = example.sentence
    sentence = StoredSentence(example.number, 0, 0, text, ids, starts, ends)
    pair = (np.array([case.residual[0]]), np.array([case.output[0]]))
    similarity = float(cosines(vectors, *pair))
    tokens: dict[str, Any] = {
        "residual_top": shown(case.residual[0]),
        "ff_top": shown(case.ff[0]),
        "output_top": shown(case.output[0]),
        "residual_top5": [shown(id) for id in case.residual],
        "ff_top5": [shown(id) for id in case.ff],
        "output_top5": [shown(id) for id in case.output],
    }
    return {
        "sentence": example.number,
        "length": length,
        "prefix": split_text(sentence, length, shown)[0],
        "next_token": shown(ids[length]) if length < len(ids) else None,
        **tokens,
        "similarity": similarity,
        "related": None if threshold is None else similarity > threshold,
    }
