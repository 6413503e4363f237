"""Access control: the one middleware that every request passes first.

A request is refused if its Host is not a name of this server (against DNS rebinding), if a page of
another site sent it (Sec-Fetch-Site), or if the server has a token and the request does not. The
token is compared in constant time and asked for once: then a cookie replaces it, and it is in no
link and in no log. Every response has the same security headers.
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

MAX_URL = 16_000
"""Bytes of a path with its query, which hold prompts and edits."""

MAX_BODY = 131_072
"""Bytes of a request's body: a sheet full of long descriptions has fewer."""

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

    Another port of this machine counts as another site. Such a visit must not start expensive work:
    show the request with a button that runs it.
    """
    return request.headers.get("sec-fetch-site") in ("cross-site", "same-site")


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
        """Refuse a request, or pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # HEAD is answered like GET, without the body.
        is_head = scope["method"] == "HEAD"
        scope = {**scope, "method": "GET"} if is_head else scope

        async def send_with_headers(message: Message) -> None:
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
            await refusal(scope, receive, send_with_headers)
        else:
            await self.app(scope, _replay(body or b"", receive), send_with_headers)

    def _refusal(self, scope: Scope, body: bytes | None) -> Response | None:
        """Return why a request is refused; None if it is not."""
        headers = Headers(scope=scope)
        path: str = scope["path"]
        n_bytes = len(scope.get("raw_path") or path) + len(scope["query_string"])
        if not self._is_own_host(headers.get("host", "")):
            return error_response(
                path,
                421,
                "This server does not answer to that name. Use localhost or its IP address, or"
                " start it with `ffmem serve --allow-host NAME`.",
            )
        if n_bytes > MAX_URL:
            return error_response(
                path,
                414,
                f"The URL has {n_bytes:,} bytes; the limit is {MAX_URL:,}. Shorten the"
                " prompt, or remove some edits.",
            )
        if is_cross_site(Request(scope)):
            framed = headers.get("sec-fetch-dest") in ("iframe", "frame", "embed", "object")
            if framed or headers.get("sec-fetch-mode", "navigate") != "navigate":
                return error_response(
                    path, 403, "Other sites cannot send requests to the explorer."
                )
            if path.startswith("/api/"):
                return error_response(
                    path,
                    403,
                    "A link on another site led here. Open the explorer itself, or paste this"
                    " address into the address bar.",
                )
        if body is None:
            return error_response(
                path, 413, f"The request is too long: at most {MAX_BODY:,} bytes."
            )
        return None if self._token is None else self._token_refusal(scope, headers, body)

    def _token_refusal(self, scope: Scope, headers: Headers, body: bytes) -> Response | None:
        """Return the token form, or the redirect after a correct token; None if authenticated."""
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
        return error_response(path, 401, message, page="enter.html", back=here)

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _admit(self, back: str, cookie: str) -> Response:
        """Return a redirect to the page that was asked for, with the cookie."""
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
    if not length.isdigit() or len(length) > 9 or int(length) > MAX_BODY:
        return None
    body: bytes = b""
    while len(body) <= MAX_BODY:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    return body if len(body) <= MAX_BODY else None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that replays a body, then passes on later messages."""
    unread = [body]

    async def receive_again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receive_again


def _read_cookie(headers: Headers, name: str) -> str:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    return jar[name].value if name in jar else ""


def error_response(
    path: str, status: int, message: str, page: str = "refused.html", back: str = "/"
) -> Response:
    """Return an error as JSON below /api, else as a page that shows nothing that needs a token."""
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
            " characters without spaces; --token new generates one."
        )
