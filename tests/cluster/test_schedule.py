import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.cluster.schedule import REMEMBERED, SHORTEST, SLOW, TRIES, UNKNOWN, Schedule
from ffmem.cluster.task import Task


def read(i, **changes):
    return Task(f"t{i}", **({"kind": "read", "size": 10} | changes))


def practised(*tasks, seconds=10.0, kind="read"):
    """Return a schedule that knows how long 10 units usually take."""
    schedule = Schedule(iter([Task("known", kind, 10), *tasks]))
    schedule.next("teacher", 0.0)
    schedule.finished("teacher", seconds)
    return schedule


sizes = st.integers(0, 50)
a_task = st.tuples(st.sampled_from(["read", "merge"]), sizes, st.integers(0, 2), st.integers(1, 3))
deeds = st.sampled_from(["give", "give", "finish", "finish", "fail", "certain", "lose", "add"])


def play(schedule, moves, more):
    """Play a random run; return the log, and at its end finish whatever is left."""
    names = itertools.count()
    idle, busy, now = [f"w{next(names)}" for _ in range(3)], {}, 0.0
    log = []

    def give(worker):
        task = schedule.next(worker, now)
        if task is not None:
            idle.remove(worker)
            busy[worker] = task
            log.append(("given", worker, task.key, now))

    def end(worker, deed):
        task = busy.pop(worker)
        if deed == "finish":
            log.append(("finished" if schedule.finished(worker, now) else "late", worker, task.key))
        elif deed == "lose":
            given_up = schedule.lost(worker)
        else:
            given_up = schedule.failed(worker, certain=deed == "certain")
        if deed != "finish" and given_up is not None:
            assert given_up == task
            log.append(("given up", worker, task.key))
        idle.append(f"w{next(names)}" if deed == "lose" else worker)

    for deed, choice, seconds in moves:
        now += seconds
        if deed == "give" and idle:
            give(idle[choice % len(idle)])
        elif deed == "add" and more:
            schedule.add(more.pop())
        elif deed not in ("give", "add") and busy:
            end(list(busy)[choice % len(busy)], deed)
        assert_sound(schedule, busy)
    while not schedule.is_done:
        now += 1.0
        for worker in list(idle):
            give(worker)
        end(next(iter(busy)), "finish")
    return log, now


def assert_sound(schedule, busy):
    """What a schedule says of workers is what they do, unless others have done it."""
    for worker, task in busy.items():
        assert schedule.task_of(worker) in (task, None)
    begun = [key for keys in schedule._begun.values() for key in keys]
    assert sorted(begun) == sorted(schedule._running)
    assert all(running.since for running in schedule._running.values())


@given(
    st.lists(a_task, max_size=12),
    st.lists(st.tuples(deeds, st.integers(0, 5), st.floats(0, 60)), max_size=60),
    st.integers(0, 12),
)
def test_every_task_is_done_or_given_up_exactly_once_through_any_faults(kinds, moves, n_later):
    tasks = [
        Task(f"t{i}", kind, size, urgency=urgency, losses=losses)
        for i, (kind, size, urgency, losses) in enumerate(kinds)
    ]
    more = tasks[len(tasks) - min(n_later, len(tasks)) :]
    source = tasks[: len(tasks) - len(more)]
    schedule = Schedule(iter(source))
    log, _ = play(schedule, moves, more)
    ended = Counter(key for what, _, key, *_ in log if what in ("finished", "given up"))
    assert ended == Counter(task.key for task in tasks if task not in more)
    counts = schedule.counts()
    assert counts.done == sum(what == "finished" for what, *_ in log)
    assert counts.given_up == sum(what == "given up" for what, *_ in log)
    assert counts.running == counts.waiting == 0
    assert_nothing_is_kept(schedule)


def assert_nothing_is_kept(schedule):
    """Apart from numbers, and the usual times of a few tasks, nothing is left of what was done."""
    for name, value in vars(schedule).items():
        if name == "_usual":
            assert all(len(paces) <= REMEMBERED for paces in value.values())
        elif name == "_begun":
            assert not any(value.values())
        elif name == "_by_worker":
            assert len(value) <= 3  # who still repeats what another has done
        elif hasattr(value, "__len__"):
            assert not value, name


def test_memory_does_not_grow_with_tasks_that_are_done_failed_and_lost():
    def size(schedule):
        parts = [value for value in vars(schedule).values() if hasattr(value, "__len__")]
        inner = [
            len(one)
            for part in parts
            if isinstance(part, dict)
            for one in part.values()
            if hasattr(one, "__len__")
        ]
        return sum(map(len, parts)) + sum(inner)

    schedule, sizes = Schedule(read(i) for i in range(4000)), []
    for i in range(4000):
        assert schedule.next(f"w{i}", float(i)) is not None
        if i % 5 == 1:
            schedule.lost(f"w{i}")
        elif i % 5 == 2:
            schedule.failed(f"w{i}", certain=i % 2 == 0)
        else:
            schedule.finished(f"w{i}", i + 0.5)
        sizes.append(size(schedule))
    assert max(sizes[2000:]) <= max(sizes[:500]) + 1


def test_a_source_is_asked_only_for_what_is_given():
    asked = []

    def source():
        for i in range(100):
            asked.append(i)
            yield read(i)

    schedule = Schedule(source())
    schedule.next("a", 0.0)
    schedule.next("b", 0.0)
    assert not schedule.is_done
    assert asked == [0, 1]


def test_tasks_are_given_in_their_order_and_urgent_ones_first():
    schedule = Schedule(iter([read("s0"), read("s1")]))
    for name, urgency in [("a", 0), ("b", 2), ("c", 1), ("d", 2)]:
        schedule.add(read(name, urgency=urgency))
    given = [schedule.next(f"w{i}", 0.0).key for i in range(6)]
    assert given == ["tb", "td", "tc", "ta", "ts0", "ts1"]
    assert schedule.next("w6", 0.0) is None


def test_a_worker_has_one_task_at_a_time():
    schedule = Schedule(iter([read(0), read(1)]))
    schedule.next("a", 0.0)
    with pytest.raises(ValueError, match=r"a has a task already: t0\."):
        schedule.next("a", 0.0)


def test_the_first_result_counts_and_a_later_one_does_not():
    schedule = practised(read(0))
    schedule.next("slow", 0.0)
    assert schedule.next("fast", 100.0) == read(0)
    assert schedule.finished("fast", 101.0)
    assert schedule.is_done
    assert schedule.task_of("slow") is None
    assert not schedule.finished("slow", 102.0)
    assert schedule.counts().done == 2


@pytest.mark.parametrize("end", ["failed", "lost"])
def test_trouble_of_who_comes_late_changes_nothing(end):
    schedule = practised(read(0))
    schedule.next("slow", 0.0)
    schedule.next("fast", 100.0)
    schedule.finished("fast", 101.0)
    assert getattr(schedule, end)("slow") is None
    assert schedule.is_done
    assert schedule.next("slow", 102.0) is None


def test_a_task_is_doubled_when_it_is_late_and_again_when_that_one_is():
    schedule = practised(read(0), read(1))
    schedule.next("a", 100.0)
    schedule.next("b", 101.0)
    assert schedule.next("c", 100.0 + SLOW * 10) is None
    assert schedule.next("c", 100.1 + SLOW * 10) == read(0)
    assert schedule.next("d", 100.1 + SLOW * 10) is None
    assert schedule.next("d", 101.1 + SLOW * 10) == read(1)
    assert schedule.next("e", 100.1 + 2 * SLOW * 10) is None
    assert schedule.next("e", 100.2 + 2 * SLOW * 10) == read(0)


def test_a_doubled_task_that_loses_one_worker_can_be_doubled_again():
    schedule = practised(read(0))
    schedule.next("a", 0.0)
    schedule.next("b", 100.0)
    assert schedule.lost("a") is None
    assert schedule.next("c", 100.0 + SLOW * 10) is None
    assert schedule.next("c", 101.0 + SLOW * 10) == read(0)
    assert schedule.finished("c", 122.0)


def test_a_task_that_two_hang_in_does_not_hide_another_late_one():
    schedule = practised(read(0))
    schedule.next("a", 0.0)
    assert schedule.next("b", 100.0) == read(0)
    schedule.add(read(1))
    assert schedule.next("c", 101.0) == read(1)
    assert {schedule.next("d", 200.0).key, schedule.next("e", 200.0).key} == {"t0", "t1"}


@pytest.mark.parametrize("end", ["failed", "lost"])
def test_a_task_at_which_one_hangs_is_given_up_when_the_others_fail(end):
    schedule = practised(read(0))
    schedule.next("hangs", 0.0)
    ended = []
    for i in range(1, 10):
        if schedule.next(f"w{i}", 1000.0 * i) is None:
            break
        ended.append(getattr(schedule, end)(f"w{i}"))
    assert ended == [None, None, read(0)]
    assert schedule.is_done
    assert not schedule.finished("hangs", 1e6)


def test_a_task_of_a_kind_that_none_has_done_does_not_hide_a_late_one_of_another():
    schedule = practised(Task("m", "merge", 10), read(1))
    schedule.next("a", 0.0)
    schedule.next("b", 1.0)
    assert schedule.next("c", 200.0) == read(1)
    assert schedule.finished("c", 201.0)
    assert schedule.next("d", UNKNOWN) is None  # nobody knows how long a merge takes
    assert schedule.next("d", UNKNOWN + 1) == Task("m", "merge", 10)


def test_little_is_late_before_the_first_is_done_or_when_all_are_short():
    schedule = Schedule(iter([read(0)]))
    schedule.next("a", 0.0)
    assert schedule.next("b", UNKNOWN) is None
    assert schedule.next("b", UNKNOWN + 1) == read(0)
    short = practised(read(0), seconds=0.01)
    short.next("a", 0.0)
    assert short.next("b", SHORTEST) is None
    assert short.next("b", SHORTEST + 0.1) == read(0)


def test_larger_tasks_may_take_longer():
    schedule = practised(read(0, size=1000))
    schedule.next("a", 0.0)
    assert schedule.usual_seconds(read(0, size=1000)) == 1000.0
    assert schedule.next("b", 1000 * SLOW) is None
    assert schedule.next("b", 1000 * SLOW + 1) is not None


def test_the_usual_time_is_the_median_of_late_tasks_of_its_kind():
    schedule = Schedule(read(i) for i in range(3 * REMEMBERED))
    for i in range(3 * REMEMBERED):
        schedule.next("a", 0.0)
        schedule.finished("a", 10.0 if i < REMEMBERED else 20.0)
    assert schedule.usual_seconds(read(0)) == 20.0
    assert schedule.usual_seconds(Task("m", "merge", 10)) is None


def test_a_task_that_fails_is_given_up_after_some_tries():
    schedule = Schedule(iter([read(0)]))
    for i in range(TRIES - 1):
        assert schedule.next("a", float(i)) == read(0)
        assert schedule.failed("a") is None
    schedule.next("a", 9.0)
    assert schedule.failed("a") == read(0)
    assert schedule.is_done
    assert schedule.counts().given_up == 1


def test_a_certain_error_is_not_tried_again_unless_somebody_else_is_at_it():
    schedule = practised(read(0), read(1))
    schedule.next("a", 0.0)
    assert schedule.failed("a", certain=True) == read(0)
    schedule.next("a", 0.0)
    schedule.next("b", 100.0)
    assert schedule.failed("a", certain=True) is None
    assert schedule.finished("b", 101.0)


@given(st.integers(1, 5))
def test_a_task_is_given_up_after_as_many_losses_as_it_allows(losses):
    task = read(0, losses=losses)
    schedule = Schedule(iter([task]))
    given_up = []
    for i in range(losses):
        schedule.next(f"w{i}", float(i))
        given_up.append(schedule.lost(f"w{i}"))
    assert given_up == [None] * (losses - 1) + [task]


def test_a_worker_that_is_lost_without_a_task_takes_none_with_it():
    schedule = Schedule(iter([read(0)]))
    assert schedule.lost("a") is None
    assert schedule.next("b", 0.0) == read(0)
