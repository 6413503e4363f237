"""What tests of edited checkpoints share: models as folders, and as transformers reads them."""

import torch
from transformers import AutoModelForCausalLM

import ffmem
from ffmem.interventions.checkpoint import edit_checkpoint
from ffmem.interventions.edits import Edits, EditsFile
from ffmem.interventions.forward import LoadedModel
from ffmem.progress import Progress
from tests.tiny import TINY, tiny, tiny_tokenizer

TOKENS = torch.tensor([[5, 9, 2, 17, 30], [8, 8, 1, 40, 3]])
QUIET = Progress(quiet=True)


def without_bias(name):
    """Return a tiny model whose config switches the biases of its value maps off."""
    flag = ffmem.load(tiny(name), tiny_tokenizer()).row.bias_flag
    settings = TINY[name].to_dict() | {flag: False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TINY[name].__class__.from_dict(settings))
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
    return model.eval()


def saved(model, folder):
    """Save a model with its tokenizer, and return the folder."""
    model.save_pretrained(folder)
    tiny_tokenizer().tokenizer.save_pretrained(folder)
    return folder


def stored(folder):
    """Load a folder in the dtype that it is stored in."""
    from ffmem.models.load import load

    return load(folder, dtype="auto", device="cpu")


def write_edits(memories, folder, file=None, corpus=None, index=None, **edits):
    """Edit a model in a folder; nothing is measured without a corpus."""
    loaded = LoadedModel(memories, index, "id:0")
    wanted = Edits.of(**edits, index=index) if file is None else EditsFile.read(file)
    return edit_checkpoint(loaded, folder, wanted, corpus)


def plain_logits(folder):
    """Return the logits of a folder as transformers alone loads it."""
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder)
        return model.eval()(TOKENS, use_cache=False).logits
