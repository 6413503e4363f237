"""The files of an index, and their hashes."""

from pathlib import Path

from ffmem.files import sha256


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that belongs to an index, the manifest aside."""
    files = [folder / "sentences.parquet", folder / "vocabulary.parquet"]
    for kind in ("triggers", "stats", "samples", "values"):
        files += sorted((folder / kind).glob("*.parquet"))
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}
