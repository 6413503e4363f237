"""Studies as files: nothing is lost on the way, nothing is taken in twice or by force."""

import csv
import json

import pytest

from ffmem.annotation.exchange import export, import_file
from ffmem.annotation.sheet import Sheet, SheetPattern
from ffmem.annotation.study import AnnotationStudy
from ffmem.errors import FfmemError, StoreError
from tests.annotation.conftest import small_plan


def sheet(*marks, **options):
    return Sheet((SheetPattern("a", "ends with press", "shallow", frozenset(marks)),), **options)


DONE = sheet(1, 2, 3, done=True)


@pytest.fixture
def other(tmp_path):
    """The same study elsewhere: the same plan, other codes."""
    with AnnotationStudy.create(tmp_path / "other.sqlite", small_plan()) as made:
        yield made


@pytest.fixture
def file(tmp_path):
    return tmp_path / "sheets.jsonl"


def worked(study):
    """Let two people hand in an item and an adjudicator decide; one more is begun."""
    ana, ben, _, head, _ = study.people()
    study.save(ana, "k1", 0, sheet(1), "r1")
    study.save(ana, "k1", 1, DONE, "r2")
    study.save(ben, "k1", 0, Sheet(no_pattern=True, done=True), "r1")
    study.save(ana, "k4", 0, Sheet(related=True, note="wörter"), "r1")
    study.save(head, "k1", 0, DONE, "r1")
    return ana, ben, head


def standing(study):
    return [(one.item, one.annotator, one.sheet) for one in study.standing()]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_export_has_a_header_and_a_line_per_item_and_annotator_and_no_code(study, file):
    worked(study)
    assert export(study, file) == 13
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
    assert export(study, file, history=True) == 5
    found = [(one["item"], one["by"], one["version"]) for one in lines(file)[1:]]
    assert sorted(found) == [
        *(("k1", "ana", 1), ("k1", "ana", 2), ("k1", "ben", 1), ("k1", "head", 1)),
        ("k4", "ana", 1),
    ]


def test_a_table_has_a_row_per_item_and_annotator(study, tmp_path):
    worked(study)
    export(study, tmp_path / "sheets.csv")
    with (tmp_path / "sheets.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13
    (row,) = [one for one in rows if (one["item"], one["annotator"]) == ("k1", "ana")]
    assert (row["cell"], row["texts"], row["done"], row["study"]) == ("L0N3", "6", "True", "p")
    assert json.loads(row["patterns"]) == DONE.to_dict()["patterns"]


def test_no_cell_of_a_table_is_a_formula(study, tmp_path):
    study.save(study.people()[0], "k1", 0, Sheet(note="=1+1"), "once")
    export(study, tmp_path / "sheets.csv")
    with (tmp_path / "sheets.csv").open(encoding="utf-8", newline="") as file:
        assert "'=1+1" in {row["note"] for row in csv.DictReader(file)}


def test_what_was_exported_changes_nothing_where_it_comes_from(study, file):
    worked(study)
    study.save(study.people()[0], "k1", 2, sheet(1, 2, 3, 4, done=True), "later")
    for history in (False, True):
        export(study, file, history)
        study.save(study.people()[0], "k2", int(history), Sheet(note=f"{history}"), f"{history}")
        before = standing(study)
        assert import_file(study, file)[:2] == (0, 0)
        assert standing(study) == before


@pytest.mark.parametrize("history", [False, True])
def test_people_who_worked_elsewhere_are_taken_in_once(study, other, file, history):
    ana, _, _ = worked(other)
    export(other, file, history)
    first = import_file(study, file)
    assert (first.saved, first.merged, first.conflicts) == (4, 0, [])
    assert standing(study) == standing(other)
    revisions = [len(study.history(ana, key)) for key in ("k1", "k2", "k3", "k4")]
    second = import_file(study, file)
    assert (second.saved, second.merged, second.conflicts) == (0, 0, [])
    assert [len(study.history(ana, key)) for key in ("k1", "k2", "k3", "k4")] == revisions
    assert [one.what for one in study.history(ana, "k1")] == ["import"]


def test_what_both_did_is_joined_and_stays_so(study, other, file):
    ana = study.people()[0]
    study.save(ana, "k1", 0, sheet(4, 5), "here")
    other.save(ana, "k1", 0, sheet(1, 2), "there")
    export(other, file)
    assert import_file(study, file)[:2] == (0, 1)
    assert study.open_item(ana, "k1").sheet == sheet(1, 2, 4, 5)
    assert import_file(study, file)[:2] == (0, 0)
    # A mark that is taken away after the import does not come back by another one.
    study.save(ana, "k1", 2, sheet(1, 4, 5), "away")
    import_file(study, file)
    assert study.open_item(ana, "k1").sheet == sheet(1, 4, 5)


def test_what_cannot_be_joined_is_reported_and_the_rest_taken_in(study, other, file):
    ana, ben = study.people()[:2]
    study.save(ana, "k1", 0, Sheet(note="here"), "here")
    other.save(ana, "k1", 0, Sheet(note="there"), "there")
    other.save(ben, "k2", 0, sheet(1), "there")
    export(other, file)
    done = import_file(study, file)
    assert (done.saved, done.merged) == (1, 0)
    (sentence,) = done.conflicts
    assert "(k1, ana) was not taken in: Somebody else changed the note" in sentence
    assert study.open_item(ana, "k1").sheet == Sheet(note="here")
    assert study.open_item(ben, "k2").sheet == sheet(1)


def change(file, edit):
    content = lines(file)
    edit(content)
    file.write_text("".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda c: c[0]["settings"].update(plan="q", asked={"seed": 7}), "seed 7, here 0"),
        (lambda c: c[0].update(file="x"), "does not begin as an export"),
        (lambda c: c[0].update(format=2), "of format 2, not 1"),
        (lambda c: c.clear(), "does not begin"),
        (lambda c: c[2].update(item="k9"), "'k9', which is no item of this study"),
        (lambda c: c[2].update(annotator="zoe"), "not for the annotator 'zoe' to judge"),
        (lambda c: c[2].update(role="adjudicator"), "not for the adjudicator"),
        (lambda c: c[2].pop("sheet"), "Line 3 .* lacks item, annotator, role or sheet"),
        (lambda c: c.append(c[1]), "is a second sheet"),
        (lambda c: c[1].update(sheet={"x": 1}), "Line 2 .* is no good"),
        (lambda c: c[1].update(sheet={"done": True}), "Describe a pattern.* Nothing was imported"),
    ],
)
@pytest.mark.parametrize("kind", ["sqlite"])
def test_what_does_not_fit_is_refused_as_a_whole(study, other, file, edit, sentence):
    ben = study.people()[1]
    other.save(ben, "k2", 0, sheet(1), "there")
    export(other, file)
    change(file, edit)
    with pytest.raises(StoreError, match=sentence):
        import_file(study, file)
    assert study.open_item(ben, "k2").version == 0


@pytest.mark.parametrize("kind", ["sqlite"])
def test_files_that_cannot_be_are_refused(study, tmp_path):
    with pytest.raises(FfmemError, match=r"a \.jsonl or a \.csv file"):
        export(study, tmp_path / "x.txt")
    with pytest.raises(FfmemError, match="There is no folder"):
        export(study, tmp_path / "no" / "x.csv")
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link.csv").symlink_to("target")
    with pytest.raises(FfmemError, match="is a symbolic link to target"):
        export(study, tmp_path / "link.csv")
    assert (tmp_path / "target").read_text() == "mine"
    with pytest.raises(StoreError, match="no export"):
        import_file(study, tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(StoreError, match="no export"):
        import_file(study, tmp_path / "bad.jsonl")
