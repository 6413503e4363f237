"""An index as it is read: what `show --json` prints, field by field."""

import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ffmem
from ffmem.errors import FfmemError, StoreError, UnknownCell
from ffmem.indexing.tables import layer_file, read_columns

TRIGGER = {
    *("rank", "coefficient", "sentence", "length"),
    *("prefix", "last_token", "next_token", "rest"),
}


def every(index):
    return [index[cell].to_dict() for cell in index]


def lists(memory):
    return [*memory["triggers"], *memory["negative_triggers"]]


def test_a_memory_has_the_fields_of_the_contract_and_they_are_json(index):
    gated = index.manifest.model.gated
    for memory in every(index):
        assert json.loads(json.dumps(memory)) == memory
        assert set(memory) == {
            *("cell", "layer", "memory", "triggers", "negative_triggers", "value", "key", "stats"),
            *(("sign_cases",) if gated else ()),
        }
        for token in memory["key"]["tokens"]:
            assert set(token) == {"token", "id", "score", *(("up",) if gated else ())}
        assert memory["cell"] == f"L{memory['layer']}N{memory['memory']}"
        for trigger in lists(memory):
            assert set(trigger) == TRIGGER | ({"gate"} if gated else set())
        assert set(memory["value"]) == {"projection", "top", "bottom"}
        assert memory["value"]["projection"] == "folded"
        for token in memory["value"]["top"] + memory["value"]["bottom"]:
            assert set(token) == {"token", "id", "probability", "logit"}
        assert {"active_share", "max", "quantiles"} <= set(memory["stats"])
        assert {"0.5", "0.99"} <= set(memory["stats"]["quantiles"])
        assert gated or memory["negative_triggers"] == []


def test_triggers_are_those_of_the_files_in_their_order(index):
    for layer in range(index.n_layers):
        columns = read_columns(index.folder / layer_file("triggers", layer))
        for sign, name in (("", "triggers"), ("negative_", "negative_triggers")):
            if f"{sign}prefix" not in columns:
                continue
            for memory in range(index.layout.widths[0]):
                shown = getattr(index[ffmem.Cell(layer, memory)], name)
                filled = columns[f"{sign}prefix"][memory] != -1
                assert [t.rank for t in shown] == list(range(1, filled.sum() + 1))
                expected = columns[f"{sign}coefficient"][memory][filled]
                assert [t.coefficient for t in shown] == expected.tolist()
                prefixes = [index.sentences.row(t.sentence).offset + t.length for t in shown]
                assert prefixes == columns[f"{sign}prefix"][memory][filled].tolist()


def test_the_tokens_beside_a_place_are_the_sentences_own(index):
    for memory in every(index):
        for trigger in lists(memory):
            ids, p = index.sentences.row(trigger["sentence"]).ids, trigger["length"]
            last = index.token(ids[p - 1]) if p else None
            following = index.token(ids[p]) if p < len(ids) else None
            assert (trigger["last_token"], trigger["next_token"]) == (last, following)


def test_ends_of_sentences_and_empty_prefixes_have_no_token_beyond(tiny_index, ungated_index):
    gated = [trigger for memory in every(tiny_index) for trigger in lists(memory)]
    at_end = [trigger for trigger in gated if trigger["next_token"] is None]
    assert at_end
    assert all(trigger["rest"] == "" for trigger in at_end)
    assert all(trigger["length"] > 0 for trigger in gated)
    authors = [trigger for memory in every(ungated_index) for trigger in lists(memory)]
    empty = [trigger for trigger in authors if trigger["length"] == 0]
    assert empty
    assert all(t["last_token"] is None and t["prefix"] == "" and t["rest"] for t in empty)
    assert all(trigger["next_token"] is not None for trigger in authors)


def test_prefix_and_rest_are_the_sentence_and_nothing_is_lost_inside_a_character(index):
    split = 0
    for number in range(index.sentences.n_sentences):
        sentence = index.sentences.row(number)
        for length in range(len(sentence.ids) + 1):
            place = index.prefix_text(sentence, length)
            both = place.prefix + place.rest
            assert "�" not in both
            if both != sentence.text:
                split += 1
                assert place.prefix.endswith("⟩")
                assert place.rest.startswith("⟨")
                joined = re.sub(
                    "(?:⟨[0-9a-f]{2}⟩)+",
                    lambda hexed: bytes.fromhex(re.sub("[⟨⟩]", "", hexed.group())).decode(),
                    both,
                )
                assert joined == sentence.text
    assert split > 50  # emoji, Hebrew and Devanagari


def test_statistics_are_of_all_prefixes_and_quantiles_of_the_sample(index):
    n_prefixes = index.manifest.corpus.tokens
    for layer in range(index.n_layers):
        stats = read_columns(index.folder / layer_file("stats", layer))
        sampled = read_columns(index.folder / layer_file("samples", layer))["coefficient"]
        for memory in range(index.layout.widths[0]):
            found = index[ffmem.Cell(layer, memory)].stats
            assert found.active_share == stats["active"][memory] / n_prefixes
            assert 0 <= found.active_share <= 1
            assert (found.max, found.min) == (stats["max"][memory], stats["min"][memory])
            for q, value in found.quantiles.items():
                assert value == pytest.approx(np.quantile(sampled[memory], float(q)), abs=1e-6)
    if sampled.shape[1] == n_prefixes and not index.manifest.model.gated:  # the sample is all
        assert found.active_share == (sampled[-1] > 0).mean()


@pytest.mark.parametrize("cell", ["L1N5", "L1D5", "1.5", "1:5", "1/5", ffmem.Cell(1, 5)])
def test_a_memory_is_found_by_any_form_of_its_name(tiny_index, cell):
    assert tiny_index[cell].cell == ffmem.Cell(1, 5)
    assert tiny_index[cell].to_dict() == tiny_index.memory(ffmem.Cell(1, 5)).to_dict()


@pytest.mark.parametrize("cell", ["L2N0", "L0N24", "L-1N0", "river", ffmem.Cell(9, 0)])
def test_an_unknown_memory_is_refused(tiny_index, cell):
    with pytest.raises(UnknownCell):
        tiny_index[cell]


def test_an_index_counts_and_lists_its_memories(tiny_index):
    assert len(tiny_index) == len(list(tiny_index)) == 2 * 24
    assert repr(tiny_index).startswith(
        f"Index('{tiny_index.folder}': 2 × 24 memories of a model in memory over "
    )


def test_a_corpus_of_ids_alone_is_shown_by_its_tokens(index_of, tokenizer, tmp_path):
    lines = ["the river 😀", "שלום to the city"]
    ids = tokenizer(lines)["input_ids"]
    pq.write_table(pa.table({"ids": ids}), tmp_path / "ids.parquet")
    corpus = ffmem.Corpus(str(tmp_path / "ids.parquet"), unit="line", column="ids")
    index = index_of("llama", corpus, tmp_path / "index", start="none")
    assert index.sentences.row(0).text is None
    for memory in every(index):
        for trigger in lists(memory):
            mine = ids[trigger["sentence"]]
            shown = [index.token(id) for id in mine]
            assert trigger["prefix"] == "".join(shown[: trigger["length"]])
            assert trigger["rest"] == "".join(shown[trigger["length"] :])
    plain = index.prefix_text(index.sentences.row(0), len(ids[0])).prefix
    assert plain == "the river ⟨f0⟩⟨9f⟩⟨98⟩⟨80⟩"
    # The river has text in the search as well.
    assert ffmem.search(index, "river", place="triggers")


def test_what_is_no_index_is_refused_with_what_to_do(tmp_path, tiny_index):
    with pytest.raises(StoreError, match="no such folder"):
        ffmem.open(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"no manifest\.json"):
        ffmem.open(tmp_path)
    (tmp_path / "partials").mkdir()
    with pytest.raises(StoreError, match="not finished"):
        ffmem.open(tmp_path)
    for content in ("{", "[]", '{"format": 99}', '{"format": 1}', "\0"):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(StoreError, match="manifest"):
            ffmem.open(tmp_path)


def test_a_damaged_file_of_an_index_is_named(tiny_index, tmp_path):
    shutil.copytree(tiny_index.folder, tmp_path / "index")
    damaged = tmp_path / "index" / layer_file("values", 1)
    damaged.write_bytes(damaged.read_bytes()[:300])
    index = ffmem.open(tmp_path / "index")
    assert index["L0N0"].triggers
    with pytest.raises(StoreError, match=r"values/layer-001\.parquet"):
        index["L1N0"]


@pytest.mark.parametrize("layer", [2, 99, -1])
def test_a_layer_that_the_model_does_not_have_is_refused(tiny_index, layer):
    with pytest.raises(FfmemError, match=rf"no layer {layer}: the model has layers 0 to 1\."):
        tiny_index.memories(layer)


@pytest.mark.parametrize("cell", [ffmem.Cell(2, 0), ffmem.Cell(-1, 0), ffmem.Cell(0, -1)])
def test_a_memory_that_the_model_does_not_have_is_refused(tiny_index, cell):
    for look in (tiny_index.memory, tiny_index.sample):
        with pytest.raises(UnknownCell, match=r"layers 0 to 1\.|layer 0 has memories 0 to 23"):
            look(cell)


def test_a_sentence_that_the_corpus_does_not_have_is_refused(tiny_index):
    sentences = tiny_index.sentences
    for number in (-1, sentences.n_sentences, 10**9):
        with pytest.raises(FfmemError, match=f"There is no sentence {number}: the corpus has"):
            sentences.row(number)
    assert sentences.row(sentences.n_sentences - 1).sentence == sentences.n_sentences - 1


def test_tokens_are_a_sequence_of_text(tiny_index):
    tokens = tiny_index.tokens
    every = list(tokens)
    assert {type(token) for token in every} == {str}
    assert len(every) == len(tokens) == tiny_index.manifest.model.vocabulary
    assert [tokens[id] for id in range(len(tokens))] == every
    for part in (slice(3, 9), slice(None, None, 50), slice(-2, None)):
        assert tokens[part] == every[part]
    assert tokens[-1] == every[-1]
    assert every[7] in tokens
    assert repr(every[0]) in repr(tokens)
    with pytest.raises(IndexError):
        tokens[len(tokens)]
