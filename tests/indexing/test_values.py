"""The ends of every value, against a plain sort of all its logits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffmem.indexing import values
from ffmem.indexing.tables import read_columns
from ffmem.indexing.values import ENDS, write_values
from ffmem.models.memories import Memories
from ffmem.models.tokenizer import WordTokenizer
from tests.tiny import tiny, tiny_tokenizer


def with_ties(name):
    """A model with twelve tokens of equal rows in the output embedding, so that many tie."""
    model = tiny(name)
    with torch.no_grad():
        rows = model.get_output_embeddings().weight
        rows[40:52] = rows[7]
    return Memories(model, tiny_tokenizer())


def ends(path, memories, layer=1):
    write_values(path, memories, layer)
    return read_columns(path)


def plain_ends(logits, unlisted, sign, n):
    """Ids by (logit outward, id), written as the definition says."""
    listed = [id for id in range(len(logits)) if id not in unlisted]
    return sorted(listed, key=lambda id: (-sign * logits[id], id))[:n]


def check(columns, memories, layer=1):
    logits = memories.head.folded(memories.output_directions(layer)).float()
    probabilities = logits.double().softmax(1).numpy()
    logits = logits.numpy()
    unlisted = memories.tokenizer.unlisted
    n = min(ENDS, logits.shape[1] - len(unlisted))
    for side, sign in (("top", 1), ("bottom", -1)):
        ids = columns[f"{side}_ids"]
        assert ids.shape == (memories.layout.widths[0], n)
        for memory in range(memories.layout.widths[0]):
            expected = plain_ends(logits[memory].tolist(), unlisted, sign, n)
            assert ids[memory].tolist() == expected
            np.testing.assert_array_equal(
                columns[f"{side}_logits"][memory], logits[memory, expected]
            )
            np.testing.assert_allclose(
                columns[f"{side}_probabilities"][memory], probabilities[memory, expected], rtol=1e-4
            )


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "opt post-norm", "cohere"])
def test_both_ends_equal_a_plain_sort_of_all_logits_ties_to_the_lower_id(name, tmp_path):
    memories = with_ties(name)
    check(ends(tmp_path / "values.parquet", memories), memories)


@pytest.mark.parametrize("n", [1, 5, 9])
def test_ties_at_the_cut_go_to_the_lower_id(n, tmp_path, monkeypatch):
    monkeypatch.setattr(values, "ENDS", n)
    monkeypatch.setitem(globals(), "ENDS", n)
    memories = with_ties("llama")
    with torch.no_grad():  # every token but ten has the same logit
        rows = memories.model.get_output_embeddings().weight
        rows[10:] = rows[10]
    check(ends(tmp_path / "values.parquet", memories), memories)


@pytest.mark.parametrize("budget", [1, 4 * 64 * 5, 4 * 64 * 23])
def test_how_many_values_are_projected_at_a_time_changes_nothing(budget, tmp_path, monkeypatch):
    memories = with_ties("llama")
    at_once = ends(tmp_path / "once.parquet", memories)
    monkeypatch.setattr(values, "BUDGET", budget)
    in_parts = ends(tmp_path / "parts.parquet", memories)
    for name, column in at_once.items():
        if name.endswith("ids") or name == "memory":
            np.testing.assert_array_equal(in_parts[name], column)
        else:
            np.testing.assert_allclose(in_parts[name], column, rtol=1e-5, atol=1e-6)


def test_unlisted_tokens_stand_at_no_end_but_keep_their_probability(tmp_path):
    words = [f"w{n}" for n in range(54)] + [f"madeupword{n:04d}" for n in range(6)]
    memories = Memories(tiny("ffmem_adaptive"), WordTokenizer(words))
    unlisted = memories.tokenizer.unlisted
    assert unlisted == {0, 1, *range(58, 64)}
    columns = ends(tmp_path / "values.parquet", memories)
    check(columns, memories)
    for side in ("top", "bottom"):
        assert not np.isin(columns[f"{side}_ids"], list(unlisted)).any()
    with_all = memories.head.folded(memories.output_directions(1)).exp().sum(1)
    np.testing.assert_allclose(with_all, 1, rtol=1e-4)  # of all tokens, unlisted ones too


def test_more_unlisted_tokens_than_leave_fifty_shorten_the_lists(tmp_path):
    words = [f"w{n}" for n in range(20)] + [f"madeupword{n:04d}" for n in range(40)]
    memories = Memories(tiny("ffmem_adaptive"), WordTokenizer(words))
    columns = ends(tmp_path / "values.parquet", memories)
    assert columns["top_ids"].shape[1] == 64 - 42
    check(columns, memories)


def test_behind_an_adaptive_softmax_the_other_end_of_a_gated_value_is_the_top_of_its_opposite(
    tmp_path,
):
    memories = Memories(tiny("ffmem_adaptive swiglu"), tiny_tokenizer())
    columns = ends(tmp_path / "values.parquet", memories)
    for side, sign in (("top", 1), ("bottom", -1)):
        logits = memories.head.folded(sign * memories.output_directions(1)).float().tolist()
        expected = [plain_ends(row, memories.tokenizer.unlisted, 1, ENDS) for row in logits]
        assert columns[f"{side}_ids"].tolist() == expected


@given(
    vocabulary=st.integers(1, 400),
    n=st.integers(1, 9),
    distinct=st.sampled_from([2, 7, 1_000]),
    n_unlisted=st.integers(0, 3),
    sign=st.sampled_from([1, -1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_give_the_ends_of_a_plain_sort(vocabulary, n, distinct, n_unlisted, sign, seed):
    rng = np.random.default_rng(seed)
    logits = rng.integers(distinct, size=(3, vocabulary)).astype(np.float32)
    unlisted = rng.choice(vocabulary, min(n_unlisted, vocabulary - 1), replace=False)
    n = min(n, vocabulary - len(unlisted))
    plain = [plain_ends(row, set(unlisted.tolist()), sign, n) for row in logits.tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "TILE", 16)
        patch.setattr(values, "BLOCK", 8)
        buffer = torch.full((-(-vocabulary // 16), 5, 16), torch.nan)
        found = values._Logits(buffer, 3, vocabulary, torch.from_numpy(unlisted))

        def write():
            for number, tokens in enumerate(torch.from_numpy(logits).split(16, dim=1)):
                found.tiles[number, :, : tokens.shape[1]] = tokens
                yield number

        log_total = found.read(write(), with_total=True)
        ids, first = found.first(sign, n)
    assert ids.tolist() == plain
    np.testing.assert_array_equal(first, np.take_along_axis(logits, ids, 1))
    torch.testing.assert_close(log_total, torch.from_numpy(logits).logsumexp(1))


@pytest.mark.parametrize("size", [1, 7, 64, 100])
@pytest.mark.parametrize("name", ["cohere", "ffmem_adaptive"])  # a scale; no embedding to cut
def test_folded_comes_in_tiles_of_tokens(name, size):
    memories = Memories(tiny(name), tiny_tokenizer())
    part = memories.output_directions(1)
    whole = memories.head.folded(part)
    tiles = torch.full((-(-64 // size), len(part), size), torch.nan)
    written = [tiles[number].clone() for number in memories.head.folded_tiles(part, tiles)]
    torch.testing.assert_close(torch.cat(written, 1)[:, :64], whole, rtol=1e-5, atol=1e-6)
    assert torch.cat(written, 1)[:, 64:].isnan().all()  # left as it was
