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
from ffmem.web.worker import Worker

TWINS = [
    "/api/home",
    "/api/random",
    "/api/layers",
    "/api/layer/{layer}",
    "/api/m/{cell}",
    "/api/m/{cell}/similar",
    "/api/m/{cell}/coefficients",
    "/api/m/{cell}/intervals",
    "/api/search",
    "/api/trace",
    "/api/effect",
    "/api/figures",
    "/api/figures/{name}",
]
"""What the pages show, as JSON."""

MORE = [
    "/api/home/spec",
    "/api/layer/{layer}/spec",
    "/api/figures/{name}/spec",
]
"""The pictures of the pages, in Vega-Lite's language."""

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
def api(library):
    app = make_app(library, Worker(device="cpu"), hosts=["testserver"])
    return schemathesis.openapi.from_asgi("/api/openapi.json", app)


@pytest.mark.parametrize("mode", [POSITIVE, NEGATIVE], ids=["as described", "not so"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_request_breaks_it(api, method, path, mode):
    # Half of them of what there is: a name made up would only ever be unknown.
    known = {"layer": 1, "cell": "L1N3", "name": "agreement"} if mode == POSITIVE else {}
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
