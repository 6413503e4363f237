"""The table of a layer holds what its memories say one by one, sorted and filtered by law."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.errors import FfmemError
from ffmem.web import layer_table as module
from ffmem.web.errors import NotFound
from ffmem.web.layer_table import (
    AGREEMENT,
    N_TOKENS,
    PAGE_SIZE,
    SORTS,
    LayerQuery,
    filter_memories,
    layer_page,
    layer_rows,
    layer_spreads,
    layer_table,
    sort_memories,
)

COLUMNS = list(SORTS)


def every_row(index, layer):
    return layer_rows(index, layer_table(index, layer), range(index.layout.widths[0]))


@functools.cache
def ids_of(index, sentence):
    return index.sentences.row(sentence).ids


def next_id(index, trigger):
    """Return the id of a trigger's next token, None at the end of its sentence."""
    ids = ids_of(index, trigger.sentence)
    return ids[trigger.length] if trigger.length < len(ids) else None


def by_definition(index, memory):
    """Return a memory's head's sign, its agreement, and how many triggers its value predicts."""
    sides = [
        (1, memory.triggers, memory.value.top[0].id),
        (-1, memory.negative_triggers, memory.value.bottom[0].id),
    ]
    found = [
        (sign, abs(trigger.coefficient), next_id(index, trigger) == top)
        for sign, triggers, top in sides
        for trigger in [t for t in triggers if next_id(index, t) is not None][:1]
    ]
    head = max(found, key=lambda one: one[1], default=None)  # the first of equals: m > 0
    following = [(next_id(index, t), top) for _, triggers, top in sides for t in triggers]
    able = [(token, top) for token, top in following if token is not None]
    return {
        "sign": head and head[0],
        "agreement": "none" if head is None else "agrees" if head[2] else "disagrees",
        "followed": sum(token == top for token, top in able),
        "followable": len(able),
    }


def test_every_row_says_what_its_memory_says(index):
    agreeing = 0
    for layer in range(index.n_layers):
        for found, memory in zip(every_row(index, layer), index.memories(layer), strict=True):
            stats, value = memory.stats, memory.value
            assert found.cell == str(memory.cell)
            assert found.top == [token.token for token in value.top[:N_TOKENS]]
            assert found.bottom == [token.token for token in value.bottom[:N_TOKENS]]
            assert found.probability == value.top[0].probability
            for name in ("active_share", "max", "min", "mean"):
                assert getattr(found, name) == getattr(stats, name)
            expected = by_definition(index, memory)
            assert {name: getattr(found, name) for name in expected} == expected
            agreeing += found.followed
    assert agreeing  # else all of this would hold of a table of zeros


def test_agreement_is_what_the_experiment_counts(index):
    """The same top triggers and signs as Figure 4; the index's values, not the model's."""
    from ffmem.indexing.triggers import top_triggers

    for layer in range(index.n_layers):
        head, table = top_triggers(index, layer), layer_table(index, layer)
        assert np.array_equal(table.sign, head.sign)
        assert np.array_equal(table.agreement >= 0, head.exists)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("minus", ["", "-"])
def test_sorting_orders_all_memories_equals_by_number_and_those_without_a_number_last(
    index, column, minus
):
    table = layer_table(index, 0)
    keys = SORTS[column](index, table)
    order = sort_memories(index, table, LayerQuery(sort=f"{minus}{column}")).tolist()
    assert sorted(order) == list(range(index.layout.widths[0]))
    for one, other in itertools.pairwise(order):
        left, right = float(keys[one]), float(keys[other])
        if math.isnan(left):
            assert math.isnan(right)
            assert one < other
        elif left == right:
            assert one < other
        elif not math.isnan(right):
            assert (left > right) == bool(minus)


def test_tokens_are_sorted_as_people_read_them(index):
    rows = layer_page(index, 0, LayerQuery(sort="top")).rows
    words = [(one.top[0].strip().casefold(), one.top[0]) for one in rows]
    assert words == sorted(words)


numbers = st.none() | st.floats(0, 100)


@pytest.fixture(scope="module")
def facts(tiny_index):
    """Of every memory of a layer: active share in percent, agreement, tokens at both ends."""
    return [
        (
            100 * memory.stats.active_share,
            by_definition(tiny_index, memory)["agreement"],
            [one.token.casefold() for one in (*memory.value.top, *memory.value.bottom)],
        )
        for memory in tiny_index.memories(1)
    ]


@given(
    least=numbers,
    most=numbers,
    agreement=st.sampled_from(["", *AGREEMENT.values()]),
    has=st.sampled_from(["", "e", "THE", "␣", "river", "⟨", "<", "nowhere at all"]),
    sort=st.sampled_from([*COLUMNS, *(f"-{name}" for name in COLUMNS)]),
)
def test_filters_leave_exactly_what_they_ask_for(
    tiny_index, facts, least, most, agreement, has, sort
):
    query = LayerQuery(sort, has, least, most, agreement)
    text = has.replace("␣", " ").casefold()
    expected = {
        memory
        for memory, (share, kind, tokens) in enumerate(facts)
        if (least is None or share >= least)
        and (most is None or share <= most)
        and (not agreement or kind == agreement)
        and any(text in token for token in tokens)
    }
    found = sort_memories(tiny_index, layer_table(tiny_index, 1), query).tolist()
    assert set(found) == expected
    assert len(found) == len(expected)


def test_a_match_is_the_outermost_token_that_holds_the_text(index):
    found = layer_page(index, 0, LayerQuery(has="th"))
    assert found.rows
    for one in found.rows:
        value = index[one.cell].value
        ranks = {
            end: [token.token.lower().find("th") >= 0 for token in getattr(value, end)]
            for end in ("top", "bottom")
        }
        match = one.match
        assert ranks[match.end].index(True) == match.rank - 1
        assert "th" in match.token.lower()
        assert all(True not in held[: match.rank - 1] for held in ranks.values())


def test_pages_follow_each_other_and_hold_every_memory_once(index, monkeypatch):
    monkeypatch.setattr(module, "PAGE_SIZE", 7)
    query = LayerQuery(sort="-max")
    first = layer_page(index, 1, query)
    pages = [layer_page(index, 1, query, page) for page in range(1, first.pages + 1)]
    cells = [one.memory for page in pages for one in page.rows]
    assert cells == sort_memories(index, layer_table(index, 1), query).tolist()
    assert all(len(page.rows) == 7 for page in pages[:-1])
    assert first.n == index.layout.widths[0]
    assert PAGE_SIZE == 50


@pytest.mark.parametrize("page", [0, -1, 2, 10**30])
def test_a_page_that_is_not_there_is_an_error_that_says_which_are(tiny_index, page):
    with pytest.raises(NotFound, match=r"no page .* there are pages 1 to 1\."):
        layer_page(tiny_index, 0, LayerQuery(), page)


@pytest.mark.parametrize("layer", [-1, 2, 10**30])
def test_a_layer_that_is_not_there_is_an_error_that_says_which_are(tiny_index, layer):
    with pytest.raises(NotFound, match=r"No layer .* has layers 0 to 1\."):
        layer_table(tiny_index, layer)


def test_nothing_found_is_one_empty_page(tiny_index):
    assert layer_page(tiny_index, 0, LayerQuery(has="nowhere at all")) == ([], 1, 1, 0)


def test_what_cannot_be_sorted_or_filtered_by_is_named():
    with pytest.raises(
        FfmemError, match=r"sorted by 'shoe size'\. Sort by memory, .* with a leading minus"
    ):
        LayerQuery(sort="shoe size")
    with pytest.raises(FfmemError, match=r"agreement 'maybe'\. There are: agrees, disagrees"):
        LayerQuery(agreement="maybe")


def test_spreads_are_the_quartiles_of_the_memories(index):
    for layer, found in enumerate(layer_spreads(index)):
        stats = [memory.stats for memory in index.memories(layer)]
        largest = [max(abs(one.max), abs(one.min)) for one in stats]
        shares = [one.active_share for one in stats]
        assert found.layer == layer
        for numbers, name in ((largest, "largest"), (shares, "active_share")):
            expected = np.quantile(numbers, (0.25, 0.5, 0.75))
            assert [getattr(found, name)[q] for q in ("q1", "median", "q3")] == pytest.approx(
                expected
            )
        assert found.largest["max"] == max(largest)


def test_tables_are_kept_but_not_without_end(tiny_index):
    assert layer_table(tiny_index, 0) is layer_table(tiny_index, 0)
    assert layer_table.cache_info().maxsize == module.MAX_TABLES
    assert filter_memories(tiny_index, layer_table(tiny_index, 0), LayerQuery()).all()
