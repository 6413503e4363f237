"""RelP: exact where the rules say that the model is linear, and complete in every family."""

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import ffmem
from ffmem.interventions import relevance
from ffmem.interventions.effect import effect
from ffmem.interventions.estimates import frozen_slope, relp
from ffmem.interventions.forward import change_coefficients
from ffmem.interventions.partial_forward import PartialForward
from ffmem.interventions.relevance import GradientPass, Place, hold_factors
from tests.interventions.planted import with_start
from tests.tiny import EXPERTS, TINY, read, tiny, tiny_tokenizer

IDS = [0, 5, 9, 2, 17, 30, 8]
AT, TARGET = 5, 11

WITHOUT_RULES = {
    "ffmem_adaptive lambda",
    "nemotron_h",
    "longcat_flash",
    "minimax",
    "qwen4_exp_text",
}
"""Attention without a softmax, Mamba, and a feed-forward part that is none of the memories."""


@pytest.fixture(scope="module", params=[*TINY, *EXPERTS])
def name(request):
    return request.param


def test_relevance_is_complete_or_there_is_none(name):
    """s = Σ x₀ · ∂s/∂x₀ + Σ b · ∂s/∂b, where s is linear in the stream."""
    forward = PartialForward(read(name), IDS, AT)
    slope = frozen_slope(forward, TARGET)
    linear = GradientPass(forward)
    torch.testing.assert_close(linear.output, forward.output, rtol=1e-4, atol=1e-4)
    if name in WITHOUT_RULES:
        assert linear.completeness_error(slope) > 5e-3
        assert relp(forward, TARGET) is None
    else:
        assert linear.completeness_error(slope) < 1e-6
        assert relp(forward, TARGET) is not None
    assert not any(one.requires_grad for one in forward.memories.model.parameters())


# The gradient against differences, in the model whose nonlinear steps are really held fixed


class Tape(TorchFunctionMode):
    """Keeps what held steps give in one pass, and gives the same in the next ones."""

    def __init__(self):
        super().__init__()
        self.kept, self.place, self.replays = [], 0, False

    def again(self):
        self.place, self.replays = 0, True
        return self

    def held(self, compute):
        if not self.replays:
            self.kept.append(compute())
        found = self.kept[self.place] if self.replays else self.kept[-1]
        self.place += 1
        return found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in relevance._HELD:
            return self.held(lambda: function(*args, **kwargs))
        if function is functional.scaled_dot_product_attention:
            query, key, value, *rest = args
            query, key = self.held(lambda: (query, key))
            return function(query, key, value, *rest, **kwargs)
        if function in (functional.layer_norm, torch.layer_norm):
            x, _, weight, bias, eps = [*args, *[None] * 5][:5]
            weight, bias = kwargs.get("weight", weight), kwargs.get("bias", bias)
            part = x - x.mean(-1, keepdim=True)
            variance = part.pow(2).mean(-1, keepdim=True)
            sigma = self.held(lambda: (variance + kwargs.get("eps", eps or 1e-5)).sqrt())
            normed = part / sigma * (1 if weight is None else weight)
            return normed if bias is None else normed + bias
        return function(*args, **kwargs)


RELU = ("ffmem_adaptive", "opt", "opt post-norm")
"""Ungated: m is 0, or g itself, so that m/g is held as long as no sign flips."""


@pytest.mark.parametrize("name", RELU)
def test_relevance_is_the_exact_change_where_everything_else_is_held(name):
    memories = read(name)
    forward = PartialForward(memories, IDS, AT)
    slope = frozen_slope(forward, TARGET)
    linear = GradientPass(forward)
    tape = Tape()
    with torch.no_grad():
        for bank, slopes in linear.slopes(slope):
            for position, memory in ((1, 3), (AT, 7), (AT, 12)):
                step = 1e-3 * (bank.used[position, memory] + 1)

                def nudged(size, layer=bank.layer, position=position, memory=memory):
                    def change(rows):
                        changed = rows.coefficients.clone()
                        changed[position, memory] += size
                        return changed

                    with (
                        tape.again() if tape.kept else tape,
                        change_coefficients(memories, layer, change),
                    ):
                        return float(forward.run(0, 1, {})[0] @ slope)

                if not tape.kept:
                    nudged(0)
                difference = (nudged(step) - nudged(-step)) / (2 * step)
                found = float(slopes[position, memory])
                assert found == pytest.approx(float(difference), rel=2e-2, abs=2e-4)


def test_the_half_rule_shares_a_product_between_its_factors():
    gate = torch.tensor([0.5, -2.0, 0.0], requires_grad=True)
    up = torch.tensor([3.0, 1.5, 2.0], requires_grad=True)
    m = functional.silu(gate) * up
    held = hold_factors(m, [gate, up])
    torch.testing.assert_close(held, m)
    by_gate, by_up = torch.autograd.grad(held.sum(), [gate, up])
    torch.testing.assert_close(by_gate * gate, m / 2)
    torch.testing.assert_close(by_up * up, m / 2)


def test_gpt_oss_has_a_factor_with_a_constant():
    """m = f(g) · (u + 1): the 1 gets its share, and no slope explodes where u is near 0."""
    forward = PartialForward(read("gpt_oss"), IDS, AT)
    linear = GradientPass(forward)
    assert linear.completeness_error(frozen_slope(forward, TARGET)) < 1e-6
    (at_one,) = linear._gradients([linear._one], linear.output, frozen_slope(forward, TARGET))
    assert abs(float(at_one)) > 0


def test_a_cut_ends_gradients():
    """Below the last layer's memories, all cut, only the way past them is left."""
    memories = read("llama")
    forward = PartialForward(memories, IDS, AT)
    slope = frozen_slope(forward, TARGET)
    places = [Place(1, memory, AT) for memory in range(memories.layout.widths[1])]
    cut, whole = GradientPass(forward, cut=places), GradientPass(forward)
    at_places, _ = cut.to_output(slope)
    last = next(slopes for bank, slopes in whole.slopes(slope) if bank.layer == 1)
    torch.testing.assert_close(at_places.float(), last[AT])
    through, _ = cut.to_place(0)
    assert not through.any()  # memories of one layer do not feed each other


def test_relp_is_summed_where_memories_are_off():
    forward = PartialForward(read("llama"), IDS, AT)
    parts = [relp(forward, TARGET, [position]) for position in range(AT + 1)]
    torch.testing.assert_close(sum(parts), relp(forward, TARGET))


def test_effect_says_where_there_is_no_relp():
    found = effect(with_start(read("minimax")), "w5 w9 w2", candidates=4)
    assert all(row.relp is None for row in found.memories)
    assert any(note.startswith("relp is not defined") for note in found.notes)
    assert found.correlation["relp"] is None


def test_relp_is_exact_in_a_model_that_is_linear_but_for_its_patterns():
    """ReLU, no final norm, values so small that norms and signs stay: relp is the change of o."""
    memories = ffmem.load(tiny("ffmem_adaptive"), tiny_tokenizer())
    for layer in range(2):
        memories.values(layer).mul_(1e-3)
    found = effect(with_start(memories), "w5 w9 w2 w17", candidates=12)
    for row in found.memories:
        if row.coefficient and row.cell.startswith("L1"):
            assert row.relp == pytest.approx(row.change, rel=2e-2, abs=1e-6)
