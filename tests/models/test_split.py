"""Models over several devices: on this machine with weights on disk, and on made-up GPUs.

Weights that accelerate keeps on disk are empty between calls, as those in main memory are beside a
GPU. Two GPUs that are not there are torch's own fake tensors: no numbers, but real rules of which
tensors may meet.
"""

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import ffmem
from ffmem.causal.edits import Edits
from ffmem.causal.effect import effect
from ffmem.causal.likelihood import log_probability
from ffmem.causal.patch import edited
from ffmem.causal.prompt import read_prompt
from ffmem.causal.upward import Upward
from ffmem.errors import ModelError
from ffmem.models.describe import describe
from ffmem.models.families import FAMILIES
from ffmem.models.load import DTYPES, empty, load, quiet
from ffmem.models.modules import bias
from ffmem.models.split import (
    copied,
    device_map,
    device_of,
    held,
    is_split,
    missing,
    places,
    weights,
)
from tests.conftest import text_model
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


def dispatched(model, folder, others="disk"):
    """Return the model with its first layer in memory and all other layers on disk."""
    layers, rest = parts(model)
    where = dict.fromkeys(rest, others) | dict.fromkeys(layers, "disk") | {layers[0]: "cpu"}
    with quiet():
        dispatch_model(model, where, offload_dir=folder)
    return model


@pytest.fixture(params=NAMES)
def pair(request, tmp_path):
    """The memories of a model in memory, and of the same model with most weights on disk."""
    models = tiny(request.param), dispatched(tiny(request.param), tmp_path / "weights")
    return tuple(ffmem.load(model, tiny_tokenizer()) for model in models)


def same(one, other):
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def emptied(memories):
    return [linear.get_parameter("weight").is_meta for linear in memories.value_maps]


def test_weights_on_disk_are_those_of_the_model(pair):
    whole, split = pair
    assert emptied(split) == [layer > 0 for layer in range(split.n_layers)]
    for layer in range(whole.n_layers):
        names = ["values", "bias", "readable_values", "keys", "key_bias"]
        for name in [*names, *(["up_keys", "up_bias"] if whole.gated else [])]:
            assert same(getattr(split, name)(layer), getattr(whole, name)(layer)), name
    assert same(split.head.embedding, whole.head.embedding)
    assert same(split.head.norm.gain, whole.head.norm.gain)
    assert (split.dtype, split.device) == (whole.dtype, whole.device)
    assert (split.hidden, split.n_memories) == (whole.hidden, whole.n_memories)


def test_the_hash_of_the_weights_is_the_same_before_any_pass_and_after(pair, tmp_path):
    whole, split = pair
    split.logits(TOKENS)  # accelerate forgets at a pass which weights are one
    assert split.fingerprint() == whole.fingerprint()
    name = next(name for name in NAMES if TINY[name].model_type == whole.family)
    assert [n for n, _ in weights(dispatched(tiny(name), tmp_path / "again"))] == sorted(
        n for n, _ in tiny(name).named_parameters()
    )


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


def test_a_pass_that_stops_early_reads_the_same_and_leaves_the_weights_on_disk(pair):
    found = []
    for memories in pair:
        seen = []
        with memories.reading(lambda layer, m, gate, seen=seen: seen.append((layer, m.clone()))):
            memories.forward(TOKENS, layers=1)
        found.append(seen)
    ((layer, expected),) = found[0]
    assert [layer] == [layer for layer, _ in found[1]]
    assert same(found[1][0][1], expected)
    assert emptied(pair[1]) == [layer > 0 for layer in range(pair[1].n_layers)]


def test_effects_are_the_same(pair):
    found = [
        effect(one, read_prompt(one, "w5 w9 w17 w30", 0), candidates=6, integrated=True, steps=2)
        for one in pair
    ]
    assert found[1].to_dict() == found[0].to_dict()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_index_has_the_same_bytes(name, tokenizer, corpus_file, tmp_path):
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    models = text_model(name), dispatched(text_model(name), tmp_path / "weights")
    for model, out in zip(models, ("whole", "split"), strict=True):
        memories = ffmem.load(model, tokenizer)
        ffmem.index(memories, corpus, tmp_path / out, t=6, threads=1)
    files = sorted(path for path in (tmp_path / "whole").rglob("*.*") if path.is_file())
    assert any(path.name == "manifest.json" for path in files)
    for path in files:
        if path.suffix != ".sqlite":
            other = tmp_path / "split" / path.relative_to(tmp_path / "whole")
            assert other.read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_folder_loaded_over_devices_is_the_folder(name, stored, dtype, tmp_path):
    model = tiny(name).to(DTYPES[stored])
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().tokenizer.save_pretrained(tmp_path / "model")
    layers, rest = parts(model)
    where = dict.fromkeys([*rest, *layers[1:]], "disk") | {layers[0]: "cpu"}
    whole = load(tmp_path / "model", dtype=dtype, device="cpu")
    split = load(tmp_path / "model", dtype=dtype, device=where)
    assert is_split(split.model)
    assert emptied(split) == [False, True]
    assert split.fingerprint() == whole.fingerprint()
    assert split.dtype == whole.dtype
    assert same(split.values(1), whole.values(1))
    assert same(split.logits(TOKENS), whole.logits(TOKENS))


def test_a_copy_of_a_module_has_its_weights_and_none_of_the_others(tmp_path):
    model = dispatched(tiny("llama"), tmp_path / "weights")
    norm = copied(model.model.norm)
    x = torch.randn(2, norm.weight.shape[0])
    assert same(norm.weight, tiny("llama").model.norm.weight)
    assert same(norm(x), tiny("llama").model.norm(x))
    assert not is_split(norm)
    assert model.model.norm.weight.is_meta


def test_weights_that_are_nowhere_are_refused_also_in_a_split_model(tmp_path):
    model = dispatched(tiny("llama"), tmp_path / "weights")
    model.model.layers[0].mlp.down_proj.to("meta")
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.weight are not in memory"):
        ffmem.load(model, tiny_tokenizer())


def test_a_weight_on_disk_that_is_no_number_is_refused(tmp_path):
    model = tiny("llama")
    model.model.layers[1].mlp.down_proj.weight.data[2, 3] = torch.nan
    with pytest.raises(ModelError, match=r"no number \(in layer 1, .*down_proj\.weight\)"):
        ffmem.load(dispatched(model, tmp_path / "weights"), tiny_tokenizer())


def test_the_weights_of_a_split_model_cannot_be_rewritten(tmp_path):
    memories = ffmem.load(dispatched(tiny("llama"), tmp_path / "weights"), tiny_tokenizer())
    with pytest.raises(ModelError, match=r"split over devices\. Load it on one device"):
        edited(memories, Edits.of(off=["L1N3"]))


def test_describe_says_what_lies_where(tmp_path):
    whole = ffmem.load(tiny("llama"), tiny_tokenizer())
    expected = "layers 0 to 1, model.embed_tokens, model.norm, lm_head"
    assert describe(whole)["devices"] == {"cpu": expected}
    split = ffmem.load(dispatched(tiny("llama"), tmp_path / "weights", "cpu"), tiny_tokenizer())
    assert describe(split)["devices"] == {
        "cpu": "layer 0, model.embed_tokens, model.norm, lm_head",
        "disk, moved to cpu when used": "layer 1",
    }


@pytest.mark.parametrize(("name", "tied"), [("gpt2", True), ("gpt2 untied", False)])
def test_describe_knows_which_embeddings_are_tied_though_they_are_away(name, tied, tmp_path):
    memories = ffmem.load(dispatched(tiny(name), tmp_path / "weights"), tiny_tokenizer())
    assert describe(memories)["head"]["tied"] is tied


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_never_divides_a_layer_and_uses_every_device_that_it_needs(name):
    model = empty(TINY[name], "float32")
    assert all(weight.is_meta for weight in model.parameters())
    size = sum(weight.numel() * 4 for weight in model.parameters())
    where = device_map(model, {0: size // 2, 1: size // 2, "cpu": 4 * size})
    layers, _ = parts(model)
    for path in where:
        assert not any(path.startswith(f"{layer}.") for layer in layers), path
    assert len(set(where.values())) > 1
    assert set(device_map(model, {0: 8 * size, "cpu": 8 * size}).values()) == {0}


def test_the_plan_has_room_for_the_wider_of_the_stored_dtype_and_the_wanted_one():
    config = tiny("llama").config
    for stored, wanted, wider in (
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (None, "bfloat16", torch.float32),
    ):
        config.dtype = stored
        assert {weight.dtype for weight in empty(config, wanted).parameters()} == {wider}


def test_a_model_that_fits_nowhere_is_refused_with_its_size():
    model = empty(TINY["llama"], "float32")
    with pytest.raises(ModelError, match=r"take 0\.0 GB, and do not fit .*0: 0\.0 GB, cpu: 0\.0"):
        device_map(model, {0: 4000, "cpu": 4000})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_without_an_accelerator_there_is_nothing_to_split_over(model_folder):
    with pytest.raises(ModelError, match=r"no accelerator here to split a model over\."):
        load(model_folder, device="split")


def test_the_papers_model_is_not_split(tmp_path):
    tiny("ffmem_adaptive").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"was to be split over devices. Its adaptive softmax"):
        load(tmp_path / "model", device={"": "cpu"})
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ModelError, match=r"checkpoint .*model\.pt was to be split over devices"):
        load(tmp_path / "model.pt", device={"": "cpu"})


def test_a_weight_in_main_memory_is_given_where_its_module_computes():
    linear = nn.Linear(3, 2, device="meta", dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        lying = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
        add_hook_to_module(linear, Placed(FIRST, offload=True, weights_map=lying))
        for name in ("weight", "bias"):
            found = held(linear, name)
            assert (found.device, found.dtype) == (FIRST, torch.bfloat16)
        assert bias(linear).device == device_of(linear) == FIRST
        assert {weight.device.type for _, weight in weights(linear)} == {"cpu"}
    assert missing(linear) is None


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
    if norm._exact is not None:
        for name, weight in list(norm._exact.named_parameters()):
            fake = nn.Parameter(mode.from_tensor(weight.data).to(SECOND), False)
            norm._exact.register_parameter(name, fake)


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
        with memories.reading(lambda layer, m, gate: seen.append(m.device)):
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
        lying = places(memories.model, memories.row.blocks)
        assert set(lying) == {str(FIRST), str(SECOND)}
        assert lying[str(FIRST)].startswith("layer 0, ")


@pytest.mark.parametrize("name", NAMES)
def test_on_two_gpus_a_prompt_runs_from_any_layer_upward(name):
    memories = ffmem.load(tiny(name), tiny_tokenizer())
    upward = Upward(memories, TOKENS[0].tolist(), 4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        on_two_gpus(memories.model, mode)
        for kept in (upward.layers, upward._inputs, upward._forms):
            kept.clear()
        upward._run_clean()
        assert [hidden.device for hidden in upward._inputs] == [
            FIRST,
            *[SECOND] * (memories.n_layers - 1),
        ]
        for lowest in range(memories.n_layers):
            output = upward.outputs(lowest, 2, {lowest: lambda m: m * 0.5})
            assert (output.device, output.shape) == (SECOND, (2, memories.hidden))
            assert log_probability(memories.head, output, 3).device == FIRST
