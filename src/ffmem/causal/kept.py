"""An edit that is kept: a checkpoint, the patch that undoes it, and what else it changed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ffmem.causal.checkpoint import refuse_taken, save
from ffmem.causal.dictionary import NO_COUNTS, has_no_counts, tokens_of
from ffmem.causal.edits import Edits
from ffmem.causal.opened import Opened
from ffmem.causal.patch import NAME, Patch, Rewritten, applied, edited, undone
from ffmem.causal.rows import rows, rows_path
from ffmem.causal.side_effects import SideEffects, measure, read_text
from ffmem.corpus.corpus import Corpus
from ffmem.errors import FfmemError, ModelError, SelfCheckFailed
from ffmem.files import write_text
from ffmem.indexing.start import choose_start
from ffmem.models.memories import Memories
from ffmem.models.modules import get_module
from ffmem.networks.config import AdaptiveConfig
from ffmem.progress import Progress
from ffmem.text import pluralize

OURS = (
    "transformers loads it behind `import ffmem.networks.model`, which tells it the model's type."
)


class Request(NamedTuple):
    """What is to be done: edits to write, or a patch to apply or undo."""

    folder: Path
    edits: dict[str, Any]
    """Arguments of `Edits.of`, which may need an index."""
    patch: Patch | None
    undo: bool
    corpus: Corpus | None
    """Where side effects are measured; None: nowhere."""

    @classmethod
    def of(
        cls,
        folder: Path,
        edits: dict[str, Any],
        patch: str | Path | None,
        undo: str | Path | None,
        corpus: Corpus | None,
    ) -> "Request":
        """Return a request, refused here if it can be, before a model is loaded."""
        if sum((any(edits.values()), patch is not None, undo is not None)) != 1:
            raise FfmemError(
                "An edit needs memories to change: off, set, scale or mean; or a patch; or a patch"
                " to undo. Give one of the three."
            )
        refuse_taken(folder)
        if corpus is not None:
            corpus.check_exists()
        file = undo if patch is None else patch
        read = None if file is None else Patch.read(Path(file))
        return cls(folder, edits, read, undo is not None, corpus)

    @property
    def how(self) -> str:
        """What is done: edited, patched or undone."""
        return "edited" if self.patch is None else "undone" if self.undo else "patched"

    def carried_out(self, at: Opened) -> Rewritten:
        """Return the model with its weights rewritten."""
        if self.patch is not None:
            return (undone if self.undo else applied)(at.memories, self.patch)
        return edited(at.memories, Edits.of(**self.edits, index=at.index))


@dataclass(frozen=True)
class Kept:
    """An edited model on disk."""

    folder: Path
    how: str
    """edited, patched or undone."""
    model: str
    edits: Edits
    flag: str | None
    """The switch of the config that was turned, on for an edit, off to undo one."""
    before: str
    """SHA-256 of the weights."""
    after: str
    rounding: float
    notes: list[str]
    side_effects: SideEffects | None

    def to_dict(self) -> dict[str, Any]:
        """Return all as JSON has it."""
        return {
            "folder": str(self.folder),
            "how": self.how,
            "model": self.model,
            "edits": [edit.to_dict() for edit in self.edits],
            "config": {} if self.flag is None else {self.flag: self.how != "undone"},
            "hash_before": self.before,
            "hash_after": self.after,
            "rounding": self.rounding,
            "notes": self.notes,
            "side_effects": None if self.side_effects is None else self.side_effects.to_dict(),
        }

    def to_json(self) -> str:
        """Return all but the place as text, for the folder itself."""
        found = {key: value for key, value in self.to_dict().items() if key != "folder"}
        return json.dumps(found, ensure_ascii=False, indent=2, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """Return the side effects as a page of text."""
        assert self.side_effects is not None
        undone = " undone" if self.how == "undone" else ""
        notes = "".join(f"{note}\n\n" for note in self.notes)
        title = f"# Side effects of {self.edits}{undone}\n\n"
        return f"{title}{notes}{self.side_effects.to_markdown()}"

    def __str__(self) -> str:
        report = "" if self.side_effects is None else f"\n{self.side_effects.to_markdown()}"
        return f"{self.folder}: {self.model} with {self.edits}, {self.how}.{report}".rstrip()


def keep(at: Opened, request: Request, start: str | None, progress: Progress) -> Kept:
    """Write a model edited, patched or restored to a new folder."""
    memories = at.memories
    rewritten = request.carried_out(at)
    record = rewritten.patch.record
    hashes = [record.before, record.after]
    before, after = reversed(hashes) if request.undo else hashes
    # The self-check proves the paper's equations on what is to be saved, too.
    other = _checked(rewritten.model, memories, request, after)
    tokens = tokens_of(memories)
    notes = _notes(memories, request, rewritten)
    notes += [NO_COUNTS] if has_no_counts(tokens) else []
    for note in notes:
        progress.say(note)
    kept = Kept(
        request.folder,
        request.how,
        memories.source,
        rewritten.patch.edits,
        record.flag,
        before,
        after,
        rewritten.rounding,
        notes,
        _side_effects(at, other, request.corpus, start, progress),
    )

    def add(temporary: Path) -> None:
        if not request.undo:
            rewritten.patch.write(temporary / NAME)
        if kept.side_effects is not None:
            write_text(temporary / "side-effects.json", kept.to_json())
            write_text(temporary / "side-effects.md", kept.to_markdown())

    save(rewritten.model, tokens, request.folder, after, add)
    return kept


def _checked(model: PreTrainedModel, memories: Memories, request: Request, after: str) -> Memories:
    """Return the edited model, if the paper's equations still hold on it."""
    try:
        return Memories(model, memories.tokenizer, str(request.folder), None, after)
    except SelfCheckFailed as error:
        raise ModelError(
            "With this edit the model fails its self-check, as where numbers grow too large for its"
            f" dtype. Give smaller ones. ({str(error).partition(' ffmem will not')[0]})"
        ) from None


def _notes(memories: Memories, request: Request, rewritten: Rewritten) -> list[str]:
    """Return what a reader should know about the weights."""
    record, found = rewritten.patch.record, []
    if record.flag is not None:
        found.append(
            f"{record.flag} is switched off again in the config, and its biases are gone."
            if request.undo
            else f"{record.flag} is switched on in the config: the value maps had no bias. All"
            " other new biases are zero."
        )
    if memories.dtype not in (torch.float32, torch.float64) and rewritten.rounding:
        dtype = str(memories.dtype).removeprefix("torch.")
        found.append(
            f"The checkpoint is stored in {dtype}: rewritten numbers are rounded, by up to"
            f" {rewritten.rounding:.1e} of the largest of their tensor."
        )
    if request.patch is None:
        for edit in rewritten.patch.edits:
            written = get_module(memories.model, rows_path(memories.row, edit.cell.layer))
            if not rows(written)[edit.cell.memory].any():
                what = "value" if memories.has_values else "key"
                found.append(
                    f"The {what} of {edit.cell} is all zeros already: {edit} does nothing."
                )
    if memories.family == AdaptiveConfig.model_type:
        found.append(OURS)
    if record.before == record.after:
        found.append("The weights do not change.")
    return found


def _side_effects(
    at: Opened, other: Memories, corpus: Corpus | None, start: str | None, progress: Progress
) -> SideEffects | None:
    """Measure both models on a corpus, behind the index's start token or the best one."""
    if corpus is None:
        progress.say("Side effects were not measured.")
        return None
    memories = at.memories
    text = read_text(memories, corpus)
    if at.index is None and start is None:
        token = choose_start(memories, [ids for _, ids in text.sentences], "auto")[0].id
    else:
        token = at.start
    progress.say(f"Measuring side effects on {pluralize(len(text.sentences), 'sentences')}.")
    return measure(memories, other, text, token, progress)
