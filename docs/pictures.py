"""Makes the pictures of the explorer: `make pictures`, or `python docs/pictures.py DIR`.

Serves an index and photographs its main pages in a browser, light, dark and on a phone.
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from ffmem.web.app import make_app
from ffmem.web.library import Library
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


def main() -> None:
    """Photograph every page."""
    OUT.mkdir(exist_ok=True)
    app = make_app(Library.of([Path(sys.argv[1])]))
    with running(app) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS)
        for name, (path, theme, (width, height)) in SHOTS.items():
            page = browser.new_page(color_scheme=theme, viewport={"width": width, "height": height})
            page.goto(address + path, timeout=120_000)
            page.wait_for_timeout(2_500)  # charts are drawn when they come into view
            page.screenshot(path=OUT / f"{name}.png")
            page.close()
            print(OUT / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
