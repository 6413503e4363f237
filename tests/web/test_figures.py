"""Figures: on their page, as files, and only those that were measured."""

import json
import re
from html import unescape

import pytest
from starlette.testclient import TestClient

from ffmem.experiments.base import NAMES, ExperimentResult, find
from ffmem.experiments.charts import write_figure as draw
from ffmem.indexing.store import Index
from ffmem.web import charts
from ffmem.web.app import make_app
from ffmem.web.catalog import Catalog
from ffmem.web.worker import ModelWorker
from tests.experiments.results import PAPERS, result
from tests.web.conftest import HOSTILE

MEASURED = [name for name in PAPERS if name != "patterns"]


@pytest.fixture(scope="module")
def results(served_folder):
    manifest = Index(served_folder).manifest
    settings = {"model_hash": manifest.model.hash, "corpus": {"hash": manifest.corpus.hash}}
    found = {name: result(name, n_layers=2, **settings) for name in MEASURED}
    rows = found["predictive-values"].rows
    for row, hostile in zip(rows, HOSTILE, strict=False):
        row["token"] = hostile
    return found


@pytest.fixture(scope="module")
def client(results, served_folder, ungated_folder, tmp_path_factory):
    """A visitor of a site whose first index was measured, and whose second was not."""
    report = tmp_path_factory.mktemp("report")
    for one in results.values():
        one.write(report)
    catalog = Catalog.open([served_folder, ungated_folder], [report])
    app = make_app(catalog, ModelWorker(device="cpu"))
    with TestClient(app, "http://127.0.0.1:8800") as visitor:
        yield visitor


def test_the_page_tells_of_every_figure_what_it_shows_and_what_the_paper_says(client, results):
    page = unescape(client.get("/figures").text)
    places = [page.index(f'id="{name}"') for name in NAMES if name in results]
    assert places == sorted(places)
    for name, found in results.items():
        assert find(name).title in page
        assert found.paper in page
        assert find(name).summary(found) in page
        assert find(name).paper_says in page


def test_the_list_for_programs_leads_to_results_charts_and_files(client, results):
    answer = client.get("/api/figures").json()
    assert [one["name"] for one in answer["figures"]] == [name for name in NAMES if name in results]
    for one in answer["figures"][:2]:
        assert client.get(one["result"]).json()["experiment"] == one["name"]
        assert client.get(one["spec"]).json()["usermeta"]["vega"] == charts.bundle_version()
        assert client.get(one["svg"]).status_code == 200
        assert client.get(one["pdf"]).content.startswith(b"%PDF")


def test_files_are_those_of_the_report_byte_for_byte(client, results, tmp_path):
    found = results["agreement"]
    svg, pdf = draw(found, tmp_path)
    for ending, content in (
        ("svg", svg.read_bytes()),
        ("pdf", pdf.read_bytes()),
        ("json", None),
    ):
        answer = client.get(f"/figures/agreement.{ending}")
        assert answer.headers["content-disposition"] == (
            f'attachment; filename="agreement.{ending}"'
        )
        if content:
            assert answer.content == content
        else:
            assert answer.json() == json.loads(found.write(tmp_path).read_text())


def test_one_figure_has_a_page_with_its_numbers_linked(client, results):
    page = client.get("/figures/predictive-values").text
    for row in results["predictive-values"].rows[:5]:
        assert f'<a href="/m/{row["cell"]}">{row["cell"]}</a>' in page
        assert f'<a href="/layer/{row["layer"]}">{row["layer"] + 1}</a>' in page


@pytest.mark.parametrize("address", ["/figures", "/figures/predictive-values", "/"])
def test_what_results_hold_is_text_never_markup(client, address):
    page = client.get(address).text
    for sign in ("<script>document", "<img src=x", "<!-- a comment"):
        assert sign not in page


@pytest.mark.parametrize(
    "name", ["zero", "../../etc/passwd", "..%2Fmanifest", "Agreement", "patterns"]
)
@pytest.mark.parametrize("ending", ["", ".svg", ".pdf", ".json"])
def test_a_figure_that_was_not_measured_is_not_here(client, name, ending):
    for address in (
        f"/figures/{name}{ending}",
        f"/api/figures/{name}",
        f"/api/figures/{name}/spec",
    ):
        assert client.get(address).status_code == 404
    assert client.get("/api/figures/zero").json()["error"].startswith("There is no figure 'zero'")


def test_an_index_without_results_names_the_command_that_makes_them(client):
    assert client.get("/api/figures?index=plain").json()["figures"] == []
    page = client.get("/figures?index=plain").text
    assert "ffmem report plain --corpus VALID --out plain-report" in page
    assert "data-spec" not in page


def test_still_pictures_come_in_both_themes(client):
    light, dark = (
        client.get(f"/api/figures/agreement/picture?theme={theme}").text
        for theme in ("light", "dark")
    )
    assert "#e8e6e1" in dark
    assert "#e8e6e1" not in light
    assert client.get("/api/figures/agreement/picture?theme=sepia").status_code == 422


def test_every_chart_of_the_page_leads_to_a_chart(client):
    page = client.get("/figures").text
    specs = re.findall(r'data-spec="([^"]*)" data-alt="[^"]+"', page)
    assert len(specs) == len(MEASURED)
    images = re.findall(r'<img src="([^"]*)" alt="[^"]+"', page)
    assert len(images) == len(MEASURED)
    assert client.get(unescape(specs[0])).status_code == 200
    assert client.get(unescape(images[0])).status_code == 200


def test_vega_is_kept_for_good_under_its_version_and_asked_for_again_otherwise(client, monkeypatch):
    monkeypatch.setattr(
        "ffmem.web.views.figures.bundle", lambda: charts.Bundle(b"// vega", '"tag"')
    )
    good = client.get(f"/static/vega.js?v={charts.bundle_version()}")
    assert good.content == b"// vega"
    assert "immutable" in good.headers["cache-control"]
    assert good.headers["content-type"].startswith("text/javascript")
    plain = client.get("/static/vega.js")
    assert plain.headers["cache-control"] == "no-cache"
    again = client.get("/static/vega.js", headers={"If-None-Match": plain.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


def test_results_are_shown_as_they_are(client, results):
    answer = client.get("/api/figures/agreement").json()
    assert answer == results["agreement"].to_dict()
    assert isinstance(results["agreement"], ExperimentResult)
