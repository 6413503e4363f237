import pytest

from ffmem.errors import StoreError
from ffmem.training.curve import Curve


def test_rows_behind_the_checkpoint_are_taken_back(tmp_path):
    curve = Curve(tmp_path)
    curve.begin()
    for step in range(3):
        curve.add({"step": step, "loss": 1 / (step + 3)})
    with curve.path.open("a") as file:
        file.write('{"step": 3, "lo')  # killed in the midst of a row
    again = Curve(tmp_path)
    again.take_up(2)
    assert again.rows == curve.rows[:2]
    again.add(curve.rows[2])
    assert Curve(tmp_path).path.read_text().count("\n") == 3
    other = Curve(tmp_path)
    other.take_up(3)
    assert other.rows == curve.rows


@pytest.mark.parametrize(("content", "told"), [("{}\n", "1 rows, not 2"), ("x\n{}\n", "read")])
def test_rows_that_are_missing_or_damaged_are_told(tmp_path, content, told):
    (tmp_path / "curve.jsonl").write_text(content)
    with pytest.raises(StoreError, match=told):
        Curve(tmp_path).take_up(2)


def test_a_curve_that_is_gone_is_told(tmp_path):
    with pytest.raises(StoreError, match="cannot be read"):
        Curve(tmp_path).take_up(1)
