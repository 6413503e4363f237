import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.cells import Cell
from ffmem.errors import UnknownCell

NUMBERS = st.integers(0, 10**6)


@given(NUMBERS, NUMBERS)
def test_what_a_cell_writes_it_reads(layer, memory):
    assert Cell.parse(str(Cell(layer, memory))) == (layer, memory)


@pytest.mark.parametrize(
    "text", ["L5N1234", "L5D1234", "5.1234", "5:1234", "5/1234", "l5n1234", " L05N1234\n"]
)
def test_all_forms_name_the_same_memory(text):
    assert Cell.parse(text) == Cell(5, 1234)
    assert str(Cell.parse(text)) == "L5N1234"


@pytest.mark.parametrize(
    "text",
    [
        *("", "L5", "5", "5.", "L5N", "N5L3", "-1.3", "5.1.2", "L5M3", "5 3", "٥.٣", "L5E1N3"),
        *(f"L{'9' * 5000}N1", f"1.{'9' * 5000}"),
    ],
)
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(UnknownCell, match=r"like L5N1234 or 5\.1234"):
        Cell.parse(text)


def test_a_memory_that_the_model_lacks_is_refused_with_its_size():
    assert Cell(1, 23).within(2, 24) == Cell(1, 23)
    for cell in (Cell(2, 0), Cell(0, 24)):
        with pytest.raises(UnknownCell, match=rf"no memory {cell}.* 0 to 1 with memories 0 to 23"):
            cell.within(2, 24)


def test_a_pair_of_numbers_is_a_cell_and_nothing_else_is():
    assert Cell.of((5, 1234)) == Cell.of("L5N1234") == Cell.of(Cell(5, 1234))
    for wrong in (5, None, (1, 2, 3), (1, -2), (1.0, 2)):
        with pytest.raises(UnknownCell, match="is not a memory"):
            Cell.of(wrong)
