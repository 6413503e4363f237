"""Edits written into weights against the same edits of coefficients, in every family."""

import pytest
import torch
from torch.testing import assert_close

import ffmem
from ffmem.errors import FfmemError, ModelError, UnknownCell
from ffmem.interventions.checkpoint import _share_weights, edit_weights
from ffmem.interventions.edits import Edits
from ffmem.interventions.forward import apply_edits
from ffmem.models.families import FAMILIES
from tests.interventions.checkpoints import (
    TOKENS,
    plain_logits,
    saved,
    stored,
    without_bias,
    write_edits,
)
from tests.tiny import TINY, tiny, tiny_tokenizer

SWITCHED = [name for name in TINY if FAMILIES[TINY[name].model_type].bias_flag and " " not in name]


def loaded(name):
    return ffmem.load(tiny(name), tiny_tokenizer())


def under(memories, edits):
    """Return the logits of a model while its coefficients are edited."""
    with apply_edits(memories, edits):
        return memories.logits(TOKENS)


@pytest.mark.parametrize("name", list(TINY))
def test_a_saved_checkpoint_predicts_as_under_the_edit_of_coefficients(name, tmp_path):
    memories = loaded(name)
    last = memories.n_layers - 1
    asked = {"off": ["L0N3", f"L{last}N0"], "scale": {"L0N4": -2.5}}
    has_bias = getattr(memories.bank(0).values, "bias", None) is not None
    if has_bias or memories.row.bias_flag is not None:
        asked["set"] = {"L1N7": 1.5, "L1N8": -0.5}
    else:
        with pytest.raises(ModelError, match=r"Cannot write L1N7 = 1\.5.*off and scale can"):
            edit_weights(memories, Edits.of(set={"L1N7": 1.5}))
    found = write_edits(memories, tmp_path / "out", **asked)
    expected = under(memories, Edits.of(**asked))
    assert not torch.allclose(expected, memories.logits(TOKENS), atol=1e-3)
    assert_close(plain_logits(tmp_path / "out"), expected, rtol=2e-5, atol=2e-5)
    assert (found.flag is not None) == ("set" in asked and not has_bias)


@pytest.mark.parametrize("name", SWITCHED)
def test_a_switched_on_bias_changes_nothing_by_itself(name, tmp_path):
    memories = ffmem.load(without_bias(name), tiny_tokenizer())
    assert memories.bank(0).values.bias is None
    other = ffmem.load(_share_weights(memories.model, memories.row.bias_flag), tiny_tokenizer())
    assert other.bank(0).values.bias is not None
    assert torch.equal(other.logits(TOKENS), memories.logits(TOKENS))
    edits = {"set": {"L0N3": 2.0}, "off": ["L1N1"]}
    found = write_edits(memories, tmp_path / "out", **edits)
    assert found.flag == memories.row.bias_flag
    expected = under(memories, Edits.of(**edits))
    assert_close(plain_logits(tmp_path / "out"), expected, rtol=2e-5, atol=2e-5)


def test_every_switch_gives_a_bias_and_families_without_one_have_none():
    assert {FAMILIES[TINY[name].model_type].bias_flag for name in SWITCHED} == {
        *("mlp_bias", "use_bias", "bias", "enable_bias")
    }


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_model_itself_is_never_touched(name):
    memories = loaded(name)
    weights = {key: tensor.clone() for key, tensor in memories.model.state_dict().items()}
    config = memories.model.config.to_dict()
    logits = memories.logits(TOKENS)
    model = edit_weights(memories, Edits.of(off=["L0N1"], set={"L1N2": 3.0})).model
    assert model is not memories.model
    assert torch.equal(memories.logits(TOKENS), logits)
    assert memories.model.config.to_dict() == config
    assert memories.model.state_dict().keys() == weights.keys()
    assert all(torch.equal(memories.model.state_dict()[key], weights[key]) for key in weights)


def test_a_twin_shares_all_but_the_rewritten_layers():
    memories = loaded("gpt2")
    model = edit_weights(memories, Edits.of(off=["L1N1"])).model
    apart = [
        name
        for (name, one), other in zip(
            memories.model.named_parameters(), model.parameters(), strict=True
        )
        if one.data_ptr() != other.data_ptr()
    ]
    assert apart == ["transformer.h.1.mlp.c_proj.weight"]


def test_the_rewritten_numbers_are_those_of_the_definition():
    memories = loaded("gpt2")
    v, b = memories.values(0).double(), memories.bias(0).double()
    edits = Edits.of(off=["L0N1"], scale={"L0N2": 0.3}, set={"L0N5": 2.0, "L0N6": -1.0})
    other = ffmem.load(edit_weights(memories, edits).model, tiny_tokenizer())
    after = other.values(0)[[1, 2, 5, 6]]
    expected = torch.stack([0 * v[1].abs(), 0.3 * v[2], 0 * v[5].abs(), 0 * v[6].abs()])
    assert torch.equal(after, expected.float())
    assert not torch.signbit(after[0]).any()
    assert torch.equal(other.bias(0), (b + (2.0 * v[5] - 1.0 * v[6])).float())
    rest = [memory for memory in range(len(v)) if memory not in (1, 2, 5, 6)]
    assert torch.equal(other.values(0)[rest], memories.values(0)[rest])


def test_set_to_zero_needs_no_bias():
    edited = edit_weights(loaded("qwen2"), Edits.of(set={"L0N1": 0.0}))
    assert edited.flag is None
    assert not any(name.endswith("down_proj.bias") for name in edited.model.state_dict())


def test_values_shared_between_layers_are_refused():
    model = tiny("llama")
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight
    memories = ffmem.load(model, tiny_tokenizer())
    with pytest.raises(ModelError, match=r"layer 1 are shared: .*layers\.0.*layers\.1"):
        edit_weights(memories, Edits.of(off=["L1N1"]))


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (Edits.of(off=["L0N1"], positions=[2]), "Weights act at every position"),
        (Edits.of(), "nothing to edit"),
        (Edits.of(off=["L9N1"]), "There is no memory L9N1"),
        (Edits.of(scale={"L0N1": 1e39}), "numbers that torch.float32 cannot hold"),
    ],
)
def test_what_weights_cannot_say_is_refused(edits, message):
    with pytest.raises(FfmemError, match=message):
        edit_weights(loaded("llama"), edits)
    assert issubclass(UnknownCell, FfmemError)


def test_a_model_cast_in_memory_is_refused(tmp_path):
    folder = saved(tiny("llama").bfloat16(), tmp_path / "model")
    with pytest.raises(ModelError, match="not how they are stored"):
        edit_weights(ffmem.load(folder), Edits.of(off=["L0N1"]))
    assert stored(folder).dtype == torch.bfloat16


def test_a_half_precision_checkpoint_stays_so_and_its_rounding_is_told(tmp_path):
    memories = stored(saved(tiny("llama").bfloat16(), tmp_path / "model"))
    found = write_edits(memories, tmp_path / "out", scale={"L0N1": 0.3}, set={"L0N2": 1.7})
    assert any("stored in bfloat16" in note for note in found.notes)
    assert 0 < found.rounding < 2**-8
    after = stored(tmp_path / "out")
    assert after.dtype == torch.bfloat16
    exact = 0.3 * memories.values(0)[1].double()
    assert torch.equal(after.values(0)[1], exact.bfloat16())
    halved = write_edits(memories, tmp_path / "exact", scale={"L0N1": 0.5})
    assert (halved.rounding, halved.notes) == (0, [])


def test_an_edit_of_a_value_that_is_gone_is_told(tmp_path):
    write_edits(loaded("gpt2"), tmp_path / "one", off=["L0N1"])
    found = write_edits(stored(tmp_path / "one"), tmp_path / "two", set={"L0N1": 4.0})
    assert found.notes == [
        "The value of L0N1 was all zeros: L0N1 = 4 has no effect.",
        "The weights do not change.",
    ]
