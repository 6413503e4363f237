"""Forms that edit a memory lead back to a page of this site, and nowhere else."""

from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.errors import FfmemError
from ffmem.web.state import State
from ffmem.web.views.edits import PAGES, link_back


def sent(client, **asked):
    answer = client.get("/edit", params=asked, follow_redirects=False)
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


def query(address):
    return {name: value[-1] for name, value in parse_qs(urlsplit(address).query).items()}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"how": "off"}, {"off": "L0N5,L1N2"}),
        ({"how": "set", "number": "2.5"}, {"off": "L0N5", "set": "L1N2=2.5"}),
        ({"how": "scale", "number": "-1"}, {"off": "L0N5", "scale": "L1N2=-1"}),
        ({"how": "scale", "number": "", "times": "5"}, {"off": "L0N5", "scale": "L1N2=5"}),
        ({"how": "none"}, {"off": "L0N5"}),
    ],
)
def test_an_edit_is_in_the_address_of_the_page_that_asked(client, asked, expected):
    address = sent(client, cell="L1N2", back="/m/L1N2", off="L0N5", text="a & b", **asked)
    assert urlsplit(address).path == "/m/L1N2"
    assert query(address) == {"text": "a & b", **expected}


def test_another_edit_of_the_same_memory_takes_the_place_of_the_first(client):
    address = sent(client, cell="L1N2", how="set", number="3", off="L1N2,L0N1", back="/")
    assert query(address) == {"off": "L0N1", "set": "L1N2=3"}


def test_what_the_page_itself_asked_for_is_kept(client):
    back = "/trace?view=ff&layer=1&off=L9N9&text=old#L1"
    address = sent(client, cell="L1N2", how="off", text="new", back=back)
    assert query(address) == {"view": "ff", "layer": "1", "off": "L1N2", "text": "new"}
    assert urlsplit(address).fragment == "L1"


ATTACKS = [
    "//evil.example/trace",
    "https://evil.example/trace",
    "javascript:alert(1)",
    "/\\evil.example",
    "\\\\evil.example",
    "/trace\r\nSet-Cookie: a=b",
    "/trace?a=b\r\nSet-Cookie: a=b",
    "/trace#a\nb",
    "/m/../../static",
    "/m/%2e%2e/x",
    "/m//evil.example",
    "/%2F/evil.example",
    "/\tevil.example",
    "/static/site.js",
    "/api/trace",
    "/enter",
    "/edit?cell=L0N0",
    "trace",
    "",
    " /trace",
    "/trace ",
    "/@evil.example",
    "/trace;evil",
    "/tracé",
]


@pytest.mark.parametrize("back", ATTACKS)
def test_nobody_is_sent_to_another_place(client, back):
    asked = {"cell": "L1N2", "how": "off", "back": back}
    answer = client.get("/edit", params=asked, follow_redirects=False)
    assert answer.status_code == 422
    assert "location" not in answer.headers
    assert "not a page of this explorer" in answer.text


@given(st.text(alphabet="/\\.:?#%@ab\n\r\t\0 m&=-é", max_size=24))
def test_whatever_is_asked_the_way_back_is_a_path_of_this_site(back):
    try:
        address = link_back(f"/m/{back}", State(text="x"))
    except FfmemError:
        return
    parts = urlsplit(address)
    assert (parts.scheme, parts.netloc) == ("", "")
    assert parts.path.split("/")[1] in PAGES
    assert "//" not in parts.path
    assert address.isascii()
    assert address.isprintable()


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"cell": "L9N1", "how": "off"}, 404, "There is no memory L9N1"),
        ({"cell": "<b>", "how": "off"}, 404, "not the name of a memory"),
        ({"cell": "L1N2", "how": "set"}, 422, "needs a number"),
        ({"cell": "L1N2", "how": "set", "number": "nan"}, 422, "finite"),
        ({"cell": "L1N2", "how": "set", "number": "much"}, 422, "not a number"),
        ({"cell": "L1N2", "how": "burn"}, 422, "how"),
        ({"how": "off"}, 422, "cell"),
    ],
)
def test_what_is_no_edit_is_told_in_a_sentence(client, asked, status, said):
    answer = client.get("/edit", params=asked, follow_redirects=False)
    assert answer.status_code == status
    assert said in answer.text
    assert "<b>" not in answer.text.replace("<b>ff</b>", "")


def test_every_page_shows_the_edits_with_a_way_to_undo_each(client):
    edits = {"off": "L1N2", "set": "L0N3=2", "scale": "L0N4=-3", "text": "hello"}
    for page in ("/m/L0N1", "/trace"):
        text = client.get(page, params={**edits, "text": ""}).text
        for said in ("L1N2 off", "L0N3 = 2", "L0N4 × −3"):
            assert said in text
        assert f'href="{page}?set=L0N3=2&amp;scale=L0N4=-3"' in text
        assert f'href="{page}"' in text  # clears
    assert 'aria-label="Edits"' not in client.get("/m/L0N1", params={"text": "hello"}).text
