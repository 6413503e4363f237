"""Edits written into weights and saved: what plain transformers reads is the edited model."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import ffmem
from ffmem.cli import cli
from ffmem.errors import FfmemError, ModelError, StoreError, UnknownCell
from ffmem.interventions import checkpoint
from ffmem.interventions.checkpoint import _share_weights, edit_weights
from ffmem.interventions.edits import EDITS_FILE, Edits, EditsFile
from ffmem.interventions.forward import apply_edits
from ffmem.models.families import FAMILIES
from ffmem.models.tokenizer import WordTokenizer
from tests.conftest import OURS
from tests.indexing.folders import indexed, write_corpus
from tests.interventions.checkpoints import (
    TOKENS,
    plain_logits,
    saved,
    stored,
    without_bias,
    write_edits,
)
from tests.tiny import TINY, read, tiny, tiny_tokenizer

SWITCHED = [name for name in TINY if FAMILIES[TINY[name].model_type].bias_flag and " " not in name]

SAVED = (
    *("bloom", "falcon", "gemma2", "gemma3", "gpt2", "gptj", "llama", "nemotron_h"),
    *("opt post-norm", "phi3", "qwen2"),
    *(OURS[kind] for kind in ("relu", "persistent", "lambda")),
)


def loaded(name):
    return read(name)  # edits leave it as it was


def under(memories, edits):
    """Return the logits of a model while its coefficients are edited."""
    with apply_edits(memories, edits):
        return memories.logits(TOKENS)


@pytest.mark.parametrize("name", list(TINY))
def test_edited_weights_predict_as_under_the_edit_of_coefficients(name, tmp_path):
    """In every family, and for some of every kind also as plain transformers reads them."""
    memories = loaded(name)
    last = memories.n_layers - 1
    asked = {"off": ["L0N3", f"L{last}N0"], "scale": {"L0N4": -2.5}}
    has_bias = getattr(memories.bank(0).values, "bias", None) is not None
    if has_bias or memories.row.bias_flag is not None:
        asked["set"] = {"L1N7": 1.5, "L1N8": -0.5}
    else:
        with pytest.raises(ModelError, match=r"Cannot write L1N7 = 1\.5.*off and scale can"):
            edit_weights(memories, Edits.of(set={"L1N7": 1.5}))
    edited = edit_weights(memories, Edits.of(**asked))
    expected = under(memories, Edits.of(**asked))
    assert not torch.allclose(expected, memories.logits(TOKENS), atol=1e-3)
    with torch.no_grad():
        found = edited.model(TOKENS, use_cache=False).logits
    assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert (edited.flag is not None) == ("set" in asked and not has_bias)
    if name in SAVED:
        write_edits(memories, tmp_path / "out", **asked)
        assert_close(plain_logits(tmp_path / "out"), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SWITCHED)
def test_a_switched_on_bias_changes_nothing_by_itself(name, tmp_path):
    memories = ffmem.load(without_bias(name), tiny_tokenizer())
    assert memories.bank(0).values.bias is None
    other = ffmem.load(_share_weights(memories.model, memories.row.bias_flag), tiny_tokenizer())
    assert other.bank(0).values.bias is not None
    assert torch.equal(other.logits(TOKENS), memories.logits(TOKENS))
    edits = {"set": {"L0N3": 2.0}, "off": ["L1N1"]}
    found = write_edits(memories, tmp_path / "out", **edits)
    assert found.config == {memories.row.bias_flag: True}
    expected = under(memories, Edits.of(**edits))
    assert_close(plain_logits(tmp_path / "out"), expected, rtol=2e-5, atol=2e-5)


def test_every_switch_gives_a_bias_and_families_without_one_have_none():
    assert {FAMILIES[TINY[name].model_type].bias_flag for name in SWITCHED} == {
        *("mlp_bias", "use_bias", "bias", "enable_bias")
    }


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_model_itself_is_never_touched(name):
    memories = loaded(name)
    weights = {key: tensor.clone() for key, tensor in memories.model.state_dict().items()}
    config = memories.model.config.to_dict()
    logits = memories.logits(TOKENS)
    model = edit_weights(memories, Edits.of(off=["L0N1"], set={"L1N2": 3.0})).model
    assert model is not memories.model
    assert torch.equal(memories.logits(TOKENS), logits)
    assert memories.model.config.to_dict() == config
    assert memories.model.state_dict().keys() == weights.keys()
    assert all(torch.equal(memories.model.state_dict()[key], weights[key]) for key in weights)


def test_a_twin_shares_all_but_the_rewritten_layers():
    memories = loaded("gpt2")
    model = edit_weights(memories, Edits.of(off=["L1N1"])).model
    apart = [
        name
        for (name, one), other in zip(
            memories.model.named_parameters(), model.parameters(), strict=True
        )
        if one.data_ptr() != other.data_ptr()
    ]
    assert apart == ["transformer.h.1.mlp.c_proj.weight"]


def test_the_rewritten_numbers_are_those_of_the_definition():
    memories = loaded("gpt2")
    v, b = memories.values(0).double(), memories.bias(0).double()
    edits = Edits.of(off=["L0N1"], scale={"L0N2": 0.3}, set={"L0N5": 2.0, "L0N6": -1.0})
    other = ffmem.load(edit_weights(memories, edits).model, tiny_tokenizer())
    after = other.values(0)[[1, 2, 5, 6]]
    expected = torch.stack([0 * v[1].abs(), 0.3 * v[2], 0 * v[5].abs(), 0 * v[6].abs()])
    assert torch.equal(after, expected.float())
    assert not torch.signbit(after[0]).any()
    assert torch.equal(other.bias(0), (b + (2.0 * v[5] - 1.0 * v[6])).float())
    rest = [memory for memory in range(len(v)) if memory not in (1, 2, 5, 6)]
    assert torch.equal(other.values(0)[rest], memories.values(0)[rest])


def test_set_to_zero_needs_no_bias():
    edited = edit_weights(loaded("qwen2"), Edits.of(set={"L0N1": 0.0}))
    assert edited.flag is None
    assert not any(name.endswith("down_proj.bias") for name in edited.model.state_dict())


def test_values_shared_between_layers_are_refused():
    model = tiny("llama")
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight
    memories = ffmem.load(model, tiny_tokenizer())
    with pytest.raises(ModelError, match=r"layer 1 are shared: .*layers\.0.*layers\.1"):
        edit_weights(memories, Edits.of(off=["L1N1"]))


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (Edits.of(off=["L0N1"], positions=[2]), "Weights act at every position"),
        (Edits.of(), "nothing to edit"),
        (Edits.of(off=["L9N1"]), "There is no memory L9N1"),
        (Edits.of(scale={"L0N1": 1e39}), "numbers that overflow torch.float32"),
    ],
)
def test_what_weights_cannot_say_is_refused(edits, message):
    with pytest.raises(FfmemError, match=message):
        edit_weights(loaded("llama"), edits)
    assert issubclass(UnknownCell, FfmemError)


def test_a_model_cast_in_memory_is_refused(tmp_path):
    folder = saved(tiny("llama").bfloat16(), tmp_path / "model")
    with pytest.raises(ModelError, match="not how they are stored"):
        edit_weights(ffmem.load(folder), Edits.of(off=["L0N1"]))
    assert stored(folder).dtype == torch.bfloat16


def test_a_half_precision_checkpoint_stays_so_and_its_rounding_is_told(tmp_path):
    memories = stored(saved(tiny("llama").bfloat16(), tmp_path / "model"))
    found = write_edits(memories, tmp_path / "out", scale={"L0N1": 0.3}, set={"L0N2": 1.7})
    assert any("stored in bfloat16" in note for note in found.notes)
    assert 0 < found.rounding < 2**-8
    after = stored(tmp_path / "out")
    assert after.dtype == torch.bfloat16
    exact = 0.3 * memories.values(0)[1].double()
    assert torch.equal(after.values(0)[1], exact.bfloat16())
    halved = write_edits(memories, tmp_path / "exact", scale={"L0N1": 0.5})
    assert (halved.rounding, halved.notes) == (0, [])


def test_an_edit_of_a_value_that_is_gone_is_told(tmp_path):
    write_edits(loaded("gpt2"), tmp_path / "one", off=["L0N1"])
    found = write_edits(stored(tmp_path / "one"), tmp_path / "two", set={"L0N1": 4.0})
    assert found.notes == [
        "The value of L0N1 was all zeros: L0N1 = 4 has no effect.",
        "The weights do not change.",
    ]


# Folders


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


# The command


ORACLE = Path(__file__).parent.parent / "oracle"


def run_edit(*arguments):
    """Return exit code, output and error of `ffmem edit`."""
    done = CliRunner().invoke(cli, ["edit", *map(str, arguments)])
    if isinstance(done.exception, ffmem.FfmemError):
        return 1, done.stdout, f"{done.stderr}Error: {done.exception}"
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tiny("llama"), tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c.txt")


def test_an_edit_is_made_and_made_again(folder, corpus, tmp_path):
    measured = ("--corpus", corpus, "--unit", "line", "--limit", 30)
    edits = ("--off", "L0N1,L0N2", "--off", "1.3", "--set", "L1N4=2.5", "--scale", "L0N5=-1")
    code, out, err = run_edit(folder, *edits, "--out", tmp_path / "edited", *measured)
    assert code == 0
    assert "| perplexity |" in out
    assert "in 30 sentences" in out or "skipped" in out
    assert "mlp_bias is switched on" in err
    again = ("--edits", tmp_path / "edited" / "edits.json", "--no-report", "--json")
    code, out, err = run_edit(folder, *again, "--out", tmp_path / "again")
    assert code == 0
    assert "Side effects were not measured." in err
    assert json.loads(out)["side_effects"] is None
    weights = [tmp_path / name / "model.safetensors" for name in ("edited", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").config.mlp_bias


def test_an_index_gives_model_means_and_start_token(folder, corpus, tmp_path):
    index = indexed(tmp_path / "index", corpus, ffmem.load(folder), start="eos")
    code, out, _ = run_edit(
        *(tmp_path / "index", "--mean", "L0N3", "--model", folder, "--out", tmp_path / "out"),
        *("--corpus", corpus, "--unit", "line", "--json"),
    )
    assert code == 0
    found = json.loads(out)
    assert found["edits"][0]["constant"] == index["L0N3"].stats.mean
    assert found["side_effects"]["start"] == "</s>"
    assert found["hash_before"] == index.manifest.model.hash


def test_the_dtype_of_the_checkpoint_stays(corpus, tmp_path):
    folder = saved(tiny("gpt2").to(torch.float16), tmp_path / "model")
    code, _, err = run_edit(folder, "--scale", "L0N1=0.3", "--out", tmp_path / "out", "--no-report")
    assert code == 0
    assert "stored in float16: rewritten numbers are rounded" in err
    assert stored(tmp_path / "out").dtype == torch.float16


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Pass either edits"),
        (("--off", "L0N1", "--edits", "x"), 2, "Pass either edits"),
        (("--edits", "x"), 1, "No file x"),
        (("--off", "L9N1"), 1, "There is no memory L9N1"),
        (("--off", "nonsense"), 1, "is not the name of a memory"),
        (("--off", "L0N1", "--set", "L0N1=2"), 1, "edited twice"),
        (("--set", "L0N1"), 2, "L5N1234=2.5"),
        (("--mean", "L0N1"), 1, "stored in an index"),
        (("--off", "L0N1", "--corpus", "nowhere.txt"), 1, "nowhere.txt"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(arguments, code, message, folder, tmp_path):
    report = () if "--corpus" in arguments else ("--no-report",)
    found, _, err = run_edit(folder, *arguments, *report, "--out", tmp_path / "out")
    assert found == code
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_fairseq_checkpoint_becomes_a_folder_of_ours_with_its_dictionary(corpus, tmp_path):
    edits = ("--off", "L0N1,L3N2", "--set", "L1N4=2.5", "--scale", "L2N5=-0.3")
    measured = ("--corpus", corpus, "--unit", "line", "--limit", 5)
    code, out, err = run_edit(ORACLE, *edits, *measured, "--out", tmp_path / "out")
    assert code == 0
    assert "| perplexity |" in out
    assert "import ffmem.networks.model" in err
    before, after = ffmem.load(ORACLE), ffmem.load(tmp_path / "out")
    assert (tmp_path / "out" / "dict.txt").read_bytes() == (ORACLE / "dict.txt").read_bytes()
    assert isinstance(after.tokenizer, WordTokenizer)
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    asked = {"off": ["L0N1", "L3N2"], "set": {"L1N4": 2.5}, "scale": {"L2N5": -0.3}}
    tokens = torch.tensor([[2, 5, 9, 40, 17, 30]])
    with apply_edits(before, Edits.of(**asked)):
        expected = before.logits(tokens)
    torch.testing.assert_close(after.logits(tokens), expected, rtol=2e-5, atol=2e-5)
