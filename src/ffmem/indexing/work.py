"""The work of an index: leases to read and segments to merge, then values to project.

Every lease that is done may let a node of the merge tree be merged; when the root is done, all is
read. A lease that cannot be read is examined, and its bad sentences are left out or end the run,
as was asked.
"""

import json
from collections.abc import Iterable, Iterator, Sequence

from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.errors import FfmemError, ModelError, StoreError
from ffmem.indexing.leases import Lease
from ffmem.indexing.orders import Leases
from ffmem.indexing.segments import Segments
from ffmem.indexing.suspect import Suspect
from ffmem.indexing.tree import Node, Tree

SKIPPED = "skipped.json"

SHOWN = 3
"""Segments whose thresholds a lease is told of: the widest that were merged."""


class Reading:
    """Reads all leases that are not read yet, and merges them to one segment."""

    phase, kind, unit = "reading", "read", "tokens"

    def __init__(
        self, shared: SharedFolder, segments: Segments, leases: Leases, tokens: int, skip: bool
    ) -> None:
        self.shared = shared
        self.skip = skip
        """Whether bad sentences are left out; otherwise they end the run."""
        self.tree = Tree(leases.n)
        self._ready = self.tree.resume(segments.nodes())
        self._leases = leases
        self.units = tokens
        left = sum(one.n_tokens for one in leases if not self.tree.is_covered(one.number))
        self.units_done = tokens - left
        self.skipped = read_skipped(shared)
        self._merged: list[Node] = []
        self._suspects: dict[int, Suspect] = {}
        self._cleared: set[int] = set()
        """Leases whose parts could all be read; when they fail again, the run ends."""

    def tasks(self) -> Iterator[Task]:
        """Return the merges that an earlier run has left, then the leases in order."""
        for node in self._ready:
            yield self._merge(node)
        for lease in self._leases:
            if not self.tree.is_covered(lease.number):
                yield self._read(lease)

    def _read(self, lease: Lease) -> Task:
        last = lease.first_sentence + lease.n_sentences
        without = [number for number in self.skipped if lease.first_sentence <= number < last]
        arguments = {
            "lease": list(lease),
            "without": without,
            "floors": [list(node) for node in self._merged],
        }
        return Task(f"lease {lease.number}", "read", lease.n_tokens, arguments)

    def _merge(self, node: Node) -> Task:
        parts = [list(part) for part in self.tree.children(node)]
        arguments = {"node": list(node), "parts": parts}
        key = f"merge {node.level}-{node.number}"
        # No merge kills its worker: whoever is lost with one was lost for another reason.
        return Task(key, "merge", len(parts), arguments, urgency=1, losses=20)

    def finished(self, task: Task, result: dict[str, object]) -> Iterable[Task]:
        """Return what can be merged or must be probed next."""
        if task.kind == "probe":
            suspect = self._suspects[task.arguments["lease"][0]]
            suspect.could()
            return self._examine(suspect)
        if task.kind == "merge":
            node = Node(*task.arguments["node"])
            merged = [*self._merged, node]
            self._merged = sorted(merged, key=lambda one: len(self.tree.leases(one)))[-SHOWN:]
        else:
            node = Node(0, task.arguments["lease"][0])
        parent = self.tree.done(node)
        return [] if parent is None else [self._merge(parent)]

    def given_up(self, task: Task, error: str) -> Iterable[Task]:
        """Return how a lease that cannot be read is examined."""
        if task.kind == "merge":
            raise StoreError(f"Segments could not be merged ({task.key}): {error}")
        number = task.arguments["lease"][0]
        if task.kind == "probe":
            self._suspects[number].could_not(error)
        elif number in self._cleared:
            raise FfmemError(
                f"Lease {number} fails, although each of its sentences can be read alone: {error}"
                " What was read is kept: run the same command again."
            )
        else:
            self._suspects[number] = Suspect(Lease(*task.arguments["lease"]))
        return self._examine(self._suspects[number], error)

    def _examine(self, suspect: Suspect, error: str = "") -> list[Task]:
        """Return the next probe of a suspicious lease, or how it is read after all."""
        lease = suspect.lease
        if (span := suspect.next()) is not None:
            arguments = {"lease": list(lease), "first": span.first, "n": span.n}
            key = f"probe of sentences {span.first} to {span.first + span.n - 1}"
            size = max(1, lease.n_tokens * span.n // lease.n_sentences)
            # A part that kills its worker is halved at once; a sentence is given a second chance.
            losses = 1 if span.n > 1 else 2
            return [Task(key, "probe", size, arguments, urgency=2, losses=losses)]
        del self._suspects[lease.number]
        self._cleared.add(lease.number)
        if suspect.bad:
            self._leave_out(suspect)
        return [self._read(lease)]

    def _leave_out(self, suspect: Suspect) -> None:
        """Let bad sentences be left out from now on, or end the run."""
        number, why = next(iter(suspect.bad.items()))
        if suspect.is_hopeless:
            raise ModelError(
                f"More than {len(suspect.bad) - 1} sentences of lease {suspect.lease.number} cannot"
                f" be read, sentence {number} first: {why}"
            )
        if not self.skip:
            listed = ", ".join(map(str, suspect.bad))
            plural = "s" if len(suspect.bad) > 1 else ""
            raise ModelError(
                f"Sentence{plural} {listed} of the corpus cannot be read: {why} What was read is"
                " kept. Run again with --bad-sentences skip to leave such sentences out; the"
                " manifest will name them."
            )
        self.skipped |= suspect.bad
        write_skipped(self.shared, self.skipped)


def read_skipped(shared: SharedFolder) -> dict[int, str]:
    """Return the sentences that are left out, and why each could not be read."""
    text = shared.read_text(SKIPPED)
    return {} if text is None else {int(number): why for number, why in json.loads(text).items()}


def write_skipped(shared: SharedFolder, skipped: dict[int, str]) -> None:
    """Commit which sentences are left out."""
    ordered = {str(number): skipped[number] for number in sorted(skipped)}
    shared.write_text(SKIPPED, json.dumps(ordered, ensure_ascii=False, indent=2) + "\n")


class Values:
    """Projects the values of all layers that are not there yet."""

    phase, kind, unit = "values", "values", "layers"

    def __init__(self, shared: SharedFolder, n_layers: int) -> None:
        self.units = n_layers
        self.names = [f"values-{layer:03d}.parquet" for layer in range(n_layers)]
        self._left = [layer for layer in range(n_layers) if not shared.has(self.names[layer])]
        self.units_done = n_layers - len(self._left)

    def tasks(self) -> Iterator[Task]:
        """Return one task per layer."""
        for layer in self._left:
            arguments = {"layer": layer, "name": self.names[layer]}
            yield Task(f"values of layer {layer}", "values", 1, arguments)

    def finished(self, task: Task, result: dict[str, object]) -> Sequence[Task]:
        """Nothing follows."""
        return []

    def given_up(self, task: Task, error: str) -> Sequence[Task]:
        """Without its values there is no index."""
        raise ModelError(f"The {task.key} could not be projected: {error}")
