"""The script of the charts is made once; pages without scripts get drawings."""

import pytest

from ffmem.web import charts
from ffmem.web.views.figures import SvgResponse

POINT = {
    "data": {"values": [{"a": 1}, {"a": 2}]},
    "mark": "point",
    "encoding": {"x": {"field": "a", "type": "quantitative"}},
}


@pytest.fixture
def forgetful(monkeypatch, tmp_path):
    """A process that has not made the script yet, with an empty cache folder."""
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    charts._bundle.cache_clear()
    yield tmp_path
    charts._bundle.cache_clear()


def test_the_script_is_made_once_and_found_again_by_the_next_process(forgetful):
    made = charts.bundle()
    assert charts.bundle() is made
    assert b"vegaEmbed" in made.script
    (kept,) = (forgetful / "cache" / "web").iterdir()
    assert kept.read_bytes() == made.script
    assert charts.bundle_version() in kept.name
    kept.write_text("window.vegaEmbed = 1;")
    charts._bundle.cache_clear()
    again = charts.bundle()
    assert again.script == b"window.vegaEmbed = 1;"
    assert again.etag != made.etag


def test_the_script_needs_no_cache_folder(forgetful, monkeypatch):
    (forgetful / "file").write_text("")
    monkeypatch.setenv("FFMEM_CACHE", str(forgetful / "file" / "below"))
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda *_, **__: "window.vegaEmbed = 2;")
    assert charts.bundle().script == b"window.vegaEmbed = 2;"


def test_a_drawing_is_svg_without_style_of_its_own():
    svg = SvgResponse.of(POINT).body.decode()
    assert svg.startswith("<svg")
    assert "style" not in svg
