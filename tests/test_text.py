import pytest

from ffmem.text import pluralize


@pytest.mark.parametrize(
    ("n", "things", "shown"),
    [
        (1, "layers", "1 layer"),
        (0, "layers", "0 layers"),
        (2, "persistent memories", "2 persistent memories"),
        (1, "persistent memories", "1 persistent memory"),
        (12345, "tokens", "12,345 tokens"),
        (0.5, "GPUs", "0.5 GPUs"),
        (1.0, "GPUs", "1 GPU"),
    ],
)
def test_one_thing_is_named_in_the_singular(n, things, shown):
    assert pluralize(n, things) == shown
