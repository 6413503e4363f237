import pytest
import torch
from transformers import AutoConfig

from ffmem.errors import ModelError
from ffmem.models.families import FAMILIES, FUSED, Family, Variant
from ffmem.models.memories import Memories
from tests.tiny import EXPERTS, HIDDEN, TINY, UNUSUAL, VOCABULARY, tiny, tiny_tokenizer


def test_every_family_has_a_tiny_model_and_every_tiny_model_a_family():
    has_tiny = {config.model_type for config in (TINY | EXPERTS | UNUSUAL).values()}
    with_towers = {"gemma3n", "qwen4_exp"}  # their text decoders are those of *_text
    assert has_tiny | with_towers == set(FAMILIES)


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_are_tiny_and_none_of_their_weights_is_constant(name):
    model = tiny(name)

    assert sum(weight.numel() for weight in model.parameters()) < 20_000
    for weight in model.parameters():
        assert weight.numel() == 1 or weight.std() > 0
    assert model.get_input_embeddings() is not None
    assert model.config.get_text_config().hidden_size == HIDDEN
    assert model.config.get_text_config().vocab_size == VOCABULARY


def test_tiny_models_of_the_same_seed_are_the_same():
    one, two, other = tiny("gpt2"), tiny("gpt2"), tiny("gpt2", seed=1)

    assert torch.equal(one.transformer.h[0].mlp.c_fc.weight, two.transformer.h[0].mlp.c_fc.weight)
    assert not torch.equal(
        one.transformer.h[0].mlp.c_fc.weight, other.transformer.h[0].mlp.c_fc.weight
    )


def test_the_tiny_tokenizer_knows_no_id_beyond_the_vocabulary():
    (encoding,) = tiny_tokenizer().encode(["w3 w63 nothing"])

    assert encoding.ids == [3, 63, 2]


def test_a_variant_applies_only_to_models_whose_config_says_so():
    row = Family("blocks", "v", "k", residual="norm", variants=(Variant("x", True, {"up": FUSED}),))
    config = AutoConfig.for_model("llama")

    config.x = False
    assert row.for_config(config) == Family("blocks", "v", "k", residual="norm")
    config.x = True
    assert row.for_config(config) == Family("blocks", "v", "k", up=FUSED, residual="norm")


def test_parallel_blocks_are_told_from_sequential_ones_by_the_config():
    def row(name):
        return FAMILIES[TINY[name].model_type].for_config(TINY[name])

    assert row("gpt_neox").attention == "attention"
    assert row("gpt_neox sequential").attention is None
    assert row("gpt_neox sequential").residual == "post_attention_layernorm"
    assert row("stablelm").residual == "post_attention_layernorm"
    assert row("stablelm parallel").attention == "self_attn"
    assert row("falcon").attention == "self_attention"
    assert row("falcon sequential").residual == "post_attention_layernorm"


def test_bloom_is_refused_where_it_computes_past_its_value_map():
    model = tiny("bloom")
    model.config.slow_but_exact = True

    with pytest.raises(ModelError, match=r"with slow_but_exact = True\. Load it with"):
        Memories(model, tiny_tokenizer())


def test_no_context_is_longer_than_what_the_model_takes():
    rows = {name: FAMILIES[config.model_type].for_config(config) for name, config in TINY.items()}
    contexts = {
        name: row.context and getattr(TINY[name].get_text_config(), row.context)
        for name, row in rows.items()
    }

    assert {name for name, context in contexts.items() if context is None} == {
        "bloom",
        "bloom residual after norm",
        "falcon sequential",  # the one with ALiBi
    }
    assert {context for context in contexts.values() if context is not None} == {64}
