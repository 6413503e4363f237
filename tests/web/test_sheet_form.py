"""Two changes of one sheet where mine counts: for forms, which cannot ask back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ffmem.annotation.sheet import Conflict, Sheet, SheetPattern, merge
from ffmem.web.sheet_form import clashes, kept_mine

PATTERNS = st.dictionaries(
    st.sampled_from("abc"),
    st.tuples(
        st.sampled_from(["", "one", "two"]),
        st.sampled_from([None, "shallow", "semantic"]),
        st.frozensets(st.integers(1, 5), max_size=4),
    ),
)
SAID = st.tuples(PATTERNS, st.booleans(), st.sampled_from(["", "a", "b"]))


def sheet(patterns, none, note):
    # Not in a strategy: shapes are checked in samples, and Hypothesis forbids chance there.
    listed = tuple(SheetPattern(id, *said) for id, said in patterns.items())
    return Sheet(listed, no_pattern=none, note=note)


@settings(max_examples=60)
@given(SAID, SAID, SAID)
def test_keeping_mine_never_conflicts_and_is_the_merge_where_nothing_clashes(one, two, three):
    base, mine, theirs = sheet(*one), sheet(*two), sheet(*three)
    kept = kept_mine(base, mine, theirs)
    try:
        joined = merge(base, mine, theirs)
    except Conflict:
        assert clashes(base, mine, theirs)
    else:
        assert kept == joined
        assert not clashes(base, mine, theirs)
    known = {pattern.id: pattern for pattern in base.patterns}
    left = {pattern.id: pattern for pattern in kept.patterns}
    for one in mine.patterns:
        if one.id in left and one.description != known.get(one.id, SheetPattern("")).description:
            assert left[one.id].description == one.description
