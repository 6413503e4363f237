"""The code that a page offers to copy does what it says."""

import pytest
import torch

import ffmem
from ffmem.cells import Cell
from ffmem.web.views.memory import snippets


@pytest.fixture(params=["tiny", "plain"])
def served(request, catalog):
    return catalog.get(request.param)


def code_of(served, name):
    return snippets(str(served.index.folder), served.index.manifest.model, Cell(1, 3))[name]


def test_ffmems_own_code_runs(served, capsys):
    exec(compile(code_of(served, "ffmem"), "snippet", "exec"), {})
    assert "L1N3" in capsys.readouterr().out


def test_the_hook_of_hugging_face_switches_the_memory_off(served):
    code = code_of(served, "Hugging Face").replace(
        '"MODEL"', repr(served.index.manifest.model.source)
    )
    names = {}
    exec(compile(code, "snippet", "exec"), names)
    memories = ffmem.load(served.index.manifest.model.source, device="cpu")
    from ffmem.interventions.edits import Edits
    from ffmem.interventions.forward import apply_edits

    ids = torch.tensor([[3, 9, 20, 7]])
    with torch.no_grad():
        hooked = names["model"](ids).logits
        names["handle"].remove()
        plain = names["model"](ids).logits
    with apply_edits(memories, Edits.of(off=["L1N3"])):
        edited = memories.logits(ids)
    assert torch.allclose(hooked, edited, atol=1e-4)
    assert not torch.allclose(hooked, plain, atol=1e-6)


def test_the_hook_of_transformer_lens_names_layer_and_memory(served):
    code = code_of(served, "TransformerLens")
    compile(code, "snippet", "exec")
    assert "blocks.1.mlp.hook_post" in code
    assert "[..., 3]" in code


def test_an_unknown_family_gets_ffmems_code_alone(served):
    from dataclasses import replace

    model = replace(served.index.manifest.model, family="something new")
    assert list(snippets("x", model, Cell(0, 0))) == ["ffmem"]
