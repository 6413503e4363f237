"""The OpenAPI document, and the page that lists every route below /api."""

import dataclasses
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse

from ffmem.cells import Cell
from ffmem.indexing.memory import Memory
from ffmem.patterns.store import Pattern
from ffmem.web.site import Site
from ffmem.web.state import PARAMETERS, StateParam

Schema = dict[str, Any]
"""Any JSON object."""

RESULTS = {
    "/api/m/{cell}": "Memory",
    "/api/figures/{name}": "ExperimentResult",
}
"""Routes whose JSON is made by `to_dict` of a class, not by its fields alone."""

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


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
    description: str
    parameters: list[Parameter]


def router(site: Site) -> APIRouter:
    """Return the route of the page."""
    routes = APIRouter()

    @routes.get("/api", include_in_schema=False)
    def page(request: Request, state: StateParam) -> HTMLResponse:
        routes, shared = list_routes(request.app.openapi())
        return site.page(request, state, "api.html", routes=routes, shared=shared)

    return routes


def list_routes(openapi: Schema) -> tuple[list[Route], list[Parameter]]:
    """Return the routes of an OpenAPI document, and the parameters of the state."""
    routes: list[Route] = []
    shared: dict[str, Parameter] = {}
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            parameters = [_parameter(one) for one in operation.get("parameters", [])]
            shared |= {one.name: one for one in parameters if one.name in PARAMETERS}
            own = [one for one in parameters if one.name not in PARAMETERS]
            description = operation.get("description") or operation.get("summary", "")
            routes.append(Route(method.upper(), path, description, own))
    return routes, list(shared.values())


def _parameter(described: Schema) -> Parameter:
    schema = described["schema"]
    kind = next(one for one in schema.get("anyOf", [schema]) if one.get("type") != "null")
    default = schema.get("default")
    return Parameter(
        described["name"],
        " | ".join(kind["enum"]) if "enum" in kind else str(kind.get("type", "")),
        "" if default is None else str(default),
        described.get("description", ""),
    )


def describe_results(app: FastAPI) -> None:
    """Add to the OpenAPI document what `to_dict` of results returns, from the results' classes."""

    def openapi() -> Schema:
        document = FastAPI.openapi(app)
        components: Schema = document["components"]["schemas"]
        if "ExperimentResult" not in components:
            components |= result_schemas()
            for path, name in RESULTS.items():
                content = document["paths"][path]["get"]["responses"]["200"]["content"]
                content["application/json"]["schema"] = _reference(name)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def result_schemas() -> Schema:
    """Return the JSON schemas of `RESULTS`, and of the classes of their fields."""
    found: Schema = {}
    text = str | None
    memory = _field_types(Memory)
    fields = ("triggers", "negative_triggers", "value", "stats")
    found["Memory"] = _object_schema(
        {
            **{"cell": Cell, "layer": int, "memory": int},
            **{name: memory[name] for name in fields},
            **{"value": memory["value"] | None, "patterns": list[Pattern]},
            **{"bank": text, "place": dict[str, int] | None},
            **{"value_note": text, "coefficient_note": text},
            **{"key": dict[str, Any], "sign_cases": list[Any] | None},
        },
        found,
    )
    result = {"experiment": str, "paper": str, "settings": dict[str, Any], "rows": list[Any]}
    found["ExperimentResult"] = _object_schema(result, found)
    return found


def _field_types(cls: type) -> dict[str, Any]:
    """Return the types of the fields and properties of a class."""
    properties = {
        name: get_type_hints(value.fget)["return"]
        for name, value in vars(cls).items()
        if isinstance(value, property)
    }
    return get_type_hints(cls) | properties


def _object_schema(fields: dict[str, Any], found: Schema) -> Schema:
    """Return the schema of an object; fields that may be None may be missing."""
    properties = {name: _type_schema(kind, found) for name, kind in fields.items()}
    required = [name for name, kind in fields.items() if NoneType not in get_args(kind)]
    return {"type": "object", "properties": properties, "required": required}


def _type_schema(kind: Any, found: Schema) -> Schema:
    """Return the JSON schema of a type; those of dataclasses and named tuples go to `found`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Cell:
        return {"type": "string", "description": "The name of a memory, like L5N1234."}
    if kind in JSON_TYPES:
        return {"type": JSON_TYPES[kind]}
    if origin in (Union, UnionType):
        return {"anyOf": [_type_schema(one, found) for one in arguments]}
    if origin in (list, tuple):
        return {"type": "array", "items": _type_schema(arguments[0], found)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1], found)}
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        if kind.__name__ not in found:
            found[kind.__name__] = {}
            found[kind.__name__] = _object_schema(get_type_hints(kind), found)
        return _reference(kind.__name__)
    return {}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
