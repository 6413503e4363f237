"""What an edit changes besides: two models of one vocabulary, compared on text and on prompts.

Both models predict every prefix of a corpus that has a next token:

    perplexity = exp(mean of −log p(t_p | prefix of length p)),    1 ≤ p < n
    KL = mean of ∑ p_before · (log p_before − log p_after)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import check_token_ids
from ffmem.errors import CorpusError, FfmemError
from ffmem.indexing.chunks import batches
from ffmem.indexing.memory import visible
from ffmem.indexing.start import choose_start
from ffmem.interventions.forward import LoadedModel
from ffmem.models.memories import Memories
from ffmem.progress import Progress, Step
from ffmem.text import format_number, format_share, pluralize

N_TOKENS = 10
"""Tokens gained and lost to name."""
N_SENTENCES = 5
"""Sentences to quote."""
EXCERPT = 100
"""Characters of a quoted sentence."""
BATCH_TOKENS = 512
"""Tokens whose logits are held, twice: a gigabyte at a vocabulary of 262,144."""
DRIFT_TOKENS = 1024
"""Tokens of text on which models are compared."""
N_NEIGHBOURS = 20
"""Neighboring prompts to take from text."""

PromptIds = tuple[str, list[int]]
"""A prompt as text and as ids, after the start token."""


def side_effects_corpus(corpus: Corpus | str | Path | None) -> Corpus | None:
    """Return the corpus to measure side effects on; raise if there is none, or no text in it."""
    if isinstance(corpus, str | Path):
        corpus = Corpus(str(corpus), limit=200)
    if corpus is None:
        return None
    try:
        corpus.check()
    except FfmemError as error:
        raise CorpusError(
            f"{error} This corpus is for measuring side effects. You can pass another one, such as"
            " mini-wiki:valid, or none: --no-report."
        ) from None
    return corpus


class CorpusText(NamedTuple):
    """The sentences of a corpus as the model reads them."""

    corpus: Corpus
    sentences: list[tuple[str, list[int]]]
    """An excerpt of the text, and the ids."""
    cut: int
    """Sentences that were longer than the context and were cut there."""


@dataclass(frozen=True)
class ChangedSentence:
    """A sentence whose loss changed much; losses are means per token."""

    text: str
    loss_before: float
    loss_after: float


@dataclass(frozen=True)
class TokenCount:
    """At how many positions a token became, or ceased to be, the most probable one."""

    token: str
    id: int
    positions: int


@dataclass(frozen=True)
class SideEffects:
    """A model before and after an edit, on a corpus. A number that is not finite is None."""

    corpus: dict[str, Any]
    start: str | None
    sentences: int
    """Sentences with a token to predict."""
    too_short: int
    """Sentences of one token, which have none."""
    cut: int
    tokens: int
    """Predicted tokens."""
    dtype: str
    loss_before: float | None
    loss_after: float | None
    perplexity_before: float | None
    perplexity_after: float | None
    accuracy_before: float
    """Share of tokens that were the most probable one."""
    accuracy_after: float
    top1_changed: float
    """Share of positions whose most probable token changed."""
    kl: float | None
    gained: list[TokenCount]
    lost: list[TokenCount]
    most_changed: list[ChangedSentence]

    def to_markdown(self) -> str:
        """Return the numbers as Markdown."""
        start = "none" if self.start is None else _code(self.start)
        cut = f" {pluralize(self.cut, 'sentences')} truncated to the context." if self.cut else ""
        short = f" {self.too_short:,} of one token skipped." if self.too_short else ""
        lines = [
            f"{pluralize(self.tokens, 'tokens')} in {pluralize(self.sentences, 'sentences')} of"
            f" {self.corpus['source']}, in {self.dtype}; start token {start}.{cut}{short}",
            "",
            "| | before | after |",
            "|---|---|---|",
            f"| perplexity | {_number(self.perplexity_before)} |"
            f" {_number(self.perplexity_after)} |",
            f"| top-1 accuracy | {format_share(self.accuracy_before)} |"
            f" {format_share(self.accuracy_after)} |",
            "",
            f"Top-1 token changed at {format_share(self.top1_changed)} of positions."
            f" KL(before ‖ after): {_number(self.kl, 2)} nats per token.",
        ]
        for title, counts in (("more", self.gained), ("fewer", self.lost)):
            named = ", ".join(f"{_code(one.token)} {one.positions:,}" for one in counts)
            lines += ["", f"Top-1 token at {title} positions than before: {named or 'none'}."]
        if self.most_changed:
            lines += ["", "Sentences whose loss changed most (nats per token):", ""]
            lines += [
                f"- {one.loss_before:.3f} → {one.loss_after:.3f}: {_code(one.text)}"
                for one in self.most_changed
            ]
        return "\n".join(lines) + "\n"


def measure_on_corpus(
    loaded: LoadedModel, other: Memories, corpus: Corpus | None, progress: Progress
) -> SideEffects | None:
    """Measure both models on a corpus, after the index's start token or the best one."""
    if corpus is None:
        progress.say("Side effects were not measured.")
        return None
    memories = loaded.memories
    text = read_sentences(memories, corpus)
    if loaded.index is None and loaded.requested_start is None:
        start = choose_start(memories, [ids for _, ids in text.sentences], "auto")[0].id
    else:
        start = loaded.start
    progress.say(f"Measuring side effects on {pluralize(len(text.sentences), 'sentences')}.")
    return measure_side_effects(memories, other, text, start, progress)


def read_sentences(memories: Memories, corpus: Corpus) -> CorpusText:
    """Return the sentences of a corpus, cut at the model's context."""
    longest = None if memories.context is None else memories.context - 1  # for a start token
    found, cut = [], 0
    for sentence in check_token_ids(corpus.sentences(memories.tokenizer), memories.vocabulary):
        ids = sentence.ids[:longest]
        cut += len(ids) < len(sentence.ids)
        text = memories.tokenizer.decode(ids) if sentence.text is None else sentence.text
        line = " ".join(text.split())
        found.append((line if len(line) <= EXCERPT else f"{line[:EXCERPT]}…", ids))
    return CorpusText(corpus, found, cut)


def measure_side_effects(
    before: Memories, after: Memories, text: CorpusText, start: int | None, progress: Progress
) -> SideEffects:
    """Return what changed between two models of one vocabulary on a text."""
    sentences = [(place, ids) for place, (_, ids) in enumerate(text.sentences) if len(ids) > 1]
    if not sentences:
        raise CorpusError(
            f"No sentence of {text.corpus.source!r} has two tokens: there is nothing to predict."
            " Use another corpus, or --no-report."
        )
    n_tokens = sum(len(ids) - 1 for _, ids in sentences)
    with progress.bar("Side effects", n_tokens, "tokens") as step:
        found = compare_predictions(before, after, sentences, start, step)
    sentence, targets, old_top, new_top, old_loss, new_loss, kl = found
    differs, losses = old_top != new_top, (float(old_loss.mean()), float(new_loss.mean()))
    shown = before.tokenizer.token_texts(before.vocabulary)
    return SideEffects(
        corpus=text.corpus.describe(),
        start=None if start is None else shown[start],
        sentences=len(sentences),
        too_short=len(text.sentences) - len(sentences),
        cut=text.cut,
        tokens=n_tokens,
        dtype=str(before.dtype).removeprefix("torch."),
        loss_before=_finite(losses[0]),
        loss_after=_finite(losses[1]),
        perplexity_before=math.exp(losses[0]) if losses[0] < 700 else None,
        perplexity_after=math.exp(losses[1]) if losses[1] < 700 else None,
        accuracy_before=float((old_top == targets).mean()),
        accuracy_after=float((new_top == targets).mean()),
        top1_changed=float(differs.mean()),
        kl=_finite(float(kl.mean())),
        gained=_most_common(new_top[differs], shown),
        lost=_most_common(old_top[differs], shown),
        most_changed=_most_changed(text, sentence, old_loss, new_loss),
    )


class PredictionChanges(NamedTuple):
    """Every position of some sentences that has a next token, in two models."""

    sentence: Int[ndarray, " position"]
    target: Int[ndarray, " position"]
    old_top: Int[ndarray, " position"]
    new_top: Int[ndarray, " position"]
    old_loss: Float[ndarray, " position"]
    new_loss: Float[ndarray, " position"]
    kl: Float[ndarray, " position"]


@torch.inference_mode()
def compare_predictions(
    before: Memories,
    after: Memories,
    sentences: Sequence[tuple[int, list[int]]],
    start: int | None,
    step: Step = lambda n: None,
) -> PredictionChanges:
    """Return what two models predict in sentences, given as (number, ids)."""
    first, found = 0 if start is None else 1, []
    for batch in batches(sentences, start, BATCH_TOKENS):
        logits = before.logits(batch.tokens), after.logits(batch.tokens)
        for row, length in enumerate(batch.lengths):
            rows = slice(first, first + length - 1)
            target = batch.tokens[row, first + 1 : first + length]
            both = _compare_logits(logits[0][row, rows], logits[1][row, rows], target)
            found.append((np.full(length - 1, batch.offsets[row]), target.numpy(), *both))
            step(length - 1)
    return PredictionChanges(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _compare_logits(
    before: Float[Tensor, "position vocab"],
    after: Float[Tensor, "position vocab"],
    target: Int[Tensor, " position"],
) -> tuple[ndarray, ndarray, ndarray, ndarray, ndarray]:
    """Return, at each position, the top token before and after, both losses, and KL."""
    logs = [logits.float().log_softmax(dim=-1) for logits in (before, after)]
    tops = [log.argmax(dim=-1).cpu().numpy() for log in logs]
    where = target.to(logs[0].device)[:, None]
    losses = [-log.gather(1, where)[:, 0].cpu().double().numpy() for log in logs]
    # The difference of two −inf is NaN; a probability of 0 adds nothing.
    terms = torch.where(logs[0].isneginf(), 0.0, logs[0].exp() * (logs[0] - logs[1]))
    return tops[0], tops[1], losses[0], losses[1], terms.sum(dim=-1).cpu().double().numpy()


def _most_common(ids: Int[ndarray, " position"], shown: list[str]) -> list[TokenCount]:
    """Return the most frequent tokens, ties to the lower id."""
    counted, counts = np.unique(ids, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:N_TOKENS]
    return [TokenCount(shown[counted[i]], int(counted[i]), int(counts[i])) for i in order]


def _most_changed(
    text: CorpusText,
    sentence: Int[ndarray, " position"],
    before: Float[ndarray, " position"],
    after: Float[ndarray, " position"],
) -> list[ChangedSentence]:
    """Return the sentences whose mean loss changed most, ties to the earlier."""
    n = np.bincount(sentence).clip(1)
    old, new = (np.bincount(sentence, losses) / n for losses in (before, after))
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        change = np.nan_to_num(np.abs(new - old), nan=0.0, posinf=0.0)
    order = np.argsort(-change, kind="stable")[:N_SENTENCES].tolist()
    return [
        ChangedSentence(text.sentences[i][0], float(old[i]), float(new[i]))
        for i in order
        if change[i]
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else format_number(value, digits)


def _code(text: str) -> str:
    """Return a text between backticks, with signs for control characters."""
    fence, space = ("``", " ") if "`" in text else ("`", "")
    return f"{fence}{space}{visible(text)}{space}{fence}"


# Parts of a text, and prompts


@dataclass(frozen=True)
class PromptChange:
    """The next token of a prompt, before and after."""

    prompt: str
    before: str
    """The most probable token."""
    after: str
    probability_before: float
    """Probability of the written token."""
    probability_after: float
    holds: bool
    """Whether the written token is the most probable one after."""
    changed: bool
    """Whether the most probable token changed."""


def first_sentences(sentences: Sequence[list[int]], n_tokens: int) -> list[tuple[int, list[int]]]:
    """Return the first sentences, up to `n_tokens` tokens in total."""
    found, total = [], 0
    for number, ids in enumerate(sentences):
        if len(ids) > 1 and total < n_tokens:
            found.append((number, ids))
            total += len(ids)
    return found


def same_endings(
    memories: Memories, sentences: Sequence[list[int]], ids: list[int], start: int | None
) -> list[PromptIds]:
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
    memories: Memories, questions: Sequence[PromptIds], token: int
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
    questions: Sequence[PromptIds],
    before: Sequence[tuple[int, float]],
    after: Sequence[tuple[int, float]],
    token: int,
) -> list[PromptChange]:
    """Return the next token of each prompt, before and after."""
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    return [
        PromptChange(text, shown[old], shown[new], p, q, new == token, new != old)
        for (text, _), (old, p), (new, q) in zip(questions, before, after, strict=True)
    ]
