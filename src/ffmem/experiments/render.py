"""A report as files: one self-contained page of HTML, and Markdown for a repository.

    write_report(folder, results, index) → folder/report.html, folder/report.md
    write_comparison(folder, comparison) → folder/comparison.html, .md, .json, and NAME.svg

Each pair lays out the same `Report` or `ReportComparison`; the same results and index give the same
bytes. Everything from a model or a corpus is escaped.
"""

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ffmem.errors import FfmemError
from ffmem.experiments.base import VERDICTS, ExperimentResult, check_claims, find
from ffmem.experiments.charts import GROUND, chart_svg, figure_svg, styled, svg_file
from ffmem.experiments.comparison import FACTS, NOT_MEASURED, ReportComparison, link_to
from ffmem.experiments.comparison_chart import comparison_chart
from ffmem.experiments.examples import Excerpt
from ffmem.experiments.report import Link, Piece, Report, Small, Token
from ffmem.files import write_text
from ffmem.indexing.memory import visible, visible_token
from ffmem.indexing.store import Index
from ffmem.text import format_share

MARKS = dict(zip(VERDICTS, "✓◐✗–", strict=True))


def write_report(folder: Path, results: Sequence[ExperimentResult], index: Index) -> Path:
    """Write report.html and report.md beside the results' own files; return the page's path."""
    if not results:
        raise FfmemError(
            f"There is no experiment to report in {folder}."
            " Measure at least one: `ffmem experiment`."
        )
    models = sorted({str(result.settings["model_hash"]) for result in results})
    names = [result.experiment for result in results]
    if len(models) > 1 or len(set(names)) < len(names):
        raise FfmemError(
            f"One report of {len(models)} models with {', '.join(names)} was requested."
            " A report covers one model, with each experiment once: give every model its own"
            " folder."
        )
    report = Report(results, index)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    write_text(path, to_html(report))
    write_text(folder / "report.md", to_markdown(report))
    return path


def html_environment() -> Environment:
    """Return what fills the HTML templates; everything put in is escaped."""
    made = Environment(
        loader=PackageLoader("ffmem.experiments"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "visible": visible,
        "visible_token": visible_token,
        "slug": lambda verdict: verdict.replace(" ", "-"),
    }
    return made


def to_html(report: Report) -> str:
    """Return the report as one file of HTML."""
    environment = html_environment()
    environment.filters["html"] = lambda piece: piece_html(piece, report.linked)
    figures = {one.experiment: Markup(figure_svg(one)) for one in report.results}
    template = environment.get_template("report.html")
    return template.render(report=report, figures=figures, ground=GROUND, marks=MARKS) + "\n"


def piece_html(piece: Piece, linked: frozenset[str]) -> Markup:
    """Return a piece of a table as HTML; everything in it is escaped."""
    if isinstance(piece, Excerpt):
        return Markup(
            '<span class="excerpt"><bdi>{}<mark>{}</mark></bdi> <ins><bdi>{}</bdi></ins></span>'
        ).format(*piece)
    if isinstance(piece, Link):
        if piece.cell in linked:
            return Markup('<a class="cell" href="#{0}">{0}</a>').format(piece.cell)
        return Markup('<span class="cell">{}</span>').format(piece.cell)
    if isinstance(piece, Token):
        return Markup('<bdi class="token">{}</bdi>').format(visible_token(piece.text))
    if isinstance(piece, Small):
        return Markup('<span class="small">{}</span>').format(piece.text)
    return Markup("<bdi>{}</bdi>").format(piece)


def result_html(result: ExperimentResult) -> str:
    """Return one experiment for a notebook: its figure, and what it shows."""
    experiment = find(result.experiment)
    claims = Markup("").join(
        Markup("<li>{} {} ({}): {}</li>").format(MARKS[one.verdict], one.verdict, one.n, one.claim)
        for one in check_claims([result])
    )
    text = Markup("<h4>{} ({})</h4><p>{}</p><ul>{}</ul>").format(
        experiment.title, result.paper, visible(experiment.summary(result)), claims
    )
    return figure_svg(result) + str(text)


# Markdown

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"[\\`*_\[\]|~$#@]|:(?=//)|(?<=www)\.")


def escape_markdown(value: Any) -> Markup:
    """Return text of any origin as GitHub-flavored Markdown that shows it and does nothing else.

    What is already Markdown (`Markup`) stays as it is.
    """
    if isinstance(value, Markup):
        return value
    text = "".join(_ENTITIES.get(character, character) for character in str(value))
    return Markup(_SPECIAL.sub(r"\\\g<0>", text))


def fenced(line: str) -> Markup:
    """Return a line for a code block fenced by ```."""
    return Markup(visible(line).replace("```", "` ` `"))


def markdown_environment(package: str) -> Environment:
    """Return what fills the Markdown templates of a package; everything put in is escaped."""
    made = Environment(
        loader=PackageLoader(package),
        autoescape=False,
        finalize=escape_markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"percent": format_share, "visible": visible, "visible_token": visible_token}
    made.filters |= {
        "join_row": lambda entries: Markup(" | ".join(map(escape_markdown, entries))),
        "row": lambda entries: Markup(f"| {' | '.join(map(escape_markdown, entries))} |"),
        "rule": lambda columns: Markup("|" + " --- |" * len(columns)),
        "code": lambda text: Markup(escape_markdown(text).replace("\\`", "`")),
        "fenced": fenced,
    }
    return made


def to_markdown(report: Report) -> str:
    """Return the report as GitHub-flavored Markdown, with its figures as files beside it."""
    environment = markdown_environment("ffmem.experiments")
    environment.filters["pieces"] = lambda pieces: join_pieces(pieces, report.featured)
    return environment.get_template("report.md").render(report=report).rstrip() + "\n"


def join_pieces(pieces: Sequence[Piece], linked: frozenset[str]) -> Markup:
    """Return the pieces of a table's entry as Markdown; everything in them is escaped."""
    between = "<br>" if any(isinstance(piece, Excerpt) for piece in pieces) else " "
    return Markup(between.join(piece_markdown(piece, linked) for piece in pieces))


def piece_markdown(piece: Piece, linked: frozenset[str]) -> str:
    """Return a piece of a table as Markdown."""
    md = escape_markdown
    if isinstance(piece, Excerpt):
        last = f"<b>{md(piece.last)}</b>" if piece.last else ""
        return f"{md(piece.before)}{last} → {md(piece.next)}"
    if isinstance(piece, Link):
        return f"[{piece.cell}](#{piece.cell})" if piece.cell in linked else piece.cell
    if isinstance(piece, Token):
        return f"“{md(visible_token(piece.text))}”"
    if isinstance(piece, Small):
        return f"({md(piece.text)})"
    return str(md(piece))


# Several models

_MARKS = MARKS | {NOT_MEASURED: "·"}


def write_comparison(folder: Path, comparison: ReportComparison) -> Path:
    """Write the pages, the JSON and the figures of a comparison; return the path of its page."""
    figures = comparison_svgs(comparison)
    for name, svg in figures.items():
        write_text(folder / f"{name}.svg", svg_file(svg))
    content = json.dumps(comparison.to_dict(), ensure_ascii=False, indent=1)
    write_text(folder / "comparison.json", content + "\n")
    write_text(folder / "comparison.md", comparison_markdown(comparison, folder, figures))
    path = folder / "comparison.html"
    write_text(path, comparison_html(comparison, folder, figures))
    return path


def comparison_svgs(comparison: ReportComparison) -> dict[str, str]:
    """Return the figure of every experiment that compares something, by its name."""
    found = {}
    for figure in comparison.figures:
        experiment = figure.experiment
        chart = comparison_chart(experiment, figure.results, comparison.labels)
        if chart is not None:
            title = f"{experiment.title} ({experiment.paper}): {', '.join(figure.results)}"
            name = experiment.name
            found[name] = chart_svg(name, title, experiment.description, styled(chart))
    return found


def comparison_markdown(comparison: ReportComparison, folder: Path, drawn: Collection[str]) -> str:
    """Return a comparison as Markdown, with the figures as files beside it."""
    template = markdown_environment("ffmem.experiments").get_template("comparison.md")
    return template.render(**_page(comparison, folder, ".md"), drawn=drawn).rstrip() + "\n"


def comparison_html(comparison: ReportComparison, folder: Path, svgs: dict[str, str]) -> str:
    """Return a comparison as one file of HTML, with its figures."""
    figures = {name: Markup(svg) for name, svg in svgs.items()}
    template = html_environment().get_template("comparison.html")
    page = _page(comparison, folder, ".html")
    return template.render(**page, svgs=figures, ground=GROUND) + "\n"


def _page(comparison: ReportComparison, folder: Path, suffix: str) -> dict[str, Any]:
    """Return what both templates of a comparison show."""
    return {
        "page": comparison,
        "facts": FACTS,
        "links": {model.name: link_to(model, folder, suffix) for model in comparison.models},
        "marks": _MARKS,
    }
