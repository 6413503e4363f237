"""An index with patterns that several files measure experiments on."""

import pytest

from tests.annotation.kept_patterns import first_three, keep
from tests.indexing.folders import indexed, memories, write_corpus


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """An index with patterns, its model, and a corpus for Section 5."""
    folder = tmp_path_factory.mktemp("made")
    model = memories("llama")
    index = indexed(folder / "index", write_corpus(folder / "train.txt"), model, t=5)
    keep(index, "automatic", first_three)
    return index, model, write_corpus(folder / "valid.txt", n=20, seed=3)
