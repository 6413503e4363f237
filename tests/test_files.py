import errno
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.errors import StorageFull, StoreError
from ffmem.files import committing, csv_row, locked, sha256, storage_errors, write_text


def fail_while_writing(path, error):
    with committing(path) as temporary:
        temporary.write_text("half a fi")
        raise error


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "folder" / "file"
    write_text(path, "one")
    with pytest.raises(RuntimeError, match="killed"):
        fail_while_writing(path, RuntimeError("killed"))
    assert path.read_text() == "one"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_what_to_do(tmp_path, number):
    with pytest.raises(StorageFull, match=r"disk is full.*file\. Committed files are kept"):
        fail_while_writing(tmp_path / "file", OSError(number, "no room"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"Cannot write .*file: Read-only"):
        fail_while_writing(tmp_path / "file", OSError(errno.EROFS, "Read-only file system"))


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"Cannot write .*inside: .*\. Choose a path"):
        write_text(tmp_path / "file" / "inside", "y")
    with pytest.raises(StoreError, match="Is a directory"), storage_errors(tmp_path):
        tmp_path.write_bytes(b"")


def test_the_hash_is_that_of_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a").startswith("ba7816bf8f01cfea414140de5dae2223")


def test_a_link_is_replaced_and_what_it_points_to_stays_as_it_was(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_text() == "new"
    assert (tmp_path / "target").read_text() == "mine"


def test_a_lock_empties_no_file_and_follows_no_link(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(StoreError, match="Cannot write"), locked(tmp_path / "link", "busy"):
        pass
    with locked(tmp_path / "target", "busy"):
        assert (tmp_path / "target").read_text() == "mine"
    assert (tmp_path / "target").read_text() == "mine"


@given(st.text("'=+-@\t\r\n a", max_size=4), st.floats(allow_nan=False))
def test_a_text_of_a_csv_is_no_formula_and_comes_back(text, number):
    row = csv_row({"text": text, "number": number, "none": None})
    assert row["text"][:1] not in set("=+-@\t\r")
    assert row["number"] is number
    assert row["none"] is None
    assert re.sub(r"\A'('*[=+\-@\t\r])", r"\1", row["text"]) == text
