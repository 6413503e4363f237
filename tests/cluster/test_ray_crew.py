import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from threading import Thread

import pytest

from ffmem.cluster import ray_crew, schedule
from ffmem.cluster.crew import Crew, Failed, Finished, Joined, Lost, Recruit, Refused
from ffmem.cluster.leader import Leader
from ffmem.cluster.ray_connection import RayConnection
from ffmem.cluster.ray_crew import RayCrew
from ffmem.cluster.ray_worker import RayWorker, versions
from ffmem.errors import FfmemError
from ffmem.progress import Progress
from tests.cluster.ray_cluster import PYTHONPATH
from tests.cluster.workers import Gathering, gone, is_alive, tasks

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ffmem[ray]')")

HIRED = Recruit("tests.cluster.workers:hired")
QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def address(ray_cluster):
    """This process is connected to the cluster, as a notebook is: crews use that."""
    connection = RayConnection(ray_cluster.address, 1)
    yield ray_cluster.address
    connection.close()


@pytest.fixture(scope="class")
def shared_crew(address):
    """Three workers, which fill the cluster, for tests that leave them as they are."""
    with RayCrew(HIRED, 3, address) as crew:
        crew.joined = events_of(crew, 3, Joined)
        yield crew


def events_of(crew, n, kind=object):
    """Return the next n events of a kind, and drop others."""
    found, end = [], time.monotonic() + 60
    while len(found) < n:
        assert time.monotonic() < end, found
        found += [event for event in crew.wait(1.0) if isinstance(event, kind)]
    return found


def pid_of(joined):
    return int(joined.where.rpartition(":")[2])


def done(crew, given):
    """Return what became of tasks, and who led them."""
    work, leader = Gathering(given), Leader(crew, QUIET)
    for joined in getattr(crew, "joined", ()):
        leader._take([joined])
    leader.lead(work)
    return work, leader


class TestWorkersThatStay:
    def test_it_is_a_crew(self, shared_crew):
        assert isinstance(shared_crew, Crew)
        assert sorted(joined.worker for joined in shared_crew.joined) == ["w1", "w2", "w3"]

    def test_every_task_is_done_once_and_workers_are_made_once(self, shared_crew, tmp_path):
        work, leader = done(shared_crew, tasks(150, marks=str(tmp_path)))
        assert len(work.results) == len(list(tmp_path.iterdir())) == 150
        pids = {result["pid"] for result in work.results.values()}
        assert pids == {pid_of(joined) for joined in shared_crew.joined}
        assert leader.losses == leader.failures == 0

    def test_a_task_that_fails_leaves_its_worker_as_it_was(self, shared_crew):
        name = shared_crew.joined[0].worker
        seen = []
        for act in ("fail", "refuse", "full", "unspeakable", "big", "count"):
            (task,) = tasks(1, act, error="schlecht: 語", length=200_000)
            shared_crew.give(name, task)
            seen += events_of(shared_crew, 1)
        fail, refuse, full, unspeakable, big, count = seen
        assert all(event.worker == name for event in seen)
        assert fail == Failed(name, fail.task, "RuntimeError: schlecht: 語")
        assert refuse == Failed(name, refuse.task, "schlecht: 語", certain=True)
        assert (full.of_place, full.certain) == (True, True)
        assert unspeakable.error.startswith("TypeError: Object of type set is not JSON")
        assert big.result["text"] == "å" * 200_000  # does not fit into a message of Ray's
        assert isinstance(count, Finished)
        assert big.result["pid"] == count.result["pid"] == pid_of(shared_crew.joined[0])

    def test_units_are_heard_while_the_task_runs_and_none_is_lost(self, shared_crew, monkeypatch):
        heard = []
        monkeypatch.setattr(shared_crew, "_listen", 0.2)
        monkeypatch.setattr(shared_crew, "heard", lambda *told: heard.append(told))
        name = shared_crew.joined[0].worker
        (task,) = tasks(1, "sleep", size=40, seconds=1.5)
        shared_crew.give(name, task)
        (event,) = events_of(shared_crew, 1)
        assert event.task == task
        assert {worker for worker, _ in heard} == {name}
        assert sum(units for _, units in heard) == 40
        assert 3 <= len(heard) <= 10

    def test_a_slow_worker_is_overtaken_and_the_first_result_counts(
        self, shared_crew, monkeypatch, tmp_path
    ):
        monkeypatch.setattr(schedule, "SHORTEST", 0.2)
        slow = tasks(1, "sleep", seconds=4, times=1, marks=str(tmp_path))
        started = time.monotonic()
        work, leader = done(shared_crew, [*slow, *tasks(10)])
        assert time.monotonic() - started < 3.5
        assert work.results["sleep-000"]["try"] == 2
        assert leader.losses == 0
        events_of(shared_crew, 1, Finished)  # the slow one, in vain


def test_a_killed_worker_s_task_is_done_by_another_and_nothing_is_printed(address, tmp_path, capfd):
    with RayCrew(HIRED, 1, address) as crew:
        (first,) = events_of(crew, 1)
        (task,) = tasks(1, "sleep", seconds=60, times=1, marks=str(tmp_path))
        crew.give(first.worker, task)
        while not list(tmp_path.iterdir()):
            assert not crew.wait(0.1)
        os.kill(pid_of(first), signal.SIGKILL)
        lost, second = events_of(crew, 2)
        assert isinstance(lost, Lost)
        assert lost.worker == first.worker == "w1"
        assert second.worker == "w2"
        assert lost.reason.startswith("The actor is dead because its worker process has died.")
        assert "\n" not in lost.reason
        crew.give("w2", task)
        (finished,) = events_of(crew, 1)
        assert finished.result["pid"] == pid_of(second)
        os.kill(pid_of(second), signal.SIGKILL)  # without a task it is missed as well
        assert events_of(crew, 1)[0].worker == "w2"
    assert capfd.readouterr() == ("", "")


def test_a_node_is_lost_and_another_takes_its_place(address, ray_cluster, monkeypatch, capsys):
    ray_cluster.mend()
    with RayCrew(HIRED, 3, address) as crew:
        pids = {joined.worker: pid_of(joined) for joined in events_of(crew, 3, Joined)}
        for name, (task,) in zip(pids, [tasks(1, "hang")] * 3, strict=True):
            crew.give(name, task)
        monkeypatch.setattr(ray_crew, "PLACELESS", 1.0)
        victim = ray_cluster.pids_beside_the_head(pids.values())[0]
        capsys.readouterr()  # on a busy machine they may have waited at first
        ray_cluster.kill_node(victim)
        (lost,) = events_of(crew, 1)
        assert pids[lost.worker] == victim
        assert not crew.wait(3.0)  # its successor waits for a node, and is not lost
        told = capsys.readouterr().err
        assert told.startswith(
            "Workers that wait for a node with 1 CPU and 0 GPUs to spare: 1 of 3."
        )
        ray_cluster.add_node()
        (joined,) = events_of(crew, 1)
        assert joined.worker == "w4"
        assert told.count("\n") == 1
    assert gone(pids.values())


def test_a_worker_that_cannot_begin_says_why_and_is_not_replaced(address):
    with RayCrew(Recruit("tests.cluster.workers:broken"), 2, address) as crew:
        refused = events_of(crew, 2)
        assert {event.worker for event in refused} == {"w1", "w2"}
        assert {event.error for event in refused} == {"ValueError: wörter sind zu viel: 語"}
        assert not crew.wait(0.5)
    with (
        RayCrew(Recruit("tests.cluster.workers:refusing"), 1, address) as crew,
        pytest.raises(FfmemError, match=r"No worker could begin.*there is no such model"),
    ):
        done(crew, tasks(1))


def test_workers_that_die_at_once_are_given_up(address):
    with (
        RayCrew(Recruit("tests.cluster.workers:dying"), 1, address) as crew,
        pytest.raises(FfmemError, match="No worker lives long enough"),
    ):
        done(crew, tasks(1))
    assert crew._n_hired == 3


def test_a_node_with_another_version_is_refused_before_it_loads_anything(address, monkeypatch):
    here = versions() | {"ffmem": "99.0"}
    monkeypatch.setattr(ray_crew, "versions", lambda: here)
    with RayCrew(Recruit("tests.cluster.workers:dying"), 1, address) as crew:
        (refused,) = events_of(crew, 1)
    assert isinstance(refused, Refused)
    assert f"ffmem {versions()['ffmem']} (here 99.0). Install the same" in refused.error


def test_a_node_that_cannot_import_our_code_is_refused(address, monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("class RayWorker:\n    def who(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    monkeypatch.setattr(ray_crew, "RayWorker", only_here.RayWorker)
    with RayCrew(HIRED, 1, address) as crew:
        (refused,) = events_of(crew, 1)
    assert isinstance(refused, Refused)
    assert "No module named 'only_here'" in refused.error


def test_a_ray_that_was_there_before_stays(address):
    import ray

    before = ray.get_runtime_context().get_job_id()
    for asked in ("local", "auto"):
        RayCrew(HIRED, 1, asked).close()
    assert ray.is_initialized()
    assert ray.get_runtime_context().get_job_id() == before


DRIVER = """
    import sys, time
    from ffmem.cluster.crew import Recruit
    from ffmem.cluster.leader import Leader
    from ffmem.cluster.ray_crew import RayCrew
    from ffmem.progress import Progress
    from tests.cluster.workers import Gathering, tasks

    address, marks = sys.argv[1:]
    with RayCrew(Recruit("tests.cluster.workers:hired"), 2, address) as crew:
        work = Gathering([*tasks(6, marks=marks), *tasks(2, "hang", times=1, marks=marks)])
        Leader(crew, Progress()).lead(work)
        from tests.cluster.ray_cluster import descendants
        print(len(work.results), *descendants(), flush=True)
    print("closed", flush=True)
"""


@pytest.fixture
def driver():
    """Start a driver of its own; whatever it says comes through a pipe."""
    started = []

    def start(address, marks, environment=None):
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(DRIVER), address, str(marks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=(os.environ if environment is None else environment) | {"PYTHONPATH": PYTHONPATH},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def tried(marks, key, seconds=60):
    """Return who tries a task, once somebody does."""
    end, path = time.monotonic() + seconds, Path(marks) / key
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return int(path.read_text())


def test_a_killed_driver_leaves_the_cluster_and_no_worker_and_another_goes_on(
    ray_cluster,
    driver,
    tmp_path,
):
    first = driver(ray_cluster.address, tmp_path)
    pids = [tried(tmp_path, "hang-000.1"), tried(tmp_path, "hang-001.1")]
    assert all(map(is_alive, pids))
    first.kill()
    assert gone(pids, 30)
    second = driver(ray_cluster.address, tmp_path)
    said, _ = second.communicate(timeout=90)
    assert said.split()[0] == "8"
    assert second.returncode == 0


def test_a_ray_of_our_own_ends_with_its_crew_or_its_driver(driver, tmp_path):
    # As on a user's machine: nothing about Ray is set, so it has a token, which is in no file.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    plain["HOME"] = str(tmp_path)
    first = driver("local", tmp_path, plain)
    hanging = tried(tmp_path, "hang-000.1")
    first.kill()
    assert gone([hanging], 30)
    second = driver("local", tmp_path, plain)
    said, _ = second.communicate(timeout=90)
    assert second.returncode == 0
    results, *pids = said.splitlines()[0].split()
    assert results == "8"
    assert len(pids) > 3
    assert said.splitlines()[1:] == ["closed"]  # and nothing else was printed
    assert gone([int(pid) for pid in pids], 20)
    assert not (tmp_path / ".ray").exists()


def order(worker, turn, *arguments):
    return json.loads(worker.hear(turn, *arguments))


def test_what_an_actor_has_to_say_goes_to_the_latest_question_alone():
    worker = RayWorker()
    recruit = json.dumps({"factory": HIRED.factory, "arguments": {}})
    assert order(worker, 1, recruit, 10.0) == {"units": 0, "event": "joined"}
    answers = {}
    early = Thread(target=lambda: answers.update(early=order(worker, 2, None, 60.0)))
    early.start()
    (task,) = tasks(1, "sleep", size=4, seconds=0.4)
    late = Thread(
        target=lambda: answers.update(late=order(worker, 4, json.dumps(task.to_dict()), 60.0))
    )
    late.start()
    early.join(10)
    assert answers == {"early": {}}
    assert order(worker, 3, None, 60.0) == {}  # came too late
    late.join(10)
    assert answers["late"]["event"] == "finished"
    assert answers["late"]["units"] == 4
    assert order(worker, 5, None, 0.0) == {"units": 0}


@pytest.mark.parametrize("asked", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_a_crew_of_nothing_is_refused(asked):
    n, gpus, threads = asked
    with pytest.raises(FfmemError, match="Ask for one worker"):
        RayCrew(HIRED, n, "auto", gpus, threads)
