"""Makes the pictures of the explorer: `make pictures`, or `python docs/pictures.py DIR`.

Serves an index with its patterns, and a study of it, and photographs its main pages in a browser,
light, dark and on a phone. What the annotator of the picture says is what the detector found.
"""

import sys
import tempfile
from pathlib import Path

from fastapi import FastAPI
from playwright.sync_api import Page, sync_playwright

import ffmem
from ffmem.annotation.sampling import draw_plan
from ffmem.annotation.study import AnnotationStudy, Sheet, SheetPattern
from ffmem.web.app import make_app
from ffmem.web.catalog import Catalog
from tests.web.browser import FLAGS, browser_path, running

OUT = Path(__file__).parent / "pictures"
PROMPT = "In the last election the party won 48"
SHOTS = {
    "home": ("/", "light", (1280, 900)),
    "memory": ("/m/L22N873?similar=value", "light", (1280, 900)),
    "memory-dark": ("/m/L22N873?tokens=true", "dark", (1280, 900)),
    "trace": (f"/trace?text={PROMPT}&off=L22N873", "light", (1280, 900)),
    "layer": ("/layer/22?sort=-max", "dark", (1280, 900)),
    "search": ("/search?q=percent", "light", (1280, 900)),
    "figures": ("/figures", "light", (1280, 900)),
    "phone": (f"/trace?text={PROMPT}&off=L22N873", "dark", (390, 844)),
}


def study_of(folder: Path, scratch: Path) -> tuple[Path, str]:
    """Return a study in which the list with most patterns is begun, and the link to it."""
    index, patterns = ffmem.open(folder), ffmem.patterns_of(folder)
    plan = draw_plan(index, per_layer=2, annotators=["ana", "ben"], seed=0)

    def seen(cell: str | None, sign: int) -> list[SheetPattern]:
        found = [one for one in patterns.of(cell) if one.sign == sign] if cell else []
        return [
            SheetPattern(str(one.number), one.description, one.kind, frozenset(one.ranks))
            for one in found
        ]

    lists = [item for item in plan.items if item.kind == "triggers"]
    chosen = max(lists, key=lambda item: len(seen(item.cell, item.sign)))
    path = scratch / "study.sqlite"
    study = AnnotationStudy.create(path, plan)
    ana = study.people()[0]
    study.save(ana, chosen.key, 0, Sheet(tuple(seen(chosen.cell, chosen.sign))))
    return path, f"/annotate?code={ana.code} /annotate/{chosen.key}"


def photograph(page: Page, address: str, paths: str, name: str) -> None:
    """Open one page after the other, and photograph the last."""
    for path in paths.split(" /"):
        page.goto(f"{address}/{path.lstrip('/')}", timeout=120_000)
        page.wait_for_timeout(2_500)  # charts are drawn when they come into view
    page.screenshot(path=OUT / f"{name}.png")
    print(OUT / f"{name}.png")


def main() -> None:
    """Photograph every page."""
    OUT.mkdir(exist_ok=True)
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        path, link = study_of(folder, Path(scratch))
        app = make_app(Catalog.open([folder]), db=str(path))
        _photograph_all({**SHOTS, "annotate": (link, "light", (1280, 800))}, app)


def _photograph_all(shots: dict[str, tuple[str, str, tuple[int, int]]], app: FastAPI) -> None:
    with running(app) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS)
        for name, (paths, theme, (width, height)) in shots.items():
            page = browser.new_page(color_scheme=theme, viewport={"width": width, "height": height})
            photograph(page, address, paths.replace(" ", "%20").replace("%20/", " /"), name)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
