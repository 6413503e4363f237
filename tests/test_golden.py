"""The first edition's results, which every later one must give: `tests/golden` holds them."""

import pytest

from tests.golden import records
from tests.golden.compare import differences

RECORDED = [(group, name) for group, (names, _) in records.GROUPS.items() for name in names]


@pytest.mark.parametrize(("group", "name"), RECORDED, ids=lambda part: part.replace(" ", "_"))
def test_results_are_those_of_the_first_edition(group, name, tmp_path):
    recorded = records.recorded(group, name)
    found = differences(recorded, records.compute(group, name, tmp_path))
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:20])


def test_every_record_belongs_to_a_model():
    files = {path.relative_to(records.GOLDEN) for path in records.GOLDEN.rglob("*.json")}
    named = {records.path(group, name).relative_to(records.GOLDEN) for group, name in RECORDED}
    assert files == named
