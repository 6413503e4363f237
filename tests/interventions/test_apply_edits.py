"""Edited coefficients against weights rewritten and tensors patched by hand, in every family."""

import copy

import pytest
import torch
from torch.testing import assert_close

import ffmem
from ffmem.errors import UnknownCell
from ffmem.interventions.edits import Edits
from ffmem.interventions.forward import apply_edits
from ffmem.networks.memories import FactoredLinear
from tests.tiny import TINY, read, tiny, tiny_tokenizer

TOKENS = torch.tensor([[5, 9, 2, 17, 30], [8, 8, 1, 40, 3]])


@pytest.fixture(scope="module", params=list(TINY))
def memories(request):
    return read(request.param)


def hooks(model):
    """How many hooks of any kind hang on a model."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


def rewritten(memories, changes):
    """Logits of a copy of the model in which values, or a lambda layer's keys, were multiplied."""
    other = ffmem.load(copy.deepcopy(memories.model), memories.tokenizer)
    for (layer, memory), factor in changes.items():
        bank = other.bank(layer)
        linear = bank.values if other.has_values else bank.keys
        rows = linear.weight if isinstance(linear, FactoredLinear) else other.values(layer)
        rows[memory] *= factor
    return other.logits(TOKENS)


def patched(memories, layer, change):
    """Logits of the model while `change` rewrites one layer's coefficients as (batch, position)."""
    shape = (*TOKENS.shape, memories.layout.widths[0])

    def hook(_, args):
        return (change(args[0].clone().reshape(shape)).reshape(args[0].shape), *args[1:])

    handle = memories.bank(layer).values.register_forward_pre_hook(hook)
    try:
        return memories.logits(TOKENS)
    finally:
        handle.remove()


def test_off_and_scale_are_a_rewritten_value(memories):
    last = memories.n_layers - 1
    edits = Edits.of(off=["L0N3", f"L{last}N0"], scale={"L0N4": -2.5})
    with apply_edits(memories, edits):
        found = memories.logits(TOKENS)
    expected = rewritten(memories, {(0, 3): 0, (last, 0): 0, (0, 4): -2.5})
    assert not torch.equal(found, memories.logits(TOKENS))
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_set_is_the_coefficient_itself(memories):
    def change(m):
        m[..., 7] = 1.5
        return m

    with apply_edits(memories, Edits.of(set={"L1N7": 1.5})):
        found = memories.logits(TOKENS)
    assert torch.equal(found, patched(memories, 1, change))


def test_positions_are_edited_alone(memories):
    def change(m):
        m[:, [0, 3], 7] = 2.0
        return m

    with apply_edits(memories, Edits.of(set={"L0N7": 2.0}, positions=[0, 3])):
        found = memories.logits(TOKENS)
    assert torch.equal(found, patched(memories, 0, change))


def test_the_model_is_left_exactly_as_it_was(memories):
    before, hanging = memories.logits(TOKENS), hooks(memories.model)
    weights = memories.model.state_dict()
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    with (
        pytest.raises(IndexError),
        apply_edits(memories, Edits.of(off=["L0N1"], positions=[1])),
    ):
        memories.logits(TOKENS * 1000)  # far outside the vocabulary
    assert hooks(memories.model) == hanging
    assert torch.equal(memories.logits(TOKENS), before)
    assert all(torch.equal(weights[name], copies[name]) for name in weights)


def test_edits_within_edits_act_together_and_end_apart():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    both = rewritten(memories, {(0, 1): 0, (0, 2): 0})
    one = rewritten(memories, {(0, 1): 0})
    with apply_edits(memories, Edits.of(off=["L0N1"])):
        with apply_edits(memories, Edits.of(off=["L0N2"])):
            assert_close(memories.logits(TOKENS), both, rtol=1e-5, atol=1e-5)
        assert_close(memories.logits(TOKENS), one, rtol=1e-5, atol=1e-5)


def test_an_unknown_memory_hangs_no_hook():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    with pytest.raises(UnknownCell), apply_edits(memories, Edits.of(off=["L0N1", "L99N0"])):
        pass
    assert hooks(memories.model) == 0


def test_a_half_precision_model_stays_in_its_dtype():
    memories = ffmem.load(tiny("llama").bfloat16(), tiny_tokenizer())
    with apply_edits(memories, Edits.of(set={"L0N1": 0.3})):
        found = memories.trace(TOKENS)[0]
    assert found.coefficients.dtype == torch.bfloat16
    assert (found.coefficients[..., 1] == torch.tensor(0.3).bfloat16()).all()


def test_whoever_reads_before_the_edit_keeps_what_the_model_computed():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    plain = memories.trace(TOKENS)[0].coefficients
    seen = []
    with (
        memories.read_coefficients(lambda layer, m, gate: seen.append(m)),
        apply_edits(memories, Edits.of(off=["L0N1"])),
    ):
        memories.forward(TOKENS)
    assert torch.equal(seen[0], plain)
