"""Which beginnings of a text match, against a look at every one of them."""

import time
import tracemalloc
from contextlib import contextmanager, suppress

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ffmem.errors import FfmemError
from ffmem.indexing.query import MAX_UNROLLED, Expression, check_expression

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
    *(
        r"\p{L}b",
        r"[\p{Lu}]",
        "[[:alpha:] ]b",
        "[(?{e]",
        r"\(?a",
        r"\[(?:a)",
        "(?P<n>a)(?P=n)",
        "{a",
    ),
    *("a{2}", "(?:a{1,3} ?){2,90}", ".{0,200}b.{0,200}A", "a{5000}", "a{2,}?", "(?i:A)b", "(?a)b"),
    *(r"\N{SPACE}a", r"[]a-]", r"(?<n>a)\g<n>"),
]


@given(
    st.sampled_from(PATTERNS),
    st.text("ab \nA$]", max_size=12),
    st.sets(st.integers(0, 12), min_size=1),
)
@example("a$", "a\nb", {2, 3})
@example("(?:ab)*+a", "abab", {3, 4})
def test_the_beginnings_that_match_are_those_that_match_alone(pattern, text, ends):
    lengths = sorted(end for end in ends if end <= len(text))
    expression = Expression(pattern, 5.0)
    found = expression.matching_ends(text, lengths)
    assert found == [end for end in lengths if regex.search(pattern, text[:end])]
    if found:
        assert expression.may_match(text)


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if check_expression(p) is not None])
def test_an_expression_without_its_ends_is_an_expression(pattern):
    regex.compile(check_expression(pattern))


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
        ("(*FAIL)", None),
        (r"\K", None),
        ("a{,2}", None),
        ("[[:alpha:]$]$", "[[:alpha:]$]"),
        (r"\p{L}\b", r"\p{L}"),
    ],
)
def test_ends_are_taken_out_where_nothing_else_looks_ahead(pattern, loose):
    assert check_expression(pattern) == loose


@pytest.mark.parametrize("pattern", ["(", "[", "a**", "*", "(?P<n>", "\\", "{1}?+"])
def test_what_is_no_expression_is_told(pattern):
    with pytest.raises(FfmemError, match="is not a valid regular expression: "):
        Expression(pattern, 1.0)


def test_an_expression_stops_when_its_time_is_over_however_many_texts_it_took():
    expression = Expression("a", 0.05)
    with pytest.raises(FfmemError, match=r"takes too long: stopped after 0\.05 seconds"):
        any(expression.may_match("b" * 100) for _ in range(10_000_000))


@contextmanager
def taking_little():
    """Hold what is done within to half a second of computing and 20 MB."""
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
        assert time.process_time() - start < 0.5
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:(?:a{1000}){1000}){4}",
        "(?:(?:a{1000}){1000}){12}",
        "(?>(?P<n>[ab]{1000}+){1000,}?){4}",
        "(?=(?<=(a|b{1000}){1000}))",
        "a{4000000}",
        "a{0,4294967295}",
        "(?:[a-z&&[b]]{1000}){1000}",
        r"(?i:(?:\p{L}{1000}){1000})",
        r"(?:\p{1000,}){1000}",
        "(?:a{1000})(?i){1000}",
        "(?x)(?:a{1 0#{1}\n00}){1 000}",
        "(?V1)[[a]--[b]]",
        "(?#)a",
        "[[](?:(?:a{1000}){1000}){4}]",
        "[[:alpha:][](?:(?:a{1000}){1000}){4}]",
        *("(?R)", "a(?R)?b", "(a(?1))", "(a)(?-1)", "(?P<n>a(?&n))", "(?P<n>a(?P>n))", "(?0)"),
        *("(?:ab){e<=1}", "a{i}", "a{2i+1d<3}", "(?e:a)", "(?(1)a|b)", "(?|a)"),
        "(" * 60 + "a" + ")" * 60,
        "a" * 2000,
    ],
)
def test_an_expression_that_could_take_much_is_refused_before_it_takes_anything(pattern):
    says = r"too large|searches do not support|at most 1,000"
    with taking_little(), pytest.raises(FfmemError, match=says):
        Expression(pattern, 1.0)


REPEATS = st.sampled_from(["", "{1000}", "{100,}", "{0,1000}+", "*", "(?i){100}", "{ 1000}", "{e}"])
EXPRESSIONS = st.recursive(
    st.sampled_from(
        ["a", ".", "[ab]", "[[:alpha:]]", "[[]", "[](]", r"\p{L}", r"\p{100,}", r"\N", "]"]
    ),
    lambda inner: st.builds(
        "".join,
        st.tuples(
            st.sampled_from(["(", "(?:", "(?P<n>", "(?=", "(?<!", "(?>", "(?i:", "(?x:", "(?#)("]),
            st.lists(st.builds(str.__add__, inner, REPEATS), min_size=1, max_size=3).map("".join),
            st.sampled_from(["){1000}", "){99}", ")*", ")", "|a)"]),
        ),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
@settings(max_examples=150)
def test_whatever_is_tried_takes_little(pattern):
    with taking_little(), suppress(FfmemError):
        Expression(pattern, 0.2).search("ab a(b" * 20)


@pytest.mark.parametrize(
    ("pattern", "unrolled"),
    [("a{%d}", 1), ("(?:ab{%d})", 1), ("(?:a(b)){%d}", 4), ("[ab]{0,%d}", 1), ("a{%d,}?", 1)],
)
def test_an_expression_may_have_so_many_characters_once_its_repeats_are_written_out(
    pattern, unrolled
):
    fits = (MAX_UNROLLED - 10) // unrolled
    Expression(pattern % fits, 1.0)
    with pytest.raises(FfmemError, match="too large"):
        Expression(pattern % (fits + 10), 1.0)


@pytest.mark.parametrize(
    "pattern", ["(a+)+[bc]", "(?:a|aa)+[bc]", "(.*)*[bc]", "(?:(?:|a)*|b)*[cd]", r"(?:(.*)\1)*[bc]"]
)
def test_an_expression_that_backtracks_without_end_is_stopped(pattern):
    start = time.process_time()
    with pytest.raises(FfmemError, match="takes too long"):
        Expression(pattern, 0.2).search("a" * 5000)
    assert time.process_time() - start < 2


def test_an_expression_is_not_kept_in_a_cache():
    first, second = Expression("(?:once){7}", 1.0), Expression("(?:once){7}", 1.0)
    assert first._compiled is not second._compiled
    assert first._loose is not second._loose
