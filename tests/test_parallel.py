"""The loop over workers, for local processes and Ray actors: whatever dies, every task is done."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import psutil
import pytest

from ffmem import parallel, ray_workers
from ffmem.errors import FfmemError, ModelError, WorkerError
from ffmem.parallel import ExecutionConfig, PoolExecutor, ProcessSlot, Task, executor
from ffmem.progress import Progress
from tests import workers as made
from tests.ray_cluster import ENVIRONMENT
from tests.workers import gone, is_alive


class Lines(Progress):
    """Keeps what would be shown."""

    def __init__(self):
        super().__init__(quiet=True)
        self.lines = []

    def say(self, line):
        self.lines.append(line)


@pytest.fixture(scope="module")
def ray_here():
    """A Ray of this machine with two CPUs, which the user has started, so to speak."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'ffmem[ray]')")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        store = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
        ray.init(address="local", num_cpus=2, log_to_driver=False, **store)
        try:
            yield "local"
        finally:
            ray.shutdown()


@pytest.fixture(params=["processes", "ray"])
def config(request):
    if request.param == "processes":
        return ExecutionConfig(workers=2)
    return ExecutionConfig(workers=2, ray=request.getfixturevalue("ray_here"))


def make(folder, factory=made.Worker):
    return partial(factory, folder=str(folder))


def work(n, method="work"):
    return [Task(f"task {i}", method, (i,)) for i in range(n)]


def run_all(workers, *rounds):
    for tasks in rounds:
        workers.run(tasks, lambda n: None)


def done(folder):
    """How often each task was done."""
    return {path.name: len(path.read_text()) for path in folder.glob("task-*")}


def pids(folder):
    return [int(path.name.partition("-")[2]) for path in folder.glob("made-*")]


def test_every_task_is_done_once_and_workers_are_made_once(config, tmp_path):
    sizes = []
    with executor(config, make(tmp_path), Lines()) as workers:
        workers.run(work(24), sizes.append)
        workers.run(work(0), sizes.append)
        workers.flush()
    assert done(tmp_path) == {f"task-{i}": 1 for i in range(24)}
    assert sizes == [1] * 24
    flushed = " ".join(path.read_text() for path in tmp_path.glob("flushed-*")).split()
    assert sorted(map(int, flushed)) == list(range(24))
    # One that starts late may find nothing left to do.
    assert [path.read_text() for path in tmp_path.glob("made-*")] in (["x"], ["x", "x"])
    assert gone(pids(tmp_path))


def test_the_tasks_of_workers_that_die_are_done_by_others(config, tmp_path):
    tasks = work(20)
    tasks[3:6] = [Task(f"task {i}", "die_once", (i,)) for i in range(3, 6)]
    with executor(config, make(tmp_path), Lines()) as workers:
        workers.run(tasks, lambda n: None)
    assert done(tmp_path) == {f"task-{i}": 1 for i in range(20)}
    assert gone(pids(tmp_path))


def test_workers_that_are_killed_at_random_do_not_stop_the_run(config, tmp_path):
    stop = threading.Event()

    def kill():
        for turn in range(2):  # a task in flight at three deaths would stop the run
            if stop.wait(0.7):
                return
            for pid in pids(tmp_path):
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)  # all of them at once, then one
                    if turn:
                        break

    killer = threading.Thread(target=kill)
    with executor(config, make(tmp_path), Lines()) as workers:
        workers.run(work(2), lambda n: None)  # all are there
        killer.start()
        workers.run([Task(f"nap {i}", "sleep", (0.15,)) for i in range(24)], lambda n: None)
        workers.run(work(20), lambda n: None)
        stop.set()
        killer.join()
        workers.flush()
    assert set(done(tmp_path)) == {f"task-{i}" for i in range(20)}
    assert gone(pids(tmp_path))


def test_a_task_that_kills_every_worker_stops_the_run_and_is_named(config, tmp_path):
    tasks = [*work(4), Task("chunk 17", "die", (17,)), *work(20)[4:]]
    with (
        pytest.raises(WorkerError, match=r"3 workers died while working on chunk 17"),
        executor(config, make(tmp_path), Lines()) as workers,
    ):
        workers.run(tasks, lambda n: None)
    assert gone(pids(tmp_path))


def test_a_worker_that_survives_such_a_task_commits_its_work(config, tmp_path):
    if config.ray is None:
        config = ExecutionConfig(workers=4)  # three die, one each; an actor of Ray dies three times
    lines = Lines()
    n = config.n_workers
    meeting = [Task(f"meeting {i}", "meet", (n,)) for i in range(n)]
    with (
        pytest.raises(WorkerError, match=r"3 workers died"),
        executor(config, make(tmp_path), lines) as workers,
    ):
        run_all(workers, meeting, work(24), [Task("chunk 17", "die", (17,))])
    assert len(list(tmp_path.glob("flushed-*"))) == 1
    assert lines.lines[-1] == "Stopping: committing finished work (up to 60 s)."
    assert gone(pids(tmp_path))


def test_a_worker_that_cannot_be_made_stops_the_run_at_once(config, tmp_path):
    with (
        pytest.raises(ModelError, match=r"^There is no model here\.$"),
        executor(config, make(tmp_path, made.make_failing), Lines()) as workers,
    ):
        workers.run(work(3), lambda n: None)
    assert len((tmp_path / "failures").read_text()) <= config.n_workers


def test_workers_that_die_at_their_start_stop_the_run(config, tmp_path):
    with (
        pytest.raises(WorkerError, match=r"crashed during start-up"),
        executor(config, make(tmp_path, made.make_dying), Lines()) as workers,
    ):
        workers.run(work(3), lambda n: None)


def test_a_few_failed_starts_do_no_harm(tmp_path):
    said = Lines()
    config = ExecutionConfig(workers=2)
    with executor(config, make(tmp_path, made.make_after_two_failures), said) as workers:
        workers.run(work(5), lambda n: None)
    assert set(done(tmp_path)) == {f"task-{i}" for i in range(5)}
    assert any("could not start (Not yet)" in line for line in said.lines)


def test_an_error_of_a_task_keeps_its_kind_and_others_commit_first(config, tmp_path):
    tasks = [*work(6), Task("task 6", "fail", (6,)), *work(20)[7:]]
    with (
        pytest.raises(FfmemError, match=r"Task 6 cannot be done: ✗\.") as raised,
        executor(config, make(tmp_path), Lines()) as workers,
    ):
        workers.run(tasks, lambda n: None)
    assert not isinstance(raised.value, WorkerError)
    flushed = " ".join(path.read_text() for path in tmp_path.glob("flushed-*")).split()
    assert {f"task-{n}" for n in flushed} == set(done(tmp_path))
    assert gone(pids(tmp_path))


def test_a_worker_that_dies_idle_is_replaced(tmp_path):
    with executor(ExecutionConfig(workers=2), make(tmp_path), Lines()) as workers:
        workers.run(work(4), lambda n: None)
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        time.sleep(0.3)
        workers.flush()
        workers.run(work(8), lambda n: None)
    assert done(tmp_path)["task-7"] == 1
    assert gone(pids(tmp_path))


class ThreadSlot:
    """A worker in a thread, whose calls never come back once its node is lost."""

    n_deaths = 3

    def __init__(self, done):
        self.names, self.done = set(), done
        self.is_lost = self.is_stopped = False
        self.pool = ThreadPoolExecutor(1)

    def start(self):
        return self.submit("start", ())

    def submit(self, method, arguments):
        return Future() if self.is_lost else self.pool.submit(self._call, method, arguments)

    def _call(self, method, arguments):
        assert not self.is_stopped
        if method == "work":
            self.done.append(*arguments)
        return "a worker"

    def stop(self):
        self.is_stopped = True

    def cause_of_death(self, error):
        return None


@pytest.mark.parametrize("n_lost", [1, 2])
def test_tasks_and_flushes_do_not_wait_for_workers_whose_node_is_gone(n_lost, monkeypatch):
    monkeypatch.setattr(parallel, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(parallel, "LOST_SECONDS", 0.1)
    done, lines = [], Lines()
    slots = [ThreadSlot(done) for _ in range(4)]
    waiting = ThreadSlot(done)  # Ray never had room for this one
    waiting.is_lost = True
    room = [4]
    workers = PoolExecutor([*slots, waiting], lambda block: room[0], lines)
    workers.run(work(8), lambda n: None)
    for slot in slots[:n_lost]:
        slot.is_lost = True
    room[0] -= n_lost
    workers.run(work(8), lambda n: None)
    assert sorted(done) == sorted([*range(8)] * 2)
    workers.flush()
    assert sum(slot.is_stopped for slot in slots) == n_lost
    assert lines.lines == [
        f"A Ray node was lost; continuing with {n} workers." for n in (4, 3)[:n_lost]
    ]
    assert not any(slot.is_stopped for slot in slots[n_lost:])
    workers.close(flush=False)
    for slot in slots:
        slot.pool.shutdown()


def test_a_slow_task_is_left_alone_while_there_is_room(monkeypatch):
    monkeypatch.setattr(parallel, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(parallel, "LOST_SECONDS", 0.05)
    done = []
    slots = [ThreadSlot(done) for _ in range(2)]
    began, fast = threading.Event(), slots[1]._call

    def slow_call(method, arguments):
        if method == "work":
            began.set()
            time.sleep(0.4)
        return "a worker"

    def fast_call(method, arguments):
        if method == "work":
            assert began.wait(60)  # however busy the machine is
        return fast(method, arguments)

    slots[0]._call, slots[1]._call = slow_call, fast_call
    workers = PoolExecutor(slots, lambda block: 2, Lines())
    workers.run(work(4), lambda n: None)
    assert len(done) < 4  # the slow one has done the others
    assert not any(slot.is_stopped for slot in slots)
    workers.close(flush=False)
    for slot in slots:
        slot.pool.shutdown()


def test_in_one_process_the_functions_are_called(tmp_path):
    worker = made.Worker(tmp_path)
    with executor(ExecutionConfig(), lambda: worker, Lines()) as workers:
        workers.run(work(3), lambda n: None)
        workers.flush()
    assert worker.done == [0, 1, 2]
    assert (tmp_path / f"flushed-{os.getpid()}").read_text() == "0 1 2"


PARENT = """
    from functools import partial
    from ffmem.parallel import ExecutionConfig, Task, executor
    from ffmem.progress import Progress
    from tests.workers import Worker
    make = partial(Worker, "FOLDER")
    with executor(ExecutionConfig(workers=2), make, Progress(quiet=True)) as workers:
        workers.run([Task(f"nap {i}", "sleep", (60,)) for i in range(2)], lambda n: None)
"""


@pytest.fixture
def parent(tmp_path):
    """A script without `if __name__ == "__main__"` whose two workers sleep."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PARENT).replace("FOLDER", str(tmp_path)))
    process = subprocess.Popen(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"]},
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("asleep-*"))) < 2:
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < end
        time.sleep(0.05)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_parent(parent, tmp_path, sent):
    children = {child.pid for child in psutil.Process(parent.pid).children(recursive=True)}
    assert set(pids(tmp_path)) <= children
    parent.send_signal(sent)
    assert gone(children)


def test_ctrl_c_ends_parent_and_workers(parent):
    children = {child.pid for child in psutil.Process(parent.pid).children(recursive=True)}
    for _ in range(30):  # the first one waits for tasks that can be finished
        os.killpg(parent.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            parent.wait(1)
            break
    assert parent.returncode
    assert gone(children)


@pytest.mark.parametrize(
    "wrong",
    [{"workers": 0}, {"gpus_per_worker": -1.0, "ray": "local"}, {"gpus_per_worker": 1.0}],
)
def test_an_execution_that_cannot_be_is_refused(wrong):
    with pytest.raises(FfmemError):
        ExecutionConfig(**wrong)


def test_a_private_ray_that_dies_ends_the_run(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'ffmem[ray]')")
    if ray.is_initialized():
        ray.shutdown()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_workers, "NODES_TIMEOUT", 10.0)
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def kill():
        while not list(tmp_path.glob("asleep-*")):
            time.sleep(0.1)
        for child in psutil.Process().children(recursive=True):
            if "raylet" in child.name():
                child.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    config = ExecutionConfig(workers=1, ray="local")
    begin = time.monotonic()
    with (
        pytest.raises(WorkerError, match=r"The Ray .* is gone.* rerun the command to resume"),
        executor(config, make(tmp_path), Lines()) as workers,
    ):
        workers.run([Task("nap", "sleep", (600,))], lambda n: None)
    killer.join()
    assert time.monotonic() - begin < 120
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert gone(left)


def test_other_children_that_start_meanwhile_are_left_alone(tmp_path):
    """A thread of the caller may start processes of its own at any time."""
    slots = [ProcessSlot(make(tmp_path)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        starting = list(pool.map(lambda slot: slot.start(), slots))
    started = {int(future.result(60)) for future in starting}
    assert started == {slot._process.pid for slot in slots} == set(pids(tmp_path))
    for slot in slots:
        slot.stop()
    assert gone(started)


def test_workers_share_the_cpus_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert ExecutionConfig(workers=2).threads == 3
    assert ExecutionConfig(workers=2, ray="local").threads == 3
    assert ExecutionConfig(workers=2, ray="auto").threads == 1
    assert ExecutionConfig(workers=7).threads == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    assert ExecutionConfig(workers=2).threads == 32
