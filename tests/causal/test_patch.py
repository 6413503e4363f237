"""Patches: applied, undone, and refused when they are not what they say."""

import json

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from transformers import AutoModelForCausalLM

import ffmem
from ffmem.causal.edits import Edits
from ffmem.causal.patch import NAME, Patch, applied, edited, undone
from ffmem.errors import FfmemError, StoreError
from ffmem.models.memories import fingerprint
from tests.causal.checkpoints import kept, saved, stored
from tests.conftest import OURS
from tests.tiny import TINY, tiny, tiny_tokenizer


def edits_of(memories):
    """Return edits of every kind that the model can hold."""
    has_bias = getattr(memories.bank(0).values, "bias", None) is not None
    fixed = has_bias or memories.row.bias_flag is not None
    asked = {"off": ["L0N3", "L1N0"], "scale": {"L0N4": 0.3}}
    return asked | ({"set": {"L1N7": 1.5}} if fixed else {})


def whole(folder):
    """Return the files of a folder that transformers reads."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if not path.name.startswith("side-effects") and path.name != NAME
    }


@pytest.mark.parametrize("name", list(TINY))
def test_a_patch_applies_and_undoes_an_edit_byte_for_byte(name):
    memories = ffmem.load(tiny(name), tiny_tokenizer())
    model, patch, _ = edited(memories, Edits.of(**edits_of(memories)))
    other = ffmem.load(model, tiny_tokenizer())
    assert other.fingerprint() == patch.record.after != patch.record.before
    back = undone(other, patch).model
    assert fingerprint(back) == memories.fingerprint()
    assert back.config.to_dict() == memories.model.config.to_dict()
    again = applied(memories, patch).model
    assert fingerprint(again) == other.fingerprint()
    assert again.config.to_dict() == model.config.to_dict()


FOLDERS = ["llama", "gpt2", "gemma3", "falcon sequential", "granite", *OURS.values()]


@pytest.mark.parametrize("name", FOLDERS)
def test_undoing_restores_the_bytes_of_every_file(name, tmp_path):
    first = saved(tiny(name), tmp_path / "first")
    # Written from a folder, as nested configs name their dtype only then.
    original = saved(AutoModelForCausalLM.from_pretrained(first), tmp_path / "model")
    memories = stored(original)
    kept(memories, tmp_path / "edited", **edits_of(memories))
    kept(memories, tmp_path / "again", patch=tmp_path / "edited" / NAME)
    kept(stored(tmp_path / "edited"), tmp_path / "back", undo=tmp_path / "edited" / NAME)
    assert whole(tmp_path / "back") == whole(original)
    assert whole(tmp_path / "again") == whole(tmp_path / "edited")
    assert (tmp_path / "again" / NAME).read_bytes() == (tmp_path / "edited" / NAME).read_bytes()
    assert not (tmp_path / "back" / NAME).exists()


def test_edits_on_top_of_edits_come_off_in_the_other_order(tmp_path):
    first = stored(saved(tiny("llama"), tmp_path / "model"))
    kept(first, tmp_path / "one", set={"L0N1": 2.0})
    second = stored(tmp_path / "one")
    found = kept(second, tmp_path / "two", set={"L0N2": -1.0}, off=["L0N3"], scale={"L0N1": 5.0})
    assert found.flag is None  # the bias is there by now
    third = stored(tmp_path / "two")
    with pytest.raises(StoreError, match=f"{second.fingerprint()}.*{third.fingerprint()}"):
        undone(third, Patch.read(tmp_path / "one"))
    kept(third, tmp_path / "three", undo=tmp_path / "two")
    kept(stored(tmp_path / "three"), tmp_path / "four", undo=tmp_path / "one")
    assert whole(tmp_path / "four") == whole(tmp_path / "model")


def test_a_patch_of_another_model_names_both_hashes():
    one, other = (ffmem.load(tiny("llama", seed), tiny_tokenizer()) for seed in (0, 1))
    patch = edited(one, Edits.of(off=["L0N1"])).patch
    both = f"{one.fingerprint()}.*{other.fingerprint()}"
    with pytest.raises(StoreError, match=both):
        applied(other, patch)
    with pytest.raises(StoreError, match="It is done already"):
        undone(one, patch)


def test_a_patch_is_small_and_reads_back_as_it_was(tmp_path):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    patch = edited(memories, Edits.of(off=["L0N1"], set={"L1N2": 0.1})).patch
    patch.write(tmp_path / NAME)
    found = Patch.read(tmp_path / NAME)
    assert found.record == patch.record
    assert found.edits == Edits.of(off=["L0N1"], set={"L1N2": 0.1})
    assert found.tensors.keys() == patch.tensors.keys()
    assert all(torch.equal(found.tensors[name], patch.tensors[name]) for name in patch.tensors)
    assert (tmp_path / NAME).stat().st_size < 3000


V, B = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.bias"


def _edit_record(field, value):
    def change(tensors, record):
        record["edits"][0][field] = value

    return change


def _record(field, value):
    def change(tensors, record):
        record[field] = value

    return change


def _tensor(name, value):
    def change(tensors, record):
        tensors[name] = value(tensors[name]) if name in tensors else value(tensors[f"{V}/after"])

    return change


def _without(name):
    def change(tensors, record):
        del tensors[name]

    return change


BROKEN = {
    "other shape": (_tensor(f"{V}/after", lambda t: t[:, :3]), "after is torch.float32 of shape"),
    "other dtype": (_tensor(f"{V}/before", lambda t: t.half()), "before is torch.float16"),
    "unknown tensor": (
        _tensor("lm_head.weight/after", lambda t: t.clone()),
        "lm_head.weight/after, which",
    ),
    "missing tensor": (_without(f"{V}/after"), "it has no tensor"),
    "missing bias": (_without(f"{B}/after"), "it has no tensor"),
    "NaN": (_tensor(f"{V}/after", lambda t: t * torch.nan), "not finite"),
    "other memories": (_tensor(f"{V}/memories", lambda t: t + 1), "other memories of layer 0"),
    "negative memories": (_tensor(f"{V}/memories", lambda t: t - 9), "other memories of layer 0"),
    "other numbers before": (_tensor(f"{V}/before", lambda t: t + 1), "is not what the model has"),
    "other bias before": (_tensor(f"{B}/before", lambda t: t + 1), "is not what the model has"),
    "other numbers after": (_tensor(f"{V}/after", lambda t: t + 1), "it promises the hash"),
    "another switch": (_record("flag", "attention_bias"), "turns 'attention_bias'"),
    "no switch": (_record("flag", None), "promises the hash|not what the model has"),
    "another format": (_record("format", "ffmem-edit-9"), "its format is 'ffmem-edit-9'"),
    "no edits": (_record("edits", []), "names no memory"),
    "an unknown field": (_record("more", 1), "more is unknown"),
    "no cell": (_edit_record("cell", "L0"), "is not the name of a memory"),
    "an unknown cell": (_edit_record("cell", "L99N1"), "There is no memory L99N1"),
    "an unknown edit": (_edit_record("how", "burn"), "burn L0N1 is no edit"),
    "an infinite number": (_edit_record("constant", float("inf")), "is no edit"),
}


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A model without biases, and a patch of it that needs them."""
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    path = tmp_path_factory.mktemp("patch") / NAME
    edited(memories, Edits.of(set={"L0N1": 2.0})).patch.write(path)
    return memories, path


@pytest.mark.parametrize("how", list(BROKEN))
def test_a_patch_that_says_anything_else_than_an_edit_is_refused(how, patched, tmp_path):
    memories, path = patched
    change, message = BROKEN[how]
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["ffmem"])
    change(tensors, record)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "broken.safetensors", {"ffmem": json.dumps(record)})
    with pytest.raises(FfmemError, match=message):
        kept(memories, tmp_path / "out", patch=tmp_path / "broken.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.safetensors"]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_patch_is_refused(share, patched, tmp_path):
    data = patched[1].read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(StoreError, match="not a patch that ffmem can use"):
        Patch.read(path)


def test_a_foreign_file_is_refused(tmp_path):
    folder = saved(tiny("llama"), tmp_path / "model")
    with pytest.raises(StoreError, match="holds tensors, and no edit"):
        Patch.read(folder / "model.safetensors")
    with pytest.raises(StoreError, match="There is no patch"):
        Patch.read(folder)
