import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.cluster.status import STALE, Status, WorkerStatus
from ffmem.cluster.telling import MOST_ROWS, SLOWEST, duration, told

NOW = 1_700_000_000.0


def worker(name, rate=100.0, **changes):
    fields = {
        "where": "host:1",
        "task": "lease-7",
        "share": 0.5,
        "done": 3,
        "seconds": 12.0,
    } | changes
    return WorkerStatus(name=name, rate=rate, **fields)


def status(**changes):
    fields = {
        "phase": "reading",
        "unit": "tokens",
        "units": 103_227_021,
        "units_done": 1_234_567,
        "tasks_done": 19,
        "running": 2,
        "waiting": 1,
        "given_up": 0,
        "failures": 1,
        "losses": 2,
        "rate": 12_345.6,
        "seconds_left": 8_261.0,
        "seconds": 100.0,
        "leader": "vm:42",
        "written": NOW - 3,
        "size": 3,
        "workers": [worker("w1", 6000.4), worker("w3", 6345.2, task=None, share=0.0)],
        "said": ["Worker w2 on vm:43 was lost with lease-7: killed"],
    }
    return Status(**(fields | changes))


def test_a_state_is_told_as_a_whole():
    assert told(status(), NOW).splitlines() == [
        "Reading: 1,234,567 of 103,227,021 tokens (1.1 %), 12,346 tokens/s,"
        " about 2 h 17 min left; running for 1 min 40 s",
        "19 tasks done, 2 running, 1 ready, 0 given up",
        "1 failure, 2 lost workers",
        "Said by vm:42, 3 s ago.",
        "",
        "worker  where   task      for  of it  tokens/s  done",
        "w1      host:1  lease-7  12 s   50 %     6,000     3  slowest",
        "w3      host:1  –           –      –     6,345     3",
        "2 of 3 workers have begun; the others load.",
        "",
        "What went wrong, the latest last:",
        "  Worker w2 on vm:43 was lost with lease-7: killed",
    ]


def test_a_beginning_has_no_rate_no_worker_and_no_mishap():
    text = told(
        status(units_done=0, rate=None, seconds_left=None, workers=[], said=[], tasks_done=1), NOW
    )
    assert "(0.0 %), no rate yet; running" in text
    assert "left" not in text
    assert "\n1 task done" in text
    assert text.endswith("\n\nNo worker has joined yet, or all are lost.")


def test_work_without_units_divides_by_nothing():
    assert "Reading: 0 of 0 tokens, " in told(status(units=0, units_done=0), NOW)


def test_an_end_needs_no_more_time_and_only_an_end_is_whole():
    assert "1 of 1 token (100.0 %), 12,346 tokens/s; running" in told(
        status(units=1, units_done=1, seconds_left=0.0), NOW
    )
    assert "(99.9 %)" in told(status(units=10**6, units_done=10**6 - 1), NOW)


def test_old_news_say_that_the_leader_may_be_dead_and_what_to_do():
    fresh = told(status(written=NOW - STALE), NOW)
    old = told(status(written=NOW - STALE - 300), NOW)
    assert "dead" not in fresh
    assert "Said by vm:42, 5 min 30 s ago: it seems to be dead or cut off. Run the same" in old


def test_news_from_the_future_are_told_as_what_they_are():
    assert "0 s ago." in told(status(written=NOW + 2), NOW)
    text = told(status(written=NOW + 3600), NOW)
    assert "whose clock is 1 h 0 min ahead of this one: whether it" in text


@pytest.mark.parametrize("rates", [(5.0,), (5.0, 5.0), (None, None), (None, 5.0)])
def test_nobody_is_slowest_among_equals(rates):
    workers = [worker(f"w{i}", rate) for i, rate in enumerate(rates)]
    assert "slowest" not in told(status(workers=workers), NOW)


def test_as_many_workers_as_can_be_read_have_a_row_each():
    text = told(status(workers=[worker(f"w{i}", 10.0 + i) for i in range(MOST_ROWS)]), NOW)
    assert re.findall(r"^w\d+", text, re.M) == [f"w{i}" for i in range(MOST_ROWS)]
    assert text.count("slowest") == 1


def test_of_very_many_workers_the_spread_and_the_slowest_are_told():
    rates = [1000.0 + i for i in range(1001)]
    workers = [worker(f"w{i}", rate) for i, rate in enumerate(reversed(rates))]
    workers += [worker("new", None, task=None)]
    text = told(status(workers=workers), NOW)
    assert "1,002 workers, 1 of them without a task" in text
    assert (
        "Their rates in tokens/s: lowest 1,000, quarter 1,250, median 1,500,"
        " three quarters 1,750, highest 2,000" in text
    )
    assert "1 worker without a rate yet" in text
    assert re.findall(r"^w\d+", text, re.M) == [f"w{1000 - i}" for i in range(SLOWEST)]


def test_a_crowd_without_a_rate_has_no_table():
    text = told(status(workers=[worker(f"w{i}", None) for i in range(50)]), NOW)
    assert "50 workers without a rate yet" in text
    assert "slowest" not in text


def test_a_mishap_of_several_lines_stays_one():
    text = told(status(said=["one\ntwo", "three"]), NOW)
    assert text.endswith(":\n  one\n    two\n  three")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.7, "1 min 0 s"),
        (61, "1 min 1 s"),
        (3600, "1 h 0 min"),
        (90_061, "1 d 1 h"),
        (86_400 * 4000, "4,000 d 0 h"),
    ],
)
def test_a_time_is_told_in_its_two_largest_units(seconds, text):
    assert duration(float(seconds)) == text


@given(
    st.lists(st.floats(0, 1e12) | st.none(), max_size=100),
    st.integers(0, 10**15),
    st.integers(0, 10**15),
    st.floats(-1e9, 1e12),
)
def test_every_state_can_be_told(rates, units, units_done, age):
    workers = [worker(f"w{i}", rate) for i, rate in enumerate(rates)]
    state = status(units=units, units_done=units_done, workers=workers, written=NOW - age)
    lines = told(state, NOW).splitlines()
    assert all(line == line.rstrip() for line in lines)
    rows = [line for line in lines if re.match(r"w\d", line)]
    assert len(rows) == (
        len(rates)
        if len(rates) <= MOST_ROWS
        else min(SLOWEST, sum(rate is not None for rate in rates))
    )
