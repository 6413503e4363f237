import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import ffmem
from ffmem.errors import ModelError
from ffmem.mini_wiki import MODEL
from ffmem.models.arguments import NAMED_MODELS, resolve_model
from ffmem.models.checkpoint import convert_gguf
from ffmem.models.families import FAMILIES
from ffmem.models.load import describe, find_device, load
from ffmem.models.memories import fingerprint
from tests.adapters import rename_base, write_lora
from tests.tiny import TINY, read, tiny, tiny_tokenizer

ORACLE = Path(__file__).parent.parent / "oracle"


@pytest.fixture
def folder(tmp_path):
    """A tiny llama with its tokenizer, as a Hugging Face folder."""
    tiny("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_the_memories_that_were_saved(folder):
    loaded, original = load(folder), load(tiny("llama"), tiny_tokenizer())
    assert loaded.fingerprint() == original.fingerprint()
    assert loaded.source == str(folder.resolve())
    assert loaded.tokenizer.encode(["w5 w6"])[0].ids == [5, 6]


def test_the_hash_of_the_weights_does_not_depend_on_the_dtype_of_the_pass(folder):
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert load(folder, dtype="bfloat16").fingerprint() == load(folder).fingerprint()


def test_a_changed_weight_changes_the_hash(folder):
    before = load(folder).fingerprint()
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] += 1e-3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert load(folder).fingerprint() != before


def test_a_checkpoint_that_lacks_weights_is_refused(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 missing keys, such as .*layers\.1\.mlp\.up_proj"):
        load(folder)


def without_last_layer(folder):
    """Let the config name one layer fewer than the checkpoint has."""
    config = json.loads((folder / "config.json").read_text())
    count = next(name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in config)
    (folder / "config.json").write_text(json.dumps(config | {count: config[count] - 1}))


def add_weights(folder, *names):
    weights = load_file(folder / "model.safetensors")
    weights |= {name: torch.ones(3) for name in names}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "opt", "ffmem_adaptive"])
def test_a_config_of_fewer_layers_than_the_checkpoint_is_refused(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    tiny_tokenizer().tokenizer.save_pretrained(tmp_path)
    without_last_layer(tmp_path)
    with pytest.raises(
        ModelError, match=r"does not match its config: .* unexpected keys, such as \S+\.1\."
    ):
        load(tmp_path)


def test_a_bias_that_the_config_does_not_know_is_refused(tmp_path):
    tiny("llama with biases").save_pretrained(tmp_path)
    tiny_tokenizer().tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_bias": False}))
    with pytest.raises(
        ModelError, match=r"6 unexpected keys, such as \S+mlp\.down_proj\.bias, which"
    ):
        load(tmp_path)


@pytest.mark.parametrize("name", TINY)
def test_a_checkpoint_of_every_family_loads_with_what_older_versions_stored(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    tiny_tokenizer().tokenizer.save_pretrained(tmp_path)
    layer = FAMILIES[TINY[name].model_type].for_config(TINY[name].get_text_config()).blocks + ".0."
    old = ("self_attn.rotary_emb.inv_freq", "attn.masked_bias", "attn.attention.bias")
    add_weights(tmp_path, *(layer + name for name in old), "visual.patch_embed.weight")
    assert load(tmp_path).fingerprint() == read(name).fingerprint()


def test_what_transformers_ignores_by_itself_is_ignored(tmp_path):
    """Heads that predict further tokens, which this family's checkpoints have."""
    settings = TINY["qwen2"].to_dict() | {"model_type": "qwen3_5_text", "head_dim": 8}
    kind = AutoConfig.for_model("qwen3_5_text")
    model = AutoModelForCausalLM.from_config(type(kind).from_dict(settings))
    assert any(re.match(one, "mtp.") for one in model._keys_to_ignore_on_load_unexpected)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().tokenizer.save_pretrained(tmp_path)
    add_weights(tmp_path, "mtp.fc.weight")
    assert load(tmp_path).fingerprint() == fingerprint(model)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.cfloat])
def test_weights_that_are_no_real_numbers_are_refused(folder, dtype):
    weights = load_file(folder / "model.safetensors")
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"stores \S+ as \w+, but its config has no quantiz"):
        load(folder)


def test_weights_of_several_files_that_are_no_real_numbers_are_refused(folder):
    (folder / "model.safetensors").unlink()
    tiny("llama").save_pretrained(folder, max_shard_size="5KB")
    assert load(folder).fingerprint() == read("llama").fingerprint()
    for path in sorted(folder.glob("model-*.safetensors"))[-1:]:
        save_file({k: v.to(torch.int8) for k, v in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"stores \S+ as I8, but its config has no quantization"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "count"), [("llama", -1), ("gemma3", -1), ("gpt2", -1), ("gpt2", 0), ("opt", 0)]
)
def test_a_config_that_counts_less_than_one_is_refused(name, count, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.get("text_config", config)
    text["n_head" if name == "gpt2" else "num_attention_heads"] = count
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"has num_attention_heads = {count}, which must be at"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "setting"),
    [
        ("llama", {"hidden_act": "sillu"}, "hidden_act = 'sillu'"),
        ("gpt2", {"activation_function": "no"}, "activation_function = 'no'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            "rope_parameters.rope_type = 'spiral'",
        ),
    ],
)
def test_a_setting_that_transformers_does_not_know_is_named(name, changes, setting, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    tiny_tokenizer().tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=rf"its config says {setting}, which transformers"):
        load(tmp_path)


def test_a_truncated_checkpoint_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="Cannot load the model"):
        load(folder)


def test_weights_that_are_no_numbers_are_refused_with_their_layer(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layer 1|layers\.1"):
        load(folder)


def test_a_pickle_is_never_read(folder):
    (folder / "model.safetensors").unlink()
    torch.save(tiny("llama").state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load(folder)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/place", "a/b/c", "model.pt", "x.gguf"])
def test_what_is_not_there_is_refused_with_the_forms_that_exist(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no such file or folder\. Use a Hugging Face folder"):
        resolve_model(name)


def test_a_name_that_is_too_long_is_refused():
    for name in ("a" * 5000, "org/" + "a" * 5000, "./" + "a" * 5000 + ".gguf"):
        with pytest.raises(ModelError, match=r"No model '.{100}'… \(5,\d+ characters\): File"):
            load(name)


def test_a_name_that_is_nearly_right_is_mended():
    for name in ("smollm2", "SmolLM2-135M"):
        with pytest.raises(ModelError, match=r"Did you mean smollm2-135m\?"):
            resolve_model(name)


def test_a_file_of_another_kind_is_refused(folder):
    with pytest.raises(ModelError, match=r"is not a model file\. Use a Hugging"):
        resolve_model(str(folder / "config.json"))


def test_a_model_without_a_tokenizer_is_refused(folder):
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(ModelError, match="cannot load a tokenizer for"):
        load(folder)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"neither config\.json"):
        load(tmp_path)


def test_names_and_hub_ids_stay_as_they_are():
    assert [resolve_model(name) for name in (*NAMED_MODELS, "org/name@v1", "gpt2")] == [
        *NAMED_MODELS,
        "org/name@v1",
        "gpt2",
    ]


def test_a_device_that_is_not_there_is_refused():
    assert find_device("cpu") == torch.device("cpu")
    for device in ("nonsense", "cuda:99"):
        with pytest.raises(ModelError, match=f"`device` {device} is not available"):
            find_device(device)
    for device in ("tpu", "xla"):
        with pytest.raises(ModelError) as raised:
            find_device(device)
        assert len(str(raised.value)) < 200  # without the lists that torch adds


def test_a_dtype_that_is_not_there_is_refused(folder):
    with pytest.raises(ModelError, match=r"`dtype` float8 is unknown\. Use float32, bfloat"):
        load(folder, dtype="float8")


def test_a_model_in_memory_needs_its_tokenizer():
    with pytest.raises(ModelError, match="Pass the tokenizer"):
        load(tiny("llama"))


@pytest.mark.parametrize("path", [ORACLE, ORACLE / "model.pt"])
def test_the_papers_model_loads_from_its_folder_or_its_file(path):
    memories = load(path)
    assert (memories.family, memories.n_layers, memories.layout.widths[0]) == (
        "ffmem_adaptive",
        4,
        128,
    )


def test_a_missing_dictionary_is_named(tmp_path):
    shutil.copy(ORACLE / "model.pt", tmp_path)
    with pytest.raises(ModelError, match=r"dict\.txt"):
        load(tmp_path)


def test_a_hub_id_with_a_revision_is_read_from_the_hubs_cache(folder, tmp_path):
    """The real path through the Hub's client, with a cache on disk in place of the network."""
    repository = tmp_path / "hub" / "models--org--tiny"
    commit = "1234567890abcdef1234567890abcdef12345678"
    words = tmp_path / "hub" / "models--org--words"
    lora = tmp_path / "hub" / "models--org--lora"
    adapter = write_lora(
        folder, tmp_path / "adapter", base_model_name_or_path="org/tiny", revision="v1"
    )
    for place, model in ((repository, folder), (words, MODEL), (lora, adapter)):
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "v1").write_text(commit)
        shutil.copytree(model, place / "snapshots" / commit)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    # One process, which imports everything once, ends as the second command ends.
    code = (
        "import sys; from ffmem.cli import main; from ffmem import load\n"
        "print(load('org/words@v1').tokenizer.word_level)\n"
        "lora = load('org/lora@v1')\n"
        "print(lora.source, lora.revision, lora.adapter.source, lora.fingerprint())\n"
        "for name in ('org/tiny@v1', 'org/tiny@v2'):\n"
        "    sys.argv[1:] = ['describe', '--json', name]\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        if end.code: raise\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    by_words, merged, shown = done.stdout.split("\n", 2)
    assert by_words == "True"  # its dict.txt is found
    local = load(folder, adapter=rename_base(adapter, folder)).fingerprint()
    assert merged == f"org/tiny@v1 v1 org/lora@v1 {local}"
    facts = json.loads(shown)
    assert (facts["source"], facts["revision"], facts["layers"]) == ("org/tiny@v1", "v1", 2)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("Error: No model 'org/tiny@v2'")
    assert "Traceback" not in done.stderr


def write_gguf(path, model, words):
    """Write a tiny llama as a GGUF file, the way llama.cpp's converter lays it out."""
    config, weights = model.config, {k: v.numpy() for k, v in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] * 2 + [1] * (len(words) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{k}": f"blk.{layer}.{v}" for k, v in parts.items()}
    for name, ours in names.items():
        weight = weights[f"{name}.weight"]
        if ours.endswith(("attn_q", "attn_k")):  # llama.cpp interleaves the rotary halves
            heads = config.num_attention_heads
            halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{ours}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once_and_gives_the_same_model(tmp_path, monkeypatch):
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    model = tiny("llama")
    words = ["<s>", "</s>", "a", "b", "ab", *(f"w{i}" for i in range(5, 64))]
    write_gguf(tmp_path / "tiny.gguf", model, words)
    memories = load(tmp_path / "tiny.gguf")
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    expected = load(model, tiny_tokenizer()).logits(tokens)
    torch.testing.assert_close(memories.logits(tokens), expected)
    assert memories.source == str((tmp_path / "tiny.gguf").resolve())
    assert memories.tokenizer.encode(["ab"])[0].ids == [4]
    made = convert_gguf(tmp_path / "tiny.gguf")
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    ffmem.load(tmp_path / "tiny.gguf")
    assert before == {path: path.stat().st_mtime_ns for path in made.iterdir()}


def test_of_two_conversions_of_a_gguf_file_at_once_one_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    words = ["<s>", "</s>", "a", "b", "ab", *(f"w{i}" for i in range(5, 64))]
    write_gguf(tmp_path / "tiny.gguf", tiny("llama"), words)
    replace = Path.replace

    def replace_too_late(temporary, folder):
        shutil.copytree(temporary, folder)  # the other conversion ends first
        return replace(temporary, folder)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace_too_late)
        made = convert_gguf(tmp_path / "tiny.gguf")
    assert convert_gguf(tmp_path / "tiny.gguf") == made
    assert [path.name for path in made.parent.iterdir()] == [made.name]


@pytest.mark.parametrize("layers", [1, 3, 10**6])
def test_a_gguf_file_whose_layers_are_not_those_it_names_is_refused(layers, tmp_path, monkeypatch):
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as changed:
        count = gguf.GGUFWriter.add_block_count
        changed.setattr(gguf.GGUFWriter, "add_block_count", lambda writer, _: count(writer, layers))
        words = ["<s>", "</s>", "a", "b", "ab", *map(str, range(59))]
        write_gguf(tmp_path / "t.gguf", tiny("llama"), words)
    with pytest.raises(ModelError, match=f"damaged: its header says {layers} layers, but it has"):
        load(tmp_path / "t.gguf")
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_that_lacks_a_tensor_is_refused(tmp_path, monkeypatch):
    """transformers would initialize it randomly."""
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as changed:
        add = gguf.GGUFWriter.add_tensor

        def all_but_one(writer, name, tensor):
            if name != "blk.1.ffn_up.weight":
                add(writer, name, tensor)

        changed.setattr(gguf.GGUFWriter, "add_tensor", all_but_one)
        words = ["<s>", "</s>", "a", "b", "ab", *map(str, range(59))]
        write_gguf(tmp_path / "t.gguf", tiny("llama"), words)
    with pytest.raises(ModelError, match=r"1 missing keys, such as model\.layers\.1\.mlp\.up_proj"):
        load(tmp_path / "t.gguf")
    assert not (tmp_path / "cache").exists()


def test_a_truncated_gguf_file_is_refused_and_nothing_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "t.gguf", tiny("llama"), ["<s>", "</s>", *map(str, range(62))])
    path = tmp_path / "t.gguf"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(
        ModelError, match=r"The GGUF file \S+ is damaged: its header does not match"
    ):
        load(path)
    assert not (tmp_path / "cache").exists()


def false_counts(raw):
    """Yield a GGUF file with each count of it made false: its bytes and what was changed."""
    tokens = raw.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    sizes = raw.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4
    for what, place in (("tensors", 8), ("settings", 16), ("tokens", tokens), ("sizes", sizes)):
        for count in (0, 3, 10**6, 10**12, 2**63):
            yield what, raw[:place] + count.to_bytes(8, "little") + raw[place + 8 :]


def test_a_gguf_file_with_false_counts_is_told_to_be_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "t.gguf"
    write_gguf(path, tiny("llama"), ["<s>", "</s>", "a", "b", "ab", *map(str, range(59))])
    for what, changed in list(false_counts(path.read_bytes())):
        path.write_bytes(changed)
        with pytest.raises(ModelError) as refused:
            load(path)
        assert str(refused.value).startswith(f"The GGUF file {path} is damaged"), what
    for nothing in (b"", b"GGUF", b"no model" * 100):
        path.write_bytes(nothing)
        with pytest.raises(ModelError, match=r"The GGUF file \S+ is damaged"):
            load(path)
    assert not (tmp_path / "cache").exists()


def test_a_damaged_conversion_is_found_and_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "t.gguf"
    write_gguf(path, tiny("llama"), ["<s>", "</s>", "a", "b", "ab", *map(str, range(59))])
    folder = convert_gguf(path)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}

    def truncate(file):
        file.write_bytes(file.read_bytes()[:-7])

    def change(file):
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)

    for name in whole:
        for damage in (truncate, change, Path.unlink):
            damage(folder / name)
            assert convert_gguf(path) == folder
            assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    assert [place.name for place in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("online", [True, False])
def test_a_misspelt_folder_is_not_only_blamed_on_the_hub(monkeypatch, online):
    monkeypatch.setattr(sys.modules["ffmem.models.load"], "_is_online", lambda: online)
    asked = []

    def nothing(name, **options):
        asked.append(options["local_files_only"])
        raise OSError("not there")

    monkeypatch.setattr(AutoConfig, "from_pretrained", nothing)
    # The Hub's client tries several times to reach it.
    for module in ("checkpoint", "load"):
        found = sys.modules[f"ffmem.models.{module}"]
        monkeypatch.setattr(found, "find_file", lambda *_: None)
    with pytest.raises(ModelError, match="No model 'misspelt': no such file or folder, not in"):
        load("misspelt")
    assert asked == [not online]


def test_biases_of_zeros_are_not_described_as_missing():
    model = tiny("gpt2")
    assert describe(load(model, tiny_tokenizer()))["biases"] == {"keys": True, "values": True}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".mlp." in name and name.endswith("bias"):
                weight.zero_()
    assert describe(load(model, tiny_tokenizer()))["biases"] == {"keys": "zero", "values": "zero"}
    none = describe(load(tiny("llama"), tiny_tokenizer()))["biases"]
    assert none == {"keys": False, "values": False}


PRINTING = {"capture_output": True, "text": True, "check": True}

FAULTS = """
import resource, torch
{first}
def fill():
    torch.ones(6_000_000)
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    fill(), torch.ones(9_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an allocator of its own")
def test_freed_tensors_are_not_given_back_to_the_system():
    """Pages of a new tensor are those of a freed one: few are cleared by the system again."""
    kept, plain = (
        int(subprocess.run([sys.executable, "-c", FAULTS.format(first=first)], **PRINTING).stdout)
        for first in ("from ffmem.models.load import keep_freed_memory; keep_freed_memory()", "")
    )
    assert kept < 20_000 < 100_000 < plain
