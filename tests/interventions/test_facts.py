"""Files of prompts, and effects over them against those of every prompt by itself."""

import json
from statistics import mean, median

import pytest

from ffmem.errors import CorpusError, FfmemError
from ffmem.interventions.effect import Fact, effect, effect_of_facts, read_prompt_file
from ffmem.interventions.results import PromptFile
from tests.interventions.planted import planted, with_start
from tests.tiny import read


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
    file, facts = read_prompt_file(written(tmp_path, name, text))
    assert facts == [Fact(1, "a b", " c"), Fact(3, "d", "e")]
    assert file.empty_lines == 1


def test_a_target_may_be_left_to_the_model(tmp_path):
    text = written(tmp_path, "a.txt", "\ufeffa b\n \nd\n\n")
    facts = [Fact(1, "a b", None), Fact(3, "d", None)]
    assert read_prompt_file(text) == (PromptFile(str(text), prompts=2, empty_lines=2), facts)
    lines = written(tmp_path, "a.jsonl", '{"prompt": "a", "subject": 1}')
    assert read_prompt_file(lines)[1] == [Fact(1, "a", None)]


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
    with pytest.raises(CorpusError, match=rf"line 3 of .*{says}"):
        read_prompt_file(written(tmp_path, name, f"{good}\n\n{line}\n"))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_prompts_is_refused(tmp_path, text):
    with pytest.raises(CorpusError, match="has no prompts"):
        read_prompt_file(written(tmp_path, "a.txt", text))


def test_a_file_that_is_missing_foreign_or_no_text_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="No such file"):
        read_prompt_file(tmp_path / "none.txt")
    with pytest.raises(CorpusError, match=r"\.jsonl, \.tsv, \.txt"):
        read_prompt_file(tmp_path / "a.csv")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CorpusError, match="Cannot read"):
        read_prompt_file(tmp_path / "b.txt")


# Effects over a file

FACTS = [("w5 w9 w2", "w20"), ("w4", "w21"), ("w30 w31 w9 w9 w7", "w20")]
CONTROLS = [("w8 w3", "w40"), ("w12 w13 w14", "w41")]


@pytest.fixture(scope="module")
def llama():
    return read("llama")


@pytest.fixture
def files(tmp_path):
    def lines(rows):
        return "".join(f"{prompt}\t{target}\n" for prompt, target in rows)

    (tmp_path / "facts.tsv").write_text(lines(FACTS) + "\n")
    (tmp_path / "controls.tsv").write_text(lines(CONTROLS))
    return tmp_path / "facts.tsv", tmp_path / "controls.tsv"


def alone(memories, rows, **options):
    """Every memory's effect on every prompt, one prompt at a time."""
    every = memories.n_layers * memories.layout.widths[0]
    found = [
        effect(
            with_start(memories),
            prompt,
            target=target,
            top=every,
            candidates=every,
            **options,
        )
        for prompt, target in rows
    ]
    return [{memory.cell: memory for memory in one.memories} for one in found]


def test_every_number_is_that_of_the_prompts_alone(llama, files):
    options = {"integrated": True, "steps": 2}
    found = effect_of_facts(
        with_start(llama), files[0], against=files[1], top=48, candidates=48, **options
    )
    single, control = alone(llama, FACTS, **options), alone(llama, CONTROLS, **options)
    assert len(found.memories) == 48
    for row in found.memories:
        changes = [one[row.cell].change for one in single]
        assert row.change == pytest.approx(mean(changes), abs=1e-6)
        assert row.median == pytest.approx(median(changes), abs=1e-6)
        assert row.lowers == pytest.approx(mean(change < 0 for change in changes))
        assert row.largest == pytest.approx(max(changes, key=abs), abs=1e-6)
        assert changes[row.largest_prompt] == pytest.approx(row.largest, abs=1e-6)
        assert row.against == pytest.approx(mean(o[row.cell].change for o in control), abs=1e-6)
        assert row.difference == pytest.approx(row.change - row.against)
        for name in ("gradient", "direct", "integrated", "coefficient"):
            expected = mean(getattr(one[row.cell], name) for one in single)
            assert getattr(row, name) == pytest.approx(expected, abs=1e-5)


def test_rows_are_sorted_by_mean_or_by_difference(llama, files):
    plain = effect_of_facts(with_start(llama), files[0], top=5, candidates=20)
    means = [row.change for row in plain.memories]
    assert len(means) == 5
    assert means == sorted(means)
    assert plain.sorted_by == "change"
    assert plain.memories[0].against is None
    both = effect_of_facts(with_start(llama), files[0], against=files[1], top=5, candidates=20)
    differences = [row.difference for row in both.memories]
    assert differences == sorted(differences)
    assert both.sorted_by == "difference"


def test_mean_estimates_choose_the_candidates(llama, files):
    found = effect_of_facts(with_start(llama), files[0], top=6, candidates=6)
    single = alone(llama, FACTS)
    averaged = {cell: mean(one[cell].gradient for one in single) for cell in single[0]}
    best = sorted(averaged, key=lambda cell: -abs(averaged[cell]))[:3]
    assert set(best) <= {row.cell for row in found.memories}


def test_a_planted_memory_comes_first_for_every_fact(tmp_path):
    path = tmp_path / "facts.txt"
    path.write_text("w5 w9\nw2 w17 w30\n")
    for options in ({}, {"integrated": True, "steps": 5}):
        found = effect_of_facts(with_start(planted()), path, candidates=8, **options)
        assert str(found.memories[0].cell) == "L1N7"
        assert found.memories[0].lowers == 1
        assert found.memories[0].value_top[0] == "w11"
        assert [fact.token for fact in found.facts] == ["w11", "w11"]


def test_everything_stands_in_its_json_and_its_table(llama, files):
    found = effect_of_facts(with_start(llama), files[0], against=files[1], candidates=4)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert content["file"] == {"path": str(files[0]), "prompts": 3, "empty_lines": 1}
    assert content["against"]["prompts"] == 2
    assert [fact["token"] for fact in content["facts"]] == ["w20", "w21", "w20"]
    assert set(content["memories"][0]) >= {
        *("cell", "change", "median", "lowers", "largest", "against", "difference"),
        *("gradient", "direct", "relp", "integrated", "value_top"),
    }
    table = str(found)
    assert "1 empty lines ignored" in table
    assert "difference" in table
    assert str(found.memories[0].cell) in table


def test_the_page_escapes_what_comes_from_the_file(llama, files):
    odd = files[0].with_name("<b>.tsv")
    files[0].rename(odd)
    assert "<b>" not in effect_of_facts(with_start(llama), odd, candidates=2)._repr_html_()


@pytest.mark.parametrize(
    ("line", "says"),
    [("w5\tw6 w7", "not one token"), (" ".join(["w5"] * 64) + "\tw6", "65 tokens")],
)
def test_a_prompt_that_the_model_cannot_take_is_named_by_its_line(llama, tmp_path, line, says):
    path = tmp_path / "facts.tsv"
    path.write_text(f"w5\tw6\n{line}\n")
    with pytest.raises(CorpusError, match=rf"Line 2 of .*{says}"):
        effect_of_facts(with_start(llama), path)


def test_steps_below_one_are_refused(llama, files):
    with pytest.raises(FfmemError, match="steps must be 1"):
        effect_of_facts(with_start(llama), files[0], steps=0)
