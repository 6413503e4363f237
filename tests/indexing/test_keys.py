"""The tokens that keys match and the cosines of weights, against the model's own modules."""

import numpy as np
import pytest
import torch

import ffmem
from ffmem.indexing import values
from ffmem.indexing.tables import read_columns
from ffmem.indexing.values import write_keys
from ffmem.indexing.weights import CLASSES, weight_classes
from ffmem.models.keys import KeySide
from ffmem.models.memories import Memories
from tests.tiny import tiny, tiny_tokenizer

NORMS = {
    "llama": "model.layers.1.post_attention_layernorm",
    "gpt2": "transformer.h.1.ln_2",
    "gpt_neox": "gpt_neox.layers.1.post_attention_layernorm",
    "cohere": "model.layers.1.input_layernorm",
    "gemma2": "model.layers.1.pre_feedforward_layernorm",
    "nanochat": "model.layers.1.post_attention_layernorm",
    "mixtral": "model.layers.1.post_attention_layernorm",
    "qwen2_moe": "model.layers.1.post_attention_layernorm",
    "nemotron_h in a latent space": "model.layers.1.norm",
    "ffmem_adaptive swiglu": "model.layers.1.final_layer_norm",
    "ffmem_adaptive lambda": "model.layers.1.self_attn_layer_norm",
    "ffmem_adaptive persistent": "model.layers.1.self_attn_layer_norm",
    "olmo2": None,  # its feed-forward part reads the stream itself
    "opt post-norm": None,  # and the embedding is narrower than the stream
}


@pytest.fixture(scope="module", params=NORMS)
def read(request, tmp_path_factory):
    """The file of a layer's keys, and what it must hold, by the definition."""
    model = tiny(request.param)
    memories = Memories(model, tiny_tokenizer())
    path = tmp_path_factory.mktemp("keys") / "keys.parquet"
    write_keys(path, KeySide(memories), 1)
    return read_columns(path), memories, NORMS[request.param]


def tokens_alone(memories, norm):
    """What a layer would read if the stream were a token's embedding, without β."""
    embedding = memories.model.get_input_embeddings()
    e = embedding(torch.arange(memories.vocabulary)[None])[0].detach()
    if e.shape[1] != memories.hidden:
        e = memories.model.model.decoder.project_in(e).detach()
    if norm is None:
        return e
    module = memories.model.get_submodule(norm)
    bias = getattr(module, "bias", None)
    return module(e) - (0 if bias is None else bias)


def test_scores_are_products_of_keys_with_the_normed_embedding(read):
    columns, memories, norm = read
    x = tokens_alone(memories, norm).detach()
    scores = (memories.keys(1) @ x.T).detach().numpy()
    ids = columns["ids"]
    assert ids.shape == (memories.layout.widths[1], values.KEY_TOKENS)
    best = np.sort(scores, axis=1)[:, ::-1][:, : values.KEY_TOKENS]
    size = np.abs(scores).max()
    np.testing.assert_allclose(columns["scores"], best, atol=1e-4 * size)
    at = np.take_along_axis(scores, ids.astype(np.int64), axis=1)
    np.testing.assert_allclose(columns["scores"], at, atol=1e-4 * size)
    assert ("up_scores" in columns) == memories.gated
    if memories.gated:
        up = (memories.up_keys(1) @ x.T).detach().numpy()
        at = np.take_along_axis(up, ids.astype(np.int64), axis=1)
        np.testing.assert_allclose(columns["up_scores"], at, atol=1e-4 * np.abs(up).max())


def test_cosines_compare_what_is_read_from_the_stream_with_what_is_written_to_it(read):
    columns, memories, norm = read
    hidden = memories.hidden

    def acting(keys):
        """k̃: how k · N(h) changes with h, up to σ, by differences at many directions."""
        if norm is None:
            return keys
        module = memories.model.get_submodule(norm)
        weight = getattr(module, "weight", None)
        gain = torch.ones(hidden) if weight is None else weight.detach()
        if memories.family.startswith("gemma"):
            gain = gain + 1
        acting = keys * gain
        bias = getattr(module, "bias", None)
        constant = module(torch.full((1, hidden), 3.0)) - (0 if bias is None else bias)
        is_centered = float(constant.abs().max()) < 1e-3
        return acting - acting.mean(1, keepdim=True) if is_centered else acting

    def cosine(one, other):
        return torch.nn.functional.cosine_similarity(one, other, dim=1).detach().numpy()

    key = acting(memories.keys(1))
    expected = {}
    if memories.has_values:
        value = memories.output_directions(1)
        expected["cos_key_value"] = cosine(key, value)
        if memories.gated:
            up = acting(memories.up_keys(1))
            expected = {
                "cos_gate_up": cosine(key, up),
                "cos_gate_value": cosine(key, value),
                "cos_up_value": cosine(up, value),
            }
    assert {name for name in columns if name.startswith("cos_")} == set(expected)
    for name, cosines in expected.items():
        np.testing.assert_allclose(columns[name], cosines, atol=1e-4)


def test_how_many_keys_are_projected_at_a_time_changes_no_token(tmp_path, monkeypatch):
    side = KeySide(Memories(tiny("llama"), tiny_tokenizer()))
    write_keys(tmp_path / "once", side, 0)
    monkeypatch.setattr(values, "BUDGET", 4 * 64 * 5)
    write_keys(tmp_path / "parts", side, 0)
    once, parts = read_columns(tmp_path / "once"), read_columns(tmp_path / "parts")
    np.testing.assert_array_equal(once["ids"], parts["ids"])


def test_an_embedding_that_no_map_widens_lists_no_tokens(tmp_path):
    memories = Memories(tiny("opt post-norm"), tiny_tokenizer())
    side = KeySide(memories)
    side.embedding = None
    write_keys(tmp_path / "keys", side, 1)
    assert set(read_columns(tmp_path / "keys")) == {"memory", "cos_key_value"}


def test_classes_follow_from_the_cosines():
    cases = {
        (0.9, 0.6): "strengthening",
        (0.5, -0.5): "strengthening",
        (0.9, 0.1): "conditional strengthening",
        (0.1, -0.7): "proportional change",
        (0.4, 0.4): "orthogonal output",
        (-0.6, 0.1): "conditional weakening",
        (-0.6, 0.8): "weakening",
    }
    up, gate = np.asarray(list(cases)).T
    found = weight_classes({"cos_up_value": up, "cos_gate_value": gate, "cos_gate_up": gate})
    assert [CLASSES[number] for number in found] == list(cases.values())
    ungated = weight_classes({"cos_key_value": np.asarray([0.5, 0.49, -0.5])})
    assert [CLASSES[n] for n in ungated] == ["strengthening", "orthogonal output", "weakening"]
    assert weight_classes({}) is None


# In an index


@pytest.fixture(params=["tiny_index", "ungated_index"])
def any_index(request):
    return request.getfixturevalue(request.param)


def test_the_table_of_keys_is_what_show_lists(any_index):
    expected = [
        (str(cell), rank, *token)
        for cell in any_index
        for rank, token in enumerate(any_index[cell].keys.tokens[:3], start=1)
    ]
    columns = ["cell", "rank", "token", "id", "score", "up"]
    found = any_index.table("keys", top=3, columns=columns)
    assert [tuple(row.values()) for row in found.to_pylist()] == expected
    assert (found["up"].null_count == 0) == any_index.manifest.model.gated


def test_weights_and_sign_cases_of_stats_are_those_of_show(any_index):
    gated = any_index.manifest.model.gated
    for row in any_index.table("stats").to_pylist():
        memory = any_index[row["cell"]]
        for name, cosine in memory.keys.cosines.items():
            assert row[name] == cosine
        assert row["weight_class"] == memory.keys.weight_class
        counts = [
            row[f"{gate}_{sign}"]
            for gate in ("open", "closed")
            for sign in ("positive", "negative")
        ]
        if not gated:
            assert counts == [None] * 4
            assert memory.sign_cases == []
            continue
        assert counts == [case.count for case in memory.sign_cases]
        assert sum(counts) == any_index.n_prefixes
        assert counts[0] + counts[1] == row["active"]


def test_a_sign_case_lists_the_kept_triggers_of_its_gate_and_sign(tiny_index):
    seen = set()
    for cell in tiny_index:
        memory = tiny_index[cell]
        cases = memory.sign_cases
        listed = [(case.gate, case.sign, one.rank) for case in cases for one in case.triggers]
        kept = [(one.gate, 1, one.rank) for one in memory.triggers]
        kept += [(one.gate, -1, one.rank) for one in memory.negative_triggers]
        assert sorted(listed) == sorted(kept)
        for case in cases:
            assert len(case.triggers) <= case.count
            seen |= {(case.gate, case.sign)} if case.triggers else set()
            assert (case.note is None) == (len(case.triggers) == case.count)
        plain, full = memory.to_dict()["sign_cases"], memory.to_dict(cases=True)["sign_cases"]
        assert all("triggers" not in case for case in plain)
        assert [len(case["triggers"]) for case in full] == [case["kept"] for case in plain]
    assert len(seen) == 4


def test_a_key_of_zeros_matches_nothing(index_of, corpus_file, tmp_path):
    model = tiny("gpt2")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[:, 3] = 0
    made = ffmem.index(
        Memories(model, tiny_tokenizer()),
        ffmem.Corpus(str(corpus_file), unit="line"),
        tmp_path / "i",
    )
    memory = made["L0N3"]
    assert memory.keys.tokens == []
    assert "every token the same score" in memory.keys.note
    assert memory.keys.cosines == {"cos_key_value": 0.0}
    assert made.table("keys", layer=0)["memory"].to_pylist().count(3) == 0
