"""What the model computed lately, part by part, so that nothing is computed twice.

    prompt(text)    read(text, position, edits)    grid(text, edits)    continued(text, edits, n)

Each part is kept under all that it hangs on. So switching one memory costs the edited parts only,
and another position costs no grid. What was not asked for lately makes room for what is. Only the
worker's thread comes here.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ffmem.causal.edits import Edits, place
from ffmem.cells import Cell
from ffmem.web.limits import MOST_TOKENS, TooMuch

if TYPE_CHECKING:
    from ffmem.causal.affected import Effect
    from ffmem.causal.opened import Opened
    from ffmem.causal.prompt import Prompt
    from ffmem.causal.traced import Trace

T = TypeVar("T")

ROOM = 100_000
"""Places of grids, or as much of something else, that are kept: about 50 MB."""

ABLATED = 1_024
"""Tokens that ablations may run in one request: memories measured × tokens of the prompt."""


class Question(NamedTuple):
    """What is asked about a prompt; position None is its end."""

    text: str
    position: int | None = None
    edits: Edits = Edits()
    top: int = 10
    generate: int = 0
    grid: bool = True


class Runs:
    """The parts of traces, and effects, that were computed last."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._kept: OrderedDict[tuple[Any, ...], tuple[int, Any]] = OrderedDict()
        self._held = 0

    def trace(self, at: "Opened", name: str, asked: Question) -> "Trace":
        """Return what `ffmem.trace` returns, on the index of this name."""
        from ffmem.causal.trace import notes
        from ffmem.causal.traced import Trace

        prompt = self.prompt(at, name, asked.text)
        n_tokens = len(prompt.ids)
        here = place(-1 if asked.position is None else asked.position, n_tokens)
        edits = asked.edits.placed(n_tokens).resolve(at.memories.layout)
        part = _Parts(self, at, name, prompt, here, asked)
        plain = Edits()
        found = Trace(
            prompt.text,
            prompt.tokens,
            here,
            part.read(plain),
            generated=part.continued(plain) if asked.generate else None,
            grid=part.grid(plain) if asked.grid else None,
            notes=notes(here, n_tokens, edits, asked.generate),
        )
        if not edits:
            return found
        return replace(
            found,
            edits=edits,
            edited=part.read(edits),
            edited_generated=part.continued(edits) if asked.generate else None,
            edited_grid=part.grid(edits) if asked.grid else None,
        )

    def effect(
        self,
        at: "Opened",
        name: str,
        asked: Question,
        target: str | None,
        cells: Sequence[Cell],
        candidates: int,
    ) -> "Effect":
        """Return what `ffmem.effect` returns, without edits, on the index of this name."""
        prompt = self.prompt(at, name, asked.text)
        here = place(-1 if asked.position is None else asked.position, len(prompt.ids))
        wanted, most = len(cells) + candidates, ABLATED // (here + 1)
        if wanted > most:
            raise TooMuch(
                f"{wanted} memories were to be measured on {here + 1} tokens; the page measures"
                f" {most} of so many. Ask for fewer, or use `ffmem effect`, which has no limit."
            )

        def compute() -> "Effect":
            from ffmem.causal.effect import effect

            return effect(
                at.memories,
                prompt,
                target=target,
                position=here,
                cells=list(cells),
                candidates=candidates,
                top=asked.top,
            )

        key = ("effect", *_of(at, name), asked.text, here, target, tuple(cells), candidates)
        return self.kept((*key, asked.top), compute, lambda found: 4 * len(found.memories))

    def prompt(self, at: "Opened", name: str, text: str) -> "Prompt":
        """Return the tokens of a prompt that is not too long."""

        def compute() -> "Prompt":
            from ffmem.causal.prompt import read_prompt

            found = read_prompt(at.memories, text, at.start)
            if len(found.ids) > MOST_TOKENS:
                raise TooMuch(
                    f"The prompt has {len(found.ids):,} tokens, a start token included; the page"
                    f" takes {MOST_TOKENS}. Shorten it, or use `ffmem trace`, which has no limit."
                )
            return found

        return self.kept(("prompt", *_of(at, name), text), compute, lambda found: len(found.ids))

    def kept(self, key: tuple[Any, ...], compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return what is kept under a key, computing it if it is not there."""
        if key in self._kept:
            self._kept.move_to_end(key)
            known: T = self._kept[key][1]
            return known
        found = compute()
        self._kept[key] = (size(found), found)
        self._held += size(found)
        while self._held > self._room:
            _, (freed, _) = self._kept.popitem(last=False)
            self._held -= freed
        return found


class _Parts:
    """The parts of one trace, each computed or remembered."""

    def __init__(
        self, runs: Runs, at: "Opened", name: str, prompt: "Prompt", here: int, asked: Question
    ) -> None:
        self.runs = runs
        self.at = at
        self.of = _of(at, name)
        self.prompt = prompt
        self.here = here
        self.asked = asked

    def read(self, edits: Edits) -> Any:
        """Return every layer at the position."""

        def compute() -> Any:
            from ffmem.causal.trace import Reader

            top = self.asked.top
            reader = Reader(
                self.at.memories, self.prompt, self.here, top, self._sample, self._shown()
            )
            with self._under(edits):
                return reader.read()

        size = len(self.at.memories.blocks) * 4 * self.asked.top
        return self._kept("read", compute, size, edits, self.here, self.asked.top)

    def grid(self, edits: Edits) -> Any:
        """Return every layer at every position."""

        def compute() -> Any:
            from ffmem.causal.grid import grid

            with self._under(edits):
                return grid(self.at.memories, self.prompt.ids, self._shown())

        size = len(self.at.memories.blocks) * len(self.prompt.ids)
        return self._kept("grid", compute, size, edits)

    def continued(self, edits: Edits) -> Any:
        """Return what the model writes behind the prompt."""

        def compute() -> Any:
            from ffmem.causal.generation import continued

            with self._under(edits):
                return continued(self.at.memories, self.prompt, self.asked.generate)

        return self._kept("continued", compute, self.asked.generate, edits, self.asked.generate)

    def _kept(self, what: str, compute: Callable[[], Any], size: int, *on: object) -> Any:
        key = (what, *self.of, self.prompt.text, *on)
        return self.runs.kept(key, compute, lambda _: size)

    def _under(self, edits: Edits) -> AbstractContextManager[None]:
        from ffmem.causal.editing import editing

        return editing(self.at.memories, edits) if edits else nullcontext()

    def _shown(self) -> list[str]:
        """Return every token as it is shown; the tokenizer keeps them."""
        return self.at.memories.tokenizer.token_texts(self.at.memories.vocabulary)

    def _sample(self, cell: Cell) -> Any:
        """Return a memory's sampled coefficients: the same ones are asked for again and again."""
        index = self.at.index
        assert index is not None, "a shelf has one"
        key = ("sample", *self.of, cell)
        return self.runs.kept(key, lambda: index.sample(cell), lambda numbers: 4)


def _of(at: "Opened", name: str) -> tuple[object, ...]:
    """Return what every part hangs on: index, weights, number format, start token."""
    assert at.index is not None, "a shelf has one"
    manifest = at.index.manifest
    return name, manifest.model.hash, manifest.dtype, at.start
