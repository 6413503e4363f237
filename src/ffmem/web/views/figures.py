"""The figures of the report: interactive on the page, and as files to download.

A name in a URL is looked up among the results that were read; it never becomes a path.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from ffmem.experiments.base import ExperimentResult
from ffmem.web.catalog import ServedIndex
from ffmem.web.charts import Spec, bundle, bundle_version, figure_spec, fixed_width
from ffmem.web.errors import NotFound
from ffmem.web.site import Site
from ffmem.web.state import State, StateParam

MAX_FILES = 32
"""Rendered files to keep in memory."""

Theme = Annotated[str, Query(description="Colors: light or dark.")]


class SvgResponse(Response):
    """A chart as SVG."""

    media_type = "image/svg+xml"

    @classmethod
    def of(cls, spec: Spec) -> "SvgResponse":
        """Draw a chart."""
        from ffmem.experiments.charts import draw

        return cls(draw(json.dumps(fixed_width(spec), allow_nan=False)))


@dataclass(frozen=True)
class Figure:
    """One figure: what it is, what the paper says, what this model shows, and its URLs."""

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
class FiguresResponse:
    """All figures of an index, in the order of the paper."""

    index: str
    figures: list[Figure]


def router(site: Site) -> APIRouter:
    """Return the routes of figures, and of the script that draws them."""
    routes = APIRouter(tags=["figures"])

    @routes.get("/static/vega.js", include_in_schema=False)
    def vega(request: Request, v: str = "") -> Response:
        script, etag = bundle()
        forever = "public, max-age=31536000, immutable"
        headers = {"ETag": etag, "Cache-Control": forever if v == bundle_version() else "no-cache"}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(script, headers=headers, media_type="text/javascript")

    @routes.get("/figures", response_class=HTMLResponse, include_in_schema=False)
    def page(request: Request, state: StateParam) -> Response:
        sections = report_sections(site.served(state))
        return site.page(request, state, "figures.html", selected=None, sections=sections)

    @routes.get("/figures/{name}.{ending}", include_in_schema=False)
    def file(name: str, ending: Literal["svg", "pdf", "json"], state: StateParam) -> Response:
        """Return a figure, or the numbers behind it, as a file."""
        served = site.served(state)
        headers = {"Content-Disposition": f'attachment; filename="{name}.{ending}"'}
        if ending == "json":
            return JSONResponse(get_result(served, name).to_dict(), headers=headers)
        svg, pdf = _render_files(served, name)
        if ending == "svg":
            return SvgResponse(svg, headers=headers)
        return Response(pdf, headers=headers, media_type="application/pdf")

    @routes.get("/figures/{name}", response_class=HTMLResponse, include_in_schema=False)
    def one(request: Request, name: str, state: StateParam) -> Response:
        served = site.served(state)
        get_result(served, name)
        sections = report_sections(served)
        return site.page(request, state, "figures.html", selected=name, sections=sections)

    @routes.get("/api/figures")
    def figures(state: StateParam) -> FiguresResponse:
        """Return what every figure shows, and where it is."""
        served = site.served(state)
        return FiguresResponse(
            served.name, [_figure(one, state) for one in report_sections(served)]
        )

    @routes.get("/api/figures/{name}")
    def result(name: str, state: StateParam) -> JSONResponse:
        """Return the result of an experiment: settings, rows, and what the paper says."""
        return JSONResponse(get_result(site.served(state), name).to_dict())

    @routes.get("/api/figures/{name}/spec")
    def spec(name: str, state: StateParam, theme: Theme = "light") -> dict[str, Any]:
        """Return a figure as a Vega-Lite spec."""
        return figure_spec(get_result(site.served(state), name), theme)

    @routes.get("/api/figures/{name}/picture", response_class=SvgResponse, include_in_schema=False)
    def picture(name: str, state: StateParam, theme: Theme = "light") -> Response:
        """Return a figure as a page shows it before, and without, a script."""
        return SvgResponse.of(figure_spec(get_result(site.served(state), name), theme))

    return routes


def get_result(served: ServedIndex, name: str) -> ExperimentResult:
    """Return the result of an experiment on an index; raise if it was not measured."""
    if name not in served.results:
        measured = ", ".join(served.results) or "none yet; `ffmem report` measures them"
        raise NotFound(
            f"There is no figure {name!r} of the index {served.name!r}. There are: {measured}."
        )
    return served.results[name]


def report_sections(served: ServedIndex, *names: str) -> list[Any]:
    """Return the report's sections on some experiments, or on all, in its order."""
    from ffmem.experiments.report import section_of

    return [section_of(served.results[name]) for name in names or served.results]


def _figure(section: Any, state: State) -> Figure:
    name = section.name
    return Figure(
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


@lru_cache(maxsize=MAX_FILES)
def _render_files(served: ServedIndex, name: str) -> tuple[bytes, bytes]:
    """Return a figure as SVG and as PDF: the same bytes that `ffmem report` writes."""
    from ffmem.experiments.charts import figure_svg, svg_and_pdf

    return svg_and_pdf(figure_svg(get_result(served, name)))
