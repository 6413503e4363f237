"""The report in a browser: legends and labels stand apart, links open memory cards."""

import pytest

from ffmem.experiments.render import write_report
from tests.experiments.test_report import with_cells_of
from tests.web.browser import FLAGS, browser_path

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(browser_path() is None, reason="no browser")

OVERLAPS = """() => [...document.querySelectorAll("svg.figure")].flatMap((figure) => {
  const labels = [...figure.querySelectorAll("text")].filter((one) => one.textContent.trim());
  const boxes = labels.map((one) => one.getBoundingClientRect());
  const met = [];
  for (let i = 0; i < boxes.length; i++)
    for (let j = i + 1; j < boxes.length; j++) {
      const [a, b] = [boxes[i], boxes[j]];
      const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (width > 1 && height > 4) met.push(`${labels[i].textContent} / ${labels[j].textContent}`);
    }
  return met;
})"""


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=browser_path(), args=FLAGS)
        yield browser
        browser.close()


@pytest.mark.parametrize(("n_layers", "gated"), [(16, False), (30, True)])
def test_no_two_labels_of_a_figure_meet(chromium, tiny_index, tmp_path, n_layers, gated):
    page = chromium.new_page()
    page.goto(
        write_report(tmp_path, with_cells_of(tiny_index, n_layers, gated), tiny_index).as_uri()
    )
    assert page.evaluate(OVERLAPS) == []
    # Another machine's font may be a seventh wider than the one that measured the labels.
    page.add_style_tag(content="svg.figure text { font-size: 12.5px !important }")
    assert page.evaluate(OVERLAPS) == []
    page.add_style_tag(content="svg.figure text { font-size: 20px !important }")
    assert page.evaluate(OVERLAPS)  # so that nobody trusts a test that sees nothing


def test_a_memory_is_folded_until_its_link_is_followed(chromium, tiny_index, tmp_path):
    page = chromium.new_page()
    page.goto(write_report(tmp_path, with_cells_of(tiny_index), tiny_index).as_uri())
    assert page.locator(".memories details[open]").count() == 0
    cell = page.locator("#table-2 a.cell").first
    name = cell.inner_text()
    cell.click()
    page.wait_for_function("document.querySelector('.memories details[open]')")
    assert page.locator(".memories details[open] summary .cell").inner_text() == name


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_as_wide_as_its_window(chromium, tiny_index, tmp_path, width):
    page = chromium.new_page(viewport={"width": width, "height": 800})
    page.goto(write_report(tmp_path, with_cells_of(tiny_index), tiny_index).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
