"""Who may come in: this machine only, or whoever knows the token.

Every request passes here first. A page of another site that a name of its own leads to this server
(DNS rebinding) is refused by its Host; requests that other sites' pages make by themselves are
refused by Sec-Fetch-Site. A token is compared in constant time and asked for once: afterwards a
cookie stands for it, and it is in no link and in no log.
"""

import hashlib
import hmac
import html
import ipaddress
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

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not even the origin leaves; within the site forms show theirs, by which they are known.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_cross_site(request: Request) -> bool:
    """Return whether a page of another site led a browser here.

    Such a visit must not start expensive work: show what was asked for, with a button that does.
    """
    return request.headers.get("sec-fetch-site") in ("cross-site", "same-site")


class Guard:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, token: str | None = None, hosts: Sequence[str] = ()) -> None:
        self.app = app
        self._token = token
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        # What the cookie holds: nobody can make it without the token, nor tell the token from it.
        key = secrets.token_bytes(32)
        self._pass = hmac.new(key, (token or "").encode(), hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that may not come in; let others through."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        body = await _body(Headers(scope=scope), receive)
        answer = self._answer(scope, body)
        if answer is not None:
            await answer(scope, receive, sending)
        else:
            await self.app(scope, _again(body or b"", receive), sending)

    def _answer(self, scope: Scope, body: bytes | None) -> Response | None:
        """Return what keeps a request out; None if it may come in."""
        headers = Headers(scope=scope)
        path: str = scope["path"]
        address = len(scope.get("raw_path") or path) + len(scope["query_string"])
        if not self._knows(headers.get("host", "")):
            return _refused(
                path,
                421,
                "This server does not answer to that name. Use localhost or its number, or start"
                " it with --allow-host NAME.",
            )
        if address > MOST_ADDRESS:
            return _refused(
                path,
                414,
                f"The address has {address:,} bytes; at most {MOST_ADDRESS:,} are read. Shorten"
                " the prompt, or take some edits away.",
            )
        site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
        framed = headers.get("sec-fetch-dest") in ("iframe", "frame", "embed", "object")
        if site == "cross-site" and (framed or mode not in (None, "navigate")):
            return _refused(path, 403, "Pages of other sites may not ask here.")
        if body is None:
            return _refused(path, 413, f"At most {MOST_BODY:,} bytes are read.")
        if self._token is None:
            return None
        return self._asked_for_token(scope, headers, body)

    def _asked_for_token(self, scope: Scope, headers: Headers, body: bytes) -> Response | None:
        path: str = scope["path"]
        # Cookies know no ports: every server of a machine has one of its own name.
        cookie = f"ffmem-{(scope.get('server') or ('', ''))[1]}"
        if path.startswith("/static/"):  # our own code, no data
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == "token"), None)
        if path == "/enter" and scope["method"] == "POST":
            fields = parse_qsl(body.decode("latin-1"))
            given = next((value for name, value in fields if name == "token"), "")
            if self._is_token(given):
                back = next((value for name, value in fields if name == "back"), "/")
                inside = back.startswith("/") and back[1:2] != "/"
                return self._admitted(back if inside else "/", cookie)
        elif given is not None and self._is_token(given):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            return self._admitted(f"{path}?{rest}" if rest else path, cookie)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        if hmac.compare_digest(_cookie(headers, cookie).encode(), self._pass.encode()):
            return None
        wrong = given is not None or bool(bearer)
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        back = "/" if path == "/enter" else f"{path}?{rest}" if rest else path
        return _refused(
            path,
            401,
            "The token is wrong." if wrong else "This explorer is for those who have its token.",
            page="enter.html",
            back=back,
        )

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _admitted(self, back: str, cookie: str) -> Response:
        """Return the way back to the page that was asked for, with the cookie."""
        clean = back.replace("\\", "%5C")
        answer = RedirectResponse(f"/{clean.lstrip('/')}", 303)
        answer.set_cookie(cookie, self._pass, httponly=True, samesite="lax", path="/")
        return answer

    def _knows(self, host: str) -> bool:
        """Return whether a Host header is a name of this server: a number is nobody else's name."""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower().rstrip(".") in self._hosts
        return True


async def _body(headers: Headers, receive: Receive) -> bytes | None:
    """Return the body of a request, None if it is too long; none is waited for if none comes."""
    length = headers.get("content-length", "0")
    if "transfer-encoding" not in headers and length == "0":
        return b""
    if not length.isdigit() or int(length) > MOST_BODY:
        return None
    body: bytes = b""
    while len(body) <= MOST_BODY:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    return body if len(body) <= MOST_BODY else None


def _again(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read already once more, and then what else comes."""
    unread = [body]

    async def receiving() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receiving


def _cookie(headers: Headers, name: str) -> str:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    return jar[name].value if name in jar else ""


def _refused(
    path: str, status: int, message: str, page: str = "refused.html", back: str = "/"
) -> Response:
    """Return a refusal; its page needs nothing that only those inside may see."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if path.startswith("/api"):
        return JSONResponse({"error": message}, status, headers)
    text = (files("ffmem.web") / "templates" / page).read_text(encoding="utf-8")
    filled = text.replace("{message}", message).replace("{back}", html.escape(back))
    return HTMLResponse(filled, status, headers)


def refuse_weak(token: str) -> str:
    """Return a token that cannot be guessed in a lifetime."""
    if len(token) < 16 or not (token.isascii() and token.isprintable()) or " " in token:
        raise FfmemError(
            f"The token has {len(token)} characters, or odd ones. Give 16 or more plain letters and"
            " figures, or --token alone: one is made."
        )
    return token
