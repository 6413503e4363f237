import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from ffmem.experiments import charts
from ffmem.interventions.compare import draw_chart
from tests.interventions.pairs import compared, model

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script>&\"'\x00]]>"


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def content(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chart")
    return compared(folder, model(request.param), model(request.param, seed=1))


def titles(content):
    drawn = draw_chart(content.settings, content.rows).to_dict()
    return [panel["title"] for panel in drawn["vconcat"]]


def test_the_figure_has_a_panel_for_every_list_for_the_values_and_for_activity(content):
    gated = content.settings["gated"]
    lists = 2 if gated else 1
    assert len(titles(content)) == lists + 2
    assert titles(content)[0].startswith("rank-biased overlap of triggers")
    assert "cosine of the two values" in titles(content)
    assert ("open gate" in titles(content)[-1]) == gated


def test_without_models_there_is_no_panel_of_cosines(content):
    missing = dict.fromkeys(("mean", "q1", "median", "q3")) | {"n": 0}
    rows = [row | {"value_cosine": missing} for row in content.rows]
    without = replace(content, rows=rows)
    assert "cosine of the two values" not in titles(without)
    without.to_svg()


def test_layers_count_from_1_and_medians_are_the_rows(content):
    drawn = draw_chart(content.settings, content.rows).to_dict()
    panel, data = drawn["vconcat"][0], drawn["datasets"]
    points = data[panel["layer"][-1]["data"]["name"]]
    assert [point["layer"] for point in points] == [1, 2]
    medians = [row["jaccard"]["median"] for row in content.rows]
    assert [point["jaccard"] for point in points] == medians
    boxes = data[panel["layer"][0]["data"]["name"]]
    assert [box["q1"] for box in boxes] == [row["rbo"]["q1"] for row in content.rows]


def test_the_figure_is_xml_with_a_title_a_description_and_a_dark_side(content, tmp_path):
    hostile = content.settings["second"] | {"model": HOSTILE}
    replace(content, settings=content.settings | {"second": hostile}).write(tmp_path)
    svg, pdf = tmp_path / "compare.svg", tmp_path / "compare.pdf"
    root = ET.fromstring(svg.read_text(encoding="utf-8"))
    assert "alert(1)" in root.find(f"{SVG}title").text
    assert root.find(f"{SVG}desc").text.startswith("By layer")
    assert "prefers-color-scheme:dark" in root.find(f"{SVG}style").text
    assert not re.findall("script", svg.read_text().split("</title>")[1])
    assert pdf.read_bytes().startswith(b"%PDF")


def test_no_color_of_the_ground_is_fixed_for_light_pages_alone(content):
    used = set(re.findall(r'(?:fill|stroke)="(#[0-9a-fA-F]{6})"', content.to_svg()))
    assert used & {light for light, _ in charts.GROUND.values()}
    assert not used & {"#ffffff", "#000000"}
