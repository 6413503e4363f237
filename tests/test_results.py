"""Pages of docs/results say what the committed JSON beside them says."""

import json
import re

import pytest

from docs.claims import BEGIN, COMPARISON, END, PARTS, RESULTS, report_folders
from ffmem.experiments.base import find_all
from ffmem.experiments.comparison import Comparison, read_report
from ffmem.experiments.render import comparison_markdown, escape_markdown
from ffmem.experiments.report import section_of

each_report = pytest.mark.parametrize("folder", report_folders(), ids=lambda path: path.name)


def page_of(folder):
    return (folder / "report.md").read_text(encoding="utf-8")


def test_the_comparison_is_made_from_the_reports_as_they_are():
    comparison = Comparison([read_report(folder) for folder in report_folders()])
    page = (COMPARISON / "comparison.md").read_text(encoding="utf-8")
    assert page == comparison_markdown(comparison, COMPARISON)
    assert json.loads((COMPARISON / "comparison.json").read_text()) == comparison.to_dict()
    drawn = {path.name for path in COMPARISON.glob("*.svg")}
    assert drawn == {f"{experiment.name}.svg" for experiment in find_all()}
    assert set(re.findall(r"\]\((.*?\.svg)\)", page)) == drawn


@pytest.mark.parametrize("name", PARTS)
def test_the_marked_part_of_a_page_is_made_from_the_reports(name):
    text = (RESULTS / name).read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == PARTS[name]()


@each_report
def test_the_claims_of_a_report_are_those_of_its_json(folder):
    page = page_of(folder)
    for claims in read_report(folder).claims.values():
        for one in claims:
            cells = map(escape_markdown, (one.paper, one.model, one.n))
            assert f"| {' | '.join(cells)} | **{one.verdict}** |" in page


@each_report
def test_every_sentence_and_number_of_a_reports_sections_comes_from_its_json(folder):
    page = page_of(folder)
    for name, result in read_report(folder).results.items():
        part = page.split(f'<a id="{name}"></a>')[1].split("</details>")[0]
        section = section_of(result)
        assert f"**This model.** {escape_markdown(section.shows)}\n" in part
        rows = [line for line in part.splitlines() if line.startswith("| ")][2:]
        assert rows == [
            f"| {' | '.join(escape_markdown(one.text) for one in entries)} |"
            for entries in section.entries
        ]
