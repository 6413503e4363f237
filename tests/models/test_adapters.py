"""Adapters: merged on load, into the base that they were trained on, and into no other."""

import shutil
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ffmem
from ffmem.errors import FfmemError, ModelError, StoreError
from ffmem.models.banks import ExpertBank
from ffmem.models.load import load
from tests.adapters import change_settings, rename_base, write_adapter, write_lora
from tests.tiny import tiny, tiny_tokenizer

TOKENS = torch.tensor([[3, 9, 27, 17, 51, 25]])
LINEAR = ["gate_proj", "up_proj", "down_proj", "q_proj", "o_proj"]


def save(folder, name="llama", seed=0, dtype=torch.float32):
    tiny(name, seed).to(dtype).save_pretrained(folder)
    tiny_tokenizer().tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path):
    return save(tmp_path / "base")


@pytest.fixture
def lora(base, tmp_path):
    return write_lora(base, tmp_path / "lora")


def logits_beside(base, adapter):
    """The logits of the base with the adapter beside it: peft, nothing merged."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
        return model(TOKENS).logits


CONFIGS = {
    "LoRA": peft.LoraConfig(r=2, target_modules=LINEAR),
    "DoRA": peft.LoraConfig(r=2, target_modules=LINEAR, use_dora=True),
    "rank-stabilized": peft.LoraConfig(r=2, target_modules=["down_proj"], use_rslora=True),
    "some layers": peft.LoraConfig(
        r=2, target_modules=["down_proj"], layers_to_transform=[1], layers_pattern="layers"
    ),
    "embeddings": peft.LoraConfig(r=2, target_modules=["embed_tokens", "down_proj"]),
    "whole modules": peft.LoraConfig(
        r=2, target_modules=["down_proj"], modules_to_save=["lm_head", "embed_tokens"]
    ),
    "LoHa": peft.LoHaConfig(r=2, target_modules=LINEAR),
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_merged_model_computes_what_the_base_computes_with_the_adapter(kind, base, tmp_path):
    adapter = write_adapter(base, tmp_path / "adapter", CONFIGS[kind])
    expected = logits_beside(base, adapter)
    assert not torch.allclose(expected, load(base).logits(TOKENS), atol=0.01)
    for memories in (load(adapter), load(base, adapter=adapter)):
        torch.testing.assert_close(memories.logits(TOKENS), expected, atol=2e-4, rtol=2e-4)
        assert memories.source == str(base.resolve())
        assert memories.adapter.source == str(adapter.resolve())
        assert memories.adapter.base_hash == load(base).fingerprint()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_an_adapter_of_experts_is_merged(name, tmp_path):
    base = save(tmp_path / "base", name)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    adapter = write_adapter(base, tmp_path / "adapter", config)
    memories = load(adapter)
    torch.testing.assert_close(
        memories.logits(TOKENS), logits_beside(base, adapter), atol=2e-4, rtol=2e-4
    )
    pairs = zip(memories.banks[0], load(base).banks[0], strict=True)
    for bank, plain in (pair for pair in pairs if isinstance(pair[0], ExpertBank)):
        assert not torch.equal(bank.value_rows(), plain.value_rows())


def test_weights_are_merged_in_float32_whatever_they_are_stored_in(tmp_path):
    base = save(tmp_path / "base", dtype=torch.bfloat16)
    adapter = write_lora(base, tmp_path / "lora")
    merged = load(adapter)
    torch.testing.assert_close(
        merged.logits(TOKENS), logits_beside(base, adapter), atol=2e-4, rtol=2e-4
    )
    half = load(adapter, dtype="bfloat16")
    assert (half.dtype, half.fingerprint()) == (torch.bfloat16, merged.fingerprint())
    assert load(adapter, dtype="auto").dtype == torch.float32


def test_an_adapter_brings_its_own_tokenizer(base, lora):
    tokenizer = tiny_tokenizer().tokenizer
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(lora)
    assert load(lora).tokenizer.tokenizer.chat_template == tokenizer.chat_template
    assert load(base).tokenizer.tokenizer.chat_template is None


def test_a_merged_model_can_be_split_over_devices(lora):
    whole = load(lora)
    devices = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu"}
    devices |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    split = load(lora, device=devices)
    assert split.fingerprint() == whole.fingerprint()
    torch.testing.assert_close(split.logits(TOKENS), whole.logits(TOKENS))


# The base


def test_a_base_may_move_as_long_as_it_keeps_its_name(base, lora, tmp_path):
    before = load(lora).fingerprint()
    moved = tmp_path / "elsewhere" / "base"
    shutil.copytree(base, moved)
    shutil.rmtree(base)
    with pytest.raises(ModelError, match=r"was trained on this model\. If it is elsewhere, pass"):
        load(lora)
    assert load(moved, adapter=lora).fingerprint() == before
    in_cache = tmp_path / "models--org--Base" / "snapshots" / ("0" * 40)
    assert load(moved, adapter=rename_base(lora, in_cache)).fingerprint() == before
    for revision in (None, "main"):
        beside = {"base_model_name_or_path": "../elsewhere/base", "revision": revision}
        assert load(change_settings(lora, **beside)).source == str(moved)
    with pytest.raises(ModelError, match=r"does not name its base model\. Pass the base as MODEL"):
        load(change_settings(lora, base_model_name_or_path=None))
    assert load(moved, adapter=lora).fingerprint() == before


def test_an_adapter_of_a_model_with_another_name_is_refused(base, lora, tmp_path):
    other = shutil.copytree(base, tmp_path / "other")
    with pytest.raises(ModelError, match=rf"trained on {base}, not on {other}\. Pass that model\."):
        load(other, adapter=lora)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", r"does not fit its base model: Target modules"),
        (
            "llama wide",
            r"does not fit its base model: \S*lora_[AB]\.weight is .*24.*, but this model needs",
        ),
        ("llama deep", r"does not fit its base model: 6 missing weights, such as .*layers\.2\."),
        ("llama flat", r"does not fit its base model: 6 unexpected weights, such as .*layers\.1\."),
    ],
)
def test_an_adapter_of_another_architecture_is_refused(name, message, lora, tmp_path):
    family, _, change = name.partition(" ")
    config = tiny(family).config
    if change:
        settings = {"wide": {"intermediate_size": 40}, "deep": {"num_hidden_layers": 3}}
        config = config.from_dict(config.to_dict() | settings.get(change, {"num_hidden_layers": 1}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "unlike" / "base")
    tiny_tokenizer().tokenizer.save_pretrained(tmp_path / "unlike" / "base")
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "unlike" / "base", adapter=lora)


def test_adapters_are_not_stacked(base, lora, tmp_path):
    above = rename_base(shutil.copytree(lora, tmp_path / "above"), lora)
    with pytest.raises(ModelError, match=r"an adapter too\. Merge that one"):
        load(above)
    with pytest.raises(ModelError, match=r"is an adapter itself\. Pass its base model"):
        load(lora, adapter=above)


# What is no adapter, or cannot be merged


def test_a_folder_without_an_adapter_is_refused(base, tmp_path):
    with pytest.raises(ModelError, match=r"is not an adapter: it has no adapter_config\.json"):
        load(base, adapter=base)
    with pytest.raises(ModelError, match=r"is not an adapter: no such folder"):
        load(base, adapter=tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"peft_type": 3}'])
def test_a_damaged_config_is_refused(text, lora):
    (lora / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"Use the folder that peft's save_pretrained wrote"):
        load(lora)


def test_a_pickled_adapter_is_refused(lora):
    weights = load_file(lora / "adapter_model.safetensors")
    torch.save(weights, lora / "adapter_model.bin")
    (lora / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"only adapter_model\.bin, a pickle, which ffmem never"):
        load(lora)


def test_a_truncated_adapter_is_refused(lora):
    path = lora / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"Cannot read .*adapter_model\.safetensors.*again"):
        load(lora)


def test_an_adapter_that_lacks_weights_is_refused(lora):
    weights = load_file(lora / "adapter_model.safetensors")
    weights.pop(next(name for name in weights if "layers.1.mlp.down_proj.lora_B" in name))
    save_file(weights, lora / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 missing weights, such as .*layers\.1\.mlp\.down_proj"):
        load(lora)


UNMERGEABLE = {
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "PREFIX_TUNING": peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "P_TUNING": peft.PromptEncoderConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", UNMERGEABLE)
def test_an_adapter_that_changes_no_weights_is_refused_by_name(kind, base, tmp_path):
    adapter = write_adapter(base, tmp_path / "adapter", UNMERGEABLE[kind])
    with pytest.raises(ModelError, match=rf"\({kind}\) cannot be merged into its base model"):
        load(adapter)


def test_an_adapter_that_acts_on_some_tokens_only_is_refused(lora):
    with pytest.raises(ModelError, match=r"\(LORA\) cannot be merged .*\(aLoRA\)"):
        load(change_settings(lora, alora_invocation_tokens=[5, 6]))


def test_no_module_that_an_adapter_names_is_imported(lora):
    change_settings(lora, megatron_config={"a": 1}, megatron_core="this")
    with pytest.raises(ModelError, match=r"cannot be merged .* Megatron"):
        load(lora)


def test_a_kind_that_peft_does_not_know_is_refused(lora):
    with pytest.raises(ModelError, match=r"has the kind 'MAGIC', which peft \S+ does not know"):
        load(change_settings(lora, peft_type="MAGIC"))


def test_an_adapter_beside_a_whole_model_is_not_ignored(base, lora):
    for path in lora.iterdir():
        shutil.copy(path, base)
    with pytest.raises(ModelError, match=r"both a whole model and an adapter.* remove adapter_con"):
        load(base)


def test_a_model_in_memory_is_merged_by_its_owner(base, lora):
    model = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(ModelError, match=r"merge the adapter with peft \(merge_and_unload\)"):
        load(model, tiny_tokenizer(), adapter=lora)
    with pytest.raises(ModelError, match=r"PeftModel\w* is not a transformers model"):
        load(peft.PeftModel.from_pretrained(model, lora), tiny_tokenizer())


# Indexes


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text(
        "\n".join(" ".join(f"w{3 + (7 * i * j) % 60}" for j in range(1, 9)) for i in range(1, 12))
    )
    return ffmem.Corpus(str(tmp_path / "corpus.txt"), unit="line")


def test_an_index_names_base_and_adapter_and_finds_both_again(base, lora, corpus, tmp_path):
    made = ffmem.index(base, corpus, tmp_path / "index", t=3, adapter=lora)
    record = made.manifest.model
    assert record.source == str(base.resolve())
    assert record.hash == load(lora).fingerprint()
    assert record.adapter.source == str(lora.resolve())
    assert record.adapter.base_hash == load(base).fingerprint()
    assert str(lora) in repr(made)
    # The same index, by its LoRA folder alone; then by another model.
    ffmem.index(lora, corpus, tmp_path / "index", t=3)
    with pytest.raises(StoreError, match=rf"adapter: {lora} → none"):
        ffmem.index(base, corpus, tmp_path / "index", t=3)
    assert ffmem.trace(made, "w5 w6").layers == ffmem.trace(lora, "w5 w6", start="</s>").layers or (
        made.manifest.start.token != "</s>"
    )
    moved = shutil.move(lora, tmp_path / "moved")
    with pytest.raises(FfmemError, match=r"`adapter`"):
        ffmem.trace(made, "w5 w6")
    for where in ({"adapter": moved}, {"model": moved}):
        assert ffmem.trace(made, "w5 w6", **where).layers
    (tmp_path / "more.txt").write_text("w9 w8 w7\nw3 w3 w4\n")
    more = ffmem.Corpus(str(tmp_path / "more.txt"), unit="line")
    larger = ffmem.extend(tmp_path / "index", more, adapter=moved)
    assert larger.manifest.model.adapter == record.adapter


def test_workers_load_the_adapter_too(lora, corpus, tmp_path):
    alone = ffmem.index(lora, corpus, tmp_path / "one", t=3, threads=1)
    several = ffmem.index(lora, corpus, tmp_path / "two", t=3, threads=1, workers=1)
    assert several.manifest == alone.manifest


def test_a_run_with_another_adapter_is_not_resumed(base, lora, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("ffmem.indexing.build.finish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ffmem.index(base, corpus, tmp_path / "index", t=3, adapter=lora)
    monkeypatch.undo()
    for other in ({}, {"adapter": shutil.copytree(lora, tmp_path / "other")}):
        with pytest.raises(StoreError, match=r"unfinished index with other settings"):
            ffmem.index(base, corpus, tmp_path / "index", t=3, **other)
    ffmem.index(lora, corpus, tmp_path / "index", t=3)


def test_base_and_adapter_are_compared_in_one_call(base, lora, corpus, tmp_path):
    found = ffmem.compare_models(base, None, corpus, tmp_path / "out", adapter=lora, t=3)
    assert found.settings["first"]["adapter"] is None
    assert found.settings["second"]["adapter"] == str(lora.resolve())
    first, second = (ffmem.open(tmp_path / "out" / name) for name in ("first", "second"))
    id = first.manifest.start.id
    start = "none" if id is None else f"id:{id}"
    alone = [
        ffmem.index(base, corpus, tmp_path / "one", t=3),
        ffmem.index(lora, corpus, tmp_path / "two", t=3, start=start),
    ]
    assert [one.manifest for one in alone] == [first.manifest, second.manifest]
    for other, options in ((None, {}), (lora, {"adapter": lora})):
        with pytest.raises(FfmemError, match="either a second model, or an adapter"):
            ffmem.compare_models(base, other, corpus, tmp_path / "out", **options)
