"""The site in a real browser, used as a person uses it.

Every test ends with two questions: did anything ask another machine, and did anything complain?
"""

import re
import threading
from itertools import pairwise
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

import ffmem
from ffmem.indexing.memory import visible_token
from ffmem.web.app import make_app
from ffmem.web.worker import ModelWorker
from tests.web.browser import running
from tests.web.conftest import HOSTILE

TEXT = "The river runs through"


@pytest.fixture(scope="module")
def worker():
    return ModelWorker(device="cpu")


@pytest.fixture(scope="module")
def address(catalog, worker):
    with running(make_app(catalog, worker)) as place:
        yield place


@pytest.fixture
def visit(browser, address):
    """Open pages of visitors, and ask the two questions of all of them at the end."""
    asked, complaints, contexts = [], [], []

    def new(**options):
        context = browser.new_context(base_url=address, **options)
        contexts.append(context)
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
        page.on(
            "console",
            lambda message: (
                complaints.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        return page

    yield new
    for context in contexts:
        context.close()
    assert not complaints
    assert asked
    outside = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert not outside


@pytest.fixture(scope="module")
def model(catalog):
    """The model of the first index, loaded once."""
    return ffmem.load(catalog.get().index.manifest.model.source, device="cpu")


@pytest.fixture(scope="module")
def telling(catalog, model):
    """A memory whose absence changes the prediction after TEXT, and both predictions."""
    index = catalog.get().index
    effect = ffmem.effect(index, TEXT, top=60, candidates=60, model=model)
    for found in effect.memories:
        trace = ffmem.trace(index, TEXT, off=[found.cell], model=model)
        before, after = trace.output_top[0], trace.edited.output_top[0]
        if before.id != after.id:
            return str(found.cell), before, after
    raise AssertionError("no memory of the tiny model decides the prediction: choose another text")


def first_prediction(page):
    return page.locator(".predictions tbody tr").first.locator("td").first.inner_text()


def test_a_person_finds_a_memory_traces_it_and_switches_it_off(visit, catalog, telling):
    cell, before, after = telling
    page = visit()
    page.goto("/")
    token = catalog.get().index[cell].value.top[0].token.strip() or "river"
    page.fill("#q", token)
    page.press("#q", "Enter")
    page.wait_for_url("**/search?**")
    page.locator("#results a.mono").first.click()
    page.wait_for_url("**/m/L*")
    expect(page.locator("h1 .cell")).to_have_text(re.compile(r"^L\d+N\d+$"))
    # To the memory that decides, and from there to the trace.
    page.fill("#q", cell)
    page.locator("[role=option]").first.click()
    page.wait_for_url(f"**/m/{cell}**")
    page.get_by_role("link", name="Trace", exact=True).first.click()
    page.fill("#text", TEXT)
    page.get_by_role("button", name="Trace").click()
    expect(page.locator(".predictions")).to_be_visible()
    assert first_prediction(page) == visible_token(before.token)
    # One click: off, from the memory's own page; the edits follow back to the trace.
    page.fill("#q", cell)
    page.locator("[role=option]").first.click()
    page.get_by_role("link", name="Switch off").click()
    expect(page.locator(".active-edits")).to_contain_text(f"{cell} off")
    page.locator(".active-edits").get_by_role("link", name="Trace").click()
    result = page.locator(".active-edits .result b bdi")
    expect(result).to_have_text(visible_token(after.token))
    assert parse_qs(urlsplit(page.url).query)["off"] == [cell]
    # The address is the state: reload, Back, Forward, and another browser show the same.
    edited = page.url
    page.reload()
    expect(result).to_have_text(visible_token(after.token))
    page.go_back()
    expect(page.locator("h1 .cell")).to_have_text(cell)
    page.go_forward()
    expect(result).to_have_text(visible_token(after.token))
    friend = visit()
    friend.goto(edited)
    expect(friend.locator(".active-edits .result b bdi")).to_have_text(visible_token(after.token))
    # And on again.
    page.locator(".active-edits .undo").click()
    expect(page.locator(".active-edits")).to_have_count(0)
    assert first_prediction(page) == visible_token(before.token)


def test_the_grid_leads_to_every_position_and_layer(visit, catalog, model):
    page = visit()
    page.goto(f"/trace?text={TEXT}")
    trace = ffmem.trace(catalog.get().index, TEXT, grid=True, model=model)
    rows = page.locator("table.grid tbody tr")
    expect(rows).to_have_count(len(trace.layers))
    shown = [row.locator("td").all_inner_texts() for row in rows.all()]
    expected = [[visible_token(p.output.token) for p in places] for places in trace.grid]
    assert [[text.strip() for text in row] for row in shown] == expected[::-1]
    rows.nth(1).locator("td a").nth(2).click()
    page.wait_for_url("**position=2**")
    there = ffmem.trace(catalog.get().index, TEXT, position=2, model=model)
    assert first_prediction(page) == visible_token(there.output_top[0].token)
    chosen = len(trace.layers) - 2
    expect(page.locator(f"#L{chosen}")).to_have_attribute("open", "")


def test_exact_effects_come_when_asked_for(visit, catalog, model):
    page = visit()
    page.goto(f"/trace?text={TEXT}")
    page.get_by_role("link", name="Measure effects on").click()
    first = page.locator("table.effects tbody tr").first
    expect(first).to_be_visible()
    cell, number = first.locator("td").nth(0).inner_text(), first.locator("td").nth(1).inner_text()
    exact = ffmem.effect(catalog.get().index, TEXT, cells=[cell], model=model)
    assert float(number.replace("−", "-")) == pytest.approx(exact.memories[0].change, abs=6e-4)


def test_enter_in_the_number_field_applies_the_number(visit):
    page = visit()
    page.goto(f"/trace?text={TEXT}&layer=1")
    row = page.locator("#L1 table.memories tbody tr").first
    row.locator("details.change summary").click()
    row.get_by_placeholder("number").fill("7.25")
    row.get_by_placeholder("number").press("Enter")
    expect(page.locator(".active-edits")).to_contain_text("× 7.25")


def test_a_target_that_is_no_token_leaves_the_trace(visit):
    page = visit()
    page.goto(f"/trace?text={TEXT}&effects=1&target=no such token at all")
    expect(page.locator("#effects [role=alert]")).to_contain_text("is not one token")
    expect(page.locator(".predictions")).to_be_visible()


def test_switching_in_a_layer_opened_by_hand_stays_there(visit):
    page = visit()
    page.goto(f"/trace?text={TEXT}")
    opened = page.locator("details.layer[open]").get_attribute("id")
    other = "L0" if opened != "L0" else "L1"
    page.locator(f"#{other} > summary").click()
    page.locator(f"#{other} td.acts a").first.click()
    expect(page.locator(".active-edits")).to_be_visible()
    expect(page.locator(f"#{other}")).to_have_attribute("open", "")


def test_the_theme_follows_the_system_until_somebody_chooses(visit):
    page = visit(color_scheme="dark")
    page.goto("/")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(paper)
    assert dark != light
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(paper) == dark
    page.goto("/layer/0")
    assert page.evaluate(paper) == dark
    page.keyboard.press("d")
    assert page.evaluate(paper) == light
    page.reload()
    assert page.evaluate(paper) == light


def test_the_keyboard_alone_is_enough(visit, catalog):
    index = catalog.get().index
    page = visit()
    page.goto("/")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "q"
    page.keyboard.type("L1N3")
    expect(page.locator("[role=option]").first).to_be_visible()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/m/L1N3**")
    page.keyboard.press("j")
    page.wait_for_url("**/m/L1N4**")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url("**/m/L1N3**")
    page.keyboard.press("k")
    page.wait_for_url("**/m/L1N2**")
    page.keyboard.press("t")
    page.wait_for_url("**/trace**")
    page.locator("#text").focus()
    page.keyboard.type("The river j k / t")  # keys are letters in a field
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".predictions")).to_be_visible()
    page.wait_for_load_state()  # a page that comes in two parts is seen before it hears keys
    page.keyboard.press("h")
    page.wait_for_url(re.compile(r"/\?text="))
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.goto("/layer/0")
    page.keyboard.press("r")
    page.wait_for_url("**/m/L*")
    page.goto("/layer/0")
    page.keyboard.press("j")
    page.wait_for_url("**/layer/0?page=2**" if index.layout.widths[0] > 50 else "**/layer/1**")


def test_tab_reaches_everything_and_shows_where_it_is(visit):
    page = visit()
    page.goto("/m/L1N3")
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate(
                "(() => {const e = document.activeElement, s = getComputedStyle(e);"
                " return (e.textContent.trim() || e.id) + '|' + (s.outlineStyle !== 'none' ||"
                " s.boxShadow !== 'none' || !!e.closest('.find'))})()"
            )
        )
    assert any(text.startswith("Switch off|") for text in seen)
    assert not [text for text in seen if text.endswith("|false")]


def test_pointing_at_a_box_shows_its_edges(visit):
    page = visit()
    page.goto(f"/circuit?text={TEXT}&nodes=8")
    box = page.locator("svg.circuit g.node").first
    box.hover()
    expect(page.locator("#readout")).to_contain_text(box.get_attribute("data-id"))
    near = page.locator("svg.circuit .edge.near")
    id = box.get_attribute("data-id")
    assert (
        near.count()
        == page.locator(f'.edge[data-source="{id}"], .edge[data-target="{id}"]').count()
    )


PAGES = [
    "/",
    "/layers",
    "/layer/0",
    "/m/L1N3?interval=2",
    "/m/L1N3?off=L0N1&set=L0N2=2.5",
    "/m/L0N0?similar=value&tokens=true",
    "/search?q=river",
    "/search",
    "/trace",
    f"/trace?text={TEXT}&off=L0N1&effects=1",
    f"/circuit?text={TEXT}&nodes=8&pin=L0N1@1&groups=some:L0N2@1,L1N3@1&without=some",
    "/figures",
    "/api",
    "/nowhere",
    "/m/L99N99",
    "/trace?text=" + "long " * 300,
]


@pytest.fixture(scope="module", params=PAGES, ids=lambda path: path[:24])
def looked_at(request, browser, address):
    """Every page, opened once for those who only look at it."""
    context = browser.new_context(base_url=address)
    page = context.new_page()
    page.goto(request.param)
    yield page
    context.close()


def test_every_page_can_be_read_aloud(looked_at):
    page = looked_at
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll(
            'input:not([type=hidden]), select, textarea, button, a[href], img, [role=img]')]
        .filter(e => e.offsetParent !== null)
        .filter(e => !(e.labels?.length || e.textContent.trim() || e.querySelector('title')
            || ['aria-label', 'aria-labelledby', 'alt'].some(name => e.getAttribute(name))))
        .map(e => e.outerHTML.slice(0, 120))"""
    )
    assert not unnamed
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.evaluate("document.documentElement.lang") == "en"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_no_page_is_wider_than_its_window(looked_at):
    for width in (390, 600, 820, 1000, 1320):
        looked_at.set_viewport_size({"width": width, "height": 844})
        assert looked_at.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("path", "name"), [("/trace", "Trace"), ("/circuit", "Find circuit")])
def test_the_button_is_beside_the_prompt(visit, path, name):
    page = visit(viewport={"width": 1320, "height": 844})
    page.goto(path)
    prompt = page.get_by_role("textbox", name="Prompt").bounding_box()
    button = page.get_by_role("button", name=name, exact=True).bounding_box()
    assert prompt["x"] + prompt["width"] < button["x"]
    assert prompt["y"] < button["y"] < prompt["y"] + prompt["height"]


def test_a_phone_is_enough(visit, telling):
    cell, _, after = telling
    page = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.goto(f"/m/{cell}?text={TEXT}")
    page.get_by_role("link", name="Switch off").tap()
    page.locator(".active-edits").get_by_role("link", name="Trace").tap()
    expect(page.locator(".active-edits .result b bdi")).to_have_text(visible_token(after.token))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_everything_works_without_scripts(visit, telling):
    cell, before, after = telling
    page = visit(java_script_enabled=False)
    page.goto("/")
    page.fill("#q", "river")
    page.press("#q", "Enter")
    page.locator("#results a.mono").first.click()
    expect(page.locator("h1 .cell")).to_be_visible()
    page.get_by_role("link", name="Trace", exact=True).first.click()
    page.fill("#text", TEXT)
    page.get_by_role("button", name="Trace").click()
    expect(page.locator(".predictions tbody tr").first).to_contain_text(visible_token(before.token))
    page.goto(f"/m/{cell}?text={TEXT}")
    page.get_by_role("link", name="Switch off").click()
    page.locator(".active-edits").get_by_role("link", name="Trace").click()
    expect(page.locator(".active-edits .result b bdi")).to_have_text(visible_token(after.token))
    page.goto("/layer/0")
    page.locator("a[rel=next]").click()
    expect(page.locator("h1")).to_contain_text("L1")
    page.goto("/figures")
    assert page.locator("figure, .chart").count() > 3


def test_figures_are_drawn_and_lead_to_layers(visit):
    page = visit()
    page.goto("/figures")
    chart = page.locator(".chart").first
    expect(chart.locator("svg.marks, canvas").first).to_be_visible()
    page.goto("/layer/0")
    marks = page.locator(".chart svg.marks, .chart canvas").first
    expect(marks).to_be_visible()
    with page.expect_download() as started:
        page.goto("/figures")
        page.get_by_role("link", name="SVG").first.click()
    assert started.value.suggested_filename.endswith(".svg")


def test_a_page_that_waits_says_for_what_and_how_long(visit, worker, monkeypatch):
    held, run = threading.Event(), ModelWorker.run

    async def slowly(self, served, job, request=None):
        return await run(self, served, lambda at: (held.wait(20), job(at))[1], request)

    monkeypatch.setattr(ModelWorker, "run", slowly)
    page = visit(java_script_enabled=False)
    page.goto("/m/L1N3?similar=value", wait_until="commit")
    shown = page.locator(".waiting:visible")
    expect(shown).to_have_text(re.compile(r"^Running the model … [12] s$"))
    expect(shown).to_have_count(1)
    held.set()
    expect(page.locator("#similar tbody tr").first).to_be_visible()
    expect(page.locator(".waiting:visible")).to_have_count(0)


def test_every_token_of_the_shown_triggers_is_tinted_without_a_click(visit, worker, catalog):
    worker.load(catalog.get()).result(60)
    index = catalog.get().index
    page = visit()
    page.goto("/m/L1N3")
    first = index["L1N3"].triggers[0]
    tokens = page.locator("#t1 .t")
    expect(tokens).to_have_count(first.length)
    shown = tokens.last.get_attribute("title").replace("−", "-")
    assert float(shown) == pytest.approx(first.coefficient, rel=1e-2)
    expect(page.locator("#lists .trigger[data-at]:visible")).to_have_count(0)
    folded = page.locator("#lists details:not([open]) > summary").first
    if folded.count():
        folded.click()
        expect(page.locator("#lists .trigger[data-at]:visible")).to_have_count(0)
    page.get_by_role("navigation", name="Prefixes by coefficient").get_by_role("link").nth(
        3
    ).click()
    expect(page.locator("#range")).to_be_visible()
    expect(page.locator("#lists .trigger[data-at]:visible")).to_have_count(0)


def test_the_search_box_finds_a_layer_and_the_keys_keep_its_sorting(visit):
    page = visit()
    page.goto("/")
    page.fill("#q", "L1")
    page.locator("[role=option]").first.click()
    page.wait_for_url("**/layer/1")
    page.get_by_role("link", name="max", exact=True).click()
    page.wait_for_url("**/layer/1?sort=-max")
    cells = page.locator("table.memories tbody a.mono").all_inner_texts()
    page.locator("table.memories tbody a.mono").first.click()
    page.wait_for_url(f"**/m/{cells[0]}?sort=-max")
    page.keyboard.press("j")
    page.wait_for_url(f"**/m/{cells[1]}?sort=-max")
    page.goto("/layer/0?sort=-max")
    page.keyboard.press("j")
    page.wait_for_url("**/layer/1?sort=-max")


def test_the_header_stands_over_the_content_and_a_phone_finds_search_in_it(visit):
    page = visit(viewport={"width": 1600, "height": 900})
    page.goto("/layers")
    left = "document.querySelector('{}').getBoundingClientRect().left"
    assert page.evaluate(left.format(".brand")) == page.evaluate(left.format("main h1"))
    page.set_viewport_size({"width": 390, "height": 844})
    expect(
        page.get_by_role("navigation", name="Pages").get_by_role("link", name="Search")
    ).to_be_visible()


def test_hostile_sentences_are_text(visit, catalog):
    index = catalog.get().index
    page = visit()
    page.goto("/search?q=script&in=triggers")
    assert "owned" not in page.title()
    expect(page.locator("#results")).to_contain_text("<script>")
    cells = [
        str(cell) for cell in index if any("<img src=x" in t.prefix for t in index[cell].triggers)
    ]
    page.goto(f"/m/{cells[0]}?tokens=true")
    expect(page.locator("main")).to_contain_text("<img src=x onerror")
    for sentence in HOSTILE:
        page.goto("/trace")
        page.fill("#text", sentence)
        page.get_by_role("button", name="Trace").click()
        expect(page.locator(".predictions")).to_be_visible()
        assert page.title() == "Trace · ffmem"
        page.fill("#q", sentence[:20])
        expect(page.locator("#suggestions")).not_to_be_empty()
    assert page.locator("main img[src=x]").count() == 0


def test_several_indexes_stand_side_by_side(visit, catalog):
    page = visit()
    page.goto("/m/L1N3")
    page.select_option("#index", "plain")
    page.wait_for_url("**index=plain**")
    expect(page.locator("h1 .cell")).to_have_text("L1N3")
    top = catalog.get("plain").index["L1N3"].value.top[0].token
    expect(page.locator("h1")).to_contain_text(visible_token(top))
    page.keyboard.press("j")
    page.wait_for_url("**/m/L1N4?index=plain**")
    page.goto("/search?q=river&in=triggers")
    page.select_option("#index", "plain")
    page.wait_for_url("**index=plain**")
    assert parse_qs(urlsplit(page.url).query)["q"] == ["river"]
