"""The merge tree: every lease once, few segments in being, whatever the order and the kills."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.indexing.tree import FAN_IN, Node, Tree

counts = st.integers(1, 70)


def descendants(tree, node):
    """The leases below a node, by walking down."""
    if node.level == 0:
        return [node.number]
    return [lease for child in tree.children(node) for lease in descendants(tree, child)]


@given(counts)
def test_the_root_is_merged_of_every_lease_once_in_order(n):
    tree = Tree(n)
    assert descendants(tree, tree.root) == list(range(n))


@given(counts)
def test_a_node_is_the_parent_of_its_children_and_has_two_to_fan_in_of_them(n):
    tree = Tree(n)
    nodes = [tree.root]
    for node in nodes:
        if node.level:
            children = tree.children(node)
            assert 2 <= len(children) <= FAN_IN
            assert all(tree.parent(child) == node for child in children)
            assert [lease for child in children for lease in tree.leases(child)] == list(
                tree.leases(node)
            )
            nodes += children
    assert tree.parent(tree.root) is None


def merged(tree, ready, left, chance):
    """Do leases and merges in a random order; return all nodes done."""
    done = []
    while left or ready:
        if ready and (not left or chance.random() < 0.5):
            node = ready.pop(chance.randrange(len(ready)))
        else:
            node = Node(0, left.pop(chance.randrange(len(left))))
        done.append(node)
        if (parent := tree.done(node)) is not None:
            ready.append(parent)
    return done


@given(counts, st.integers(0, 10**6))
def test_in_any_order_every_node_is_merged_once_and_after_its_children(n, seed):
    tree = Tree(n)
    done = merged(tree, [], list(range(n)), random.Random(seed))
    assert len(done) == len(set(done))
    assert done[-1] == tree.root
    for place, node in enumerate(done):
        if node.level:
            assert set(tree.children(node)) <= set(done[:place])


@given(counts, st.integers(0, 10**6), st.data())
def test_a_tree_goes_on_from_whatever_an_earlier_run_left(n, seed, data):
    chance = random.Random(seed)
    tree = Tree(n)
    done = merged(tree, [], list(range(n)), chance)
    before = done[: data.draw(st.integers(0, len(done)))]
    # Children go when their node is merged; a kill may come before some of them went.
    gone = {child for node in before if node.level for child in tree.children(node)}
    left = [node for node in before if node not in gone or chance.random() < 0.3]
    again = Tree(n)
    ready = again.resume(left)
    for lease in range(n):
        assert again.is_covered(lease) == any(lease in again.leases(node) for node in left)
    leases = [lease for lease in range(n) if not again.is_covered(lease)]
    finished = merged(again, ready, leases, chance)
    assert again.root in {*left, *finished}
    assert not set(finished) & set(left)


def test_the_bookkeeping_does_not_grow_with_the_leases():
    sizes = []
    for n in (300, 5_000):
        tree = Tree(n)
        most = 0
        for lease in range(n):
            ready = tree.done(Node(0, lease))
            while ready is not None:
                ready = tree.done(ready)
            most = max(most, sum(map(len, tree._waiting.values())))
        sizes.append(most)
    assert sizes[1] <= sizes[0] + 3 * FAN_IN  # some levels more, not leases


def test_foreign_nodes_are_not_taken_for_work_that_was_done():
    tree = Tree(5)
    assert tree.resume([Node(3, 0), Node(0, 9), Node(1, 1)]) == []
    assert not any(tree.is_covered(lease) for lease in range(5))


def test_a_tree_without_leaves_is_refused():
    with pytest.raises(ValueError, match="0 leases"):
        Tree(0)
