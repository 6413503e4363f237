"""Effects over a file of prompts against those of every prompt by itself."""

import json
from statistics import mean, median

import pytest

import ffmem
from ffmem.causal.effect import effect
from ffmem.causal.knowledge import effect_of_facts
from ffmem.causal.prompt import read_prompt
from ffmem.errors import CorpusError, FfmemError
from tests.causal.planted import planted
from tests.tiny import tiny, tiny_tokenizer

FACTS = [("w5 w9 w2", "w20"), ("w4", "w21"), ("w30 w31 w9 w9 w7", "w20")]
CONTROLS = [("w8 w3", "w40"), ("w12 w13 w14", "w41")]


@pytest.fixture(scope="module")
def llama():
    return ffmem.load(tiny("llama"), tiny_tokenizer())


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
            memories,
            read_prompt(memories, prompt, 0),
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
    found = effect_of_facts(llama, files[0], 0, against=files[1], top=48, candidates=48, **options)
    single, control = alone(llama, FACTS, **options), alone(llama, CONTROLS, **options)
    assert len(found.memories) == 48
    for row in found.memories:
        changes = [one[row.cell].change for one in single]
        assert row.mean == pytest.approx(mean(changes), abs=1e-6)
        assert row.median == pytest.approx(median(changes), abs=1e-6)
        assert row.lowers == pytest.approx(mean(change < 0 for change in changes))
        assert row.largest == pytest.approx(max(changes, key=abs), abs=1e-6)
        assert changes[row.largest_prompt] == pytest.approx(row.largest, abs=1e-6)
        assert row.against == pytest.approx(mean(o[row.cell].change for o in control), abs=1e-6)
        assert row.difference == pytest.approx(row.mean - row.against)
        for name in ("gradient", "direct", "integrated", "coefficient"):
            expected = mean(getattr(one[row.cell], name) for one in single)
            assert getattr(row, name) == pytest.approx(expected, abs=1e-5)


def test_rows_are_sorted_by_mean_or_by_difference(llama, files):
    plain = effect_of_facts(llama, files[0], 0, top=5, candidates=20)
    means = [row.mean for row in plain.memories]
    assert len(means) == 5
    assert means == sorted(means)
    assert plain.sorted_by == "mean"
    assert plain.memories[0].against is None
    both = effect_of_facts(llama, files[0], 0, against=files[1], top=5, candidates=20)
    differences = [row.difference for row in both.memories]
    assert differences == sorted(differences)
    assert both.sorted_by == "difference"


def test_mean_estimates_choose_the_candidates(llama, files):
    found = effect_of_facts(llama, files[0], 0, top=6, candidates=6)
    single = alone(llama, FACTS)
    averaged = {cell: mean(one[cell].gradient for one in single) for cell in single[0]}
    best = sorted(averaged, key=lambda cell: -abs(averaged[cell]))[:3]
    assert set(best) <= {row.cell for row in found.memories}


def test_a_planted_memory_comes_first_for_every_fact(tmp_path):
    path = tmp_path / "facts.txt"
    path.write_text("w5 w9\nw2 w17 w30\n")
    for options in ({}, {"integrated": True, "steps": 5}):
        found = effect_of_facts(planted(), path, 0, candidates=8, **options)
        assert str(found.memories[0].cell) == "L1N7"
        assert found.memories[0].lowers == 1
        assert found.memories[0].value_top[0] == "w11"
        assert [fact.token for fact in found.prompts] == ["w11", "w11"]


def test_everything_stands_in_its_json_and_its_table(llama, files):
    found = effect_of_facts(llama, files[0], 0, against=files[1], candidates=4)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert content["prompts"] == 3
    assert content["empty_lines"] == 1
    assert content["against"]["prompts"] == 2
    assert [fact["token"] for fact in content["facts"]] == ["w20", "w21", "w20"]
    assert set(content["memories"][0]) >= {
        *("cell", "mean", "median", "lowers", "largest", "against", "difference"),
        *("gradient", "direct", "integrated", "value_top"),
    }
    table = str(found)
    assert "1 empty lines ignored" in table
    assert "difference" in table
    assert str(found.memories[0].cell) in table


def test_the_page_escapes_what_comes_from_the_file(llama, files):
    odd = files[0].with_name("<b>.tsv")
    files[0].rename(odd)
    assert "<b>" not in effect_of_facts(llama, odd, 0, candidates=2)._repr_html_()


@pytest.mark.parametrize(
    ("line", "says"),
    [("w5\tw6 w7", "not one token"), (" ".join(["w5"] * 64) + "\tw6", "65 tokens")],
)
def test_a_prompt_that_the_model_cannot_take_is_named_by_its_line(llama, tmp_path, line, says):
    path = tmp_path / "facts.tsv"
    path.write_text(f"w5\tw6\n{line}\n")
    with pytest.raises(CorpusError, match=rf"Line 2 of .*{says}"):
        effect_of_facts(llama, path, 0)


def test_steps_below_one_are_refused(llama, files):
    with pytest.raises(FfmemError, match="steps 0"):
        effect_of_facts(llama, files[0], 0, steps=0)
