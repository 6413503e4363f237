"""An unfinished index on the explorer: it opens, says how far it is, and fills up."""

import json
import shutil
import subprocess
import sys
import threading
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient

import ffmem
from ffmem.indexing import worker
from ffmem.indexing.filters import Filters
from ffmem.indexing.partials import Partials
from ffmem.indexing.query import Query
from ffmem.indexing.search import search_values
from ffmem.web import catalog as catalog_module
from ffmem.web.app import make_app
from ffmem.web.catalog import Catalog
from ffmem.web.server import start_server
from tests.experiments.results import results
from tests.indexing.test_build import Killed, stop_after
from tests.patterns.planting import pattern, plant
from tests.web.browser import running

PAGES = ["/", "/layers", "/layer/1", "/layer/0?sort=-max", "/m/L1N3", "/search?q=river", "/figures"]


@pytest.fixture
def build(model_folder, corpus_file, tmp_path, monkeypatch):
    """Build an index in small chunks, each committed: `build(stop_after_commits=3)`."""
    monkeypatch.setattr(worker, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(worker, "COMMIT_SHARE", 0.0)
    monkeypatch.setattr(catalog_module, "REFRESH_SECONDS", 0.0)
    corpus = ffmem.Corpus(str(corpus_file), unit="line")

    def run(stop_after_commits=None, before=False):
        options = {"t": 6, "threads": 1, "chunk_tokens": 60, "batch_tokens": 60, "start": "eos"}
        with monkeypatch.context() as patch:
            if stop_after_commits is None:
                return ffmem.index(str(model_folder), corpus, tmp_path / "live", **options)
            stop_after(patch, stop_after_commits, before)
            with pytest.raises(Killed):
                ffmem.index(str(model_folder), corpus, tmp_path / "live", **options)
        return ffmem.open(tmp_path / "live")

    return run


@pytest.fixture
def visit():
    """Open a site over a catalog: `visit(catalog)`."""
    opened = []

    def enter(catalog):
        client = TestClient(make_app(catalog), "http://127.0.0.1:8800")
        opened.append(client.__enter__())
        return client

    yield enter
    for client in opened:
        client.__exit__(None, None, None)


def write_report(index, folder):
    manifest = index.manifest
    settings = {"model_hash": manifest.model.hash, "corpus": {"hash": manifest.corpus.hash}}
    for result in results(index.n_layers, **settings):
        result.write(folder)


def test_pages_of_an_unfinished_index_show_what_was_committed(build, visit, tmp_path):
    index = build(stop_after_commits=3)
    client = visit(Catalog.open([tmp_path / "live"]))
    tokens = index.manifest.corpus.tokens
    assert 0 < index.n_prefixes < tokens
    for path in PAGES:
        page = client.get(path)
        assert page.status_code == 200, path
        assert f"So far: {index.n_prefixes:,} of {tokens:,} tokens" in page.text
    progress = client.get("/api/progress").json()
    assert (progress["state"], progress["done"]) == ("stopped", False)
    assert (progress["tokens_read"], progress["tokens"]) == (index.n_prefixes, tokens)
    for cell in ("L0N0", "L1N3"):
        assert client.get(f"/api/m/{cell}").json() == index[cell].to_dict() | {"patterns": []}
    rows = client.get("/api/layer/1").json()["rows"]
    assert rows[3]["top"] == [token.token for token in index["L1N3"].value.top[:5]]
    assert str(tmp_path) not in client.get("/").text


def test_more_commits_fill_the_pages_and_the_manifest_switches_to_the_finished_index(
    build, visit, tmp_path
):
    first = build(stop_after_commits=2)
    client = visit(Catalog.open([tmp_path / "live"]))
    shown = [client.get("/api/progress").json()]
    assert shown[0]["tokens_read"] == first.n_prefixes
    second = build(stop_after_commits=2)
    shown.append(client.get("/api/progress").json())
    assert shown[1]["tokens_read"] == second.n_prefixes > first.n_prefixes
    assert client.get("/api/m/L1N3").json() == second["L1N3"].to_dict() | {"patterns": []}
    done = build()
    shown.append(client.get("/api/progress").json())
    assert (shown[2]["state"], shown[2]["tokens_read"]) == ("finished", done.n_prefixes)
    assert not shown[2]["done"]
    assert client.get("/api/m/L1N3").json() == done["L1N3"].to_dict() | {"patterns": []}
    assert len({one["version"] for one in shown}) == 3
    until = time.monotonic() + 20
    while not client.get("/api/progress").json()["triggers_searchable"]:
        assert time.monotonic() < until
        time.sleep(0.05)
    found = client.get("/api/search?q=river&in=triggers").json()["groups"]
    assert found[0]["total"] > 0
    plant(done, "automatic", pattern("L1N3"))
    write_report(done, tmp_path / "live-report")
    last = client.get("/api/progress").json()
    assert last["patterns"]
    assert last["figures"] > 10
    assert last["done"]
    assert "So far" not in client.get("/").text
    assert "data-progress" not in client.get("/").text
    assert client.get("/figures/agreement").status_code == 200


def test_values_can_be_searched_before_the_index_is_finished(build, visit, tmp_path):
    build(stop_after_commits=1)
    client = visit(Catalog.open([tmp_path / "live"]))
    answer = client.get("/api/search?q=river&limit=50").json()
    assert [group["name"] for group in answer["groups"]] == ["values"]
    page = client.get("/search?q=river").text
    assert "can be searched once the index is finished" in page
    refused = client.get("/api/search?q=river&in=triggers")
    assert refused.status_code == 422
    assert "cannot be searched yet" in refused.json()["error"]
    build()
    finished = visit(Catalog.open([tmp_path / "live"]))
    again = finished.get("/api/search?q=river&limit=50&in=values").json()
    assert again["groups"][0]["hits"] == answer["groups"][0]["hits"]


@pytest.mark.parametrize(
    "query",
    [
        Query("river"),
        Query("R", prefix=True),
        Query(r"^ ?[a-e]", regex=True),
        Query("nowhere at all"),
    ],
)
@pytest.mark.parametrize("layer", [None, 1])
def test_a_search_without_a_file_finds_what_one_with_a_file_finds(catalog, query, layer):
    for name in catalog.folders:
        served = catalog.get(name)
        filters = Filters(layer)
        found = served.search.search(query, "values", filters, 1, 7)
        assert search_values(served.index, query, filters, 1, 7) == found


def test_layers_without_values_say_so_and_have_triggers(build, visit, tmp_path):
    triggers = build(stop_after_commits=3)["L1N3"].triggers
    (tmp_path / "live" / "values" / "layer-001.parquet").unlink()
    client = visit(Catalog.open([tmp_path / "live"]))
    memory = client.get("/api/m/L1N3").json()
    assert memory["triggers"] == [one.to_dict() for one in triggers]
    assert memory["value"] is None
    assert "not computed yet" in client.get("/m/L1N3").text
    assert client.get("/api/m/L0N3").json()["value"]["top"]
    assert "values of 1 of 2 layers" in client.get("/layer/1").text
    for path in (*PAGES, "/layer/1?sort=top", "/api/layer/1?has=e", "/api/layer/1/spec"):
        assert client.get(path).status_code == 200, path


def test_before_the_first_commit_there_are_values_and_no_triggers(build, visit, tmp_path):
    build(stop_after_commits=1, before=True)
    client = visit(Catalog.open([tmp_path / "live"]))
    for path in PAGES:
        page = client.get(path)
        assert page.status_code == 200, path
        assert "So far: 0 of" in page.text
    memory = client.get("/api/m/L1N3").json()
    assert memory["triggers"] == []
    assert memory["value"]["top"]


def test_a_folder_that_does_not_exist_yet_is_waited_for(build, visit, tmp_path):
    catalog = Catalog.open([tmp_path / "live"], wait=True)
    client = visit(catalog)
    page = client.get("/")
    assert page.status_code == 503
    assert "is being prepared" in page.text
    assert 'http-equiv="refresh"' in page.text
    refused = client.get("/api/home")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert client.get("/api/progress").json()["state"] == "preparing"
    build(stop_after_commits=1)
    assert client.get("/").status_code == 200
    assert client.get("/api/progress").json()["state"] == "stopped"


def test_a_request_that_reads_while_the_run_finishes_gets_the_finished_index(
    build, visit, tmp_path, monkeypatch
):
    """The partials vanish between the look for news and the reading of a memory."""
    build(stop_after_commits=2)
    monkeypatch.setattr(catalog_module, "REFRESH_SECONDS", 1000.0)
    client = visit(Catalog.open([tmp_path / "live"]))
    done = build()
    page = client.get("/m/L1N3", follow_redirects=False)
    assert page.status_code == 307
    assert client.get("/api/m/L1N3").json() == done["L1N3"].to_dict() | {"patterns": []}


def test_news_are_read_by_one_request_while_others_get_what_was_there(build, tmp_path, monkeypatch):
    build(stop_after_commits=2)
    folder = Catalog.open([tmp_path / "live"]).folder()
    before = folder.current().index
    build(stop_after_commits=2)
    reading, go_on = threading.Event(), threading.Event()
    read = folder._read

    def slowly():
        reading.set()
        assert go_on.wait(20)
        read()

    monkeypatch.setattr(folder, "_read", slowly)
    first = threading.Thread(target=folder.current)
    first.start()
    assert reading.wait(20)
    assert folder.current().index is before
    go_on.set()
    first.join()
    assert folder._current.index is not before


def test_an_unchanged_run_is_not_read_again(build, tmp_path):
    build(stop_after_commits=2)
    folder = Catalog.open([tmp_path / "live"]).folder()
    assert folder.current().index is folder.current().index
    assert folder.current().search is folder.current().search


def test_an_index_that_was_finished_has_no_progress(client):
    assert client.get("/api/progress").json() is None
    assert "data-progress" not in client.get("/").text


def test_a_server_starts_before_the_index_and_ends_when_it_is_told(build, tmp_path):
    server = start_server(tmp_path / "live", tmp_path / "report", port=0)
    try:
        with pytest.raises(HTTPError, match="503") as refused:
            urlopen(server.url)
        refused.value.close()
        done = build()
        write_report(done, tmp_path / "report")
        until = time.monotonic() + 20
        progress = {}
        while not (progress.get("state") == "finished" and progress["figures"]):
            assert time.monotonic() < until, progress
            time.sleep(0.1)
            with urlopen(f"{server.url}api/progress") as answer:
                progress = json.load(answer)
    finally:
        server.stop()
    assert not server._process.is_alive()


def test_a_server_that_cannot_start_says_why(tmp_path, served_folder):
    server = start_server(served_folder, port=0)
    try:
        taken = int(server.url.rsplit(":", 1)[1].strip("/"))
        with pytest.raises(ffmem.errors.FfmemError, match=f"port {taken}"):
            start_server(served_folder, port=taken)
    finally:
        server.stop()


def mark(page):
    """Mark a page, so that one sees whether it was reloaded."""
    page.evaluate("document.documentElement.dataset.old = 'yes'")
    return page.locator("html[data-old]")


def test_a_browser_sees_the_index_grow_and_finish(build, tmp_path, browser):
    """While a run commits chunk after chunk, the bar moves and the page reloads by itself."""
    catalog = Catalog.open([tmp_path / "live"], wait=True)
    commit, steps = Partials.commit, threading.Semaphore(0)

    def paced(self, *found):
        commit(self, *found)
        steps.acquire(timeout=30)

    with running(make_app(catalog)) as address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partials, "commit", paced)
        run = threading.Thread(target=build)
        run.start()
        page = browser.new_page()
        complaints = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        try:
            page.goto(address)
            note = page.locator("#progress")
            expect(note).to_contain_text("So far", timeout=20_000)
            first = note.inner_text()
            old = mark(page)
            for _ in range(3):
                steps.release()
            expect(note).not_to_have_text(first, timeout=20_000)
            expect(old).to_have_count(0)  # it has reloaded itself
            page.goto(f"{address}/m/L1N3")
            expect(page.locator(".trigger").first).to_be_visible()
            old = mark(page)
        finally:
            for _ in range(1000):
                steps.release()
            run.join()
        # A page that somebody reads is not reloaded under their eyes.
        expect(note).to_contain_text("All", timeout=20_000)
        expect(old).to_have_count(1)
        note.get_by_role("link", name="Show the new results").click()
        expect(page.locator("h1 .cell")).to_have_text("L1N3")
        expect(old).to_have_count(0)
        assert not complaints
        page.close()
    shutil.rmtree(tmp_path / "live")


def test_a_script_without_a_main_guard_can_start_a_server(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from ffmem.web.server import start_server\n"
        f"server = start_server({str(tmp_path / 'index')!r}, port=0)\n"
        "print(server.url)\n"
        "server.stop()\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("http://127.0.0.1:")
    assert done.stdout.count("\n") == 1
