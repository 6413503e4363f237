"""How a sentence starts: the token in front of it, chosen by measured loss.

Without a start token the first position of many models is an attention sink, whose coefficients
dwarf all others and would fill trigger lists with first words; with the wrong one, perplexity
doubles. `auto` takes what the tokenizer itself puts in front; if it puts nothing, the candidates
(none, BOS, EOS, document separators) are compared by the mean loss over t₁ … tₙ₋₁ of some
sentences, and the lowest is taken.
"""

import math
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import torch

from ffmem.errors import FfmemError, ModelError
from ffmem.indexing.chunks import batches
from ffmem.indexing.manifest import PerplexityRecord, StartRecord
from ffmem.models.memories import Memories

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "<s>", "</s>", "<bos>")
"""Tokens that stand between documents in common pretraining data, where a vocabulary has them."""

TOKENS = 2048
"""How many tokens the losses are measured on, about."""

_BATCH_TOKENS = 512  # of logits: half a gigabyte at a vocabulary of 262,144


class Chosen(NamedTuple):
    """The start token, and the perplexity of the sample it was measured on."""

    start: StartRecord
    perplexity: PerplexityRecord | None


def choose(memories: Memories, sentences: Iterable[list[int]], asked: str) -> Chosen:
    """Return the start token for `--start asked`, and the perplexity with it on `sentences`."""
    sample = _spread([ids for ids in sentences if len(ids) > 1])
    tokenizer = memories.tokenizer
    if asked != "auto":
        candidates, reason = [_requested_token(memories, asked)], "asked for"
    elif tokenizer.own_start is not None:
        candidates, reason = [tokenizer.own_start], "the tokenizer's own"
    elif not sample:
        candidates, reason = [tokenizer.bos], "no sentence of two tokens to measure on"
    else:
        candidates, reason = _candidates(memories), "lowest loss"
    losses = {candidate: _loss(memories, sample, candidate) for candidate in candidates if sample}
    best = min(losses, key=lambda candidate: losses[candidate]) if losses else candidates[0]
    shown = tokenizer.token_texts(memories.vocabulary)
    names = {candidate: "none" if candidate is None else shown[candidate] for candidate in losses}
    record = StartRecord(
        asked=asked,
        token=None if best is None else shown[best],
        id=best,
        chosen_by=reason,
        losses={names[candidate]: round(loss, 4) for candidate, loss in losses.items()},
    )
    if not losses:
        return Chosen(record, None)
    n_tokens = sum(len(ids) - 1 for ids in sample)
    perplexity = round(math.exp(min(losses[best], 100.0)), 2)
    return Chosen(
        record, PerplexityRecord(per_token=perplexity, sentences=len(sample), tokens=n_tokens)
    )


def _requested_token(memories: Memories, asked: str) -> int | None:
    tokenizer = memories.tokenizer
    if asked == "none":
        return None
    if asked.startswith("id:") and asked[3:].isdecimal():
        if len(asked) < 20 and int(asked[3:]) < memories.vocabulary:
            return int(asked[3:])
        raise FfmemError(f"--start {asked}: the model has ids 0 to {memories.vocabulary - 1}.")
    named = {"bos": tokenizer.bos, "eos": tokenizer.eos}
    if asked not in named:
        return tokenizer.id_of(asked)
    if named[asked] is None:
        raise FfmemError(
            f"--start {asked}: the tokenizer has no such token."
            " Use --start auto, none, or the token itself."
        )
    return named[asked]


def _candidates(memories: Memories) -> list[int | None]:
    """Return no token, BOS, EOS and the separators that the vocabulary has, each once."""
    tokenizer = memories.tokenizer
    found: list[int | None] = [None, tokenizer.bos, tokenizer.eos]
    for token in SEPARATORS:
        try:
            found.append(tokenizer.id_of(token))
        except ModelError:
            continue  # this vocabulary does not have it
    known = (id for id in found if id is None or id < memories.vocabulary)
    return list(dict.fromkeys(known))


def _spread(sentences: list[list[int]]) -> list[list[int]]:
    """Return sentences evenly spaced over the given ones, about `TOKENS` tokens in all."""
    total = sum(map(len, sentences))
    return list(islice(sentences, 0, None, max(1, total // TOKENS)))


@torch.inference_mode()
def _loss(memories: Memories, sentences: list[list[int]], start: int | None) -> float:
    """Return the mean loss per token over t₁ … tₙ₋₁.

    A few sentences on which the model overflows do not count; the pass reports them.
    """
    total, n, n_finite = 0.0, 0, 0
    for batch in batches(enumerate(sentences), start, _BATCH_TOKENS):
        logits = memories.logits(batch.tokens)
        first = 0 if start is None else 1
        for row, length in enumerate(batch.lengths):
            predicted = logits[row, first : first + length - 1].float()
            target = batch.tokens[row, first + 1 : first + length].to(predicted.device)
            loss = float(torch.nn.functional.cross_entropy(predicted, target, reduction="sum"))
            if math.isfinite(loss):
                total, n, n_finite = total + loss, n + length - 1, n_finite + 1
    if 2 * n_finite < len(sentences):
        raise ModelError(
            "The model's loss on the corpus is not finite: it overflows on ordinary text."
            " Use --dtype float32, or check its weights."
        )
    return total / n
