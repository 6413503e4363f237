from dataclasses import replace

import pytest
import torch

from ffmem.errors import ModelError, SelfCheckFailed
from ffmem.models import families
from ffmem.models.families import FAMILIES, FUSED
from ffmem.models.memories import Memories
from ffmem.models.selfcheck import BOUND, HALF_BOUND, self_check
from tests.tiny import TINY, tiny, tiny_tokenizer


def read(model):
    return Memories(model, tiny_tokenizer())


@pytest.mark.parametrize("name", TINY)
def test_the_equations_hold_far_below_the_bound_in_float32(name):
    errors = read(tiny(name, seed=1)).check

    assert errors.tokens == 16
    assert max(errors[:-1]) <= BOUND / 10


HALF = [(name, torch.bfloat16) for name in TINY] + [
    (name, torch.float16) for name in ("gpt2", "llama", "gemma2", "falcon", "opt post-norm")
]


@pytest.mark.parametrize(("name", "dtype"), HALF, ids=str)
def test_models_pass_in_half_precision(name, dtype):
    memories = read(tiny(name).to(dtype))

    assert memories.dtype == dtype
    assert max(memories.check[:-1]) <= HALF_BOUND


def test_the_check_can_be_repeated_with_the_same_result():
    memories = read(tiny("llama"))

    assert self_check(memories) == memories.check


WRONG = [
    ("llama", {"values": "self_attn.o_proj"}),
    ("llama", {"keys": "mlp.up_proj", "up": "mlp.gate_proj"}),
    ("llama", {"residual": "input_layernorm"}),
    ("llama", {"residual": "mlp"}),
    ("llama", {"final_norm": None}),
    ("llama", {"activation": "gelu"}),
    ("llama", {"up": None}),
    ("gpt2", {"residual": "ln_1"}),
    ("gpt2", {"keys": "attn.c_attn"}),
    ("gpt_neox", {"attention": None, "residual": "post_attention_layernorm", "variants": ()}),
    ("gpt_neox", {"attention": "input_layernorm"}),
    ("gemma2", {"post_norm": None}),
    ("gemma2", {"post_norm": "post_attention_layernorm"}),
    ("gemma2", {"cap": None}),
    ("cohere", {"scale": None}),
    ("granite", {"multiplier": None}),
    ("granite", {"divisor": None}),
    ("opt post-norm", {"variants": ()}),
    ("opt post-norm", {"project_out": None}),
    ("bloom residual after norm", {"variants": ()}),
]


@pytest.mark.parametrize(("name", "changes"), WRONG, ids=str)
def test_a_row_that_points_to_another_module_is_refused(monkeypatch, name, changes):
    family = TINY[name].model_type
    monkeypatch.setitem(families.FAMILIES, family, replace(FAMILIES[family], **changes))

    with pytest.raises(ModelError):
        read(tiny(name))


def test_a_fused_model_read_the_wrong_way_round_is_refused(monkeypatch):
    model = tiny("phi3")
    for layer in model.model.layers:
        weight = layer.mlp.gate_up_proj.weight
        weight.data = weight.data.flip(0)
        layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down_proj(
            mlp.gate_up_proj(x).chunk(2, dim=-1)[0]
            * mlp.activation_fn(mlp.gate_up_proj(x).chunk(2, dim=-1)[1])
        )

    assert FAMILIES["phi3"].up == FUSED
    with pytest.raises(SelfCheckFailed, match=r"“m = f\(x · Kᵀ\)” does not hold .* In layer 0"):
        read(model)


def test_the_refusal_names_the_equation_the_layer_and_the_numbers(monkeypatch):
    wrong = replace(FAMILIES["llama"], residual="input_layernorm")
    monkeypatch.setitem(families.FAMILIES, "llama", wrong)

    with pytest.raises(
        SelfCheckFailed, match=r"r \+ y = o” .* In layer 0, the relative error is \d.* 1e-04"
    ):
        read(tiny("llama"))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_number_is_refused_with_its_layer(number):
    model = tiny("gpt2")
    model.transformer.h[1].mlp.c_proj.weight.data[3, 5] = number

    with pytest.raises(
        SelfCheckFailed, match=r"in layer 1, transformer\.h\.1\.mlp\.c_proj\.weight"
    ):
        read(model)


def test_a_weight_outside_the_layers_is_refused_by_its_name():
    model = tiny("llama")
    model.lm_head.weight.data[63, 0] = float("nan")

    with pytest.raises(SelfCheckFailed, match=r"NaN or infinite \(lm_head\.weight\)"):
        read(model)


def test_a_layer_that_overflows_is_refused_by_its_number():
    model = tiny("llama").to(torch.float16)
    model.model.layers[1].mlp.down_proj.weight.data.fill_(60_000.0)

    with pytest.raises(SelfCheckFailed, match=r"Layer 1 .* not finite \(value_output\)"):
        read(model)


def test_a_model_that_sees_what_follows_is_refused():
    model = tiny("llama")
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda hidden_states, inner=inner, **kwargs: (
            inner(hidden_states=hidden_states, **kwargs)[0] + hidden_states.mean(1, keepdim=True),
            None,
        )

    with pytest.raises(SelfCheckFailed, match="do not depend on later tokens"):
        read(model)


def test_a_final_norm_of_another_form_is_refused():
    class Squared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16))

        def forward(self, hidden):
            return self.weight * hidden * hidden.abs() / hidden.pow(2).mean(-1, keepdim=True)

    model = tiny("llama")
    model.model.norm = Squared()

    with pytest.raises(SelfCheckFailed, match=r"folded\(h\) = .* In the output head, the relative"):
        read(model)
