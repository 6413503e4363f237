"""What an edit does to text that it was not made for.

    perplexity = exp(mean of −log p(t_p | prefix of length p)),    1 ≤ p < n
    KL = mean of ∑ p_before · (log p_before − log p_after)

Both models predict every prefix of a corpus that has a next token. Only a batch of logits is held
at a time.
"""

import math
from collections import Counter
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
from ffmem.text import format_number, format_share, pluralize

N_TOKENS = 10
"""Tokens gained and lost to name."""
N_SENTENCES = 5
"""Sentences to quote."""
EXCERPT = 100
"""Characters of a quoted sentence."""
BATCH_TOKENS = 512
"""Tokens whose logits are held, twice: a gigabyte at a vocabulary of 262,144."""


class Sentences(NamedTuple):
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

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON has them."""
        return asdict(self)

    def to_markdown(self) -> str:
        """Return the numbers as Markdown."""
        start = "none" if self.start is None else _code(self.start)
        cut = f" {pluralize(self.cut, 'sentences')} cut at the context." if self.cut else ""
        short = f" {self.too_short:,} of one token left out." if self.too_short else ""
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


def read_sentences(memories: Memories, corpus: Corpus) -> Sentences:
    """Return the sentences of a corpus, cut at the model's context."""
    longest = None if memories.context is None else memories.context - 1  # for a start token
    found, cut = [], 0
    for sentence in check_token_ids(corpus.sentences(memories.tokenizer), memories.vocabulary):
        ids = sentence.ids[:longest]
        cut += len(ids) < len(sentence.ids)
        text = memories.tokenizer.decode(ids) if sentence.text is None else sentence.text
        line = " ".join(text.split())
        found.append((line if len(line) <= EXCERPT else f"{line[:EXCERPT]}…", ids))
    return Sentences(corpus, found, cut)


@torch.inference_mode()
def measure_side_effects(
    before: Memories, after: Memories, text: Sentences, start: int | None, progress: Progress
) -> SideEffects:
    """Return what changed between two models of one vocabulary on a text."""
    sentences = [(place, ids) for place, (_, ids) in enumerate(text.sentences) if len(ids) > 1]
    if not sentences:
        raise CorpusError(
            f"No sentence of {text.corpus.source!r} has two tokens: there is nothing to predict."
            " Use another corpus, or --no-report."
        )
    first = 0 if start is None else 1
    counts = _Counts()
    n_tokens = sum(len(ids) - 1 for _, ids in sentences)
    with progress.bar("Side effects", n_tokens, "tokens") as step:
        for batch in batches(sentences, start, BATCH_TOKENS):
            logits = before.logits(batch.tokens), after.logits(batch.tokens)
            for row, length in enumerate(batch.lengths):
                rows = slice(first, first + length - 1)
                target = batch.tokens[row, first + 1 : first + length]
                counts.add(batch.offsets[row], logits[0][row, rows], logits[1][row, rows], target)
                step(length - 1)
    shown = before.tokenizer.token_texts(before.vocabulary)
    losses = [math.fsum(row[side] for row in counts.losses.values()) / counts.n for side in (0, 1)]
    return SideEffects(
        corpus=text.corpus.describe(),
        start=None if start is None else shown[start],
        sentences=len(sentences),
        too_short=len(text.sentences) - len(sentences),
        cut=text.cut,
        tokens=counts.n,
        dtype=str(before.dtype).removeprefix("torch."),
        loss_before=_finite(losses[0]),
        loss_after=_finite(losses[1]),
        perplexity_before=math.exp(losses[0]) if losses[0] < 700 else None,
        perplexity_after=math.exp(losses[1]) if losses[1] < 700 else None,
        accuracy_before=counts.hits[0] / counts.n,
        accuracy_after=counts.hits[1] / counts.n,
        top1_changed=counts.changed / counts.n,
        kl=_finite(counts.divergence / counts.n),
        gained=_most_common(counts.gained, shown),
        lost=_most_common(counts.lost, shown),
        most_changed=_most_changed(counts, text),
    )


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
        # The difference of two −inf is NaN; a probability of 0 adds nothing.
        terms = torch.where(logs[0].isneginf(), 0.0, logs[0].exp() * (logs[0] - logs[1]))
        self.divergence += float(terms.sum(dim=-1).cpu().double().sum())
        self.losses[sentence] = (losses[0], losses[1], len(target))
        self.n += len(target)
        for side in (0, 1):
            self.hits[side] += int((tops[side] == target).sum())
        moved = tops[0] != tops[1]
        self.changed += int(moved.sum())
        self.lost.update(tops[0][moved].tolist())
        self.gained.update(tops[1][moved].tolist())


def _most_common(counter: Counter[int], shown: list[str]) -> list[TokenCount]:
    """Return the most frequent tokens, ties to the lower id."""
    ordered = sorted(counter.items(), key=lambda item: (-item[1], item[0]))[:N_TOKENS]
    return [TokenCount(shown[id], id, n) for id, n in ordered]


def _most_changed(counts: _Counts, text: Sentences) -> list[ChangedSentence]:
    """Return the sentences whose mean loss changed most, ties to the earlier."""
    means = {place: (b / n, a / n) for place, (b, a, n) in counts.losses.items()}
    moved = {place: abs(a - b) for place, (b, a) in means.items() if math.isfinite(a - b)}
    places = sorted(moved, key=lambda place: (-moved[place], place))[:N_SENTENCES]
    return [ChangedSentence(text.sentences[p][0], *means[p]) for p in places if moved[p]]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else format_number(value, digits)


def _code(text: str) -> str:
    """Return a text between backticks that Markdown keeps as it is."""
    fence, space = ("``", " ") if "`" in text else ("`", "")
    return f"{fence}{space}{text}{space}{fence}".replace("\n", "⏎")
