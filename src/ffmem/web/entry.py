"""Who annotates: a code that only one person knows, kept in a cookie, and what protects it.

A form that another site sends by itself carries no such cookie (SameSite=Strict), comes from
another origin, and does not know the form's token, which is made of the code:

    token = HMAC(code, "form")        so it outlives a server that is killed and started again
"""

import hashlib
import hmac
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from fastapi import Request
from fastapi.responses import Response

from ffmem.annotation.study import AnnotationStudy, Annotator, UnknownCode
from ffmem.errors import FfmemError

HEADER = "x-ffmem"
"""Pages of other sites cannot send it: every POST of JSON must have it."""

MOST_FIELDS = 2_000
"""Of a form: 30 patterns with 25 marks each are fewer."""

SECONDS = 60 * 60 * 24 * 180
"""How long a machine remembers a code, unless it is told to forget."""


class NotEntered(FfmemError):
    """No code was given, or none that the study knows."""


class Foreign(FfmemError):
    """A request that no page of this server can have sent."""


class Entered(NamedTuple):
    """Somebody who gave a code."""

    study: AnnotationStudy
    person: Annotator
    token: str
    """For forms."""
    mark: str
    """Tells what browsers keep for one person from what they keep for another."""


def cookie_name(request: Request) -> str:
    """Return the cookie's name; cookies know no ports, so every server has one of its own."""
    return f"ffmem-annotator-{(request.scope.get('server') or ('', ''))[1]}"


def entered(request: Request, study: AnnotationStudy, code: str | None = None) -> Entered:
    """Return who asks: whose code it is, by default the one in the cookie."""
    given = request.cookies.get(cookie_name(request), "") if code is None else code.strip()
    if not given:
        raise NotEntered("This needs your code. Enter it at /annotate.")
    try:
        person = study.enter(given)
    except UnknownCode as error:
        raise NotEntered(str(error)) from None
    return Entered(study, person, _made_of(given, "form"), _made_of(given, "mark")[:16])


def remember(request: Request, answer: Response, code: str) -> None:
    """Let this machine's browser keep a code."""
    answer.set_cookie(
        cookie_name(request),
        code.strip(),
        max_age=SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        path="/",
    )


def forget(request: Request, answer: Response) -> None:
    """Let this machine's browser forget the code."""
    answer.delete_cookie(cookie_name(request), path="/", httponly=True, samesite="strict")


def refuse_foreign(request: Request) -> None:
    """Refuse a request that the page of another site sent."""
    site, origin = (request.headers.get(name) for name in ("sec-fetch-site", "origin"))
    if origin == "null":  # hidden, as browsers do with forms; but they say whether it is their own
        own = site in ("same-origin", "none")
    else:
        same = origin is None or urlsplit(origin).netloc == request.headers.get("host")
        own = same and site in (None, "same-origin", "none")
    if not own:
        raise Foreign("Pages of other sites may not write here.")


def refuse_unmarked(request: Request) -> None:
    """Refuse JSON that the page of another site sent, or could have sent."""
    refuse_foreign(request)
    if HEADER not in request.headers:
        raise Foreign(f"The header {HEADER} is missing: requests that write must have it.")


def refuse_unsigned(who: Entered, token: str) -> None:
    """Refuse a form that was not made for the one who sends it."""
    if not hmac.compare_digest(token.encode(), who.token.encode()):
        raise Foreign(
            "The form is not one of this visit. Load the page again, and send it from there."
        )


class Fields:
    """The fields of a form, in their order."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.pairs = pairs

    def one(self, name: str, default: str = "") -> str:
        """Return the last value of a field."""
        return next((value for key, value in reversed(self.pairs) if key == name), default)

    def all(self, name: str) -> list[str]:
        """Return all values of a field."""
        return [value for key, value in self.pairs if key == name]


async def fields(request: Request) -> Fields:
    """Return the fields of a form that was sent; browsers send them like this."""
    body = (await request.body()).decode("utf-8", "replace")
    try:
        return Fields(parse_qsl(body, keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError:
        raise FfmemError(f"The form has more than {MOST_FIELDS:,} fields.") from None


def _made_of(code: str, purpose: str) -> str:
    return hmac.new(code.encode(), purpose.encode(), hashlib.sha256).hexdigest()
