import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.corpus.wikitext import detokenize, is_heading


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (" A well @-@ known man paid 1 @,@ 250 @.@ 50 . ", "A well-known man paid 1,250.50."),
        ("Yes , no ; why ? It ( the cat ) sat : there !", "Yes, no; why? It (the cat) sat: there!"),
        ("It isn 't Bo 's , it 's O 'Brien 's", "It isn't Bo's, it's O'Brien's"),
        ("I ’ m Bo ’ s", "I’m Bo’s"),
        ('He said , " Go ! " and " <unk> " , twice .', 'He said, "Go!" and "<unk>", twice.'),
        ('" ... so it goes " ( " so " )', '"... so it goes" ("so")'),
        ('on 12 " vinyl and " Hey "', 'on 12" vinyl and "Hey"'),
        ("the players ' shirts and the ' best ' one", "the players' shirts and the 'best' one"),
        ("the word is ' equipment . ' And", "the word is 'equipment.' And"),
        ('he " said ( " so " )', 'he "said ("so")'),
        ('so " , he said', 'so", he said'),
        ("O ’ Brien", "O’Brien"),
        ("she pours ' the best ' in", "she pours 'the best' in"),
        ("ka \u0301 b", "ka\u0301 b"),
        ("in the ' 90s", "in the '90s"),
        ("“ Go ” and ‘ stay ’ .", "“Go” and ‘stay’."),
        ("It cost US $ 5 , £ 3 or 10 % [ sic ]", "It cost US$5, £3 or 10% [sic]"),
        ("[ H ] e is here [ now ] or never", "[H]e is here [now] or never"),
        ("in 1990 – 95 at 10 : 30 – perhaps", "in 1990–95 at 10:30 – perhaps"),
        ("and / or", "and/or"),
        ("the house — his own — fell", "the house—his own—fell"),
        ("at 30 ° C ( 86 ° F ) , 38 ° N", "at 30 °C (86 °F), 38° N"),
        ("R & B by Ed & Al , Smith & Sons", "R&B by Ed & Al, Smith & Sons"),
        ("a B + , # 1 , − 5 and 3 + 4", "a B+, #1, −5 and 3 + 4"),
        (" \n", ""),
    ],
)
def test_text_reads_as_people_write_it(tokens, text):
    assert detokenize(tokens) == text


@given(st.lists(st.sampled_from([*"ab\"'’()[],.:–-$&#+5S", "@-@", "'s", "<unk>", "…", "é"])))
def test_nothing_but_spaces_and_escapes_is_lost(tokens):
    line = " ".join(tokens)

    kept = line.replace("@-@", "-").replace(" ", "")

    assert detokenize(line).replace(" ", "") == kept


@pytest.mark.parametrize("line", [" = Title = \n", " = = A b = = ", "= = = C = = =", "= x = y ="])
def test_a_title_between_equal_signs_is_a_heading(line):
    assert is_heading(line)


@pytest.mark.parametrize("line", ["", " = ", " = = ", "a = b", " = a", " a = ", " = = a = ", "=a="])
def test_other_lines_are_no_headings(line):
    assert not is_heading(line)
