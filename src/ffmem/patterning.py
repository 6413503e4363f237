"""The public functions about patterns: find them, read them, ask a language model or people.

Each takes the arguments of its command; heavy libraries are imported when one is called.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ffmem.indexing.store import Index
from ffmem.progress import Progress

if TYPE_CHECKING:
    from ffmem.annotation.study import AnnotationStudy
    from ffmem.patterns.detected import Detected
    from ffmem.patterns.explain import Explained
    from ffmem.patterns.kept import Patterns


def detect(
    folder: str | Path | Index,
    *,
    top: int = 25,
    alpha: float = 0.05,
    seed: int = 0,
    space: str = "lsa",
    shuffled: bool = False,
    workers: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
) -> "Detected":
    """Find the patterns of every memory without a language model, and keep them in the index.

    `alpha` is the false-discovery rate, `space` "lsa" or "minilm". `shuffled` is a control:
    triggers are dealt out at random, and nothing is kept. With `workers`, processes of this
    machine share the layers, or actors of `ray` ("local", "auto" or an address).
    """
    from ffmem.patterns.detect import detect as detect_patterns

    return detect_patterns(
        _index(folder),
        top=top,
        alpha=alpha,
        seed=seed,
        space=space,
        shuffled=shuffled,
        workers=workers,
        ray=ray,
        progress=progress or Progress(quiet=True),
    )


def patterns_of(folder: str | Path | Index, source: str = "automatic") -> "Patterns":
    """Return the kept patterns of one source: `automatic`, `explained` or `human`."""
    from ffmem.patterns.kept import Patterns

    return Patterns(_index(folder), source)


def export_patterns(folder: str | Path | Index, out: str | Path) -> int:
    """Write the patterns of all sources as a table (.parquet, .jsonl, .csv); return how many."""
    from ffmem.errors import FfmemError
    from ffmem.patterns.export import export
    from ffmem.patterns.kept import kept
    from ffmem.patterns.searching import no_patterns

    index = _index(folder)
    several = kept(index)
    if not several:
        raise FfmemError(no_patterns(index))
    return export(several, Path(out))


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
) -> "Explained":
    """Ask a language model for the patterns of some memories, by the paper's protocol.

    The key of the endpoint, if it wants one, is read from OPENAI_API_KEY.
    """
    from ffmem.patterns.endpoint import Endpoint
    from ffmem.patterns.explain import explain as explain_patterns

    index = _index(folder)
    endpoint = Endpoint(url, model, seed=seed, timeout=timeout)
    return explain_patterns(index, endpoint, cells, per_layer, seed, progress)


def study(folder: str | Path | Index, *, db: str | None = None) -> "AnnotationStudy":
    """Open the annotators' study of an index: beside it, or in the database that `db` names."""
    from ffmem.annotation.study import AnnotationStudy, beside

    return AnnotationStudy.open(db or str(beside(_index(folder).folder)))


def _index(folder: str | Path | Index) -> Index:
    return folder if isinstance(folder, Index) else Index(folder)
