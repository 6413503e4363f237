"""The page that lists every route below /api, from the OpenAPI document itself."""

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
    def page(request: Request, state: Asked) -> HTMLResponse:
        return site.page(request, state, "api.html", routes=described(request.app.openapi()))

    return routes


def described(openapi: dict[str, Any]) -> list[Route]:
    """Return the routes of an OpenAPI document."""
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
    kind = next(one for one in schema.get("anyOf", [schema]) if one.get("type") != "null")
    default = schema.get("default")
    return Parameter(
        described["name"],
        described["in"],
        " | ".join(kind["enum"]) if "enum" in kind else str(kind.get("type", "")),
        "" if default is None else str(default),
        described.get("description", ""),
    )
