"""What a new memory changes: the next tokens of prompts, and predictions on text."""

from collections.abc import Sequence
from itertools import islice

import torch

from ffmem.indexing.chunks import batches
from ffmem.interventions.checkpoint import BATCH_TOKENS, compare_predictions
from ffmem.interventions.written import PromptChange
from ffmem.models.memories import Memories

DRIFT_TOKENS = 1024
"""Tokens of text on which models are compared."""
N_NEIGHBOURS = 20
"""Neighboring prompts to take from text."""

Question = tuple[str, list[int]]
"""A prompt as text and as ids, after the start token."""


def first_sentences(sentences: Sequence[list[int]], n_tokens: int) -> list[tuple[int, list[int]]]:
    """Return the first sentences, of so many tokens in all."""
    found, total = [], 0
    for number, ids in enumerate(sentences):
        if len(ids) > 1 and total < n_tokens:
            found.append((number, ids))
            total += len(ids)
    return found


def same_endings(
    memories: Memories, sentences: Sequence[list[int]], ids: list[int], start: int | None
) -> list[Question]:
    """Return prefixes of sentences that end as a prompt does, those with most tokens in common."""
    prompt = ids if start is None else ids[1:]
    found: list[tuple[int, int, int]] = []
    for number, sentence in enumerate(sentences):
        for place, id in enumerate(sentence):
            if id != prompt[-1]:
                continue
            same = 1
            most = min(place + 1, len(prompt))
            while same < most and sentence[place - same] == prompt[-1 - same]:
                same += 1
            if same < len(prompt):  # else it has the prompt itself
                found.append((-same, number, place))
    before = [] if start is None else [start]
    prefixes = [sentences[number][: place + 1] for _, number, place in sorted(found)]
    unique = {tuple(prefix): None for prefix in prefixes}
    chosen = [list(prefix) for prefix in islice(unique, N_NEIGHBOURS)]
    return [(memories.tokenizer.decode(prefix), [*before, *prefix]) for prefix in chosen]


def measure_drift(
    memories: Memories, other: Memories, sentences: Sequence[list[int]], start: int | None
) -> tuple[float, float]:
    """Return the mean KL, and the share of positions with another top token, of another model."""
    text = first_sentences(sentences, DRIFT_TOKENS)
    found = compare_predictions(memories, other, text, start)
    return float(found.kl.mean()), float((found.old_top != found.new_top).mean())


@torch.inference_mode()
def predict(
    memories: Memories, questions: Sequence[Question], token: int
) -> list[tuple[int, float]]:
    """Return the top token after each prompt, and the probability of one token."""
    found: dict[int, tuple[int, float]] = {}
    prompts = [(number, ids) for number, (_, ids) in enumerate(questions)]
    for batch in batches(prompts, None, BATCH_TOKENS):
        logits = memories.logits(batch.tokens)
        for row, (number, length) in enumerate(zip(batch.offsets, batch.lengths, strict=True)):
            chances = logits[row, length - 1].float().softmax(dim=-1)
            found[number] = int(chances.argmax()), float(chances[token])
    return [found[number] for number in range(len(questions))]


def compare(
    memories: Memories,
    questions: Sequence[Question],
    before: Sequence[tuple[int, float]],
    after: Sequence[tuple[int, float]],
    token: int,
) -> list[PromptChange]:
    """Return what became of each prompt's next token."""
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    return [
        PromptChange(text, shown[old], shown[new], p, q, new == token, new != old)
        for (text, _), (old, p), (new, q) in zip(questions, before, after, strict=True)
    ]
