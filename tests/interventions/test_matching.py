import re
from dataclasses import replace

import pytest

from ffmem.cells import BankRecord
from ffmem.errors import StoreError
from ffmem.indexing.store import Index
from ffmem.interventions.compare import check_comparable, differences
from tests.interventions.pairs import index_of, model


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return index_of(tmp_path_factory.mktemp("matching") / "index", model())


def changed(index, **fields):
    """Return the same index with another manifest."""
    other = Index(index.folder)
    manifest = index.manifest
    if "layers" in fields:
        fields["banks"] = fields["layers"] * [[BankRecord(size=24)]]
    if "memories" in fields:
        fields["banks"] = manifest.model.layers * [[BankRecord(size=fields.pop("memories"))]]
    model = {name: fields.pop(name) for name in list(fields) if hasattr(manifest.model, name)}
    other.manifest = replace(manifest, model=replace(manifest.model, **model), **fields)
    return other


@pytest.mark.parametrize(
    ("field", "value", "old", "advice"),
    [
        ("family", "mistral", "llama", "architecture"),
        ("layers", 7, "2", "architecture"),
        ("memories", 7, "24", "architecture"),
        ("hidden", 7, "16", "architecture"),
        ("vocabulary", 7, "64", "architecture"),
        ("gated", False, "True", "architecture"),
        ("t", 7, "3", "settings of the other"),
        ("prefixes", "all", "best", "settings of the other"),
        ("compat", "ff-layers", "none", "settings of the other"),
        ("projection", "raw", "folded", "settings of the other"),
    ],
)
def test_indexes_that_do_not_match_are_refused_with_both_values(
    field, value, old, advice, finished
):
    other = changed(finished, **{field: value})
    says = f"{field}: {old} in the first, {value} in the second.*{advice}"
    with pytest.raises(StoreError, match=says):
        check_comparable(finished, other)
    with pytest.raises(StoreError, match=f"{field}: {value} in the first, {old} in the second"):
        check_comparable(other, finished)


def test_another_corpus_is_refused_by_its_content_not_its_name(finished):
    corpus = finished.manifest.corpus
    renamed = [replace(source, source="moved.txt") for source in corpus.sources]
    check_comparable(finished, changed(finished, corpus=replace(corpus, sources=renamed)))
    other = changed(finished, corpus=replace(corpus, hash="f" * 64))
    says = f"corpus.txt (60 sentences, hash {corpus.hash[:12]}) in the first"
    with pytest.raises(StoreError, match=re.escape(says)) as raised:
        check_comparable(finished, other)
    assert "ffffffffffff) in the second. Index both models over the same corpus" in str(
        raised.value
    )


def test_another_start_token_is_refused(finished):
    none = changed(finished, start=replace(finished.manifest.start, id=None, token=None))
    with pytest.raises(StoreError, match="start token: '<s>' in the first, none in the second"):
        check_comparable(finished, none)


def test_an_index_matches_itself_and_differs_in_nothing(finished):
    check_comparable(finished, finished)
    assert differences(finished.manifest, finished.manifest) == {}


def test_what_may_differ_is_told(finished):
    versions = finished.manifest.versions | {"torch": "0.0"}
    other = changed(finished, dtype="bfloat16", tokenizer="?", versions=versions)
    check_comparable(finished, other)
    assert differences(finished.manifest, other.manifest) == {
        "dtype": ["float32", "bfloat16"],
        "tokenizer": [finished.manifest.tokenizer, "?"],
        "version of torch": [finished.manifest.versions["torch"], "0.0"],
    }
