"""Circuits: a planted one is found whole, and exact numbers are those of ablations by hand."""

import json
import xml.etree.ElementTree as ElementTree
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ffmem
from docs.circuit_curves import faithfulness_curve
from ffmem.cli import cli
from ffmem.errors import CorpusError, FfmemError, ModelError
from ffmem.interventions.circuit import _estimate_edges, choose_nodes, circuit
from ffmem.interventions.circuit_ablations import (
    CircuitQuestion,
    _random_nodes,
    logit_slope,
    target_logit,
)
from ffmem.interventions.circuit_results import TARGET, parse_node, write_circuit
from ffmem.interventions.circuit_svg import draw_circuit
from ffmem.interventions.edits import Edits
from ffmem.interventions.forward import apply_edits, change_coefficients
from ffmem.interventions.partial_forward import PartialForward
from ffmem.interventions.relevance import Place
from ffmem.progress import Progress
from tests.conftest import text_model
from tests.interventions.planted import with_start
from tests.tiny import EXPERTS, TINY, read, tiny, tiny_tokenizer

TEXT = "w5 w9 w17 w30"
IDS = [0, 5, 9, 17, 30]


# A planted circuit


@pytest.fixture(scope="module")
def planted():
    """w30 → L0N3 → L1N7 → w11, and nothing else: all other weights of the blocks are 0."""
    memories = ffmem.load(tiny("gpt2 untied"), tiny_tokenizer())
    for name, weight in memories.model.named_parameters():
        if ".h." in name and "ln_" not in name:
            weight.zero_()
        if "ln_" in name:
            weight.fill_(float(name.endswith("weight")))
    trunk, unembedding = memories.model.transformer, memories.head.embedding
    trunk.wpe.weight.zero_()
    way = torch.zeros(16)
    way[0], way[1] = 1, -1  # neither embeddings nor outputs know this direction
    for table in (trunk.wte.weight, unembedding):
        table[:, :2] = 0
        table.sub_(table[:, 2:].mean(dim=1, keepdim=True))
        table[:, :2] = 0
    word = trunk.wte.weight[30]
    memories.keys(0)[3] = 2 * word / word.norm()
    memories.values(0)[3] = 4 * way
    memories.keys(1)[7] = 3 * way
    memories.values(1)[7] = 5 * (unembedding[11] - unembedding.mean(dim=0))
    return memories


def test_a_planted_circuit_is_found_and_nothing_else(planted):
    found = circuit(with_start(planted), TEXT)
    assert found.estimated_by == "relp"
    assert found.ablation == "zero"
    assert found.target.token == "w11"
    assert sorted(node.id for node in found.nodes) == ["L0N3@4", "L1N7@4"]
    edges = {(edge.source, edge.target): edge for edge in found.edges}
    between = {("token@4", "L0N3@4"), ("L0N3@4", "L1N7@4"), ("L1N7@4", TARGET)}
    assert between <= set(edges) <= between | {("token@4", TARGET)}
    lower, upper = sorted(found.nodes, key=lambda node: node.layer)
    for edge, node in ((edges["L0N3@4", "L1N7@4"], upper), (edges["token@4", "L0N3@4"], lower)):
        assert edge.exact == pytest.approx(node.coefficient, rel=1e-3)
    assert found.faithfulness == pytest.approx(1, abs=1e-4)
    assert found.completeness == pytest.approx(1, abs=1e-4)
    assert found.curve[-1].random_faithfulness == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(("off", "node"), [("lower", "L0N3@4"), ("upper", "L1N7@4")])
def test_without_either_memory_a_planted_circuit_ends(planted, off, node):
    groups = {"lower": ["L0N3@4"], "upper": ["L1N7@4"]}
    found = circuit(with_start(planted), TEXT, groups=groups, off=[off])
    (group,) = (one for one in found.groups if one.off)
    assert group.nodes == [node]
    assert found.switched_off.rank > 1
    assert found.switched_off.top[0].token != "w11"
    assert found.switched_off.logit == pytest.approx(found.logit - group.exact, abs=1e-4)
    assert group.exact > 0.8 * (found.logit - found.ablated_logit)
    assert group.exact == pytest.approx(
        next(one.exact for one in found.nodes if one.id == node), abs=1e-5
    )


# Exact numbers against ablations by hand, in every family


@pytest.fixture(scope="module", params=[*TINY, *EXPERTS, "gemma3n_text"])
def memories(request):
    return read(request.param)


def logit(memories, target):
    z = memories.logits(torch.tensor([IDS]))[0, -1].double()
    return float(z[target] if memories.head.adaptive else z[target] - z.mean())


def coefficient(memories, node):
    """The coefficient of a node in a pass; 0 if the router does not choose its expert."""
    cell, position = parse_node(node)
    cell = memories.layout.resolve(cell)
    found = [0.0]

    def keep(bank, coefficients, _, routing):
        if (bank.layer, bank.offset) == (cell.layer, cell.offset):
            rows = coefficients.reshape(-1, bank.size)[:, cell.memory - cell.offset]
            tokens = range(len(IDS)) if routing is None or routing.tokens is None else None
            tokens = tokens or routing.tokens.tolist()
            found.extend(float(rows[n]) for n, token in enumerate(tokens) if token == position)

    with memories.read_coefficients(keep):
        memories.forward(torch.tensor([IDS]))
    return found[-1]


def setting(memories, node, number):
    cell, position = parse_node(node)
    return apply_edits(memories, Edits.of(set={str(cell): number}, positions=[position]))


def test_exact_numbers_are_those_of_ablations_by_hand(memories):
    found = circuit(with_start(memories), TEXT, nodes=5, target="w11")
    whole = logit(memories, 11)
    assert found.logit == pytest.approx(whole, abs=2e-4)
    for node in found.nodes[:3]:
        assert coefficient(memories, node.id) == pytest.approx(node.coefficient, abs=1e-4)
        with setting(memories, node.id, 0.0):
            assert node.exact == pytest.approx(whole - logit(memories, 11), abs=5e-4)
    by_nodes = [edge for edge in found.edges if not edge.source.startswith("token")]
    to_nodes = [edge for edge in by_nodes if edge.target != TARGET]
    for edge in [*to_nodes[:2], *[edge for edge in by_nodes if edge.target == TARGET][:1]]:
        with ExitStack() as held:
            for node in found.nodes:
                if node.id not in (edge.source, edge.target):
                    held.enter_context(setting(memories, node.id, node.coefficient))
            held.enter_context(setting(memories, edge.source, 0.0))
            if edge.target == TARGET:
                expected = whole - logit(memories, 11)
            else:
                before = next(one for one in found.nodes if one.id == edge.target).coefficient
                expected = before - coefficient(memories, edge.target)
        assert edge.exact == pytest.approx(expected, abs=1e-3, rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen2_moe"])
def test_faithfulness_is_that_of_all_other_memories_off_by_hand(name):
    memories = read(name)
    found = circuit(with_start(memories), TEXT, nodes=4, target="w11")
    places = {(parse_node(node.id)[0].layer, node.memory, node.position) for node in found.nodes}

    def ablated(keep_nodes):
        def change(layer, rows):
            changed = rows.coefficients.clone()
            for row, token in enumerate(rows.tokens.tolist()):
                for number, memory in enumerate(rows.memories):
                    is_node = (layer, memory, token) in places
                    if token >= 1 and is_node != keep_nodes:
                        changed[row, number] = 0
            return changed

        with ExitStack() as hooks:
            for layer in memories.layout.memory_layers:
                edit = lambda rows, layer=layer: change(layer, rows)  # noqa: E731
                hooks.enter_context(change_coefficients(memories, layer, edit))
            return logit(memories, 11)

    alone, without = ablated(True), ablated(False)
    places_before, places = places, set()
    none = ablated(True)
    places = places_before
    assert found.ablated_logit == pytest.approx(none, abs=5e-4)
    whole = found.logit - none
    assert found.faithfulness == pytest.approx((alone - none) / whole, abs=2e-3)
    assert found.completeness == pytest.approx((found.logit - without) / whole, abs=2e-3)
    assert [point.nodes for point in found.curve] == [1, 2, 4]


def test_ablations_go_to_the_means_of_an_index(tiny_index, tokenizer):
    index, memories = tiny_index, ffmem.load(text_model("llama"), tokenizer)
    found = ffmem.circuit(index, "The river runs", nodes=3, model=memories)
    assert found.ablation == "mean"

    def logit_now():
        z = memories.logits(torch.tensor([found.token_ids]))[0, -1].double()
        return float(z[found.target.id] - z.mean())

    for node in found.nodes:
        assert node.baseline == pytest.approx(index[node.cell].stats.mean, abs=1e-5)
        with setting(memories, node.id, node.baseline):
            assert node.exact == pytest.approx(found.logit - logit_now(), abs=5e-4)
    zero = ffmem.circuit(index, "The river runs", nodes=3, ablation="zero", model=memories)
    assert {node.baseline for node in zero.nodes} == {0.0}


def test_the_mean_of_an_experts_memory_is_over_the_prefixes_that_reach_it(expert_index):
    found = ffmem.circuit(expert_index, "The river runs", nodes=8)
    for node in found.nodes:
        (edit,) = Edits.of(mean=[node.cell], index=expert_index)
        assert node.baseline == pytest.approx(edit.constant, abs=1e-5)


# Laws of the estimates


def test_edges_into_a_node_sum_to_its_coefficient():
    """Llama has no biases: tokens and nodes are everything that a node and the logit come from."""
    memories = read("llama")
    forward = PartialForward(memories, IDS, len(IDS) - 1)
    places = [Place(0, 3, 4), Place(0, 7, 2), Place(1, 5, 4), Place(1, 11, 4)]
    m = torch.tensor([coefficient(memories, f"L{p.layer}N{p.memory}@{p.position}") for p in places])
    slope = logit_slope(forward, 11)
    edges = _estimate_edges(forward, slope, True, places, m.double(), lambda n: None)
    torch.testing.assert_close(edges.sum(dim=0)[:-1], m.double(), rtol=1e-3, atol=1e-4)
    whole = target_logit(memories.head, forward.output, 11)
    torch.testing.assert_close(edges.sum(dim=0)[-1:], whole, rtol=1e-3, atol=1e-4)


def test_a_larger_budget_only_adds_nodes():
    loaded = with_start(read("mixtral"))
    few, more = (circuit(loaded, TEXT, nodes=n) for n in (3, 9))
    assert [node.id for node in more.nodes][:3] == [node.id for node in few.nodes]
    assert [node.exact for node in more.nodes][:3] == pytest.approx(
        [node.exact for node in few.nodes], abs=1e-4
    )


def test_random_sets_have_as_many_memories_at_the_same_layers_and_positions():
    question = CircuitQuestion.of(with_start(read("llama")), TEXT, 11, -1, "zero")
    for n in (3, 30, 10**6):
        places = choose_nodes(question, n).places
        drawn = _random_nodes(question, places, np.random.default_rng(0))()
        assert [(p.layer, p.position) for p in drawn] == [(p.layer, p.position) for p in places]
        assert len(set(drawn)) == len(places)  # no memory twice
        if n == 3:
            assert not set(drawn) & set(places)


def test_the_curve_alone_is_that_of_the_circuit():
    loaded = with_start(read("llama"))
    found = circuit(loaded, TEXT, target="w7", nodes=12)
    options = {"target": "w7", "progress": Progress(quiet=True)}
    assert faithfulness_curve(loaded, TEXT, nodes=12, **options) == found.curve
    longer = faithfulness_curve(loaded, TEXT, nodes=10**6, **options)
    assert longer[-1].faithfulness == pytest.approx(1, abs=1e-4)  # every memory is kept
    assert longer[-1].completeness == pytest.approx(1, abs=1e-4)


def test_a_model_without_rules_is_estimated_by_gradients_and_says_so():
    found = circuit(with_start(read("minimax")), TEXT, nodes=4)
    assert found.estimated_by == "gradient"
    assert found.notes


def test_where_no_memory_has_a_part_the_circuit_is_empty():
    memories = ffmem.load(tiny("gpt2"), tiny_tokenizer())
    for layer in range(2):
        memories.values(layer).zero_()
    found = circuit(with_start(memories), TEXT)
    assert found.nodes == found.curve == []
    assert found.faithfulness is found.completeness is None
    assert {edge.target for edge in found.edges} == {TARGET}
    assert str(found)
    ElementTree.fromstring(draw_circuit(found))


# Files, text and bad input


def test_a_circuit_is_written_as_json_drawing_and_viewer_file(planted, tmp_path):
    groups = {"both <b>": ["L0N3@4", "L1N7@4"]}
    found = circuit(with_start(planted), TEXT, groups=groups)
    write_circuit(found, tmp_path)
    nodes = json.loads((tmp_path / "circuit.json").read_text())["nodes"]
    assert {node["cell"] for node in nodes} == {"L0N3", "L1N7"}  # a chain: equal, but for rounding
    drawing = ElementTree.fromstring((tmp_path / "circuit.svg").read_text())
    assert len(drawing.findall(".//{*}path")) == len(found.edges)
    viewer = json.loads((tmp_path / "circuit-tracer.json").read_text())
    ids = [node["node_id"] for node in viewer["nodes"]]
    assert set(ids[:2]) == {"1_7_4", "0_3_4"}
    assert ids[-1] == "3_11_4"
    assert len(set(ids)) == len(ids) == len(found.nodes) + len(found.ends) + 1
    assert {link[end] for link in viewer["links"] for end in ("source", "target")} <= set(ids)
    assert viewer["qParams"]["supernodes"] == [["both <b>", "0_3_4", "1_7_4"]]
    assert viewer["metadata"]["prompt_tokens"] == found.tokens
    assert "both <b>" in str(found)


def test_boxes_of_a_drawing_do_not_overlap_and_tokens_without_nodes_take_little_room():
    found = circuit(with_start(read("llama")), " ".join([TEXT] * 3), nodes=9)
    drawn = ElementTree.fromstring(draw_circuit(found))
    svg = "{http://www.w3.org/2000/svg}"
    boxes = {}
    for group in drawn.iter(f"{svg}g"):
        rect = group.find(f"{svg}rect")
        x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        boxes[group.get("data-id")] = x, y, x + width, y + height
    for one, (left, top, right, bottom) in boxes.items():
        assert right <= float(drawn.get("width"))
        for other, (x, y, x_end, y_end) in boxes.items():
            apart = x >= right or x_end <= left or y >= bottom or y_end <= top
            assert apart or one == other, (one, other)
    empty = set(range(len(found.tokens) - 1)) - {node.position for node in found.nodes}
    assert empty
    for position in empty:
        left, _, right, _ = boxes[f"token@{position}"]
        assert right - left < boxes[TARGET][2] - boxes[TARGET][0]


def test_names_in_a_drawing_are_escaped(planted):
    found = circuit(with_start(planted), TEXT)
    drawn = draw_circuit(found, link=lambda id: f'/m/{id}?a="b"&c')
    ElementTree.fromstring(drawn)
    assert "&quot;b&quot;&amp;c" in drawn


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"nodes": 0}, FfmemError, "0 were requested"),
        ({"target": "w3 w4"}, ModelError, "not one token"),
        ({"ablation": "mean"}, FfmemError, "needs an index"),
        ({"ablation": "odd"}, FfmemError, "no ablation"),
        ({"position": 0}, FfmemError, "start token"),
        ({"off": ["a"]}, FfmemError, "no group 'a'"),
        ({"groups": {"a": ["L0N3"]}}, FfmemError, "not a node"),
        ({"groups": {"a": ["L0N3@9"]}}, FfmemError, "a node is at 1 to 4"),
        ({"groups": {"a": ["L9N3@1"]}}, FfmemError, "no memory L9N3"),
    ],
)
def test_bad_input_is_refused_before_the_work(options, error, message, monkeypatch):
    monkeypatch.setattr("ffmem.interventions.circuit._find_circuit", lambda *_: 1 / 0)
    with pytest.raises(error, match=message):
        circuit(with_start(read("llama")), TEXT, **options)


@pytest.mark.parametrize("options", [{"nodes": 0}, {"off": ["a"]}, {"seed": -1}, {"nodes": "4"}])
def test_bad_options_are_refused_before_a_model_is_loaded(options):
    with pytest.raises(FfmemError, match=r"nodes|no group 'a'|Seed -1"):
        circuit("no-such-model", TEXT, **options)


def test_a_prompt_past_the_context():
    with pytest.raises(CorpusError, match="Shorten it"):
        circuit(with_start(read("gpt2")), "w5 " * 70)


def test_the_command(model_folder, tmp_path):
    out = tmp_path / "out"
    arguments = ["circuit", str(model_folder), "The river", "--nodes", "4", "--out", str(out)]
    result = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    first = json.loads(result.stdout)["nodes"][0]["id"]
    assert {one.name for one in out.iterdir()} == {
        *("circuit.json", "circuit.svg", "circuit-tracer.json")
    }
    more = ["--group", f"a={first}", "--off", "a"]
    result = CliRunner().invoke(cli, [*arguments[:-2], *more], catch_exceptions=False)
    assert "without a: logit" in result.stdout
    assert CliRunner().invoke(cli, [*arguments[:3], "--nodes", "0"]).exit_code == 2
    assert CliRunner().invoke(cli, [*arguments[:3], "--group", "a"]).exit_code == 2
