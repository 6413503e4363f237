import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.text import (
    format_interval,
    format_number,
    format_rate,
    format_share,
    pluralize,
    shorten_prefix,
)


@pytest.mark.parametrize(
    ("n", "things", "shown"),
    [
        (1, "layers", "1 layer"),
        (0, "layers", "0 layers"),
        (2, "persistent memories", "2 persistent memories"),
        (1, "persistent memories", "1 persistent memory"),
        (12345, "tokens", "12,345 tokens"),
        (0.5, "GPUs", "0.5 GPUs"),
        (1.0, "GPUs", "1 GPU"),
        (1, "passes", "1 pass"),
        (1, "prefixes", "1 prefix"),
    ],
)
def test_one_thing_is_named_in_the_singular(n, things, shown):
    assert pluralize(n, things) == shown


def test_numbers_read_as_in_a_sentence():
    assert format_number(12255) == "12,255"
    assert format_number(14280.3) == "14,280"
    assert format_number(0.58234) == "0.582"
    assert format_number(-7, signed=True) == "−7"
    assert [format_number(zero, signed=True) for zero in (0, 0.0, -0.0)] == ["0", "0", "0"]
    assert format_number(None) == "–"


@pytest.mark.parametrize(
    ("per_second", "shown"),
    [
        (12345.6, "12,346 layers/s"),
        (2.54, "2.54 layers/s"),
        (1.0, "1 layers/s"),
        (0.24, "4.17 s/layer"),
        (1 / 3600, "3,600 s/layer"),
    ],
)
def test_slow_work_counts_the_seconds_of_one(per_second, shown):
    assert format_rate(per_second, "layers") == shown


def test_small_shares_keep_a_digit_that_counts():
    assert format_share(0.035) == "3.5 %"
    assert format_share(0.0000037) == "0.0004 %"
    assert format_share(-0.4461, signed=True) == "−44.6 %"
    assert format_share(None) == "–"
    assert format_share(1) == "100 %"


def test_an_interval_names_its_level():
    assert format_interval(0.032, 0.053) == "95 % interval 3.2 to 5.3 %"
    assert format_interval(None, None) == "no interval"


@given(st.text(), st.integers(1, 5), st.integers(1, 40))
def test_a_short_prefix_is_the_end_of_the_prefix(text, words, characters):
    shown = shorten_prefix(text, words, characters)
    if shown != text:
        assert shown[0] == "…"
        assert text.endswith(shown[1:])
        assert len(shown[1:].split()) <= words
        assert len(shown) <= characters + 1
