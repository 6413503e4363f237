import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ffmem.patterns.units import Units
from tests.patterns.planted import plain_units
from tests.texts import LINES

texts = st.lists(st.text(max_size=30) | st.sampled_from(LINES), min_size=1, max_size=5)


def spans(units):
    return zip(units.starts.tolist(), units.ends.tolist(), strict=True)


@given(texts)
def test_units_are_those_of_a_plain_reading(texts):
    units = Units.of(texts)
    assert [units.text(*span) for span in spans(units)] == [
        unit for text in texts for unit in plain_units(text)
    ]


@given(texts)
def test_how_many_units_start_before_a_place_is_counted(texts):
    units = Units.of(texts)
    for place in range(len(units.characters) + 1):
        assert units.before[place] == (units.starts < place).sum()


@given(texts)
def test_the_same_characters_have_the_same_number_wherever_they_stand(texts):
    units = Units.of(texts)
    hashes = units.hashes(units.starts, units.ends)
    numbers = {}
    for number, span in zip(hashes.tolist(), spans(units), strict=True):
        text = units.text(*span)
        if text.isascii() and text not in numbers:
            alone = Units.of(["before", text.upper()])
            assert alone.hashes(alone.starts, alone.ends)[-1] == number
        assert numbers.setdefault(text, number) == number
    folded = {text.lower() for text in numbers if text.isascii()}
    assert len(set(numbers.values())) >= len(folded)


def test_different_words_have_different_numbers():
    words = [f"w{n}" for n in range(20_000)]
    units = Units.of([" ".join(words)])
    assert len(np.unique(units.hashes(units.starts, units.ends))) == len(words)
