"""Who may come in: the one middleware that every request passes first.

A request is refused if its Host is not a name of this server (against DNS rebinding), if a page of
another site sent it (Sec-Fetch-Site), or if the server has a token and the request does not. The
token is compared in constant time and asked for once: then a cookie stands for it, and it is in no
link and in no log. Every answer carries the same security headers.
"""

import hashlib
import hmac
import html
import ipaddress
import re
import secrets
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ffmem.errors import FfmemError
from ffmem.web.limits import MOST_ADDRESS, MOST_BODY

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    # Other sites learn nothing; forms of this site show their origin, which annotation checks.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::\d{1,5})?")
"""A Host header: an IPv6 number in brackets, or a name or number, and a port."""


def is_cross_site(request: Request) -> bool:
    """Return whether a page of another site led a browser here.

    Such a visit must not start expensive work: show what was asked for, with a button that does.
    """
    return _is_foreign(request.headers)


def _is_foreign(headers: Headers) -> bool:
    """Return whether another site, or another port of this machine, made a browser ask."""
    return headers.get("sec-fetch-site") in ("cross-site", "same-site")


class Guard:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, token: str | None = None, hosts: Sequence[str] = ()) -> None:
        self.app = app
        self._token = token
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        # What the cookie holds: it cannot be made without the token, nor the token read from it.
        key = secrets.token_bytes(32)
        self._pass = hmac.new(key, (token or "").encode(), hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request that may not come in; pass others on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # HEAD is answered like GET, without the body.
        is_head = scope["method"] == "HEAD"
        scope = {**scope, "method": "GET"} if is_head else scope

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        body = await _read_body(Headers(scope=scope), receive)
        refusal = self._refusal(scope, body)
        if refusal is not None:
            await refusal(scope, receive, sending)
        else:
            await self.app(scope, _replay(body or b"", receive), sending)

    def _refusal(self, scope: Scope, body: bytes | None) -> Response | None:
        """Return what keeps a request out; None if it may come in."""
        headers = Headers(scope=scope)
        path: str = scope["path"]
        address = len(scope.get("raw_path") or path) + len(scope["query_string"])
        if not self._is_own_host(headers.get("host", "")):
            return refused(
                path,
                421,
                "This server does not answer to that name. Use localhost or its IP address, or"
                " start it with --allow-host NAME.",
            )
        if address > MOST_ADDRESS:
            return refused(
                path,
                414,
                f"The address has {address:,} bytes; the limit is {MOST_ADDRESS:,}. Shorten the"
                " prompt, or remove some edits.",
            )
        if _is_foreign(headers):
            framed = headers.get("sec-fetch-dest") in ("iframe", "frame", "embed", "object")
            if framed or headers.get("sec-fetch-mode", "navigate") != "navigate":
                return refused(path, 403, "Other sites may not send requests to the explorer.")
            if path.startswith("/api/"):
                return refused(
                    path,
                    403,
                    "A link on another site led here. Open the explorer itself, or paste this"
                    " address into the address bar.",
                )
        if body is None:
            return refused(path, 413, f"The request is too long: at most {MOST_BODY:,} bytes.")
        return None if self._token is None else self._token_refusal(scope, headers, body)

    def _token_refusal(self, scope: Scope, headers: Headers, body: bytes) -> Response | None:
        """Return the question for the token, or the way in; None for those who are in."""
        path: str = scope["path"]
        if path.startswith("/static/"):  # our own code, no data
            return None
        # Cookies ignore ports: every server of a machine needs a name of its own.
        cookie = f"ffmem-{(scope.get('server') or ('', ''))[1]}"
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == "token"), None)
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        here = f"{path}?{rest}" if rest else path
        if path == "/enter" and scope["method"] == "POST":
            fields = dict(reversed(parse_qsl(body.decode("latin-1"))))
            given, here = fields.get("token", ""), "/"
            if self._is_token(given):
                back = fields.get("back", "/")
                is_inside = back.startswith("/") and back[1:2] != "/"
                return self._admit(back if is_inside else "/", cookie)
        elif given is not None and self._is_token(given):
            return self._admit(here, cookie)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        if hmac.compare_digest(_read_cookie(headers, cookie).encode(), self._pass.encode()):
            return None
        is_wrong = given is not None or bool(bearer)
        message = "The token is wrong." if is_wrong else "This explorer needs a token."
        return refused(path, 401, message, page="enter.html", back=here)

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _admit(self, back: str, cookie: str) -> Response:
        """Return the way back to the page that was asked for, with the cookie."""
        clean = back.replace("\\", "%5C")
        answer = RedirectResponse(f"/{clean.lstrip('/')}", 303)
        answer.set_cookie(cookie, self._pass, httponly=True, samesite="lax", path="/")
        return answer

    def _is_own_host(self, host: str) -> bool:
        """Return whether a Host header names this server: a number is nobody else's name."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        v6, name = match.groups()
        try:
            ipaddress.ip_address(v6 or name)
        except ValueError:
            return name is not None and name.lower().removesuffix(".") in self._hosts
        return True


async def _read_body(headers: Headers, receive: Receive) -> bytes | None:
    """Return the body of a request, None if it is too long."""
    length = headers.get("content-length", "0")
    if "transfer-encoding" not in headers and length == "0":
        return b""
    if not length.isdigit() or len(length) > 9 or int(length) > MOST_BODY:
        return None
    body: bytes = b""
    while len(body) <= MOST_BODY:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    return body if len(body) <= MOST_BODY else None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body once more, and then what else comes."""
    unread = [body]

    async def receiving() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receiving


def _read_cookie(headers: Headers, name: str) -> str:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    return jar[name].value if name in jar else ""


def refused(
    path: str, status: int, message: str, page: str = "refused.html", back: str = "/"
) -> Response:
    """Return a refusal; its page shows nothing that needs a token."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if path.startswith("/api"):
        return JSONResponse({"error": message}, status, headers)
    text = (files("ffmem.web") / "templates" / page).read_text(encoding="utf-8")
    filled = text.replace("{message}", html.escape(message)).replace("{back}", html.escape(back))
    return HTMLResponse(filled, status, headers)


def check_token(token: str) -> None:
    """Raise if a token could be guessed."""
    if len(token) < 16 or not (token.isascii() and token.isprintable()) or " " in token:
        raise FfmemError(
            f"The token has {len(token)} characters. It must be at least 16 printable ASCII"
            " characters without spaces; --token alone makes one."
        )
