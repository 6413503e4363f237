"""What tests of the explorer share: tiny models with their indexes, and the app over them."""

import pytest
from playwright.sync_api import expect, sync_playwright
from starlette.testclient import TestClient

import ffmem
from ffmem.web.app import make_app
from ffmem.web.catalog import Catalog
from ffmem.web.worker import ModelWorker
from tests.conftest import text_model
from tests.experiments.results import results
from tests.web.browser import FLAGS, browser_path

expect.set_options(timeout=20_000)  # a busy machine is not a wrong page

HOSTILE = [
    "<script>document.title='owned'</script> was written on the wall",
    'An "onmouseover=alert(1)" <img src=x onerror=alert(1)> stood there & there',
    "{{ 7 * 7 }} {% raw %} and ${7*7} are not arithmetic",
    "</pre></script><!-- a comment that never ends",
    "javascript:alert(1) is no address",
]
"""Sentences that would do something, were they not escaped."""


@pytest.fixture(scope="session")
def served_folder(tokenizer, model_folder, corpus_file, tmp_path_factory):
    """An index of a gated model that lies in a folder, over lines of which some are hostile."""
    root = tmp_path_factory.mktemp("served")
    lines = root / "lines.txt"
    lines.write_text(
        corpus_file.read_text(encoding="utf-8") + "\n".join(HOSTILE) + "\n", encoding="utf-8"
    )
    corpus = ffmem.Corpus(str(lines), unit="line")
    ffmem.index(str(model_folder), corpus, root / "tiny", t=12, threads=1)
    return root / "tiny"


@pytest.fixture(scope="session")
def ungated_folder(tokenizer, corpus_file, tmp_path_factory):
    """An index of an ungated model that lies in a folder."""
    root = tmp_path_factory.mktemp("ungated-served")
    text_model("gpt2").save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    ffmem.index(str(root / "model"), corpus, root / "plain", t=6, threads=1)
    return root / "plain"


@pytest.fixture(scope="session")
def report_folder(served_folder, tmp_path_factory):
    """Results of every experiment but one, as if measured on the gated index."""
    folder = tmp_path_factory.mktemp("results")
    index = ffmem.open(served_folder)
    manifest = index.manifest
    settings = {"model_hash": manifest.model.hash, "corpus": {"hash": manifest.corpus.hash}}
    for result in results(index.n_layers, **settings):
        if result.experiment != "stop-words":
            result.write(folder)
    return folder


@pytest.fixture(scope="session")
def catalog(served_folder, ungated_folder, report_folder):
    """Two indexes: `tiny`, gated and with results, and `plain`, ungated and without."""
    return Catalog.open([served_folder, ungated_folder], [report_folder])


@pytest.fixture(scope="session")
def client(catalog):
    """A visitor of a site with both indexes, the gated one first."""
    with TestClient(
        make_app(catalog, ModelWorker(device="cpu")), "http://127.0.0.1:8800"
    ) as visitor:
        yield visitor


@pytest.fixture(scope="module")
def browser():
    """A real browser, if there is one."""
    if browser_path() is None:
        pytest.skip("no browser: install chromium, or name one by FFMEM_BROWSER")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS)
        yield started
        started.close()
