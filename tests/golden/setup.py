"""The models and corpora of the golden records: the same numbers wherever they are made.

Every weight is drawn from the name of its parameter. So it depends neither on the order in which
a model creates its parameters nor on how transformers initializes them.
"""

import zlib
from functools import cache

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ffmem
from tests.texts import LINES
from tests.tiny import TINY

VOCABULARY = 320


@cache
def tokenizer():
    """Return a byte-level BPE tokenizer with fewer tokens than the models have rows."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 10,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([line for line in LINES if line.isascii()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def model(name):
    """Return a tiny model of TINY with a vocabulary for text."""
    sizes = TINY[name].to_dict()
    if "band_sizes" in sizes:
        sizes["band_sizes"] = [200, 60, VOCABULARY - 260]
    elif "text_config" in sizes:
        sizes["text_config"]["vocab_size"] = VOCABULARY
    else:
        sizes["vocab_size"] = VOCABULARY
    torch.manual_seed(0)  # Mamba draws its time steps
    made = AutoModelForCausalLM.from_config(TINY[name].__class__.from_dict(sizes))
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            drawn = np.random.default_rng(zlib.crc32(parameter_name.encode()))
            noise = 0.3 * torch.from_numpy(drawn.standard_normal(parameter.shape)).float()
            # Vectors are gains and biases: they keep their ones and zeros below the noise.
            parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
    return made.eval()


def load(name):
    """Return a tiny model as ffmem reads it."""
    return ffmem.load(model(name), tokenizer())


def corpus(folder, lines=LINES, unit="line"):
    """Return some lines as a corpus; they are written into a folder."""
    path = folder / f"{zlib.crc32(repr(lines).encode())}.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ffmem.Corpus(str(path), unit=unit)
