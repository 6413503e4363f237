"""Passes with changed coefficients against whole passes, weights and tensors changed by hand."""

import copy

import pytest
import torch
from torch.testing import assert_close

import ffmem
from ffmem.cells import Cell
from ffmem.errors import UnknownCell
from ffmem.interventions.coefficients import coefficients_along
from ffmem.interventions.edits import Edits
from ffmem.interventions.forward import apply_edits
from ffmem.interventions.partial_forward import PartialForward, log_probabilities, log_probability
from ffmem.networks.memories import FactoredLinear
from tests.conftest import OURS
from tests.tiny import TINY, read, tiny, tiny_tokenizer

IDS = [0, 5, 9, 2, 17, 30, 8]
AT = 5

SOME = ("llama", "gpt2", "opt", "bloom", "falcon", "gemma2", "opt post-norm", *OURS.values())
"""One of each way to build a block; what does not depend on the family is tested on these."""


@pytest.fixture(scope="module", params=list(TINY))
def memories(request):
    return read(request.param)


@pytest.fixture(scope="module", params=SOME)
def some(request):
    return read(request.param)


def traces_left(model):
    """Every hook and every replaced forward that hangs on a model."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = sum(len(getattr(module, name)) for module in model.modules() for name in names)
    return hooks, [name for name, module in model.named_modules() if "forward" in vars(module)]


def whole(memories, layer, change):
    """The last layer's output at the position, of a whole pass with one layer changed."""
    shape = (1, len(IDS), memories.layout.widths[0])

    def hook(_, args):
        return (change(args[0].clone().reshape(shape)).reshape(args[0].shape), *args[1:])

    handle = memories.bank(layer).values.register_forward_pre_hook(hook)
    try:
        return memories.trace(torch.tensor([IDS]))[-1].layer_output[0, AT]
    finally:
        handle.remove()


def halved(m):
    return m * torch.linspace(-1, 1, m.shape[-1])


def halved_rows(rows):
    return halved(rows.coefficients)


def test_from_any_layer_up_is_a_whole_pass(memories):
    forward = PartialForward(memories, IDS, AT)
    for changed in memories.layout.memory_layers:
        expected = whole(memories, changed, halved)
        assert not torch.allclose(expected, forward.output[0], atol=1e-3)
        for lowest in {0, changed}:
            with torch.no_grad():
                found = forward.run(lowest, 3, {changed: halved_rows})
            size = float(expected.abs().max())
            assert_close(found, expected.expand(3, -1), rtol=0, atol=1e-5 * max(size, 1))


def test_rows_are_changed_apart(some):
    memories = some
    last = memories.n_layers - 1

    def second_only(rows):
        second = rows.tokens // (AT + 1) == 1
        return torch.where(second[:, None], halved_rows(rows), rows.coefficients)

    forward = PartialForward(memories, IDS, AT)
    with torch.no_grad():
        found = forward.run(0, 3, {last: second_only})
    size = max(1, float(found.abs().max()))
    assert_close(found[[0, 2]], forward.output.expand(2, -1), rtol=0, atol=1e-5 * size)
    assert_close(found[1], whole(memories, last, halved), rtol=0, atol=1e-5 * size)


def test_nothing_is_left_behind_even_after_an_exception(some):
    memories = some
    tokens = torch.tensor([IDS])
    before, hanging = memories.logits(tokens), traces_left(memories.model)
    forward = PartialForward(memories, IDS, AT)

    def broken(_):
        assert traces_left(memories.model) != hanging
        raise RuntimeError("on purpose")

    last = memories.n_layers - 1
    with pytest.raises(RuntimeError, match="on purpose"):
        forward.run(last, 2, {last: broken})
    with torch.no_grad():
        forward.run(last, 2, {last: halved_rows})
    assert traces_left(memories.model) == hanging
    assert torch.equal(memories.logits(tokens), before)


def test_a_forward_that_others_put_there_is_put_back():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    block = memories.blocks[0]
    theirs = block.forward
    block.forward = theirs
    PartialForward(memories, IDS, AT)
    assert vars(block)["forward"] is theirs


def test_log_p_is_the_models_own(memories):
    forward = PartialForward(memories, IDS, AT)
    expected = memories.logits(torch.tensor([IDS]))[0, AT].double().log_softmax(dim=0)
    found = log_probabilities(memories.head, forward.output)[0]
    assert_close(found, expected, rtol=0, atol=1e-4)
    assert forward.skips_blocks
    many = log_probability(memories.head, forward.output.repeat(130, 1), 7)
    assert_close(many, expected[7].expand(130), rtol=0, atol=1e-4)


def test_a_model_whose_layers_pass_on_more_than_their_output_runs_as_a_whole():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    first, last = memories.blocks[0], memories.blocks[-1]
    seen = []
    handles = [
        first.register_forward_pre_hook(lambda _, args: seen.clear()),
        first.self_attn.register_forward_hook(lambda _, args, output: seen.append(output[0])),
        last.mlp.register_forward_hook(lambda _, args, output: output + sum(seen)),
    ]
    try:
        forward = PartialForward(memories, IDS, AT)
        found = forward.run(1, 2, {1: lambda rows: torch.zeros_like(rows.coefficients)})
        with memories.banks[1].editing(lambda bank, m, tokens: torch.zeros_like(m)):
            expected = memories.trace(torch.tensor([IDS[: AT + 1]]))[-1].layer_output[0, -1]
        assert not forward.skips_blocks
        assert_close(found, expected.expand(2, -1))
    finally:
        for handle in handles:
            handle.remove()


# Coefficients along a text


def test_every_token_has_the_coefficient_of_the_prefix_that_ends_there(some):
    memories = some
    texts = [[5, 9, 2, 30, 7], [11], [4, 4, 8]]
    cell = Cell(memories.n_layers - 1, 3)
    for start in (None, 0):
        found = coefficients_along(memories, cell, texts, start)
        assert [len(numbers) for numbers in found] == [5, 1, 3]
        for ids, numbers in zip(texts, found, strict=True):
            for length, number in enumerate(numbers, start=1):
                prefix = [*([] if start is None else [start]), *ids[:length]]
                last = memories.trace(torch.tensor([prefix]))[cell.layer].coefficients
                expected = last.reshape(-1, memories.layout.widths[0])[-1, 3]
                assert number == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_an_unknown_memory_is_refused():
    with pytest.raises(UnknownCell):
        coefficients_along(read("llama"), Cell(99, 0), [[1]], None)


# Edits of every pass


TOKENS = torch.tensor([[5, 9, 2, 17, 30], [8, 8, 1, 40, 3]])


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


def test_off_and_scale_are_a_rewritten_value(some):
    memories = some  # in every family: test_checkpoint.py
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


def test_the_model_is_left_exactly_as_it_was(some):
    memories = some
    before, hanging = memories.logits(TOKENS), traces_left(memories.model)
    weights = memories.model.state_dict()
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    with (
        pytest.raises(IndexError),
        apply_edits(memories, Edits.of(off=["L0N1"], positions=[1])),
    ):
        memories.logits(TOKENS * 1000)  # far outside the vocabulary
    assert traces_left(memories.model) == hanging
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
    assert traces_left(memories.model) == (0, [])


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
        memories.read_coefficients(lambda layer, m, gate, routing: seen.append(m)),
        apply_edits(memories, Edits.of(off=["L0N1"])),
    ):
        memories.forward(TOKENS)
    assert torch.equal(seen[0], plain)
