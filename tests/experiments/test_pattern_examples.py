"""Tables 1 and 3 of the patterns that an index keeps."""

import pytest

from ffmem.cells import Cell
from ffmem.experiments.examples import pattern_tables
from ffmem.experiments.render import write_report
from ffmem.experiments.report import Report
from ffmem.patterns.store import ExaminedList, Pattern, PatternWriter
from tests.annotation.kept_patterns import copied, first_three, keep, listed, signs
from tests.experiments.results import result
from tests.experiments.test_patterns import patterns


@pytest.fixture
def own(index, tmp_path):
    return copied(index, tmp_path / "index")


def test_without_patterns_there_are_no_tables(own):
    assert pattern_tables(own) == ([], None)


def test_table_1_has_the_most_marked_pattern_of_each_kind_and_layer(own):
    keep(own, "automatic", first_three)
    rows, _ = pattern_tables(own)
    main = signs(own)
    expected = []
    for layer in range(own.n_layers):
        for kind in ("shallow", "semantic"):
            found = []
            for memory, sign in enumerate(main[layer].tolist()):
                cell = (layer, memory)
                n = len(listed(own, cell, sign)) if sign else 0
                seen = first_three(Cell(*cell), sign, n)
                found += [
                    (-len(ranks), -len(seen), memory, n, ranks) for k, ranks in seen if k == kind
                ]
            best = min(found)
            expected.append((f"L{layer}N{best[2]}", kind, len(best[4]), best[3]))
    assert [(row.cell, row.kind, row.marked, row.of) for row in rows] == expected
    assert {row.source for row in rows} == {"automatic"}
    assert all(len(row.excerpts) == 3 for row in rows)


def test_table_3_has_every_trigger_of_a_key_with_its_patterns(own):
    keep(own, "automatic", first_three)
    rows, table = pattern_tables(own)
    assert table.cell in {row.cell for row in rows}
    assert {one.kind for one in table.patterns} == {"shallow", "semantic"}
    n = len(listed(own, Cell.parse(table.cell), table.sign))
    assert [rank for rank, _, _ in table.lines] == list(range(1, n + 1))
    for rank, _, numbers in table.lines:
        assert numbers == [one.number for one in table.patterns if rank in one.ranks]


def test_people_come_before_machines(own):
    keep(own, "automatic", first_three)
    keep(own, "human", lambda cell, sign, n: [("semantic", (1, 2, 3))] if n > 3 else [])
    rows, table = pattern_tables(own)
    assert {row.source for row in rows} == {table.source} == {"human"}
    assert {row.kind for row in rows} == {"semantic"}


def test_the_report_shows_the_tables_with_their_source(own, tmp_path):
    keep(own, "automatic", first_three)
    write_report(tmp_path / "out", [patterns(own)], own)
    for name in ("report.html", "report.md"):
        text = (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert "ource: automatic" in text
        assert "the paper’s protocol" in text
        assert "One key with all its triggers" in text or "one key with all its triggers" in text
    html = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert 'id="table-1"' in html
    assert 'id="table-3"' in html


def test_descriptions_are_text_never_markup(own, tmp_path):
    sign = int(signs(own)[0][0])
    n = len(listed(own, Cell(0, 0), sign))
    writing = PatternWriter(own, "automatic")
    bad = Pattern(Cell(0, 0), sign, 1, "shallow", "<img src=x> | *x*", "r", "w", (1, 2, 3))
    writing.layer(0, [ExaminedList(Cell(0, 0), sign, n)], [bad])
    writing.commit({})
    write_report(tmp_path / "out", [patterns(own)], own)
    assert "<img src=x>" not in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    text = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert "<img src=x>" not in text
    assert "\\| \\*x\\*" in text


def test_the_settings_of_a_report_are_those_of_the_model_that_ran(index):
    ran = [result("patterns", 4, dtype="float32"), result("agreement", 4, dtype="bfloat16")]
    report = Report(ran, index)
    assert report.settings["dtype"] == "bfloat16"
    assert "--dtype bfloat16" in report.commands[-1]
