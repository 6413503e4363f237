import inspect
import json
from dataclasses import fields

import pytest

import ffmem
from ffmem.errors import FfmemError, ModelError
from ffmem.networks import config as networks_config
from ffmem.training.config import KINDS, TrainConfig
from tests.training.small import tiny_config


def test_the_kinds_are_those_of_the_networks():
    assert KINDS == networks_config.KINDS


def test_python_takes_the_same_options_with_the_same_defaults():
    parameters = inspect.signature(ffmem.train).parameters
    for field in fields(TrainConfig):
        assert parameters[field.name].annotation == field.type
        if field.name in ("memory", "layers"):
            assert parameters[field.name].default is inspect.Parameter.empty
        else:
            assert parameters[field.name].default == field.default
    assert set(parameters) - {field.name for field in fields(TrainConfig)} == {
        *("corpus", "out", "valid", "progress")
    }


@pytest.mark.parametrize("name", ["memory", "match"])
def test_an_unknown_kind_is_refused_with_the_known_ones(name):
    with pytest.raises(ModelError, match=rf"`{name}` hopfield.*Known kinds: relu, gelu, swiglu"):
        tiny_config(**{name: "hopfield"})


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(FfmemError, match=r"`steps` 5 and `epochs` 2 .* Use one"):
        tiny_config(steps=5, epochs=2)


def test_heads_divide_the_width():
    with pytest.raises(ModelError, match="`width` 16 is not divisible by 3 heads"):
        tiny_config(heads=3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "`layers` 0: use a whole number at least 1"),
        ({"batch_tokens": -4}, "`batch_tokens` -4"),
        ({"evaluate_every": 0}, "`evaluate_every` 0"),
        ({"context": 65}, "less than one block of `context` 65"),
        ({"context": 1}, "`context` 1: use a whole number at least 2"),
        ({"experts": 4, "top_experts": 5}, "`top_experts` 5 is more than the 4 experts"),
        ({"balance": -0.1}, "`balance` -0.1"),
        ({"cutoffs": [20, 10]}, "`cutoffs` 20,10"),
        ({"cutoffs": [0, 10]}, "`cutoffs` 0,10"),
        ({"learning_rate": 0.0}, "`learning_rate` 0.0: use a number above 0"),
        ({"learning_rate": float("nan")}, "`learning_rate` nan"),
        ({"weight_decay": float("inf")}, "`weight_decay` inf"),
        ({"dropout": 1.0}, "`dropout` 1.0: use a number at least 0 and below 1"),
        ({"weight_decay": -0.1}, "`weight_decay` -0.1"),
        ({"warmup": -1}, "`warmup` -1"),
        ({"seed": -1}, "`seed` -1"),
        ({"seed": 2**63}, "`seed` 9223372036854775808"),
        ({"tokenizer": "letters"}, "`tokenizer` letters: unknown value. Use one of words, bpe"),
        ({"dtype": "float16"}, "`dtype` float16"),
    ],
)
def test_a_wrong_value_is_refused_by_its_option(wrong, message):
    with pytest.raises(FfmemError, match=message):
        tiny_config(**wrong)


def test_a_config_is_read_back_as_it_was_written():
    written = tiny_config(match="gelu", warmup=0, threads=3, checkpoint_minutes=0.0)
    read = TrainConfig.of(json.loads(written.to_json()))
    assert read == written
    assert (read.threads, read.checkpoint_minutes) == (3, 0.0)


def test_a_run_without_steps_and_epochs_stops_early():
    assert tiny_config(steps=None).stops_early
    assert not tiny_config().stops_early
    assert not tiny_config(steps=None, epochs=3).stops_early
