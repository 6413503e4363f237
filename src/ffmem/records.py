"""Dataclasses that are written as JSON and read back with every field checked.

    Kind.of(json.loads(record.to_json())) == record

A damaged or foreign file raises an error that names the field. These are plain dataclasses because
importing a validation library would take a third of the time of `ffmem show`.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ffmem.errors import StoreError

AnyRecord = TypeVar("AnyRecord", bound="Record")


class NotARecord(ValueError):
    """The content does not fit the record; the message names the first wrong field."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base of all records.

    Fields are str, int, float, bool, None, records, and lists, tuples of one type or dicts of them.
    """

    def to_json(self) -> str:
        """Return the record as JSON, with its fields in order."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def of(cls: type[AnyRecord], content: Any, place: str = "") -> AnyRecord:
        """Return the record with this content; raise unless every field is there and of its type.

        A field with a default may be missing, so that older files can be read.
        """
        if not isinstance(content, dict):
            raise NotARecord(f"{place or 'it'} is {content!r}, not an object")
        types = get_type_hints(cls)
        names = [field.name for field in fields(cls)]
        needed = [field.name for field in fields(cls) if not _has_default(field)]
        for name in (*needed, *content):
            if name not in content or name not in names:
                what = "missing" if name in names else "unknown"
                raise NotARecord(f"{f'{place}.{name}'.lstrip('.')} is {what}")
        checked = {n: _checked(content[n], types[n], f"{place}.{n}".lstrip(".")) for n in content}
        return cls(**checked)


def check_same_settings(found: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise if a run was made with other settings; `found` says what is there."""
    if lines := _differences(old, new):
        raise StoreError(
            f"{found} with other settings: {'; '.join(lines)}. Use the same settings, or choose"
            " another folder."
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], whole: str = "") -> list[str]:
    """Return how settings differ, one line each: `t: 50 → 20`, `model: a → b`.

    `whole` is what they are settings of: `corpus`, or nothing if they are the run's own.
    """
    lines = []
    before_digest, digest = old.get("digest"), new.get("digest")
    is_same_corpus = digest is not None and digest == before_digest
    has_other_source = not is_same_corpus and old.get("source") != new.get("source")
    for name in {**new, **old}:
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) or isinstance(after, dict):
            lines += _differences(before or {}, after or {}, _IN_WORDS.get(name, name))
        elif before == after or (name == "source" and is_same_corpus):  # it has moved
            continue
        elif name == "digest":
            if not has_other_source:
                lines.append(f"the files of the {whole} have changed")
        elif name.endswith("hash"):
            lines.append(f"the {whole or 'run'} has other weights")
        else:
            shown = whole if name == "source" else f"--{name.replace('_', '-')}"
            shown = shown if whole else name
            lines.append(f"{shown}: {_in_words(before)} → {_in_words(after)}")
    return lines


_IN_WORDS = {"valid": "validation corpus"}
"""What settings are of, where that is not their name."""


def _in_words(value: Any) -> str:
    """Return a setting as people write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return str(value)


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _checked(value: Any, kind: Any, place: str) -> Any:
    """Return a value read from JSON as the type of its field."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        exact = [one for one in inner if type(value) is one]
        return _checked(value, exact[0] if exact else inner[0], place)
    if origin is list and isinstance(value, list):
        return [_checked(one, inner[0], f"{place}[{i}]") for i, one in enumerate(value)]
    if origin is tuple and isinstance(value, list):
        return tuple(_checked(one, inner[0], f"{place}[{i}]") for i, one in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _checked(one, inner[1], f"{place}.{key}") for key, one in value.items()}
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.of(value, place)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        name = getattr(kind, "__name__", str(kind))
        raise NotARecord(f"{place} is {value!r}, expected {name}")
    return value
