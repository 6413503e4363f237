import dataclasses
import gzip
import hashlib
import io
import json
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from ffmem import registry
from ffmem.corpus.sources import HubName, Line, digest, is_wikitext, lines
from ffmem.errors import CorpusError


def texts(source, column="text"):
    return [line.text for line in lines(str(source), column)]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\n two\u2028x\x0cy \nthree".encode())
    return path


def test_only_a_line_feed_ends_a_line_and_a_text_is_one_document(text_file):
    assert list(lines(str(text_file), "text")) == [
        Line(0, "one\r"),
        Line(0, ""),
        Line(0, " two\u2028x\x0cy "),
        Line(0, "three"),
    ]


def test_a_packed_file_reads_as_the_plain_one(text_file):
    packed = text_file.with_suffix(".txt.gz")
    packed.write_bytes(gzip.compress(text_file.read_bytes()))

    assert texts(packed) == texts(text_file)


def test_standard_input_reads_as_a_text_file(text_file, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text_file.read_bytes())))

    assert texts("-") == texts(text_file)


def test_every_record_of_json_lines_is_a_document(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"text": "one\r\ntwo\u2028"}, {"text": "été", "id": 3}, {"text": None}, {"text": ""}]
    path.write_text("\n\n".join(map(json.dumps, records)) + "\n")

    assert list(lines(str(path), "text")) == [
        Line(0, "one\r"),
        Line(0, "two\u2028"),
        Line(1, "été"),
        Line(3, ""),
    ]
    path.with_name("a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert texts(path.with_name("a.jsonl.gz")) == texts(path)


def write_parquet(path, **columns):
    parquet.write_table(pa.table(columns), path)
    return path


def test_every_row_of_a_parquet_file_is_a_document(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", n=[1, 2], body=["one\ntwo", "three"])

    assert list(lines(str(path), "body")) == [Line(0, "one"), Line(0, "two"), Line(1, "three")]


def test_many_rows_come_in_order(tmp_path):
    numbers = [str(number) for number in range(1000)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": numbers}), path, row_group_size=300)

    assert texts(path) == numbers


def test_a_column_of_token_ids_is_taken_as_it_is(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ids=[[5, 3], [], [7]], text=["a", "b", "c"])

    expected = [Line(0, None, [5, 3]), Line(1, None, []), Line(2, None, [7])]
    assert list(lines(str(path), "text")) == expected
    assert list(lines(str(path), "ids")) == expected


def test_a_column_named_ids_without_lists_of_integers_is_no_tokens(tmp_path):
    for ids in "x1", ["x", "y"], [None]:
        path = write_parquet(tmp_path / "a.parquet", ids=[ids], text=["a"])
        assert texts(path) == ["a"]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name in "b.txt", "a/z.txt", "a/.hidden.txt", ".git/c.txt", "a.jsonl":
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": name}) if name.endswith("l") else name)

    assert list(lines(str(tmp_path), "text")) == [
        Line(0, "a.jsonl"),
        Line(1, "a/z.txt"),
        Line(2, "b.txt"),
    ]


def test_a_named_text_is_fetched(tmp_path, monkeypatch):
    """The text is put where a download would put it; `tests/test_registry.py` downloads one."""
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path))
    content = b" one \n"
    package = dataclasses.replace(
        registry.WIKITEXT_2["valid"], sha256=hashlib.sha256(content).hexdigest()
    )
    monkeypatch.setitem(registry.WIKITEXT_2, "valid", package)
    package.cached_path.parent.mkdir(parents=True)
    package.cached_path.write_bytes(content)

    assert texts("wikitext-2:valid") == [" one "]
    assert is_wikitext("wikitext-2:valid")
    assert not is_wikitext("wikitext-2.txt")


def refused(source, column="text"):
    with pytest.raises(CorpusError) as caught:
        list(lines(str(source), column))
    return str(caught.value)


def test_what_is_not_there_is_refused_with_the_forms_that_exist(tmp_path):
    message = refused(tmp_path / "none.txt")
    assert "no file or folder" in message
    for form in ".jsonl.gz", ".parquet", "standard input", "wikitext-2:train|valid|test", "hf:ID":
        assert form in message
    assert "has no part 'all'. Use a file" in refused("wikitext-2:all")


def test_an_unknown_ending_is_refused_also_in_a_folder(tmp_path):
    path = tmp_path / "notes.docx"
    path.write_bytes(b"")

    for source in path, tmp_path:
        assert "notes.docx'. Use a file (.txt" in refused(source)


def test_an_empty_folder_is_refused(tmp_path):
    assert "has no files to read. Use" in refused(tmp_path)


def test_bytes_that_are_no_text_are_refused_with_their_place(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\nna\xefve\n")

    assert f"Line 2 of {path} is not UTF-8 (byte 0xef at offset 2). Convert" in refused(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "is not JSON: Expecting value"),
        ("[" * 100_000, "is not JSON: "),
        ("[1]", "is not a JSON object. Write"),
        ('{"body": "x", "n": 1}', "has no field 'text'; it has 'body', 'n'. Choose the text"),
        ("{}", "has no field 'text'; it has none."),
        ('{"text": [1]}', "has list '[1]' instead of text in 'text'. Choose a text"),
        ('{"text": "\\ud83d"}', "contains half a character ('\\ud83d'), a lone surrogate. Write"),
    ],
)
def test_a_bad_record_is_refused_with_its_place(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")

    assert f"Line 2 of {path} {message}" in refused(path)


def test_a_damaged_packed_file_is_refused(tmp_path):
    path = tmp_path / "a.txt.gz"
    whole = gzip.compress(bytes(range(97, 123)) * 1000)
    for content in whole[:-9], b"plain", whole[:30] + b"\x00\xff" * 9 + whole[48:]:
        path.write_bytes(content)
        assert f"The gzip file {path} is damaged or truncated: " in refused(path)


def test_a_foreign_or_damaged_parquet_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"plain text")
    assert f"Cannot read {path} as Parquet: " in refused(path)
    write_parquet(path, text=["a" * 99, "b"])
    path.write_bytes(path.read_bytes()[:-20])
    assert f"Cannot read {path} as Parquet: " in refused(path)


def test_a_parquet_column_that_is_missing_or_no_text_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", n=[None, 1], m=["x", "y"])

    assert f"{path} has no field 'text'; it has 'n', 'm'. Choose" in refused(path)
    assert f"Row 1 of {path} has int '1' instead of text in 'n'. Choose" in refused(path, "n")


def test_a_file_that_cannot_be_opened_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.symlink_to("/proc/self/mem")

    assert f"Cannot read {path}: " in refused(path)


def test_a_digest_follows_names_and_content_of_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    first = digest(str(tmp_path))

    (tmp_path / ".c.txt").write_text("hidden")
    assert digest(str(tmp_path)) == first
    (tmp_path / "b.txt").write_text("twO")
    assert digest(str(tmp_path)) != first
    (tmp_path / "b.txt").write_text("two")
    assert digest(str(tmp_path)) == first
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    assert digest(str(tmp_path)) != first
    assert digest("-") is digest("hf:some/data") is None


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf:some/data", HubName("some/data", None, "train")),
        ("hf:some/data:test", HubName("some/data", None, "test")),
        ("hf:data:en", HubName("data", "en", "train")),
        ("hf:data:en:test", HubName("data", "en", "test")),
        ("hf:data::extra", HubName("data", None, "extra")),
        ("hf:", None),
        ("hf:data:a:b:c", None),
    ],
)
def test_a_name_of_the_hub_is_id_configuration_and_split(source, name):
    if name is None:
        with pytest.raises(CorpusError, match=r"does not name a Hub dataset\. Use a file"):
            HubName.parse(source)
    else:
        assert HubName.parse(source) == name


def test_the_hub_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)

    assert "needs the package `datasets`. Install it: pip install 'ffmem[hub]'" in refused("hf:x")
