"""The index of mixtures of experts against brute force over all prefixes."""

import json

import numpy as np
import pytest
import torch

import ffmem
from ffmem.errors import ForwardError
from ffmem.indexing import scan as scan_module
from ffmem.indexing.results import read_layer
from ffmem.indexing.tables import UNIT
from ffmem.models.memories import Memories
from tests.indexing.test_build import Killed, stop_after
from tests.indexing.test_scan import (
    MODES,
    actual_list,
    check_stats,
    chunks_of,
    corpus,
    drawn,
    every_coefficient,
    expected_list,
    scanned,
)
from tests.tiny import EXPERTS, N_EXPERTS, read, tiny, tiny_tokenizer

UNREACHED = "mixtral with an expert that no token reaches"
DEAF = "mixtral without attention"
"""A token has the same coefficients wherever it stands, so that a sentence has ties."""


def model_of(name):
    model = tiny(name if name in EXPERTS else "mixtral")
    for block in model.model.layers if name in (UNREACHED, DEAF) else []:
        if name == DEAF:
            block.self_attn.o_proj.weight.data.zero_()
        else:
            hook_away(block.mlp.gate, expert=2)
    return Memories(model, tiny_tokenizer())


def hook_away(router, expert):
    """Send the tokens of one expert to the next."""

    def elsewhere(_, args, output):
        logits, weights, experts = output
        other = (experts.flip(-1) + 1) % N_EXPERTS  # not the token's other expert
        other = torch.where(other == expert, (other + 1) % N_EXPERTS, other)
        return logits, weights, torch.where(experts == expert, other, experts)

    router.register_forward_hook(elsewhere)


def routed_weights(memories, sentences, empty_prefix):
    """{prefix: w of every bank of every layer}, from whole traces of the batches."""
    found = {}
    for _, batched in chunks_of(sentences):
        for batch in batched:
            with memories.skip_padding(batch.is_token):
                trace = memories.trace(batch.tokens)
            for row, (length, offset) in enumerate(zip(batch.lengths, batch.offsets, strict=True)):
                for p in range(0, length) if empty_prefix else range(1, length + 1):
                    found[offset + p] = [
                        None if layer.weights is None else layer.weights[row, p].numpy()
                        for layer in trace
                    ]
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*EXPERTS, UNREACHED, DEAF])
def test_the_pass_equals_brute_force_over_all_prefixes(name, mode):
    prefixes, empty_prefix = MODES[mode]
    memories, sentences = model_of(name), corpus()
    scan, sampled = scanned(memories, sentences, prefixes, empty_prefix)
    every = every_coefficient(memories, sentences, empty_prefix)
    weights = routed_weights(memories, sentences, empty_prefix)
    assert scan.n_prefixes == len(every)
    for layer, banks in enumerate(memories.banks):
        found = scan.result(layer)
        lists = [found.positive, found.negative] if memories.gated else [found.positive]
        for memory in range(memories.layout.widths[layer]):
            for sign, triggers in zip((1, -1), lists, strict=False):
                expected = expected_list(every, layer, memory, sign, prefixes)
                assert actual_list(triggers, memory) == expected
        check_stats(found.stats, every, layer, memories.gated)
        for column, prefix in enumerate(drawn(sentences, empty_prefix).prefixes.tolist()):
            np.testing.assert_array_equal(sampled[layer][:, column], every[prefix][1][layer])
        for number, bank in enumerate(banks):
            of_bank = [1.0 if w[layer] is None else w[layer][number] for w in weights.values()]
            n_routed = sum(w != 0 for w in of_bank)
            assert set(found.stats.routed[bank.memories].tolist()) == {n_routed}
            total = found.stats.weight_sums[bank.memories] * UNIT
            np.testing.assert_allclose(total, sum(of_bank), atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mixtral", DEAF])
def test_lists_do_not_depend_on_whether_rows_or_candidates_are_added(name, mode, monkeypatch):
    prefixes, empty_prefix = MODES[mode]
    taken = []
    add_rows = scan_module._ChunkReader._add_rows
    monkeypatch.setattr(
        scan_module._ChunkReader, "_add_rows", lambda *args: taken.append(add_rows(*args))
    )
    found = []
    for share in (1, 10**9):  # never, and whenever something enters
        monkeypatch.setattr(scan_module, "DENSE_SHARE", share)
        memories = model_of(name)
        scan, _ = scanned(memories, corpus(), prefixes, empty_prefix)
        results = [scan.result(layer) for layer in range(memories.n_layers)]
        found.append([list_ for one in results for list_ in (one.positive, one.negative)])
        assert bool(taken) == (share > 1)
    for candidates, rows in zip(*found, strict=True):
        for mine, theirs in zip(candidates, rows, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_an_expert_that_no_token_reaches_has_empty_lists_and_zeros():
    memories = model_of(UNREACHED)
    scan, sampled = scanned(memories, corpus(), "best", False)
    for layer, banks in enumerate(memories.banks):
        found, nobody = scan.result(layer), banks.routed[2].memories
        assert not found.stats.routed[nobody].any()
        assert not found.positive.coefficients[nobody].any()
        assert (found.positive.prefixes[nobody] == -1).all()
        for column in (found.stats.maximum, found.stats.minimum, found.stats.active):
            assert not column[nobody].any()
        assert not sampled[layer][nobody].any()


def test_the_experts_of_these_tests_have_ties():
    """Between sentences, and within one."""
    for name, place in (("mixtral", lambda sentence: 0), (DEAF, lambda sentence: sentence)):
        every = every_coefficient(model_of(name), corpus(), empty_prefix=False)
        values = [(place(entry[0]), float(entry[1][0][0])) for entry in every.values()]
        values = [value for value in values if value[1]]
        assert len(set(values)) < len(values)


def test_a_router_that_overflows_is_an_error_with_its_place():
    memories = Memories(tiny("mixtral"), tiny_tokenizer())
    memories.blocks[1].mlp.gate.register_forward_hook(
        lambda _, args, output: (output[0], output[1] * torch.nan, output[2])
    )
    with pytest.raises(ForwardError, match=r"L1E\dN0 .* not finite somewhere in chunk 0"):
        scanned(memories, corpus(), "best", False)


# The folder of an index

TEXT = [" ".join(f"w{3 + (i * j) % 20}" for j in range(2, 3 + i % 9)) for i in range(120)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name, lines in (("all", TEXT), ("one", TEXT[:70]), ("two", TEXT[70:])):
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return folder


def make(name, text, out, **options):
    options = {"t": 6, "start": "bos", "chunk_tokens": 64, "batch_tokens": 48} | options
    return ffmem.index(read(name), ffmem.Corpus(str(text), unit="line"), out, **options)


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*.parquet"))
    }


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "nemotron_h with experts"])
def test_extend_and_merge_give_the_same_bytes(name, texts, tmp_path):
    make(name, texts / "one.txt", tmp_path / "extended")
    make(name, texts / "two.txt", tmp_path / "second")
    make(name, texts / "one.txt", tmp_path / "first")
    ffmem.merge([tmp_path / "first", tmp_path / "second"], tmp_path / "merged")
    ffmem.extend(
        tmp_path / "extended", ffmem.Corpus(str(texts / "two.txt"), unit="line"), model=read(name)
    )

    assert files(tmp_path / "extended") == files(tmp_path / "merged")
    ffmem.verify(tmp_path / "merged")


@pytest.mark.parametrize("prefixes", ["best", "all"])
def test_a_killed_run_resumes_and_ends_in_the_same_bytes(texts, tmp_path, monkeypatch, prefixes):
    for name in ("COMMIT_SECONDS", "COMMIT_SHARE"):
        monkeypatch.setattr(f"ffmem.indexing.worker.{name}", 0.0)
    make("qwen2_moe", texts / "all.txt", tmp_path / "whole", prefixes=prefixes)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Killed):
            make("qwen2_moe", texts / "all.txt", tmp_path / "killed", prefixes=prefixes)
    live = ffmem.open(tmp_path / "killed")["L1SN1"]
    assert live.stats.expert.share == 1
    make("qwen2_moe", texts / "all.txt", tmp_path / "killed", prefixes=prefixes)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_workers_give_the_same_bytes(texts, tmp_path):
    model = tmp_path / "model"
    memories = read("qwen2_moe")
    memories.model.save_pretrained(model)
    memories.tokenizer.tokenizer.save_pretrained(model)
    corpus = ffmem.Corpus(str(texts / "all.txt"), unit="line")
    options = {"t": 6, "start": "bos", "chunk_tokens": 64, "threads": 1}
    ffmem.index(str(model), corpus, tmp_path / "one", **options)
    ffmem.index(str(model), corpus, tmp_path / "two", workers=2, **options)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_the_finished_index_holds_the_statistics_of_experts(texts, tmp_path):
    index = make("qwen2_moe", texts / "all.txt", tmp_path / "index")
    memories = read("qwen2_moe")
    n_prefixes = sum(len(line.split()) for line in TEXT)
    for layer in range(memories.n_layers):
        stats = read_layer(index.folder, layer).stats
        shared, *experts = memories.banks[layer]
        assert (stats.routed[shared.memories] == n_prefixes).all()
        shares = [stats.routed[bank.memories][0] for bank in experts]
        assert sum(shares) == 2 * n_prefixes  # every token has two experts
        weights = [stats.weight_sums[bank.memories][0] * UNIT for bank in experts]
        assert sum(weights) <= n_prefixes * (1 + 1e-3)


def test_show_names_the_expert_and_its_share_of_tokens(texts, tmp_path):
    index = make("qwen2_moe", texts / "all.txt", tmp_path / "index")
    memories = read("qwen2_moe")
    stats = read_layer(index.folder, 1).stats
    n_prefixes = sum(len(line.split()) for line in TEXT)
    for bank, name in zip(memories.banks[1], ("S", "E0", "E1", "E2", "E3", "E4"), strict=True):
        memory = index[f"L1{name}N4"]
        number = bank.offset + 4
        shown = json.loads(json.dumps(memory.to_dict()))
        assert (shown["cell"], shown["memory"]) == (f"L1{name}N4", number)
        expert, routed = shown["stats"]["expert"], int(stats.routed[number])
        weight = float(stats.weight_sums[number]) * UNIT
        assert expert["share"] == routed / n_prefixes
        assert expert["mean_weight"] == (weight / routed if routed else 0.0)
        assert expert["active_share"] == (int(stats.active[number]) / routed if routed else 0.0)
        kind = "shared expert" if name == "S" else f"expert {name[1]}"
        assert f"{kind}: reached by {routed / n_prefixes:.1%} of tokens" in str(memory)
    assert 0 < sum(stats.routed > 0) < len(stats.routed)
    table = index.table("stats", layer=1, columns=["bank", "routed_share", "mean_weight"])
    assert table["bank"].to_pylist()[0] == "S"
    assert table["routed_share"].to_pylist() == (stats.routed / n_prefixes).tolist()


def test_the_manifest_says_what_a_coefficient_is(texts, tmp_path):
    manifest = make("mixtral", texts / "two.txt", tmp_path / "index").manifest
    assert manifest.coefficient.startswith("w·m with m = f(g·x)·(u·x)")
    assert [bank.kind for bank in manifest.model.banks[0]] == ["expert"]
