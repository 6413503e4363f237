"""What is drawn, for whom, in which order: laws over seeds and sizes, on both kinds of index."""

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ffmem.annotation.sampling import assign, draw_plan, read_cases
from ffmem.annotation.study import COMPOSITION, CONTROL, TRIGGERS
from ffmem.cells import Cell
from ffmem.errors import FfmemError, StoreError
from ffmem.experiments.base import ExperimentResult
from ffmem.patterns.store import main_sign

ROWS = [
    {"prefix": f"p{i}", "residual_top": " later", "ff_top": " a", "output_top": " sooner"}
    for i in range(3)
]

asked = st.fixed_dictionaries(
    {
        "per_layer": st.integers(1, 4),
        "top": st.integers(1, 8),
        "annotators": st.integers(1, 4),
        "controls": st.sampled_from([0, 0.1, 0.2, 0.5]),
        "seed": st.integers(0, 5),
    }
)
over_an_index = settings(
    max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def kinds(plan):
    return Counter(item.kind for item in plan.items)


@over_an_index
@given(asked)
def test_as_many_of_each_kind_as_asked(index, asked):
    plan = draw_plan(index, **asked, composition=ROWS)
    found = kinds(plan)
    assert found[TRIGGERS] == asked["per_layer"] * index.n_layers
    lists = found[TRIGGERS] + found[CONTROL]
    assert abs(found[CONTROL] - asked["controls"] * lists) <= 0.5 / (1 - asked["controls"])
    assert found[COMPOSITION] == len(ROWS)
    drawn = [item.cell for item in plan.items if item.kind == TRIGGERS]
    assert len(set(drawn)) == len(drawn)


@over_an_index
@given(asked)
def test_a_memory_is_shown_by_the_first_triggers_of_its_main_list(index, asked):
    for item in draw_plan(index, **asked).items:
        if item.kind == TRIGGERS:
            cell = Cell.parse(item.cell)
            assert item.sign == main_sign(index, cell.layer)[cell.memory]
            memory = index[item.cell]
            triggers = memory.triggers if item.sign > 0 else memory.negative_triggers
            assert [text.prefix for text in item.texts] == [
                trigger.prefix for trigger in triggers[: asked["top"]]
            ]
            assert [(t.last_token, t.next_token, t.rest) for t in item.texts] == [
                (t.last_token, t.next_token, t.rest) for t in triggers[: asked["top"]]
            ]


@over_an_index
@given(asked)
def test_a_control_has_random_prefixes_as_long_as_the_triggers_whose_place_it_takes(index, asked):
    plan = draw_plan(index, **asked)
    known = {}
    for sentence in index.sentences.rows(0, index.sentences.n_sentences):
        for length in range(len(sentence.ids) + 1):
            place = index.prefix_text(sentence, length)
            known.setdefault((place.prefix, place.rest), set()).add(length)
    for item in plan.items:
        if item.kind != CONTROL:
            continue
        memory = index[item.cell]
        triggers = memory.triggers if item.sign > 0 else memory.negative_triggers
        for text, trigger in zip(item.texts, triggers[: asked["top"]], strict=True):
            assert trigger.length in known[text.prefix, text.rest]
            assert (text.next_token is None) == (trigger.next_token is None)


def test_controls_come_from_the_whole_corpus(tiny_index):
    plans = [
        draw_plan(tiny_index, per_layer=10, top=6, controls=0.5, seed=seed) for seed in range(8)
    ]
    seen = {
        text.prefix + text.rest
        for plan in plans
        for item in plan.items
        if item.kind == CONTROL
        for text in item.texts
    }
    rows = tiny_index.sentences.rows(0, tiny_index.sentences.n_sentences)
    assert {row.text for row in rows if row.text.isascii() and len(row.ids) > 5} <= seen


def test_a_control_has_a_sentence_once_where_lists_have(tiny_index):
    plan = draw_plan(tiny_index, per_layer=10, top=6, controls=0.5)
    controls = [item for item in plan.items if item.kind == CONTROL]
    assert len(controls) == 20
    for item in controls:
        whole = [text.prefix + text.rest for text in item.texts]
        assert len(set(whole)) == len(whole)
    assert plan.settings["counts"]["control_texts_of_a_repeated_sentence"] == 0


def test_controls_that_cannot_have_different_sentences_are_counted(index_of, tmp_path):
    from ffmem import Corpus

    corpus = tmp_path / "three.txt"
    corpus.write_text("one press said so and so\ntwo men said this and that\nthree more words\n")
    index = index_of("llama", Corpus(str(corpus), unit="line"), tmp_path / "index")
    plan = draw_plan(index, per_layer=2, top=3, controls=0.5)
    repeated = sum(
        len(item.texts) - len({text.prefix + text.rest for text in item.texts})
        for item in plan.items
        if item.kind == CONTROL
    )
    assert plan.settings["counts"]["control_texts_of_a_repeated_sentence"] == repeated
    assert plan.settings["counts"]["lists_shorter_than_top"] == 0
    assert draw_plan(index, top=4).settings["counts"]["lists_shorter_than_top"] == 20


@over_an_index
@given(asked)
def test_the_same_seed_gives_the_same_plan_and_another_one_another(index, asked):
    plan = draw_plan(index, **asked)
    assert draw_plan(index, **asked) == plan
    other = draw_plan(index, **(asked | {"seed": asked["seed"] + 1}))
    assert {item.key for item in other.items} != {item.key for item in plan.items}


def test_everybody_has_an_order_of_their_own_with_controls_anywhere(tiny_index):
    plan = draw_plan(tiny_index, per_layer=20, top=5, controls=0.5, composition=ROWS)
    orders = list(plan.orders.values())
    assert all(set(order) == {item.key for item in plan.items} for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    by_key = {item.key: item.kind for item in plan.items}
    for order in orders:
        shown = [by_key[key] for key in order]
        assert shown[-3:] == [COMPOSITION] * 3
        halves = [shown[:40].count(CONTROL), shown[40:80].count(CONTROL)]
        assert sum(halves) == 40
        assert min(halves) >= 10  # all on one side would be 0


def test_nothing_that_annotators_see_tells_a_control_from_a_list(tiny_index):
    plan = draw_plan(tiny_index, per_layer=20, top=5, controls=0.5)
    seen = {
        (item.blind()._replace(key="", texts=()), len(item.key), len(item.texts))
        for item in plan.items
    }
    assert len(seen) == 1
    # Nor do keys come in an order that would.
    kinds = [item.kind for item in sorted(plan.items, key=lambda item: item.key)]
    assert 10 <= kinds[:40].count(CONTROL) <= 30


def test_memories_are_drawn_uniformly(tiny_index):
    counts = Counter(
        item.cell
        for seed in range(12)
        for item in draw_plan(tiny_index, per_layer=12, top=1, controls=0, seed=seed).items
    )
    # Half of the memories, twelve times: by chance each is drawn 6 times, hardly ever 0 or 12.
    assert len(counts) == tiny_index.n_layers * tiny_index.layout.widths[0]
    assert 0 < min(counts.values()) <= max(counts.values()) < 12


def test_what_is_less_than_asked_is_counted(tiny_index):
    drawn = draw_plan(tiny_index, per_layer=1000, top=25).settings["counts"]
    assert drawn["layers_with_fewer"] == {"0": 24, "1": 24}
    assert drawn["lists_shorter_than_top"] == 48


@given(st.integers(0, 60), st.integers(1, 8), st.data())
def test_loads_differ_by_one_at_most_and_pairs_share_evenly(n, n_people, data):
    people = [f"p{i}" for i in range(n_people)]
    overlap = data.draw(st.integers(1, n_people))
    assigned = assign(n, people, overlap, random.Random(data.draw(st.integers(0, 99))))
    assert [len(set(some)) for some in assigned] == [overlap] * n
    for upto in range(n + 1):
        loads = Counter(one for some in assigned[:upto] for one in some)
        assert max(loads.values(), default=0) - min(loads[one] for one in people) <= 1
    met = Counter(pair for some in assigned for pair in combinations(some, 2))
    shared = [met[pair] for pair in combinations(people, 2)] or [0]
    assert max(shared) - min(shared) <= 3


def test_with_an_overlap_everybody_has_a_fair_share_of_every_item(tiny_index):
    plan = draw_plan(tiny_index, per_layer=9, annotators=["ana", "ben", "cai"], overlap=2)
    loads = [len(order) for order in plan.orders.values()]
    assert sum(loads) == 2 * len(plan.items)
    assert max(loads) - min(loads) <= 1
    alone = draw_plan(tiny_index, per_layer=9, annotators=2, overlap=1)
    assert not set(alone.orders["annotator-1"]) & set(alone.orders["annotator-2"])


def test_a_case_of_composition_says_nothing_of_the_answer(tiny_index):
    rows = [ROWS[0] | {"related": True, "similarity": 0.9, "next_token": " sooner"}]
    case = draw_plan(tiny_index, per_layer=1, composition=rows).items[-1]
    assert case.words == (" later", " a", " sooner")
    assert case.texts == (("p0", None, None, ""),)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"annotators": 0}, "how many of the 0"),
        ({"annotators": ["ana", "ana"]}, "same name"),
        ({"annotators": ["adjudicator-1"]}, "same name"),
        ({"annotators": [" "]}, "is not a name"),
        ({"overlap": 4}, "how many of the 3"),
        ({"overlap": "some"}, "how many of the 3"),
        ({"composition": [{"prefix": "x"}]}, "residual_top"),
    ],
)
def test_what_cannot_be_is_refused(tiny_index, options, sentence):
    with pytest.raises(FfmemError, match=sentence):
        draw_plan(tiny_index, **options)


def test_cases_of_another_model_or_experiment_are_refused(tiny_index, tmp_path):
    ours = {"model_hash": tiny_index.manifest.model.hash}
    name = "last-layer-composition"
    path = ExperimentResult(name, "Sec. 5.2", ours, ROWS).write(tmp_path)
    assert read_cases(path, tiny_index) == ROWS
    path = ExperimentResult(name, "Sec. 5.2", {"model_hash": "x"}, ROWS).write(tmp_path)
    with pytest.raises(StoreError, match=r"another model \(x\)"):
        read_cases(path, tiny_index)
    path = ExperimentResult("agreement", "Fig. 4", ours, ROWS).write(tmp_path)
    with pytest.raises(StoreError, match="is a result of agreement"):
        read_cases(path, tiny_index)
