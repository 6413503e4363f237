"""What holds for every model of transformers holds for ours, with memories of every kind."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ffmem.errors import ModelError
from ffmem.networks.config import KINDS, AdaptiveConfig
from ffmem.networks.model import AdaptiveLM, AdaptiveModel
from tests.tiny import EXPERTS, TINY, read, tiny

ALL = TINY | EXPERTS
NAMES = {config.memory: name for name, config in ALL.items() if isinstance(config, AdaptiveConfig)}
TOKENS = torch.tensor([[2, 5, 13, 31, 20, 63, 40], [2, 0, 11, 12, 21, 48, 9]])
LENGTH = TOKENS.shape[1]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def model_of(kind):
    """A model that many read, and nobody changes."""
    return read(NAMES[kind]).model


def log_probabilities(model, tokens, **how):
    with torch.no_grad():
        return model(tokens, **how).logits


def same_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    return all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


def test_there_is_a_tiny_model_of_every_kind():
    assert set(NAMES) == set(KINDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_saved_model_is_loaded_bit_for_bit(kind, dtype, tmp_path):
    model = tiny(NAMES[kind]).to(dtype)
    model.save_pretrained(tmp_path)
    for by in (AutoModelForCausalLM, AdaptiveLM):
        loaded, report = by.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
        assert type(loaded) is AdaptiveLM
        assert not any(report.values())
        assert not loaded.training
        assert same_weights(model, loaded)
        assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
        assert loaded.lm_head.bands is loaded.model.embed_tokens.bands
    assert_close(log_probabilities(loaded, TOKENS), log_probabilities(model, TOKENS))
    trunk = AutoModel.from_pretrained(tmp_path, dtype="auto")
    assert type(trunk) is AdaptiveModel
    assert same_weights(model.model, trunk)


def test_a_trained_model_is_loaded_bit_for_bit(kind, tmp_path):
    model = tiny(NAMES[kind]).train()
    before = [weight.clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not any(map(torch.equal, before, model.parameters()))
    model.save_pretrained(tmp_path)
    assert same_weights(model, AutoModelForCausalLM.from_pretrained(tmp_path))


def test_every_weight_has_a_gradient(kind):
    model = tiny(NAMES[kind])
    tokens = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(0))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        # No score changes when all keys of the tokens are moved by the same vector.
        assert weight.grad.abs().max() > 1e-7 or name.endswith("k_proj.bias"), name


@settings(max_examples=20)
@given(st.lists(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH), min_size=2, max_size=2))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_masked_might_as_well_not_be_there(kind, rows):
    """Padding on the left, on the right and between: tokens count as if they stood alone."""
    mask = torch.tensor(rows)
    found = log_probabilities(model_of(kind), TOKENS, attention_mask=mask.long())
    assert found.isfinite().all()
    for row, is_token in enumerate(mask):
        if is_token.any():
            alone = log_probabilities(model_of(kind), TOKENS[row : row + 1, is_token])
            assert_close(found[row, is_token], alone[0], **CLOSE)


@settings(max_examples=20)
@given(st.lists(st.integers(1, LENGTH - 1), max_size=3, unique=True), st.integers(0, 3))
@pytest.mark.parametrize("kind", KINDS)
def test_in_pieces_behind_a_cache_a_text_is_the_same(kind, cuts, padding):
    model, mask = model_of(kind), torch.ones_like(TOKENS)
    mask[0, :padding] = 0
    whole = log_probabilities(model, TOKENS, attention_mask=mask)
    pieces, cache = [], None
    with torch.no_grad():
        for start, end in pairwise([0, *sorted(cuts), LENGTH]):
            output = model(
                TOKENS[:, start:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                use_cache=True,
            )
            cache = output.past_key_values
            pieces.append(output.logits)
    assert cache.get_seq_length() == LENGTH
    assert_close(torch.cat(pieces, dim=1), whole, **CLOSE)


def test_the_state_behind_every_layer_is_given_if_asked_for(kind):
    model = model_of(kind)
    seen = []
    hooks = [
        layer.register_forward_hook(lambda _, given, output: seen.extend([given[0], output]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        states = model(TOKENS, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    assert len(states) == model.config.num_hidden_layers + 1
    assert torch.equal(states[0], seen[0])
    assert all(map(torch.equal, states[1:-1], seen[1:-1:2]))
    assert_close(log_probabilities(model, TOKENS), model.lm_head(states[-1]).detach())
    assert model(TOKENS).hidden_states is None


def test_switches_of_the_config_and_of_a_call_are_heard(kind):
    model = model_of(kind)
    plain = model(TOKENS, return_dict=False)
    assert isinstance(plain, tuple)
    assert torch.equal(plain[0], model(TOKENS, output_attentions=False).logits)
    for name, seen in (("output_hidden_states", True), ("return_dict", False)):
        before = getattr(model.config, name)
        setattr(model.config, name, seen)
        try:
            found = model(TOKENS)
            length = len(model(TOKENS, labels=TOKENS))
        finally:
            setattr(model.config, name, before)
        assert isinstance(found, tuple) == (name == "return_dict")
        assert length == (3 if name == "output_hidden_states" else 2)
    with pytest.raises(ModelError, match=r"output_attentions is not supported"):
        model(TOKENS, output_attentions=True)


@pytest.mark.parametrize("what", ["position_ids", "inputs_embeds"])
def test_what_the_model_does_not_take_is_refused_not_ignored(kind, what):
    with pytest.raises(TypeError, match=what):
        model_of(kind)(TOKENS, **{what: TOKENS})


def test_without_being_asked_for_there_is_no_cache(kind):
    assert model_of(kind)(TOKENS, use_cache=False).past_key_values is None


def test_what_follows_does_not_change_what_is_in_front(kind):
    others = TOKENS.clone()
    others[:, 4:] = 7
    found, changed = (log_probabilities(model_of(kind), tokens) for tokens in (TOKENS, others))
    assert_close(found[:, :4], changed[:, :4], **CLOSE)
    assert not torch.allclose(found[:, 4:], changed[:, 4:])


def test_generating_is_the_same_with_a_cache_without_and_in_a_padded_batch(kind):
    model, how = model_of(kind), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    short, long = TOKENS[:1, :3], TOKENS[1:]
    alone = {}
    for name, prompt in (("short", short), ("long", long)):
        ones = torch.ones_like(prompt)
        cached, plain = (
            model.generate(prompt, attention_mask=ones, use_cache=use, **how)[0, prompt.shape[1] :]
            for use in (True, False)
        )
        assert torch.equal(cached, plain)
        assert len(plain) == 6
        alone[name] = plain
    padded = torch.cat([torch.ones(1, LENGTH - 3, dtype=torch.long), short], dim=1)
    batch = torch.cat([padded, long])
    mask = torch.ones_like(batch)
    mask[0, : LENGTH - 3] = 0
    for use in (True, False):
        found = model.generate(batch, attention_mask=mask, use_cache=use, **how)[:, LENGTH:]
        assert torch.equal(found, torch.stack([alone["short"], alone["long"]]))


def test_dropout_is_for_training_alone(kind):
    settings = ALL[NAMES[kind]].to_dict() | {"dropout": 0.5}
    torch.manual_seed(0)
    model = AdaptiveLM(AdaptiveConfig.from_dict(settings))
    model.train()
    one, other = (log_probabilities(model, TOKENS) for _ in range(2))
    assert not torch.allclose(one, other)
    model.eval()
    one, other = (log_probabilities(model, TOKENS) for _ in range(2))
    assert torch.equal(one, other)


def test_models_of_one_seed_are_the_same(kind):
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(AdaptiveLM(ALL[NAMES[kind]]))
    assert same_weights(*models[:2])
    assert not same_weights(*models[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_near_float32(kind, dtype):
    model = AdaptiveLM(ALL[NAMES[kind]]).eval()
    expected = log_probabilities(model, TOKENS)
    found = log_probabilities(model.to(dtype), TOKENS)
    assert found.dtype == dtype
    assert_close(found.float(), expected, rtol=0.1, atol=0.1)


def config_file(folder, **changes):
    AdaptiveConfig(memory="gelu").save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: one for name, one in content.items() if one is not None}))
    return folder


def test_a_saved_config_of_an_unknown_kind_is_refused_with_the_names_of_those_known(tmp_path):
    config_file(tmp_path, memory="hopfield", hidden_act=None)
    with pytest.raises(
        ModelError, match=r"kind of memory 'hopfield'\. Known kinds: relu, gelu, sw"
    ):
        AutoConfig.from_pretrained(tmp_path)


def test_a_saved_config_that_contradicts_itself_is_refused(tmp_path):
    config_file(tmp_path, memory="softmax", hidden_act="gelu")
    with pytest.raises(ModelError, match=r"memory = 'softmax' and hidden_act = 'gelu'"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_config_comes_back_from_its_file(kind, tmp_path):
    config = ALL[NAMES[kind]]
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is AdaptiveConfig
    assert again.to_diff_dict() == config.to_diff_dict()
    assert (again.memory, again.hidden_act) == (kind, config.hidden_act)
