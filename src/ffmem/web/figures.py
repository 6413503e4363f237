"""The figures of the report on a page: they answer to the mouse, and can be taken away as files.

A name in an address is looked up among the results that were read when the site was opened; it
never becomes a path.
"""

import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from ffmem.experiments.base import ExperimentResult
from ffmem.web.library import Shelf
from ffmem.web.limits import NotHere
from ffmem.web.site import Site
from ffmem.web.specs import figure_spec, still
from ffmem.web.state import Asked, State
from ffmem.web.vega import Spec, bundle, bundle_version, drawing

SVG = "image/svg+xml"
FOREVER = "public, max-age=31536000, immutable"

MOST_FILES = 32
"""Drawn files held at once."""

Theme = Annotated[str, Query(description="The colours of the ground: light or dark.")]


class Drawn(Response):
    """A chart as SVG."""

    media_type = SVG


@dataclass(frozen=True)
class FigureAnswer:
    """One figure: what it is, what the paper says, what this model shows, where to get it."""

    name: str
    title: str
    paper: str
    measured: str
    paper_says: str
    shows: str
    sample: str
    settings: str
    result: str
    spec: str
    svg: str
    pdf: str


@dataclass(frozen=True)
class FiguresAnswer:
    """All figures of an index, in the order of the paper."""

    index: str
    figures: list[FigureAnswer]


def router(site: Site) -> APIRouter:
    """Return the routes of figures, and of the script that draws them."""
    routes = APIRouter(tags=["figures"])

    @routes.get("/static/vega.js", include_in_schema=False)
    def vega(request: Request, v: str = "") -> Response:
        return _script(request, v)

    @routes.get("/figures", response_class=HTMLResponse, include_in_schema=False)
    def page(request: Request, state: Asked) -> Response:
        return site.page(request, state, "figures.html", one=None, **_context(site.shelf(state)))

    @routes.get("/figures/{name}.svg", response_class=Drawn, include_in_schema=False)
    def svg(name: str, state: Asked) -> Response:
        """Return a figure as a file for pages, light and dark."""
        return _file(site.shelf(state), name, "svg", SVG)

    @routes.get("/figures/{name}.pdf", response_class=Response, include_in_schema=False)
    def pdf(name: str, state: Asked) -> Response:
        """Return a figure as a file for print."""
        return _file(site.shelf(state), name, "pdf", "application/pdf")

    @routes.get("/figures/{name}.json", response_class=JSONResponse, include_in_schema=False)
    def rows(name: str, state: Asked) -> Response:
        """Return the numbers behind a figure as a file."""
        result = found(site.shelf(state), name)
        return JSONResponse(result.to_dict(), headers=_saved(result, "json"))

    @routes.get("/figures/{name}", response_class=HTMLResponse, include_in_schema=False)
    def one(request: Request, name: str, state: Asked) -> Response:
        shelf = site.shelf(state)
        found(shelf, name)
        return site.page(request, state, "figures.html", one=name, **_context(shelf, name))

    @routes.get("/api/figures")
    def figures(state: Asked) -> FiguresAnswer:
        """Return what every figure shows, and where it is."""
        shelf = site.shelf(state)
        answers = [_answer(section, state) for section in sections(shelf)]
        return FiguresAnswer(shelf.name, answers)

    @routes.get("/api/figures/{name}", response_class=JSONResponse)
    def result(name: str, state: Asked) -> Response:
        """Return an experiment's result: settings, rows, and what the paper says."""
        return JSONResponse(found(site.shelf(state), name).to_dict())

    @routes.get("/api/figures/{name}/spec", response_class=JSONResponse)
    def spec(name: str, state: Asked, theme: Theme = "light") -> Response:
        """Return a figure in Vega-Lite's language."""
        return JSONResponse(figure_spec(found(site.shelf(state), name), theme))

    @routes.get("/api/figures/{name}/picture", response_class=Drawn, include_in_schema=False)
    def picture(name: str, state: Asked, theme: Theme = "light") -> Response:
        """Return a figure as a page shows it before, and without, a script."""
        return drawn(figure_spec(found(site.shelf(state), name), theme))

    return routes


def found(shelf: Shelf, name: str) -> ExperimentResult:
    """Return the result of an experiment on an index, if it was measured."""
    if name not in shelf.results:
        there = ", ".join(shelf.results) or "none yet; `ffmem report` measures them"
        raise NotHere(
            f"There is no figure {name!r} of the index {shelf.name!r}. There are: {there}."
        )
    return shelf.results[name]


def sections(shelf: Shelf, *names: str) -> list[Any]:
    """Return what a report says of some experiments, of all without a name, in its order."""
    from ffmem.experiments.report import Report

    results = [found(shelf, name) for name in names] or list(shelf.results.values())
    return Report(results).sections if results else []


def drawn(spec: Spec) -> Response:
    """Return a still picture of a chart."""
    return Drawn(drawing(still(spec)))


def _context(shelf: Shelf, *names: str) -> dict[str, Any]:
    """Return what the template of figures needs, for some of them or for all."""
    return {"sections": sections(shelf, *names), "order": [one.name for one in sections(shelf)]}


def _answer(section: Any, state: State) -> FigureAnswer:
    name = section.name
    return FigureAnswer(
        name=name,
        title=section.title,
        paper=section.paper,
        measured=section.measured,
        paper_says=section.paper_says,
        shows=section.shows,
        sample=section.sample,
        settings=section.settings,
        result=state.link(f"/api/figures/{name}"),
        spec=state.link(f"/api/figures/{name}/spec"),
        svg=state.link(f"/figures/{name}.svg"),
        pdf=state.link(f"/figures/{name}.pdf"),
    )


def _script(request: Request, v: str) -> Response:
    """Return Vega's script: for good under its version's address, else to be asked for again."""
    script, etag = bundle()
    headers = {"ETag": etag, "Cache-Control": FOREVER if v == bundle_version() else "no-cache"}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(script, headers=headers, media_type="text/javascript")


def _file(shelf: Shelf, name: str, ending: str, media_type: str) -> Response:
    result = found(shelf, name)
    content = _files(shelf, name)[("svg", "pdf").index(ending)]
    return Response(content, headers=_saved(result, ending), media_type=media_type)


@lru_cache(maxsize=MOST_FILES)
def _files(shelf: Shelf, name: str) -> tuple[bytes, bytes]:
    """Return the same bytes of a figure, as SVG and as PDF, that `ffmem report` writes."""
    from ffmem.experiments.charts import write_figure

    with tempfile.TemporaryDirectory(prefix="ffmem-") as folder:
        svg, pdf = write_figure(shelf.results[name], Path(folder))
        return svg.read_bytes(), pdf.read_bytes()


def _saved(result: ExperimentResult, ending: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{result.experiment}.{ending}"'}
