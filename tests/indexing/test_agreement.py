"""What the index stores of agreement follows from its triggers and values, memory by memory."""

import numpy as np
import pytest

from ffmem.indexing.agreement import agreement_of, read_agreement
from ffmem.indexing.triggers import NO_SIGN, CorpusTokens
from tests.conftest import DENSE


def by_definition(index, memory):
    """Return sign, agreement and the two counts of one memory, trigger by trigger."""
    sides = [(1, memory.triggers, "top"), (-1, memory.negative_triggers, "bottom")]
    best, followed, followable = None, 0, 0
    for sign, triggers, end in sides:
        first = getattr(memory.value, end)[:1]
        for trigger in (one for one in triggers if one.next_token is not None):
            ids = index.sentences.row(trigger.sentence).ids
            is_followed = bool(first) and ids[trigger.length] == first[0].id
            followed, followable = followed + is_followed, followable + 1
            if best is None or abs(trigger.coefficient) > best[0]:
                best = abs(trigger.coefficient), sign, int(is_followed)
    sign, agrees = (NO_SIGN, -1) if best is None else best[1:]
    return sign, agrees, followed, followable


@pytest.fixture(params=["tiny_index", "ungated_index", "expert_index", *DENSE])
def any_index(request, kind_index):
    """An index of each family of the fixtures, and of each kind of memory of ours."""
    name = request.param
    return kind_index(name) if name in DENSE else request.getfixturevalue(name)


def test_the_stored_agreement_is_that_of_every_memory_by_definition(any_index):
    for layer in range(any_index.n_layers):
        found = read_agreement(any_index, layer).columns()
        expected = np.array([by_definition(any_index, one) for one in any_index.memories(layer)])
        names = ["sign", "agreement", "followed", "followable"]
        assert list(found) == names if any_index.manifest.model.has_values else ["sign"]
        for name, column in found.items():
            assert column.tolist() == expected[:, names.index(name)].tolist(), name


def test_a_memory_whose_triggers_are_whole_sentences_has_no_top_trigger():
    corpus = CorpusTokens(np.array([0, 3]), np.array([7, 8, 9], np.int32))  # 7 8 | 9
    triggers = {
        "coefficient": np.array([[2, 1], [2, 0], [0, 0], [3, 2]], np.float32),
        "prefix": np.array([[2, 1], [4, -1], [-1, -1], [1, 3]]),
    }
    values = {"top_ids": np.array([[8], [8], [8], [7]]), "bottom_ids": np.full((4, 1), 9)}
    found = agreement_of(triggers, values, lambda prefixes: corpus.following[prefixes])
    assert found.sign.tolist() == [1, 0, 0, 1]
    assert found.agreement.tolist() == [1, -1, -1, 0]
    assert found.followed.tolist() == [1, 0, 0, 0]
    assert found.followable.tolist() == [1, 0, 0, 2]
