"""Patterns in the triggers of memories: detected, asked of a language model, seen by people."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ffmem.indexing.store import Index, as_index
from ffmem.progress import Progress

if TYPE_CHECKING:
    from ffmem.annotation.study import AnnotationStudy
    from ffmem.patterns.explain import ExplainResult
    from ffmem.patterns.store import Patterns


def patterns_of(folder: str | Path | Index, source: str = "automatic") -> "Patterns":
    """Return the stored patterns of one source: "automatic", "explained" or "human"."""
    from ffmem.patterns.store import Patterns

    return Patterns(as_index(folder), source)


def export_patterns(folder: str | Path | Index, out: str | Path) -> int:
    """Write the patterns of all sources as a table (.parquet, .jsonl, .csv); return how many."""
    from ffmem.patterns.store import export_patterns as write_patterns

    return write_patterns(as_index(folder), Path(out))


def explain(
    folder: str | Path | Index,
    cells: Iterable[str | tuple[int, int]] = (),
    *,
    model: str,
    url: str = "http://127.0.0.1:8080/v1",
    per_layer: int | None = None,
    seed: int = 0,
    timeout: float = 120.0,
    progress: Progress | None = None,
) -> "ExplainResult":
    """Ask a language model for the patterns of memories; return what was asked and found.

    Answers are stored in the index as they arrive, so that a stopped run resumes.

    Args:
        folder: The index.
        cells: The memories.
        model: Name of the model at the endpoint.
        url: OpenAI-compatible endpoint; its key is read from OPENAI_API_KEY.
        per_layer: Draw this many memories per layer instead of `cells`.
        seed: Random seed.
        timeout: Seconds to wait for an answer.
        progress: Where progress is shown. Default: nowhere.
    """
    from ffmem.patterns.explain import Endpoint
    from ffmem.patterns.explain import explain as explain_patterns

    endpoint = Endpoint(url, model, seed=seed, timeout=timeout)
    return explain_patterns(as_index(folder), endpoint, cells, per_layer, seed, progress)


def study(folder: str | Path | Index, *, db: str | Path | None = None) -> "AnnotationStudy":
    """Open the annotation study of an index: DIR-annotations.sqlite, unless `db` names a file."""
    from ffmem.annotation.study import AnnotationStudy, study_path

    return AnnotationStudy.open(db or study_path(as_index(folder).folder))
