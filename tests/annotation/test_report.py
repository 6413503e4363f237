"""The report of a study: its numbers are those of the summary, its texts do nothing."""

import json

import pytest

from ffmem.annotation.report import tables, write_report
from ffmem.annotation.summary import summarise
from tests.annotation.kept_patterns import first_three, keep
from tests.annotation.studies import composed, judged
from tests.annotation.test_publish import hand_in, own, study, three

__all__ = ["own", "study"]


def test_all_files_are_there_and_the_same_sheets_give_the_same_bytes(study, own, tmp_path):
    keep(own, "automatic", first_three)
    hand_in(study, three)
    page = write_report(study, own, tmp_path / "a")
    assert page == tmp_path / "a/annotation.md"
    names = {path.name for path in page.parent.iterdir()}
    assert names == {"annotation.json", "annotation.md", "annotation.svg", "annotation.pdf"}
    again = write_report(study, own, tmp_path / "b").parent
    for name in ("annotation.json", "annotation.md", "annotation.svg"):
        assert (again / name).read_bytes() == (page.parent / name).read_bytes()


def test_the_page_says_what_the_numbers_are(study, own, tmp_path):
    keep(own, "automatic", first_three)
    hand_in(study, three)
    page = write_report(study, own, tmp_path)
    text, found = page.read_text(), json.loads((tmp_path / "annotation.json").read_text())
    assert found["figure2"][0]["source"] == "human"
    assert {row["source"] for row in found["figure2"]} == {"human", "automatic"}
    assert found["agreement"]["automatic_people"]["coverage"]["couples"] == 3
    assert found["settings"]["study"]["asked"]["seed"] == 0
    for part in (
        *("| human | 1 |", "| automatic | all |", "automatic with people", "| controls |"),
        *("are not that protocol", "false-pattern rate", "Table 1", "Table 3", "source: human"),
    ):
        assert part in text
    assert "built-in" not in text
    assert "nan" not in text.lower().replace("annotat", "")


def test_text_of_people_and_corpus_does_nothing_in_the_page(study, own, tmp_path):
    hostile = "<script>alert(1)</script> | [x](http://evil) `y`"
    hand_in(study, lambda name, item: [(k, m, hostile) for k, m, _ in three(name, item)])
    text = write_report(study, own, tmp_path).read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "](http://evil)" not in text


def test_tables_show_a_pattern_of_each_kind_and_one_key_in_full():
    people = [
        judged("k1", "a", ("shallow", range(1, 11), "ends in x"), ("semantic", {2, 4, 11}, "news")),
        judged("k2", "a", ("shallow", range(1, 4), "rare"), memory=1),
        judged("k3", "a", ("semantic", range(1, 20), "press"), layer=3, memory=2),
    ]
    rows, one_key = tables(people)
    assert [(row.cell, row.kind, row.marked, row.of) for row in rows] == [
        ("L0N0", "shallow", 10, 25),
        ("L0N0", "semantic", 3, 25),
        ("L3N2", "semantic", 19, 25),
    ]
    assert [one.before + one.last for one in rows[1].excerpts] == [
        f"text {rank} of k1" for rank in (2, 4, 11)
    ]
    assert one_key.cell == "L0N0"
    assert [one.description for one in one_key.patterns] == ["ends in x", "news"]
    numbers = {line.rank: line.numbers for line in one_key.lines}
    assert len(numbers) == 25
    assert (numbers[1], numbers[2], numbers[11], numbers[12]) == ([1], [1, 2], [2], [])


def test_a_study_of_compositions_alone_is_summed_up():
    found = summarise([composed(f"c{i}", "a", i % 3 == 0) for i in range(9)])
    assert found["composition"]["n"] == 9
    assert found["figure2"][0]["n"] == 0
    assert tables([composed("c", "a", True)]) == ([], None)


@pytest.mark.parametrize("people", [("annotator-1",), ("annotator-1", "annotator-2")])
def test_a_study_that_is_not_finished_is_reported_as_far_as_it_is(study, own, tmp_path, people):
    hand_in(study, three, people)
    found = json.loads((write_report(study, own, tmp_path).parent / "annotation.json").read_text())
    assert found["counts"]["annotators"] == len(people)
    known = found["agreement"]["people"]["coverage"]["agreeing"]
    assert (known is None) == (len(people) == 1)
