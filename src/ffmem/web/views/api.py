"""The page that lists every route below /api, from the OpenAPI document itself."""

from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from ffmem.web.site import Site
from ffmem.web.state import PARAMETERS, Asked


class Parameter(NamedTuple):
    """One parameter of a route."""

    name: str
    kind: str
    default: str
    description: str


class Route(NamedTuple):
    """One route of the API; parameters that every route has are left out."""

    method: str
    path: str
    says: str
    parameters: list[Parameter]


def router(site: Site) -> APIRouter:
    """Return the route of the page."""
    routes = APIRouter()

    @routes.get("/api", include_in_schema=False)
    def page(request: Request, state: Asked) -> HTMLResponse:
        found = describe(request.app.openapi())
        return site.page(request, state, "api.html", routes=found[0], shared=found[1])

    return routes


def describe(openapi: dict[str, Any]) -> tuple[list[Route], list[Parameter]]:
    """Return the routes of an OpenAPI document, and the parameters of the state."""
    routes: list[Route] = []
    shared: dict[str, Parameter] = {}
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            parameters = [_parameter(one) for one in operation.get("parameters", [])]
            shared |= {one.name: one for one in parameters if one.name in PARAMETERS}
            own = [one for one in parameters if one.name not in PARAMETERS]
            says = operation.get("description") or operation.get("summary", "")
            routes.append(Route(method.upper(), path, says, own))
    return routes, list(shared.values())


def _parameter(described: dict[str, Any]) -> Parameter:
    schema = described["schema"]
    kind = next(one for one in schema.get("anyOf", [schema]) if one.get("type") != "null")
    default = schema.get("default")
    return Parameter(
        described["name"],
        " | ".join(kind["enum"]) if "enum" in kind else str(kind.get("type", "")),
        "" if default is None else str(default),
        described.get("description", ""),
    )
