"""What the pages of results say is what was measured."""

import json
import re
from pathlib import Path

import pytest

from docs import (
    circuit_curves,
    memory_kinds,
    pattern_split,
    people_study,
    small_models,
    written_facts,
)
from docs.result_pages import read_sections, write_sections
from ffmem.errors import FfmemError

RESULTS = Path(__file__).parent.parent / "docs" / "results"
PAGES = {
    "circuits": circuit_curves.sections,
    "memory-kinds": memory_kinds.sections,
    "pattern-split": pattern_split.sections,
    "people": people_study.sections,
    "small-models": small_models.sections,
    "written-facts": written_facts.sections,
}


def read_result(name):
    return json.loads((RESULTS / name / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PAGES)
def test_tables_and_sentences_of_a_page_follow_from_its_results(name):
    page = (RESULTS / name / "README.md").read_text(encoding="utf-8")
    assert read_sections(page) == PAGES[name](read_result(name))


def test_the_memories_that_the_page_about_circuits_names_are_nodes_of_its_results():
    named = {node["id"] for run in read_result("circuits")["runs"] for node in run["nodes"]}
    page = (RESULTS / "circuits" / "README.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(L\d+N\d+@\d+)`", page))
    assert told
    assert told <= named


def test_sections_are_replaced_and_no_other_text(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        "before\n<!-- a: from results.json -->\nold\n<!-- end of a -->\nbetween\n"
        "<!-- b: from results.json -->\n<!-- end of b -->\nafter\n"
    )
    write_sections(page, {"a": "new\n", "b": "1\n2\n"})
    assert read_sections(page.read_text()) == {"a": "new\n", "b": "1\n2\n"}
    rest = re.sub(r"new\n|1\n2\n|<.*>\n", "", page.read_text())
    assert rest == "before\nbetween\nafter\n"
    with pytest.raises(FfmemError, match="has the sections a, b; the script writes a"):
        write_sections(page, {"a": "new\n"})
