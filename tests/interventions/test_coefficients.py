"""`ffmem.coefficients` against traces of each text alone."""

import pytest
import torch

import ffmem
from ffmem.errors import FfmemError
from ffmem.interventions import coefficients as module
from tests.tiny import tiny, tiny_tokenizer

TEXTS = ["w3 w4 w5", "w9", "w3 w8 w8 w7 w20 w21 w5 w6", "w4 w4"]


def loaded(name):
    return ffmem.load(tiny(name), tiny_tokenizer())


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt post-norm", "qwen2_moe", "nemotron_h"])
@pytest.mark.parametrize("start", ["bos", "none"])
def test_each_text_has_the_coefficients_of_its_own_trace(name, start, monkeypatch):
    model = loaded(name)
    monkeypatch.setattr(module, "BATCH_TOKENS", 12)  # two texts share a batch, others do not
    found = ffmem.coefficients(model, TEXTS, start=start)
    assert [one.text for one in found] == TEXTS
    for one in found:
        assert len(one.ids) == len(one.tokens) == len(one.text.split()) + (start == "bos")
        traces = model.trace(torch.tensor([one.ids]))
        assert list(one.layers) == list(range(model.n_layers))
        for layer, trace in enumerate(traces):
            expected = trace.coefficients[0]
            torch.testing.assert_close(one.dense(layer), expected, rtol=1e-4, atol=1e-5)
            n_dense = one.layers[layer].shape[1]
            assert n_dense == sum(
                bank.size for bank in model.banks[layer] if bank.kind in ("dense", "shared")
            )
            for memory in range(0, model.layout.widths[layer], 5):
                cell = model.layout.cell(layer, memory)
                torch.testing.assert_close(
                    one[str(cell)], expected[:, memory], rtol=1e-4, atol=1e-5
                )


def test_an_expert_is_stored_where_it_runs():
    model = loaded("mixtral")
    one = ffmem.coefficients(model, TEXTS[2], start="bos")
    for layer in range(model.n_layers):
        n_rows = sum(len(expert.positions) for expert in one.experts[layer].values())
        assert n_rows == 2 * len(one.ids)  # two experts per token
        for name, expert in one.experts[layer].items():
            assert model.layout.cell(layer, expert.memories[0]).bank == name
            assert expert.values.shape == (len(expert.positions), len(expert.memories))
        assert one.layers[layer].shape == (len(one.ids), 0)


def test_one_text_gives_one_result_and_some_layers_only_those():
    model = loaded("llama")
    one = ffmem.coefficients(model, TEXTS[0], start="none", layers=[1])
    both = ffmem.coefficients(model, [TEXTS[0]], start="none")[0]
    assert list(one.layers) == [1]
    torch.testing.assert_close(one.layers[1], both.layers[1])
    assert repr(one) == "TextCoefficients('w3 w4 w5': 3 tokens, 1 layers)"
    with pytest.raises(FfmemError, match="Layer 0 was not requested"):
        one["L0N3"]
    assert ffmem.coefficients(model, []) == []


def test_an_index_brings_its_model_and_start_token(tmp_path):
    model = loaded("llama")
    (tmp_path / "corpus.txt").write_text("w3 w4\nw5 w6 w7\n")
    corpus = ffmem.Corpus(str(tmp_path / "corpus.txt"), unit="line")
    index = ffmem.index(model, corpus, tmp_path / "index", start="bos")
    one = ffmem.coefficients(index, TEXTS[0], model=model)
    assert one.ids[0] == index.manifest.start.id
    expected = ffmem.coefficients(model, TEXTS[0], start="bos")
    for layer, rows in one.layers.items():
        assert torch.equal(rows, expected.layers[layer])
    # The strongest trigger of a memory is the largest coefficient on the corpus.
    every = ffmem.coefficients(index, ["w3 w4", "w5 w6 w7"], model=model)
    for cell in index:
        largest = max(float(one[cell][1:].max()) for one in every)
        assert largest == pytest.approx(index[cell].stats.max, rel=1e-4, abs=1e-6)


def test_lists_of_prompts_give_lists():
    model = loaded("llama")
    prompts = ["w3 w4 w5", "w9 w8"]
    for function in (ffmem.trace, ffmem.effect):
        several = function(model, prompts, start="bos", top=3)
        assert [one.prompt for one in several] == prompts
        assert function(model, prompts[1], start="bos", top=3) == several[1]
        assert function(model, [], start="bos") == []


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        (["w3", ""], {}, "Text 2 of 2: The prompt is empty"),
        (["w3", "w4 " * 80], {}, r"Text 2 of 2: The prompt has 80 tokens; the model reads 64"),
        ("w3", {"layers": [7]}, "There is no layer 7"),
        ("w3", {"layers": 1}, r"layers is 1\. It must be Sequence\[int\]"),
        ("w3", {"layers": ["1"]}, r"layers is \['1'\]\. It must be"),
    ],
)
def test_bad_input_is_told(texts, options, message):
    with pytest.raises(FfmemError, match=message):
        ffmem.coefficients(loaded("llama"), texts, start="none", **options)


def test_tensors_that_would_fill_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 4 * 24 * 2 * 3 - 1)
    model = loaded("llama")
    with pytest.raises(FfmemError, match="only the layers you need"):
        ffmem.coefficients(model, TEXTS[0], start="none")
    assert ffmem.coefficients(model, TEXTS[0], start="none", layers=[0]).layers
