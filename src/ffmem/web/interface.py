"""The page that tells programs what they may ask: every route below /api, from OpenAPI itself."""

from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from ffmem.web.site import Site
from ffmem.web.state import Asked


class Parameter(NamedTuple):
    """One parameter of a route."""

    name: str
    where: str
    kind: str
    default: str
    description: str


class Route(NamedTuple):
    """One route of the API."""

    method: str
    path: str
    summary: str
    description: str
    parameters: list[Parameter]


def router(site: Site) -> APIRouter:
    """Return the route of the page."""
    routes = APIRouter()

    @routes.get("/api", include_in_schema=False)
    def interface(request: Request, state: Asked) -> HTMLResponse:
        return site.page(request, state, "interface.html", routes=described(request.app.openapi()))

    return routes


def described(openapi: dict[str, Any]) -> list[Route]:
    """Return the routes of an OpenAPI document as the page shows them."""
    return [
        Route(
            method.upper(),
            path,
            operation.get("summary", ""),
            operation.get("description", ""),
            [_parameter(one) for one in operation.get("parameters", [])],
        )
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    ]


def _parameter(described: dict[str, Any]) -> Parameter:
    schema = described["schema"]
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    kind = kinds[0]
    shown = " | ".join(kind["enum"]) if "enum" in kind else str(kind.get("type", ""))
    default = schema.get("default")
    return Parameter(
        described["name"],
        described["in"],
        shown,
        "" if default is None else str(default),
        described.get("description", ""),
    )
