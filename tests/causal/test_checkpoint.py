"""Edited models on disk: whole or not there, and what plain transformers reads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import ffmem
from ffmem.causal import checkpoint
from ffmem.causal.patch import NAME
from ffmem.errors import FfmemError, ModelError, StoreError
from tests.causal.checkpoints import TOKENS, kept, plain_logits, saved, stored
from tests.indexing.folders import indexed, write_corpus
from tests.tiny import tiny, tiny_tokenizer


def planted(name="gpt2"):
    """Return a model that answers w7 to everything because of L1N5 alone."""
    model = tiny(name)
    block = model.transformer.h[1].mlp
    block.c_fc.weight.data[:, 5] = 0
    block.c_fc.bias.data[5] = 3.0
    block.c_proj.weight.data[5] = 40 * model.lm_head.weight.data[7]
    return model


def test_a_planted_memory_stays_off_and_the_answer_flipped(tmp_path):
    memories = stored(saved(planted(), tmp_path / "model"))
    assert (memories.logits(TOKENS).argmax(-1) == 7).all()
    kept(memories, tmp_path / "off", off=["L1N5"])
    assert (plain_logits(tmp_path / "off").argmax(-1) != 7).all()
    kept(stored(tmp_path / "off"), tmp_path / "on", undo=tmp_path / "off")
    assert torch.equal(plain_logits(tmp_path / "on"), plain_logits(tmp_path / "model"))


def test_a_folder_has_all_that_transformers_needs(tmp_path):
    model = tiny("llama")
    model.generation_config = GenerationConfig(max_new_tokens=7, eos_token_id=1)
    memories = stored(saved(model, tmp_path / "model"))
    kept(memories, tmp_path / "out", off=["L0N1"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.max_new_tokens == 7
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w6")["input_ids"] == [5, 6]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", NAME),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "model").stat().st_mode


def test_the_report_lies_beside_the_weights(tmp_path):
    memories = stored(saved(tiny("llama"), tmp_path / "model"))
    corpus = ffmem.Corpus(str(write_corpus(tmp_path / "c.txt")), unit="line")
    found = kept(memories, tmp_path / "out", corpus=corpus, off=["L0N1"], set={"L1N2": 2.0})
    report = json.loads((tmp_path / "out" / "side-effects.json").read_text())
    assert report == {key: value for key, value in found.to_dict().items() if key != "folder"}
    assert report["config"] == {"mlp_bias": True}
    assert [edit["cell"] for edit in report["edits"]] == ["L0N1", "L1N2"]
    assert report["hash_after"] == stored(tmp_path / "out").fingerprint()
    page = (tmp_path / "out" / "side-effects.md").read_text()
    assert page.startswith("# Side effects of L0N1 off, L1N2 = 2\n\nmlp_bias is switched on")
    assert found.side_effects.to_markdown() in page
    assert found.side_effects.to_markdown().rstrip() in str(found)


def test_the_mean_of_an_index_is_a_fixed_coefficient(tmp_path):
    folder = saved(tiny("gpt2"), tmp_path / "model")
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "c.txt"), ffmem.load(folder))
    mean = index["L0N3"].stats.mean
    one = kept(stored(folder), tmp_path / "mean", index=index, mean=["L0N3"])
    other = kept(stored(folder), tmp_path / "set", set={"L0N3": mean})
    assert one.after == other.after != one.before
    with pytest.raises(FfmemError, match="which an index knows"):
        kept(stored(folder), tmp_path / "none", mean=["L0N3"])


@pytest.mark.parametrize("there", ["file", "model", "other"])
def test_a_place_that_is_taken_is_refused_and_left_as_it_is(there, tmp_path):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    out = tmp_path / "out"
    if there == "file":
        out.write_text("mine")
    elif there == "model":
        saved(tiny("gpt2"), out)
    else:
        out.mkdir()
        (out / "notes").write_text("mine")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(StoreError, match="there already, and not empty"):
        kept(memories, out, off=["L0N1"])
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    kept(ffmem.load(tiny("llama"), tiny_tokenizer()), tmp_path / "out", off=["L0N1"])
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("step", ["add", "check"])
def test_a_run_that_breaks_leaves_nothing_behind(step, tmp_path):
    model = tiny("llama")

    def add(folder):
        assert (folder / "model.safetensors").exists()
        if step == "add":
            raise KeyboardInterrupt

    error = KeyboardInterrupt if step == "add" else ModelError
    with pytest.raises(error):
        checkpoint.save(model, tiny_tokenizer(), tmp_path / "out", "another hash", add)
    assert list(tmp_path.iterdir()) == []


def test_exactly_one_thing_can_be_asked_for(tmp_path):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    for asked in ({}, {"off": ["L0N1"], "patch": tmp_path}, {"undo": tmp_path, "patch": tmp_path}):
        with pytest.raises(FfmemError, match="Give one of the three"):
            kept(memories, tmp_path / "out", **asked)


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path):
    memories = stored(saved(tiny("llama"), tmp_path / "model"))
    kept(memories, tmp_path / "out", off=["L0N1"])
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) > 3
    assert len(set(modes.values())) == 1
    assert modes["config.json"] & 0o600 == 0o600


def test_an_edit_that_overflows_is_blamed_on_the_edit(tmp_path):
    memories = stored(saved(tiny("llama"), tmp_path / "model"))
    with pytest.raises(ModelError, match="With this edit"):
        kept(memories, tmp_path / "out", scale={"L0N1": 1e37})
    assert not (tmp_path / "out").exists()
