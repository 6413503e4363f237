from hypothesis import given
from hypothesis import strategies as st

from ffmem.patterns.selection import Option, select

bits = st.integers(0, 2**12 - 1)
options = st.lists(st.tuples(st.floats(0, 100), bits, st.integers(0, 5)), max_size=8).map(
    lambda rows: [
        Option(number, surprise, marks, marks, effort)
        for number, (surprise, marks, effort) in enumerate(rows)
    ]
)


def ranks(*numbers):
    return sum(1 << (number - 1) for number in numbers)


def option(number, surprise, marks, effort=0):
    return Option(number, surprise, marks, marks, effort)


@given(options)
def test_every_pattern_told_adds_three_triggers_to_those_before_it(options):
    covered = 0
    for number in select(options, 3):
        assert (options[number].marks & ~covered).bit_count() >= 3
        covered |= options[number].marks
    assert all((one.marks & ~covered).bit_count() < 3 for one in options)


@given(options, st.randoms())
def test_their_order_does_not_matter(options, rng):
    shuffled = rng.sample(options, len(options))
    assert select(shuffled, 3) == select(options, 3)


def test_a_sharp_pattern_gives_way_to_a_wider_one_that_is_worth_it():
    sharp, wide = option(0, 10.0, ranks(1, 2, 3, 4)), option(1, 6.0, ranks(*range(1, 8)))
    assert select([sharp, wide], 3) == [1]
    assert select([sharp, wide._replace(surprise=4.0)], 3) == [0, 1]
    assert select([sharp, option(1, 6.0, ranks(1, 2, 3, 4, 5, 6))], 3) == [0]


def test_of_two_that_mark_the_same_the_readable_one_is_told():
    token, word = option(0, 10.0, ranks(1, 2, 3), effort=3), option(1, 9.0, ranks(1, 2, 3))
    assert select([token, word], 3) == [1]


def test_repetitions_do_not_make_a_pattern_new():
    first = option(0, 10.0, ranks(1, 2, 3))
    second = Option(1, 5.0, ranks(4, 5, 6), ranks(4), 0)
    assert select([first, second], 3) == [0]
