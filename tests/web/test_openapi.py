"""The API is what its description says: whatever is asked, no answer is a fault of the server."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from ffmem.web.app import make_app
from ffmem.web.worker import ModelWorker

TWINS = [
    "/api/home",
    "/api/progress",
    "/api/random",
    "/api/layers",
    "/api/layer/{layer}",
    "/api/layer/{layer}/{expert}",
    "/api/m/{cell}",
    "/api/m/{cell}/similar",
    "/api/m/{cell}/sources",
    "/api/m/{cell}/coefficients",
    "/api/m/{cell}/intervals",
    "/api/search",
    "/api/trace",
    "/api/effect",
    "/api/circuit",
    "/api/figures",
    "/api/figures/{name}",
]
"""What the pages show, as JSON."""

MORE = [
    "/api/home/spec",
    "/api/layer/{layer}/spec",
    "/api/figures/{name}/spec",
    "/api/circuit/viewer",
]
"""The pictures of the pages, in Vega-Lite's language or in that of circuit-tracer's viewer."""

ANNOTATED = [
    ("GET", "/api/annotate"),
    ("GET", "/api/annotate/{key}"),
    ("POST", "/api/annotate/{key}"),
]
"""What annotators' pages ask and send."""

ROUTES = [*(("GET", path) for path in (*TWINS, *MORE)), *ANNOTATED]

POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def api(catalog):
    app = make_app(catalog, ModelWorker(device="cpu"), hosts=["testserver"])
    return schemathesis.openapi.from_asgi("/api/openapi.json", app)


@pytest.mark.parametrize("mode", [POSITIVE, NEGATIVE], ids=["as described", "not so"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_request_breaks_it(api, method, path, mode):
    # Half of them of what there is: a name made up would only ever be unknown.
    known = {"layer": 1, "expert": "E1", "cell": "L1N3", "name": "agreement"}
    known = known if mode == POSITIVE else {}
    named = {name: value for name, value in known.items() if f"{{{name}}}" in path}
    cases = api[path][method].as_strategy(mode, path_parameters=named or None)

    @settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases)
    def ask(case):
        case.call_and_validate(checks=CHECKS)

    ask()


def test_every_page_has_its_twin(client):
    paths = client.get("/api/openapi.json").json()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    assert sorted(found) == sorted(ROUTES)


def test_the_description_is_shown_as_a_page(client):
    page = client.get("/api").text
    for path, operations in client.get("/api/openapi.json").json()["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}<" in page


def schema_problems(value, schema, document, place="response"):
    """Yield where a value has fields that its schema does not name; types are checked elsewhere."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].split("/")[-1]]
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    (schema,) = kinds if len(kinds) == 1 else [{}]
    if "$ref" in schema:
        yield from schema_problems(value, schema, document, place)
    elif isinstance(value, list) and "items" in schema:
        for number, one in enumerate(value):
            yield from schema_problems(one, schema["items"], document, f"{place}[{number}]")
    elif isinstance(value, dict) and "properties" in schema:
        for name, one in value.items():
            if name not in schema["properties"]:
                yield f"{place}.{name}"
            else:
                inner = schema["properties"][name]
                yield from schema_problems(one, inner, document, f"{place}.{name}")


@pytest.mark.parametrize(
    "path",
    [
        "/api/trace?text=The river&off=L1N3&generate=2",
        "/api/trace?text=The river&grid=false",
        "/api/effect?text=The river",
        "/api/m/L1N3",
        "/api/m/L1N3?index=plain",
        "/api/layers",
        "/api/home",
    ],
)
def test_every_field_of_a_response_is_described(client, path):
    document = client.get("/api/openapi.json").json()
    route = "/api/m/{cell}" if path.startswith("/api/m/") else path.partition("?")[0]
    responses = document["paths"][route]["get"]["responses"]
    schema = responses["200"]["content"]["application/json"]["schema"]
    assert "$ref" in schema
    assert list(schema_problems(client.get(path).json(), schema, document)) == []


def test_every_route_describes_its_response(client):
    document = client.get("/api/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            (content,) = operation["responses"]["200"]["content"].values()
            assert content["schema"], path


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_misspelled_parameter_is_refused(client, method, path):
    named = {"layer": 1, "expert": "E1", "cell": "L1N3", "name": "agreement", "key": "a"}
    response = client.request(method, path.format(**named), params={"sgn": 1})
    assert response.status_code == 422
    assert "There is no parameter 'sgn' here" in response.json()["error"]
