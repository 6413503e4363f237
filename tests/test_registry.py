import dataclasses
import errno
import gzip
import hashlib
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from ffmem import registry
from ffmem.errors import FfmemError, StorageFull
from ffmem.registry import NAMED, Package, cache_folder, fetch

TEXT = "a little text, été\n".encode() * 99
OTHER = b"another text\n"
SOURCE = Path(registry.__file__).parents[1]


def sha256(content):
    return hashlib.sha256(content).hexdigest()


PLAIN = Package("tiny-data", "1.0", "tiny_data/text.bin", sha256(TEXT))
PACKED = Package("tiny-data", "1.0", "tiny_data/other.raw.gz", sha256(OTHER))


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder that pip takes for the whole registry, holding one wheel."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    info = "tiny_data-1.0.dist-info"
    with zipfile.ZipFile(shelf / "tiny_data-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_data/text.bin", TEXT)
        wheel.writestr("tiny_data/other.raw.gz", gzip.compress(OTHER))
        wheel.writestr("tiny_data/cut.gz", gzip.compress(TEXT)[:-9])
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-data\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    return shelf


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_is_downloaded_once_and_then_taken_from_the_cache(shelf):
    path = fetch(PLAIN)
    (shelf / "tiny_data-1.0-py3-none-any.whl").unlink()

    assert fetch(PLAIN) == path
    assert path.read_bytes() == TEXT
    assert files(cache_folder()) == ["text.bin"]


def test_a_packed_member_is_kept_unpacked(shelf):
    path = fetch(PACKED)

    assert path.name == "other.raw"
    assert path.read_bytes() == OTHER


def test_one_download_serves_every_named_file_of_the_package(shelf, monkeypatch):
    monkeypatch.setattr(registry, "NAMED", (PLAIN, PACKED))

    fetch(PLAIN)

    assert files(cache_folder()) == ["other.raw", "text.bin"]


def test_a_damaged_cached_file_is_fetched_again(shelf):
    fetch(PLAIN).write_bytes(TEXT[:-1])

    assert fetch(PLAIN).read_bytes() == TEXT


def test_a_file_of_another_content_is_refused_and_not_kept(shelf):
    wanted = dataclasses.replace(PLAIN, sha256=sha256(OTHER))

    message = f"wrong SHA-256: {sha256(TEXT)}, expected {sha256(OTHER)}. Nothing was kept"
    with pytest.raises(FfmemError, match=message):
        fetch(wanted)
    assert files(cache_folder()) == []


JOINED = registry.JoinedFile(
    "whole.bin", (PLAIN, PACKED, dataclasses.replace(PLAIN)), sha256(TEXT + OTHER + TEXT)
)


def test_parts_are_joined_once_and_removed(shelf):
    path = fetch(JOINED)
    (shelf / "tiny_data-1.0-py3-none-any.whl").unlink()

    assert path.read_bytes() == TEXT + OTHER + TEXT
    assert files(cache_folder()) == ["whole.bin"]
    assert fetch(JOINED) == path


def test_parts_that_join_to_another_file_are_refused(shelf):
    wrong = dataclasses.replace(JOINED, sha256=sha256(TEXT))
    with pytest.raises(FfmemError, match=r"parts of whole\.bin do not join .* Nothing was kept"):
        fetch(wrong)
    assert not JOINED.cached_path.exists()


def test_a_missing_member_is_named(shelf):
    with pytest.raises(FfmemError, match=r"tiny-data==1\.0 .* no file 'x/y'\. The package"):
        fetch(dataclasses.replace(PLAIN, member="x/y"))


def test_a_cut_member_is_called_damaged(shelf):
    with pytest.raises(FfmemError, match=r"tiny-data==1\.0 is damaged: .*Try"):
        fetch(dataclasses.replace(PLAIN, member="tiny_data/cut.gz"))
    assert files(cache_folder()) == []


def test_a_wheel_that_is_no_archive_is_called_damaged(tmp_path):
    (tmp_path / "some.whl").write_bytes(b"no archive")

    with pytest.raises(FfmemError, match="is damaged: File is not a zip file"):
        registry._unpack(PLAIN, tmp_path / "some.whl", tmp_path)


def test_pip_does_not_read_standard_input_which_may_be_the_corpus(shelf, tmp_path):
    pip = tmp_path / "pip"
    pip.mkdir()
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(
        "import shutil, sys\n"
        "eaten = sys.stdin.readline()\n"
        "assert not eaten, f'pip has read {eaten!r}'\n"
        f"shutil.copy({str(shelf / 'tiny_data-1.0-py3-none-any.whl')!r}, sys.argv[-2])\n"
    )
    script = (
        "import sys\n"
        "from ffmem.registry import Package, fetch\n"
        f"fetch({PLAIN!r})\n"
        "print(sys.stdin.readline().strip())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input="y is the first word of the corpus\n",
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "y is the first word of the corpus\n"


def test_what_pip_says_last_is_told(shelf):
    message = (
        r"pip could not download no-such-thing==2: No matching distribution found for"
        r" no-such-thing==2\. Check the network"
    )
    with pytest.raises(FfmemError, match=message):
        fetch(Package("no-such-thing", "2", "x", "0"))


def test_a_missing_pip_is_told(shelf, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))

    with pytest.raises(FfmemError, match=r"pip is needed to download tiny-data==1\.0"):
        fetch(PLAIN)


def test_a_full_disk_is_told_and_leaves_nothing_behind(shelf, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(
        StorageFull, match=r"The disk of the cache folder .*cache is full\. Free .* FFMEM_CACHE"
    ):
        fetch(PLAIN)
    assert files(cache_folder()) == []


def test_a_cache_folder_that_cannot_be_made_is_told(shelf, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "file" / "cache"))

    with pytest.raises(FfmemError, match=r"Cannot write to the cache folder .*: Not a directory\."):
        fetch(PLAIN)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("FFMEM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(cache_folder()) == "/home/someone/.cache/ffmem"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert str(cache_folder()) == "/var/caches/ffmem"
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_every_named_file_has_a_place_of_its_own():
    assert len({package.cached_path for package in NAMED}) == len(NAMED)
    assert all(len(package.sha256) == 64 for package in NAMED)
