"""Which sentences of a lease cannot be read: found by halving, each alone."""

from hypothesis import given
from hypothesis import strategies as st

from ffmem.indexing.leases import Lease
from ffmem.indexing.suspect import MOST, Suspect

sizes = st.integers(1, 120)


def examined(n, bad, first=50):
    """Examine a lease of n sentences of which some are bad; return the suspect and its probes."""
    suspect = Suspect(Lease(3, first, n, 0, 10 * n))
    probes = []
    while (span := suspect.next()) is not None:
        probes.append(span)
        if any(span.first <= number < span.first + span.n for number in bad):
            suspect.could_not("it fails")
        else:
            suspect.could()
    return suspect, probes


@given(sizes, st.data())
def test_exactly_the_bad_sentences_are_found(n, data):
    bad = data.draw(st.sets(st.integers(50, 49 + n), max_size=MOST))
    suspect, probes = examined(n, bad)
    assert set(suspect.bad) == bad
    assert not suspect.is_hopeless
    assert all(span.first >= 50 and span.first + span.n <= 50 + n for span in probes)


@given(sizes)
def test_one_bad_sentence_takes_two_probes_per_halving(n):
    _, probes = examined(n, {50 + n // 3})
    assert len(probes) <= 2 * n.bit_length()


def test_where_everything_fails_the_search_ends_early():
    suspect, probes = examined(1000, set(range(50, 1050)))
    assert suspect.is_hopeless
    assert len(probes) < 50
