"""Commands of an annotation study: init, people, status, export, import, report, publish.

The study is the file DIR-annotations.sqlite, unless `--db` names another.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import ffmem
from ffmem.cli.options import (
    AT_LEAST_1,
    PATH,
    OrderedGroup,
    db_option,
    folder_argument,
    json_option,
    out_option,
    print_json,
)
from ffmem.config_fields import Command, NumberOrAll
from ffmem.errors import FfmemError
from ffmem.indexing.store import as_index
from ffmem.progress import Progress
from ffmem.text import pluralize

if TYPE_CHECKING:
    from ffmem.annotation.study import AnnotationStudy


READ_PER_MINUTE = 200
"""Words that people are taken to read."""


def count_option(name: str, default: int | None, text: str) -> Callable[[Command], Command]:
    """Return an option that takes a number of 1 or more."""
    return click.option(name, type=AT_LEAST_1, default=default, help=text)


@click.group(cls=OrderedGroup)
def annotate() -> None:
    """Run a study with human annotators.

    Follows the paper's protocol. `init` creates the study; annotators work at /annotate of
    `ffmem serve DIR`.
    """


@annotate.command()
@folder_argument
@count_option("--per-layer", 10, "Memories per layer, drawn from those with triggers.")
@count_option("--top", 25, "Triggers to show per memory.")
@count_option("--annotators", None, "Number of annotators. Default: 3.")
@click.option("--names", metavar="NAMES", help="Names of annotators, like ana,ben,cai.")
@count_option("--adjudicators", 1, "Number of adjudicators; they share one sheet per item.")
@click.option(
    "--controls",
    type=click.FloatRange(0, 0.9),
    default=0.2,
    metavar="X",
    help="Share of items that are random prefixes.",
)
@click.option(
    "--overlap",
    type=NumberOrAll(),
    default="all",
    help="Annotators per item; the paper used 1.",
)
@click.option(
    "--composition",
    type=PATH,
    metavar="JSON",
    help="Also annotate cases of this last-layer-composition result.",
)
@click.option(
    "--seed",
    default=0,
    metavar="N",
    help="Random seed. Access codes do not depend on it.",
)
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
    """Create a study: draw memories and blind controls.

    Prints a link for each person. Anyone who has a link can act as that person.
    """
    from ffmem.annotation.sampling import draw_plan, read_cases
    from ffmem.annotation.study import AnnotationStudy, study_path

    if names is not None and annotators is not None:
        raise click.UsageError("Pass --annotators or --names, not both.")
    index = as_index(folder)
    options["annotators"] = names.split(",") if names is not None else annotators or 3
    cases = None if composition is None else read_cases(composition, index)
    plan = draw_plan(index, composition=cases, **options)
    study = AnnotationStudy.create(db or study_path(folder), plan)
    counts = plan.settings["counts"]
    for sentence in _warnings(counts, plan.settings["options"]):
        Progress(quiet=as_json).say(sentence)
    if not as_json:
        drawn = f"{pluralize(counts['memories'], 'memories')} and"
        drawn += f" {pluralize(counts['controls'], 'controls')}"
        if counts["compositions"]:
            drawn += f", with {pluralize(counts['compositions'], 'cases')} of composition"
        click.echo(f"Selected {drawn}; saved to {study.path}.")
        most = max(counts["words"].values())
        click.echo(
            f"One person reads up to {pluralize(most, 'words')}: {most / READ_PER_MINUTE / 60:.1f}"
            f" hours at {READ_PER_MINUTE} words a minute, plus the time to mark and describe."
        )
    _print_people(study, as_json, {"settings": study.settings, "database": str(study.path)})
    if not as_json:
        click.echo(
            f"Run `ffmem serve {folder}` and send each person the address of that page with their"
            " personal link. The code in a link is secret."
        )


@annotate.command()
@folder_argument
@db_option
@json_option
def people(folder: Path, db: str | None, as_json: bool) -> None:
    """Print everyone's code and link."""
    _print_people(ffmem.study(folder, db=db), as_json, {})


@annotate.command()
@folder_argument
@db_option
@json_option
def status(folder: Path, db: str | None, as_json: bool) -> None:
    """Show everyone's progress."""
    study = ffmem.study(folder, db=db)
    progress = study.progress()
    if as_json:
        rows = [one._asdict() for one in progress]
        print_json({"database": str(study.path), "settings": study.settings, "people": rows})
        return
    for one in progress:
        when = f"{one.last_saved[:16].replace('T', ' ')} UTC" if one.last_saved else "never"
        taken = one.seconds_per_item
        pace = "" if taken is None else f"   {taken / 60:.1f} minutes per item"
        click.echo(
            f"{one.name:20} {one.role:12} {one.done:5} of {one.of:5} done   last saved {when}{pace}"
        )


@annotate.command()
@folder_argument
@click.argument("out", type=PATH)
@click.option("--history", is_flag=True, help="Write every revision, not only the current sheets.")
@db_option
@json_option
def export(folder: Path, out: Path, history: bool, db: str | None, as_json: bool) -> None:
    """Write all sheets to a .jsonl or .csv file.

    The file marks controls and contains no codes. The first line of a .jsonl file has the settings
    of the study.
    """
    from ffmem.annotation.exchange import export_sheets

    n = export_sheets(ffmem.study(folder, db=db), out, history)
    if as_json:
        print_json({"file": str(out), "sheets": n, "history": history})
    else:
        click.echo(f"Wrote {n:,} {'revisions' if history else 'sheets'} to {out}.")


@annotate.command("import")
@folder_argument
@click.argument("file", type=PATH)
@db_option
@json_option
def import_(folder: Path, file: Path, db: str | None, as_json: bool) -> None:
    """Import sheets from a .jsonl file that `export` wrote.

    Fills empty sheets; existing ones stay, and those that differ are listed. Importing a file
    twice changes nothing.
    """
    from ffmem.annotation.exchange import import_sheets

    done = import_sheets(ffmem.study(folder, db=db), file)
    if as_json:
        print_json(done._asdict())
    else:
        click.echo(
            f"Imported {pluralize(done.imported, 'sheets')}; {done.unchanged:,} were already here."
        )
    for sentence in done.conflicts:
        click.echo(sentence, err=True)
    if done.conflicts:
        raise FfmemError(
            f"{pluralize(len(done.conflicts), 'sheets')} of {file} differ from the study and were"
            " not imported (see above). Let the annotators or an adjudicator decide."
        )


@annotate.command()
@folder_argument
@out_option
@db_option
@json_option
def report(folder: Path, out: Path, db: str | None, as_json: bool) -> None:
    """Write the study's figures, tables and agreement."""
    from ffmem.annotation.report import write_report

    _print_path(write_report(ffmem.study(folder, db=db), as_index(folder), out), as_json)


@annotate.command()
@folder_argument
@db_option
@json_option
def publish(folder: Path, db: str | None, as_json: bool) -> None:
    """Add the annotators' patterns to the index.

    Pages, search and Figure 2 then show them. After this, annotators are no longer blind.
    """
    from ffmem.annotation.report import publish as publish_patterns

    published = publish_patterns(ffmem.study(folder, db=db), as_index(folder))
    _print_path(published.folder, as_json)


def _print_people(study: "AnnotationStudy", as_json: bool, also: dict[str, Any]) -> None:
    rows = [
        person._asdict() | {"link": f"/annotate?code={person.code}"} for person in study.people()
    ]
    if as_json:
        print_json({**also, "people": rows})
        return
    for row in rows:
        click.echo(f"{row['name']:20} {row['role']:12} {row['link']}")


def _warnings(counts: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Return how a study falls short of the options, a sentence each."""
    sentences = {
        "lists_shorter_than_top": f"{{}} drawn lists have fewer than {options['top']} triggers.",
        "control_texts_of_a_repeated_sentence": (
            "{} texts of controls share a sentence with another: the corpus is too small."
        ),
    }
    found = [text.format(counts[name]) for name, text in sentences.items() if counts[name]]
    if counts["layers_with_fewer"]:
        layers = ", ".join(f"L{layer}: {n}" for layer, n in counts["layers_with_fewer"].items())
        found.append(f"Some layers have fewer than {options['per_layer']} such memories: {layers}.")
    return found


def _print_path(path: Path, as_json: bool) -> None:
    if as_json:
        print_json({"file": str(path)})
    else:
        click.echo(f"Wrote {path}.")
