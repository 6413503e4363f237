"""Compare a golden record with what the code computes now.

    |found − recorded| ≤ 1e-4 · |recorded| + 1e-6 · largest number of that name in the record

Items of a ranked list may trade places where their numbers are that close, and the last place of
one may go to an item that was cut off. In a list of triggers, one may be another prefix of its
sentence that is as close. Everything else is exact. New fields are welcome.
"""

RELATIVE, ABSOLUTE = 1e-4, 1e-6

RANKED = {
    "triggers": ("coefficient", ("sentence", "length")),
    "negative_triggers": ("coefficient", ("sentence", "length")),
    "top": ("probability", ("id",)),
    "bottom": ("logit", ("id",)),
    "residual_top": ("probability", ("id",)),
    "ff_top": ("probability", ("id",)),
    "output_top": ("probability", ("id",)),
    "edited_output_top": ("probability", ("id",)),
    "contributing": ("contribution", ("cell",)),
    "ablated": ("change", ("cell",)),
    "predictive": ("probability", ("cell",)),
}
"""Lists in order of a number, by name: that number, and what tells their items apart."""

LOOSE = {"correlation": 0.05, "sum": 3e-4}
"""Absolute tolerance below a name: changes of resting memories are noise, and their ranks too."""

SCALES = {"change": 10.0, "gradient": 10.0, "distance": 1.0}
"""Least scale of a name: a change, like its estimate, is a difference of log p of this size; a
distance is a share, and rounding where it is nearly 0."""


def differences(recorded, found):
    """Return what differs, one line per number or text."""
    scales = dict(SCALES)
    _measure(recorded, "", scales)
    return list(_compare(recorded, found, "", "", scales))


def _measure(recorded, name, scales):
    """Collect the largest absolute number of every name."""
    if isinstance(recorded, dict):
        for key, value in recorded.items():
            _measure(value, key, scales)
    elif isinstance(recorded, list):
        for value in recorded:
            _measure(value, name, scales)
    elif isinstance(recorded, float):
        scales[name] = max(scales.get(name, 0.0), abs(recorded))


def _compare(recorded, found, path, name, scales):
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key, value in recorded.items():
            if key not in found:
                yield f"{path}.{key}: missing"
            elif key in LOOSE:
                yield from _compare_loosely(value, found[key], f"{path}.{key}", LOOSE[key])
            else:
                yield from _compare(value, found[key], f"{path}.{key}", key, scales)
    elif isinstance(recorded, list) and isinstance(found, list):
        if len(recorded) != len(found):
            yield f"{path}: {len(recorded)} recorded, {len(found)} found"
        elif name in RANKED and recorded:
            yield from _compare_ranked(recorded, found, path, name, scales)
        else:
            for place, (one, other) in enumerate(zip(recorded, found, strict=True)):
                yield from _compare(one, other, f"{path}[{place}]", name, scales)
    elif not _same(recorded, found, scales.get(name, 0.0)):
        yield f"{path}: {recorded!r} recorded, {found!r} found"


def _compare_ranked(recorded, found, path, name, scales):
    """Compare lists in order of a number: numbers by place, items wherever theirs is as close."""
    number, keys = RANKED[name]
    scale = scales.get(number, 0.0)
    last = recorded[-1][number]
    exchanged = []
    for place, (one, other) in enumerate(zip(recorded, found, strict=True)):
        here = f"{path}[{place}]"
        if not _same(one[number], other[number], scale):
            yield f"{here}.{number}: {one[number]!r} recorded, {other[number]!r} found"
            continue
        close = [item for item in found if _same(one[number], item[number], scale)]
        same = [item for item in close if all(item[key] == one[key] for key in keys)]
        if same:
            fields = {key: value for key, value in one.items() if key != "rank"}
            yield from _compare(fields, same[0], here, name, scales)
        elif len(recorded) == 1 or not _same(one[number], last, scale):
            missing = f"{here}: no {', '.join(f'{key} {one[key]!r}' for key in keys)} found"
            if any(item.get("sentence", ...) == one.get("sentence") for item in close):
                exchanged.append(missing)
            else:
                yield missing
    if len(exchanged) > 1 or len(recorded) == 1:
        yield from exchanged


def _compare_loosely(recorded, found, path, tolerance):
    """Compare numbers by name with an absolute tolerance."""
    for key, value in recorded.items():
        other = found.get(key)
        both_numbers = value is not None and other is not None
        if abs(value - other) > tolerance if both_numbers else value is not other:
            yield f"{path}.{key}: {value!r} recorded, {other!r} found"


def _same(recorded, found, scale):
    """Return whether two leaves are the same: numbers within the tolerance, all else exactly."""
    both = (recorded, found)
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in both):
        return type(recorded) is type(found) and recorded == found
    if all(isinstance(one, int) for one in both):
        return recorded == found
    return abs(recorded - found) <= RELATIVE * abs(recorded) + ABSOLUTE * scale
