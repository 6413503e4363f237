"""What several test files of patterns share."""

import pytest

from tests.patterns.planted import related_features


@pytest.fixture(scope="session")
def related(tmp_path_factory):
    """Features of a corpus with words that belong together, and its rows by last word."""
    return related_features(tmp_path_factory.mktemp("related") / "index")
