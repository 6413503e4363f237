"""Commands of a study of patterns: annotate init, status, people, export, import, report, publish.

The study is in a database beside DIR, or where `--db` says.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ffmem import api
from ffmem.commands.options import (
    NumberOrAll,
    Ordered,
    folder_argument,
    json_option,
    out_option,
    print_json,
)
from ffmem.counted import counted
from ffmem.errors import FfmemError
from ffmem.progress import Progress

if TYPE_CHECKING:
    from ffmem.annotation.study import AnnotationStudy


@click.group(cls=Ordered)
def annotate() -> None:
    """Let people find patterns in the triggers of memories, by the paper's protocol.

    `init` draws the study; `ffmem serve DIR` shows it to those who judge, at /annotate.
    """


db_option = click.option(
    "--db",
    metavar="URL",
    envvar="FFMEM_ANNOTATIONS",
    help="A SQLite file, or postgresql://…; else DIR-annotations.sqlite beside DIR.",
)


@annotate.command()
@folder_argument
@click.option(
    "--per-layer",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Memories to draw per layer, of those that anything triggers.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=25,
    show_default=True,
    help="Triggers to show of each.",
)
@click.option(
    "--annotators",
    type=click.IntRange(min=1),
    show_default="3",
    help="How many people judge.",
)
@click.option("--names", help="Their names instead, with commas: ana,ben,cai.")
@click.option(
    "--adjudicators",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many people decide afterwards; they share one sheet per item.",
)
@click.option(
    "--controls",
    type=click.FloatRange(0, 0.9),
    default=0.2,
    show_default=True,
    help="Share of all lists that are random prefixes.",
)
@click.option(
    "--overlap",
    type=NumberOrAll("annotators"),
    default="all",
    show_default=True,
    help="How many annotators judge each item; the paper had 1.",
)
@click.option(
    "--composition",
    type=click.Path(path_type=Path),
    metavar="JSON",
    help="Result of last-layer-composition, whose cases are judged too.",
)
@click.option("--seed", default=0, show_default=True, help="Of everything random but the codes.")
@db_option
@json_option
def init(
    folder: Path,
    db: str | None,
    as_json: bool,
    annotators: int | None,
    names: str | None,
    composition: Path | None,
    **options: Any,
) -> None:
    """Draw a study from the index DIR: memories, blind controls, and who judges what.

    Prints everybody's link; whoever has it is that person.
    """
    from ffmem.annotation.plan import cases_of, draw
    from ffmem.annotation.study import AnnotationStudy

    if names is not None and annotators is not None:
        raise click.UsageError("Give --annotators or --names, not both.")
    index = api.open(folder)
    options["annotators"] = names.split(",") if names is not None else annotators or 3
    cases = None if composition is None else cases_of(composition, index)
    plan = draw(index, composition=cases, **options)
    with AnnotationStudy.create(_where(folder, db), plan) as study:
        drawn = plan.settings["drawn"]
        for sentence in _shortcomings(drawn, plan.settings["asked"]):
            Progress(quiet=as_json).say(sentence)
        if not as_json:
            click.echo(
                f"Drew {counted(drawn['memories'], 'memories')}, {drawn['controls']} controls and"
                f" {drawn['compositions']} cases of composition into {study.name}."
            )
        _print_people(study, as_json, {"settings": study.settings, "database": study.name})
        if not as_json:
            click.echo(
                f"Open `ffmem serve {folder}`, and send everybody the address of that page with"
                " their own link. The code in it is a secret."
            )


@annotate.command()
@folder_argument
@db_option
@json_option
def people(folder: Path, db: str | None, as_json: bool) -> None:
    """Print everybody's code and link again."""
    with _study(folder, db) as study:
        _print_people(study, as_json, {})


@annotate.command()
@folder_argument
@db_option
@json_option
def status(folder: Path, db: str | None, as_json: bool) -> None:
    """Say how far everybody has come."""
    with _study(folder, db) as study:
        progress = study.progress()
        if as_json:
            rows = [
                one._asdict() | {"last_saved": one.last_saved and one.last_saved.isoformat()}
                for one in progress
            ]
            print_json({"database": study.name, "settings": study.settings, "people": rows})
            return
        for one in progress:
            when = f"{one.last_saved:%Y-%m-%d %H:%M} UTC" if one.last_saved else "never"
            click.echo(
                f"{one.name:20} {one.role:12} {one.done:5} of {one.of:5} done   last saved {when}"
            )


@annotate.command()
@folder_argument
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--history", is_flag=True, help="Every revision, not only how sheets stand.")
@db_option
@json_option
def export(folder: Path, out: Path, history: bool, db: str | None, as_json: bool) -> None:
    """Write all sheets with the truth to OUT, a .jsonl or .csv file; no codes.

    The settings of the study are in a .jsonl only, in its first line.
    """
    from ffmem.annotation.exchange import export as export_study

    with _study(folder, db) as study:
        n = export_study(study, out, history)
    if as_json:
        print_json({"file": str(out), "sheets": n, "history": history})
    else:
        click.echo(f"Wrote {n:,} {'revisions' if history else 'sheets'} to {out}.")


@annotate.command("import")
@folder_argument
@click.argument("file", type=click.Path(path_type=Path))
@db_option
@json_option
def import_sheets(folder: Path, file: Path, db: str | None, as_json: bool) -> None:
    """Take in the sheets of FILE, which `export` wrote here or elsewhere.

    What is here stays; where both cannot be, it is said. Twice is the same as once.
    """
    from ffmem.annotation.exchange import import_file

    with _study(folder, db) as study:
        done = import_file(study, file)
    if as_json:
        print_json(done._asdict())
    else:
        click.echo(
            f"Took in {done.saved:,} new sheets, joined {done.merged:,},"
            f" {done.there:,} were here already."
        )
    for sentence in done.conflicts:
        click.echo(sentence, err=True)
    if done.conflicts:
        raise FfmemError(
            f"{len(done.conflicts)} sheets of {file} contradict what is here, and were not taken"
            " in (above). Let these people, or an adjudicator, decide."
        )


@annotate.command()
@folder_argument
@out_option
@db_option
@json_option
def report(folder: Path, out: Path, db: str | None, as_json: bool) -> None:
    """Write the numbers of the study: Figure 2, agreement, controls, tables."""
    from ffmem.annotation.report import write_report

    with _study(folder, db) as study:
        path = write_report(study, api.open(folder), out)
    _say_wrote(path, as_json)


@annotate.command()
@folder_argument
@db_option
@json_option
def publish(folder: Path, db: str | None, as_json: bool) -> None:
    """Put people's patterns into the index: pages, search and Figure 2 show them."""
    from ffmem.annotation.publish import publish as publish_patterns

    with _study(folder, db) as study:
        published = publish_patterns(study, api.open(folder))
    _say_wrote(published.folder, as_json)


def _where(folder: Path, db: str | None) -> str | Path:
    from ffmem.annotation.study import beside

    return db if db else beside(folder)


def _study(folder: Path, db: str | None) -> "AnnotationStudy":
    from ffmem.annotation.study import AnnotationStudy

    return AnnotationStudy.open(_where(folder, db))


def _print_people(study: "AnnotationStudy", as_json: bool, also: dict[str, Any]) -> None:
    rows = [
        person._asdict() | {"link": f"/annotate?code={person.code}"} for person in study.people()
    ]
    if as_json:
        print_json({**also, "people": rows})
        return
    for row in rows:
        click.echo(f"{row['name']:20} {row['role']:12} {row['link']}")


def _shortcomings(drawn: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Return what is other than asked, or than one would expect, a sentence each."""
    sentences = {
        "memories_without_triggers": "{} memories of the index have no trigger: none was drawn.",
        "lists_shorter_than_top": f"{{}} of the drawn lists have fewer than {asked['top']} texts.",
        "control_texts_of_a_repeated_sentence": (
            "{} texts of controls share a sentence with another: the index's sample has too few."
        ),
    }
    said = [text.format(drawn[name]) for name, text in sentences.items() if drawn[name]]
    if drawn["layers_with_fewer"]:
        layers = ", ".join(f"L{layer}: {n}" for layer, n in drawn["layers_with_fewer"].items())
        said.append(f"Some layers have fewer than {asked['per_layer']} such memories: {layers}.")
    return said


def _say_wrote(path: Path, as_json: bool) -> None:
    if as_json:
        print_json({"file": str(path)})
    else:
        click.echo(f"Wrote {path}.")
