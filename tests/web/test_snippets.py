"""The code that a page offers to copy does what it says."""

import pytest
import torch

import ffmem
from ffmem.cells import Cell
from ffmem.web.snippets import snippets


@pytest.fixture(params=["tiny", "plain"])
def shelf(request, library):
    return library.shelves[request.param]


def code_of(shelf, name):
    found = snippets(str(shelf.index.folder), shelf.index.manifest.model, Cell(1, 3))
    return next(snippet.code for snippet in found if snippet.name == name)


def test_ffmems_own_code_runs(shelf, capsys):
    exec(compile(code_of(shelf, "ffmem"), "snippet", "exec"), {})
    assert "L1N3" in capsys.readouterr().out


def test_the_hook_of_hugging_face_switches_the_memory_off(shelf):
    code = code_of(shelf, "Hugging Face").replace(
        '"MODEL"', repr(shelf.index.manifest.model.source)
    )
    names = {}
    exec(compile(code, "snippet", "exec"), names)
    memories = ffmem.load(shelf.index.manifest.model.source, device="cpu")
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


def test_the_hook_of_transformer_lens_names_layer_and_memory(shelf):
    code = code_of(shelf, "TransformerLens")
    compile(code, "snippet", "exec")
    assert "blocks.1.mlp.hook_post" in code
    assert "[..., 3]" in code


def test_an_unknown_family_gets_ffmems_code_alone(shelf):
    from dataclasses import replace

    model = replace(shelf.index.manifest.model, family="something new")
    assert [snippet.name for snippet in snippets("x", model, Cell(0, 0))] == ["ffmem"]
