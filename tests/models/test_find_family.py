from collections import defaultdict
from dataclasses import fields

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ffmem.errors import UnknownFamily
from ffmem.models import families
from ffmem.models.families import FAMILIES
from ffmem.models.memories import Memories
from tests.tiny import EXPERTS, TINY, shaken, tiny, tiny_tokenizer

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9]])
SAME_ROW = ["llama", "gpt2", "gpt_neox", "gpt_neox sequential", "qwen3", "starcoder2", "phi3"]
SAME_NUMBERS = [
    *("gemma2", "olmo2", "cohere", "granite", "stablelm parallel", "gptj", "opt", "phi"),
    *("opt post-norm", "bloom", "mpt", "openai-gpt", "nemotron_h", "gemma3", "nanochat"),
    *("falcon", "falcon new", "glm4", "gpt_neo"),
]


def without_its_row(monkeypatch, name):
    monkeypatch.delitem(families.FAMILIES, TINY[name].model_type)
    return Memories(tiny(name), tiny_tokenizer())


def read_without_row(monkeypatch, model):
    monkeypatch.delitem(families.FAMILIES, model.config.model_type)
    return Memories(model, tiny_tokenizer())


@pytest.mark.parametrize("name", SAME_ROW)
def test_the_search_gives_the_row_of_the_table(monkeypatch, name):
    row = FAMILIES[TINY[name].model_type].for_config(TINY[name])

    found = without_its_row(monkeypatch, name).row

    # What a switch of the config would add cannot be seen in a model without it.
    names = {field.name for field in fields(row)} - {"bias_flag"}
    assert {name: getattr(found, name) for name in names} == {
        name: getattr(row, name) for name in names
    }


@pytest.mark.parametrize("name", SAME_NUMBERS)
def test_an_unknown_model_is_read_as_the_table_would_read_it(monkeypatch, name):
    known = Memories(tiny(name), tiny_tokenizer())
    found = without_its_row(monkeypatch, name)

    for expected, layer in zip(known.trace(TOKENS), found.trace(TOKENS), strict=True):
        for name in ("coefficients", "residual", "ff_output", "layer_output"):
            torch.testing.assert_close(getattr(layer, name), getattr(expected, name))
    stream = torch.randn(3, 16)
    torch.testing.assert_close(found.head.folded(stream), known.head.folded(stream))


class Sum(nn.Module):
    """Two feed-forward parts side by side."""

    def __init__(self, one, two):
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x):
        return self.one(x) + self.two(x)


def test_two_feed_forward_parts_in_a_layer_are_ambiguous(monkeypatch):
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp = Sum(layer.mlp, type(layer.mlp)(model.config))

    with pytest.raises(UnknownFamily, match=r"several feed-forward parts \(mlp\.one\."):
        read_without_row(monkeypatch, shaken(model))


def test_a_feed_forward_part_that_does_not_run_is_none(monkeypatch):
    model = tiny("llama")
    for layer in model.model.layers:
        layer.second = type(layer.mlp)(model.config)

    assert read_without_row(monkeypatch, model).row.values == "mlp.down_proj"


def test_an_activation_that_the_config_does_not_name_is_read_from_its_module(monkeypatch):
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.PReLU(init=0.3)  # its slope is a weight

    memories = read_without_row(monkeypatch, shaken(model))

    assert memories.row.activation == "mlp.act_fn"
    assert memories.activation == "PReLU"
    for layer, trace in enumerate(memories.trace(TOKENS)):
        gate, up = (trace.ff_input @ keys(layer).T for keys in (memories.keys, memories.up_keys))
        slope = model.model.layers[layer].mlp.act_fn.weight
        expected = torch.where(gate > 0, gate, slope * gate) * up
        torch.testing.assert_close(trace.coefficients, expected)


class Sine(nn.Module):
    """A feed-forward part whose activation no module and no name says."""

    def __init__(self, mlp):
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

    def forward(self, x):
        return self.down_proj(self.up_proj(x).sin())


def test_an_activation_that_nothing_names_is_refused(monkeypatch):
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp = Sine(layer.mlp)
    with pytest.raises(UnknownFamily, match="no layer has a recognizable feed-forward part"):
        read_without_row(monkeypatch, model)


def test_a_layer_that_is_not_read_like_the_others_is_not_taken_for_one_without_memories(
    monkeypatch,
):
    model = tiny("llama")
    model.model.layers[1].mlp = Sine(model.model.layers[1].mlp)
    with pytest.raises(UnknownFamily, match=r"in layer 1, the input of mlp\.down_proj is not"):
        read_without_row(monkeypatch, model)


def test_layers_that_run_twice_are_refused(monkeypatch):
    model = tiny("llama")
    model.model.layers.extend(list(model.model.layers))
    model.config.num_hidden_layers *= 2
    with pytest.raises(UnknownFamily, match=r"layers .* several times"):
        read_without_row(monkeypatch, model)


class Squared(nn.Module):
    """A layer that does something else to r + y."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs) ** 2


def test_a_layer_that_changes_the_sum_is_refused(monkeypatch):
    model = tiny("llama")
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = Squared(layer)
    with pytest.raises(UnknownFamily, match="“r \\+ y = o” holds for no r"):
        read_without_row(monkeypatch, model)


def test_a_head_that_does_more_than_a_norm_is_refused(monkeypatch):
    model = tiny("llama")
    model.lm_head.register_forward_hook(lambda _, args, output: output.sin())
    with pytest.raises(UnknownFamily, match="head\\(o\\) = the model's logits"):
        read_without_row(monkeypatch, model)


_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3", "granitemoeshared"])
def test_an_unknown_mixture_of_experts_is_read_as_the_table_would_read_it(monkeypatch, name):
    known = Memories(tiny(name), tiny_tokenizer())
    monkeypatch.delitem(families.FAMILIES, EXPERTS[name].model_type)
    found = Memories(tiny(name), tiny_tokenizer())

    assert found.layout == known.layout
    for expected, layer in zip(known.trace(TOKENS), found.trace(TOKENS), strict=True):
        for field in ("coefficients", "residual", "ff_output", "layer_output"):
            torch.testing.assert_close(getattr(layer, field), getattr(expected, field))


SCALED = {
    "laguna": {"moe_routed_scaling_factor": 1.7, "shared_expert_intermediate_size": 20},
    "cohere2_moe": {
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "average",
        "layer_types": ["full_attention", "full_attention"],
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.parametrize("family", SCALED)
def test_what_a_layer_multiplies_its_experts_with_is_in_their_coefficients(family):
    """Their routed output is scaled, or averaged with the shared one, behind the experts."""
    sizes = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(family, **(_SIZES | sizes | heads | SCALED[family]))
    memories = Memories(shaken(AutoModelForCausalLM.from_config(config)), tiny_tokenizer())
    factor = {"laguna": 1.7, "cohere2_moe": 0.5}[family]
    banks, found = memories.banks[1], []
    assert {bank.factor for bank in banks.routed} == {factor}
    assert {bank.factor for bank in banks.dense} == {0.5 if family == "cohere2_moe" else 1.0}
    with banks.experts.reading(found.append):
        trace = memories.trace(TOKENS)[1]
    for rows in found:
        bank = banks.routed[rows.expert]
        c = trace.coefficients[0, rows.tokens][:, bank.memories]
        torch.testing.assert_close(c, factor * rows.coefficients)

    changed = defaultdict(list)

    def add(bank, coefficients, tokens):
        changed[bank] += tokens.tolist()
        return coefficients + 0.25

    with banks.editing(add):
        after = memories.trace(TOKENS)[1].value_output[0]
    expected = trace.value_output[0].clone()
    for bank, tokens in changed.items():
        expected[tokens] += 0.25 * bank.value_rows().sum(0)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
