"""The annotators' rooms in a real browser: nothing is lost and nothing is doubled.

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
from itertools import pairwise

import pytest
from playwright.sync_api import expect, sync_playwright

from ffmem.annotation.database import beside
from ffmem.annotation.sheet import Sheet, SheetPattern
from tests.web.browser import FLAGS, browser_path
from tests.web.studied import KEYS, made, people

expect.set_options(timeout=20_000)  # a busy machine is not a wrong page

pytestmark = pytest.mark.skipif(
    browser_path() is None, reason="no browser: install chromium, or name one by FFMEM_BROWSER"
)

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
        command = [sys.executable, "-m", "ffmem", "serve", str(self.folder)]
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
    with made(beside(folder), orders=dict.fromkeys("ABCDEFGHIJKLM", KEYS)) as found:
        yield found


@pytest.fixture(scope="module")
def server(folder, study):
    running = Server(folder)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def enter(browser, server, study):
    """Open browsers of people; no script of theirs may have failed at the end."""
    failures, contexts = [], []

    def new(name, path="/annotate", **options):
        if server.process.poll() is not None:  # another test failed while it was dead
            server.start()
        context = browser.new_context(base_url=server.address, **options)
        contexts.append(context)
        context.on("weberror", lambda error: failures.append(str(error.error)))
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.goto(f"/annotate?code={people(study)[name].code}")
        page.wait_for_url(re.compile("/(annotate/guide|annotate|adjudicate)$"))
        page.goto(path)
        return page

    yield new
    for context in contexts:
        context.close()
    assert not failures


def opened(page, key=FIRST):
    page.goto(f"/annotate/{key}")
    expect(page.locator("html.scripted")).to_have_count(1)
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
    """Return what the store has: (description, kind, marks) of each pattern."""
    sheet = study.open_item(people(study)[name], key).sheet
    return [(one.description, one.kind, sorted(one.marks)) for one in sheet.patterns]


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
    expect(ana.locator("#state")).to_contain_text("Not saved: no connection, trying again")
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
    ben = context.new_page()
    ben.goto("/annotate")
    expect(ben.locator("#state")).to_contain_text("is saved now")
    opened(ben)
    expect(row(ben, 4)).to_have_attribute("aria-selected", "false")
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
    for name in "AB":
        for key in KEYS:
            sheet = study.open_item(people(study)[name], key).sheet
            assert sheet.done
            states = [past.sheet for past in study.history(people(study)[name], key)]
            assert all(one != other for one, other in pairwise(states))
        left = "Object.keys(localStorage).filter((key) => key.startsWith('ffmem-sheet')).length"
        assert (ana if name == "A" else ben).evaluate(left) == 0


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
    saved = [one.sheet.patterns[0].marks for one in study.history(people(study)["J"], FIRST)]
    assert saved == [{1}, {1, 2}]


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
    page.keyboard.press("1")  # unmarks text 3, and chooses pattern 1
    page.keyboard.press("2")
    page.keyboard.press("r")  # leads nowhere from here
    start, end = row(page, 4).bounding_box(), row(page, 6).bounding_box()
    page.mouse.move(start["x"] + 60, start["y"] + 8)
    page.mouse.down()
    page.mouse.move(end["x"] + 60, end["y"] + 8, steps=12)
    page.mouse.up()
    settled(page)
    assert now(study, "C") == [("", None, [1]), ("near the river", "semantic", [3, 4, 5, 6])]
    expect(row(page, 5).locator(".marks.live .num")).to_have_text("2")
    # Too few: said in a sentence, and not handed in.
    page.keyboard.press("Control+Enter")
    expect(page.locator("#problems")).to_contain_text("a pattern recurs in at least 3")
    assert page.url.endswith(FIRST)
    page.keyboard.press("?")
    expect(page.locator("dialog.help[open]")).to_contain_text("mark the text")


def test_undo_works_after_a_reload(enter, study):
    page = opened(enter("D"))
    expect(page.locator("#undo")).to_be_disabled()
    for rank in (1, 2):
        row(page, rank).click()
        settled(page)
    page.reload()
    expect(page.locator("#undo")).to_be_enabled()
    page.locator("#undo").click()
    expect(row(page, 2)).to_have_attribute("aria-selected", "false")
    settled(page)
    page.keyboard.press("Control+z")
    expect(page.locator("#patterns .pat")).to_have_count(0)
    page.reload()
    page.locator("#redo").click()
    page.locator("#redo").click()
    expect(row(page, 2)).to_have_attribute("aria-selected", "true")
    settled(page)
    assert now(study, "D") == [("", None, [1, 2])]


def test_two_windows_on_one_sheet_keep_both_their_marks(enter, study):
    one = opened(enter("E"))
    row(one, 1).click()
    settled(one)
    two = one.context.new_page()
    opened(two)
    for rank in (2, 3):
        row(one, rank).click()
    for rank in (4, 5):
        row(two, rank).click()
    settled(one)
    settled(two)
    assert now(study, "E") == [("", None, [1, 2, 3, 4, 5])]
    row(one, 6).click()
    expect(row(one, 4)).to_have_attribute("aria-selected", "true")  # what the other did
    expect(one.locator("#incoming")).to_contain_text("2 marks")
    settled(one)


def test_words_that_two_windows_changed_are_asked_about(enter, study):
    one = opened(enter("F"))
    row(one, 1).click()
    settled(one)
    two = one.context.new_page()
    opened(two)
    two.locator("#patterns textarea").fill("in the second window")
    settled(two)
    one.locator("#patterns textarea").fill("in the first window")
    expect(one.locator("#refused")).to_contain_text("theirs: in the second window")
    one.locator("#mine").click()
    settled(one)
    assert now(study, "F") == [("in the first window", None, [1])]
    expect(one.locator("#refused")).to_be_hidden()


def test_words_of_another_item_are_asked_about_on_its_own_page(enter, study):
    one = opened(enter("K"))
    row(one, 1).click()
    settled(one)
    two = one.context.new_page()
    opened(two)
    one.context.set_offline(True)
    for page, words in ((one, "in the first"), (two, "in the second")):
        page.locator("#patterns textarea").fill(words)
        expect(page.locator("#state")).to_contain_text("Not saved")
    one.close(run_before_unload=False)
    two.close(run_before_unload=False)
    third = enter_again(one.context, KEYS[1])
    expect(third.locator("#incoming")).to_contain_text("Another item has two versions")
    expect(third.locator("#refused")).to_be_hidden()
    third.locator("#incoming a").click()
    expect(third.locator("#refused")).to_contain_text("theirs: in the")
    third.locator("#theirs").click()
    settled(third)
    (pattern,) = now(study, "K")
    assert pattern[0] in ("in the first", "in the second")


def enter_again(context, key):
    """Open an item in a browser that was offline."""
    context.set_offline(False)
    return opened(context.new_page(), key)


@pytest.mark.parametrize("scripts", [True, False])
def test_a_code_is_typed_a_form_saved_and_the_code_forgotten(browser, server, study, scripts):
    context = browser.new_context(base_url=server.address, java_script_enabled=scripts)
    page = context.new_page()
    page.goto("/annotate")
    page.locator("input[name=code]").fill(people(study)["LM"[scripts]].code)
    page.keyboard.press("Enter")
    expect(page.locator("input[name=code]")).to_have_count(0)
    assert [cookie["httpOnly"] for cookie in context.cookies()] == [True]
    if not scripts:
        page.goto(f"/annotate/{FIRST}")
        page.locator("textarea").first.fill("without scripts")
        page.locator("button[value=save]:visible").last.click()
        assert now(study, "L")[0][0] == "without scripts"
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


def test_adjudicators_take_patterns_and_share_a_sheet(enter, study):
    for name, kinds in (("H", ("shallow", "semantic")), ("I", ("semantic",))):
        person, version = people(study)[name], study.open_item(people(study)[name], FIRST).version
        listed = tuple(
            SheetPattern(f"{name}-{kind}", f"{kind} by {name}", kind, frozenset({1, 2, 3 + place}))
            for place, kind in enumerate(kinds)
        )
        study.save(person, FIRST, version, Sheet(listed, done=True), f"handed in by {name}")
    one, two = (enter("Judge", f"/adjudicate/{FIRST}") for _ in range(2))
    one.get_by_role("button", name="Take all of H").click()
    two.get_by_role("button", name="Take all of I").click()
    two.get_by_role("button", name="Take all of H").click()  # which the other has taken already
    for page in (one, two):
        settled(page)
        expect(page.locator("#patterns .pat")).to_have_count(3)  # without a reload
    own = study.adjudication(FIRST).own.sheet
    said = sorted(pattern.description for pattern in own.patterns)
    assert said == ["semantic by H", "semantic by I", "shallow by H"]
