import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ffmem.errors import ModelError, UnknownFamily
from ffmem.models.load import load
from ffmem.models.memories import Memories
from tests.tiny import TINY, tiny_tokenizer

_SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
_BERT = _SIZES | {"num_attention_heads": 2, "intermediate_size": 24}
_MAMBA = _SIZES | {"state_size": 4}
ENCODERS = {
    "bert": _BERT,
    "roberta": _BERT,
    "electra": _BERT | {"embedding_size": 16},
    "xlm-roberta": _BERT,
    "xmod": _BERT,
    "xlm": {"vocab_size": 64, "emb_dim": 16, "n_layers": 2, "n_heads": 2},
}
ENCODERS_ALONE = {
    "distilbert": {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
    "albert": _BERT | {"embedding_size": 16},
    "modernbert": _BERT | {"pad_token_id": 0},
}
NO_MEMORIES = {
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": _MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "rwkv": _SIZES | {"attention_hidden_size": 16, "intermediate_size": 24},
    "xlstm": _SIZES | {"num_blocks": 2, "num_heads": 2, "chunk_size": 8},
}
PROPHETNET = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}


def config_of(kind, settings):
    return transformers.AutoConfig.for_model(kind, **settings)


def refusal(model):
    """Return the one sentence with which a model is refused."""
    with pytest.raises(ModelError) as refused:
        Memories(model, tiny_tokenizer()) if isinstance(model, torch.nn.Module) else load(model)
    message = str(refused.value)
    assert message.endswith(".")
    assert ". " not in message
    assert "self-check" not in message
    return message


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_that_transformers_can_build_as_a_decoder_is_refused(kind):
    model = AutoModelForCausalLM.from_config(config_of(kind, ENCODERS[kind]))
    assert f"A '{kind}' model is an encoder, which predicts masked tokens" in refusal(model)


@pytest.mark.parametrize("kind", ENCODERS | ENCODERS_ALONE)
def test_the_folder_of_an_encoder_is_refused_before_its_weights_are_read(kind, tmp_path):
    config_of(kind, (ENCODERS | ENCODERS_ALONE)[kind]).save_pretrained(tmp_path)
    assert f"A '{kind}' model is an encoder" in refusal(tmp_path)


@pytest.mark.parametrize("kind", NO_MEMORIES)
def test_a_model_without_memories_is_refused_with_the_reason(kind, tmp_path):
    model = AutoModelForCausalLM.from_config(config_of(kind, NO_MEMORIES[kind]))
    reason = refusal(model)
    assert f"ffmem cannot read a '{kind}' model: it" in reason
    assert "use a transformer" in reason
    model.config.save_pretrained(tmp_path)
    assert refusal(tmp_path) == reason


def test_a_model_of_several_streams_is_refused():
    config = config_of("prophetnet", PROPHETNET | {"is_encoder_decoder": False})
    assert "it runs one stream per future token" in refusal(
        AutoModelForCausalLM.from_config(config)
    )


def test_an_encoder_given_as_such_is_refused():
    config = config_of("bert", _BERT | {"is_decoder": True})
    message = refusal(transformers.BertForMaskedLM(config))
    assert message.startswith("BertForMaskedLM is an encoder")


def test_an_encoder_decoder_is_refused(tmp_path):
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2
    )
    message = "A 't5' model is an encoder-decoder, and ffmem only reads decoders"
    assert message in refusal(transformers.T5ForConditionalGeneration(config))
    config.save_pretrained(tmp_path)
    assert message in refusal(tmp_path)
    config_of("prophetnet", PROPHETNET).save_pretrained(tmp_path)
    assert "A 'prophetnet' model is an encoder-decoder" in refusal(tmp_path)


def test_a_folder_of_no_language_model_is_refused(tmp_path):
    config_of("vit", {"hidden_size": 16}).save_pretrained(tmp_path)
    message = f"The model {tmp_path} has type 'vit', which is not a causal language model"
    assert message in refusal(tmp_path)


def test_an_unknown_model_whose_forward_pass_breaks_is_refused():
    """Of this one's layers, each asks for a language that must be set first."""
    config = config_of("xmod", _BERT | {"is_decoder": True})
    with pytest.raises(UnknownFamily, match=r"does not run \(Input language unknown\. "):
        Memories(AutoModelForCausalLM.from_config(config), tiny_tokenizer())


def test_weights_that_are_not_in_memory_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(TINY["llama"])

    with pytest.raises(ModelError, match=r"weights model\.\S+ are not in memory\. Load"):
        Memories(model, tiny_tokenizer())
