"""Sources: matches of weights against products by hand, changes against whole ablated passes."""

import json

import pytest
import torch
from click.testing import CliRunner

import ffmem
from ffmem.cells import Cell
from ffmem.cli import cli
from ffmem.errors import FfmemError, NoStaticValues
from ffmem.interventions.coefficients import coefficients_along
from ffmem.interventions.edits import Edits
from ffmem.interventions.forward import apply_edits
from ffmem.interventions.sources import NO_NORM, sources
from ffmem.models.banks import DenseBank
from ffmem.models.keys import find_input_norms
from ffmem.models.modules import first_tensor
from tests.interventions.planted import with_start
from tests.tiny import EXPERTS, TINY, read

TEXT = "w5 w9 w17 w30"
IDS = [5, 9, 17, 30]


@pytest.fixture(scope="module", params=[*TINY, *EXPERTS])
def memories(request):
    return read(request.param)


def last_cell(memories):
    return memories.layout.cell(memories.layout.memory_layers[-1], 5)


def test_a_folded_key_reads_the_stream_as_the_memory_does(memories):
    """(x − β) · k = h · k̃ / σ, with x and h of the model's own pass."""
    layer = memories.layout.memory_layers[-1]
    banks = memories.banks[layer]
    bank = banks.at(0)
    norm = find_input_norms(memories, layer).get(bank)
    if norm is None:
        return
    read = {}

    def keep(name):
        return lambda _, args, kwargs: read.update({name: first_tensor(args, kwargs)})

    reader = bank.keys if isinstance(bank, DenseBank) else banks.input
    modules = {"x": reader} | ({} if norm.module is None else {"h": norm.module})
    handles = [
        module.register_forward_pre_hook(keep(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    trace = memories.trace(torch.tensor([[0, *IDS]]))[layer]
    for handle in handles:
        handle.remove()
    keys = memories.keys(layer)[:3].float()
    x, h = (
        read.get(name, trace.residual).reshape(-1, memories.hidden).float() for name in ("x", "h")
    )
    product = (x - norm.offset) @ keys.T
    expected = h @ norm.fold_keys(keys).T / norm.denominator(h)[:, None]
    torch.testing.assert_close(product, expected, rtol=2e-3, atol=2e-3)


def test_the_norms_of_one_layer_are_those_found_among_all(memories):
    found = find_input_norms(memories)
    for layer in memories.layout.memory_layers:
        own = find_input_norms(memories, layer)
        assert set(own) == {bank for bank in found if bank in memories.banks[layer].banks}
        for bank, norm in own.items():
            assert norm.module is found[bank].module


def test_where_no_norm_was_found_the_result_says_so(monkeypatch):
    memories = read("llama")
    assert NO_NORM not in sources(with_start(memories), last_cell(memories)).notes
    monkeypatch.setattr("ffmem.interventions.sources.find_input_norms", lambda *_: {})
    assert NO_NORM in sources(with_start(memories), last_cell(memories)).notes


def test_matches_are_the_largest_cosines(memories):
    cell = last_cell(memories)
    if not memories.has_values:
        with pytest.raises(NoStaticValues):
            sources(with_start(memories), cell)
        return
    found = sources(with_start(memories), cell, n=6)
    norm = find_input_norms(memories, cell.layer).get(memories.banks[cell.layer].at(cell.memory))
    keys = [memories.keys(cell.layer)[cell.memory]]
    keys += [memories.up_keys(cell.layer)[cell.memory]] if memories.gated else []
    folded, expected = torch.stack(keys).float(), {}
    folded = folded if norm is None else norm.fold_keys(folded)
    for layer in range(cell.layer):
        for memory, value in enumerate(memories.output_directions(layer).float()):
            if value.any():
                cosines = torch.cosine_similarity(value[None], folded).tolist()
                expected[str(memories.layout.cell(layer, memory))] = cosines
    best = sorted(expected, key=lambda name: -max(map(abs, expected[name])))[:6]
    assert [one.cell for one in found.by_weights] == best
    for one in found.by_weights:
        assert one.cosine == pytest.approx(expected[one.cell][0], abs=1e-4)
        if memories.gated:
            assert one.up_cosine == pytest.approx(expected[one.cell][1], abs=1e-4)


def test_changes_on_a_prompt_are_those_of_whole_passes(memories):
    if not memories.has_values:
        return
    cell = last_cell(memories)
    found = sources(with_start(memories), cell, prompt=TEXT, n=3, candidates=8)
    (along,) = coefficients_along(memories, cell, [IDS], 0)
    at = found.position - 1
    assert abs(along[at]) == max(map(abs, along))
    # Up to there: sparse attention breaks ties by the number of tokens.
    (prefix,) = coefficients_along(memories, cell, [IDS[: at + 1]], 0)
    assert found.coefficient == pytest.approx(prefix[at], abs=1e-4)
    for source in found.on_prompt:
        with apply_edits(memories, Edits.of(off=[source.cell])):
            (changed,) = coefficients_along(memories, cell, [IDS[: at + 1]], 0)
        assert source.change == pytest.approx(changed[at] - prefix[at], abs=5e-4)
    assert found.on_prompt or found.coefficient == 0


def test_the_first_layer_has_no_sources():
    found = sources(with_start(read("llama")), Cell(0, 3), prompt=TEXT)
    assert found.by_weights == found.on_prompt == []
    assert "No memory below" in str(found)
    for text in (str(found), found._repr_html_()):  # no table without a row
        assert "cosine" not in text
        assert "change" not in text


def test_bad_input():
    loaded = with_start(read("llama"))
    with pytest.raises(FfmemError, match="n must be 1"):
        sources(loaded, Cell(1, 3), n=0)
    with pytest.raises(FfmemError, match="needs a prompt"):
        sources(loaded, Cell(1, 3), position=2)
    with pytest.raises(FfmemError, match="Position 9"):
        sources(loaded, Cell(1, 3), prompt=TEXT, position=9)


def test_show_adds_sources(expert_index):
    arguments = ["show", str(expert_index.folder), "L1SN3"]
    plain = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert "sources" not in json.loads(plain.stdout)
    more = ["--sources", "--prompt", "The river runs"]
    result = CliRunner().invoke(cli, [*arguments, *more, "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)["sources"]
    expected = ffmem.sources(expert_index, "L1SN3", prompt="The river runs")
    assert [one["cell"] for one in found["by_weights"]] == [one.cell for one in expected.by_weights]
    assert found["on_prompt"][0]["cell"].startswith("L0")
    text = CliRunner().invoke(cli, [*arguments, *more], catch_exceptions=False).stdout
    assert "Lower memories whose values match the keys of L1SN3" in text
    assert CliRunner().invoke(cli, [*arguments, "--prompt", "The"]).exit_code == 2
