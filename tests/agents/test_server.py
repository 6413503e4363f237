"""Agents: the real client of the package `mcp` talks to `ffmem mcp` over stdin and stdout."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import anyio.from_thread
import jsonschema
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.server.mcpserver.exceptions import ToolError

import ffmem
from ffmem.agents.server import MAX_ROWS, TOOLS, _bounded
from tests.sharing.test_sharing import add_patterns
from tests.test_cli import run

ENVIRONMENT = {"PYTHONPATH": str(Path(ffmem.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
PROMPT = "The quick brown fox"


class Agent:
    """A client that calls tools and reads resources, without `async`."""

    def __init__(self, portal, client):
        self.portal, self.client = portal, client

    def ask(self, tool, **arguments):
        """Return the JSON of a tool's answer; it must be in its text and its structure alike."""
        answer = self.portal.call(self.client.call_tool, tool, arguments)
        assert not answer.is_error, answer.content[0].text
        assert json.loads(answer.content[0].text) == answer.structured_content
        return answer.structured_content

    def fail(self, tool, **arguments):
        """Return what the tool says when it fails."""
        answer = self.portal.call(self.client.call_tool, tool, arguments)
        assert answer.is_error
        text = answer.content[0].text
        assert "Traceback" not in text
        return text

    def read(self, uri):
        (found,) = self.portal.call(self.client.read_resource, uri).contents
        return found.text


@contextmanager
def agent_of(*arguments):
    command = ["-m", "ffmem", "mcp", *map(str, arguments)]
    server = StdioServerParameters(command=sys.executable, args=command, env=ENVIRONMENT)
    with (
        Path(os.devnull).open("w") as nowhere,
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(stdio_client(server, errlog=nowhere))) as client,
    ):
        yield Agent(portal, client)


@pytest.fixture(scope="module")
def index(model_folder, corpus_file, tmp_path_factory):
    """An index whose model can be loaded, with patterns and a report beside it."""
    folder = tmp_path_factory.mktemp("agents") / "tiny"
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    index = ffmem.index(str(model_folder), corpus, folder, t=6, threads=1)
    add_patterns(folder)
    ffmem.experiment("max-probability", index, folder.with_name("tiny-report"))
    (folder.with_name("tiny-report") / "report.md").write_text("# Report\n")
    return index


@pytest.fixture(scope="module")
def agent(index):
    with agent_of(index.folder) as agent:
        yield agent


def close(found, expected):
    """Return whether two JSONs are the same but for rounding."""
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=1e-5, abs=1e-12)
    if isinstance(expected, dict):
        return all(close(found[name], value) for name, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return found == expected


def test_every_tool_has_a_schema_and_says_what_it_does(agent):
    tools = agent.portal.call(agent.client.list_tools).tools
    assert [tool.name for tool in tools] == list(TOOLS)
    for tool in tools:
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        assert tool.description
        assert tool.annotations.read_only_hint
        assert tool.input_schema["additionalProperties"] is False
        for parameter in tool.input_schema.get("properties", {}).values():
            assert parameter.get("description") or "minLength" in parameter, tool.name


def test_the_indexes_are_listed_without_loading_a_model(agent, index):
    (about,) = agent.ask("list_indexes")["indexes"]
    assert about["name"] == "tiny"
    assert about["layers"] == index.n_layers
    assert about["patterns"] == ["automatic"]
    assert about["figures"] == ["max-probability"]


def test_tools_answer_what_the_functions_return(agent, index):
    shown = agent.ask("show", cell="L1N3", triggers=2, tokens=3)
    expected = index["L1N3"].to_dict()
    assert shown["n_triggers"] == len(expected["triggers"])
    assert close(shown["triggers"], expected["triggers"][:2])
    assert close(shown["value"]["bottom"], expected["value"]["bottom"][:3])
    assert close(shown["stats"], expected["stats"])

    for place in ("values", "triggers", "patterns"):
        found = agent.ask("search", query="a", place=place, limit=5)[place]
        hits = ffmem.search(index, "a", place, limit=5)
        assert found == {"total": hits.total, "hits": [hit.to_dict() for hit in hits]}
    assert set(agent.ask("search", query="a")) == {"values", "triggers", "patterns"}

    stats = index.table("stats", layer=1).sort_by([("max", "descending")]).to_pylist()
    rows = agent.ask("layer_statistics", layer=1, sort="max", limit=3, offset=1)
    assert close(rows["memories"], stats[1:4])
    assert rows["total"] == len(stats)
    layers = agent.ask("layer_statistics")["layers"]
    assert [row["max"] for row in layers] == pytest.approx(
        [index.columns("stats", layer)["max"].max() for layer in range(2)], rel=1e-5
    )
    patterns = agent.ask("patterns", layer=1, kind="shallow", limit=100)
    assert patterns["total"] == len(patterns["patterns"]) == 12
    (one,) = agent.ask("patterns", cell="L1N4")["patterns"]
    assert one["description"] == "ends with L1N4"


@pytest.mark.parametrize(
    "filters",
    [
        {"sign": 1},
        {"sign": -1},
        {"rank": 1},
        {"bank": "dense", "layer": 1},
        {"kind": "shallow"},
        {"kind": "semantic"},
        {"min_active": 0.5},
        {"max_active": 0.5},
    ],
    ids=str,
)
def test_search_filters_as_the_function_does(filters, agent, index):
    found = agent.ask("search", query="e", limit=3, **filters)
    groups = ffmem.search(index, "e", limit=3, **filters).to_dict()["groups"]
    assert found == {one["place"]: {"total": one["total"], "hits": one["hits"]} for one in groups}
    everything = agent.ask("search", query="e", limit=3)
    assert found != everything
    assert all(found[place]["total"] <= everything[place]["total"] for place in everything)


def test_every_filter_of_search_is_an_argument(agent):
    tools = {tool.name: tool for tool in agent.portal.call(agent.client.list_tools).tools}
    function = set(inspect.signature(ffmem.search).parameters) - {"folder"}
    assert set(tools["search"].input_schema["properties"]) == function | {"index"}


@pytest.mark.parametrize(
    ("tool", "arguments", "unknown", "known"),
    [
        ("search", {"query": "a", "offset": 20, "Sign": -1}, "'offset' or 'Sign'", "query, place,"),
        ("trace", {"prompt": PROMPT, "chat": True}, "'chat'", "prompt, off, set, scale, mean,"),
        ("trace", {"chat": None}, "'chat'", "prompt, off, set, scale, mean,"),
        ("list_indexes", {"name": "tiny"}, "'name'", "none."),
    ],
)
def test_unknown_arguments_are_refused(tool, arguments, unknown, known, agent):
    said = agent.fail(tool, **arguments)
    assert said.startswith(f"{tool} has no argument {unknown}. Its arguments: {known}")


def test_prompts_run_as_the_functions_run_them(agent, index):
    options = {"off": ["L1N3"], "top": 2, "generate": 3}
    traced = agent.ask("trace", prompt=PROMPT, layers=[1], **options)
    expected = ffmem.trace(index, PROMPT, **options).to_dict()
    assert close(traced["output_changes"], expected["output_changes"])
    assert close(traced["layers"], expected["layers"][1:])
    assert traced["edited_generated"] == expected["edited_generated"]

    measured = agent.ask("effect", prompt=PROMPT, cells=["L0N1"], top=4, candidates=10)
    expected = ffmem.effect(index, PROMPT, cells=["L0N1"], top=4, candidates=10).to_dict()
    assert close(measured["memories"], expected["memories"])

    read = agent.ask("coefficients", prompt=PROMPT, cells=["L1N3", "1.4"])
    traced = ffmem.trace(index, PROMPT, top=24).to_dict()
    last = {one["cell"]: one["coefficient"] for one in traced["layers"][1]["memories"]}
    assert read["tokens"] == traced["tokens"][-len(read["tokens"]) :]
    for cell in ("L1N3", "L1N4"):
        assert read["coefficients"][cell][-1] == pytest.approx(last[cell], rel=1e-4)


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("search", {"query": "a", "limit": 10_000_000}, f"less than or equal to {MAX_ROWS}"),
        ("layer_statistics", {"layer": 0, "limit": 10_000_000}, "less than or equal to"),
        ("show", {"cell": "L0N0", "triggers": 10_000_000}, "less than or equal to"),
        ("effect", {"prompt": PROMPT, "candidates": 10_000_000}, "less than or equal to"),
        ("trace", {"prompt": "a" * 1_000_000}, "at most"),
        ("show", {"cell": "L9N9"}, "L9N9"),
        ("show", {"cell": "what"}, "what"),
        ("layer_statistics", {"layer": 7}, "layer 7"),
        ("search", {"query": "(", "regex": True}, "regular expression"),
        ("search", {"query": "a", "place": "keys"}, "'values'"),
        ("search", {"query": "a", "sign": 2}, "1 or -1"),
        ("search", {"query": "a", "bank": "E7"}, "There are: dense"),
        ("search", {"query": "a", "min_active": 2}, "less than or equal to 1"),
        ("patterns", {}, "either a cell or a layer"),
        ("trace", {"prompt": PROMPT, "off": ["L9N9"]}, "L9N9"),
        ("trace", {"prompt": PROMPT, "layers": [9]}, "layer 9"),
        ("effect", {"prompt": PROMPT, "target": "notatoken xx"}, "token"),
        ("coefficients", {"prompt": PROMPT, "cells": ["L0N0"] * 1000}, "at most 20"),
        ("show", {"cell": "L0N0", "index": "other"}, "Set index to one of: tiny"),
    ],
)
def test_errors_say_what_to_do(tool, arguments, message, agent):
    assert message in agent.fail(tool, **arguments)


def test_the_manifest_the_report_and_the_figures_are_resources(agent, index):
    listed = agent.portal.call(agent.client.list_resources).resources
    uris = [str(one.uri) for one in listed]
    names = ["manifest", "report", "figures/max-probability"]
    assert uris == [f"ffmem://tiny/{name}" for name in names]
    assert agent.read(uris[0]) == (index.folder / "manifest.json").read_text()
    assert agent.read(uris[1]) == "# Report\n"
    assert json.loads(agent.read(uris[2]))["experiment"] == "max-probability"
    with pytest.raises(MCPError):
        agent.read("ffmem://tiny/../../etc/passwd")


def test_several_indexes_are_told_apart_by_name(index, tiny_index, tmp_path):
    other = shutil.copytree(tiny_index.folder, tmp_path / "other")
    with agent_of(index.folder, other) as agent:
        names = [one["name"] for one in agent.ask("list_indexes")["indexes"]]
        assert names == ["tiny", "other"]
        assert "Set index to one of: tiny, other" in agent.fail("show", cell="L0N0")
        assert close(agent.ask("show", cell="L0N0", index="other"), {"cell": "L0N0"})
        (note,) = agent.ask("search", query="a", index="other")["notes"]
        assert "no patterns yet. Find them with `ffmem patterns detect" in note
        # The model of this index was in memory when it was made.
        said = agent.fail("trace", prompt=PROMPT, index="other")
        assert "was built from a model in memory" in said


def test_stdout_carries_the_protocol_alone_and_bad_folders_end_it(index, tmp_path):
    call = {"name": "trace", "arguments": {"prompt": PROMPT}}
    hello = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call},
    ]
    done = subprocess.run(
        [sys.executable, "-m", "ffmem", "mcp", str(index.folder)],
        input="".join(json.dumps(one) + "\n" for one in messages),
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line["jsonrpc"] == "2.0" for line in lines)

    (tmp_path / "partials").mkdir()
    for folder, message in (
        (tmp_path / "none", "There is no"),
        (tmp_path, "is being prepared"),
        ("hf:lab/tiny", "Run `ffmem pull lab/tiny DIR`"),
    ):
        code, out, err = run("mcp", folder)
        assert (code, out) == (1, "")
        assert message in err


def test_an_answer_is_bounded_and_has_numbers_that_json_has():
    with pytest.raises(ToolError, match=r"at most 100,000 are sent\. Request fewer"):
        _bounded(lambda: {"text": "x" * 200_000})()
    answer = _bounded(lambda: {"a": [1 / 3, float("inf")], "n": 7})()
    assert json.loads(answer.content[0].text) == {"a": [0.333333, None], "n": 7}


def test_the_guide_lists_every_tool_and_shows_a_session():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "agents.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(TOOLS)
    called = re.findall(r"^→ (\w+)\(", page, re.MULTILINE)
    assert {"search", "show", "coefficients", "effect", "trace"} <= set(called) <= set(TOOLS)
