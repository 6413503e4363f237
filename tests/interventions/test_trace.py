"""Traces against plain forward passes and the definitions, in several families; planted effects."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import ffmem
from ffmem.cells import Cell
from ffmem.errors import CorpusError, FfmemError, ModelError, StoreError
from ffmem.interventions.edits import Edits
from ffmem.interventions.forward import apply_edits, find_target, read_prompt
from ffmem.interventions.trace import continue_prompt, percentile, trace
from ffmem.progress import Progress
from tests.conftest import OURS, text_model
from tests.indexing.folders import indexed, write_corpus
from tests.interventions.planted import planted, with_start
from tests.test_cli import run
from tests.tiny import TINY, read, tiny, tiny_tokenizer

TEXT = "w5 w9 w2 w17 w30"
SOME = ("llama", "gpt2", "gemma2", "falcon", "opt post-norm", *OURS.values())


@pytest.fixture(scope="module", params=list(TINY))
def memories(request):
    return read(request.param)


def traced(memories, text=TEXT, edits=None, start=0, **options):
    index = options.pop("index", None)
    return trace(with_start(memories, start, index), text, edits, **options)


def best(logits):
    return int(logits.argmax())


def test_what_predicts_is_read_as_defined_at_any_position(memories):
    tokens = torch.tensor([[0, *(int(word[1:]) for word in TEXT.split())]])
    layers = memories.trace(tokens)
    for position in (2, -1):
        found = traced(memories, position=position)
        assert found.position == position % tokens.shape[1]
        for layer, plain in zip(found.layers, layers, strict=True):
            r, y, o = (
                vector[0, position][None]
                for vector in (plain.residual, plain.ff_output, plain.layer_output)
            )
            head = memories.head
            if not memories.layout.widths[layer.layer]:
                assert (layer.ff_top, layer.active, layer.memories) == ([], None, [])
                assert layer.residual_top == layer.output_top
                assert layer.case == "residual"
                continue
            tops = best(head.logits(r)), best(head.folded(y)), best(head.logits(o))
            assert tops == (
                layer.residual_top[0].id,
                layer.ff_top[0].id,
                layer.output_top[0].id,
            )
            expected = head.logits(o).softmax(dim=1)[0, tops[2]]
            assert layer.output_top[0].probability == pytest.approx(float(expected), rel=1e-4)
            assert (layer.case == "residual") == (tops[2] == tops[0] != tops[1])
            assert (layer.case == "agreement") == (tops[2] == tops[0] == tops[1])
            assert (layer.case == "ffn") == (tops[2] == tops[1] != tops[0])


def test_the_last_layers_output_is_the_models_own_prediction(memories):
    tokens = torch.tensor([[0, *(int(word[1:]) for word in TEXT.split())]])
    own = memories.logits(tokens)[0, -1].softmax(dim=0)
    chances = traced(memories).output_top
    assert [c.id for c in chances] == own.argsort(descending=True)[:10].tolist()
    assert_close(torch.tensor([c.probability for c in chances]), own.sort(descending=True)[0][:10])


def acting_values(memories, layer, plain):
    """What the coefficients of the last position multiply: in a lambda layer, made of the text."""
    if memories.has_values:
        return memories.output_directions(layer)
    return memories.values_at(layer, plain.ff_input[0], plain.ff_input.shape[1] - 1)


def test_contributions_of_all_memories_are_parts_of_y(memories):
    """Σ mᵢ · vᵢ, each as long as its contribution says, is y but for what is constant."""
    n = memories.layout.widths[0]
    found = traced(memories, top=n)
    tokens = torch.tensor([[0, *(int(word[1:]) for word in TEXT.split())]])
    plain = memories.trace(tokens)
    assert [layer.layer for layer in found.layers] == list(range(memories.n_layers))
    for number in memories.layout.memory_layers:
        layer, trace_ = found.layers[number], plain[number]
        assert len(layer.memories) == n
        sizes = [memory.contribution for memory in layer.memories]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(memory.share for memory in layer.memories) == pytest.approx(1)
        values = acting_values(memories, layer.layer, trace_)
        parts = torch.zeros(memories.hidden)
        for memory in layer.memories:
            number = Cell.parse(memory.cell).memory
            m = trace_.coefficients[0, -1, number]
            assert memory.coefficient == pytest.approx(float(m), abs=1e-5)
            v = values[number]
            length = (m * v).norm()
            parts += m * v * (memory.contribution / length if length > 0 else 0)
        if memories.row.post_norm is None and not memories.bias(layer.layer).any():
            assert_close(parts, trace_.ff_output[0, -1], rtol=1e-3, atol=1e-3)
        working = trace_.coefficients if trace_.gate is None else trace_.gate
        assert layer.active == pytest.approx(float((working[0, -1] > 0).float().mean()))


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "olmo2"])
def test_behind_a_post_norm_the_parts_add_up_to_y(name):
    memories = read(name)
    found = traced(memories, top=memories.layout.widths[0])
    tokens = torch.tensor([[0, *(int(word[1:]) for word in TEXT.split())]])
    for layer, plain in zip(found.layers, memories.trace(tokens), strict=True):
        values = memories.output_directions(layer.layer)
        parts = torch.zeros(memories.hidden)
        for memory in layer.memories:
            v = values[Cell.parse(memory.cell).memory]
            parts += np.sign(memory.coefficient) * memory.contribution * v / v.norm()
        assert_close(parts, plain.ff_output[0, -1], rtol=1e-3, atol=1e-4)


def test_what_stands_behind_the_position_does_not_matter(memories):
    whole, part = traced(memories, position=2), traced(memories, text="w5 w9")
    for one, other in zip(whole.layers, part.layers, strict=True):
        assert [c.id for c in one.output_top] == [c.id for c in other.output_top]


def test_a_planted_memory_dictates_and_switching_it_off_flips_the_prediction():
    found = traced(planted(), edits=Edits.of(off=["L1N7"]), generate=2)
    last = found.layers[-1]
    assert str(last.memories[0].cell) == "L1N7"
    assert last.memories[0].value_top[0] == "w11"
    assert last.case == "ffn"
    assert found.output_top[0].token == "w11"
    assert found.saturation == 1
    assert found.edited.output_top[0].token != "w11"
    assert found.generated.strip().startswith("w11")
    assert not found.edited_generated.strip().startswith("w11")


def test_a_prediction_that_never_changes_is_saturated_from_the_first_layer():
    memories = ffmem.load(tiny("gpt2"), tiny_tokenizer())
    for layer in range(memories.n_layers):
        memories.values(layer).zero_()
        memories.bank(layer).values.bias.zero_()
        memories.blocks[layer].attn.c_proj.weight.zero_()
        memories.blocks[layer].attn.c_proj.bias.zero_()
    found = traced(memories)
    assert found.saturation == 0
    assert {layer.case for layer in found.layers} <= {"residual", "agreement"}


def test_percentiles_come_from_the_index(tmp_path):
    memories = read("llama")
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "corpus.txt"), memories)
    found = traced(memories, start=index.manifest.start.id, index=index)
    for layer in found.layers:
        for memory in layer.memories:
            sample = index.sample(Cell.parse(memory.cell))
            share = np.mean([m <= memory.coefficient for m in sample.tolist()])
            assert memory.percentile == pytest.approx(share)
    assert len({memory.percentile for memory in found.layers[0].memories}) > 1
    assert traced(memories).layers[0].memories[0].percentile is None


def test_a_mean_edit_sets_the_mean_of_the_index(tmp_path):
    memories = read("llama")
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "corpus.txt"), memories)
    mean = index["L0N3"].stats.mean
    edited = traced(memories, edits=Edits.of(mean=["L0N3"], index=index)).edited
    by_hand = traced(memories, edits=Edits.of(set={"L0N3": mean})).edited
    assert edited == by_hand


def test_a_percentile_is_the_share_not_above():
    assert percentile([1.0, 2.0, 2.0, 3.0], 2.0) == 0.75
    assert percentile([], 2.0) is None


def test_the_page_escapes_what_comes_from_prompt_and_model():
    memories = read("llama")
    found = replace(traced(memories), tokens=["<script>"] * 6)
    assert "<script>" not in found._repr_html_()


def test_everything_of_a_trace_stands_in_its_json_and_its_table():
    found = traced(planted(), edits=Edits.of(off=["L1N7"], positions=[-1]), generate=3)
    content = found.to_dict()
    assert set(content) >= {
        *("tokens", "layers", "output_top", "edited_output_top", "generated"),
        *("edited_generated", "position", "saturation", "edits", "edited_layers"),
    }
    assert set(content["layers"][0]["memories"][0]) >= {
        *("cell", "coefficient", "contribution", "value_top", "percentile"),
    }
    unused = dict.fromkeys(("token", "sign", "margin", "weights"))
    edit = {"cell": "L1N7", "how": "off", "factor": 0, "constant": 0}
    assert content["edits"] == [edit | unused]
    assert content["positions"] == [5]
    assert content["generated_ended"] == "length"
    table = str(found)
    for part in ("L1N7 off at position 5 only", "w11", "in the last layer only"):
        assert part in table


@pytest.mark.parametrize(
    ("text", "message"), [("", "empty"), ("  \n", "no token"), (None, "NoneType"), (3, "int")]
)
def test_a_prompt_without_tokens_is_refused(text, message):
    with pytest.raises(CorpusError, match=message):
        read_prompt(with_start(read("llama")), text)


@pytest.mark.parametrize("number", [1e39, 1e30])
def test_an_edit_that_overflows_is_told_and_not_shown_as_numbers(number):
    with pytest.raises(ModelError, match="Activations overflow float32"):
        traced(read("llama"), edits=Edits.of(set={"L0N1": number}))


def test_notes_say_what_the_table_does_not():
    memories = planted()
    behind = Edits.of(off=["L1N7"], positions=[4])
    known = "w5 w9 w12 w17 w30"
    found = traced(memories, known, behind, position=2, generate=1)
    assert len(found.notes) == 2
    assert "follows the whole prompt" in str(found)
    assert "come after position 2" in str(found)
    assert found.edited.layers == found.plain.layers
    assert traced(memories, known, behind, position=4).notes == []


def test_how_a_continuation_was_sampled_is_kept():
    found = traced(planted(), generate=2, temperature=0.5, seed=3).to_dict()
    assert found["sampling"] == {"temperature": 0.5, "seed": 3}
    assert traced(planted(), generate=2).to_dict()["sampling"] is None


def test_its_repr_is_one_short_line():
    assert repr(traced(planted())) == "<TraceResult: <s> w5 w9 <unk> w17 [w30]>"


def test_a_prompt_past_the_context_is_refused():
    memories = read("llama")
    assert len(traced(memories, " ".join(["w5"] * 63)).tokens) == 64
    with pytest.raises(CorpusError, match="has 65 tokens"):
        traced(memories, " ".join(["w5"] * 64))


def test_a_target_of_several_tokens_is_refused_with_its_pieces():
    memories = read("llama")
    assert find_target(memories, "w11") == 11
    with pytest.raises(ModelError, match="'w5', 'w6'"):
        find_target(memories, "w5 w6")


@pytest.mark.parametrize("options", [{"top": 0}, {"generate": -1}, {"position": 6}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(FfmemError, match=r"must be|is not in the prompt"):
        traced(read("llama"), **options)


# The grid


@pytest.mark.parametrize("name", SOME)
def test_the_grid_is_a_trace_at_every_position(name):
    memories = read(name)
    edits = Edits.of(set={"L0N3": 2.0})
    found = trace(with_start(memories), TEXT, edits, grid=True)
    for position in range(len(found.tokens)):
        alone = trace(with_start(memories), TEXT, edits, position=position)
        for grid, found_alone in ((found.grid, alone.plain), (found.edited_grid, alone.edited)):
            for row, layer in zip(grid, found_alone.layers, strict=True):
                place = row[position]
                assert place.case == layer.case
                if not layer.ff_top:  # a layer without memories
                    assert place.ff is None
                    continue
                for one, other in (
                    (place.residual, layer.residual_top[0]),
                    (place.ff, layer.ff_top[0]),
                    (place.output, layer.output_top[0]),
                ):
                    assert (one.token, one.id) == (other.token, other.id)
                    assert one.probability == pytest.approx(other.probability, rel=1e-3)


def test_the_grid_is_in_json_and_table_only_when_it_is_asked_for():
    memories = planted()
    found = trace(with_start(memories), TEXT, grid=True)
    rows = found.to_dict()["grid"]
    assert [len(row) for row in rows] == [len(found.tokens)] * memories.n_layers
    assert set(rows[0][0]) == {"residual", "ff", "output", "case"}
    assert "at each position" in str(found)
    assert trace(with_start(memories), TEXT).to_dict()["grid"] is None
    assert found.to_dict()["edited_grid"] is None


# Continuations: a cache against the whole text read again for every token


def plain(memories, ids, n):
    """Greedy, the whole text read again each time."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(memories.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-n:]


def compare_with_plain(memories, monkeypatch, n, *positions):
    monkeypatch.setattr(memories.tokenizer, "eos", None)
    prompt = read_prompt(with_start(memories), "w5 w9 w2")
    many = {f"L0N{memory}": 4.0 for memory in range(0, memories.layout.widths[0], 2)}
    for edits in [Edits(), *(Edits.of(set=many, positions=places) for places in positions)]:
        with apply_edits(memories, edits):
            assert continue_prompt(memories, prompt, n).ids == plain(memories, prompt.ids, n)


def test_a_cache_changes_nothing_with_and_without_edits(memories, monkeypatch):
    compare_with_plain(memories, monkeypatch, 3, [0, 4])


@pytest.mark.parametrize("name", SOME)
def test_edits_act_on_what_is_written_or_where_they_are_told_to(name, monkeypatch):
    compare_with_plain(read(name), monkeypatch, 6, None, [1], [0, 4])


def test_the_same_seed_writes_the_same_text_and_another_does_not():
    memories = read("llama")
    prompt = read_prompt(with_start(memories), TEXT)
    texts = [continue_prompt(memories, prompt, 20, 2.0, seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_low_temperature_is_greedy():
    memories = read("llama")
    prompt = read_prompt(with_start(memories), TEXT)
    assert continue_prompt(memories, prompt, 8, 1e-3) == continue_prompt(memories, prompt, 8)


def test_the_end_of_text_token_ends_it_and_the_context_too():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    prompt = read_prompt(with_start(memories), TEXT)
    written = continue_prompt(memories, prompt, 1000)
    if written.ended == "end":
        memories.tokenizer.eos = None
        prompt = read_prompt(with_start(memories), TEXT)
        written = continue_prompt(memories, prompt, 1000)
    assert written.ended == "context"
    assert len(prompt.ids) + len(written.ids) == memories.context + 1
    memories.tokenizer.eos = written.ids[2]
    stopped = continue_prompt(memories, read_prompt(with_start(memories), TEXT), 1000)
    assert stopped.ended == "end"
    assert stopped.ids == written.ids[: written.ids.index(written.ids[2])]


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-300, float("nan"), float("inf")])
def test_a_temperature_must_be_one(temperature):
    memories = read("llama")
    with pytest.raises(FfmemError, match="Temperature"):
        continue_prompt(memories, read_prompt(with_start(memories), TEXT), 3, temperature)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_must_be_one(seed):
    memories = read("llama")
    with pytest.raises(FfmemError, match="Seed"):
        continue_prompt(memories, read_prompt(with_start(memories), TEXT), 3, 1.0, seed)


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_numbers_that_overflow_are_told(temperature):
    memories = read("llama")
    prompt = read_prompt(with_start(memories), TEXT)
    with (
        pytest.raises(FfmemError, match="Activations overflow float32"),
        apply_edits(memories, Edits.of(set={"L0N1": 1e39})),
    ):
        continue_prompt(memories, prompt, 3, temperature)


# The command


PROMPT = "The cat sat on the mat"


def traced_by_command(place, *arguments):
    code, out, error = run("trace", place, PROMPT, *arguments, "--json")
    assert code == 0, error
    return json.loads(out)


def test_the_json_is_the_contract(model_folder):
    content = traced_by_command(model_folder, "--top", "4", "--generate", "3", "--off", "L0N1,L1N2")
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
    content = traced_by_command(model_folder, "--set", "L0N3=2.5", "--at", "-1", "--position", "2")
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
    content = traced_by_command(tiny_index.folder, "--model", model_folder)
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
    assert "was built from a model" in error


def test_another_start_than_the_indexs_is_noted(tiny_index, model_folder):
    content = traced_by_command(tiny_index.folder, "--model", model_folder, "--start", "none")
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
    advice = "If it has moved, pass its location with "
    for command in (("trace", PROMPT), ("effect", PROMPT), ("neighbours", "L0N1")):
        code, _, error = run(command[0], folder, command[1])
        assert code == 1
        assert f"{advice}--model." in error
    with pytest.raises(ModelError, match=f"{advice}`model`"):
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
    advice = r"to a folder and pass it with `model`\. In Python, you can also pass ffmem\.load\("
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
def test_what_is_no_model_is_refused(place):
    with pytest.raises(
        FfmemError, match=r"trace: model_or_index is .* It must be Memories \| Index"
    ):
        ffmem.trace(place, PROMPT)


def test_an_edit_without_effect_says_so():
    says = "No change: the edited coefficients already had these values here."
    assert says in str(traced(read("llama"), edits=Edits.of(scale={"L0N0": 1.0})))
    assert says not in str(traced(read("llama"), edits=Edits.of(scale={"L0N0": 100.0})))


def test_unknown_words_of_prompts_are_named_once(tmp_path):
    prompt = "w3 zebra w5 <unk> zebra lion w7"
    named = "Not in the model's vocabulary, so read as unknown: 'zebra', 'lion'. "
    memories = read("llama")
    assert ffmem.trace(memories, prompt).notes[0].startswith(named)
    assert ffmem.trace(memories, "w3 w5 <unk>").notes == []
    few = {"candidates": 1, "top": 1}
    assert ffmem.effect(memories, prompt, **few).notes[0].startswith(named)
    (tmp_path / "prompts.txt").write_text("w3 zebra w5\nw3 w4\nlion zebra w4\n")
    assert (
        ffmem.effect(memories, prompts=tmp_path / "prompts.txt", **few).notes[0].startswith(named)
    )


def test_a_target_that_the_model_does_not_know_is_refused():
    with pytest.raises(ModelError, match="does not know the target 'zebra', which it reads as"):
        ffmem.effect(read("llama"), "w3 w5", target="zebra", candidates=1, top=1)


def test_the_start_token_that_ffmem_chooses_is_printed(tiny_index, model_folder, capsys):
    memories = read("llama")
    ffmem.trace(memories, "w3 w5", progress=Progress())
    assert re.fullmatch(
        r"Start token: \S+ \(lowest loss of 3 on 6 English sentences\)\. Choose another with"
        r" --start\.\n",
        capsys.readouterr().err,
    )
    ffmem.trace(memories, "w3 w5", start="eos", progress=Progress())
    assert "Start token" not in capsys.readouterr().err
    ffmem.trace(tiny_index, "w3 w5", model=model_folder, progress=Progress())
    assert "Start token" not in capsys.readouterr().err


def test_a_memory_that_is_off_anyway_is_named():
    memories = ffmem.load(tiny("opt"), tiny_tokenizer())
    with torch.no_grad():
        memories.bank(1).keys.bias[7] = -1000.0
        memories.bank(1).keys.bias[8] = 1.0
    says = "The coefficient is 0 at every position of this prompt anyway: L1N7."
    assert says in traced(memories, edits=Edits.of(off=["L1N7"])).notes
    assert says not in traced(memories, edits=Edits.of(off=["L1N7", "L1N8"])).notes
