"""Verify an index: the hash of every file, and the invariants of all tables."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.files import sha256
from ffmem.indexing.agreement import compute_agreement
from ffmem.indexing.manifest import hash_files
from ffmem.indexing.results import draw_sample, merge_samples, read_sample
from ffmem.indexing.sentences import NO_PREFIX, hash_input
from ffmem.indexing.store import Index
from ffmem.indexing.tables import SAMPLED_PREFIXES, UNIT, layer_file, read_columns


class _Sentences(NamedTuple):
    """Where the sentences of an index and their prefixes are."""

    offsets: ndarray
    lengths: ndarray
    sources: ndarray
    shortest: int
    """Length of a sentence's shortest prefix: 0 if the empty prefix counts."""
    is_content: ndarray | None
    """Whether a prefix ends at each token. None: at every token."""

    def n_prefixes(self) -> ndarray:
        """Return the number of prefixes of every sentence."""
        if self.is_content is None:
            return self.lengths
        counts = np.concatenate([[0], np.cumsum(self.is_content)])
        ends = np.cumsum(self.lengths)
        found: ndarray = counts[ends] - counts[ends - self.lengths]
        return found


def verify(index: Index) -> list[str]:
    """Return what is wrong with an index, a sentence each."""
    if wrong := damaged_files(index):
        return wrong  # damaged files break invariants anyway
    try:
        return [*_check_tables(index)]
    except StoreError as error:
        return [str(error)]
    except (KeyError, ValueError, IndexError) as error:
        return [f"a file does not have the columns or rows of an index ({error!r})."]


def damaged_files(index: Index) -> list[str]:
    """Return which files are missing, changed or unknown, a sentence each."""
    wrong = []
    listed = index.manifest.files
    for name, expected in listed.items():
        path = index.folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing.")
        elif sha256(path) != expected:
            wrong.append(f"{name} was changed or damaged: its hash differs from the manifest's.")
    needed = {"sentences.parquet", "vocabulary.parquet", SAMPLED_PREFIXES}
    for kind in (*index.kinds, "agreement"):
        needed |= {layer_file(kind, layer) for layer in range(index.n_layers)}
    wrong += [f"{name} is not in the manifest." for name in sorted(needed - listed.keys())]
    if needed <= listed.keys() and all((index.folder / name).is_file() for name in needed):
        unknown = hash_files(index.folder).keys() - listed.keys()
        wrong += [f"{name} is in the folder, but not in the manifest." for name in sorted(unknown)]
    return wrong


def _check_tables(index: Index) -> Iterator[str]:
    """Yield every broken invariant."""
    sentences = _read_sentences(index)
    yield from _check_sentences(index, sentences)
    yield from _check_sample(index, sentences)
    if len(index.tokens) != index.manifest.model.vocabulary:
        yield f"vocabulary.parquet has {len(index.tokens)} tokens."
    for layer in range(index.n_layers):
        wrong = [*_check_triggers(index, layer, sentences)]
        if index.manifest.model.has_values:
            wrong += _check_values(index, layer)
        wrong = wrong or [*_check_agreement(index, layer)]  # it follows from these
        wrong += _check_keys(index, layer)
        for line in wrong:
            yield f"layer {layer}: {line}"


def _read_sentences(index: Index) -> _Sentences:
    lengths = np.concatenate(list(index.sentences.lengths()))
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])[:-1]
    sources = read_columns(index.sentences.path, ["source"])["source"]
    contents = [part for part in index.sentences.contents() if part is not None]
    is_content: ndarray | None = np.concatenate(contents) if contents else None
    return _Sentences(offsets, lengths, sources, 0 if index.manifest.compat else 1, is_content)


def _check_sentences(index: Index, sentences: _Sentences) -> Iterator[str]:
    corpus = index.manifest.corpus
    n_sentences, n_tokens = len(sentences.lengths), int(sentences.lengths.sum())
    if (n_sentences, n_tokens) != (corpus.sentences, corpus.tokens):
        yield (
            f"sentences.parquet has {n_sentences} sentences and {n_tokens} tokens; the manifest"
            f" says {corpus.sentences} and {corpus.tokens}."
        )
    stored = read_columns(index.sentences.path, ["sentence", "offset"])
    in_order = (stored["offset"] == sentences.offsets) & (
        stored["sentence"] == np.arange(n_sentences)
    )
    if not in_order.all() or (np.diff(sentences.sources) < 0).any():
        yield "sentences.parquet: numbers and offsets do not follow from the lengths."
    for number, source in enumerate(corpus.sources):
        mine = sentences.n_prefixes()[sentences.sources == number]
        left_out = int(sentences.lengths[sentences.sources == number].sum() - mine.sum())
        if left_out != source.left_out:
            yield f"{left_out} tokens of {source.source} end no prefix, not {source.left_out}."
        skipped = [place for place in source.skipped if 0 <= place < len(mine)]
        if skipped != source.skipped or int(mine[skipped].sum()) != source.skipped_tokens:
            yield f"the skipped sentences of {source.source} do not fit its sentences."
    digests = [hashlib.sha256() for _ in corpus.sources]
    for row in index.sentences.rows(0, n_sentences):
        digests[row.source].update(hash_input(row.text, row.ids))
    for source, digest in zip(corpus.sources, digests, strict=True):
        if digest.hexdigest() != source.hash:
            yield f"the sentences of {source.source} do not have the hash in the manifest."


def _check_sample(index: Index, sentences: _Sentences) -> Iterator[str]:
    samples, base = [], 0
    for number, source in enumerate(index.manifest.corpus.sources):
        is_mine = sentences.sources == number
        mine = sentences.lengths[is_mine]
        content = None
        if sentences.is_content is not None:
            content = sentences.is_content[np.repeat(is_mine, sentences.lengths)]
        sample = draw_sample(source.hash, [mine], sentences.shortest == 0, [content])
        starts = np.concatenate([[0], np.cumsum(mine + 1)])
        owners = np.searchsorted(starts, sample.prefixes, side="right") - 1
        samples.append(sample.select(~np.isin(owners, source.skipped)).shift(base))
        base += int(mine.sum()) + len(mine)
    expected, _ = merge_samples(samples, [])
    if not all(map(np.array_equal, read_sample(index.folder), expected)):
        yield "the sample does not consist of the prefixes with the smallest hashes."


def _check_triggers(index: Index, layer: int, sentences: _Sentences) -> Iterator[str]:
    manifest = index.manifest
    triggers = read_columns(index.folder / layer_file("triggers", layer))
    stats = read_columns(index.folder / layer_file("stats", layer))
    sample = read_columns(index.folder / layer_file("samples", layer))["coefficient"]
    width = index.layout.widths[layer]
    numbers = np.arange(width)
    if not all(np.array_equal(columns["memory"], numbers) for columns in (triggers, stats)):
        yield "the memories are not those of the model."
    names = [(1, "", "max"), (-1, "negative_", "min")][: 2 if manifest.model.gated else 1]
    for sign, name, extreme in names:
        prefixes, strengths = triggers[f"{name}prefix"], triggers[f"{name}coefficient"] * sign
        if prefixes.shape != (width, manifest.t):
            yield f"the number of {name}triggers per memory is not {manifest.t}."
        gates = triggers[f"{name}gate"]
        if not np.array_equal(gates != 0, (prefixes != NO_PREFIX) & manifest.model.gated):
            yield f"a {name}trigger has no gate, or an empty slot has one."
        yield from _check_list(prefixes, strengths, sentences, manifest.prefixes, name)
        some, furthest = prefixes[:, 0] != NO_PREFIX, stats[extreme] * sign
        if (strengths[some, 0] != furthest[some]).any():
            yield f"a first {name}trigger is not the {extreme} of its memory."
        if (~some & (furthest > 0)).any():
            yield f"a memory has no {name}trigger, although its {extreme} is beyond 0."
    n_prefixes = manifest.corpus.prefixes
    if ((stats["active"] < 0) | (stats["active"] > n_prefixes)).any():
        yield "a memory is active on more prefixes than there are."
    if "routed" in stats:
        routed = stats["routed"]
        if ((stats["active"] > routed) | (routed > n_prefixes)).any():
            yield "a memory is active on more prefixes than reach its bank, or than there are."
        banks = [(bank.size, bank.count) for bank in index.layout.layers[layer]]
        ends = np.cumsum([size for size, count in banks for _ in range(count)])
        if any(len(np.unique(part)) > 1 for part in np.split(routed, ends)):
            yield "memories of one bank are reached by different numbers of prefixes."
    if manifest.model.gated:
        yield from _check_sign_cases(stats, stats.get("routed", np.int64(n_prefixes)))
    if (stats["mean"] != stats["sum"] * (UNIT / n_prefixes)).any():
        yield "a mean is not the sum over the number of prefixes."
    if ((sample < stats["min"][:, None]) | (sample > stats["max"][:, None])).any():
        yield "a coefficient of the sample lies beyond its memory's min or max."


def _check_sign_cases(stats: dict[str, ndarray], reached: ndarray | np.int64) -> Iterator[str]:
    active, positive, both = stats["active"], stats["positive"], stats["open_positive"]
    closed_others = reached - active - positive + both
    if (both < 0).any() or (both > np.minimum(active, positive)).any() or (closed_others < 0).any():
        yield "the four sign cases of a memory do not add up to the prefixes that reach it."
    if ((positive > 0) != (stats["max"] > 0)).any():
        yield "a memory's max is above 0 on no prefix, or not above 0 on some."


def _check_list(
    prefixes: ndarray, strengths: ndarray, sentences: _Sentences, which: str, name: str
) -> Iterator[str]:
    filled = prefixes != NO_PREFIX
    if (~filled[:, :-1] & filled[:, 1:]).any():
        yield f"a {name}trigger follows an empty slot."
    if not (strengths[filled] > 0).all() or strengths[~filled].any():
        yield f"a {name}coefficient has the wrong sign."
    steps = np.diff(strengths, axis=1)
    tied = (steps == 0) & filled[:, 1:]
    if (steps > 0).any() or (np.diff(prefixes, axis=1)[tied] <= 0).any():
        yield f"{name}triggers are not in order."
    owners = np.searchsorted(sentences.offsets, prefixes, side="right") - 1
    places = prefixes - sentences.offsets[owners]
    longest = sentences.lengths[owners] + sentences.shortest - 1
    if (filled & ((owners < 0) | (places < sentences.shortest) | (places > longest))).any():
        yield f"a {name}trigger is not a prefix of the corpus."
    elif sentences.is_content is not None:
        tokens = (np.cumsum(sentences.lengths) - sentences.lengths)[owners] + places - 1
        if not sentences.is_content[tokens[filled]].all():
            yield f"a {name}trigger ends at a token that is not content."
    if which == "best":
        ordered = np.sort(np.where(filled, owners, -1 - np.arange(owners.shape[1])), axis=1)
        if (np.diff(ordered, axis=1) == 0).any():
            yield f"two {name}triggers of a memory are prefixes of one sentence."


def _check_values(index: Index, layer: int) -> Iterator[str]:
    values = read_columns(index.folder / layer_file("values", layer))
    if not np.array_equal(values["memory"], np.arange(index.layout.widths[layer])):
        yield "the values do not cover the model's memories in order."
    for side, sign in (("top", 1), ("bottom", -1)):
        ids, logits = values[f"{side}_ids"], values[f"{side}_logits"] * sign
        probabilities = values[f"{side}_probabilities"]
        if not ((ids >= 0) & (ids < index.manifest.model.vocabulary)).all():
            yield f"a {side} token is not in the vocabulary."
        steps = np.diff(logits, axis=1)
        if (steps > 0).any() or (np.diff(ids, axis=1)[steps == 0] <= 0).any():
            yield f"{side} tokens are not in the order of their logits."
        if not ((probabilities >= 0) & (probabilities <= 1)).all():
            yield f"a probability of a {side} token is not between 0 and 1."


def _check_agreement(index: Index, layer: int) -> Iterator[str]:
    stored = read_columns(index.folder / layer_file("agreement", layer))
    found = compute_agreement(index.folder, layer, index.manifest.model, index.sentences)
    expected = found.columns()
    if not np.array_equal(stored.pop("memory"), np.arange(index.layout.widths[layer])):
        yield "the agreement does not cover the model's memories in order."
    if stored.keys() != expected.keys():
        yield f"the agreement has the columns {', '.join(stored)}, not {', '.join(expected)}."
    elif not all(np.array_equal(stored[name], expected[name]) for name in expected):
        yield "the agreement does not follow from the triggers and the values."


def _check_keys(index: Index, layer: int) -> Iterator[str]:
    keys = read_columns(index.folder / layer_file("keys", layer))
    if not np.array_equal(keys["memory"], np.arange(index.layout.widths[layer])):
        yield "the keys do not cover the model's memories in order."
    if "ids" in keys:
        ids, scores = keys["ids"], keys["scores"]
        if not ((ids >= 0) & (ids < index.manifest.model.vocabulary)).all():
            yield "a token of a key is not in the vocabulary."
        steps = np.diff(scores, axis=1)
        if (steps > 0).any() or (np.diff(ids, axis=1)[steps == 0] <= 0).any():
            yield "the tokens of keys are not in the order of their scores."
    for name, cosines in keys.items():
        if name.startswith("cos_") and not (np.abs(cosines) <= 1 + 1e-5).all():
            yield f"a {name} is not between −1 and 1."
