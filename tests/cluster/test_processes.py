import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager

import pytest

from ffmem.cluster import process, processes, schedule
from ffmem.cluster.crew import Crew, Failed, Finished, Joined, Lost, Recruit, Refused
from ffmem.cluster.leader import Leader
from ffmem.cluster.processes import Processes
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.errors import FfmemError, StoreError
from ffmem.progress import Progress
from tests.cluster.workers import Gathering, gone, is_alive, tasks

HIRED = Recruit("tests.cluster.workers:hired")
QUIET = Progress(quiet=True)
SAME_MODULES = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def crew():
    with Processes(HIRED, 2) as crew:
        yield crew


def events_of(crew, n, kind=object):
    """Return the next n events of a kind, and drop others."""
    found, end = [], time.monotonic() + 20
    while len(found) < n:
        assert time.monotonic() < end, found
        found += [event for event in crew.wait(1.0) if isinstance(event, kind)]
    return found


def pid_of(joined):
    return int(joined.where.rpartition(":")[2])


def done(crew, given, **options):
    """Return what became of tasks, and who led them."""
    work, leader = Gathering(given, **options), Leader(crew, QUIET)
    leader.lead(work)
    return work, leader


def test_it_is_a_crew(crew):
    assert isinstance(crew, Crew)


def test_every_task_is_done_once_and_workers_are_made_once(crew, tmp_path):
    work, leader = done(crew, tasks(200, marks=str(tmp_path)))
    assert len(work.results) == 200
    assert not work.lost
    assert len(list(tmp_path.iterdir())) == 200
    by_pid = {}
    for result in work.results.values():
        by_pid.setdefault(result["pid"], []).append(result["n_done"])
    assert len(by_pid) <= 2
    assert all(sorted(counts) == list(range(1, len(counts) + 1)) for counts in by_pid.values())
    assert leader.losses == leader.failures == 0


def test_more_workers_than_tasks_and_more_tasks_than_workers_come_to_the_same_end(tmp_path):
    recruit = Recruit("tests.cluster.workers:hired", {"shared": str(tmp_path)})
    with Processes(recruit, 4) as crew:
        done(crew, tasks(2, "write"))
        done(crew, tasks(50 * 4, "write"))
    assert SharedFolder(tmp_path).names() == [f"write-{i:03d}.txt" for i in range(200)]


def test_units_are_summed_and_never_lost(crew, monkeypatch):
    units = {}

    def heard(worker, n):
        units.setdefault(worker, []).append(n)

    crew.heard = heard
    (joined, _) = events_of(crew, 2, Joined)
    crew.give(joined.worker, Task("many", "read", 5000))
    events_of(crew, 1, Finished)
    assert sum(units[joined.worker]) == 5000
    assert len(units[joined.worker]) < 20
    crew.give(joined.worker, Task("slow", "read", 10, {"act": "sleep", "seconds": 0.9}))
    events_of(crew, 1, Finished)
    assert sum(units[joined.worker]) == 5010


@pytest.mark.parametrize("act", ["kill", "exit", "leave"])
def test_the_task_of_a_worker_that_dies_is_done_by_another(crew, act, tmp_path):
    given = [*tasks(1, act, times=1, marks=str(tmp_path)), *tasks(20)]
    work, leader = done(crew, given)
    assert len(work.results) == 21
    assert work.results[f"{act}-000"]["try"] == 2
    assert leader.losses == 1
    first, second = ((tmp_path / f"{act}-000.{i}").read_text() for i in (1, 2))
    assert first != second


def test_a_task_that_always_kills_its_worker_is_given_up_and_the_rest_is_done(crew, tmp_path):
    given = [*tasks(1, "kill", marks=str(tmp_path)), *tasks(20)]
    work, leader = done(crew, given)
    assert len(work.results) == 20
    assert "killed by SIGKILL" in work.lost["kill-000"]
    assert "these are my last words" in work.lost["kill-000"]
    assert leader.losses == given[0].losses == len(list(tmp_path.iterdir()))


def test_the_lost_are_replaced_under_new_names(crew):
    first = {joined.worker for joined in events_of(crew, 2, Joined)}
    assert first == {"w1", "w2"}
    crew.give("w1", Task("exit", "read", 1, {"act": "exit"}))
    (lost,) = events_of(crew, 1, Lost)
    assert lost == Lost("w1", "ended with exit code 7")
    (joined,) = events_of(crew, 1, Joined)
    assert joined.worker == "w3"


@pytest.mark.parametrize("act", ["hang", "freeze"])
def test_the_task_of_a_hanging_worker_is_done_by_another(crew, act, tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "SHORTEST", 0.3)
    monkeypatch.setattr(processes, "GRACE", 0.3)
    given = [*tasks(10), *tasks(1, act, times=1, marks=str(tmp_path))]
    work, leader = done(crew, given)
    assert work.results[f"{act}-000"]["try"] == 2
    assert len(work.results) == 11
    assert leader.losses == leader.failures == 0
    crew.close()
    assert gone([int((tmp_path / f"{act}-000.1").read_text())], 0)


def test_a_worker_that_refuses_says_why_and_is_not_replaced():
    with Processes(
        Recruit("tests.cluster.workers:refusing", {"error": "no “model” там"}), 2
    ) as crew:
        refused = events_of(crew, 2, Refused)
        assert {event.error for event in refused} == {"no “model” там"}
        assert crew.wait(0.5) == []
        assert not any(is_alive(pid_of(event)) for event in refused)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tests.cluster.workers:refusing", "there is no such model"),
        ("tests.cluster.workers:broken", "ValueError: wörter sind zu viel: 語"),
        ("tests.cluster.workers:nobody", "AttributeError: .*nobody"),
        ("tests.cluster.nowhere:hired", "ModuleNotFoundError: .*nowhere"),
    ],
)
def test_a_crew_of_which_none_can_begin_is_an_error_that_says_why(name, text):
    with (
        Processes(Recruit(name), 2) as crew,
        pytest.raises(FfmemError, match=f"No worker could begin.*{text}"),
    ):
        done(crew, tasks(3))


def test_a_worker_that_dies_at_its_start_is_an_error_and_no_endless_loop(monkeypatch):
    monkeypatch.setattr(processes, "DELAY", 0.05)
    with (
        Processes(Recruit("tests.cluster.workers:dying"), 2) as crew,
        pytest.raises(FfmemError, match=r"long enough.*exit code 3; its last words: no place"),
    ):
        done(crew, tasks(3))


def test_replacements_come_later_and_later(tmp_path):
    with Processes(Recruit("tests.cluster.workers:dying"), 1, logs=tmp_path) as crew:
        delays = []
        for number in (2, 3, 4):
            events_of(crew, 1, Lost)
            lost = time.monotonic()
            while not (tmp_path / f"worker-{number}.log").exists():
                assert crew.wait(0.0) == []
                time.sleep(0.01)
            delays.append(time.monotonic() - lost)
    for delay, least in zip(delays, (0.1, 0.2, 0.4), strict=True):
        assert delay > 0.9 * least  # a little passes before the loss is told


def test_some_bad_starts_do_no_harm(tmp_path):
    arguments = {"marks": str(tmp_path), "times": 2}
    with Processes(Recruit("tests.cluster.workers:dying_at_times", arguments), 2) as crew:
        work, leader = done(crew, tasks(5))
    assert len(work.results) == 5
    assert leader.losses <= 2


def test_a_process_that_cannot_be_started_is_a_loss(monkeypatch):
    monkeypatch.setattr(processes, "DELAY", 0.01)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with (
        Processes(HIRED, 1) as crew,
        pytest.raises(FfmemError, match=r"no process could be started.*/nowhere/python"),
    ):
        done(crew, tasks(1))


def test_no_workers_are_refused():
    with pytest.raises(FfmemError, match=r"0 workers were asked for\. Ask"):
        Processes(HIRED, 0)


def test_errors_keep_their_kind_and_their_letters_on_the_way(crew):
    (joined, _) = events_of(crew, 2, Joined)
    for act, error, expected in [
        ("fail", "naïve 語 \n\udcff", ("RuntimeError: naïve 語 \n\\udcff", False, False)),
        ("refuse", "“this” 🙂", ("“this” 🙂", False, True)),
        ("full", "", ("No room left on the disk.", True, True)),
        (
            "unspeakable",
            "",
            ("TypeError: Object of type set is not JSON serializable", False, False),
        ),
    ]:
        task = Task(act, "read", 1, {"act": act, "error": error})
        crew.give(joined.worker, task)
        assert events_of(crew, 1) == [Failed(joined.worker, task, *expected)]


def test_a_full_disk_ends_the_run_at_once(crew):
    with pytest.raises(StoreError, match="No room left"):
        done(crew, [*tasks(1, "full"), *tasks(100)])


def test_what_workers_print_disturbs_nobody_and_is_kept(tmp_path):
    with Processes(HIRED, 1, logs=tmp_path / "logs") as crew:
        work, _ = done(crew, [*tasks(3, "chatter"), *tasks(1, "kill"), *tasks(1)])
    assert sorted(work.results) == ["chatter-000", "chatter-001", "chatter-002", "count-000"]
    assert [path.name for path in sorted((tmp_path / "logs").iterdir())] == [
        f"worker-{i}.log" for i in range(1, 5)
    ]
    log = (tmp_path / "logs" / "worker-1.log").read_bytes()
    assert log.count(b"garbage") == 3 * 2 * 2000
    assert log.count(b"straight to the descriptor") == 3
    assert log.endswith(b"these are my last words\n")


def test_an_older_log_is_kept_and_not_taken_for_the_last_words(tmp_path):
    (tmp_path / "worker-1.log").write_text("of another day\n")
    with Processes(HIRED, 1, logs=tmp_path) as crew:
        events_of(crew, 1, Joined)
        crew.give("w1", Task("exit", "read", 1, {"act": "exit"}))
        assert events_of(crew, 1, Lost) == [Lost("w1", "ended with exit code 7")]
    assert (tmp_path / "worker-1.log").read_text() == "of another day\n"


def test_a_result_may_be_larger_than_a_pipe_and_so_may_a_task(crew):
    given = [*tasks(3, "big", length=400_000), *tasks(1, note="x" * 300_000)]
    work, _ = done(crew, given)
    assert work.results["big-001"]["text"] == "å" * 400_000
    assert len(work.results) == 4


def test_waiting_ends_in_time_and_wakes_at_a_death(crew):
    joined = events_of(crew, 2, Joined)
    begin = time.monotonic()
    assert crew.wait(0.3) == []
    assert 0.3 <= time.monotonic() - begin < 1.0
    assert crew.wait(0.0) == []
    os.kill(pid_of(joined[0]), signal.SIGKILL)
    begin = time.monotonic()
    (lost,) = crew.wait(20.0)
    assert time.monotonic() - begin < 2.0
    assert lost.worker == joined[0].worker


def test_closing_leaves_no_process_whatever_they_do(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.5)
    crew = Processes(HIRED, 4)
    joined = events_of(crew, 4, Joined)
    for worker, act in zip(joined, ["hang", "freeze", "stubborn", "count"], strict=True):
        crew.give(worker.worker, Task(act, "read", 2, {"act": act}))
    events_of(crew, 1, Finished)
    time.sleep(0.2)
    begin = time.monotonic()
    crew.close()
    assert time.monotonic() - begin < 2.0
    assert not any(is_alive(pid_of(worker)) for worker in joined)
    for worker in joined:
        with pytest.raises(ProcessLookupError):  # nor any to be buried
            os.kill(pid_of(worker), 0)
    crew.close()


def test_closing_before_anybody_has_joined_leaves_no_process():
    crew = Processes(HIRED, 2)
    pids = [child.process.pid for child in crew._children.values()]
    crew.close()
    assert len(pids) == 2
    assert gone(pids, 0)


def test_an_error_of_the_leader_closes_the_crew():
    pids = []

    def fall():
        with Processes(HIRED, 1) as crew:
            pids.extend(map(pid_of, events_of(crew, 1, Joined)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fall()
    assert len(pids) == 1
    assert gone(pids, 0)


PARENT = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    from ffmem.cluster.crew import Joined, Recruit
    from ffmem.cluster.processes import Processes
    from ffmem.cluster.task import Task

    with Processes(Recruit("tests.cluster.workers:hired"), 2) as crew:
        n = 0
        while n < 2:
            for event in crew.wait(1.0):
                if isinstance(event, Joined):
                    n += 1
                    crew.give(event.worker, Task("hang", "read", 2, {"act": sys.argv[1]}))
                    print(event.where.rpartition(":")[2], flush=True)
        while True:
            assert not crew.wait(10.0)
"""


@pytest.fixture
def parent():
    """Start a program with two children, and return it with their numbers."""
    started = []

    def start(act):
        own = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PARENT), act],
            env=SAME_MODULES,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(own)
        return own, [int(own.stdout.readline()) for _ in range(2)]

    yield start
    for own in started:
        own.kill()
        own.communicate()


@pytest.mark.parametrize("act", ["hang", "stubborn"])
def test_no_child_outlives_a_parent_that_is_killed(parent, act):
    own, pids = parent(act)
    assert all(map(is_alive, pids))
    own.kill()
    assert gone(pids, 3.0)


def test_ctrl_c_reaches_the_parent_only_which_ends_its_children(parent):
    own, pids = parent("hang")
    assert len({os.getpgid(pid) for pid in [own.pid, *pids]}) == 3
    os.killpg(own.pid, signal.SIGINT)  # what a terminal does: the whole group in front
    _, errors = own.communicate(timeout=10)
    assert own.returncode == -signal.SIGINT
    assert errors.count("KeyboardInterrupt") == 1, errors
    assert gone(pids, 0)


@pytest.fixture
def pipes():
    """Two pipes, as (their, our) ends: what a child reads and what it writes."""
    source, ours = os.pipe()
    heard, out = os.pipe()
    ends = [source, out, ours, heard]
    yield ends
    for end in ends:
        os.close(end)


@contextmanager
def child(source, out, parent):
    own = [sys.executable, "-m", process.__name__, str(source), str(out), str(parent)]
    with subprocess.Popen(own, pass_fds=(source, out), env=SAME_MODULES) as started:
        try:
            yield started
        finally:
            started.kill()


def test_a_child_whose_pipe_is_held_open_still_notices_that_its_parent_is_gone(pipes):
    """As when the parent has forked: then the end of the pipe never comes."""
    with child(*pipes[:2], parent=os.getpid() + 1) as started:
        assert started.wait(10) == 0


def test_a_child_ends_with_its_pipe(pipes):
    with child(*pipes[:2], parent=os.getpid()) as started:
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(1.0)
        os.close(pipes.pop(2))
        assert started.wait(10) == 0


def test_workers_see_the_modules_that_the_parent_sees(tmp_path, monkeypatch):
    (tmp_path / "found_on_the_way.py").write_text("from tests.cluster.workers import hired\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Processes(Recruit("found_on_the_way:hired"), 1) as crew:
        assert isinstance(events_of(crew, 1)[0], Joined)


def test_a_worker_that_is_dismissed_is_lost_and_replaced():
    with Processes(HIRED, 1) as crew:
        (first,) = events_of(crew, 1, Joined)
        crew.give(first.worker, *tasks(1, "hang"))
        crew.dismiss(first.worker)
        (lost,) = events_of(crew, 1, Lost)
        assert lost.worker == first.worker
        (second,) = events_of(crew, 1, Joined)
        assert second.worker != first.worker
