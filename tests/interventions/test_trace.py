"""Traces against plain forward passes and the definitions, in several families; planted effects."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import ffmem
from ffmem.errors import CorpusError, FfmemError, ModelError
from ffmem.interventions.edits import Edits
from ffmem.interventions.prompts import find_target, read_prompt
from ffmem.interventions.trace import percentile, trace
from tests.indexing.folders import indexed, write_corpus
from tests.interventions.planted import planted, with_start
from tests.tiny import TINY, read, tiny, tiny_tokenizer

TEXT = "w5 w9 w2 w17 w30"


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
            m = trace_.coefficients[0, -1, memory.cell.memory]
            assert memory.coefficient == pytest.approx(float(m), abs=1e-5)
            v = values[memory.cell.memory]
            length = (m * v).norm()
            parts += m * v * (memory.contribution / length if length > 0 else 0)
        if memories.row.post_norm is None and not memories.bias(layer.layer).any():
            assert_close(parts, trace_.ff_output[0, -1], rtol=1e-3, atol=1e-3)
        working = trace_.coefficients if trace_.gate is None else trace_.gate
        assert layer.active == pytest.approx(float((working[0, -1] > 0).float().mean()))


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "olmo2"])
def test_behind_a_post_norm_the_parts_add_up_to_y(name):
    memories = ffmem.load(tiny(name), tiny_tokenizer())
    found = traced(memories, top=memories.layout.widths[0])
    tokens = torch.tensor([[0, *(int(word[1:]) for word in TEXT.split())]])
    for layer, plain in zip(found.layers, memories.trace(tokens), strict=True):
        values = memories.output_directions(layer.layer)
        parts = torch.zeros(memories.hidden)
        for memory in layer.memories:
            v = values[memory.cell.memory]
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
    assert found.generated.text.startswith("w11")
    assert not found.edited_generated.text.startswith("w11")


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
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "corpus.txt"), memories)
    found = traced(memories, start=index.manifest.start.id, index=index)
    for layer in found.layers:
        for memory in layer.memories:
            sample = index.sample(memory.cell)
            share = np.mean([m <= memory.coefficient for m in sample.tolist()])
            assert memory.percentile == pytest.approx(share)
    assert len({memory.percentile for memory in found.layers[0].memories}) > 1
    assert traced(memories).layers[0].memories[0].percentile is None


def test_a_mean_edit_sets_the_mean_of_the_index(tmp_path):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "corpus.txt"), memories)
    mean = index["L0N3"].stats.mean
    edited = traced(memories, edits=Edits.of(mean=["L0N3"], index=index)).edited
    by_hand = traced(memories, edits=Edits.of(set={"L0N3": mean})).edited
    assert edited == by_hand


def test_a_percentile_is_the_share_not_above():
    assert percentile([1.0, 2.0, 2.0, 3.0], 2.0) == 0.75
    assert percentile([], 2.0) is None


def test_the_page_escapes_what_comes_from_prompt_and_model():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
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
    assert content["edits"] == [{"cell": "L1N7", "how": "off", "factor": 0, "constant": 0}]
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
        read_prompt(with_start(ffmem.load(tiny("llama"), tiny_tokenizer())), text)


@pytest.mark.parametrize("number", [1e39, 1e30])
def test_an_edit_that_overflows_is_told_and_not_shown_as_numbers(number):
    with pytest.raises(ModelError, match="cannot hold"):
        traced(ffmem.load(tiny("llama"), tiny_tokenizer()), edits=Edits.of(set={"L0N1": number}))


def test_notes_say_what_the_table_does_not():
    memories = planted()
    behind = Edits.of(off=["L1N7"], positions=[4])
    found = traced(memories, edits=behind, position=2, generate=1)
    assert len(found.notes) == 2
    assert "follows the whole prompt" in str(found)
    assert "come after position 2" in str(found)
    assert found.edited.layers == found.plain.layers
    assert traced(memories, edits=behind, position=4).notes == []


def test_how_a_continuation_was_sampled_is_kept():
    found = traced(planted(), generate=2, temperature=0.5, seed=3).to_dict()
    assert found["sampling"] == {"temperature": 0.5, "seed": 3}
    assert traced(planted(), generate=2).to_dict()["sampling"] is None


def test_its_repr_is_one_short_line():
    assert repr(traced(planted())) == "<TraceResult: <s> w5 w9 <unk> w17 [w30]>"


def test_a_prompt_past_the_context_is_refused():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    assert len(traced(memories, " ".join(["w5"] * 63)).tokens) == 64
    with pytest.raises(CorpusError, match="has 65 tokens"):
        traced(memories, " ".join(["w5"] * 64))


def test_a_target_of_several_tokens_is_refused_with_its_pieces():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    assert find_target(memories, "w11") == 11
    with pytest.raises(ModelError, match="'w5', 'w6'"):
        find_target(memories, "w5 w6")


@pytest.mark.parametrize("options", [{"top": 0}, {"generate": -1}, {"position": 6}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(FfmemError, match=r"must be|is not in the prompt"):
        traced(ffmem.load(tiny("llama"), tiny_tokenizer()), **options)
