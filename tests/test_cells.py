"""Names of memories, and where each stands in its layer and in the model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.cells import BankRecord, Cell, Expert, Layout
from ffmem.errors import FfmemError, UnknownCell
from ffmem.records import NotARecord

NUMBERS = st.integers(0, 10**6)
SIZES, COUNTS = st.integers(1, 5), st.integers(1, 4)


def banks(kind, count=COUNTS):
    return st.lists(st.builds(BankRecord, size=SIZES, kind=st.just(kind), count=count), max_size=1)


LAYERS = st.lists(
    st.tuples(banks("dense", st.just(1)), banks("shared"), banks("expert")).map(
        lambda kinds: [bank for kind in kinds for bank in kind]
    ),
    min_size=1,
    max_size=5,
)
MIXED = Layout(
    [
        [BankRecord(size=4)],
        [],
        [BankRecord(size=3, kind="shared"), BankRecord(size=2, kind="expert", count=4)],
        [BankRecord(size=2, kind="shared", count=2)],
    ]
)
"""Dense, none, one shared expert and four others, two shared ones."""


@given(
    NUMBERS,
    NUMBERS,
    st.one_of(st.just(""), st.from_regex(r"(E|S)(0|[1-9][0-9]?)|S", fullmatch=True)),
)
def test_what_a_cell_writes_it_reads(layer, memory, bank):
    assert Cell.parse(str(Cell(layer, memory, bank))) == (layer, memory, bank, 0)


@pytest.mark.parametrize(
    "text", ["L5N1234", "L5D1234", "5.1234", "5:1234", "5/1234", "l5n1234", " L05N1234\n"]
)
def test_all_forms_name_the_same_memory(text):
    assert Cell.parse(text) == Cell(5, 1234)
    assert str(Cell.parse(text)) == "L5N1234"


@pytest.mark.parametrize(
    ("text", "layer", "bank", "memory"),
    [
        ("L5E12N345", 5, "E12", 345),
        ("l5e012n0345", 5, "E12", 345),
        ("L5SN7", 5, "S", 7),
        ("L5S1N7", 5, "S1", 7),
        ("L5E0D7", 5, "E0", 7),
    ],
)
def test_a_name_may_say_the_bank(text, layer, bank, memory):
    assert Cell.parse(text) == (layer, memory, bank, 0)
    assert str(Cell.parse(text)) == f"L{layer}{bank}N{memory}"


@pytest.mark.parametrize(
    "text",
    [
        *("", "L5", "5", "5.", "L5N", "N5L3", "-1.3", "5.1.2", "L5M3", "5 3", "٥.٣"),
        *("L5EN3", "L5E1S1N3", "E1N3", "L5E1", "5E1.3"),
    ],
)
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(UnknownCell, match=r"like L5N1234 or 5\.1234"):
        Cell.parse(text)


@pytest.mark.parametrize(
    "text", [f"L{'9' * 5000}N1", f"1.{'9' * 5000}", f"L1E{'9' * 5000}N1", f"L0N1{'0' * 18}"]
)
def test_a_number_that_no_model_has_is_refused_as_such(text):
    with pytest.raises(UnknownCell, match=r"^There is no memory .{1,51}: no model has that many"):
        Cell.parse(text)


def test_a_pair_of_numbers_is_a_cell_and_nothing_else_is():
    assert Cell.of((5, 1234)) == Cell.of("L5N1234") == Cell.of(Cell(5, 1234))
    for wrong in (5, None, (1, 2, 3), (1, -2), (1.0, 2)):
        with pytest.raises(UnknownCell, match="is not a memory"):
            Cell.of(wrong)


@given(LAYERS)
def test_every_memory_has_one_name_one_number_and_one_place(layers):
    layout = Layout(layers)
    cells = list(layout)
    assert len(cells) == len(layout) == sum(layout.widths)
    assert len({str(cell) for cell in cells}) == len(cells)
    assert cells == sorted(cells)
    for number, cell in enumerate(cells):
        assert layout.number(cell) == number
        assert layout.at(number) == layout.cell(cell.layer, cell.memory) == cell
        assert layout.resolve(str(cell)) == cell
        assert layout.resolve((cell.layer, cell.memory)) == layout.resolve(cell) == cell


@given(LAYERS)
def test_layers_begin_where_the_ones_before_them_end(layers):
    layout = Layout(layers)
    assert layout.starts == [sum(layout.widths[:n]) for n in range(layout.n_layers + 1)]
    assert layout.memory_layers == [n for n in range(layout.n_layers) if layout.widths[n]]
    for layer, width in enumerate(layout.widths):
        with pytest.raises(IndexError):
            layout.cell(layer, width)
    with pytest.raises(IndexError):
        layout.at(len(layout))


def test_banks_follow_each_other_in_a_layer():
    assert list(map(str, MIXED))[4:] == [
        *("L2SN0", "L2SN1", "L2SN2", "L2E0N0", "L2E0N1", "L2E1N0", "L2E1N1"),
        *("L2E2N0", "L2E2N1", "L2E3N0", "L2E3N1", "L3S0N0", "L3S0N1", "L3S1N0", "L3S1N1"),
    ]
    assert MIXED.resolve("L2E3N1") == (2, 10, "E3", 9)


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("L4N0", "the model has layers 0 to 3"),
        (Cell(-1, 0), "the model has layers 0 to 3"),
        ("L0N4", "layer 0 has memories 0 to 3"),
        (Cell(0, -1), "layer 0 has memories 0 to 3"),
        ("L0E0N1", "layer 0 has memories 0 to 3, and no experts\\."),
        ("L1N0", "layer 1 has no memories"),
        (
            "L2N11",
            "layer 2 has bank S with memories 0 to 2, and banks E0 to E3 with memories 0 to 1",
        ),
        ("L2E4N0", "layer 2 has bank S with"),
        ("L2E1N2", "layer 2 has bank S with"),
        ("L2S0N0", "layer 2 has bank S with"),
        ("L3SN0", "layer 3 has banks S0 to S1 with memories 0 to 1"),
    ],
)
def test_a_memory_that_the_model_lacks_is_refused_with_what_there_is(cell, found):
    with pytest.raises(UnknownCell, match=rf"There is no memory {Cell.of(cell)}: {found}"):
        MIXED.resolve(cell)


def test_an_expert_of_a_layer_without_experts_is_refused_and_says_so():
    with pytest.raises(
        UnknownCell, match=r"^There is no expert L0E2: .* 0 to 3, and no experts\.$"
    ):
        MIXED.memories_of(Expert(0, "E2"))


def test_a_layer_that_the_model_lacks_is_refused_with_what_there_is():
    MIXED.check_layer(3)
    for layer in (4, -1):
        with pytest.raises(FfmemError, match=f"no layer {layer}: the model has layers 0 to 3"):
            MIXED.check_layer(layer)


def test_sizes_are_one_number_where_layers_are_alike():
    assert Layout.dense([1536] * 30).per_layer == 1536
    assert Layout.dense([1536] * 30).shown == "30 × 1,536 memories"
    assert Layout.dense([3, 0, 2000]).per_layer == [3, 0, 2000]
    assert Layout.dense([3, 0, 2000]).shown == "2,003 memories in 3 layers"


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 2, "count": 0}, {"size": 2, "kind": "x"}])
def test_a_record_that_is_no_bank_is_refused(wrong):
    with pytest.raises(NotARecord, match="is not a valid bank"):
        BankRecord.of(wrong)
