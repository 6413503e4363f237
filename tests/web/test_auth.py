"""Who may come in, and what everybody is told."""

import logging
import re
from html import unescape

import pytest
from starlette.testclient import TestClient

from ffmem.errors import FfmemError
from ffmem.web.app import make_app
from ffmem.web.auth import MAX_BODY, MAX_URL, Guard, check_token
from ffmem.web.server import is_free, is_loopback, listen, serve, server_url
from ffmem.web.worker import ModelWorker

TOKEN = "plain-words-as-a-token"


@pytest.fixture(scope="module")
def closed(catalog):
    """A site with a token: making one takes longer than most tests."""
    return make_app(catalog, token=TOKEN, hosts=["lab.example"])


@pytest.fixture
def stranger(closed):
    """A visitor of a site with a token, who does not follow redirects."""
    return TestClient(closed, "http://lab.example:8800", follow_redirects=False)


@pytest.mark.parametrize("path", ["/", "/m/L0N0", "/api/m/L0N0", "/static/site.css", "/nowhere"])
def test_every_answer_carries_the_policy(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8800", "localhost.evil.example", "", "127.0.0.1.nip.io"),
        *(
            "[::1].evil.com",
            "127.0.0.1:8871.evil.com",
            "localhost:8871@evil.com",
            "[::1",
            "localhost:",
        ),
        *("[localhost]", "127.0.0.1:8800:8800", "localhost..", "localhost/x"),
    ],
)
def test_a_foreign_host_name_is_refused(client, host):
    for path in ("/", "/api/m/L0N0", "/static/site.css"):
        assert client.get(path, headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8800", "127.0.0.1:1", "[::1]:8800"])
def test_this_machines_own_names_are_known(client, host):
    assert client.get("/api/m/L0N0", headers={"host": host}).status_code == 200


def test_pages_of_other_sites_cannot_ask_by_themselves(client):
    other = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert client.get("/api/m/L0N0", headers=other).status_code == 403
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    framed = {**followed, "sec-fetch-dest": "iframe"}
    assert client.get("/m/L0N0", headers=framed).status_code == 403
    assert client.get("/m/L0N0", headers=followed).status_code == 200
    # Another port of this machine is another site, too: cookies know no ports.
    beside = {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}
    assert client.get("/api/m/L0N0", headers=beside).status_code == 403


ELSEWHERE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}


def test_a_link_on_another_site_starts_no_search_by_expression(client):
    path = "/search?q=/x%2By/"
    page = client.get(path, headers=ELSEWHERE)
    assert page.status_code == 200
    assert 'value="/x+y/"' in page.text
    assert '<button class="go" form="search">Run</button>' in page.text
    assert "What was searched" not in page.text
    assert "What was searched" in client.get(path).text
    assert "Run this search?" not in client.get("/search?q=river", headers=ELSEWHERE).text


@pytest.mark.parametrize("path", ["/m/L0N0?similar=value", "/m/L0N0?tokens=1", "/api/trace?text=a"])
def test_a_link_on_another_site_does_not_run_the_model(catalog, path):
    class Untouchable(ModelWorker):
        async def run(self, *arguments):
            raise AssertionError("the model ran")

    app = make_app(catalog, Untouchable(device="cpu"))
    visitor = TestClient(app, "http://127.0.0.1:8800", raise_server_exceptions=False)
    assert visitor.get(path).status_code == 500
    assert visitor.get(path, headers=ELSEWHERE).status_code in (200, 403)


def test_a_missing_file_names_nothing_to_those_without_the_token(stranger, catalog):
    for name, served in [(name, one.current()) for name, one in catalog.folders.items()]:
        page = stranger.get(f"/static/nope-<b>?index={name}")
        assert page.status_code == 404
        assert "/static/nope-&lt;b&gt;" in page.text
        for secret in (*catalog.folders, served.title, served.model):
            assert secret not in page.text


@pytest.mark.parametrize("path", ["/", "/m/L0N0", "/api/m/L0N0", "/static/site.css", "/nowhere"])
def test_head_is_get_without_the_body(client, path):
    asked, got = client.head(path), client.get(path)
    assert asked.status_code == got.status_code
    assert asked.content == b""
    for name in ("content-type", "content-length", "content-security-policy"):
        assert asked.headers[name] == got.headers[name]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/m/L0N0", "GET, HEAD"), ("/annotate", "GET, HEAD, POST"), ("/static/site.css", "GET, HEAD")],
)
def test_a_wrong_method_is_told_which_are_right(client, path, allowed):
    answer = client.request("DELETE", path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed


DIGITS = "9" * 4_400


@pytest.mark.parametrize(
    "path",
    [
        *("/m/L0N{}", "/m/L{}N0", "/m/0.{}", "/m/L0E{}N1", "/layer/{}", "/layer/0?page={}"),
        *("/random?layer={}", "/search?q=L{}N0", "/search?q=L{}", "/search?q=a&layer={}"),
        *("/trace?text=a&position={}", "/m/L0N0?off=L0N{}", "/m/L0N0?set=L0N0={}"),
        *("/layer/0?least={}", "/trace?text=a&layer={}", "/trace?text=a&generate={}"),
    ],
)
def test_a_number_of_thousands_of_digits_is_refused_in_words(client, path):
    for digits in (DIGITS, f"-{DIGITS}", "1e999"):
        for place in (path, f"/api{path}"):
            assert client.get(place.format(digits)).status_code < 500


def test_long_addresses_and_bodies_are_refused_in_words(client):
    answer = client.get("/api/m/L0N0", params={"x": "y" * MAX_URL})
    assert answer.status_code == 414
    assert "Shorten" in answer.json()["error"]
    for body in (b"x" * (MAX_BODY + 1), iter([b"x" * MAX_BODY, b"x"])):
        answer = client.post("/api/m/L0N0", content=body)
        assert answer.status_code == 413
        assert f"{MAX_BODY:,}" in answer.json()["error"]


def test_without_the_token_nobody_sees_anything(stranger):
    for path in ("/", "/m/L0N0", "/layer/0", "/trace?text=a", "/figures", "/search?q=a"):
        answer = stranger.get(path)
        assert answer.status_code == 401
        assert 'type="password"' in answer.text
    assert stranger.get("/api/m/L0N0").json() == {"error": "This explorer needs a token."}
    assert stranger.get("/api/openapi.json").status_code == 401
    assert stranger.get("/static/site.css").status_code == 200  # our own code, no data


@pytest.mark.parametrize("wrong", ["", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "tøken", "\x00"])
def test_a_wrong_token_is_refused(stranger, wrong):
    assert stranger.get("/m/L0N0", params={"token": wrong}).status_code == 401
    assert stranger.post("/enter", data={"token": wrong}).status_code == 401
    header = {"authorization": f"Bearer {wrong}".encode()}
    assert stranger.get("/api/m/L0N0", headers=header).status_code == 401
    assert stranger.get("/m/L0N0", headers={"cookie": f"ffmem-8800={TOKEN}"}).status_code == 401


def test_the_token_leaves_the_address_for_a_cookie(stranger):
    answer = stranger.get("/m/L0N0?off=L1N2&token=" + TOKEN)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/m/L0N0?off=L1N2"
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    page = stranger.get("/m/L0N0")  # the client keeps cookies
    assert page.status_code == 200
    assert TOKEN not in page.text


def test_the_token_may_be_typed_or_sent_by_a_program(stranger):
    header = {"authorization": f"Bearer {TOKEN}"}
    assert stranger.get("/api/m/L0N0", headers=header).status_code == 200
    assert stranger.get("/api/m/L0N0").status_code == 401
    assert stranger.post("/enter", data={"token": TOKEN}).status_code == 303
    assert stranger.get("/api/m/L0N0").status_code == 200


def test_the_form_leads_back_to_the_page_that_was_asked_for(stranger):
    page = stranger.get("/m/L0N0?off=L1N2&text=<b>")
    back = unescape(re.search(r'name="back" value="([^"]*)"', page.text)[1])
    answer = stranger.post("/enter", data={"token": TOKEN, "back": back})
    assert answer.headers["location"] == "/m/L0N0?off=L1N2&text=%3Cb%3E"


def test_servers_on_other_ports_have_cookies_of_their_own(stranger):
    cookie = stranger.post("/enter", data={"token": TOKEN}).headers["set-cookie"]
    assert cookie.startswith("ffmem-8800=")


@pytest.mark.parametrize("back", ["//evil.example", "https://evil.example", "/\\evil.example", ""])
def test_entering_never_leads_to_another_site(stranger, back):
    answer = stranger.post("/enter", data={"token": TOKEN, "back": back})
    assert answer.status_code == 303
    place = answer.headers["location"]
    assert place.startswith("/")
    assert not place.startswith(("//", "/\\"))


def test_the_token_is_in_no_log(stranger, caplog):
    with caplog.at_level(logging.DEBUG):
        stranger.get("/m/L0N0?token=" + TOKEN)
        stranger.get("/m/L0N0?token=" + TOKEN[:-1])
    ours = [record for record in caplog.records if not record.name.startswith("httpx")]
    assert not any(TOKEN[:-1] in record.getMessage() for record in ours)


@pytest.mark.parametrize(
    "weak", ["", "short", "fifteen-letters", "with a space in the middle", "é" * 20]
)
def test_weak_tokens_are_refused(weak):
    with pytest.raises(FfmemError, match="at least 16"):
        check_token(weak)
    check_token(TOKEN)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "lab.example", "::"])
def test_other_machines_are_let_in_only_with_a_token(served_folder, host):
    assert not is_loopback(host)
    with pytest.raises(FfmemError, match="`token`"):
        serve([served_folder], host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host):
    assert is_loopback(host)


def test_a_port_that_is_taken_is_refused_in_words():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(FfmemError, match=f"port {port}: Address already in use"):
            listen("127.0.0.1", port)
        assert server_url(first, None) == f"http://127.0.0.1:{port}/"
        assert server_url(first, TOKEN).endswith(f"/?token={TOKEN}")


def test_a_body_reaches_the_page_behind_the_guard_whole_and_once():
    async def echo(scope, receive, send):
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": message["body"]})

    for length in (0, 1, 70_000, MAX_BODY):
        sent = bytes(range(256)) * (length // 256 + 1)
        visitor = TestClient(Guard(echo), "http://127.0.0.1:8800")
        assert visitor.post("/", content=sent[:length]).content == sent[:length]
