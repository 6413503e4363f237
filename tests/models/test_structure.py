from dataclasses import fields

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ffmem.errors import ModelError, UnknownFamily
from ffmem.models import families
from ffmem.models.families import FAMILIES
from ffmem.models.memories import Memories
from ffmem.models.structure import candidates
from tests.tiny import TINY, tiny, tiny_tokenizer

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9]])
SAME_ROW = ["llama", "gpt2", "gpt_neox", "gpt_neox sequential", "qwen3", "starcoder2", "phi3"]
SAME_NUMBERS = ["gemma2", "olmo2", "cohere", "granite", "stablelm parallel", "gptj", "opt", "phi"]


def without_its_row(monkeypatch, name):
    monkeypatch.delitem(families.FAMILIES, TINY[name].model_type)
    return Memories(tiny(name), tiny_tokenizer())


@pytest.mark.parametrize("name", SAME_ROW)
def test_the_structure_of_an_unknown_model_gives_the_row_of_the_table(monkeypatch, name):
    row = FAMILIES[TINY[name].model_type].of(TINY[name])

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


@pytest.mark.parametrize("name", ["opt post-norm", "bloom", "mpt", "openai-gpt"])
def test_what_the_structure_does_not_tell_is_refused_with_the_known_families(monkeypatch, name):
    with pytest.raises(UnknownFamily, match=r"model: .*\. Known families: arcee, "):
        without_its_row(monkeypatch, name)


def test_two_feed_forward_parts_in_a_layer_are_ambiguous(monkeypatch):
    model = tiny("llama")
    for layer in model.model.layers:
        layer.second = type(layer.mlp)(model.config)
    monkeypatch.delitem(families.FAMILIES, "llama")

    assert list(candidates(model)) == []
    with pytest.raises(UnknownFamily, match="one feed-forward part per layer"):
        Memories(model, tiny_tokenizer())


def test_a_candidate_that_fails_the_self_check_is_never_taken(monkeypatch):
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Softsign()  # not what the config says
    monkeypatch.delitem(families.FAMILIES, "llama")

    assert len(list(candidates(model))) > 1
    with pytest.raises(UnknownFamily, match=r"does not keep the law “m = f\(x · Kᵀ\)"):
        Memories(model, tiny_tokenizer())


def test_encoders_and_encoder_decoders_are_refused():
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}
    encoder = transformers.BertForMaskedLM(
        transformers.BertConfig(**sizes, num_hidden_layers=2, intermediate_size=24)
    )
    with pytest.raises(ModelError, match="BertForMaskedLM is an encoder: it predicts masked"):
        Memories(encoder, tiny_tokenizer())

    both = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    )
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        Memories(both, tiny_tokenizer())


def test_weights_that_are_not_in_memory_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(TINY["llama"])

    with pytest.raises(ModelError, match=r"weights model\.\S+ are not in memory\. Load"):
        Memories(model, tiny_tokenizer())
