"""Imports point down: a package imports only those that stand before it in this list."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "ffmem"

ORDER = [
    *(
        "errors",
        "signatures",
        "records",
        "cells",
        "text",
        "stats",
        "files",
        "progress",
        "config_fields",
        "registry",
    ),
    *("storage", "hub", "ray_workers", "parallel"),
    *("mini_wiki", "networks", "models", "corpus", "indexing"),
    *("patterns", "experiments", "annotation", "training", "mini_wiki.publish"),
    *("interventions", "sharing", "web"),
    *("api", "demo", "agents", "cli", "__main__"),
]

UPWARD = {
    ("indexing", "patterns"),  # `index.table("patterns")`
    ("models", "corpus"),
}
"""Pairs of packages of which a module of the first imports the second all the same."""

FILES = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]


def place(module):
    """Return where a module stands in the order: by its own name, or by its package's."""
    names = module.split(".")
    for n in range(len(names), 0, -1):
        if ".".join(names[:n]) in ORDER:
            return ".".join(names[:n])
    raise AssertionError(f"{module} has no place in the order")


def is_above_api(path):
    """Whether a file may use the public names, by `import ffmem`."""
    own = place(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    return ORDER.index(own) > ORDER.index("api")


def imported(path):
    """Return the modules of ffmem that a file imports, at its top, in functions, or for types."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ffmem":
            below = (node.module or "").removeprefix("ffmem").removeprefix(".")
            for alias in node.names:
                inner = f"{below}.{alias.name}".removeprefix(".")
                is_module = (SOURCE / inner.replace(".", "/")).with_suffix(".py").exists()
                yield inner if is_module or not below else below
        if isinstance(node, ast.Import):
            ours = [alias.name for alias in node.names if alias.name.split(".")[0] == "ffmem"]
            assert not ours or (ours == ["ffmem"] and is_above_api(path)), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_package_imports_only_packages_below_it(path):
    own = place(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    for module in imported(path):
        other = place(module)
        if other != own and (own, other) not in UPWARD:
            assert ORDER.index(other) < ORDER.index(own), f"{own} imports {other}"
