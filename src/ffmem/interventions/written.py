"""What `ffmem write` reports: a fact that was written into a memory, and what else changed."""

from dataclasses import dataclass, field
from typing import Any

from ffmem.indexing.memory import visible, visible_token
from ffmem.interventions.results import TableResult, Target
from ffmem.interventions.side_effects import PromptChange, SideEffects
from ffmem.text import format_number, format_share, pluralize


@dataclass(frozen=True)
class Activity:
    """What a memory did before, on the corpus of the index."""

    active_share: float
    contribution: float
    """Mean of |m| · ‖v‖ over the sampled prefixes."""
    relative: float
    """The same, relative to the median memory of its bank."""
    is_idle: bool

    def __str__(self) -> str:
        return (
            f"active on {format_share(self.active_share)} of prefixes, contribution"
            f" {format_number(self.relative)} × the median's"
        )


@dataclass(frozen=True)
class Trial:
    """A memory that the fact was tried in."""

    cell: str
    layer: int
    strength: float | None
    """|m| · ‖v‖ at the prompt, relative to the residual stream; None if no strength was enough."""
    kl: float | None
    """How much other text changes, in nats per token."""


@dataclass(frozen=True)
class TextChange:
    """What a new memory changes, the fact's own or one of the control."""

    cell: str
    kl: float
    """KL(before ‖ after) on corpus text, in nats per token."""
    top1_changed: float
    """Share of positions of that text whose most probable token changed."""
    holds: bool
    """Whether it makes the prompt's next token the written one."""
    neighbours_changed: float | None
    """Share of neighboring prompts whose most probable token changed; None without any."""


@dataclass(frozen=True, repr=False)
class WriteResult(TableResult):
    """A fact in a memory, on disk as an ordinary checkpoint."""

    folder: str
    model: str
    prompt: str
    tokens: list[str]
    """Tokens of the prompt, as displayed."""
    target: Target
    """The written token, and its probability before."""
    goal: str
    """What the strength was solved for."""
    cell: str
    layer: int
    activity: Activity | None
    """What the memory did before; None without an index."""
    coefficient: float
    """m at the prompt's last token."""
    strength: float
    """|m| · ‖v‖ there, relative to the norm of the residual stream."""
    value_top: list[str]
    """The tokens that m · v promotes most."""
    trials: list[Trial]
    written: PromptChange
    """The prompt itself."""
    paraphrases: list[PromptChange]
    neighbours: list[PromptChange]
    change: TextChange
    control: list[TextChange]
    """The same value with random keys of equal norm, in other idle memories."""
    side_effects: SideEffects | None = None
    """Side effects on the corpus; None if not measured."""
    hash_before: str = ""
    hash_after: str = ""
    notes: list[str] = field(default_factory=list)

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Return where the fact is; the prompts; and what else changed."""
        token = visible_token(self.target.token)
        above = [
            f"{self.folder}: {self.model} with {token} written into {self.cell}"
            f"{'' if self.activity is None else f' (before: {self.activity})'}.",
            f"At the prompt m = {format_number(self.coefficient)}, and the memory adds"
            f" {format_share(self.strength)} of the residual stream's norm: {self.goal}."
            f" It promotes {' '.join(map(visible_token, self.value_top))}.",
        ]
        if len(self.trials) > 1:
            tried = ", ".join(
                f"{one.cell} {'failed' if one.kl is None else f'KL {format_number(one.kl, 2)}'}"
                for one in self.trials
            )
            above.append(f"Tried {tried}.")
        rows = [["", "prompt", "predicted", "now", f"p({token})", "now"]]
        for what, changes in (
            ("fact", [self.written]),
            ("paraphrase", self.paraphrases),
            ("neighbour", self.neighbours),
        ):
            rows += [[what, *_columns(one)] for one in changes]
        return above, rows, [*self._summary(), *self.notes]

    def _summary(self) -> list[str]:
        lines = []
        if self.paraphrases:
            hold = sum(one.holds for one in self.paraphrases)
            lines.append(f"Holds on {hold} of {pluralize(len(self.paraphrases), 'paraphrases')}.")
        if self.neighbours:
            changed = sum(one.changed for one in self.neighbours)
            lines.append(
                f"Changes the prediction of {changed} of"
                f" {pluralize(len(self.neighbours), 'neighboring prompts')}."
            )
        lines.append(f"On corpus text: {_format_change(self.change)}.")
        if self.control:
            n = len(self.control)
            kl = sum(one.kl for one in self.control) / n
            moved = sum(one.top1_changed for one in self.control) / n
            hold = sum(one.holds for one in self.control)
            lines.append(
                f"Random keys in {pluralize(n, 'other memories')}: KL {format_number(kl, 2)} nats"
                f" per token, top-1 token changed at {format_share(moved)}; {hold} of {n} hold."
            )
        if self.side_effects is not None:
            lines += ["", *self.side_effects.to_markdown().rstrip().split("\n"), ""]
        return lines


def _columns(one: PromptChange) -> list[Any]:
    text = visible(one.prompt)
    return [
        text if len(text) <= 60 else f"…{text[-60:]}",
        visible_token(one.before),
        visible_token(one.after),
        format_number(one.probability_before, 2),
        format_number(one.probability_after, 2),
    ]


def _format_change(change: TextChange) -> str:
    return (
        f"KL {format_number(change.kl, 2)} nats per token, top-1 token changed at"
        f" {format_share(change.top1_changed)}"
    )
