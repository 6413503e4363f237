import pytest
import torch

from ffmem.errors import ModelError
from ffmem.training.matching import matched
from ffmem.training.network import config_of, n_parameters, new_model
from ffmem.training.settings import KINDS
from tests.training.small import settings


def count(given, memory, memories):
    return n_parameters(config_of(given, 40, 2, memory, memories))


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_number_of_memories_comes_nearer(kind):
    given = settings(memory=kind, match="relu", memories=40, layers=1)
    found = matched(given, 40, 2)
    assert found.aim == count(given, "relu", 40)
    assert found.parameters == count(given, kind, found.memories)
    distances = {n: abs(count(given, kind, n) - found.aim) for n in range(1, 60)}
    assert abs(found.parameters - found.aim) == min(distances.values())


def test_without_matching_there_are_as_many_memories_as_asked():
    assert matched(settings(), 40, 2)[::2] == (12, None)
    assert matched(settings(memories=None), 40, 2).memories == 64


def test_a_model_that_is_larger_with_a_single_memory_cannot_be_matched():
    given = settings(memory="lambda", match="persistent", memories=1, key_width=64, layers=1)
    with pytest.raises(ModelError, match=r"--match persistent: .* even with a single one"):
        matched(given, 40, 2)


def test_parameters_are_counted_as_the_model_has_them():
    config = config_of(settings(), 40, 2, "relu", 12)
    model = new_model(config, 0, torch.device("cpu"))
    assert n_parameters(config) == sum(weight.numel() for weight in model.parameters())


def test_bands_end_where_they_are_told_to():
    config = config_of(settings(width=64, heads=2, bands=[10, 25]), 40, 2, "relu", 12)
    assert (config.band_sizes, config.band_widths) == ([10, 15, 15], [64, 16, 8])
    config = config_of(settings(bands=None), 40, 2, "relu", 12)
    assert (config.band_sizes, config.band_widths) == ([40], [16])


def test_bands_that_leave_nothing_for_the_last_are_refused():
    with pytest.raises(ModelError, match=r"--bands 10,40 leaves nothing .* has 40 tokens"):
        config_of(settings(bands=[10, 40]), 40, 2, "relu", 12)
