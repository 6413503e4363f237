"""The commands of a study, as people and scripts call them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ffmem
from ffmem.annotation.study import AnnotationStudy, Sheet, SheetPattern, study_path
from ffmem.cli import cli
from ffmem.cli.annotate import annotate
from ffmem.experiments.base import ExperimentResult

SMALL = ("--per-layer", 2, "--top", 4, "--controls", 0.5)


def run(*arguments, **options):
    """Run `ffmem annotate` in this process; return stdout, which is JSON with --json."""
    arguments = ["annotate", *map(str, arguments)]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False, **options)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


@pytest.fixture
def folder(tiny_index, tmp_path):
    """An index of which studies can be made beside it."""
    link = tmp_path / "demo"
    link.mkdir()
    for path in tiny_index.folder.iterdir():
        (link / path.name).symlink_to(path)
    return link


def test_a_file_nested_too_deeply_is_one_line_of_error(folder, tmp_path):
    run("init", folder, *SMALL)
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(ffmem.FfmemError, match="nested too deeply"):
        run("import", folder, tmp_path / "deep.jsonl")


def test_every_command_and_option_has_help():
    for name, command in annotate.commands.items():
        assert command.help, name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.name}"
    assert list(annotate.commands) == [
        *("init", "people", "status", "export", "import", "report", "publish"),
    ]


def test_a_study_is_made_beside_the_index_and_its_links_printed(folder):
    out = run("init", folder, *SMALL, "--names", "ana,ben")
    assert "Selected 4 memories and 4 controls; saved to " in out
    study = AnnotationStudy.open(study_path(folder))
    read = [
        sum(len(text.prefix.split()) for one in study.queue(person) for text in one.item.texts)
        for person in study.people()[:2]
    ]
    assert f"One person reads up to {max(read):,} words: {max(read) / 200 / 60:.1f} hours" in out
    people = study.people()
    assert [person.name for person in people] == ["ana", "ben", "adjudicator-1"]
    assert all(f"/annotate?code={person.code}\n" in out for person in people)
    assert study.settings["options"]["per_layer"] == 2
    assert run("people", folder) == "".join(
        line + "\n" for line in out.splitlines() if "/annotate?code=" in line
    )
    with pytest.raises(ffmem.FfmemError, match="already"):
        run("init", folder, *SMALL)


def test_what_is_less_than_asked_is_said(folder):
    done = CliRunner().invoke(annotate, ["init", str(folder), "--per-layer", "30"])
    assert "Some layers have fewer than 30 such memories: L0: 24, L1: 24." in done.stderr
    assert "48 drawn lists have fewer than 25 triggers." in done.stderr


def test_everything_is_also_json(folder, tmp_path):
    made = run("init", folder, *SMALL, "--json")
    assert made["settings"]["counts"]["controls"] == 4
    assert made["people"] == run("people", folder, "--json")["people"]
    assert made["database"] == str(study_path(folder))
    study = AnnotationStudy.open(study_path(folder))
    person = study.people()[0]
    study.save(person, study.queue(person)[0].item.key, 0, Sheet(no_pattern=True, done=True))
    first, *others = run("status", folder, "--json")["people"]
    assert (first["done"], first["of"], first["last_saved"][-6:]) == (1, 8, "+00:00")
    assert {other["last_saved"] for other in others} == {None}
    out = tmp_path / "sheets.jsonl"
    assert run("export", folder, out, "--json")["sheets"] == 24
    assert run("export", folder, out, "--history", "--json")["sheets"] == 1
    assert run("import", folder, out, "--json") == {
        **{"imported": 0, "unchanged": 1, "conflicts": []}
    }


def test_and_words_for_people(folder, tmp_path):
    run("init", folder, *SMALL, "--annotators", 1)
    assert "annotator-1" in run("status", folder)
    assert "0 of     8 done   last saved never" in run("status", folder)
    out = tmp_path / "sheets.csv"
    assert run("export", folder, out) == f"Wrote 8 sheets to {out}.\n"


def test_the_database_is_where_the_option_or_the_environment_says(folder, tmp_path):
    file, other = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    run("init", folder, *SMALL, "--db", file)
    run("init", folder, *SMALL, env={"FFMEM_ANNOTATIONS": str(other)})
    assert file.exists()
    assert other.exists()
    assert not study_path(folder).exists()
    with pytest.raises(ffmem.FfmemError, match=r"no study .*annotations\.sqlite"):
        run("status", folder)


def test_sheets_that_differ_are_listed_and_the_command_fails(folder, tmp_path):
    run("init", folder, *SMALL)
    run("init", folder, *SMALL, "--db", tmp_path / "other.sqlite")
    for place, note in ((study_path(folder), "here"), (tmp_path / "other.sqlite", "there")):
        study = AnnotationStudy.open(place)
        person = study.people()[0]
        study.save(person, study.queue(person)[0].item.key, 0, Sheet(note=note))
    out = tmp_path / "sheets.jsonl"
    run("export", folder, out, "--db", tmp_path / "other.sqlite")
    done = CliRunner().invoke(annotate, ["import", str(folder), str(out)])
    assert isinstance(done.exception, ffmem.FfmemError)
    assert "1 sheet of" in str(done.exception)
    assert "was not imported: the study has another sheet" in done.stderr


def test_cases_of_composition_are_judged_too(folder, tiny_index, tmp_path):
    row = {"prefix": "p", "residual_top": " a", "ff_top": " b", "output_top": " c"}
    ours = {"model_hash": tiny_index.manifest.model.hash}
    path = ExperimentResult("last-layer-composition", "Sec. 5.2", ours, [row]).write(tmp_path)
    made = run("init", folder, *SMALL, "--composition", path, "--json")
    assert made["settings"]["counts"]["compositions"] == 1


def test_what_was_handed_in_is_reported_and_published(folder, tmp_path):
    run("init", folder, *SMALL, "--annotators", 2)
    pattern = SheetPattern("a", "ends alike", "shallow", frozenset({1, 2, 3}))
    with pytest.raises(ffmem.FfmemError, match="No annotator has submitted a sheet"):
        run("report", folder, "--out", tmp_path / "report")
    study = AnnotationStudy.open(study_path(folder))
    for person in study.people()[:2]:
        for task in study.queue(person):
            study.save(person, task.item.key, 0, Sheet((pattern,), done=True))
    page = Path(run("report", folder, "--out", tmp_path / "report", "--json")["file"])
    assert page.parent == tmp_path / "report"
    assert page.is_file()
    where = folder / "patterns" / "human"
    assert run("publish", folder) == f"Wrote {where}.\n"
    assert (where / "manifest.json").is_file()


@pytest.mark.parametrize("option", [("--overlap", "none"), ("--overlap", 0), ("--controls", 1)])
def test_wrong_usage_is_exit_code_2(folder, option):
    arguments = ["init", str(folder), *map(str, option)]
    assert CliRunner().invoke(annotate, arguments).exit_code == 2


def test_status_loads_neither_torch_nor_what_draws_figures(folder):
    run("init", folder, *SMALL)
    code = (
        "import sys; from ffmem.cli.annotate import annotate;"
        f"annotate(['status', {str(folder)!r}], standalone_mode=False);"
        "print({'torch', 'transformers', 'altair', 'sklearn'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(ffmem.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
