"""The first edition's results, which every later one must give: `tests/golden` holds them."""

import pytest

from tests.golden import records
from tests.golden.compare import differences

RECORDED = [(group, name) for group, (names, _) in records.GROUPS.items() for name in names]


@pytest.fixture(autouse=True)
def _numbers_alone(monkeypatch):
    """Records have no figures; other tests draw them."""
    monkeypatch.setattr("ffmem.experiments.charts.write_figure", lambda *given: None)


@pytest.mark.parametrize(("group", "name"), RECORDED, ids=lambda part: part.replace(" ", "_"))
def test_results_are_those_of_the_first_edition(group, name, tmp_path):
    recorded = records.recorded(group, name)
    found = differences(recorded, records.compute(group, name, tmp_path))
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:20])


def test_every_record_belongs_to_a_model():
    files = {path.relative_to(records.GOLDEN) for path in records.GOLDEN.rglob("*.json")}
    named = {records.path(group, name).relative_to(records.GOLDEN) for group, name in RECORDED}
    assert files == named


def triggers(*items):
    return {"triggers": [dict(zip(NAMES, item, strict=True)) for item in items]}


NAMES = ("coefficient", "sentence", "length")
RECORD = triggers((3.0, 5, 2), (2.0, 7, 4), (2.0 - 1e-5, 1, 9), (1.0, 3, 3))


@pytest.mark.parametrize(
    "close",
    [
        triggers((3.0001, 5, 2), (2.0, 7, 4), (2.0, 1, 9), (1.0, 3, 3)),
        triggers((3.0, 5, 2), (2.0, 1, 9), (2.0, 7, 4), (1.0, 3, 3)),
        triggers((3.0, 5, 2), (2.0, 7, 4), (2.0, 1, 9), (1.0, 8, 8)),
        triggers((3.0, 5, 6), (2.0, 7, 4), (2.0, 1, 9), (1.0, 3, 3)),
        triggers((3.0, 5, 2), (2.0, 7, 4), (2.0, 1, 9), (1.0, 3, 3)) | {"new": 1},
    ],
    ids=["noise", "near tie", "tie at the cut", "tie in a sentence", "new field"],
)
def test_a_difference_of_float_noise_passes(close):
    assert differences(RECORD, close) == []


@pytest.mark.parametrize(
    "other",
    [
        triggers((3.001, 5, 2), (2.0, 7, 4), (2.0, 1, 9), (1.0, 3, 3)),
        triggers((3.0, 7, 4), (2.0, 5, 2), (2.0, 1, 9), (1.0, 3, 3)),
        triggers((3.0, 5, 3), (2.0, 7, 5), (2.0, 1, 9), (1.0, 3, 3)),
        triggers((3.0, 5, 2), (2.0, 7, 4), (2.0, 1, 9)),
        {},
    ],
    ids=["number", "order", "lengths", "count", "missing field"],
)
def test_any_other_difference_is_found(other):
    assert differences(RECORD, other) != []


def test_counts_texts_and_signs_are_exact():
    record = {"n": 3, "case": "ffn", "related": True, "next_token": None, "mean": 0.5}
    assert differences(record, dict(record)) == []
    for name, value in (
        ("n", 4),
        ("case", "residual"),
        ("related", False),
        ("next_token", " a"),
        ("mean", -0.5),
    ):
        assert differences(record, record | {name: value}) != []
