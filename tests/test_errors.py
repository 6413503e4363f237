import pickle
from pathlib import Path

import pytest

from ffmem.errors import FfmemError, NoStaticValues, UnknownFamily
from ffmem.indexing.partials import DamagedPartialError
from ffmem.storage import Storage
from ffmem.training.trainer import DivergenceError


@pytest.mark.parametrize(
    "error",
    [
        FfmemError("A message."),
        UnknownFamily("bert", "it has none"),
        NoStaticValues("Cannot do this."),
        DivergenceError(7, "the loss is nan", 5),
        DamagedPartialError(Storage(Path("run")), "a.arrow", "cut"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_out_of_a_worker_as_it_was_raised(error):
    same = pickle.loads(pickle.dumps(error))
    assert type(same) is type(error)
    assert str(same) == str(error)
