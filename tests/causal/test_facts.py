"""Files of prompts: what is read, what is counted, what is refused."""

import pytest

from ffmem.causal.facts import Fact, read_facts
from ffmem.errors import CorpusError


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"prompt": "a b", "target": " c"}\n\n{"prompt": "d", "target": "e"}\n'),
        ("a.tsv", "a b\t c\r\n\r\nd\te"),
    ],
)
def test_prompts_and_targets_keep_their_spaces_and_lines(tmp_path, name, text):
    found = read_facts(written(tmp_path, name, text))
    assert found.facts == [Fact(1, "a b", " c"), Fact(3, "d", "e")]
    assert found.empty == 1


def test_a_target_may_be_left_to_the_model(tmp_path):
    text = written(tmp_path, "a.txt", "\ufeffa b\n \nd\n\n")
    assert read_facts(text) == (text, [Fact(1, "a b", None), Fact(3, "d", None)], 2)
    lines = written(tmp_path, "a.jsonl", '{"prompt": "a", "subject": 1}')
    assert read_facts(lines).facts == [Fact(1, "a", None)]


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("a.jsonl", "{", "not JSON"),
        ("a.jsonl", '["a"]', "is not"),
        ("a.jsonl", '{"prompt": 3}', "is not"),
        ("a.jsonl", '{"prompt": "a", "target": 3}', "target is 3"),
        ("a.jsonl", '{"prompt": "a", "target": ""}', "target is ''"),
        ("a.jsonl", '{"prompt": " "}', "prompt is empty"),
        ("a.tsv", "no tab", "1 columns"),
        ("a.tsv", "a\tb\tc", "3 columns"),
        ("a.tsv", "\tb", "prompt is empty"),
    ],
)
def test_a_broken_line_is_named(tmp_path, name, line, says):
    good = '{"prompt": "a"}' if name == "a.jsonl" else "a\tb"
    with pytest.raises(CorpusError, match=rf"Line 3 of .*{says}"):
        read_facts(written(tmp_path, name, f"{good}\n\n{line}\n"))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_prompts_is_refused(tmp_path, text):
    with pytest.raises(CorpusError, match="has no prompts"):
        read_facts(written(tmp_path, "a.txt", text))


def test_a_file_that_is_missing_foreign_or_no_text_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="No such file"):
        read_facts(tmp_path / "none.txt")
    with pytest.raises(CorpusError, match=r"\.jsonl, \.tsv, \.txt"):
        read_facts(tmp_path / "a.csv")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CorpusError, match="Cannot read"):
        read_facts(tmp_path / "b.txt")
