"""Models over several devices: with accelerate's hooks on a CPU, and on made-up GPUs.

Two GPUs that are not there are torch's own fake tensors: no numbers, but real rules of which
tensors may meet.
"""

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import ffmem
from ffmem.errors import ModelError
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.edits import Edits
from ffmem.interventions.effect import effect
from ffmem.interventions.forward import LoadedModel
from ffmem.interventions.partial_forward import PartialForward, log_probability
from ffmem.models.checkpoint import silence_transformers
from ffmem.models.families import FAMILIES
from ffmem.models.load import describe, empty_model, load
from ffmem.models.modules import copy_without_hooks, describe_devices, is_split, make_device_map
from tests.tiny import TINY, tiny, tiny_tokenizer

NAMES = ["gpt2", "llama", "gpt_neox", "opt", "opt post-norm", "gemma3", "cohere", "falcon"]
FIRST, SECOND = torch.device("lazy", 0), torch.device("lazy", 1)
"""Two accelerators that are not there, of a kind that torch lets fake tensors lie on anywhere."""

TOKENS = torch.randint(64, (3, 7), generator=torch.Generator().manual_seed(1))


def parts(model):
    """Return the layers, and beside them the modules that hold weights of their own."""
    blocks = FAMILIES[model.config.model_type].blocks
    layers = [f"{blocks}.{n}" for n, _ in enumerate(model.get_submodule(blocks))]
    others = [
        path
        for path, module in model.named_modules()
        if list(module.parameters(recurse=False)) and not path.startswith(f"{blocks}.")
    ]
    return layers, others


def dispatched(model):
    """Return the model with accelerate's hooks on each of its parts, all on the CPU."""
    layers, rest = parts(model)
    with silence_transformers():
        dispatch_model(model, dict.fromkeys([*rest, *layers], "cpu"), force_hooks=True)
    return model


@pytest.fixture(params=NAMES)
def pair(request):
    """The memories of a model as it is, and of the same model with accelerate's hooks."""
    models = tiny(request.param), dispatched(tiny(request.param))
    return tuple(ffmem.load(model, tiny_tokenizer()) for model in models)


def same(one, other):
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def test_a_model_with_hooks_has_the_weights_of_the_model(pair):
    whole, split = pair
    assert is_split(split.model)
    assert not is_split(whole.model)
    for layer in range(whole.n_layers):
        assert same(split.values(layer), whole.values(layer))
        assert same(split.keys(layer), whole.keys(layer))
    assert split.fingerprint() == whole.fingerprint()


def test_every_pass_gives_the_same_numbers(pair):
    whole, split = pair
    assert split.check == whole.check
    assert same(split.logits(TOKENS), whole.logits(TOKENS))
    for one, other in zip(split.trace(TOKENS), whole.trace(TOKENS), strict=True):
        for name, tensor in other._asdict().items():
            assert tensor is None or same(getattr(one, name), tensor), name
    stream = whole.trace(TOKENS)[-1].layer_output.flatten(0, 1)
    for read in ("logits", "unscaled", "folded", "raw", "denominator"):
        assert same(getattr(split.head, read)(stream), getattr(whole.head, read)(stream)), read
    assert same(split.head.constant(), whole.head.constant())


def test_effects_are_the_same(pair):
    found = [
        effect(
            LoadedModel(one, None, "id:0"), "w5 w9 w17 w30", candidates=6, integrated=True, steps=2
        )
        for one in pair
    ]
    assert found[1].to_dict() == found[0].to_dict()


def test_a_copy_of_a_module_has_no_hooks():
    model = dispatched(tiny("llama"))
    norm = copy_without_hooks(model.model.norm)
    x = torch.randn(2, norm.weight.shape[0])
    assert same(norm(x), tiny("llama").model.norm(x))
    assert not is_split(norm)
    assert is_split(model.model.norm)


def test_offloaded_weights_are_refused(tmp_path):
    model = tiny("llama")
    layers, rest = parts(model)
    where = dict.fromkeys([*rest, layers[0]], "cpu") | {layers[1]: "disk"}
    with silence_transformers():
        dispatch_model(model, where, offload_dir=tmp_path)
    with pytest.raises(ModelError, match=r"layers\.1\..*weight are not in memory"):
        ffmem.load(model, tiny_tokenizer())


def test_the_weights_of_a_split_model_cannot_be_rewritten():
    memories = ffmem.load(dispatched(tiny("llama")), tiny_tokenizer())
    with pytest.raises(ModelError, match=r"split over devices\. Load it on one device"):
        edit_weights(memories, Edits.of(off=["L1N3"]))


def test_describe_says_what_lies_where():
    whole = ffmem.load(tiny("llama"), tiny_tokenizer())
    assert describe(whole)["devices"] == {"cpu": "all weights"}
    model = tiny("llama")
    model.lm_head.to("meta")
    expected = "layers 0 to 1, model.embed_tokens, model.norm"
    assert describe_devices(model, "model.layers") == {"cpu": expected, "meta": "lm_head"}


@pytest.mark.parametrize(("name", "tied"), [("gpt2", True), ("gpt2 untied", False)])
def test_describe_knows_which_embeddings_are_tied(name, tied):
    memories = ffmem.load(dispatched(tiny(name)), tiny_tokenizer())
    assert describe(memories)["head"]["tied"] is tied


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_never_divides_a_layer_and_uses_every_device_that_it_needs(name):
    model = empty_model(TINY[name], "float32")
    assert all(weight.is_meta for weight in model.parameters())
    size = sum(weight.numel() * 4 for weight in model.parameters())
    where = make_device_map(model, {0: size, 1: size})
    layers, _ = parts(model)
    for path in where:
        assert not any(path.startswith(f"{layer}.") for layer in layers), path
    assert set(where.values()) == {0, 1}
    assert set(make_device_map(model, {0: 8 * size}).values()) == {0}


def test_the_plan_has_room_for_the_wider_of_the_stored_dtype_and_the_wanted_one():
    config = tiny("llama").config
    for stored, wanted, wider in (
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (None, "bfloat16", torch.float32),
    ):
        config.dtype = stored
        assert {weight.dtype for weight in empty_model(config, wanted).parameters()} == {wider}


def test_a_model_that_fits_nowhere_is_refused_with_its_size():
    model = empty_model(TINY["llama"], "float32")
    with pytest.raises(
        ModelError, match=r"needs 0\.0 GB for its weights and does not fit .*0: 0\.0 GB; layers"
    ):
        make_device_map(model, {0: 4000})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_without_an_accelerator_there_is_nothing_to_split_over(model_folder):
    with pytest.raises(ModelError, match=r"needs an accelerator, and none is available"):
        load(model_folder, device="split")


def test_the_papers_model_is_not_split(tmp_path):
    tiny("ffmem_adaptive").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"cannot be split over devices: its adaptive softmax"):
        load(tmp_path / "model", device={"": "cpu"})
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ModelError, match=r"checkpoint .*model\.pt cannot be split over devices"):
        load(tmp_path / "model.pt", device={"": "cpu"})


class Placed(AlignDevicesHook):
    """accelerate's hook on a module that lies on its device already."""

    def init_hook(self, module):
        return module


def on_two_gpus(model, mode):
    """Put embeddings, first layer and head on one GPU that is not there, the rest on another."""
    layers, others = parts(model)
    final = [path for path in others if path == FAMILIES[model.config.model_type].final_norm]
    for path in [*layers, *others, *(p for p, _ in model.named_modules() if "rotary" in p)]:
        device = SECOND if path in [*layers[1:], *final] else FIRST
        for module in model.get_submodule(path).modules():
            for kept in (module._parameters, module._buffers):
                for name, tensor in kept.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        fake = mode.from_tensor(tensor.data).to(device)
                        kept[name] = (
                            nn.Parameter(fake, False) if kept is module._parameters else fake
                        )
            if not hasattr(module, "_hf_hook"):
                add_hook_to_module(module, Placed(device))
    root = AlignDevicesHook(FIRST, io_same_device=True)
    add_hook_to_module(model, root)


def moved(norm, mode):
    """Put what ffmem knows of the final norm where the norm lies."""
    for name in ("gain", "offset"):
        setattr(norm, name, mode.from_tensor(getattr(norm, name)).to(SECOND))
    if norm._float32 is not None:
        for name, weight in list(norm._float32.named_parameters()):
            fake = nn.Parameter(mode.from_tensor(weight.data).to(SECOND), False)
            norm._float32.register_parameter(name, fake)


@pytest.mark.parametrize("name", NAMES)
def test_on_two_gpus_only_tensors_of_one_device_meet(name):
    memories = ffmem.load(tiny(name), tiny_tokenizer())
    expected = memories.trace(TOKENS)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        on_two_gpus(memories.model, mode)
        assert memories.device == FIRST
        found = memories.trace(TOKENS)
        for layer, trace in enumerate(found):
            for tensor, true in zip(trace, expected[layer], strict=True):
                assert (tensor is None) == (true is None)
                assert tensor is None or tensor.device == (SECOND if layer else FIRST)
                assert tensor is None or tensor.shape == true.shape
        seen = []
        with memories.read_coefficients(lambda bank, m, gate, routing: seen.append(m.device)):
            memories.forward(TOKENS)
        assert seen == [FIRST, *[SECOND] * (memories.n_layers - 1)]
        for layer, trace in enumerate(found):
            assert (trace.coefficients @ memories.values(layer)).device == trace.residual.device
            assert (trace.ff_input @ memories.keys(layer).T).device == trace.residual.device
            for vectors in (trace.residual, trace.layer_output):
                assert memories.head.logits(vectors.flatten(0, 1)).device == FIRST
            assert memories.head.folded(trace.ff_output.flatten(0, 1)).device == FIRST
        moved(memories.head.norm, mode)
        stream = found[0].residual.flatten(0, 1)
        sigma = memories.head.denominator(stream).to(FIRST)
        law = sigma[:, None] * (memories.head.unscaled(stream) - memories.head.constant())
        assert law.device == FIRST
        assert memories.logits(TOKENS).device == FIRST
        lying = describe_devices(memories.model, memories.row.blocks)
        assert set(lying) == {str(FIRST), str(SECOND)}
        assert lying[str(FIRST)].startswith("layer 0, ")


@pytest.mark.parametrize("name", NAMES)
def test_on_two_gpus_a_prompt_runs_from_any_layer_up(name, monkeypatch):
    # Fake tensors have no numbers to compare.
    monkeypatch.setattr(torch, "equal", lambda one, other: one.shape == other.shape)
    memories = ffmem.load(tiny(name), tiny_tokenizer())
    forward = PartialForward(memories, TOKENS[0].tolist(), 4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        on_two_gpus(memories.model, mode)
        for kept in (forward.layers, forward._inputs, forward._extras):
            kept.clear()
        forward._run_clean()
        assert [hidden.device for hidden in forward._inputs.values()] == [
            FIRST,
            *[SECOND] * (memories.n_layers - 1),
        ]
        for lowest in range(memories.n_layers):
            output = forward.run(lowest, 2, {lowest: lambda rows: rows.coefficients * 0.5})
            assert (output.device, output.shape) == (SECOND, (2, memories.hidden))
            assert log_probability(memories.head, output, 3).device == FIRST
