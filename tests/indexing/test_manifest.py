import json
import shutil

import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.indexing.manifest import FORMAT, Manifest


@pytest.fixture
def folder(tiny_index, tmp_path):
    return shutil.copytree(tiny_index.folder, tmp_path / "index")


def test_what_was_written_is_read_back(tiny_index, tmp_path):
    tiny_index.manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == tiny_index.manifest
    written = (tmp_path / "manifest.json").read_bytes()
    assert written == (tiny_index.folder / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": FORMAT + 1},
            rf"has the format {FORMAT + 1}; .* reads format {FORMAT}\. Use the",
        ),
        ({"format": None}, "has the format None"),
        ({"t": "fifty"}, "not a manifest of ffmem: t is 'fifty', expected int"),
        ({"owner": "somebody"}, "owner is unknown"),
    ],
)
def test_a_foreign_manifest_is_refused_and_what_is_wrong_named(folder, change, message):
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | change))
    with pytest.raises(StoreError, match=message):
        ffmem.open(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', "\udcff"])
def test_a_damaged_manifest_is_refused(folder, text):
    (folder / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(
        StoreError, match=r"Cannot read the manifest|manifest\.json has the format None"
    ):
        ffmem.open(folder)


def test_a_folder_that_is_no_index_is_told_apart_from_one_that_is_not_there(tmp_path):
    with pytest.raises(StoreError, match="no such folder"):
        ffmem.open(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"is not an index: it has no manifest\.json"):
        ffmem.open(tmp_path)
