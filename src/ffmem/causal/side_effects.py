"""What an edit does to text that it was not made for.

    perplexity = exp(mean of −log p(t_p | prefix of length p)),    1 ≤ p < n
    KL = mean of ∑ p_before · (log p_before − log p_after)

Every prefix of a corpus with a next token is predicted by the model before and after. A batch of
logits of each is held at a time, never a corpus of them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import check_token_ids
from ffmem.errors import CorpusError
from ffmem.indexing.chunks import batches
from ffmem.models.memories import Memories
from ffmem.progress import Progress
from ffmem.text import pluralize

TOP = 10
"""Tokens gained and lost that are named."""

SENTENCES = 5
"""Sentences that are quoted."""

_EXCERPT = 100  # characters of a quoted sentence
_BATCH_TOKENS = 512  # of logits, twice: a gigabyte at a vocabulary of 262,144


class Text(NamedTuple):
    """The sentences of a corpus as the model reads them."""

    corpus: Corpus
    sentences: list[tuple[str, list[int]]]
    cut: int
    """How many were longer than the context, and were cut there."""


@dataclass(frozen=True)
class Quoted:
    """A sentence whose loss changed much."""

    text: str
    loss_before: float
    """Mean loss per token."""
    loss_after: float


@dataclass(frozen=True)
class TokenCount:
    """How often a token became, or ceased to be, the most probable one."""

    token: str
    id: int
    positions: int


@dataclass(frozen=True)
class SideEffects:
    """A model before and after, on a corpus."""

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
    """Null where it is not finite."""
    loss_after: float | None
    perplexity_before: float | None
    perplexity_after: float | None
    accuracy_before: float
    """Share of tokens that were the most probable one."""
    accuracy_after: float
    top1_changed: float
    """Share of positions whose most probable token is another one."""
    kl: float | None
    gained: list[TokenCount]
    lost: list[TokenCount]
    most_changed: list[Quoted]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON has them."""
        return asdict(self)

    def to_markdown(self) -> str:
        """Return the figures as a page of text."""
        start = "none" if self.start is None else _code(self.start)
        before, after = _number(self.perplexity_before), _number(self.perplexity_after)
        lines = [
            f"{pluralize(self.tokens, 'tokens')} in {pluralize(self.sentences, 'sentences')} of"
            f" {self.corpus['source']},"
            f" in {self.dtype}; start token {start}."
            + (f" {pluralize(self.cut, 'sentences')} cut at the context." if self.cut else "")
            + (f" {self.too_short:,} of one token were left out." if self.too_short else ""),
            "",
            "| | before | after |",
            "|---|---|---|",
            f"| perplexity | {before} | {after} |",
            f"| top-1 accuracy | {self.accuracy_before:.2%} | {self.accuracy_after:.2%} |",
            "",
            f"Another top-1 token: {self.top1_changed:.2%} of positions."
            f" KL(before ‖ after): {_number(self.kl, 3)} nats per token.",
        ]
        for title, counts in (("gained", self.gained), ("lost", self.lost)):
            named = ", ".join(f"{_code(one.token)} {one.positions:,}" for one in counts)
            lines += ["", f"Top-1 tokens {title} (positions): {named or 'none'}."]
        if self.most_changed:
            lines += ["", "Sentences whose loss changed most (nats per token):", ""]
            lines += [
                f"- {one.loss_before:.3f} → {one.loss_after:.3f}: {_code(one.text)}"
                for one in self.most_changed
            ]
        return "\n".join(lines) + "\n"


def read_text(memories: Memories, corpus: Corpus) -> Text:
    """Return the sentences of a corpus, cut at the model's context."""
    most = None if memories.context is None else memories.context - 1  # a start token has its place
    found, cut = [], 0
    for sentence in check_token_ids(corpus.sentences(memories.tokenizer), memories.vocabulary):
        ids = sentence.ids[:most]
        cut += len(ids) < len(sentence.ids)
        shown = memories.tokenizer.decode(ids) if sentence.text is None else sentence.text
        found.append((_excerpt(shown), ids))
    return Text(corpus, found, cut)


@torch.inference_mode()
def measure(
    before: Memories, after: Memories, text: Text, start: int | None, progress: Progress
) -> SideEffects:
    """Return what changed between two models of one vocabulary on a text."""
    sentences = [(place, ids) for place, (_, ids) in enumerate(text.sentences) if len(ids) > 1]
    if not sentences:
        raise CorpusError(
            f"No sentence of {text.corpus.source!r} has two tokens: there is nothing to predict."
            " Give another corpus, or --no-report."
        )
    first = 0 if start is None else 1
    counts = _Counts()
    n_tokens = sum(len(ids) - 1 for _, ids in sentences)
    with progress.bar("Side effects", n_tokens, "tokens") as step:
        for batch in batches(sentences, start, _BATCH_TOKENS):
            both = before.logits(batch.tokens), after.logits(batch.tokens)
            for row, length in enumerate(batch.lengths):
                rows = slice(first, first + length - 1)
                target = batch.tokens[row, first + 1 : first + length]
                counts.add(batch.offsets[row], both[0][row, rows], both[1][row, rows], target)
                step(length - 1)
    return _result(before, text, start, len(sentences), counts)


class _Counts:
    """What is counted sentence by sentence."""

    def __init__(self) -> None:
        self.n = self.changed = 0
        self.hits = [0, 0]
        self.divergence = 0.0
        self.losses: dict[int, tuple[float, float, int]] = {}
        """Of each sentence: summed loss before and after, tokens."""
        self.gained: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()

    def add(
        self,
        sentence: int,
        before: Float[Tensor, "position vocab"],
        after: Float[Tensor, "position vocab"],
        target: Int[Tensor, " position"],
    ) -> None:
        """Count one sentence."""
        logs = [logits.float().log_softmax(dim=-1) for logits in (before, after)]
        tops = [log.argmax(dim=-1).cpu() for log in logs]
        where = target.to(logs[0].device)[:, None]
        losses = [-float(log.gather(1, where).cpu().double().sum()) for log in logs]
        # Where both are −inf their difference is no number; a probability of 0 adds nothing.
        terms = torch.where(logs[0].isneginf(), 0.0, logs[0].exp() * (logs[0] - logs[1]))
        self.divergence += float(terms.sum(dim=-1).cpu().double().sum())
        self.losses[sentence] = (losses[0], losses[1], len(target))
        self.n += len(target)
        self.hits = [
            hit + int((top == target).sum()) for hit, top in zip(self.hits, tops, strict=True)
        ]
        moved = tops[0] != tops[1]
        self.changed += int(moved.sum())
        self.lost.update(tops[0][moved].tolist())
        self.gained.update(tops[1][moved].tolist())


def _result(
    memories: Memories, text: Text, start: int | None, n_sentences: int, counts: _Counts
) -> SideEffects:
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    losses = [math.fsum(row[side] for row in counts.losses.values()) / counts.n for side in (0, 1)]
    return SideEffects(
        corpus=text.corpus.describe(),
        start=None if start is None else shown[start],
        sentences=n_sentences,
        too_short=len(text.sentences) - n_sentences,
        cut=text.cut,
        tokens=counts.n,
        dtype=str(memories.dtype).removeprefix("torch."),
        loss_before=_finite(losses[0]),
        loss_after=_finite(losses[1]),
        perplexity_before=_perplexity(losses[0]),
        perplexity_after=_perplexity(losses[1]),
        accuracy_before=counts.hits[0] / counts.n,
        accuracy_after=counts.hits[1] / counts.n,
        top1_changed=counts.changed / counts.n,
        kl=_finite(counts.divergence / counts.n),
        gained=_most(counts.gained, shown),
        lost=_most(counts.lost, shown),
        most_changed=_most_changed(counts, text),
    )


def _most(counter: Counter[int], shown: Sequence[str]) -> list[TokenCount]:
    """Return the most frequent tokens, ties to the lower id."""
    ordered = sorted(counter.items(), key=lambda item: (-item[1], item[0]))[:TOP]
    return [TokenCount(shown[id], id, n) for id, n in ordered]


def _most_changed(counts: _Counts, text: Text) -> list[Quoted]:
    """Return the sentences whose mean loss changed most, ties to the earlier."""
    means = {place: (b / n, a / n) for place, (b, a, n) in counts.losses.items()}
    moved = {place: abs(a - b) for place, (b, a) in means.items() if math.isfinite(a - b)}
    places = sorted(moved, key=lambda place: (-moved[place], place))[:SENTENCES]
    return [Quoted(text.sentences[place][0], *means[place]) for place in places if moved[place]]


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else line[:_EXCERPT] + "…"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _perplexity(loss: float) -> float | None:
    return math.exp(loss) if loss < 700 else None


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "not finite"
    return f"{value:,.{digits}f}" if value >= 10**-digits or value == 0 else f"{value:.1e}"


def _code(text: str) -> str:
    """Return a text between backticks that Markdown keeps as it is."""
    fence = "``" if "`" in text else "`"
    inner = f" {text} " if "`" in text else text
    return f"{fence}{inner}{fence}".replace("\n", "⏎")
