from contextlib import contextmanager
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.cluster import leader as leading
from ffmem.cluster.crew import Crew, Failed, Finished, Joined, Lost, Refused
from ffmem.cluster.here import Here
from ffmem.cluster.leader import STARTS, Leader, Work
from ffmem.cluster.schedule import UNKNOWN
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.status import NAME, read_status
from ffmem.cluster.task import Task
from ffmem.errors import FfmemError, StoreError
from ffmem.progress import Progress
from tests.cluster.workers import Acting, Gathering, tasks


class Scripted:
    """A crew that does what a list of functions says, one per `wait`, a second each."""

    def __init__(self, script, size=1):
        self.script, self.size = iter(script), size
        self.heard = lambda worker, units: None
        self.time = 0.0
        self.given = {}
        self.order = []

    def now(self):
        return self.time

    def give(self, worker, task):
        assert worker not in self.given, "a worker has two tasks"
        self.given[worker] = task
        self.order.append((worker, task.key))

    def wait(self, seconds):
        self.time += 1.0
        event = next(self.script)(self)
        return [] if event is None else [event]

    def dismiss(self, worker):
        self.order.append((worker, "dismissed"))

    def close(self):
        pass


def joins(worker):
    return lambda crew: Joined(worker, f"host-of-{worker}:1")


def finishes(worker):
    return lambda crew: Finished(worker, crew.given.pop(worker), {})


def fails(worker, error="trouble", **kind):
    return lambda crew: Failed(worker, crew.given.pop(worker), error, **kind)


def dies(worker, reason="killed"):
    def die(crew):
        crew.given.pop(worker, None)
        return Lost(worker, reason)

    return die


def steps(worker, units):
    return lambda crew: crew.heard(worker, units)


def passes(seconds):
    def wait(crew):
        crew.time += seconds

    return wait


class Watched(Progress):
    """Progress that keeps what was shown."""

    def __init__(self):
        super().__init__(quiet=True)
        self.lines, self.shown = [], []

    def say(self, line):
        self.lines.append(line)

    @contextmanager
    def bar(self, title, total, unit, done=0):
        self.shown.append(done)
        yield lambda n: self.shown.append(self.shown[-1] + n)


@pytest.fixture
def led(monkeypatch):
    """Lead a scripted crew, and return everybody."""
    monkeypatch.setattr(leading, "TELL", 0.0)

    def lead(script, given, size=1, shared=None, **options):
        crew, watched, work = Scripted(script, size), Watched(), Gathering(given, **options)
        leader = Leader(crew, watched, shared)
        leader.lead(work)
        return leader, work, crew, watched

    return lead


def test_the_script_is_a_crew_and_the_gathering_is_work():
    assert isinstance(Scripted([]), Crew)
    assert isinstance(Gathering([]), Work)


def test_tasks_are_given_to_whoever_is_idle_until_all_are_done(led):
    script = [joins("a"), joins("b"), finishes("b"), finishes("a"), finishes("b")]
    _, work, crew, _ = led(script, tasks(3), size=2)
    assert crew.order == [("a", "count-000"), ("b", "count-001"), ("b", "count-002")]
    assert list(work.results) == ["count-001", "count-000", "count-002"]


def test_what_follows_from_a_task_is_done_as_well(led):
    class Following(Gathering):
        def finished(self, task, result):
            super().finished(task, result)
            if task.kind == "read":
                yield Task(f"after-{task.key}", "merge", 1, urgency=1)

    crew = Scripted([joins("a"), *[finishes("a")] * 4])
    Leader(crew, Watched()).lead(Following(tasks(2)))
    assert [key for _, key in crew.order] == [
        *("count-000", "after-count-000", "count-001", "after-count-001")
    ]


def test_the_bar_counts_each_unit_once_and_falls_back_only_to_what_is_done(led):
    script = [
        joins("a"),
        steps("a", 4),
        joins("b"),
        steps("b", 7),
        steps("b", 9),  # more than it has
        dies("a"),
        finishes("b"),
        joins("c"),
        finishes("b"),
    ]
    _, _, _, watched = led(script, tasks(2), units_done=5, size=2)
    falls = [new for old, new in pairwise(watched.shown) if new < old]
    assert falls == [15]  # what `a` had done is lost
    assert max(watched.shown) == watched.shown[-1] == 25
    assert [number for number, _ in groupby(watched.shown)] == [5, 9, 16, 19, 15, 25]


def doubled(*later):
    """Return a script in which `b` does the task that `a` hangs in, and then something else."""
    usual = [joins("a"), joins("b"), finishes("b"), steps("a", 8), passes(100.0), steps("b", 3)]
    return [*usual, *later]


def test_a_task_that_two_are_at_counts_once_and_not_again_when_it_is_done(led):
    script = doubled(finishes("b"))
    leader, work, crew, watched = led(script, tasks(2), size=2)
    assert crew.order[-1] == ("b", "count-000")
    assert watched.shown[-1] == work.units == 20
    assert max(watched.shown) == 20
    assert leader.status().units_done == 20


def test_units_of_who_repeats_in_vain_are_not_counted_on_top(led):
    crew, watched = Scripted(doubled(finishes("b"), finishes("b"))), Watched()
    leader = Leader(crew, watched)
    leader.lead(Gathering(tasks(2)))
    leader.lead(Gathering([Task("next", "read", 10)]))
    assert "a" in crew.given  # still at the task of the first work
    assert max(watched.shown) == 20
    assert watched.shown[-1] == 10


@pytest.mark.parametrize("end", [finishes, fails, dies])
def test_who_comes_late_changes_nothing(led, end):
    crew, watched = Scripted(doubled(finishes("b"), end("a"), finishes("b"))), Watched()
    leader, second = Leader(crew, watched), Gathering(tasks(1, "sleep"))
    leader.lead(Gathering(tasks(2)))
    leader.lead(second)
    assert list(second.results) == ["sleep-000"]
    assert leader.failures == 0


def test_a_late_worker_that_finds_its_files_gone_does_not_end_the_run(led):
    end = fails("a", "no such segment", of_place=True, certain=True)
    third = Task("third", "read", 10)
    script = [*doubled(finishes("b")), end, finishes("b")]
    crew = Scripted(script)
    leader = Leader(crew, Watched())
    leader.lead(Gathering(tasks(2)))
    leader.lead(Gathering([third]))
    assert crew.order[-1] == ("b", "third")


def test_a_task_that_is_given_up_is_told_with_its_error_and_can_be_replaced(led):
    class Replacing(Gathering):
        def given_up(self, task, error):
            super().given_up(task, error)
            return [Task("instead", "probe", 1)]

    crew, watched = (
        Scripted([joins("a"), fails("a"), fails("a"), fails("a", "again"), finishes("a")]),
        Watched(),
    )
    leader, work = Leader(crew, watched), Replacing(tasks(1))
    leader.lead(work)
    assert work.lost == {"count-000": "again"}
    assert list(work.results) == ["instead"]
    assert leader.failures == 3
    assert watched.lines == [
        "count-000 failed on host-of-a:1: trouble",
        "count-000 failed on host-of-a:1: trouble",
        "count-000 failed on host-of-a:1: again",
    ]
    assert leader.status().given_up == 1


def test_work_may_raise_instead_of_giving_up():
    class Strict(Gathering):
        def given_up(self, task, error):
            raise FfmemError(f"{task.key}: {error}")

    crew = Scripted([joins("a"), fails("a", "never", certain=True)])
    with pytest.raises(FfmemError, match="count-000: never"):
        Leader(crew, Watched()).lead(Strict(tasks(3)))


def test_workers_lost_with_a_task_are_named_and_the_task_given_up(led):
    script = [event for name in "abc" for event in (joins(name), dies(name))]
    leader, work, _, watched = led(script, tasks(1))
    assert work.lost == {"count-000": "its workers died: killed"}
    assert leader.losses == 3
    assert watched.lines[0] == "Worker a on host-of-a:1 was lost with count-000: killed"


def test_who_is_idle_takes_over_the_task_of_who_is_lost(led):
    script = [joins("a"), joins("b"), dies("a"), finishes("b")]
    _, work, crew, _ = led(script, tasks(1), size=2)
    assert crew.order == [("a", "count-000"), ("b", "count-000")]
    assert list(work.results) == ["count-000"]


def test_a_fault_of_the_place_ends_the_run_at_once(led):
    with pytest.raises(StoreError, match="full"):
        led([joins("a"), fails("a", "full", of_place=True, certain=True)], tasks(5))


def test_workers_that_die_before_they_begin_end_the_run_after_some_starts(led):
    script = [dies(f"w{i}", f"reason {i}") for i in range(100)]
    last = 2 * STARTS - 1
    with pytest.raises(FfmemError, match=f"long enough to begin.*reason {last}$"):
        led(script, tasks(1), size=2)


def test_early_losses_are_forgotten_when_something_is_done(led):
    early = [dies(f"w{i}") for i in range(STARTS - 1)]
    script = [*early, joins("a"), finishes("a"), dies("a"), *early, joins("b"), finishes("b")]
    leader, work, _, _ = led(script, tasks(2))
    assert len(work.results) == 2
    assert leader.losses == 2 * (STARTS - 1) + 1


def refuses(name):
    return lambda crew: Refused(name, f"host-of-{name}:1", "no model there")


def test_a_run_ends_when_all_have_refused_and_goes_on_when_one_works(led):
    with pytest.raises(FfmemError, match=r"No worker could begin\. host-of-b:1: no model there"):
        led([refuses("a"), refuses("b")], tasks(1), size=2)
    script = [refuses("a"), joins("b"), finishes("b")]
    _, work, _, watched = led(script, tasks(1), size=2)
    assert len(work.results) == 1
    assert watched.lines == ["Worker a on host-of-a:1 could not begin: no model there"]


def test_workers_stay_for_the_next_work():
    crew, watched = Scripted([joins("a"), finishes("a"), finishes("a")]), Watched()
    leader = Leader(crew, watched)
    for act in ("count", "sleep"):
        leader.lead(Gathering(tasks(1, act)))
    assert crew.order == [("a", "count-000"), ("a", "sleep-000")]
    assert leader.status().workers[0].done == 2


def test_a_state_is_written_and_read_back(led, tmp_path):
    shared = SharedFolder(tmp_path)
    assert read_status(shared) is None
    seen = []

    def look(crew):
        seen.append(read_status(shared))

    script = [joins("a"), joins("b"), finishes("b"), fails("a"), steps("a", 5), look]
    leader, *_ = led([*script, finishes("b"), finishes("a")], tasks(3), size=2, shared=shared)
    status = seen[0]
    assert (status.units, status.units_done, status.tasks_done) == (30, 15, 1)
    assert (status.running, status.failures, status.losses, status.given_up) == (2, 1, 0, 0)
    assert status.rate == pytest.approx(15 / 3)  # from when somebody had begun
    assert status.seconds_left == pytest.approx(15 / 5)
    by_name = {worker.name: worker for worker in status.workers}
    assert by_name["a"].task == "count-000"
    assert by_name["a"].share == 0.5
    assert by_name["a"].rate is None
    assert by_name["b"].done == 1
    assert by_name["b"].rate == pytest.approx(10.0)
    assert status.said == ["count-000 failed on host-of-a:1: trouble"]
    end = read_status(shared)
    assert end.units_done == end.units
    assert end.workers == leader.status().workers


def test_a_damaged_state_is_none(tmp_path):
    (tmp_path / NAME).write_text("{")
    assert read_status(SharedFolder(tmp_path)) is None
    (tmp_path / NAME).write_text("{}")
    assert read_status(SharedFolder(tmp_path)) is None


def test_rates_are_of_the_units_that_are_counted(led):
    merge = Task("m", "merge", 10**9)
    leader, *_ = led([joins("a"), finishes("a"), finishes("a")], [*tasks(1), merge])
    assert leader.status().workers[0].rate == pytest.approx(10.0)
    assert leader.status().units_done == 10


def sleeps(seconds):
    def sleep(crew):
        crew.time += seconds

    return sleep


@pytest.mark.parametrize(("seconds", "is_long"), [(UNKNOWN - 200, False), (UNKNOWN, True)])
def test_a_worker_is_dismissed_that_sits_at_what_another_has_done(seconds, is_long):
    crew = Scripted([*doubled(finishes("b")), sleeps(seconds), finishes("b")])
    leader = Leader(crew, Watched())
    leader.lead(Gathering(tasks(2)))
    leader.lead(Gathering([Task("third", "read", 10)]))
    assert (("a", "dismissed") in crew.order) == is_long
    assert crew.order.count(("a", "dismissed")) <= 1
    assert ("b", "dismissed") not in crew.order


def test_a_crew_of_one_in_this_process_does_the_same():
    watched, work = Watched(), Gathering([*tasks(5), *tasks(1, "fail"), *tasks(1, "refuse")])
    leader = Leader(Here(Acting()), watched)
    leader.lead(work)
    assert len(work.results) == 5
    assert work.lost == {
        "fail-000": "RuntimeError: a moment's trouble",
        "refuse-000": "this cannot be read",
    }
    assert leader.failures == 4
    with pytest.raises(FfmemError, match="No room left"):
        leader.lead(Gathering(tasks(1, "full")))


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(0, 15))
def test_through_any_faults_every_task_ends_once_and_the_bar_stays_in_bounds(random, size, n):
    crew, watched = Scripted([], size), Watched()
    names = iter(f"w{i}" for i in range(10**6))
    living = set()

    def something():
        while True:
            if len(living) < size:
                living.add(name := next(names))
                yield joins(name)
                continue
            busy = sorted(crew.given)
            deed = random.choice([finishes, finishes, finishes, fails, dies, steps, passes])
            if deed is passes or not busy:
                yield passes(random.choice([1.0, 100.0]))
            elif deed is steps:
                yield steps(random.choice(busy), random.randint(0, 12))
            else:
                worker = random.choice(busy)
                living.difference_update({worker} if deed is dies else ())
                yield deed(worker)

    crew.script = something()
    leader = Leader(crew, watched)
    for _ in range(2):
        done = random.randint(0, 3)
        work = Gathering(tasks(n), units_done=done)
        leader.lead(work)
        assert sorted([*work.results, *work.lost]) == [task.key for task in work.given]
        assert watched.shown[-1] == done + 10 * len(work.results)
    assert min(watched.shown) >= 0
    assert max(watched.shown) <= 10 * n + 3
