"""One process, several, a cluster, through any fault: the same bytes."""

import os
import signal

import pytest
from transformers import AutoModelForCausalLM, set_seed

import ffmem
from ffmem.cluster.processes import Processes
from ffmem.cluster.ray_crew import RayCrew
from ffmem.indexing.build import Build, Labour
from ffmem.indexing.options import Options
from ffmem.progress import Progress
from tests.cluster.faulty import LeaderKilled, faulty
from tests.cluster.workers import gone, is_alive
from tests.indexing.folders import content, write_corpus
from tests.tiny import TINY, tiny_tokenizer

OPTIONS = {"t": 5, "lease_tokens": 40, "batch_tokens": 40, "start": "bos", "threads": 1}
ODD = 37
"""Memories of a layer: vectorised SiLU treats the last ones of an odd number differently."""


def odd_silu():
    """A gated SiLU model of odd width."""
    set_seed(0)
    settings = TINY["llama"].to_dict() | {"intermediate_size": ODD}
    return AutoModelForCausalLM.from_config(TINY["llama"].__class__.from_dict(settings)).eval()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd") / "model"
    odd_silu().save_pretrained(folder)
    tiny_tokenizer().tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def memories(model_folder):
    return ffmem.load(model_folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt", n=90)
    return ffmem.Corpus(str(path), unit="line")


@pytest.fixture(scope="module")
def whole(model_folder, corpus, tmp_path_factory):
    """The bytes of a plain run."""
    folder = tmp_path_factory.mktemp("whole") / "index"
    ffmem.index(model_folder, corpus, folder, **OPTIONS)
    return content(folder)


@pytest.mark.parametrize("seed", range(10))
def test_ten_seeds_of_random_faults_end_in_the_same_bytes(memories, corpus, whole, tmp_path, seed):
    faults = []
    for attempt in range(100):
        hiring = faulty(memories, 1000 * seed + attempt, kills_leader=attempt < 5)
        labour = Labour(hiring)
        quiet = Progress(quiet=True)
        build = Build(memories, corpus, tmp_path / "index", Options(**OPTIONS), quiet, labour)
        try:
            build.run()
            break
        except LeaderKilled:
            faults.append("leader killed")
        finally:
            faults += hiring.faults
    assert len(set(faults)) >= 4, "the seed injects too little to show anything"
    assert content(tmp_path / "index") == whole


def sabotage(monkeypatch, kind, deeds):
    """Do something to the crew right after it has given its n-th task."""
    give, given = kind.give, []

    def giving(self, worker, task):
        give(self, worker, task)
        given.append(task.key)
        if (deed := deeds.pop(len(given), None)) is not None:
            deed(self, worker)

    monkeypatch.setattr(kind, "give", giving)
    return given


def test_two_processes_and_a_killed_worker_give_the_same_bytes(
    model_folder, corpus, whole, tmp_path, monkeypatch
):
    pids = []

    def kill(crew, worker):
        pids.extend(child.process.pid for child in crew._children.values())
        os.kill(crew._children[worker].process.pid, signal.SIGKILL)

    given = sabotage(monkeypatch, Processes, {4: kill})
    ffmem.index(model_folder, corpus, tmp_path / "index", workers=2, **OPTIONS)
    assert content(tmp_path / "index") == whole
    assert len(given) > len(set(given))  # what was lost was given again
    assert gone(pids)


def test_three_ray_nodes_losing_a_worker_and_a_node_give_the_same_bytes(
    model_folder, corpus, whole, tmp_path, monkeypatch, ray_cluster
):
    def pid_of(crew, worker):
        return int(crew._hired[worker].where.rpartition(":")[2])

    def kill_worker(crew, worker):
        os.kill(pid_of(crew, worker), signal.SIGKILL)

    def kill_node(crew, worker):
        pids = [pid_of(crew, name) for name, one in crew._hired.items() if one.where]
        beside = ray_cluster.pids_beside_the_head([pid for pid in pids if is_alive(pid)])
        ray_cluster.kill_node(beside[0])
        ray_cluster.add_node()

    given = sabotage(monkeypatch, RayCrew, {3: kill_worker, 8: kill_node})
    options = OPTIONS | {"workers": 3, "ray": ray_cluster.address}
    shared = str(tmp_path / "shared")  # not the folder of the index
    ffmem.index(model_folder, corpus, tmp_path / "index", shared=shared, **options)
    assert content(tmp_path / "index") == whole
    assert len(given) > len(set(given))
