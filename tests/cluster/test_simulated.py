"""The real leader, schedule and merge tree on a simulated clock, through any fault."""

from collections import Counter
from dataclasses import replace
from zlib import crc32

import pytest

from benchmarks.simulation import LEASE, PLACE, SENTENCES, Rehearsal, poisoned, run
from ffmem.cluster.crew import Crew, Failed, Finished, Joined, Lost
from ffmem.cluster.leader import Leader
from ffmem.cluster.simulated import Faults, Place, Simulated
from ffmem.cluster.task import Task
from ffmem.indexing.tree import FAN_IN
from ffmem.progress import Progress

QUICK = Place({"read": 10_000.0, "probe": 10_000.0, "merge": 2.0}, start_up=10.0, notice=3.0)
"""A lease takes seven seconds: the leader looks around every second."""

BAD = Faults(deaths=20.0, node_deaths=10.0, failures=0.02, hangs=0.001, slow=0.1, slowness=10.0)
STEADY = Place(PLACE.speeds, spread=0.0, jitter=0.0, start_up=60.0)


class Counted(Rehearsal):
    """Counts how often the leader takes each task as done."""

    def __init__(self, folder, n_leases):
        super().__init__(folder, n_leases)
        self.taken = Counter()

    def finished(self, task, result):
        self.taken[task.key] += 1
        return super().finished(task, result)


@pytest.fixture
def work(tmp_path):
    return lambda n_leases: Counted(tmp_path, n_leases)


def led(crew, work):
    """Return every event of a run, with its time."""
    log = []
    crew.watch = lambda at, event: log.append((at, event))
    Leader(crew, Progress(quiet=True)).lead(work)
    return log


@pytest.mark.parametrize("seed", range(10))
def test_through_any_faults_every_lease_counts_once_and_the_run_ends(seed, work):
    crew, work = Simulated(24, QUICK, BAD, seed), work(150)
    crew.is_poison = poisoned(30 * SENTENCES)
    log = led(crew, work)

    leases = {f"lease {lease}" for lease in range(150)}
    merges = {key for key in work.taken if key.startswith("merge")}
    assert leases <= set(work.taken)
    assert all(work.taken[key] == 1 for key in leases | merges)
    assert f"merge {work.tree.root.level}-0" in merges
    assert not work.tree._waiting
    assert len(work.skipped) == 5
    kinds = Counter(type(event) for _, event in log)
    assert min(kinds[kind] for kind in (Joined, Finished, Failed, Lost)) > 0  # it was put to test


def test_the_same_seed_gives_the_same_events_and_another_seed_others(work):
    logs = [led(Simulated(24, QUICK, BAD, seed), work(100)) for seed in (3, 3, 4)]

    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


def test_without_faults_a_run_takes_what_its_tasks_take(work):
    crew = Simulated(1, STEADY)
    led(crew, work(16))

    taken = 16 * LEASE / 1000.0 + 5 * FAN_IN / 1.0
    assert crew.seen.finished == crew.seen.given == 16 + 5
    assert crew.seen.busy == pytest.approx(taken)
    assert crew.now() == pytest.approx(60.0 + taken)


def test_time_never_runs_backwards_and_workers_are_heard_only_while_they_live(work):
    alive, before = set(), 0.0
    for at, event in led(Simulated(24, QUICK, BAD, 1), work(100)):
        assert at >= before
        before = at
        if isinstance(event, Joined):
            alive.add(event.worker)
        assert event.worker in alive
        if isinstance(event, Lost):
            alive.remove(event.worker)


def test_workers_of_a_node_die_together_and_others_take_their_places(work):
    crew = Simulated(8, replace(QUICK, node=4), Faults(node_deaths=5.0), seed=1)
    log = led(crew, work(300))

    lost = Counter(at for at, event in log if isinstance(event, Lost))
    assert lost
    assert set(lost.values()) == {4}
    n_joined = sum(isinstance(event, Joined) for _, event in log)
    assert n_joined >= 8 + sum(lost.values()) - 4  # the last node may still be starting


def test_a_slow_workers_lease_is_done_by_another_one(work):
    slow = Faults(slow=0.2, slowness=50.0)
    crew = Simulated(20, STEADY, slow, seed=5)
    led(crew, work(60))

    alone = LEASE / 1000.0 * 50.0
    assert crew.now() < 0.4 * alone


def test_bad_sentences_are_found_and_left_out_and_no_others(work):
    crew, work = Simulated(4, STEADY, seed=2), work(20)
    crew.is_poison = poisoned(5 * SENTENCES)
    led(crew, work)

    bad = [crc32(str(n).encode()) % (5 * SENTENCES) + n * 5 * SENTENCES for n in range(4)]
    assert sorted(work.skipped) == bad
    assert work.n_given_up == len({sentence // SENTENCES for sentence in bad})


def test_a_busy_leader_delays_what_follows(work):
    quick, busy = (Simulated(50, replace(QUICK, per_event=seconds)) for seconds in (0.0, 0.2))
    for crew in (quick, busy):
        led(crew, work(300))

    assert busy.now() > 1.5 * quick.now()


def test_nobody_is_given_two_tasks_at_once():
    crew = Simulated(1, STEADY)
    (joined,) = crew.wait(100.0)
    crew.give(joined.worker, Task("a", "read", 1))

    with pytest.raises(ValueError, match="has a task already: a"):
        crew.give(joined.worker, Task("b", "read", 1))


def test_waiting_for_nothing_passes_the_time():
    crew = Simulated(1, STEADY)

    assert isinstance(crew, Crew)
    assert crew.wait(10.0) == []
    assert crew.now() == 10.0


def test_what_the_leader_holds_does_not_grow_with_the_leases():
    """Bytes are measured in `benchmarks/simulation.py`."""
    faults = replace(BAD, hangs=0.0)
    few, many = (run(10, n, faults, QUICK) for n in (60, 600))

    assert many["most_waiting"] <= few["most_waiting"] + 10
    assert many["most_running"] <= 10
    assert many["most_segments"] < 2 * few["most_segments"] + 10
