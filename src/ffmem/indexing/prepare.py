"""Before a corpus is read by many: it is brought into the folder, cut, and the start is chosen.

Every step is committed, so that a run that was stopped does not repeat it:

    settings.json → sentences.parquet → plan.json → vocabulary.parquet → leases, orders

Only this needs the model in the leading process; what comes after can be done by others.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy import ndarray

from ffmem.cluster.shared import SharedFolder
from ffmem.corpus.corpus import Corpus, Reading
from ffmem.corpus.sentences import refuse_foreign, window_size
from ffmem.counted import counted
from ffmem.errors import CorpusError, FfmemError
from ffmem.files import write_text
from ffmem.indexing import sample
from ffmem.indexing.leases import cut
from ffmem.indexing.options import COMPAT
from ffmem.indexing.orders import LEASES, IndexOrders, write_leases
from ffmem.indexing.sentences import Sentences, write_sentences
from ffmem.indexing.settings import Plan, Settings, read_record
from ffmem.indexing.start import choose
from ffmem.indexing.tables import write_table
from ffmem.models.memories import Memories
from ffmem.progress import Progress

SENTENCES = "sentences.parquet"


def planned(
    memories: Memories, corpus: Corpus, folder: Path, settings: Settings, progress: Progress
) -> Plan:
    """Bring the corpus into the folder and choose the start token, unless that is done."""
    path = folder / "segments" / "plan.json"
    if path.exists():
        return read_record(Plan, path)
    _refuse_wide_windows(memories, corpus)
    progress.say(f"Reading {corpus.source}.")
    reading = corpus.sentences(memories.tokenizer)
    rows = _Cut(reading, memories)
    totals = write_sentences(folder / SENTENCES, rows)
    sentences = Sentences(folder / SENTENCES)
    first = next(cut(sentences.lengths(), settings.lease_tokens))
    some = [row.ids for row in sentences.rows(0, first.n_sentences)]
    chosen = choose(memories, some, settings.start)
    plan = Plan(
        hash=totals.hash,
        sentences=totals.n_sentences,
        tokens=totals.n_tokens,
        cut=rows.n_cut,
        cut_tokens=rows.n_lost,
        headings_dropped=reading.n_headings,
        without_tokens=reading.n_without_tokens,
        start=chosen.start,
        perplexity=chosen.perplexity,
        control=reading.n_control,
    )
    if settings.compat and plan.start.id is None:
        raise FfmemError(
            f"--compat {COMPAT} counts the start token alone as a prefix, and there is no"
            " start token. Name one with --start."
        )
    _tell(plan, progress)
    write_text(path, plan.to_json())
    return plan


def lay_out(
    shared: SharedFolder, folder: Path, settings: Settings, plan: Plan, device: str, is_far: bool
) -> IndexOrders:
    """Put into the shared folder what workers need to begin.

    `is_far`: workers do not see the index's own folder, so that the sentences go there, too.
    """
    path = folder / SENTENCES
    sentences = Sentences(path)
    if not shared.has(LEASES):
        write_leases(shared, cut(sentences.lengths(), settings.lease_tokens))
    if is_far and not shared.has(SENTENCES):
        shared.put(path, SENTENCES)
    empty_prefix = settings.compat is not None
    hashes, prefixes = sample.draw(plan.hash, sentences.lengths(), empty_prefix)
    orders = IndexOrders(
        run=settings.fingerprint,
        model=settings.model.source,
        hash=settings.model.hash,
        dtype=settings.dtype,
        device=device,
        gated=settings.model.gated,
        threads=settings.threads,
        t=settings.t,
        prefixes=settings.prefixes,
        empty_prefix=empty_prefix,
        start=plan.start.id,
        batch_tokens=settings.batch_tokens,
        sentences=SENTENCES if is_far else str(path.absolute()),
        sample_hashes=hashes.tolist(),
        sample_prefixes=prefixes.tolist(),
    )
    orders.write(shared)
    return orders


def write_vocabulary(path: Path, memories: Memories) -> None:
    """Write every token as it is shown."""
    shown = memories.tokenizer.shown(memories.vocabulary)
    ids: ndarray = np.arange(len(shown), dtype=np.int32)
    write_table(path, pa.table({"id": ids, "token": pa.array(shown, pa.string())}))


def _refuse_wide_windows(memories: Memories, corpus: Corpus) -> None:
    size, context = window_size(corpus.unit), memories.context
    if size is not None and context is not None and size >= context:
        raise CorpusError(
            f"--unit {corpus.unit} was asked for, but the model reads {context} tokens at"
            f" most, a start token included. Use window:{context - 1} or less."
        )


def _tell(plan: Plan, progress: Progress) -> None:
    say = progress.say
    say(f"Corpus: {counted(plan.sentences, 'sentences')}, {counted(plan.tokens, 'tokens')}.")
    if plan.headings_dropped:
        say(f"Left out: {counted(plan.headings_dropped, 'headings')}.")
    if plan.without_tokens:
        say(f"Left out: {counted(plan.without_tokens, 'sentences')} that gave no token.")
    if plan.cut:
        say(
            f"Cut at the model's context: {counted(plan.cut, 'sentences')}, by"
            f" {counted(plan.cut_tokens, 'tokens')} in all."
        )
    if plan.control:
        say(f"{counted(plan.control, 'sentences')} with a control token in the text: taken as one.")
    token = "none" if plan.start.token is None else plan.start.token
    losses = ", ".join(f"{name} {loss:.3f}" for name, loss in plan.start.losses.items())
    say(f"Start token: {token} ({plan.start.chosen_by}; loss per token: {losses}).")
    if plan.perplexity:
        tokens = counted(plan.perplexity.tokens, "tokens")
        of = counted(plan.perplexity.sentences, "sentences")
        say(f"Perplexity per token: {plan.perplexity.per_token:,.1f} (on {tokens} of {of}).")


class _Cut:
    """The sentences of a corpus, cut where the model's context ends, and counted."""

    def __init__(self, reading: Reading, memories: Memories) -> None:
        self.n_cut = self.n_lost = 0
        self._reading = reading
        self._memories = memories

    def __iter__(
        self,
    ) -> Iterator[tuple[str | None, list[int], list[int] | None, list[int] | None]]:
        memories = self._memories
        # One place is kept for a start token, whether there will be one or not.
        most = None if memories.context is None else memories.context - 1
        for text, ids, starts, ends in refuse_foreign(self._reading, memories.vocabulary):
            if most is not None and len(ids) > most:
                self.n_cut += 1
                self.n_lost += len(ids) - most
                ids = ids[:most]
                starts, ends = starts and starts[:most], ends and ends[:most]
            yield text, ids, starts, ends
