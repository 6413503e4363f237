"""`ffmem effect` as people type it."""

import json

import pytest
from click.testing import CliRunner

from ffmem.cli import cli
from ffmem.errors import CorpusError, FfmemError, UnknownCell


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, ["effect", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.fixture
def facts(tmp_path):
    path = tmp_path / "facts.txt"
    path.write_text("The river\nA town\n")
    return path


def test_a_prompt_gives_a_table_or_json(model_folder):
    options = ("--top", 4, "--candidates", 9, "--cell", "L0N3", "--start", "none")
    table = run(model_folder, "The river", *options)
    content = json.loads(run(model_folder, "The river", *options, "--json"))
    assert len(content["memories"]) == 4
    assert content["candidates"] in (9, 10)
    assert all(memory["cell"] in table for memory in content["memories"])


def test_a_position_and_places_of_the_ablation_are_passed_on(model_folder):
    options = ("--start", "none", "--candidates", 3, "--position", 0, "--at", 0, "--json")
    content = json.loads(run(model_folder, "The river", *options))
    assert content["position"] == 0
    assert content["positions"] == [0]


def test_an_index_stands_for_its_model(model_folder, tiny_index):
    content = json.loads(
        run(tiny_index.folder, "The river", "--model", model_folder, "--candidates", 3, "--json")
    )
    assert content["ablation"] == "off"


def test_a_file_of_prompts_gives_a_table_or_json(model_folder, facts):
    options = ("--prompts", facts, "--against", facts, "--candidates", 5, "--start", "none")
    assert "2 prompts of" in run(model_folder, *options)
    content = json.loads(run(model_folder, *options, "--integrated", "--steps", 2, "--json"))
    assert content["prompts"] == 2
    assert all(abs(memory["difference"]) < 1e-9 for memory in content["memories"])


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("a", "--prompts", "facts.txt"),
        ("a", "--against", "facts.txt"),
        ("--prompts", "facts.txt", "--target", "b"),
        ("--prompts", "facts.txt", "--position", "0"),
        ("--prompts", "facts.txt", "--at", "0"),
        ("a", "--steps", "0"),
    ],
)
def test_what_does_not_go_together_is_wrong_usage(model_folder, arguments):
    assert "Error" in run(model_folder, *arguments, code=2)


def test_errors_are_answers(model_folder, tmp_path):
    with pytest.raises(UnknownCell, match="L99N0"):
        run(model_folder, "The river", "--cell", "L99N0")
    with pytest.raises(CorpusError, match="empty"):
        run(model_folder, "")
    with pytest.raises(CorpusError, match="No such file"):
        run(model_folder, "--prompts", tmp_path / "none.txt")


def test_several_cells_stand_between_commas_and_steps_need_integration(model_folder):
    options = ("--candidates", 0, "--cell", "L0N3,L1N4", "--json")
    found = json.loads(run(model_folder, "The river", *options))
    assert {memory["cell"] for memory in found["memories"]} == {"L0N3", "L1N4"}
    run(model_folder, "The river", "--steps", 5, code=2)


def test_a_memory_off_behind_the_position_is_refused(model_folder):
    with pytest.raises(FfmemError, match="cannot have an effect"):
        run(model_folder, "The river", "--at", 2, "--position", 1)
