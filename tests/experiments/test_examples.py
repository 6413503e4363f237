import subprocess
import sys
from dataclasses import replace

import pytest

from ffmem.experiments.examples import (
    memory_cards,
    predictive_examples,
)
from ffmem.experiments.examples import trigger_excerpt as excerpt
from ffmem.indexing.memory import Trigger
from tests.experiments.results import result


def trigger(prefix="", last=None, following=None):
    return Trigger(1, 1.0, 0, 1, prefix, last, following, "", None)


def rows_of(index, n):
    """Return rows of predictive-values of the first memories of an index."""
    rows = []
    for cell in list(index)[:n]:
        token = index[cell].value.top[0]
        followers = [one.next_token for one in index[cell].triggers]
        rows.append(
            {
                "cell": str(cell),
                "layer": cell.layer,
                "sign": 1,
                "token": token.token,
                "probability": token.probability,
                "precision": 0.5,
                "n_triggers": len(followers),
                "agreeing": followers.count(token.token),
            }
        )
    return rows


def test_table_2_takes_values_that_are_borne_out_first(index):
    rows = rows_of(index, 24)
    for row in sorted(rows, key=lambda row: row["probability"])[:3]:
        row["agreeing"] = 2
    found = predictive_examples(index, replace(result("predictive-values"), rows=rows))
    assert len(found) == 6
    order = sorted(rows, key=lambda row: (row["agreeing"] == 0, -row["probability"]))
    assert [one.cell for one in found] == [row["cell"] for row in order[:6]]
    assert all(row["agreeing"] for row in order[:3])


def test_the_example_of_a_value_is_the_strongest_trigger_it_predicts(index):
    cell = next(cell for cell in index if index[cell].triggers)
    triggers = [one for one in index[cell].triggers if one.next_token is not None]
    row = rows_of(index, 1)[0] | {"cell": str(cell), "token": triggers[-1].next_token}
    (found,) = predictive_examples(index, replace(result("predictive-values"), rows=[row]))
    expected = next(one for one in triggers if one.next_token == row["token"])
    assert found.agrees
    assert found.excerpt == excerpt(expected)


def test_a_card_shows_the_side_that_was_cited(tiny_index):
    (card,) = memory_cards(tiny_index, [("L1N2", -1), ("L1N2", 1), ("L1N2", -1)])
    memory = tiny_index["L1N2"]
    assert [side.sign for side in card.sides] == [1, -1]
    assert card.sides[0].tokens == [one.token for one in memory.value.top[:8]]
    assert card.sides[1].tokens == [one.token for one in memory.value.bottom[:8]]
    assert card.sides[1].excerpts == [excerpt(one) for one in memory.negative_triggers[:3]]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (trigger("in the base", " base", " of"), ("in the", " base", "␣of")),
        (trigger("", None, "x"), ("", "", "x")),
        (trigger("whole\n", "\n", None), ("whole", "↵", "∎")),
        (trigger("a⟨e3⟩", "\x00", "b"), ("a⟨e3⟩", "", "b")),
    ],
)
def test_an_excerpt_sets_the_last_token_apart(one, expected):
    assert tuple(excerpt(one)) == expected


def test_charts_summaries_and_claims_need_no_torch():
    code = (
        "import sys, ffmem.experiments.render; from ffmem.experiments.base import find_all;"
        "find_all(); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
