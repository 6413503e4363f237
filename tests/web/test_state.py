from urllib.parse import parse_qs, quote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.cells import Cell
from ffmem.errors import FfmemError, UnknownCell
from ffmem.web.errors import LimitExceeded
from ffmem.web.state import MAX_CHARACTERS, MAX_EDITS, State, quote_url, read_state

cells = st.builds(
    Cell,
    st.integers(0, 40),
    st.integers(0, 9999),
    st.sampled_from(["", "E12", "S"]),
    st.just(0),
)
numbers = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def states(draw):
    """Fields of a state; it is made in the test, since type checks within a strategy are random."""
    edited = draw(st.lists(cells, unique=True, max_size=9))
    off, numbered = edited[: len(edited) // 3], edited[len(edited) // 3 :]
    pairs = [(cell, draw(numbers)) for cell in numbered]
    half = len(pairs) // 2
    return (
        draw(st.none() | st.text(st.characters(categories=["L", "N"]), min_size=1)),
        draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=50)),
        draw(st.none() | st.integers(-5, 300)),
        tuple(off),
        tuple(pairs[:half]),
        tuple(pairs[half:]),
    )


def read(address):
    given = parse_qs(urlsplit(address).query, keep_blank_values=True)
    one = {name: given[name][0] for name in ("index", "text") if name in given}
    position = int(given["position"][0]) if "position" in given else None
    lists = {name: given.get(name) for name in ("off", "set", "scale")}
    return read_state(one.get("index"), one.get("text", ""), position, **lists)


@given(states())
def test_an_address_holds_the_whole_state(fields):
    state = State(*fields)
    assert read(state.link("/trace")) == state


@given(states())
def test_the_fields_of_a_form_hold_the_whole_state(fields):
    state = State(*fields)
    named = dict(state.fields())
    position = named.pop("position", None)
    lists = {name: [named.pop(name)] for name in ("off", "set", "scale") if name in named}
    again = read_state(**named, position=None if position is None else int(position), **lists)
    assert again == state


@given(states(), cells, st.sampled_from(["off", "set", "scale"]), numbers)
def test_a_memory_has_one_edit_the_last(fields, cell, how, number):
    state = State(*fields)
    edited = state.with_edit(cell, how, number)
    assert str(edited.edit_of(cell)).startswith(str(cell))
    assert edited.edit_of(cell).how == how
    assert edited.without(cell) == state.without(cell)
    assert edited.without(cell).edit_of(cell) is None


@given(states())
def test_a_link_may_add_and_take_away_parameters(fields):
    state = State(*fields)
    address = state.link("/m/L1N2", text=None, similar="value")
    assert "text=" not in address
    assert "similar=value" in address


@given(
    st.text(st.characters(exclude_categories=["Cs"])) | st.text(st.characters(max_codepoint=127))
)
def test_a_text_is_quoted_as_everybody_quotes(text):
    assert quote_url(text) == quote(text, safe=",=")


def test_lists_may_be_given_with_commas_or_by_naming_them_again():
    one = read_state(off=["L1N2,L3N4"], set=["L5N6=2.5,7.8=-1"])
    assert one == read_state(off=["L1N2", "3.4"], set=["L5N6=2.5", "L7N8=-1"])
    assert one.off == (Cell(1, 2), Cell(3, 4))
    assert one.set == ((Cell(5, 6), 2.5), (Cell(7, 8), -1.0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"off": ["elephant"]}, "is not the name of a memory"),
        ({"set": ["L5N6"]}, "takes a memory with a number"),
        ({"set": ["L5N6=much"]}, "takes a memory with a number"),
        ({"set": ["L5N6=nan"]}, "finite"),
        ({"scale": ["L5N6=inf"]}, "finite"),
        ({"set": ["L5N6=1,L5N6=2"]}, "twice"),
        ({"off": ["L5N6"], "scale": ["L5N6=2"]}, "twice"),
    ],
)
def test_odd_edits_are_refused_in_words(wrong, message):
    with pytest.raises((FfmemError, UnknownCell), match=message):
        read_state(**wrong)


def test_too_much_is_refused_in_words():
    with pytest.raises(LimitExceeded, match="characters"):
        read_state(text="a" * (MAX_CHARACTERS + 1))
    read_state(text="a" * MAX_CHARACTERS)
    many = [f"L1N{number}" for number in range(MAX_EDITS + 1)]
    with pytest.raises(LimitExceeded, match="memories are edited"):
        read_state(off=many)
    read_state(off=many[1:])


def test_an_edit_of_a_memory_of_an_expert_is_known_by_its_name():
    placed = Cell(5, 9612, "E12", 9600)  # an address does not say where the bank begins
    (named,) = read_state(off=["L5E12N12"]).off
    state = State(off=(named,))
    assert state.edit_of(placed).how == "off"
    assert state.without(placed) == State()
    assert state.with_edit(placed, "off").link("/trace") == "/trace?off=L5E12N12"
