import pytest

from ffmem.patterns.chunk import chunks
from ffmem.patterns.shapes import SHAPES
from tests.patterns.planted import index_of

ENDS = {
    "It was in 1990": {"year", "number"},
    "It was in 2001": {"year", "number"},
    "There were 2990": {"number"},
    "There were 42": {"number"},
    "On the 19th": {"mixed"},
    "The reign of Louis XIV": {"roman", "capitals"},
    "He left the NHL": {"capitals"},
    "She met Mary": {"capitalised"},
    "She met McDonald": {"camel"},
    "Mary": {"first"},
    "the well-known": {"hyphenated"},
    "a – b": set(),
    "one , two ,": {"comma"},
    "so it ended there .": {"stop"},
    "so it goes ( a": {"in-brackets"},
    "so it goes (": {"opening"},
    "so it goes ( a )": {"closing"},
    'he said " no one': {"in-quotes"},
    'he said " no "': {"quote"},
    "a year from 1 –": {"dash"},
    "as it follows :": {"colon"},
    "about ten in %": {"symbol"},
    "Mary Ann Baker and Tom Hill": {"title", "capitalised"},
    "स्टेशन में क्या है 😀": {"symbol"},
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The shapes of every line, and of its parts, by text; each line goes on with one word."""
    lines = [f"{line} onwards" for line in ENDS] + ["So"]
    index = index_of(tmp_path_factory.mktemp("shapes") / "index", lines, n_memories=8, t=2)
    (chunk,) = chunks(index)
    rows = zip(chunk.sentence.tolist(), chunk.ends.tolist(), chunk.shapes.tolist(), strict=True)
    return {
        chunk.texts[sentence][:end]: {s.name for bit, s in enumerate(SHAPES) if bits >> bit & 1}
        for sentence, end, bits in rows
    }


@pytest.mark.parametrize("text", ENDS)
def test_a_prefix_looks_as_it_should(shown, text):
    early = {"first-three"} if len(text.split()) <= 3 else set()
    assert shown[text] == ENDS[text] | early


def test_a_whole_sentence_is_told_from_its_parts(shown):
    assert "whole" in shown["It was in 1990 onwards"]
    assert shown["So"] == {"first", "first-three", "whole"}
