"""The named model `mini-wiki` and its text, and how a trained model becomes it."""

import json
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from transformers import set_seed

import ffmem
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sources import check_exists
from ffmem.corpus.wikitext import detokenize, is_heading
from ffmem.errors import CorpusError, ModelError
from ffmem.mini_wiki import FILES, MODEL, TEXTS
from ffmem.mini_wiki import publish as publishing
from ffmem.mini_wiki.publish import publish
from ffmem.models.arguments import MODEL_FORMS, NAMED_MODELS, resolve_model
from ffmem.models.tokenizer import WordTokenizer
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.model import AdaptiveLM
from ffmem.training.data import WordVocabulary


def sentences(part, tokenizer):
    return list(Corpus(f"mini-wiki:{part}").sentences(tokenizer))


@pytest.fixture(scope="module")
def words():
    return WordTokenizer.from_file(MODEL / "dict.txt")


# The named model


def test_the_package_carries_the_whole_model():
    assert [name for name in FILES if not (MODEL / name).is_file()] == []
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= publishing.MAX_BYTES
    for path in MODEL.iterdir():
        if path.suffix != ".safetensors":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"[\"' (`]/(tmp|home|root|work|Users)/", text), path
    with safe_open(MODEL / "model.safetensors", framework="pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.float16}  # noqa: SIM118
    trained = json.loads((MODEL / "training.json").read_text(encoding="utf-8"))
    assert trained["run"]["corpus"]["source"] == "wikitext-2:train"
    memories = ffmem.load("mini-wiki")
    assert memories.source == "mini-wiki"
    n_weights = sum(weight.numel() for weight in memories.model.parameters())
    assert n_weights == trained["plan"]["parameters"]


def test_mini_wiki_is_a_model_by_name_wherever_one_is(tmp_path, monkeypatch):
    assert resolve_model("mini-wiki") == "mini-wiki"
    assert "mini-wiki" in MODEL_FORMS
    monkeypatch.chdir(tmp_path)
    memories = ffmem.load("mini-wiki")
    assert memories.source == "mini-wiki"
    assert memories.revision is None
    assert memories.tokenizer.word_level
    assert memories.dtype == torch.float32
    with pytest.raises(ModelError, match=r"Did you mean mini-wiki\?"):
        ffmem.load("mini_wiki")


def test_a_package_without_its_model_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(NAMED_MODELS, "mini-wiki", tmp_path / "gone")
    with pytest.raises(ModelError, match=r"lacks config.json, .*\. Reinstall ffmem"):
        ffmem.load("mini-wiki")


# Its text


def test_the_text_has_the_size_that_a_demonstration_needs_and_its_parts_are_apart(words):
    train, valid = sentences("train", words), sentences("valid", words)
    assert 550 <= len(train) <= 700
    assert 90 <= len(valid) <= 150
    assert not {one.text for one in train} & {one.text for one in valid}
    assert len({one.text for one in train}) == len(train)


@pytest.mark.parametrize("part", TEXTS)
def test_the_model_knows_nearly_all_tokens_of_the_text(words, part):
    ids = [id for one in sentences(part, words) for id in one.ids]
    assert ids.count(words.unk) / len(ids) <= 0.04


@pytest.mark.parametrize("part", TEXTS)
def test_the_text_is_tokenised_as_wikitext_is(part):
    lines = TEXTS[part].read_text(encoding="utf-8").split("\n")
    assert lines[-1] == ""
    for line in lines[:-1]:
        assert line == (f" {' '.join(line.split())} " if line.strip() else " ")
        for token in line.split():
            assert re.fullmatch(r"@[-,.]@|[^\W_]+(\.|'\w+)?|'\w*|[^\w\s]", token), token
        joined = detokenize(line)
        assert not re.search(r"@|\s[,.;:)]|\d, \d{3}\b|\( ", joined), joined


def test_the_text_says_itself_that_it_is_invented_and_nobody_reads_that_as_a_sentence(words):
    for part, path in TEXTS.items():
        first = path.read_text(encoding="utf-8").split("\n")[0]
        assert is_heading(first)
        assert "invented" in first
        assert not any("invented province" in one.text for one in sentences(part, words))


def test_a_subword_model_reads_the_text_as_people_write_it(tokenizer):
    corpus = Corpus("mini-wiki:valid")
    assert corpus.detokenize == "wikitext"
    texts = [
        one.text for one in corpus.sentences(ffmem.models.tokenizer.SubwordTokenizer(tokenizer))
    ]
    assert any(re.search(r"\d,\d{3}", text) for text in texts)
    assert not any(" ," in text or "@" in text for text in texts)


def test_a_part_that_is_not_there_is_refused_before_any_work():
    for source in ("mini-wiki:test", "wikitext-2:all"):
        with pytest.raises(CorpusError, match=r"has no part .*mini-wiki:train\|valid, or hf:"):
            check_exists(source)
    check_exists("mini-wiki:valid")


# Publishing


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What a finished run leaves, of a tiny model with large random weights."""
    folder = tmp_path_factory.mktemp("trained")
    texts = [
        line for line in TEXTS["train"].read_text(encoding="utf-8").split("\n") if line.strip()
    ]
    vocabulary = WordVocabulary.train(texts, 500)
    config = AdaptiveConfig(
        band_sizes=[200, vocabulary.size - 200],
        band_widths=[16, 8],
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    set_seed(0)
    model = AdaptiveLM(config)
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    model.save_pretrained(folder)
    vocabulary.save(folder)
    (folder / "README.md").write_text('A card. `ffmem.load("THIS FOLDER")`\n', encoding="utf-8")
    (folder / "training.json").write_text("{}", encoding="utf-8")
    return folder


def changed(trained, folder, change):
    """Return a copy of a trained folder whose model is another one."""
    shutil.copytree(trained, folder)
    model = AdaptiveLM.from_pretrained(trained)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return folder


def perplexities(summary):
    """Return both figures of a summary: of the rounded weights, and of the trained ones."""
    figures = re.search(r": ([\d.,]+), and ([\d.,]+) before", summary).groups()
    return [float(figure.replace(",", "")) for figure in figures]


def test_what_is_published_is_the_trained_model_in_float16(trained, tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    for name in ("mine.txt", "curve.svg"):
        (out / name).touch()
    summary = publish(trained, out, Corpus("mini-wiki:valid"))
    assert sorted(path.name for path in out.iterdir() if path.name in FILES) == sorted(FILES)
    assert not (out / "curve.svg").exists()  # of an earlier model
    assert (out / "mine.txt").exists()
    assert list(tmp_path.iterdir()) == [out]
    before = AdaptiveLM.from_pretrained(trained).state_dict()
    after = AdaptiveLM.from_pretrained(out, dtype="auto").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], weight.half()) for name, weight in before.items())
    assert ffmem.load(out).dtype == torch.float32
    card = (out / "README.md").read_text(encoding="utf-8")
    assert 'ffmem.load("mini-wiki")' in card
    assert summary in card
    found, unrounded = perplexities(summary)
    assert found == pytest.approx(unrounded, rel=publishing.MAX_PERPLEXITY_CHANGE)
    for path in out.iterdir():
        assert str(trained).encode() not in path.read_bytes()


def test_without_a_validation_text_no_perplexity_is_told(trained, tmp_path):
    assert "erplexity" not in publish(trained, tmp_path)


def test_the_perplexity_is_that_of_hugging_faces_loss_block_by_block(trained, tmp_path):
    summary = publish(trained, tmp_path / "model", Corpus("mini-wiki:valid"))
    model = AdaptiveLM.from_pretrained(trained).eval()
    tokenizer = WordTokenizer.from_file(trained / "dict.txt")
    stream = torch.tensor([i for one in sentences("valid", tokenizer) for i in (2, *one.ids)])
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(stream), 64):
        block, following = stream[start : start + 64], stream.roll(-1)[start : start + 64]
        with torch.no_grad():
            scores = model(block[None]).logits[0].double().log_softmax(-1)
        total -= scores.gather(-1, following[:, None]).sum()
    assert perplexities(summary)[1] == pytest.approx(float((total / len(stream)).exp()), rel=1e-4)


def test_an_unfinished_run_is_not_published(trained, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(trained, half)
    (half / "training.json").unlink()
    with pytest.raises(ModelError, match=r"not a finished run .* lacks training\.json"):
        publish(half, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_that_is_too_large_is_not_published(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "MAX_BYTES", 10_000)
    with pytest.raises(ModelError, match="a package may carry"):
        publish(trained, tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []


def test_a_model_that_float16_changes_is_not_published(trained, tmp_path):
    """Values of 1e-9 and coefficients of 1e9: float32 holds both, float16 no such value."""

    def shrink_values(model):
        for module in model.modules():
            if hasattr(module, "final_layer_norm"):
                module.final_layer_norm.weight *= 1e4
                module.final_layer_norm.bias *= 1e4
                module.memory.keys.weight *= 1e4
                module.memory.keys.bias.zero_()
                module.memory.values.weight /= 1e8

    harmed = changed(trained, tmp_path / "harmed", shrink_values)
    with pytest.raises(ModelError, match=r"in float16: .* Nothing was published"):
        publish(harmed, tmp_path / "model", Corpus("mini-wiki:valid"))
    assert list((tmp_path / "model").iterdir()) == []


def test_a_model_that_float16_cannot_hold_fails_its_self_check(trained, tmp_path):
    def enlarge(model):
        next(model.parameters())[0, 0] = 1e6

    with pytest.raises(ModelError, match="NaN or infinite"):
        publish(changed(trained, tmp_path / "large", enlarge), tmp_path / "model")
