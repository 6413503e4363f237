"""The start token in front of every sentence.

Without one, the first position of many models is an attention sink, whose coefficients dwarf all
others and would fill trigger lists with first words; with the wrong one, perplexity doubles. `auto`
takes the token that the tokenizer itself adds. If it adds none, `auto` takes the candidate (none,
BOS, EOS, document separators) with the lowest mean loss over t₁ … tₙ₋₁ of some sentences.
"""

import math
from collections.abc import Iterable
from itertools import islice

import torch

from ffmem.errors import FfmemError, ModelError
from ffmem.indexing.chunks import batches
from ffmem.indexing.manifest import PerplexityRecord, StartRecord
from ffmem.models.memories import Memories

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "<s>", "</s>", "<bos>")
"""Tokens that separate documents in common pretraining data; a vocabulary has some of them."""

FIRST_TOKENS = 65_536
"""Losses are measured on sentences among about so many tokens at the beginning of the corpus."""

LOSS_TOKENS = 2048
"""About how many tokens to measure losses on."""

_BATCH_TOKENS = 512  # of logits: half a gigabyte at a vocabulary of 262,144


def choose_start(
    memories: Memories, sentences: Iterable[list[int]], requested: str
) -> tuple[StartRecord, PerplexityRecord | None]:
    """Return the start token for `--start requested`, and the perplexity with it on `sentences`.

    The perplexity is None if no sentence has two tokens.
    """
    sample = _spread_sample([ids for ids in sentences if len(ids) > 1])
    tokenizer = memories.tokenizer
    if requested != "auto":
        candidates, reason = [_requested_token(memories, requested)], "as requested"
    elif tokenizer.own_start is not None:
        candidates, reason = [tokenizer.own_start], "the tokenizer's own"
    elif not sample:
        candidates, reason = [tokenizer.bos], "no sentence has two tokens to measure on"
    else:
        candidates, reason = _candidates(memories), "lowest loss"
    losses = {candidate: _loss(memories, sample, candidate) for candidate in candidates if sample}
    best = min(losses, key=lambda candidate: losses[candidate]) if losses else candidates[0]
    shown = tokenizer.token_texts(memories.vocabulary)
    names = {candidate: "none" if candidate is None else shown[candidate] for candidate in losses}
    record = StartRecord(
        requested=requested,
        token=None if best is None else shown[best],
        id=best,
        chosen_by=reason,
        losses={names[candidate]: round(loss, 4) for candidate, loss in losses.items()},
    )
    if not losses:
        return record, None
    n_tokens = sum(len(ids) - 1 for ids in sample)
    perplexity = round(math.exp(min(losses[best], 100.0)), 2)
    return record, PerplexityRecord(per_token=perplexity, sentences=len(sample), tokens=n_tokens)


def _requested_token(memories: Memories, requested: str) -> int | None:
    tokenizer = memories.tokenizer
    if requested == "none":
        return None
    if requested.startswith("id:") and requested[3:].isdecimal():
        if len(requested) < 20 and int(requested[3:]) < memories.vocabulary:
            return int(requested[3:])
        raise FfmemError(
            f"--start {requested}: there is no such token; the model has ids 0 to"
            f" {memories.vocabulary - 1}."
        )
    named = {"bos": tokenizer.bos, "eos": tokenizer.eos}
    if requested not in named:
        return tokenizer.id_of(requested)
    if named[requested] is None:
        raise FfmemError(
            f"--start {requested}: the tokenizer has no such token."
            " Use --start auto, none, or the token itself."
        )
    return named[requested]


def _candidates(memories: Memories) -> list[int | None]:
    """Return no token, BOS, EOS and the separators that the vocabulary has, without repeats."""
    tokenizer = memories.tokenizer
    ids: list[int | None] = [None, tokenizer.bos, tokenizer.eos]
    for token in SEPARATORS:
        try:
            ids.append(tokenizer.id_of(token))
        except ModelError:
            continue  # the vocabulary does not have it
    known = (id for id in ids if id is None or id < memories.vocabulary)
    return list(dict.fromkeys(known))


def _spread_sample(sentences: list[list[int]]) -> list[list[int]]:
    """Return sentences evenly spaced over the given ones, about `LOSS_TOKENS` tokens in all."""
    total = sum(map(len, sentences))
    return list(islice(sentences, 0, None, max(1, total // LOSS_TOKENS)))


@torch.inference_mode()
def _loss(memories: Memories, sentences: list[list[int]], start: int | None) -> float:
    """Return the mean loss per token over t₁ … tₙ₋₁.

    Leaves out a few sentences on which the model overflows; the pass reports them.
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
            "The model's loss on the corpus is not finite: the model overflows on ordinary text."
            " Use --dtype float32, or check its weights."
        )
    return total / n
