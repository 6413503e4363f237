"""`ffmem trace` as people and programs use it: the contract's JSON, the table, the errors."""

import json
import re
import shutil

import pytest

import ffmem
from ffmem.errors import ModelError, StoreError
from tests.conftest import text_model
from tests.test_cli import run
from tests.tiny import tiny, tiny_tokenizer

PROMPT = "The cat sat on the mat"


def traced(place, *arguments):
    code, out, error = run("trace", place, PROMPT, *arguments, "--json")
    assert code == 0, error
    return json.loads(out)


def test_the_json_is_the_contract(model_folder):
    content = traced(model_folder, "--top", "4", "--generate", "3", "--off", "L0N1,L1N2")
    assert content["tokens"]
    for layer, found in enumerate(content["layers"]):
        assert found["layer"] == layer
        assert found["case"] in {"residual", "agreement", "ffn", "composition"}
        assert 0 <= found["active"] <= 1
        for name in ("residual_top", "ff_top", "output_top"):
            assert len(found[name]) == 4
            assert set(found[name][0]) == {"token", "id", "probability"}
        assert len(found["memories"]) == 4
        assert {"cell", "coefficient", "contribution", "value_top"} <= set(found["memories"][0])
    assert content["output_top"] == content["layers"][-1]["output_top"]
    assert content["edited_output_top"] == content["edited_layers"][-1]["output_top"]
    assert [edit["cell"] for edit in content["edits"]] == ["L0N1", "L1N2"]
    assert content["positions"] is None
    assert isinstance(content["generated"], str)
    assert isinstance(content["edited_generated"], str)


def test_the_command_and_the_function_say_the_same(model_folder):
    content = traced(model_folder, "--set", "L0N3=2.5", "--at", "-1", "--position", "2")
    found = ffmem.trace(model_folder, PROMPT, set={"L0N3": 2.5}, positions=[-1], position=2)
    assert content == found.to_dict()


def test_a_list_of_prompts_gives_a_list_and_a_file_one_line_of_json_each(model_folder, tmp_path):
    prompts = [PROMPT, "A river runs"]
    found = ffmem.trace(model_folder, prompts, off=["L0N3"], top=2)
    assert found == [ffmem.trace(model_folder, one, off=["L0N3"], top=2) for one in prompts]
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    options = ("--prompts", tmp_path / "prompts.txt", "--off", "L0N3", "--top", "2")
    code, out, error = run("trace", model_folder, *options)
    assert code == 0, error
    assert [json.loads(line) for line in out.splitlines()] == [one.to_dict() for one in found]
    assert run("trace", model_folder, PROMPT, *options)[0] == 2
    assert run("trace", model_folder)[0] == 2


def test_an_index_adds_percentiles_and_its_own_start(tiny_index, model_folder):
    content = traced(tiny_index.folder, "--model", model_folder)
    assert content["layers"][0]["memories"][0]["percentile"] is not None
    start = tiny_index.manifest.start.token
    assert (content["tokens"][0] == start) == (start is not None)


def test_the_table_names_every_layer_and_the_prediction(model_folder):
    code, out, _ = run("trace", model_folder, PROMPT)
    assert code == 0
    assert "predicts" in out
    assert "The prediction " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--off", "L99N0"], "There is no memory L99N0"),
        (["--off", "nonsense"], "is not the name of a memory"),
        (["--off", "L0N1", "--scale", "0.1=2"], "edited twice"),
        (["--mean", "L0N1"], "stored in an index"),
        (["--position", "99"], "Position 99"),
        (["--off", "L0N1", "--at", "50"], "Position 50"),
        (["--start", "no such token"], "is not a single token"),
        (["--generate", "2", "--temperature", "0"], "Temperature 0"),
    ],
)
def test_wrong_input_is_told(model_folder, arguments, message):
    code, out, error = run("trace", model_folder, PROMPT, *arguments)
    assert code == 1
    assert message in error
    assert not out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "L0N1"],
        ["--scale", "L0N1=x"],
        ["--set", "L0N1=inf"],
        ["--set", "L0N1=1", "--set", "L0N1=2"],
        ["--off", ""],
        ["--off", "L0N1,"],
        ["--at", "0"],
        ["--temperature", "1"],
        ["--generate", "2", "--seed", "5"],
    ],
)
def test_wrong_numbers_are_wrong_usage(model_folder, arguments):
    assert run("trace", model_folder, PROMPT, *arguments)[0] == 2


def test_a_wrong_place_is_told_before_anything_is_loaded():
    code, _, error = run("trace", "no/such/place/at/all", PROMPT)
    assert code == 1
    assert "no such file or folder" in error


def test_an_empty_prompt_and_a_long_one_are_refused(model_folder):
    for prompt, message in (("", "empty"), ("cat " * 500, "the model reads")):
        code, _, error = run("trace", model_folder, prompt)
        assert code == 1
        assert message in error


def test_an_index_of_another_model_is_refused(ungated_index, model_folder):
    code, _, error = run("trace", ungated_index.folder, PROMPT, "--model", model_folder)
    assert code == 1
    assert "was made with a model" in error


def test_another_start_than_the_indexs_is_noted(tiny_index, model_folder):
    content = traced(tiny_index.folder, "--model", model_folder, "--start", "none")
    assert ("index whose sentences start with" in "".join(content["notes"])) == (
        tiny_index.manifest.start.id is not None
    )


def test_a_memory_that_the_index_lacks_is_told_before_the_model_is_loaded(tiny_index):
    code, _, error = run("trace", tiny_index.folder, PROMPT, "--mean", "L99N0")
    assert code == 1
    assert "There is no memory L99N0" in error
    assert "Loading" not in error


def test_a_model_that_has_moved_is_told_with_the_option_that_helps(
    model_folder, corpus_file, tmp_path
):
    moved, folder = tmp_path / "model", tmp_path / "index"
    shutil.copytree(model_folder, moved)
    index = ffmem.index(moved, ffmem.Corpus(str(corpus_file), limit=3), folder, t=3, threads=1)
    moved.rename(tmp_path / "elsewhere")
    advice = "If it has moved, pass its location with --model (model= in Python)."
    for command in (("trace", PROMPT), ("effect", PROMPT), ("neighbours", "L0N1")):
        code, _, error = run(command[0], folder, command[1])
        assert code == 1
        assert advice in error
    with pytest.raises(ModelError, match=re.escape(advice)):
        ffmem.extend(folder, corpus_file)
    assert ffmem.trace(index, PROMPT, model=tmp_path / "elsewhere")


def test_the_index_of_a_model_in_memory_is_traced_with_that_model(tiny_index, tokenizer):
    memories = ffmem.load(text_model("llama"), tokenizer)
    for index in (tiny_index, tiny_index.folder):
        assert "".join(ffmem.trace(index, PROMPT, model=memories).tokens).endswith(PROMPT)
        assert ffmem.neighbours(index, "L0N1", model=memories)
    other = ffmem.load(tiny("llama", 1), tiny_tokenizer())
    with pytest.raises(StoreError, match=f"hash {memories.fingerprint()}; .*{other.fingerprint()}"):
        ffmem.trace(tiny_index, PROMPT, model=other)


def test_the_index_of_a_model_in_memory_says_how_to_give_the_model(
    tiny_index, corpus_file, tmp_path
):
    advice = r"pass model=ffmem\.load\(model, tokenizer\)\. On the command line, .* with --model\.$"
    calls = [
        lambda: ffmem.trace(tiny_index, PROMPT),
        lambda: ffmem.effect(tiny_index, PROMPT),
        lambda: ffmem.neighbours(tiny_index, "L0N1"),
        lambda: ffmem.edit(tiny_index, tmp_path / "edited", off=["L0N1"], corpus=None),
        lambda: ffmem.extend(tiny_index.folder, corpus_file),
        lambda: ffmem.experiment("agreement", tiny_index, tmp_path / "figures"),
    ]
    for call in calls:
        with pytest.raises(ModelError, match=advice):
            call()
    code, _, error = run("trace", tiny_index.folder, PROMPT)
    assert code == 1
    assert error.startswith(
        f"Error: The index {tiny_index.folder} was built from a model in memory"
    )


@pytest.mark.parametrize("place", [None, 5, ["a"]])
def test_what_is_no_model_is_a_type_error(place):
    with pytest.raises(TypeError, match="Expected a model or an index"):
        ffmem.trace(place, PROMPT)
