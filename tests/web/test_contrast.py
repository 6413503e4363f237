"""Text can be read on every ground of the site, light and dark: WCAG AA, from the colors alone."""

import re
from importlib.resources import files

import pytest

CSS = (files("ffmem.web") / "static" / "site.css").read_text(encoding="utf-8")


def colors(block):
    return dict(re.findall(r"--([a-z-]+):(#[0-9a-f]{3,6})\b", block))


LIGHT = colors(re.search(r":root\{(.*?)\n\}", CSS, re.DOTALL)[1])
DARK = LIGHT | colors(re.search(r":root\[data-theme=dark\]\{(.*?)\n\}", CSS, re.DOTALL)[1])
BY_SYSTEM = LIGHT | colors(
    re.search(r":root:not\(\[data-theme=light\]\)\{(.*?)\n\}", CSS, re.DOTALL)[1]
)


def luminance(color):
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "card", "wash"])
@pytest.mark.parametrize("ink", ["ink", "soft", "plus", "minus", "next"])
def test_text_stands_out(theme, ink, ground):
    assert contrast(theme[ink], theme[ground]) >= 4.5


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_buttons_and_active_edits_stand_out(theme):
    assert contrast(theme["go-ink"], theme["go"]) >= 4.5
    assert contrast(theme["edits-ink"], theme["edits"]) >= 4.5
    for case in ("residual", "agreement", "ffn", "composition"):
        assert contrast(theme[case], theme["card"]) >= 3  # a mark, not a text


def test_the_systems_dark_is_the_chosen_dark():
    assert BY_SYSTEM == DARK
