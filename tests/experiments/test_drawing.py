import re
import xml.etree.ElementTree as ET
from functools import cache

import pytest
import vl_convert

from ffmem.experiments import charts
from ffmem.experiments.charts import GROUND
from ffmem.experiments.charts import figure_svg as figure
from ffmem.experiments.charts import write_figure as draw
from tests.experiments.results import PAPERS, result

SVG = "{http://www.w3.org/2000/svg}"
GROUNDS = {"light": "#ffffff", "dark": "#1b1e24"}
PALETTE = tuple(
    getattr(charts, name) for name in ("ORANGE", "SKY", "GREEN", "BLUE", "VERMILION", "PURPLE")
)
HOSTILE = "<script>alert(1)</script>&\"'\x00\u202e\u05d0]]>"


@cache
def drawn(name, n_layers=30, gated=True):
    return figure(result(name, n_layers, gated))


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_same_result_gives_the_same_bytes(tmp_path):
    for name in PAPERS:
        first = [path.read_bytes() for path in draw(result(name, 3), tmp_path / "a")]
        charts.draw.cache_clear()
        assert [path.read_bytes() for path in draw(result(name, 3), tmp_path / "b")] == first
    assert len(list((tmp_path / "a").iterdir())) == 2 * len(PAPERS)


def test_the_pdf_of_a_figure_is_the_same_however_often_it_is_made():
    """With two fonts it is not: their order in the file is drawn anew each time."""
    for name in PAPERS:
        assert len({vl_convert.svg_to_pdf(drawn(name)) for _ in range(2)}) == 1


@pytest.mark.parametrize("name", PAPERS)
def test_a_figure_is_xml_with_a_title_a_description_and_a_dark_side(name, tmp_path):
    svg, pdf = draw(result(name, 3), tmp_path)
    root = ET.fromstring(svg.read_text(encoding="utf-8"))
    assert root.find(f"{SVG}title").text.endswith("smollm2-135m")
    assert len(root.find(f"{SVG}desc").text) > 40
    assert "prefers-color-scheme:dark" in root.find(f"{SVG}style").text
    assert pdf.read_bytes().startswith(b"%PDF")


def test_figures_name_nothing_outside_themselves():
    for name in PAPERS:
        svg = drawn(name)
        assert set(re.findall(r"https?://[^\"]*", svg)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
        }
        ids = re.findall(r'\bid="([^"]*)"', svg)
        assert len(ids) == len(set(ids))
        assert set(re.findall(r"url\(#([^)]*)\)", svg)) <= set(ids)
        assert all(id.startswith(f"{name}-") for id in ids)


def test_every_color_is_of_the_palette_or_changes_on_dark_pages():
    palette = {
        *PALETTE,
        *(charts.GRAY, *(light for light, _ in GROUND.values()), "none", "transparent", "white"),
    }
    for name in PAPERS:
        for gated in (True, False):
            used = re.findall(r'\b(?:fill|stroke)="([^"]*)"', drawn(name, 16, gated))
            assert {u for u in used if not u.startswith("url")} <= palette, name


def test_text_is_readable_on_both_grounds_and_data_are_seen():
    for name in ("ink", "soft"):
        light, dark = GROUND[name]
        assert contrast(light, GROUNDS["light"]) > 4.5
        assert contrast(dark, GROUNDS["dark"]) > 4.5
    for color in PALETTE:
        assert min(contrast(color, ground) for ground in GROUNDS.values()) > 2
    assert contrast(GROUND["ink"][0], GROUND["box"][0]) > 4.5
    assert contrast(GROUND["ink"][1], GROUND["box"][1]) > 4


def test_all_figures_are_equally_wide():
    widths = {float(re.search(r'width="([\d.]+)"', drawn(name))[1]) for name in PAPERS}
    assert max(widths) - min(widths) <= 2


def test_one_weight_of_one_font_keeps_the_pdf_the_same():
    for name in PAPERS:
        svg = drawn(name)
        assert 'font-weight="bold"' not in svg
        assert set(re.findall(r'font-family="([^"]*)"', svg)) == {charts.FONT}


def test_hostile_names_are_text_in_a_figure(tmp_path):
    svg, _ = draw(result("agreement", model=HOSTILE), tmp_path)
    text = svg.read_text(encoding="utf-8")
    assert "<script" not in text
    title = ET.fromstring(text).find(f"{SVG}title").text
    assert title.endswith("<script>alert(1)</script>&\"'⟨00⟩⟨202e⟩\u05d0]]>")
