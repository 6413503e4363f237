"""The report: all figures of one model on one page, and the same for a repository.

    write_report(folder, results, index) → folder/report.html, folder/report.md

Both are made from the results and the index alone; the same ones give the same bytes. The page is
one file that needs no network and no script.
"""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ffmem.errors import FfmemError
from ffmem.experiments.result import Result
from ffmem.files import write_text
from ffmem.indexing.memory import visible, visible_token
from ffmem.indexing.store import Index
from ffmem.reporting.drawing import figure, write_figure
from ffmem.reporting.findings import title
from ffmem.reporting.markdown import fenced, markdown
from ffmem.reporting.numbers import percent
from ffmem.reporting.page import Page
from ffmem.reporting.style import DARK, NAMES


def write_report(
    folder: Path,
    results: Sequence[Result],
    index: Index | None = None,
    command: str | None = None,
) -> Path:
    """Write the report of some results with their figures and files, and return the page's path.

    Without an index there are no examples and no cards; `command` is the one to repeat it all.
    """
    if not results:
        raise FfmemError(
            f"A report of no experiment was asked for in {folder}."
            " Measure at least one: `ffmem experiment`."
        )
    models = sorted({str(result.settings.get("model_hash")) for result in results})
    names = [result.experiment for result in results]
    if len(models) > 1 or len(set(names)) < len(names):
        raise FfmemError(
            f"One report of {len(models)} models with {', '.join(names)} was asked for."
            " A report is of one model, each experiment once: give every model a folder of its own."
        )
    figures = {result.experiment: figure(result) for result in results}
    for result in results:
        result.write(folder)
        write_figure(result.experiment, figures[result.experiment], folder)
    page = Page(results, index, command)
    path = folder / "report.html"
    write_text(path, as_html(page, figures))
    write_text(folder / "report.md", as_markdown(page))
    return path


def as_html(page: Page, figures: dict[str, str]) -> str:
    """Return the report as one file of HTML."""
    template = environment("ffmem.reporting", autoescape=True).get_template("report.html")
    drawn = {name: Markup(svg) for name, svg in figures.items()}
    return template.render(page=page, figures=drawn, ground=NAMES, night=DARK) + "\n"


def as_markdown(page: Page) -> str:
    """Return the report as GitHub-flavoured Markdown, with its figures as files beside it."""
    template = environment("ffmem.reporting", autoescape=False).get_template("report.md")
    rendered = template.render(page=page, fenced=fenced, line_break=Markup("<br>"))
    return rendered.rstrip() + "\n"


def environment(package: str, autoescape: bool) -> Environment:
    """Return what fills the templates of a package, HTML if it escapes, else Markdown."""
    made = Environment(
        loader=PackageLoader(package),
        autoescape=autoescape,
        finalize=None if autoescape else markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "percent": percent,
        "visible": visible,
        "visible_token": visible_token,
        "figure_title": title,
    }
    return made
