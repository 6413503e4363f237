"""One process, several, a Ray, through any fault: the same bytes, and nothing is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from transformers import AutoModelForCausalLM, set_seed

import ffmem
from ffmem.errors import FfmemError, ModelError
from tests.indexing.folders import content, write_corpus
from tests.ray_cluster import ENVIRONMENT
from tests.tiny import TINY, tiny_tokenizer
from tests.workers import gone

OPTIONS = {"t": 5, "chunk_tokens": 20, "batch_tokens": 40, "start": "bos", "threads": 1}
ODD = 37
"""Memories of a layer: vectorized SiLU treats the last ones of an odd number differently."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A gated SiLU model of odd width."""
    set_seed(0)
    settings = TINY["llama"].to_dict() | {"intermediate_size": ODD}
    model = AutoModelForCausalLM.from_config(TINY["llama"].__class__.from_dict(settings))
    folder = tmp_path_factory.mktemp("odd") / "model"
    model.save_pretrained(folder)
    tiny_tokenizer().tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt", n=120)
    return ffmem.Corpus(str(path), unit="line")


@pytest.fixture(scope="module")
def whole(model_folder, corpus, tmp_path_factory):
    """The bytes of a plain run, of at least 20 chunks."""
    folder = tmp_path_factory.mktemp("whole") / "index"
    index = ffmem.index(model_folder, corpus, folder, **OPTIONS)
    assert index.manifest.corpus.tokens > 20 * OPTIONS["chunk_tokens"]
    return content(folder)


@pytest.fixture
def slow(monkeypatch, tmp_path):
    """Let workers of other processes take their time over a chunk, and commit each."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys, time, threading\n"
        "def slow():\n"
        "    worker = None\n"
        "    while not hasattr(worker, 'make_worker'):  # its last definition\n"
        "        time.sleep(0.01)\n"
        "        worker = sys.modules.get('ffmem.indexing.worker')\n"
        "    read = worker.IndexWorker.read_chunk\n"
        "    def read_chunk(self, number):\n"
        "        time.sleep(0.1)\n"
        "        read(self, number)\n"
        "    worker.IndexWorker.read_chunk = read_chunk\n"
        "    worker.COMMIT_SECONDS = 0.3\n"
        "    sys.modules['ffmem.parallel'].LOST_SECONDS = 2\n"
        "threading.Thread(target=slow, daemon=True).start()\n"
    )
    path = os.pathsep.join([str(site), ENVIRONMENT["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    return path


def workers_of(pid=None, ray="ray::_Actor"):
    """The worker processes of a process: spawned ones, or Ray's actors."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "spawn_main" in line or ray in line:
            found.append(child.pid)
    return found


def wait_for(folder, seconds=60, n=1):
    """Wait until there are n partials."""
    end = time.monotonic() + seconds
    while len(list(folder.glob("partial-*.arrow"))) < n:
        assert time.monotonic() < end
        time.sleep(0.05)


class Killer(threading.Thread):
    """Kills all workers once they have committed something, and later one of the next."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder / "partials"
        self.killed = []
        self.start()

    def run(self):
        wait_for(self.folder)
        self.kill(workers_of())
        n = len(list(self.folder.glob("partial-*.arrow")))
        wait_for(self.folder, n=n + 1)
        self.kill(workers_of()[:1])

    def kill(self, pids):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.killed += pids


def test_killed_processes_give_the_same_bytes(model_folder, corpus, whole, tmp_path, slow):
    killer = Killer(tmp_path / "index")
    ffmem.index(model_folder, corpus, tmp_path / "index", workers=2, **OPTIONS)
    killer.join()
    assert len(killer.killed) == 3
    assert content(tmp_path / "index") == whole
    assert gone(killer.killed)


COMMAND = ["index", "--unit", "line", "-t", "5", "--chunk-tokens", "20", "--batch-tokens", "40"]
COMMAND += ["--start", "bos", "--threads", "1"]


@pytest.mark.parametrize("how", [["--workers", "2"], ["--workers", "2", "--ray", "local"]], ids=str)
def test_a_killed_command_leaves_no_process_and_resumes(
    model_folder, corpus, whole, tmp_path, slow, how, gone_in_the_end
):
    folder = tmp_path / "index"
    command = [sys.executable, "-m", "ffmem", *COMMAND, *how, "--out", folder]
    command += [model_folder, corpus.source]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": slow}
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        wait_for(folder / "partials", 120)
        gone_in_the_end += psutil.Process(process.pid).children(recursive=True)
        workers = workers_of(process.pid)
        process.kill()
    assert len(workers) >= 2
    assert gone(workers, 60)
    covered = ffmem.open(folder).live
    assert 0 < covered.n_prefixes < covered.manifest.corpus.tokens
    ffmem.index(model_folder, corpus, folder, **OPTIONS)
    assert content(folder) == whole


def test_a_shared_folder_gives_the_same_bytes_and_is_empty_again(
    model_folder, corpus, whole, tmp_path
):
    shared = tmp_path / "shared"
    ffmem.index(model_folder, corpus, tmp_path / "a", workers=2, shared=str(shared), **OPTIONS)
    ffmem.index(model_folder, corpus, tmp_path / "b", shared=shared.as_uri(), **OPTIONS)
    assert content(tmp_path / "a") == content(tmp_path / "b") == whole
    assert list(shared.iterdir()) == []


def test_workers_that_cannot_load_the_model_stop_the_run_which_resumes(
    model_folder, corpus, whole, tmp_path, monkeypatch
):
    import ffmem.indexing.build as build

    moved, prepare = tmp_path / "moved", build.prepare

    def move_after(*arguments):
        plan = prepare(*arguments)
        shutil.move(model_folder, moved)
        return plan

    monkeypatch.setattr(build, "prepare", move_after)
    try:
        with pytest.raises(ModelError, match="No model"):
            ffmem.index(model_folder, corpus, tmp_path / "index", workers=2, **OPTIONS)
    finally:
        shutil.move(moved, model_folder)
        monkeypatch.undo()
    ffmem.index(model_folder, corpus, tmp_path / "index", **OPTIONS)
    assert content(tmp_path / "index") == whole


def test_a_model_in_memory_is_not_sent_to_workers(corpus, tmp_path):
    from tests.indexing.folders import memories

    with pytest.raises(FfmemError, match=r"cannot be sent to other processes.* save_pretrained"):
        ffmem.index(memories(), corpus, tmp_path / "index", workers=2, **OPTIONS)


def test_a_ray_whose_nodes_and_workers_die_gives_the_same_bytes(
    model_folder, corpus, whole, tmp_path, ray_cluster, slow
):
    folder, shared = tmp_path / "index", tmp_path / "shared"
    command = [sys.executable, "-m", "ffmem", *COMMAND, "--out", folder, "--shared", shared]
    command += ["--workers", "3", "--ray", ray_cluster.address, model_folder, corpus.source]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": slow}
    process = subprocess.Popen(command, env=environment)
    try:
        while not list(shared.glob("*/partials/partial-*.arrow")):
            assert process.poll() is None
            time.sleep(0.1)
        os.kill(workers_of(ray="ray::")[0], signal.SIGKILL)
        time.sleep(1)
        ray_cluster.kill_node()  # for good: two nodes do the work of three
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()
        ray_cluster.mend()
    assert content(folder) == whole
