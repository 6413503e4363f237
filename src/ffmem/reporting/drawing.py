"""A figure as files: SVG for pages light and dark, PDF for paper.

    figure(result) → the SVG for a page that sets the colours;  draw(result, folder) → both files

Nothing is fetched and no browser runs. The same result gives the same bytes.
"""

import re
from pathlib import Path
from typing import Any

import vl_convert
from markupsafe import escape

from ffmem.experiments.result import Result
from ffmem.files import committing, write_text
from ffmem.indexing.memory import visible
from ffmem.reporting.charts import chart
from ffmem.reporting.findings import measured, title
from ffmem.reporting.style import DARK, Chart

VEGA_LITE = "6.4"

_OPENING = re.compile(r"<svg\b[^>]*>")
_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_MACHINERY = re.compile(r' (?:aria-[a-z]+|role|pointer-events|class)="[^"]*"')


def figure(result: Result) -> str:
    """Return a figure as SVG without colours of its own for dark pages, to stand in a page."""
    return framed(result.experiment, heading(result), measured(result), chart(result))


def framed(name: str, title: str, description: str, drawing: Chart) -> str:
    """Return a chart as SVG with a title and a description for those who do not see it."""
    drawn = _drawn(drawing)
    width, height = _size(drawn)
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" role="img"'
        f' aria-labelledby="{name}-title {name}-desc" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}">'
        f'<title id="{name}-title">{_plain(title)}</title>'
        f'<desc id="{name}-desc">{_plain(description)}</desc>'
    )
    return opening + drawn[_end_of_opening(drawn) :]


def draw(result: Result, folder: Path) -> tuple[Path, Path]:
    """Write NAME.svg and NAME.pdf, and return where they are."""
    return write_figure(result.experiment, figure(result), folder)


def write_figure(name: str, inline: str, folder: Path) -> tuple[Path, Path]:
    """Write a figure as NAME.svg and NAME.pdf, and return where they are."""
    svg, pdf = (folder / f"{name}.{ending}" for ending in ("svg", "pdf"))
    write_text(svg, inline.replace("<title", f"<style>{dark_style()}</style><title", 1) + "\n")
    with committing(pdf) as temporary:
        temporary.write_bytes(vl_convert.svg_to_pdf(inline))
    return svg, pdf


def dark_style() -> str:
    """Return the CSS that exchanges the colours of the ground on a dark page, even in an <img>."""
    rules = "".join(
        f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}'
        for light, dark in DARK.items()
    )
    return f"@media (prefers-color-scheme:dark){{{rules}}}"


def heading(result: Result) -> str:
    """Return the title of a figure with the model it is about."""
    model = result.settings.get("model")
    return f"{title(result.experiment)} ({result.paper})" + (f", {model}" if model else "")


def _drawn(drawing: Chart) -> str:
    """Return what Vega draws; no mark is clipped, so it holds no id that pages could share."""
    # Charts are checked against the schema in tests; it takes longer than drawing them.
    spec: dict[str, Any] = drawing.to_dict(validate=False)
    svg: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, allowed_base_urls=[])
    return _MACHINERY.sub("", svg)


def _size(svg: str) -> tuple[str, str]:
    found = _SIZE.search(svg)
    assert found, "Vega gives every figure a viewBox"
    return found[1], found[2]


def _end_of_opening(svg: str) -> int:
    found = _OPENING.match(svg)
    assert found, "Vega's figures begin with <svg"
    return found.end()


def _plain(text: str) -> str:
    return str(escape(visible(text)))
