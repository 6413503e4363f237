"""Studies as files: nothing is lost on the way, nothing is taken in twice or by force."""

import csv
import json

import pytest

from ffmem.annotation.exchange import export_sheets, import_sheets
from ffmem.annotation.study import AnnotationStudy, Sheet, SheetPattern
from ffmem.errors import FfmemError, StoreError
from tests.annotation.conftest import small_plan


def sheet(*marks, **options):
    return Sheet((SheetPattern("a", "ends with press", "shallow", frozenset(marks)),), **options)


DONE = sheet(1, 2, 3, done=True)


@pytest.fixture
def other(tmp_path):
    """The same study elsewhere: the same plan, other codes."""
    return AnnotationStudy.create(tmp_path / "other.sqlite", small_plan())


@pytest.fixture
def file(tmp_path):
    return tmp_path / "sheets.jsonl"


def worked(study):
    """Let two people hand in an item and an adjudicator decide; one more is begun."""
    ana, ben, _, head, _ = study.people()
    study.save(ana, "k1", 0, sheet(1))
    study.save(ana, "k1", 1, DONE)
    study.save(ben, "k1", 0, Sheet(no_pattern=True, done=True))
    study.save(ana, "k4", 0, Sheet(related=True, note="wörter"))
    study.save(head, "k1", 0, DONE)


def all_sheets(study):
    return [(one.item, one.annotator, one.sheet) for one in study.judgments()]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_export_has_a_header_and_a_line_per_item_and_annotator_and_no_code(study, file):
    worked(study)
    assert export_sheets(study, file) == 13
    header, *rest = lines(file)
    assert header["settings"] == study.settings
    assert len({(line["item"], line["annotator"]) for line in rest}) == 13
    assert [line["annotator"] for line in rest].count("adjudicators") == 1
    (line,) = [one for one in rest if (one["item"], one["annotator"]) == ("k1", "ana")]
    assert (line["kind"], line["cell"], line["sign"]) == ("triggers", "L0N3", 1)
    assert (line["version"], line["sheet"]) == (2, DONE.to_dict())
    assert line["texts"][0] == {
        **{"prefix": "the a press", "last_token": " press", "next_token": " said"},
        "rest": " said so.",
    }
    (line,) = [one for one in rest if (one["item"], one["annotator"]) == ("k2", "cai")]
    assert (line["version"], line["saved_at"], line["sheet"]) == (0, None, Sheet().to_dict())
    for person in study.people():
        assert person.code not in file.read_text(encoding="utf-8")


def test_the_history_has_a_line_per_revision(study, file):
    worked(study)
    assert export_sheets(study, file, history=True) == 5
    found = [(one["item"], one["saved_by"], one["version"]) for one in lines(file)[1:]]
    assert sorted(found) == [
        *(("k1", "ana", 1), ("k1", "ana", 2), ("k1", "ben", 1), ("k1", "head", 1)),
        ("k4", "ana", 1),
    ]


def test_a_table_has_a_row_per_item_and_annotator(study, tmp_path):
    worked(study)
    export_sheets(study, tmp_path / "sheets.csv")
    with (tmp_path / "sheets.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13
    (row,) = [one for one in rows if (one["item"], one["annotator"]) == ("k1", "ana")]
    assert (row["cell"], row["texts"], row["done"], row["study"]) == ("L0N3", "6", "True", "p")
    assert json.loads(row["patterns"]) == DONE.to_dict()["patterns"]


def test_no_cell_of_a_table_is_a_formula(study, tmp_path):
    study.save(study.people()[0], "k1", 0, Sheet(note="=1+1"))
    export_sheets(study, tmp_path / "sheets.csv")
    with (tmp_path / "sheets.csv").open(encoding="utf-8", newline="") as file:
        assert "'=1+1" in {row["note"] for row in csv.DictReader(file)}


@pytest.mark.parametrize("history", [False, True])
def test_what_was_exported_changes_nothing_where_it_comes_from(study, file, history):
    worked(study)
    study.save(study.people()[0], "k1", 2, sheet(1, 2, 3, 4, done=True))
    export_sheets(study, file, history)
    study.save(study.people()[0], "k1", 3, sheet(1, 2, 3, 5, done=True))  # after the export
    before = all_sheets(study)
    assert (import_sheets(study, file).imported, all_sheets(study)) == (0, before)
    assert import_sheets(study, file).conflicts == []


@pytest.mark.parametrize("history", [False, True])
def test_sheets_from_elsewhere_are_imported_once(study, other, file, history):
    worked(other)
    export_sheets(other, file, history)
    first = import_sheets(study, file)
    assert (first.imported, first.conflicts) == (4, [])
    assert all_sheets(study) == all_sheets(other)
    again = import_sheets(study, file)
    assert (again.imported, again.conflicts) == (0, [])
    assert all_sheets(study) == all_sheets(other)
    assert [one.saved_by for one in study.history("ana", "k1")] == ["import"]
    # What is changed here after the import is not changed back by another one.
    study.save(study.people()[0], "k1", 1, sheet(4, 5))
    assert import_sheets(study, file).imported == 0
    assert study.open_item(study.people()[0], "k1").sheet == sheet(4, 5)


def test_a_sheet_that_differs_is_reported_and_the_rest_imported(study, other, file):
    ana, ben = study.people()[:2]
    study.save(ana, "k1", 0, Sheet(note="here"))
    other.save(ana, "k1", 0, Sheet(note="there"))
    other.save(ben, "k2", 0, sheet(1))
    export_sheets(other, file)
    done = import_sheets(study, file)
    assert done.imported == 1
    (sentence,) = done.conflicts
    assert "(k1, ana) was not imported: the study has another sheet (version 1)" in sentence
    assert study.open_item(ana, "k1").sheet == Sheet(note="here")
    assert study.open_item(ben, "k2").sheet == sheet(1)


def change(file, edit):
    content = lines(file)
    edit(content)
    file.write_text("".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda c: c[0]["settings"].update(plan="q"), "is from another study"),
        (lambda c: c[0].update(file="x"), "is not an export"),
        (lambda c: c[0].update(format=7), "has format 7, not 2"),
        (lambda c: c.clear(), "is not an export of a study"),
        (lambda c: c[2].update(item="k9"), "'k9', which is not an item of this study"),
        (lambda c: c[2].update(annotator="zoe"), "not assigned to the annotator 'zoe'"),
        (lambda c: c[2].update(role="adjudicator"), "not assigned to the adjudicator"),
        (lambda c: c[2].pop("sheet"), "Line 3 .* lacks item, annotator, role or sheet"),
        (lambda c: c.append(c[1]), "is a second sheet"),
        (lambda c: c[1].update(sheet={"x": 1}), "Line 2 .* is not valid"),
        (lambda c: c[1].update(sheet={"done": True}), "Describe a pattern.* Nothing was imported"),
    ],
)
def test_what_does_not_fit_is_refused_as_a_whole(study, other, file, edit, sentence):
    ben = study.people()[1]
    other.save(ben, "k2", 0, sheet(1))
    export_sheets(other, file)
    change(file, edit)
    with pytest.raises(StoreError, match=sentence):
        import_sheets(study, file)
    assert study.open_item(ben, "k2").version == 0


def test_files_that_cannot_be_are_refused(study, tmp_path):
    with pytest.raises(FfmemError, match=r"a \.jsonl or \.csv file"):
        export_sheets(study, tmp_path / "x.txt")
    with pytest.raises(FfmemError, match="There is no folder"):
        export_sheets(study, tmp_path / "no" / "x.csv")
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link.csv").symlink_to("target")
    with pytest.raises(FfmemError, match="is a symbolic link to target"):
        export_sheets(study, tmp_path / "link.csv")
    assert (tmp_path / "target").read_text() == "mine"
    with pytest.raises(StoreError, match="Cannot read"):
        import_sheets(study, tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "is not an export of a study"),
        (b"\xff\xfe", "is not an export of a study"),
        (b"[" * 100_000, "Line 1 of .* is nested too deeply"),
        (b'{"a":' * 100_000, "Line 1 of .* is nested too deeply"),
        (b"1" * 5_000, "is not an export of a study"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_file_that_is_no_export_is_a_sentence(study, tmp_path, content, sentence):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(StoreError, match=sentence):
        import_sheets(study, tmp_path / "bad.jsonl")
