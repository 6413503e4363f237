"""Which beginnings of a text match, against a look at every one of them."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ffmem.errors import FfmemError
from ffmem.indexing.expression import Expression, without_ends

PATTERNS = [
    *("a", "ab", "a.*", "a.*?b", "^a", "^b", "a|b$", "$", "^$", r"\bab\b", r"\b", r"\B", "b$"),
    *(r"a\b.*b$", r"(a|b)+\b", "(?i)AB", r"(?i)\bA", "[ab]{2}", "[^a ]", r"[\b]", "[$]", r"\$"),
    *("(?=b)a?", "a(?!b)", "(?<=a)b", "(?:ab)*+a", "(?>(?:ab)*)a", "a++b", r"(a)\1", "a{2,}$"),
    *(
        r"\Aab",
        r"ab\Z",
        "(?:a$|b)",
        "(?m)a$",
        "(a$)?b",
        "\n$",
        "a\n?$",
        r"[^\]a]",
        "[]a]b?",
        "(?s)a.b",
    ),
]


@given(
    st.sampled_from(PATTERNS),
    st.text("ab \nA$]", max_size=12),
    st.sets(st.integers(0, 12), min_size=1),
)
@example("a$", "a\nb", {2, 3})
@example("(?:ab)*+a", "abab", {3, 4})
def test_the_beginnings_that_match_are_those_that_match_alone(pattern, text, ends):
    import regex

    lengths = sorted(end for end in ends if end <= len(text))
    expression = Expression(pattern, 5.0)
    least, single = expression.reach(text, lengths)
    found = [end for end in lengths if end in single or (least is not None and end >= least)]
    assert found == [end for end in lengths if regex.search(pattern, text[:end])]
    if found:
        assert expression.possible(text)


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if without_ends(p) is not None])
def test_an_expression_without_its_ends_is_an_expression(pattern):
    re.compile(without_ends(pattern))


@pytest.mark.parametrize(
    ("pattern", "loose"),
    [
        ("the", "the"),
        (r"\bthe\b", "the"),
        ("ing$", "ing"),
        (r"[$]\$", r"[$]\$"),
        (r"(?i)a|b\Z", "(?i)a|b"),
        (r"\d{2,3}?", r"\d{2,3}?"),
        ("(?=a)", None),
        ("a++", None),
        ("a*+", None),
        ("(?>a)", None),
        (r"\b*a", None),
        (r"(a)\1", None),
        ("a{e<=1}", None),
        ("[[:alpha:]]", None),
        ("(*FAIL)", None),
        (r"\p{L}", None),
    ],
)
def test_ends_are_taken_out_where_nothing_else_looks_ahead(pattern, loose):
    assert without_ends(pattern) == loose


@pytest.mark.parametrize("pattern", ["(", "[", "a**", "*", "(?P<n>", "\\", "{1}?+"])
def test_what_is_no_expression_is_told(pattern):
    with pytest.raises(FfmemError, match="is not a regular expression: "):
        Expression(pattern, 1.0)


def test_an_expression_stops_when_its_time_is_over_however_many_texts_it_took():
    expression = Expression("a", 0.05)
    with pytest.raises(FfmemError, match=r"takes too long: no answer after 0\.05 seconds"):
        any(expression.possible("b" * 100) for _ in range(10_000_000))
