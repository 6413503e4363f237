"""The model that settings ask for, with random weights.

bands of a vocabulary:  b = 0, 1, …  up to each end given, the rest last;  width_b = max(8, d/4ᵇ)
"""

from itertools import pairwise

import torch
from torch import nn

from ffmem.errors import ModelError
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.model import AdaptiveLM
from ffmem.training.settings import Settings

NARROWEST = 8


def default_memories(settings: Settings) -> int:
    """Return how many memories a layer has if nothing is said of matching."""
    return settings.memories or 4 * settings.width


def config_of(
    settings: Settings, vocabulary: int, start: int, memory: str, memories: int
) -> AdaptiveConfig:
    """Return the sizes of a model; `memory` and `memories` may be another model's."""
    sizes = band_sizes(settings, vocabulary)
    return AdaptiveConfig(
        memory=memory,
        band_sizes=sizes,
        band_widths=[_band_width(settings.width, band) for band in range(len(sizes))],
        hidden_size=settings.width,
        intermediate_size=memories,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.n_heads,
        max_position_embeddings=settings.context,
        dropout=settings.dropout,
        key_width=settings.key_width,
        distances=min(settings.distances, settings.context),
        bos_token_id=start,
        eos_token_id=start,
        pad_token_id=1 if start == 2 else start,
    )


def band_sizes(settings: Settings, vocabulary: int) -> list[int]:
    """Return how many words each band has."""
    ends = settings.bands or []
    if ends and ends[-1] >= vocabulary:
        raise ModelError(
            f"--bands {','.join(map(str, ends))} leaves nothing for the last band: the vocabulary"
            f" has {vocabulary:,} tokens. Give lower ends, or none."
        )
    return [end - start for start, end in pairwise([0, *ends, vocabulary])]


def _band_width(width: int, band: int) -> int:
    return width if band == 0 else max(NARROWEST, width // 4**band)


def new_model(config: AdaptiveConfig, seed: int, device: torch.device) -> AdaptiveLM:
    """Return a model with weights drawn from a seed, the same on every device."""
    torch.manual_seed(seed)
    model = AdaptiveLM(config)
    nn.Module.to(model, device)  # transformers' own `to` has no types
    return model


def n_parameters(config: AdaptiveConfig) -> int:
    """Return how many parameters a model has, tied ones once, without making it."""
    with torch.device("meta"):
        model = AdaptiveLM(config)
    return sum(weight.numel() for weight in model.parameters())
