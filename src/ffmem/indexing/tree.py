"""The merge tree: which segments are put together when, with a few of them in being at a time.

The leaves are leases. A node of level k covers FAN_IN^k consecutive leases, fewer at the end:

    level 2   ┌──────────── 0 ────────────┐ ┌── 1 ──┐
    level 1   ┌─ 0 ─┐┌─ 1 ─┐┌─ 2 ─┐┌─ 3 ─┐ ┌─ 4 ─┐  │
    level 0   0 1 2 3  4 5 6 7  …                    20

A node that would have one child is that child. As soon as all children of a node are done, it can
be merged, and they can go: the files in being depend on the workers and the levels, not on the
number of leases, and so does this bookkeeping.
"""

from collections.abc import Iterable
from typing import NamedTuple

FAN_IN = 4
"""Children of a node. Few: what is merged early raises the thresholds of all later leases."""


class Node(NamedTuple):
    """A segment's place in the tree."""

    level: int
    number: int


class Tree:
    """The tree over some leases: what is done, and what can be merged."""

    def __init__(self, n_leases: int) -> None:
        if n_leases < 1:
            raise ValueError(f"A tree has leaves; {n_leases} leases were given.")
        self.n_leases = n_leases
        self._present: set[Node] = set()
        self._waiting: dict[Node, set[Node]] = {}
        """Of each node that some but not all children of are done: those."""
        level = 0
        while FAN_IN**level < n_leases:
            level += 1
        self.root = self.canonical(Node(level, 0))

    def leases(self, node: Node) -> range:
        """Return the leases that a node covers."""
        width = FAN_IN**node.level
        return range(node.number * width, min((node.number + 1) * width, self.n_leases))

    def canonical(self, node: Node) -> Node:
        """Return the node itself, or the one below it that is all there is of it."""
        while node.level > 0 and len(self.leases(node)) <= FAN_IN ** (node.level - 1):
            node = Node(node.level - 1, node.number * FAN_IN)
        return node

    def children(self, node: Node) -> list[Node]:
        """Return what a node is merged of, in the order of leases."""
        below = FAN_IN ** (node.level - 1)
        n = -(-len(self.leases(node)) // below)
        first = node.number * FAN_IN
        return [self.canonical(Node(node.level - 1, first + i)) for i in range(n)]

    def parent(self, node: Node) -> Node | None:
        """Return what a node is merged into; None for the root."""
        if node == self.root:
            return None
        above = Node(node.level + 1, node.number // FAN_IN)
        while self.canonical(above) != above:
            above = Node(above.level + 1, above.number // FAN_IN)
        return above

    def resume(self, present: Iterable[Node]) -> list[Node]:
        """Take what an earlier run has left as done; return what can be merged at once."""
        known = {node for node in present if self.canonical(node) == node and self.leases(node)}
        self._present = known
        ready = []
        for node in sorted(known):
            above = self.parent(node)
            while above is not None and above not in known:
                above = self.parent(above)
            if above is None and (merged := self.done(node)) is not None:
                ready.append(merged)
        return ready

    def is_covered(self, lease: int) -> bool:
        """Whether an earlier run has left a segment that a lease is part of."""
        node: Node | None = Node(0, lease)
        while node is not None and node not in self._present:
            node = self.parent(node)
        return node is not None

    def done(self, node: Node) -> Node | None:
        """Take a node as done; return its parent if that can be merged now."""
        parent = self.parent(node)
        if parent is None:
            return None
        done = self._waiting.setdefault(parent, set())
        done.add(node)
        if len(done) < len(self.children(parent)):
            return None
        del self._waiting[parent]
        return parent
