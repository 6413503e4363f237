"""Vega in the page and on the server, both from the one package vl-convert: nothing is fetched.

The page gets one script with Vega-Lite, Vega and the interpreter of its expressions, so that no
text is ever turned into code. The server draws the same charts without a browser, as SVG.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

from ffmem.errors import FfmemError
from ffmem.files import write_text
from ffmem.registry import cache_folder

Spec = dict[str, Any]
"""A chart in Vega-Lite's language, or a part of one."""

VEGA_LITE = "6.4"

SNIPPET = "window.vegaEmbed = vegaEmbed;"
"""What the script gives to the page."""

MOST_DRAWINGS = 64
"""Drawings held at once; the one that was not asked for longest makes room."""

_MAKING, _DRAWING = threading.Lock(), threading.Lock()


class Bundle(NamedTuple):
    """The script of the page."""

    script: bytes
    etag: str


def bundle_version() -> str:
    """Return what decides the bytes of the script."""
    return version("vl-convert-python")


def bundle() -> Bundle:
    """Return the script, made once and kept in the cache folder."""
    with _MAKING:
        return _bundle()


@cache
def _bundle() -> Bundle:
    place = cache_folder() / "web" / f"vega-{bundle_version()}-{VEGA_LITE}.js"
    with suppress(OSError, UnicodeDecodeError):
        kept = place.read_text(encoding="utf-8")
        if kept:
            return _tagged(kept)
    import vl_convert

    made: str = vl_convert.javascript_bundle(SNIPPET, vl_version=VEGA_LITE)
    with suppress(FfmemError):  # it saves a second next time, no more
        write_text(place, made)
    return _tagged(made)


def _tagged(script: str) -> Bundle:
    encoded = script.encode()
    return Bundle(encoded, f'"{hashlib.sha256(encoded).hexdigest()[:16]}"')


_drawings: OrderedDict[str, str] = OrderedDict()


def drawing(spec: Spec) -> str:
    """Return a chart as SVG, drawn once and kept for a while."""
    content = json.dumps(spec, allow_nan=False)
    key = hashlib.sha256(content.encode()).hexdigest()
    with _DRAWING:
        if key not in _drawings:
            import vl_convert

            svg = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, allowed_base_urls=[])
            _drawings[key] = svg
            while len(_drawings) > MOST_DRAWINGS:
                _drawings.popitem(last=False)
        _drawings.move_to_end(key)
        return _drawings[key]
