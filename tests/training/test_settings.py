import json

import pytest

from ffmem.errors import FfmemError, ModelError
from ffmem.networks import config
from ffmem.training.settings import KINDS, Settings
from tests.training.small import settings


def test_the_kinds_are_those_of_the_networks():
    assert KINDS == config.KINDS


@pytest.mark.parametrize("name", ["memory", "match"])
def test_an_unknown_kind_is_named_beside_the_known_ones(name):
    with pytest.raises(ModelError, match=rf"--{name} hopfield.*Known kinds: relu, gelu, swiglu"):
        settings(**{name: "hopfield"})


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(FfmemError, match=r"--steps 5 and --epochs 2 .* Give one of them"):
        settings(steps=5, epochs=2)


def test_heads_share_the_width_evenly():
    with pytest.raises(ModelError, match=r"width of 16 cannot be shared by 3 heads"):
        settings(heads=3)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"layers": 0}, "--layers 0"),
        ({"batch_tokens": -4}, "--batch-tokens -4"),
        ({"evaluate_every": 0}, "--evaluate-every 0"),
        ({"context": 65}, "less than one block of --context 65"),
        ({"bands": [20, 10]}, "--bands 20,10"),
        ({"bands": [0, 10]}, "--bands 0,10"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0"),
        ({"learning_rate": float("nan")}, "--learning-rate nan"),
        ({"dropout": 1.0}, "--dropout 1.0"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1"),
        ({"warmup": -1}, "--warmup -1"),
        ({"seed": -1}, "--seed -1"),
        ({"tokenizer": "letters"}, "'letters'"),
        ({"dtype": "float16"}, "'float16'"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused_by_its_name(wrong, told):
    with pytest.raises(FfmemError, match=told):
        settings(**wrong)


def test_settings_are_read_back_as_they_were_written():
    written = settings(match="gelu", warmup=0)
    assert Settings.of(json.loads(written.to_json())) == written


def test_a_run_without_steps_and_epochs_stops_early():
    assert settings(steps=None).stops_early
    assert not settings().stops_early
    assert not settings(steps=None, epochs=3).stops_early
