"""The wheel has every file of the package, and describes itself as a package index wants it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run("build", "--wheel", "--no-isolation", "--outdir", folder)
    (path,) = folder.glob("ffmem-*.whl")
    return path


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    committed = subprocess.run(
        ["git", "ls-files", "src"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.split()
    files = committed or [
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.removeprefix("src/") for name in files} <= names
    assert {name.split("/")[0] for name in names} == {"ffmem"}


def test_the_wheel_can_be_uploaded(wheel):
    assert "PASSED" in run("twine", "check", "--strict", wheel)
    assert wheel.stat().st_size < 10 << 20
