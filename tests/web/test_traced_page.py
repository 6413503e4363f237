"""Every number of the page is the library's own, and every link keeps what it does not change."""

from urllib.parse import parse_qs, urlsplit

import pytest

import ffmem
from ffmem.cells import Cell
from ffmem.web.state import State
from ffmem.web.traced_page import COLUMNS, Look, Measured, TracedPage, listed

TEXT = "The river runs"
OFF = Cell(1, 3)


@pytest.fixture(scope="module", params=["served_folder", "ungated_folder"])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def trace(folder):
    return ffmem.trace(folder, TEXT, off=[OFF], scale={"L0N2": 40.0}, generate=3, grid=True)


@pytest.fixture(scope="module")
def plain(folder):
    return ffmem.trace(folder, TEXT, grid=True)


STATE = State(text=TEXT, off=(OFF,), scale=((Cell(0, 2), 40.0),))


def query(href):
    return {name: value[-1] for name, value in parse_qs(urlsplit(href).query).items()}


@pytest.mark.parametrize("view", ["before", "ff", "after"])
@pytest.mark.parametrize("run", ["plain", "edited", "changes"])
def test_the_grid_shows_the_chosen_vector_of_the_chosen_run(trace, view, run):
    page = TracedPage(trace, STATE, Look(view=view, run=run))
    rows = page.rows()
    vector = {"before": "residual", "ff": "ff", "after": "output"}[view]
    shown = trace.grid if run == "plain" else trace.edited_grid
    assert [row.layer for row in rows] == list(reversed(range(len(trace.layers))))
    changed = 0
    for row in rows:
        for position, cell in enumerate(row.cells):
            place = shown[row.layer][position]
            chance = getattr(place, vector)
            other = getattr(trace.grid[row.layer][position], vector)
            assert (cell.token, cell.probability) == (chance.token, chance.probability)
            assert cell.case == place.case
            assert cell.shade == f"p{round(chance.probability * 10)}"
            assert cell.changed == (chance.id != other.id)
            changed += cell.changed
            asked = query(cell.href)
            assert (asked["position"], asked["layer"]) == (str(position), str(row.layer))
            assert asked["off"] == "L1N3"
            assert cell.href.endswith(f"#L{row.layer}")
    if run != "plain":
        assert page.n_changed() == changed > 0


def test_a_cell_tells_all_three_vectors(plain):
    page = TracedPage(plain, State(text=TEXT), Look())
    place, cell = plain.grid[1][2], page.rows()[0].cells[2]
    for chance in (place.residual, place.ff, place.output):
        assert f"{100 * chance.probability:.0f}" in cell.title or chance.probability < 0.1
    assert place.case in cell.title
    assert cell.title.startswith("L1 at 2 ")


def test_predictions_stand_beside_each_other(trace):
    rows = TracedPage(trace, STATE, Look()).predictions()
    after = {chance.token: chance.probability for chance in trace.edited.output_top}
    before = {chance.token: chance.probability for chance in trace.output_top}
    assert [row.token for row in rows[: len(after)]] == list(after)
    for row in rows:
        assert row.before == before.get(row.token)
        assert row.after == after.get(row.token)
        if row.before is None:
            assert row.least[0] == min(before.values())
            assert row.change is None
        elif row.after is not None:
            assert row.change == row.after - row.before
    assert {row.token for row in rows} == {*before, *after}
    assert max(max(row.before_width, row.after_width) for row in rows) == pytest.approx(100)


def test_memories_are_those_of_the_run_that_is_looked_at(trace):
    for run, layers in (("plain", trace.layers), ("edited", trace.edited.layers)):
        cards = TracedPage(trace, STATE, Look(run=run)).layers()
        assert [card.layer for card in cards] == list(reversed(layers))
        for card in cards:
            assert [row.memory for row in card.memories] == card.layer.memories


def test_one_layer_is_open_the_chosen_one_or_where_the_prediction_settles(trace, plain):
    def opened(page):
        return [card.layer.layer for card in page.layers() if card.picked]

    assert opened(TracedPage(trace, STATE, Look(layer=0))) == [0]
    assert opened(TracedPage(plain, State(text=TEXT), Look())) == [plain.saturation]


def test_one_click_switches_a_memory_off_and_another_on_again(trace):
    page = TracedPage(trace, STATE, Look(run="plain", view="ff"))
    seen = set()
    for card in page.layers():
        for row in card.memories:
            asked = query(row.toggle)
            off = set(asked.get("off", "").split(",")) - {""}
            if row.edit is None:
                assert off == {"L1N3", str(row.memory.cell)}
                assert asked["scale"] == "L0N2=40"
            else:
                assert off == {"L1N3"} - {str(row.memory.cell)}
            assert (asked["view"], asked["run"], asked["text"]) == ("ff", "plain", TEXT)
            seen.add(row.edit is None)
    assert True in seen


def test_nobody_is_offered_more_edits_than_are_taken(folder, monkeypatch):
    numbers = {str(Cell(layer, memory)): 1.0 for layer in range(2) for memory in range(6)}
    state = State(text=TEXT, scale=tuple((Cell.parse(c), n) for c, n in numbers.items()))
    trace = ffmem.trace(folder, TEXT, scale=numbers, grid=True)

    def offered():
        page = TracedPage(trace, state, Look())
        return [row for card in page.layers() for row in card.memories]

    assert all(row.toggle for row in offered())
    monkeypatch.setattr("ffmem.web.traced_page.MOST_EDITS", len(numbers))
    for row in offered():
        assert (row.toggle is None) == (row.edit is None)


def test_effects_stand_beside_their_memories_with_signed_bars(folder, plain):
    cells = listed(plain, Look(layer=1))
    effect = ffmem.effect(folder, TEXT, cells=cells[:12], candidates=0, top=12)
    page = TracedPage(plain, State(text=TEXT), Look(effects=True), Measured(effect, len(cells)))
    changes = {memory.cell: memory.change for memory in effect.memories}
    rows = [row for card in page.layers() for row in card.memories]
    assert {row.memory.cell: row.effect for row in rows if row.effect is not None} == changes
    most = max(map(abs, changes.values()))
    for row in rows:
        begin, width = row.bar
        if row.effect is not None:
            assert width == pytest.approx(50 * abs(row.effect) / most)
            assert begin == pytest.approx(50 - width if row.effect < 0 else 50)


def test_the_open_layers_memories_are_measured_first_then_the_largest_shares(plain):
    cells = listed(plain, Look(layer=0))
    n = len(plain.layers[0].memories)
    assert {cell.layer for cell in cells[:n]} == {0}
    shares = {memory.cell: memory.share for layer in plain.layers for memory in layer.memories}
    rest = [shares[cell] for cell in cells[n:]]
    assert rest == sorted(rest, reverse=True)
    assert len(set(cells)) == len(shares)


def test_a_long_prompt_is_shown_in_parts_that_meet(folder):
    trace = ffmem.trace(folder, "a b c d e f " * 4, grid=True)
    n = len(trace.tokens)
    assert n > COLUMNS
    page = TracedPage(trace, State(text="x"), Look())
    assert trace.position in page.positions
    assert page.later is None
    assert int(query(page.earlier)["first"]) == max(0, page.first - COLUMNS)
    first = TracedPage(trace, State(text="x"), Look(first=0))
    assert first.positions == range(COLUMNS)
    assert first.earlier is None
    assert query(first.later)["first"] == str(COLUMNS)
    assert len(first.rows()[0].cells) == COLUMNS
    assert first.rows()[0].cells[5].token == trace.grid[-1][5].output.token


def test_an_address_holds_only_what_is_not_as_usual():
    assert Look().extra() == {}
    look = Look(view="ff", layer=0, effects=True, target=" in")
    assert look.extra() == {"view": "ff", "layer": 0, "effects": 1, "target": " in"}
    assert look.extra(view=None) == {"view": None, "layer": 0, "effects": 1, "target": " in"}
