import json
import re
import shlex
from copy import copy
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from ffmem.cli import cli
from ffmem.errors import FfmemError
from ffmem.experiments.charts import write_figure
from ffmem.experiments.render import write_report as write_page
from ffmem.experiments.report import index_commands, report_command
from ffmem.models.arguments import AdapterRecord
from tests.experiments.results import PAPERS, result, results
from tests.experiments.test_charts import emptied
from tests.experiments.test_drawing import HOSTILE
from tests.experiments.test_examples import rows_of


def write_report(folder, results, index):
    """Write a report with the files of its results, as `ffmem report` leaves them."""
    for one in results:
        one.write(folder)
        write_figure(one, folder)
    return write_page(folder, results, index)


VOID = {"meta", "br", "link", "img"}


class Reader(HTMLParser):
    """Collects what a page is made of, and checks that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.ids, self.links, self.text, self.open = [], [], [], "", []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src"):
                self.links.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(folder):
    return Reader((folder / "report.html").read_text(encoding="utf-8"))


def linked_well(folder):
    """Check that every link of both reports leads to something that is there."""
    page = read(folder)
    assert len(page.ids) == len(set(page.ids))
    text = (folder / "report.md").read_text(encoding="utf-8")
    links = re.findall(r"(?<!\\)\]\(([^)]*)\)", text)
    anchors = re.findall(r'<a id="([^"]*)"></a>', text)
    for link, known in [(one, page.ids) for one in page.links] + [(one, anchors) for one in links]:
        if link.startswith("#"):
            assert link[1:] in known, link
        else:
            assert (folder / link).is_file(), link
    return page


def with_cells_of(index, n_layers=None, gated=None, hostile=False):
    """Return all results, of the index's shape or another, with predictive values of the index."""
    rows = rows_of(index, 20)
    if hostile:
        rows = [row | {"token": HOSTILE} for row in rows]
    found = results(
        n_layers or index.n_layers, index.manifest.model.gated if gated is None else gated
    )
    return [
        replace(one, rows=rows) if one.experiment == "predictive-values" else one for one in found
    ]


@pytest.fixture(scope="module", params=["tiny_index", "ungated_index"])
def written(request, tmp_path_factory):
    """A report of each kind of index: the index, and the folder of the report."""
    index, folder = request.getfixturevalue(request.param), tmp_path_factory.mktemp("report")
    assert write_report(folder, with_cells_of(index), index) == folder / "report.html"
    return index, folder


def test_a_report_shows_every_figure_table_and_memory(written):
    index, folder = written
    page = linked_well(folder)
    assert page.elements.count("svg") == len(PAPERS)
    assert {*PAPERS, "claims", "examples", "table-2", "memories"} <= set(page.ids)
    cells = {id for id in page.ids if re.fullmatch(r"L\d+N\d+", id)}
    assert {row["cell"] for row in rows_of(index, 20)} <= cells
    assert all(f"ffmem show DIR {cell}" in page.text for cell in cells)
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert all(f"]({name}.svg)" in text for name in PAPERS)


def test_a_report_needs_no_network_and_no_script(written):
    _, folder = written
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?:[^\"\s<]*", html)) <= {"http://www.w3.org/2000/svg"}
    assert "script" not in read(folder).elements
    assert "@import" not in html
    assert "url(http" not in html


def test_the_same_results_give_the_same_bytes(written, tmp_path):
    index, folder = written
    write_report(tmp_path, with_cells_of(index)[::-1], index)
    before, after = (
        {path.name: path.read_bytes() for path in f.iterdir()} for f in (folder, tmp_path)
    )
    assert before == after
    assert len(before) == 3 * len(PAPERS) + 2


def test_hostile_tokens_are_text_everywhere(tiny_index, tmp_path):
    found = [
        replace(
            one,
            settings=one.settings | {"model": HOSTILE, "corpus": {"sources": [HOSTILE]}},
            also=one.also | {"rule": HOSTILE},
        )
        for one in with_cells_of(tiny_index, hostile=True)
    ]
    compositions = next(one for one in found if one.experiment == "last-layer-composition")
    for row in compositions.rows:
        row.update(prefix=HOSTILE, residual_top=HOSTILE, output_top5=[HOSTILE, "|`*_\n"])
    write_report(tmp_path, found, tiny_index)
    page = linked_well(tmp_path)
    assert "script" not in page.elements
    assert "<script>alert(1)</script>&\"'⟨00⟩⟨202e⟩\u05d0" in page.text
    for name in ("report.html", "report.md", *(f"{name}.svg" for name in PAPERS)):
        text = (tmp_path / name).read_text(encoding="utf-8")
        text = re.sub(r"^```sh\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert not [sign for sign in ("<script", "\x00", "\u202e") if sign in text], name
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert {line.count(" | ") for line in text.splitlines() if line.startswith("| [The ")} == {5}


def test_what_was_not_measured_is_left_out_and_said(tiny_index, tmp_path):
    write_report(tmp_path, [result("zero-agreement"), result("agreement")], tiny_index)
    page = linked_well(tmp_path)
    assert page.elements.count("svg") == 2
    assert "Figure 2 and Tables 1 and 3 (patterns" in page.text
    assert "Not measured: Removing a token of a trigger; Rank of the" in page.text
    assert "table-2" not in page.ids
    assert page.text.index("Agreement of keys") < page.text.index("Layers that no memory")
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Not measured: Removing" in text


def test_patterns_are_shown_where_there_are_annotations(tiny_index, tmp_path):
    write_report(tmp_path, [result("patterns", 4)], tiny_index)
    page = linked_well(tmp_path)
    assert "Figure 2 and Tables 1 and 3 (patterns" not in page.text
    assert "patterns" in page.ids


def test_missing_numbers_make_a_report_all_the_same(tiny_index, tmp_path):
    write_report(tmp_path, [emptied(one) for one in with_cells_of(tiny_index)], tiny_index)
    assert "None" not in linked_well(tmp_path).text


def test_one_layer_makes_a_report(tiny_index, tmp_path):
    write_report(tmp_path, with_cells_of(tiny_index, 1, False), tiny_index)
    assert "Not measured" not in read(tmp_path).text
    assert "cannot be compared" in linked_well(tmp_path).text


def test_no_experiment_makes_no_report(tiny_index, tmp_path):
    with pytest.raises(FfmemError, match=r"no experiment to report .* Measure at least one"):
        write_report(tmp_path, [], tiny_index)


def test_a_report_is_of_one_model_and_each_experiment_once(tiny_index, tmp_path):
    one = result("agreement", 2)
    for other in (result("prediction-cases", 2, model_hash="other"), one):
        with pytest.raises(
            FfmemError, match=r"was requested\. A report covers one model, with each"
        ):
            write_report(tmp_path, [one, other], tiny_index)


def test_the_report_says_how_to_repeat_it(tiny_index, tmp_path):
    removal = result("token-removal", 2, per_layer=10, triggers=20)
    write_report(tmp_path, [result("prediction-cases", 2), removal], tiny_index)
    text = read(tmp_path).text
    wanted = "ffmem report DIR --corpus wikitext-2:valid --out OUT --sample 4000 --seed 0"
    assert f"{wanted} --per-layer 10 --triggers 20" in text
    assert "-t 6 --prefixes best --dtype float32 --start auto --threads 1 --unit line" in text


def test_the_commands_ask_for_everything_that_was_asked_for(tiny_index):
    index, manifest = copy(tiny_index), tiny_index.manifest
    (source,) = manifest.corpus.sources
    asked = {"content_only": True, "limit": 9, "unit": "line", "column": "body", "batch_tokens": 77}
    adapter = AdapterRecord(source="lora", hash="1", base_hash="2")
    index.manifest = replace(
        manifest,
        model=replace(manifest.model, adapter=adapter),
        corpus=replace(manifest.corpus, sources=[replace(source, **asked), source]),
        compat="ff-layers",
    )
    first, second = (parsed(line) for line in index_commands(index))
    expected = asked | {"adapter": "lora", "compat": "ff-layers", "t": 6, "out": Path("DIR")}
    assert {name: first[name] for name in expected} == expected
    assert (second["corpus"], second["content_only"]) == (source.source, False)

    sample = {"corpus": "x.jsonl", "requested": 50, "draw": "tokens"} | asked
    found = parsed(report_command([result("prediction-cases", 2, sample=sample)]))
    expected = {"corpus": "x.jsonl", "sample": 50, "draw": "tokens"} | asked
    del expected["batch_tokens"]
    assert {name: found[name] for name in expected} == expected


def parsed(line):
    """Return the parameters of a command line."""
    ffmem, name, *arguments = shlex.split(line)
    assert ffmem == "ffmem"
    return cli.get_command(None, name).make_context(name, arguments).params


def test_data_tables_hold_every_row_and_count_layers_from_1(tiny_index, tmp_path):
    write_report(tmp_path, [result("next-token-rank", 3)], tiny_index)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    body = html.split('<details class="data">')[1]
    rows = re.findall(r"<tr>(.*?)</tr>", body)
    assert [re.sub(r"<[^>]*>", " ", row).split()[0] for row in rows] == ["layer", "1", "2", "3"]


def test_numbers_of_data_tables_read_as_people_write_them(tiny_index, tmp_path):
    one = result("next-token-rank", 1)
    one.rows[0].update(q1=14280.25, median=0.000123456, q3=7, n=14280)
    write_report(tmp_path, [one], tiny_index)
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "14,280" in text
        assert "0.0001235" in text
        assert "e+0" not in text


def test_a_result_is_written_and_read_as_it_is(tmp_path):
    one = result("agreement", 3)
    assert json.loads(one.write(tmp_path).read_text()) == one.to_dict()


def test_templates_are_part_of_the_package():
    there = {path.name for path in files("ffmem.experiments").joinpath("templates").iterdir()}
    assert {"report.html", "report.css"} <= there
