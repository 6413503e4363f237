"""Models of ours, with memories of every kind: loaded, described, compared with each other."""

import json

import pytest
import torch
from torch.nn.functional import cosine_similarity

import ffmem
from ffmem.cells import Cell
from ffmem.errors import ModelError, NoStaticValues
from ffmem.models.load import describe, load
from ffmem.models.memories import Memories, neighbours
from ffmem.models.tokenizer import SubwordTokenizer, WordTokenizer
from ffmem.networks.config import KINDS, AdaptiveConfig
from tests.test_cli import run
from tests.tiny import (
    EXPERTS,
    HEADS,
    HIDDEN,
    MEMORIES,
    TINY,
    VOCABULARY,
    read,
    tiny,
    tiny_tokenizer,
)

ALL = TINY | EXPERTS
NAMES = {config.memory: name for name, config in ALL.items() if isinstance(config, AdaptiveConfig)}
WORDS = [f"word{number}" for number in range(VOCABULARY - 4)]
TOKENS = torch.tensor([[2, 5, 13, 31, 20, 63]])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def saved(kind, folder, words=WORDS):
    """A folder with a model, and its dictionary if there is one."""
    tiny(NAMES[kind]).save_pretrained(folder)
    if words is None:
        tiny_tokenizer().tokenizer.save_pretrained(folder)
    else:
        lines = [f"{word} {len(words) - place}\n" for place, word in enumerate(words)]
        (folder / "dict.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def test_a_folder_with_a_dictionary_is_read_in_words(kind, tmp_path):
    memories = load(saved(kind, tmp_path))
    assert isinstance(memories.tokenizer, WordTokenizer)
    assert memories.tokenizer.encode(["word0 nothing word59"])[0].ids == [4, 3, 63]
    assert memories.fingerprint() == read(NAMES[kind]).fingerprint()
    assert torch.equal(memories.keys(1), read(NAMES[kind]).keys(1))


def test_a_folder_without_a_dictionary_is_read_with_its_own_tokenizer(tmp_path):
    memories = load(saved("softmax", tmp_path, words=None))
    assert isinstance(memories.tokenizer, SubwordTokenizer)
    assert memories.tokenizer.encode(["w5 w6"])[0].ids == [5, 6]


def test_a_dictionary_of_another_size_is_refused(tmp_path):
    saved("relu", tmp_path, WORDS[:-1])
    with pytest.raises(
        ModelError, match=r"model has 64 words, but .*dict\.txt has 63, including four"
    ):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_self_check_holds_in_every_dtype(kind, dtype, tmp_path):
    assert load(saved(kind, tmp_path), dtype=dtype).check.tokens == 16


@pytest.mark.parametrize("device", [{"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_our_models_are_not_split_over_devices(kind, device, tmp_path):
    with pytest.raises(ModelError, match="adaptive softmax shares its weights with its input"):
        load(saved(kind, tmp_path), device=device)


def test_a_description_tells_the_kind_of_memory_and_where_values_come_from(kind, tmp_path):
    facts = describe(load(saved(kind, tmp_path)))
    assert facts["memory"] == kind
    assert facts["values"] == ("input" if kind == "lambda" else "static")
    assert facts["memories"] == MEMORIES
    assert facts["gated"] is (kind == "swiglu")
    assert facts["head"]["kind"] == "adaptive softmax"
    assert facts["biases"] == dict.fromkeys(("keys", "values"), kind in ("relu", "gelu", "moe"))
    parts = {"persistent": "slots' part", "lambda": "static keys' part"}
    assert parts.get(kind, "sequential") in facts["block"]
    assert json.loads(json.dumps(facts)) == facts


def test_models_of_others_have_static_values_and_no_kind():
    facts = describe(read("llama"))
    assert "memory" not in facts
    assert facts["values"] == "static"


def test_the_command_describes_a_lambda_model(tmp_path):
    code, out, err = run("describe", saved("lambda", tmp_path))
    assert code == 0
    assert err.startswith("Loading ")
    assert "memory           lambda\nvalues           input\n" in out


@pytest.mark.parametrize("by", ["value", "key"])
def test_neighbours_are_the_memories_of_largest_cosine(kind, by):
    memories = read(NAMES[kind])
    if kind == "lambda" and by == "value":
        with pytest.raises(NoStaticValues, match=r"by key, but not by value\. Lambda layers"):
            neighbours(memories, Cell(1, 5), by)
        return
    vectors = memories.values if by == "value" else memories.keys
    plain = {
        Cell(layer, memory): float(cosine_similarity(vectors(layer)[memory], vectors(1)[5], dim=0))
        for layer in range(memories.n_layers)
        for memory in range(memories.layout.widths[0])
        if (layer, memory) != (1, 5)
    }
    expected = sorted(plain, key=lambda cell: -abs(plain[cell]))[:7]
    found = neighbours(memories, Cell(1, 5), by, 7)
    assert [one.cell[:2] for one in found] == [cell[:2] for cell in expected]
    assert [one.cosine for one in found] == pytest.approx([plain[c] for c in expected], abs=1e-5)


def test_the_command_says_why_a_lambda_model_has_no_neighbours_by_value(tmp_path):
    folder = saved("lambda", tmp_path)
    code, _, err = run("neighbours", folder, "L0N3")
    assert code == 1
    assert "Lambda layers have static keys" in err
    assert run("neighbours", folder, "L0N3", "--by", "key", "--limit", 2)[0] == 0
    assert len(ffmem.neighbours(folder, "L0N3", by="key", n=2)) == 2


@pytest.mark.parametrize("kind", ["persistent", "lambda"])
def test_memories_are_numbered_head_by_head(kind):
    """Without the way out of the second head, its memories add nothing; the first head's stay."""
    model = tiny(NAMES[kind])
    memory = model.model.layers[0].memory
    memory.values.out.weight.data[:, HIDDEN // HEADS :] = 0
    memories = Memories(model, tiny_tokenizer())
    x = memories.trace(TOKENS)[0].ff_input[0]
    values = memories.values_at(0, x, 5)
    half = MEMORIES // HEADS
    near = slice(0, 6) if kind == "lambda" else slice(0, half)  # six tokens, six distances
    assert values[:half][near].any(dim=1).all()
    assert not values[half:].any()


@pytest.mark.parametrize("kind", ["softmax", "persistent", "lambda"])
@pytest.mark.parametrize("factor", [0.0, -2.0])
def test_a_row_of_slots_times_a_factor_is_a_memory_times_that_factor(kind, factor):
    """What an edit relies on, seen in y: the memory's part alone is multiplied.

    A lambda layer's coefficient is linear in its static key; elsewhere the value is changed, and
    coefficients stay.
    """
    before = Memories(tiny(NAMES[kind]), tiny_tokenizer())
    x = before.trace(TOKENS)[0].ff_input
    model, number = tiny(NAMES[kind]), 14
    memory = model.model.layers[0].memory
    slots = memory.keys if kind == "lambda" else memory.values
    slots.weight.data[number] *= factor
    after = Memories(model, tiny_tokenizer())
    one, other = before.trace(TOKENS)[0], after.trace(TOKENS)[0]
    for place in range(TOKENS.shape[1]):
        part = one.coefficients[0, place, number] * before.values_at(0, x[0], place)[number]
        expected = one.value_output[0, place] + (factor - 1) * part
        torch.testing.assert_close(other.value_output[0, place], expected, rtol=1e-4, atol=1e-4)
