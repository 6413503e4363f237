"""Reports of several models side by side: every verdict and every number is a report's own."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import ffmem
from ffmem.cli import cli
from ffmem.errors import FfmemError
from ffmem.experiments.base import FORMAT, NAMES, check_claims, find, find_all
from ffmem.experiments.comparison import (
    NOT_MEASURED,
    UNRECORDED,
    ReportComparison,
    memory_kind,
    read_report,
)
from ffmem.experiments.comparison_chart import COLORS, SHAPES, comparison_chart, panel_rows
from ffmem.experiments.definitions import definitions, kind_definitions
from tests.experiments.results import results
from tests.experiments.test_charts import data

RESULTS = Path(__file__).parents[2] / "docs" / "results"

GATED = {"activation": "silu", "vocabulary": 49152}
RELU = {"model": "hub/relu-16", "model_hash": "ef" * 32, "activation": "relu", "kind": "relu"}


def write(folder, n_layers, gated, without=(), **settings):
    """Write the results of a model as `ffmem report` does, and return their folder."""
    for one in results(n_layers, gated, **settings):
        if one.experiment not in without:
            one.write(folder)
    return folder


@pytest.fixture
def reports(tmp_path):
    """The reports of a gated model of 30 layers and of a ReLU model of 16."""
    gated = write(tmp_path / "gated", 30, True, **GATED)
    return [gated, write(tmp_path / "relu", 16, False, **RELU)]


@pytest.fixture
def few(reports):
    """The same reports with three experiments: drawing all of them takes most of the time."""
    for path in (path for folder in reports for path in folder.glob("*.json")):
        if path.stem not in ("patterns", "agreement", "stop-words"):
            path.unlink()
    return reports


@pytest.fixture(scope="module")
def committed():
    """The comparison of the reports in docs/results."""
    folders = ("smollm2-135m-wikitext-2", "mini-wiki")
    return ReportComparison([read_report(RESULTS / name) for name in folders])


def numbers(value):
    """Return every number in a value of JSON."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return set()
    if isinstance(value, int | float):
        return {value}
    parts = value.values() if isinstance(value, dict) else value
    return set().union(*map(numbers, parts))


def compare(folders, out):
    ffmem.compare_reports(folders, out)
    return json.loads((out / "comparison.json").read_text()), (out / "comparison.md").read_text()


# Verdicts and numbers


def test_every_verdict_is_that_of_the_models_own_report(reports, tmp_path):
    content, page = compare(reports, tmp_path / "out")
    assert [model["name"] for model in content["models"]] == ["relu-16", "smollm2-135m"]
    for folder, name in zip(reports, ("smollm2-135m", "relu-16"), strict=True):
        own = check_claims(list(read_report(folder).results.values()))
        assert [(one.claim, one.rule, one.paper) for one in own] == [
            (claim["claim"], claim["rule"], claim["paper"]) for claim in content["claims"]
        ]
        assert [(one.verdict, one.model, one.n) for one in own] == [
            tuple(claim["models"][name][field] for field in ("verdict", "shows", "n"))
            for claim in content["claims"]
        ]
        for one in own:
            assert f"**{one.verdict}** |" in page


def test_the_committed_reports_say_what_the_comparison_says(committed):
    for number, model in enumerate(committed.models):
        text = (model.folder / "report.md").read_text(encoding="utf-8")
        tally = {v: int(n) for v, n in re.findall(r"(\w[a-z ]+): \*\*(\d+)\*\*", text)}
        given = [claim.answers[number].verdict for claim in committed.claims]
        assert tally == {verdict: given.count(verdict) for verdict in dict.fromkeys(given)}


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_shows_numbers_of_the_json_and_nothing_else(name, committed):
    experiment = find(name)
    assert experiment.panels
    (figure,) = [one for one in committed.figures if one.experiment.name == name]
    for panel in experiment.panels:
        rows = panel_rows(panel, figure.results)
        for label, result in figure.results.items():
            known = numbers(result.to_dict())
            factor = 100 if panel.percent else 1
            scaled = {factor * number for number in known}
            own = [row for row in rows if row["model"] == label]
            for row in own:
                assert row["value"] in scaled
                assert row.get("control") is None or row["control"] in scaled
                if row.get("low") is not None:
                    assert row["low"] <= row["value"] <= row["high"]
                if "layer" in row:
                    assert row["depth"] == (row["layer"] - 0.5) / result.n_layers
    chart = comparison_chart(experiment, figure.results, committed.labels)
    drawn = numbers([row.get("value") for row in data(chart.to_dict())])
    wanted = set()
    for panel in experiment.panels:
        factor = 100 if panel.percent else 1
        if rows := panel_rows(panel, figure.results):
            wanted |= {row["value"] for row in rows}
            wanted |= {factor * mark.low for mark in panel.paper}
    assert drawn == wanted


def test_the_papers_numbers_in_charts_stand_in_its_text():
    for experiment in find_all():
        for mark in (mark for panel in experiment.panels for mark in panel.paper):
            assert mark.value in experiment.paper_values
            if mark.value.value == "about a third":
                assert mark.low == 1 / 3
                continue
            stated = set(map(float, re.findall(r"\d+(?:\.\d+)?", mark.value.value)))
            for end in (mark.low, mark.high):
                assert end is None or end in stated or round(100 * end, 6) in stated


def test_two_columns_of_a_row_never_change_places(reports):
    """A curve of the agreement rate is the rate of each layer, in order."""
    read = read_report(reports[1])
    (panel, _) = find("agreement").panels
    rows = panel_rows(panel, {"m": read.results["agreement"]})
    own = read.results["agreement"].rows
    assert [row["value"] for row in rows] == [100 * row["rate"] for row in own]
    assert [row["control"] for row in rows] == [100 * row["permutation"] for row in own]


# Kinds of memory


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"activation": "relu", "gated": False}, ("ReLU", "ReLU")),
        ({"activation": "gelu_new", "gated": False}, ("GELU", "GELU")),
        ({"activation": "silu", "gated": True}, ("gated", "gated (SiLU)")),
        ({"activation": "SiLUActivation", "gated": True}, ("gated", "gated (SiLU)")),
        ({"gated": True}, ("gated", "gated")),
        (
            {"activation": "silu", "gated": True, "experts": [0, 64]},
            ("experts", "experts, gated (SiLU)"),
        ),
        ({"activation": "relu", "gated": False, "kind": "softmax"}, ("softmax", "softmax")),
        ({"gated": False}, (UNRECORDED, "ungated, activation unknown")),
        ({}, (UNRECORDED, UNRECORDED)),
    ],
)
def test_the_kind_of_memory_comes_from_the_settings(settings, kind):
    assert memory_kind(settings) == kind


def test_an_index_records_what_names_the_kind(made, tmp_path):
    index, model, _ = made
    (result,) = ffmem.experiment("next-token-rank", index, tmp_path, model=model)
    assert memory_kind(result.settings) == ("gated", "gated (SiLU)")
    assert result.settings["format"] == FORMAT


def test_claims_are_sorted_by_whether_kinds_differ(committed):
    assert [len(claims) > 0 for _, claims in committed.by_difference] == [True, True, True]
    for title, claims in committed.by_difference:
        for claim in claims:
            judged = [{one.verdict for one in group} for group in claim.by_kind().values()]
            comparable = [
                one for one in judged if one <= {"holds", "holds in part", "does not hold"}
            ]
            assert (title == "Different verdicts") == (
                len(comparable) == 2 and comparable[0] != comparable[1]
            )


def test_definitions_of_a_kind_are_those_of_its_report():
    for settings in ({"gated": True}, {"gated": False}, {"gated": True, "experts": [4]}):
        every = definitions("none", settings | {"projection": "folded"})
        assert set(kind_definitions("none", settings)) <= set(every)


# What is missing


def test_an_experiment_that_a_model_lacks_is_named(reports, tmp_path):
    part = write(tmp_path / "part", 12, False, ("patterns", "agreement"), model="part")
    content, page = compare([reports[0], part], tmp_path / "out")
    assert "- Not measured: part: patterns, agreement." in page
    for claim in content["claims"]:
        lacks = claim["experiment"] in ("patterns", "agreement")
        assert (claim["models"]["part"]["verdict"] == NOT_MEASURED) == lacks
        assert claim["models"]["smollm2-135m"]["verdict"] != NOT_MEASURED
    (own,) = [model for model in content["models"] if model["name"] == "part"]
    assert own["missing"] == ["patterns", "agreement"]
    figure = page.split('<a id="agreement"></a>')[1].split("<a id=")[0]
    assert "- Not measured: part." in figure


def test_an_experiment_that_no_model_has_is_left_out(tmp_path):
    only = tmp_path / "only"
    results(12, True)[2].write(only)
    content, page = compare([only], tmp_path / "out")
    assert {claim["experiment"] for claim in content["claims"]} == {"agreement"}
    assert [path.name for path in (tmp_path / "out").glob("*.svg")] == ["agreement.svg"]
    assert "smollm2-135m: patterns, token-removal, next-token-rank" in page


def test_older_results_say_that_the_kind_is_not_recorded(tmp_path):
    old = write(tmp_path / "old", 12, False, NAMES[3:])
    for path in old.glob("*.json"):
        content = json.loads(path.read_text())
        del content["settings"]["gated"]
        path.write_text(json.dumps(content))
    content, _ = compare([old], tmp_path / "out")
    assert content["models"][0]["kind"] == UNRECORDED


def test_one_color_and_shape_per_model_up_to_forty():
    pairs = {(COLORS[n % len(COLORS)], SHAPES[n % len(SHAPES)]) for n in range(40)}
    assert len(pairs) == 40
    with pytest.raises(FfmemError, match="41 models were given; a chart can tell 40 apart"):
        comparison_chart(find("agreement"), {}, [str(n) for n in range(41)])


# Bad input


def test_bad_folders_are_refused_with_what_to_do(reports, tmp_path):
    out, empty = tmp_path / "out", tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FfmemError, match=r"There is no folder .*nowhere"):
        compare([tmp_path / "nowhere"], out)
    with pytest.raises(FfmemError, match=r"empty has no results: none of patterns.json, "):
        compare([empty], out)
    (empty / "manifest.json").write_text("{}")
    with pytest.raises(FfmemError, match="It is an index: run `ffmem report` on it first"):
        compare([reports[0], empty], out)
    with pytest.raises(FfmemError, match="No report was given"):
        compare([], out)
    with pytest.raises(FfmemError, match=r"reports is .* It must be Sequence"):
        compare(str(reports[0]), out)
    with pytest.raises(FfmemError, match="holds results of experiments"):
        compare(reports, reports[0])
    assert not out.exists()


def test_two_reports_of_one_model_need_names(few, tmp_path):
    again = shutil.copytree(few[0], tmp_path / "again")
    with pytest.raises(FfmemError, match=r"gated and .*again are both reports of smollm2-135m"):
        compare([few[0], again], tmp_path / "out")
    content, _ = compare([few[0], f"second={again}"], tmp_path / "out")
    assert [model["name"] for model in content["models"]] == ["smollm2-135m", "second"]


def test_results_of_two_models_in_one_folder_are_refused(reports, tmp_path):
    shutil.copy(reports[1] / "agreement.json", reports[0])
    with pytest.raises(FfmemError, match=r"has results of 2 models: hub/relu-16 \(efef"):
        compare(reports[:1], tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not an experiment's result"),
        (lambda text: text.replace('"seed": 0', '"seed": 0, "format": 2'), "has format 2; .*reads"),
        (lambda text: text.replace('"rate"', '"share_of"'), None),
        (lambda text: text.replace('"rate": ', '"rate": "x", "was": '), "cannot be read"),
        (lambda text: text.replace('"agreement",', '"stop-words",', 1), "holds the experiment"),
        (lambda text: text.replace('"low": ', '"low": "x", "was": '), "cannot be read"),
        (lambda text: '{"experiment": 1, "paper": 1, "settings": [], "rows": 1, "quoted": 1}',
         "settings must be an object"),
    ],
)  # fmt: skip
def test_damaged_results_and_other_formats_are_named(change, message, few, tmp_path):
    path = few[0] / "agreement.json"
    path.write_text(change(path.read_text()))
    if message is None:  # rows without the column have nothing to compare
        content, _ = compare(few, tmp_path / "out")
        shown = [one["models"]["smollm2-135m"] for one in content["claims"]]
        assert {"verdict": "cannot be compared", "shows": "–", "n": "–"} in shown
        return
    with pytest.raises(FfmemError, match=f"agreement.json.*{message}"):
        compare(few, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_from_results_are_shown_and_do_nothing(tmp_path):
    odd = write(tmp_path / "odd", 8, False, NAMES[3:], model="a|b <script>`x`")
    ffmem.compare_reports([odd], tmp_path / "out")
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "<script" not in page
    assert "a|b &lt;script&gt;`x`" in page
    assert r"a\|b &lt;script&gt;\`x\`" in (tmp_path / "out" / "comparison.md").read_text()


# Files and the command


def test_the_same_reports_give_the_same_bytes(reports, tmp_path):
    outs = tmp_path / "one", tmp_path / "two"
    for out in outs:
        ffmem.compare_reports(reports, out)
    names = sorted(path.name for path in outs[0].iterdir())
    assert names == sorted(
        [
            *(f"{name}.svg" for name in NAMES),
            *(f"comparison.{end}" for end in ("html", "json", "md")),
        ]
    )
    for name in names:
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()


def test_a_page_leads_to_the_reports_that_have_one(reports, tmp_path):
    (reports[1] / "report.md").write_text("# A report\n")
    _, page = compare(reports, tmp_path / "pages" / "out")
    assert "| [relu-16](../../relu/report.md) | ReLU |" in page
    assert "| smollm2-135m | gated (SiLU) |" in page
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert (tmp_path / "pages" / "out" / link).exists()
    for anchor in re.findall(r"\]\(#([^)]+)\)", page):
        assert f'<a id="{anchor}"></a>' in page


def run(*arguments):
    return CliRunner().invoke(cli, ["report", *map(str, arguments)])


def test_the_command_writes_the_comparison(reports, tmp_path):
    done = run("--compare", *reports, "--out", tmp_path / "out")
    assert (done.exit_code, done.output) == (0, f"Wrote {tmp_path / 'out' / 'comparison.html'}.\n")
    named = run("--compare", f"other={reports[0]}", "--out", tmp_path / "named")
    assert named.exit_code == 0
    assert "| other |" in (tmp_path / "named" / "comparison.md").read_text()


def test_the_command_refuses_what_does_not_fit(reports, tmp_path):
    out = ("--out", tmp_path / "out")
    sampled = run("--compare", *reports, *out, "--sample", 5, "--corpus", "x")
    assert sampled.exit_code == 2
    assert "it takes no --corpus, --sample" in sampled.output
    several = run(*reports, *out, "--corpus", "x")
    assert several.exit_code == 2
    assert "add --compare" in several.output
    assert "Missing option '--corpus'" in run(reports[0], *out).output
    assert run("--compare", *out).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_pages_name_only_figures_that_are_there_and_link_to_any_folder(tmp_path):
    relu = write(tmp_path / "my report (v2)", 16, False, **RELU)
    path = relu / "agreement.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps(result | {"rows": []}))
    for suffix in (".md", ".html"):
        (relu / f"report{suffix}").write_text("a report")
    ffmem.compare_reports([relu], tmp_path / "out")
    for suffix in (".md", ".html"):
        page = (tmp_path / "out" / f"comparison{suffix}").read_text()
        assert f"../my%20report%20%28v2%29/report{suffix}" in page
    assert not (tmp_path / "out/agreement.svg").exists()
    markdown = (tmp_path / "out/comparison.md").read_text()
    assert "](agreement.svg)" not in markdown
    assert "](next-token-rank.svg)" in markdown
