"""The pages of a study in a real browser: nothing is lost and nothing is doubled.

The server is a process of its own, so that it can be killed in the middle of things.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from itertools import pairwise

import pytest
from playwright.sync_api import Error, expect

from ffmem.annotation.study import Sheet, SheetPattern, study_path
from tests.web.studied import KEYS, made, people

FIRST = KEYS[0]


class Server:
    """`ffmem serve` as a process, always at the same port."""

    def __init__(self, folder):
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = [sys.executable, "-m", "ffmem", "serve", str(self.folder), "--no-model"]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{self.address}/static/site.css", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None, "the server did not start"
                time.sleep(0.1)
        raise AssertionError("the server does not answer")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)


@pytest.fixture(scope="module")
def folder(served_folder, tmp_path_factory):
    """An index of which there may be a study beside it."""
    return shutil.copytree(served_folder, tmp_path_factory.mktemp("studied") / "tiny")


@pytest.fixture(scope="module")
def study(folder):
    return made(study_path(folder), orders=dict.fromkeys("ABCDEFGHIJKLM", KEYS))


@pytest.fixture(scope="module")
def server(folder, study):
    running = Server(folder)
    yield running
    running.kill()


@pytest.fixture
def enter(browser, server, study):
    """Open browsers of people; no script of theirs may have failed at the end.

    The console stays silent too, but for requests that a test lets fail.
    """
    failures, contexts = [], []

    def listen(message):
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            failures.append(message.text)

    def new(name, path="/annotate", **options):
        if server.process.poll() is not None:  # another test failed while it was dead
            server.start()
        context = browser.new_context(base_url=server.address, **options)
        contexts.append(context)
        context.on("weberror", lambda error: failures.append(str(error.error)))
        context.on("console", listen)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.goto(f"/annotate?code={people(study)[name].code}")
        page.wait_for_url(re.compile("/annotate(/guide)?$"))
        page.goto(path)
        return page

    yield new
    for context in contexts:
        context.close()
    assert not failures


def opened(page, key=FIRST):
    page.goto(f"/annotate/{key}")
    expect(page.locator("#undo")).to_be_disabled()  # the script has run
    return page


def row(page, rank):
    return page.locator(f"#texts > li[data-rank='{rank}']")


def settled(page):
    expect(page.locator("#state")).to_have_class(re.compile("saved"))


def described(page, number, text, kind):
    card = page.locator("#patterns .pat").nth(number - 1)
    card.locator("textarea").fill(text)
    card.locator(f"[data-kind={kind}]").click()


def now(study, name, key=FIRST):
    """Return what the study has: (description, kind, marks) of each pattern."""
    sheet = study.open_item(people(study)[name], key).sheet
    return [(one.description, one.kind, sorted(one.marks)) for one in sheet.patterns]


def drafts(page):
    left = "Object.keys(localStorage).filter((key) => key.startsWith('ffmem-draft')).length"
    return page.evaluate(left)


def test_two_annotators_lose_nothing_to_reloads_lost_connections_and_a_killed_server(
    enter, server, study
):
    ana, ben = opened(enter("A")), opened(enter("B"))
    # Both at once, with a reload in the middle, right after a mark.
    for page, ranks in ((ana, (1, 2)), (ben, (4, 5))):
        for rank in ranks:
            row(page, rank).click()
    ana.reload()
    row(ana, 3).click()
    expect(row(ana, 1)).to_have_attribute("aria-selected", "true")
    described(ana, 1, "ends with river", "shallow")
    described(ben, 1, "old cities", "semantic")
    row(ben, 6).click()
    # The connection is lost for one of them, who goes on.
    settled(ana)
    ana.context.set_offline(True)
    ana.keyboard.press("Escape")
    ana.locator("#add").click()
    ana.keyboard.type("about the city")
    row(ana, 4).click()
    expect(ana.locator("#state")).to_contain_text("Not saved: no answer from the server")
    row(ana, 5).click()
    ana.context.set_offline(False)
    settled(ana)
    assert now(study, "A") == [
        ("ends with river", "shallow", [1, 2, 3]),
        ("about the city", None, [4, 5]),
    ]
    # The server dies under both. One waits, the other closes the page with work unsaved.
    settled(ben)
    server.kill()
    row(ana, 6).click()
    row(ben, 1).click()
    ben.locator("#patterns textarea").first.fill("old cities and towns")
    for page in (ana, ben):
        expect(page.locator("#state")).to_contain_text("trying again")
    row(ben, 4).click()  # while a request is under way
    context = ben.context
    ben.close()
    server.start()
    settled(ana)
    ben = opened(context.new_page())
    expect(row(ben, 4)).to_have_attribute("aria-selected", "false")
    settled(ben)
    described(ana, 2, "about the city", "semantic")
    # Both hand in, and go on to the rest.
    for page in (ana, ben):
        page.locator("#hand-in").click()
        page.wait_for_url(re.compile(f"/annotate/{KEYS[1]}$"))
        for _ in range(2):
            place = page.url
            page.locator("#none").check()
            page.locator("#hand-in").click()
            page.wait_for_url(lambda url, before=place: url != before)
        page.locator("input[name=related][value=no]").check()
        page.locator("#hand-in").click()
        page.wait_for_url(re.compile("/annotate$"))
        expect(page.locator("h1")).to_contain_text("4 of 4")
    assert now(study, "A") == [
        ("ends with river", "shallow", [1, 2, 3]),
        ("about the city", "semantic", [4, 5, 6]),
    ]
    assert now(study, "B") == [("old cities and towns", "semantic", [1, 5, 6])]
    for name, page in (("A", ana), ("B", ben)):
        for key in KEYS:
            states = [past.sheet for past in study.history(name, key)]
            assert states[-1].done
            assert all(one != other for one, other in pairwise(states))
        assert drafts(page) == 0


def test_a_save_whose_answer_is_lost_counts_once(enter, study):
    page = opened(enter("J"))
    lost = []

    def deaf(route):
        if route.request.method == "POST" and len(lost) < 2:
            lost.append(route.fetch().status)  # it arrives; the answer does not
            route.abort()
        else:
            route.continue_()

    page.route("**/api/annotate/**", deaf)
    row(page, 1).click()
    expect(page.locator("#state")).to_contain_text("trying again")
    row(page, 2).click()
    settled(page)
    assert lost == [200, 200]
    assert now(study, "J") == [("", None, [1, 2])]
    saved = [one.sheet.patterns[0].marks for one in study.history("J", FIRST)]
    assert saved == [{1}, {1, 2}]


def test_a_reload_after_a_lost_answer_goes_on_from_both_marks(enter, study):
    page = opened(enter("K"))
    row(page, 1).click()
    settled(page)

    def deaf(route):
        if route.request.method == "POST":
            with suppress(Error):  # a reload may end the request before its handler does
                route.fetch()
                route.abort()
        else:
            route.continue_()

    page.route("**/api/annotate/**", deaf)
    row(page, 2).click()
    expect(page.locator("#state")).to_contain_text("trying again")
    row(page, 3).click()  # known to this page alone
    page.unroute("**/api/annotate/**")
    page.reload()
    settled(page)
    expect(page.locator("#conflict")).to_be_hidden()
    assert now(study, "K") == [("", None, [1, 2, 3])]


def test_a_mark_set_just_before_leaving_the_page_is_saved(enter, study):
    page = opened(enter("L"))
    row(page, 1).click()
    page.goto("/annotate/guide")
    for _ in range(100):
        if now(study, "L"):
            break
        time.sleep(0.1)
    assert now(study, "L") == [("", None, [1])]


def test_keys_and_drag_do_all_that_clicks_do(enter, study):
    page = opened(enter("C"))
    page.keyboard.press("j")  # to the texts
    page.keyboard.press("Space")  # the first pattern makes itself
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    page.keyboard.press("n")
    page.keyboard.type("near the river")
    page.keyboard.press("Enter")
    page.keyboard.press("m")
    page.keyboard.press("1")  # unmarks text 3, and selects pattern 1
    page.keyboard.press("2")
    page.keyboard.press("r")  # leads nowhere from here
    start, end = row(page, 4).bounding_box(), row(page, 6).bounding_box()
    page.mouse.move(start["x"] + 60, start["y"] + 8)
    page.mouse.down()
    page.mouse.move(end["x"] + 60, end["y"] + 8, steps=12)
    page.mouse.up()
    settled(page)
    assert now(study, "C") == [("", None, [1]), ("near the river", "semantic", [3, 4, 5, 6])]
    expect(row(page, 5).locator(".marks .num")).to_have_text("2")
    # Too few: said in a sentence, and not handed in.
    page.keyboard.press("Control+Enter")
    expect(page.locator("#problems")).to_contain_text("a pattern occurs in at least 3")
    expect(page.locator("#problems")).to_have_class(re.compile("asked"))
    assert page.url.endswith(FIRST)
    page.keyboard.press("?")
    expect(page.locator("dialog.help[open]")).to_contain_text("mark the text")
    page.keyboard.press("?")
    expect(page.locator("dialog.help[open]")).to_have_count(0)


def test_undo_and_redo_are_saved_like_any_change(enter, study):
    page = opened(enter("D"))
    for rank in (1, 2):
        row(page, rank).click()
    page.locator("#undo").click()
    expect(row(page, 2)).to_have_attribute("aria-selected", "false")
    settled(page)
    assert now(study, "D") == [("", None, [1])]
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    expect(page.locator("#patterns .pat")).to_have_count(0)
    expect(page.locator("#undo")).to_be_disabled()
    for _ in range(3):
        page.locator("#redo").click()
    expect(page.locator("#redo")).to_be_disabled()
    page.locator("#patterns textarea").press_sequentially("typed")
    page.locator("#undo").click()  # a word, not a letter
    expect(page.locator("#patterns textarea")).to_have_value("")
    settled(page)
    assert now(study, "D") == [("", None, [1, 2])]


def in_two_windows(enter, study, name):
    """Return two windows on one sheet, the second of which has just saved other marks."""
    one = opened(enter(name))
    row(one, 1).click()
    settled(one)
    two = opened(one.context.new_page())
    row(two, 5).click()
    settled(two)
    row(one, 2).click()
    expect(one.locator("#conflict")).to_be_visible()
    expect(one.locator("#newer")).to_contain_text("texts 1, 5")
    expect(one.locator("#state")).to_have_text("Not saved: a newer version exists")
    assert now(study, name) == [("", None, [1, 5])]
    expect(row(one, 2)).to_have_attribute("aria-selected", "true")  # mine is still on the page
    return one, two


def test_a_newer_version_is_shown_and_may_be_taken(enter, study):
    one, _ = in_two_windows(enter, study, "E")
    one.locator("#take-newer").click()
    expect(one.locator("#conflict")).to_be_hidden()
    expect(row(one, 5)).to_have_attribute("aria-selected", "true")
    expect(row(one, 2)).to_have_attribute("aria-selected", "false")
    row(one, 3).click()
    settled(one)
    assert now(study, "E") == [("", None, [1, 3, 5])]


def test_a_newer_version_may_be_overwritten_and_stays_in_the_history(enter, study):
    one, two = in_two_windows(enter, study, "F")
    one.reload()  # the question is asked again
    expect(one.locator("#newer")).to_contain_text("texts 1, 5")
    one.locator("#overwrite").click()
    settled(one)
    expect(one.locator("#conflict")).to_be_hidden()
    assert now(study, "F") == [("", None, [1, 2])]
    marks = [sorted(past.sheet.patterns[0].marks) for past in study.history("F", FIRST)]
    assert marks == [[1], [1, 5], [1, 2]]
    two.bring_to_front()
    two.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(row(two, 2)).to_have_attribute("aria-selected", "true")  # it sees the newer one


def test_a_code_is_typed_and_forgotten(browser, server, study):
    context = browser.new_context(base_url=server.address)
    page = context.new_page()
    page.goto("/annotate")
    page.locator("input[name=code]").fill(people(study)["M"].code)
    page.keyboard.press("Enter")
    expect(page.locator("input[name=code]")).to_have_count(0)
    assert [cookie["httpOnly"] for cookie in context.cookies()] == [True]
    page.goto("/annotate")
    page.locator("form[action*=leave] button").click()
    expect(page.locator("input[name=code]")).to_have_count(1)
    assert context.cookies() == []
    context.close()


def test_the_page_fits_a_phone_and_tells_its_states(enter):
    page = opened(enter("G", viewport={"width": 390, "height": 800}))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#strip").get_by_role("button", name="+").click()
    page.keyboard.press("Enter")
    row(page, 1).click()
    chosen = page.get_by_role("button", name="Mark with pattern 1").first
    expect(chosen).to_have_attribute("aria-pressed", "true")
    settled(page)
    expect(page.locator("#state")).to_have_text(re.compile(r"^Saved \d\d:\d\d$"))
    assert page.locator("#state").get_attribute("aria-live") == "polite"
    for path in ("/annotate", "/annotate/guide", f"/annotate/{KEYS[3]}"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_adjudicators_take_patterns_and_see_each_others_work(enter, study):
    for name, kinds in (("H", ("shallow", "semantic")), ("I", ("semantic",))):
        person, version = people(study)[name], study.open_item(people(study)[name], FIRST).version
        listed = tuple(
            SheetPattern(f"{name}-{kind}", f"{kind} by {name}", kind, frozenset({1, 2, 3 + place}))
            for place, kind in enumerate(kinds)
        )
        study.save(person, FIRST, version, Sheet(listed, done=True))
    one, two = (enter("Judge", f"/annotate/{FIRST}") for _ in range(2))
    one.get_by_role("button", name="Take all of H").click()
    settled(one)
    expect(two.locator("#patterns .pat")).to_have_count(2)  # without a reload
    two.get_by_role("button", name="Take all of I").click()
    expect(two.get_by_role("button", name="Take all of H")).to_be_disabled()
    settled(two)
    expect(one.locator("#patterns .pat")).to_have_count(3)
    own = study.open_item(people(study)["Judge"], FIRST).sheet
    assert [one.description for one in own.patterns] == [
        *("shallow by H", "semantic by H", "semantic by I")
    ]
