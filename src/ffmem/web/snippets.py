"""Code to copy: the same memory in ffmem, in plain Hugging Face, and in TransformerLens."""

from typing import NamedTuple

from ffmem.cells import Cell
from ffmem.indexing.manifest import ModelRecord
from ffmem.models.families import FAMILIES
from ffmem.web.library import short


class Snippet(NamedTuple):
    """One way to get at a memory."""

    name: str
    code: str


def snippets(folder: str, model: ModelRecord, cell: Cell) -> list[Snippet]:
    """Return the ways that work for this model; folders are those of the one who looks."""
    found = [Snippet("ffmem", _ffmem(folder, cell))]
    if model.family in FAMILIES:
        found.append(Snippet("Hugging Face", _hugging_face(model, cell)))
        if not _is_ours(model):  # which TransformerLens does not know
            found.append(Snippet("TransformerLens", _transformer_lens(model, cell)))
    return found


def _is_ours(model: ModelRecord) -> bool:
    return model.family == "ffmem_adaptive"


def _ffmem(folder: str, cell: Cell) -> str:
    return f"""\
import ffmem

index = ffmem.open({folder!r})
memory = index["{cell}"]
print(memory)
found = ffmem.trace(index, "Your prompt", off=["{cell}"])
print(found.output_top[0], found.edited.output_top[0])
"""


def _hugging_face(model: ModelRecord, cell: Cell) -> str:
    row = FAMILIES[model.family]
    path = f"{row.blocks}.{cell.layer}.{row.values}"
    ours = "import ffmem.networks.model  # tells transformers of this type\n" * _is_ours(model)
    return f"""\
{ours}from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("MODEL")  # {short(model.source)}: its folder or Hub id
values = model.get_submodule("{path}")

def switch_off(module, args):
    coefficients = args[0].clone()
    coefficients[..., {cell.memory}] = 0.0
    return (coefficients, *args[1:])

handle = values.register_forward_pre_hook(switch_off)  # handle.remove() undoes it
"""


def _transformer_lens(model: ModelRecord, cell: Cell) -> str:
    return f"""\
from transformer_lens.model_bridge import TransformerBridge

model = TransformerBridge.boot_transformers("MODEL")  # {short(model.source)}: its folder or Hub id

def switch_off(coefficients, hook):
    coefficients[..., {cell.memory}] = 0.0
    return coefficients

hook = ("blocks.{cell.layer}.mlp.hook_post", switch_off)
logits = model.run_with_hooks("Your prompt", fwd_hooks=[hook])
"""
