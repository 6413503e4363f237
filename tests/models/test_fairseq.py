import json
import os
import pickle
import shutil
import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ffmem.errors import ModelError
from ffmem.models.fairseq import load_fairseq
from ffmem.models.tokenizer import WordTokenizer
from ffmem.networks.model import AdaptiveLM

ORACLE = Path(__file__).parent.parent / "oracle"
TOKENS = torch.tensor([[2, 51, 700, 1500, 4], [2, 4, 5, 6, 1999]])

Q, K, V = (f"decoder.layers.0.self_attn.{part}_proj" for part in "qkv")
TAIL = "decoder.adaptive_softmax.tail.0.0.weight"
CLASSES = "decoder.adaptive_softmax.head.class_proj.weight"


@pytest.fixture(scope="module")
def loaded():
    return load_fairseq(ORACLE)


@pytest.fixture
def folder(tmp_path):
    """A copy of the checkpoint's folder, to damage."""
    for name in ("model.pt", "dict.txt"):
        shutil.copyfile(ORACLE / name, tmp_path / name)
    return tmp_path


def checkpoint():
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(ORACLE / "model.pt", weights_only=True)


def changed(folder, change, **how):
    """The folder, once `change` was done to the checkpoint in it."""
    content = checkpoint()
    change(content)
    torch.save(content, folder / "model.pt", **how)
    return folder


def same_log_probabilities(folder, loaded):
    model, _ = load_fairseq(folder)
    return torch.equal(model(TOKENS).logits, loaded[0](TOKENS).logits)


def traced(model, tokens):
    """x, m, y, r and o of every layer, read on the modules themselves, and log-probabilities."""
    found = {name: [] for name in "xmyro"}

    def norm(_, args, output):
        found["r"].append(args[0][0])
        found["x"].append(output[0])

    def values(_, args, output):
        found["m"].append(args[0][0])
        found["y"].append(output[0])

    def whole(_, args, output):
        found["o"].append(output[0])

    with ExitStack() as hooks, torch.no_grad():
        for layer in model.model.layers:
            hooks.enter_context(layer.final_layer_norm.register_forward_hook(norm))
            hooks.enter_context(layer.memory.values.register_forward_hook(values))
            hooks.enter_context(layer.register_forward_hook(whole))
        logits = model(tokens).logits[0]
    return {name: torch.stack(layers) for name, layers in found.items()}, logits


EXPECTED = np.load(ORACLE / "expected.npz")
SENTENCES = sorted({name.split("_")[0] for name in EXPECTED.files})


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_intermediate_result_is_the_one_of_the_authors_code(loaded, sentence):
    expected = {
        name: torch.from_numpy(EXPECTED[f"{sentence}_{name}"])
        for name in ("src", "x", "m", "y", "r", "o", "logprobs")
    }
    found, logits = traced(loaded[0], expected["src"][None])
    for name, tensor in found.items():
        assert_close(tensor, expected[name], atol=1e-4, rtol=0, msg=lambda m, name=name: name + m)
    assert_close(logits[-3:], expected["logprobs"], atol=1e-3, rtol=0)


def test_a_padded_batch_gives_what_single_sentences_give(loaded):
    sources = [torch.from_numpy(EXPECTED[f"{sentence}_src"]) for sentence in SENTENCES]
    batch = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=1)
    logits = loaded[0](batch).logits
    for row, sentence in enumerate(SENTENCES):
        end = len(sources[row])
        expected = torch.from_numpy(EXPECTED[f"{sentence}_logprobs"])
        assert_close(logits[row, max(end - 3, 0) : end], expected, atol=1e-3, rtol=0)


def test_tokens_are_those_of_the_authors_code(loaded):
    tokenizer = loaded[1]
    for row in json.loads((ORACLE / "expected_tokens.json").read_text(encoding="utf-8")):
        (encoding,) = tokenizer.encode([" ".join(row["moses_encode"])])
        assert [tokenizer.own_start, *encoding.ids] == row["src_tokens"]


def test_planted_values_promote_their_words(loaded):
    model, tokenizer = loaded
    for planted in json.loads((ORACLE / "planted.json").read_text(encoding="utf-8")):
        values = model.model.layers[planted["layer"]].memory.values.weight.T
        top = model.lm_head.log_probabilities(values[[planted["dim"]]]).argmax().item()
        assert tokenizer.token_texts(2000)[top] == planted["token"]


def test_the_model_may_be_given_as_file_or_folder(loaded):
    model, tokenizer = load_fairseq(ORACLE / "model.pt")
    assert isinstance(model, AdaptiveLM)
    assert isinstance(tokenizer, WordTokenizer)
    assert not model.training
    assert torch.equal(model(TOKENS).logits, loaded[0](TOKENS).logits)


def test_sizes_come_from_the_tensors_and_heads_and_context_from_the_options(loaded):
    found = loaded[0].config
    assert (found.num_hidden_layers, found.hidden_size, found.intermediate_size) == (4, 32, 128)
    assert (found.band_sizes, found.band_widths) == ([500, 500, 1000], [32, 8, 2])
    assert (found.num_attention_heads, found.max_position_embeddings) == (4, 512)
    assert not found.final_norm


def test_a_loaded_checkpoint_can_be_saved_as_a_hugging_face_folder(loaded, tmp_path):
    loaded[0].save_pretrained(tmp_path)
    again = AdaptiveLM.from_pretrained(tmp_path)
    assert torch.equal(again(TOKENS).logits, loaded[0](TOKENS).logits)


def with_old_names(content):
    stored = content["model"]
    for layer in range(4):
        before = f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            parts = [stored.pop(f"{before}self_attn.{part}_proj.{kind}") for part in "qkv"]
            stored[f"{before}self_attn.in_proj_{kind}"] = torch.cat(parts)
            for old, name in (("0", "self_attn_layer_norm"), ("2", "final_layer_norm")):
                stored[f"{before}layer_norms.{old}.{kind}"] = stored.pop(f"{before}{name}.{kind}")
    stored["decoder.embed_positions.weights"] = torch.zeros(3)


def with_transposed_tails(content):
    for tail in (0, 1):
        name = f"decoder.adaptive_softmax.tail.{tail}.0.weight"
        content["model"][name] = content["model"][name].T.contiguous()


def with_cfg(content):
    content["cfg"] = {"_name": None, "model": content.pop("args")}
    content["args"] = None


def with_plain_cfg(content):
    content["cfg"] = {"model": vars(content.pop("args"))}


def with_a_wrong_arch(content):
    content["args"].arch = "transformer_lm_gbw"
    content["args"].decoder_layers = 99


@pytest.mark.parametrize(
    "change", [with_old_names, with_transposed_tails, with_cfg, with_plain_cfg, with_a_wrong_arch]
)
def test_the_same_weights_written_otherwise_are_the_same_model(folder, loaded, change):
    assert same_log_probabilities(changed(folder, change), loaded)


def test_a_model_with_old_names_can_be_saved(folder, tmp_path):
    model, _ = load_fairseq(changed(folder, with_old_names))
    model.save_pretrained(tmp_path / "saved")
    again = AdaptiveLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_the_file_format_of_2019_is_read(folder, loaded):
    changed(folder, lambda content: None, _use_new_zipfile_serialization=False)
    assert same_log_probabilities(folder, loaded)


def test_training_meters_of_2019_are_skipped(folder, loaded, monkeypatch):
    # A class that pickles under fairseq's name, although fairseq is not there.
    meter = type("AverageMeter", (), {"__module__": "fairseq.meters"})
    module = type("Module", (), {"AverageMeter": meter})
    monkeypatch.setitem(sys.modules, "fairseq", type("Package", (), {}))
    monkeypatch.setitem(sys.modules, "fairseq.meters", module)
    one = meter()
    one.sum = 3.0
    changed(folder, lambda content: content["extra_state"].update(train_meters={"loss": one}))
    monkeypatch.undo()
    assert same_log_probabilities(folder, loaded)


def test_half_precision_becomes_single(folder, loaded):
    def halve(content):
        content["model"] = {
            name: tensor.half() if tensor.is_floating_point() else tensor
            for name, tensor in content["model"].items()
        }

    model, _ = load_fairseq(changed(folder, halve))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_close(model(TOKENS).logits, loaded[0](TOKENS).logits, atol=0.5, rtol=0)
    assert not torch.equal(model(TOKENS).logits, loaded[0](TOKENS).logits)


def test_a_final_norm_is_used_where_there_is_one(folder, loaded):
    gain = torch.linspace(1, 2, 32)

    def add(content):
        content["model"]["decoder.layer_norm.weight"] = gain
        content["model"]["decoder.layer_norm.bias"] = gain - 1

    model, _ = load_fairseq(changed(folder, add))
    stream = loaded[0].model(TOKENS).last_hidden_state
    normed = torch.nn.functional.layer_norm(stream, (32,), gain, gain - 1)
    assert_close(model(TOKENS).logits, loaded[0].lm_head(normed))


def test_unscaled_embeddings_and_gelu_are_taken_from_the_options(folder):
    def change(content):
        content["args"].no_scale_embedding = True
        content["args"].activation_fn = "gelu"
        content["args"].max_target_positions = None

    model, _ = load_fairseq(changed(folder, change))
    assert model.model.scale == 1.0
    assert (model.config.hidden_act, model.config.max_position_embeddings) == ("gelu", 512)


@pytest.mark.parametrize("name", ["model.pt", "dict.txt"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelError, match=rf"there is no .*{name}\. Put model\.pt and dict\.txt"):
        load_fairseq(folder)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_checkpoint_is_refused(folder, kept, zipped):
    changed(folder, lambda content: None, _use_new_zipfile_serialization=zipped)
    whole = (folder / "model.pt").read_bytes()
    (folder / "model.pt").write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(
        ModelError, match=r"damaged, incomplete or another kind of file .* Download"
    ):
        load_fairseq(folder)


def test_another_kind_of_file_is_refused(folder):
    shutil.copyfile(folder / "dict.txt", folder / "model.pt")
    with pytest.raises(ModelError, match=r"Cannot read .* as a fairseq checkpoint"):
        load_fairseq(folder)


class Harmful:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_pickle_that_wants_to_run_code_is_refused_and_not_run(folder):
    mark = folder / "mark"
    changed(folder, lambda content: content.update(extra_state=Harmful(mark)))
    with pytest.raises(ModelError, match=rf"would load {os.mkdir.__module__}\.mkdir, which"):
        load_fairseq(folder)
    (folder / "model.pt").write_bytes(pickle.dumps(Harmful(mark), protocol=2))
    with pytest.raises(ModelError, match=r"Cannot read .* as a fairseq checkpoint"):
        load_fairseq(folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"decoder.weight": torch.zeros(2)}, "has decoder.weight"),
        ([torch.zeros(2)], "has nothing"),
        ({"model": {"decoder.weight": torch.zeros(2)}}, "has model"),
        ({"args": Namespace(), "model": {"decoder.weight": 3}}, "has args, model"),
    ],
)
def test_a_file_of_other_tensors_is_refused(folder, content, found):
    torch.save(content, folder / "model.pt")
    with pytest.raises(ModelError, match=rf"\(options\), but {found}\. Use fairseq's"):
        load_fairseq(folder)


@pytest.mark.parametrize("name", [CLASSES, TAIL, f"{Q}.bias", "decoder.layers.1.fc2.weight"])
def test_a_missing_weight_is_named(folder, name):
    changed(folder, lambda content: content["model"].pop(name))
    with pytest.raises(ModelError, match=rf"lacks {name}\. Download it again"):
        load_fairseq(folder)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layernorm_embedding.weight",
        "decoder.embed_positions.weight",
        "decoder.layers.0.self_attn.bias_k",
        "encoder.layers.0.fc1.weight",
    ],
)
def test_a_weight_that_would_be_left_out_is_named(folder, name):
    changed(folder, lambda content: content["model"].update({name: torch.zeros(2)}))
    with pytest.raises(ModelError, match=rf"has unknown weights: {name}\. It is not"):
        load_fairseq(folder)


def test_a_checkpoint_without_adaptive_input_is_refused(folder):
    def replace(content):
        content["model"] = {"decoder.embed_tokens.weight": torch.zeros(4, 4)}

    with pytest.raises(ModelError, match=r"it has decoder\.embed_tokens\.weight\. Use a"):
        load_fairseq(changed(folder, replace))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("adaptive_input", False),
        ("tie_adaptive_weights", False),
        ("decoder_normalize_before", False),
        ("character_embeddings", True),
        ("decoder_learned_pos", True),
        ("no_token_positional_embeddings", True),
        ("layernorm_embedding", True),
        ("activation_fn", "swish"),
    ],
)
def test_another_architecture_is_refused_by_what_was_found(folder, option, value):
    changed(folder, lambda content: setattr(content["args"], option, value))
    with pytest.raises(
        ModelError, match=rf"unsupported kind of fairseq model: {option} = {value}\. ffmem reads"
    ):
        load_fairseq(folder)


@pytest.mark.parametrize(
    "name",
    [TAIL, "decoder.adaptive_softmax.tail.1.2.weight", CLASSES.replace("class", "word")],
)
def test_a_softmax_with_weights_of_its_own_is_refused(folder, name):
    def replace(content):  # not in place: both names share one storage
        content["model"][name] = content["model"][name] + 1e-3

    changed(folder, replace)
    with pytest.raises(ModelError, match=rf"{name} differs from decoder\.embed_tokens\..*\. ffmem"):
        load_fairseq(folder)


def test_an_untied_transposed_projection_is_refused(folder):
    changed(folder, lambda content: content["model"].update({TAIL: torch.zeros(8, 32)}))
    with pytest.raises(ModelError, match=rf"{TAIL} differs"):
        load_fairseq(folder)


def test_a_weight_of_another_shape_is_named(folder):
    changed(folder, lambda content: content["model"].update({f"{K}.weight": torch.zeros(32, 16)}))
    with pytest.raises(ModelError, match=r"k_proj.weight has shape \(32, 16\), but .* \(32, 32\)"):
        load_fairseq(folder)


def test_the_number_of_heads_must_be_known(folder):
    changed(folder, lambda content: delattr(content["args"], "decoder_attention_heads"))
    with pytest.raises(ModelError, match=r"do not give the number of attention heads \("):
        load_fairseq(folder)


def test_a_dictionary_of_another_model_is_refused(folder):
    with (folder / "dict.txt").open("a", encoding="utf-8") as dictionary:
        dictionary.write("oneword 0\n")
    with pytest.raises(ModelError, match=r"has 2000 words, .*dict\.txt has 2001, including four"):
        load_fairseq(folder)
