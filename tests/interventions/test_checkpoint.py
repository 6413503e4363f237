"""Edited models on disk: whole or not there, and what plain transformers reads."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import ffmem
from ffmem.errors import FfmemError, ModelError, StoreError
from ffmem.interventions import checkpoint
from ffmem.interventions.edits import EDITS_FILE, EditsFile
from tests.conftest import OURS
from tests.indexing.folders import indexed, write_corpus
from tests.interventions.checkpoints import TOKENS, plain_logits, saved, stored, write_edits
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
    write_edits(memories, tmp_path / "off", off=["L1N5"])
    assert (plain_logits(tmp_path / "off").argmax(-1) != 7).all()


def test_a_folder_has_all_that_transformers_needs(tmp_path):
    model = tiny("llama")
    model.generation_config = GenerationConfig(max_new_tokens=7, eos_token_id=1)
    memories = stored(saved(model, tmp_path / "model"))
    write_edits(memories, tmp_path / "out", off=["L0N1"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.max_new_tokens == 7
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w6")["input_ids"] == [5, 6]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", EDITS_FILE),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "model").stat().st_mode


def test_the_report_lies_beside_the_weights(tmp_path):
    memories = stored(saved(tiny("llama"), tmp_path / "model"))
    corpus = ffmem.Corpus(str(write_corpus(tmp_path / "c.txt")), unit="line")
    found = write_edits(memories, tmp_path / "out", corpus=corpus, off=["L0N1"], set={"L1N2": 2.0})
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
    one = write_edits(stored(folder), tmp_path / "mean", index=index, mean=["L0N3"])
    other = write_edits(stored(folder), tmp_path / "set", set={"L0N3": mean})
    assert one.hash_after == other.hash_after != one.hash_before
    with pytest.raises(FfmemError, match="stored in an index"):
        write_edits(stored(folder), tmp_path / "none", mean=["L0N3"])


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
    with pytest.raises(StoreError, match="exists and is not empty"):
        write_edits(memories, out, off=["L0N1"])
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    write_edits(ffmem.load(tiny("llama"), tiny_tokenizer()), tmp_path / "out", off=["L0N1"])
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
        checkpoint.save_checkpoint(model, tiny_tokenizer(), tmp_path / "out", "another hash", add)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "granite", *OURS.values()])
def test_edits_json_makes_the_same_checkpoint_again(name, tmp_path):
    memories = stored(saved(tiny(name), tmp_path / "model"))
    has_bias = getattr(memories.bank(0).values, "bias", None) is not None
    edits = {"off": ["L0N3", "L1N0"], "scale": {"L0N4": 0.3}}
    if has_bias or memories.row.bias_flag is not None:
        edits["set"] = {"L1N7": 1.5}
    write_edits(memories, tmp_path / "one", **edits)
    write_edits(memories, tmp_path / "two", file=tmp_path / "one")
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two
    record = EditsFile.read(tmp_path / "one")
    assert record.hash_before == memories.fingerprint()
    assert record.hash_after == stored(tmp_path / "two").fingerprint()


def test_edits_of_another_model_are_refused_unless_the_file_names_none(tmp_path):
    models = [ffmem.load(tiny("llama", seed), tiny_tokenizer()) for seed in (0, 1)]
    write_edits(models[0], tmp_path / "one", off=["L0N1"])
    hashes = f"{models[0].fingerprint()}; this one has {models[1].fingerprint()}"
    with pytest.raises(StoreError, match=hashes):
        write_edits(models[1], tmp_path / "two", file=tmp_path / "one")
    content = json.loads((tmp_path / "one" / EDITS_FILE).read_text())
    content["hash_before"] = None
    (tmp_path / "any.json").write_text(json.dumps(content))
    found = write_edits(models[1], tmp_path / "two", file=tmp_path / "any.json")
    assert not stored(tmp_path / "two").values(0)[1].any()
    assert any("records" in note for note in found.notes)  # other weights than those recorded


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path):
    memories = stored(saved(tiny("llama"), tmp_path / "model"))
    write_edits(memories, tmp_path / "out", off=["L0N1"])
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) > 3
    assert len(set(modes.values())) == 1
    assert modes["config.json"] & 0o600 == 0o600


def test_an_edit_that_overflows_is_blamed_on_the_edit(tmp_path):
    memories = stored(saved(tiny("llama"), tmp_path / "model"))
    with pytest.raises(ModelError, match="With this edit"):
        write_edits(memories, tmp_path / "out", scale={"L0N1": 1e37})
    assert not (tmp_path / "out").exists()
