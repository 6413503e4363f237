"""More threads or processes than a machine can start are refused before anything is loaded."""

import pytest

import ffmem
from ffmem.errors import FfmemError
from ffmem.models.arguments import MAX_THREADS
from tests.test_cli import ffmem_process, run

TRAIN = ("train", "--corpus", "mini-wiki:valid", "--memory", "relu", "--layers", "1")


@pytest.mark.parametrize("option", ["threads", "workers"])
def test_an_index_with_too_many_is_refused(option, tmp_path):
    given = {option: MAX_THREADS + 1}
    with pytest.raises(FfmemError, match=rf"`{option}` {MAX_THREADS + 1}"):
        ffmem.index("mini-wiki", "mini-wiki:valid", tmp_path / "index", **given)


@pytest.mark.parametrize("command", [TRAIN, ("index", "mini-wiki", "mini-wiki:valid")])
def test_a_command_with_too_many_threads_is_refused_before_anything_is_loaded(command, tmp_path):
    code, _, error = run(*command, "--out", tmp_path / "out", "--threads", "100000")
    assert code == 2
    assert "Loading" not in error
    assert "100000" in error


def test_measuring_with_too_many_threads_is_refused(tiny_index, tmp_path):
    for n in (0, -1, MAX_THREADS + 1):
        with pytest.raises(FfmemError, match=f"`threads` {n}: use a whole number"):
            ffmem.experiment(
                "active-memories", tiny_index, tmp_path, corpus="mini-wiki:valid", threads=n
            )


def test_as_many_threads_as_are_allowed_do_compute():
    """In a process of its own, which takes the threads with it."""
    code = (
        "import torch; from ffmem.models.arguments import MAX_THREADS, use_threads\n"
        "before = torch.get_num_threads()\n"
        "with use_threads(MAX_THREADS):\n"
        "    assert torch.get_num_threads() == MAX_THREADS\n"
        "    assert torch.relu(torch.ones(2000, 2000)).sum() == 4e6\n"
        "assert torch.get_num_threads() == before\n"
    )
    assert ffmem_process(code=code).returncode == 0
