"""The public functions that run prompts and change memories: trace.

Each takes the arguments of its command; heavy libraries are imported when one is called.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.indexing.store import Index
from ffmem.progress import Progress

if TYPE_CHECKING:
    from ffmem.causal.opened import Opened
    from ffmem.causal.traced import Trace
    from ffmem.models.memories import Memories


def trace(
    place: "Memories | Index | str | Path",
    prompt: str,
    *,
    off: Sequence[object] = (),
    set: Mapping[str, float] | None = None,
    scale: Mapping[str, float] | None = None,
    mean: Sequence[object] = (),
    positions: Sequence[int] | None = None,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    **options: Any,
) -> "Trace":
    """Follow a prompt through a model, layer by layer; with edits, a second time under them.

    `place` is a model, or an index, which adds percentiles. `options`: position, top, generate (a
    number of tokens), temperature, seed.
    """
    from ffmem.causal.edits import Edits
    from ffmem.causal.prompt import read_prompt
    from ffmem.causal.trace import trace as trace_prompt

    at = _opened(place, start, model, dtype, device, progress)
    edits = Edits.of(off=off, set=set, scale=scale, mean=mean, index=at.index, positions=positions)
    read = read_prompt(at.memories, prompt, at.start)
    return trace_prompt(at.memories, read, edits, index=at.index, **options)


def _opened(
    place: "Memories | Index | str | Path",
    start: str | None,
    model: "Memories | str | Path | None",
    dtype: str | None,
    device: str,
    progress: Progress | None,
) -> "Opened":
    """Return the model of MODEL_OR_DIR, refusing a wrong path before anything heavy is loaded."""
    if isinstance(place, str | Path):
        from ffmem.models.argument import canonical

        canonical(str(place))
    from ffmem.causal.opened import opened

    return opened(place, start=start, model=model, dtype=dtype, device=device, progress=progress)
