"""Memories of every kind against their formulas, written out number by number (`plain.py`)."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from torch.testing import assert_close
from transformers import DynamicCache

from ffmem.networks.attention import AttentionContext
from ffmem.networks.config import KINDS, AdaptiveConfig
from ffmem.networks.experts import ExpertMemory, reading_routes
from ffmem.networks.memories import FactoredLinear, LambdaLayer, PersistentMemory
from ffmem.networks.model import make_layer
from tests.networks.plain import PLAIN
from tests.tiny import TINY, read

OURS = [name for name in TINY if name.startswith("ffmem_adaptive")]
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 35, 8, 9]])


@st.composite
def sizes(draw):
    heads, width = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return {
        "hidden_size": heads * width,
        "num_attention_heads": heads,
        "intermediate_size": draw(st.integers(1, 4)),
        "key_width": draw(st.integers(1, 3)),
        "distances": draw(st.integers(1, 5)),
        "num_experts": draw(st.integers(2, 4)),
        "num_experts_per_tok": draw(st.integers(1, 2)),
        "shared_expert": draw(st.booleans()),
    }


def memory_of(kind, size, seed=0):
    """A memory with random weights in float64."""
    torch.manual_seed(seed)
    bands = {"band_sizes": [4], "band_widths": [size["hidden_size"]]}
    memory = make_layer(AdaptiveConfig(memory=kind, **bands, **size), 0).memory.double()
    for weight in memory.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    return memory


def outputs(memory, x, context=None):
    """The tokens' part (zeros in feed-forward kinds), m as a hook reads it, and y.

    Of experts, the router's weights in place of m.
    """
    if isinstance(memory, ExpertMemory):
        with reading_routes([memory.router]) as found:
            y = memory(x)
        [routes] = found
        weights = torch.zeros_like(routes.probabilities)
        weights = weights.scatter(1, routes.experts, routes.weights)
        return torch.zeros_like(y), weights.view(*x.shape[:2], -1), y
    found = []
    with memory.values.register_forward_pre_hook(lambda _, args: found.append(args[0])):
        if isinstance(memory, PersistentMemory | LambdaLayer):
            tokens, y = memory(x, context or AttentionContext(x.shape[1]))
        else:
            y = memory(x)
            tokens = torch.zeros_like(y)
    [m] = found
    return tokens, m, y


def together(memory, x, mask, cuts):
    """The module's m, tokens' part and y of a batch, read in pieces behind one cache."""
    edges = [0, *sorted(cuts), x.shape[1]]
    cache = DynamicCache()
    parts = []
    for start, end in pairwise(edges):
        if start == end:
            continue
        context = AttentionContext(end - start, mask[:, :end], cache)
        parts.append(outputs(memory, x[:, start:end], context))
    return tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))


def alone(memory, kind, x, mask):
    """The same from the plain version, each text without its padding."""
    for row, is_token in zip(x, mask.bool(), strict=True):
        tokens, m, y = PLAIN[kind](memory, row[is_token])
        yield torch.zeros_like(y) if tokens is None else tokens, m, y


@st.composite
def batches(draw):
    """A mask for texts of several lengths with padding anywhere, and where to cut the batch."""
    length = draw(st.integers(1, 5))
    rows = draw(
        st.lists(
            st.lists(st.booleans(), min_size=length, max_size=length).filter(any), min_size=1
        ).map(lambda rows: rows[:2])
    )
    return torch.tensor(rows).long(), draw(st.lists(st.integers(0, length), max_size=2))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(sizes(), batches(), st.integers(0, 1000))
def test_a_memory_computes_its_formula_whatever_padding_and_cache(kind, size, batch, seed):
    mask, cuts = batch
    memory = memory_of(kind, size, seed)
    x = torch.randn(*mask.shape, size["hidden_size"], dtype=torch.float64)
    with torch.no_grad():
        found = together(memory, x, mask, cuts)
        for row, expected in enumerate(alone(memory, kind, x, mask)):
            for part, plain in zip(found, expected, strict=True):
                assert_close(part[row][mask[row].bool()], plain)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(sizes(), batches(), st.integers(0, 1000))
def test_gradients_are_those_of_the_formula(kind, size, batch, seed):
    mask, cuts = batch
    memory = memory_of(kind, size, seed)
    x = torch.randn(*mask.shape, size["hidden_size"], dtype=torch.float64, requires_grad=True)
    wanted = [x, *memory.parameters()]
    found = together(memory, x, mask, cuts)
    chosen = [torch.randn_like(part) * mask[..., None] for part in found]
    total = sum((part * weight).sum() for part, weight in zip(found, chosen, strict=True))
    plain = sum(
        (part * weight[row][mask[row].bool()]).sum()
        for row, parts in enumerate(alone(memory, kind, x, mask))
        for part, weight in zip(parts, chosen, strict=True)
    )
    ask = {"allow_unused": True, "materialize_grads": True}
    for gradient, expected in zip(
        torch.autograd.grad(total, wanted, **ask),
        torch.autograd.grad(plain, wanted, **ask),
        strict=True,
    ):
        assert_close(gradient, expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("relu", "moe")])
def test_gradients_of_smooth_memories_are_those_of_small_steps(kind):
    size = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 2}
    memory = memory_of(kind, size | {"key_width": 2, "distances": 2})
    names = [name for name, _ in memory.named_parameters()]
    mask = torch.tensor([[0, 1, 1]])

    def computed(x, *weights):
        weights = dict(zip(names, weights, strict=True))
        context = (AttentionContext(3, mask),) if kind in ("persistent", "lambda") else ()
        return functional_call(memory, weights, (x, *context))

    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(computed, (x, *memory.parameters()))


@pytest.mark.parametrize("name", OURS)
def test_a_trace_reads_what_the_memory_computes(name):
    memories = read(name)
    for layer, found in enumerate(memories.trace(TOKENS)):
        memory = memories.blocks[layer].memory
        _, m, y = outputs(memory, found.ff_input)
        assert_close(m, found.coefficients)
        assert_close(y, found.value_output)


@pytest.mark.parametrize("kind", ["softmax", "persistent"])
@settings(max_examples=25)
@given(sizes(), st.integers(1, 6), st.floats(0.1, 20))
def test_coefficients_of_a_softmax_are_shares(kind, size, length, scale):
    """They sum to 1, together with what a head reads from the tokens."""
    memory = memory_of(kind, size)
    x = scale * torch.randn(2, length, size["hidden_size"], dtype=torch.float64)
    _, m, _ = outputs(memory, x)
    assert (m >= 0).all()
    if kind == "softmax":
        assert_close(m.sum(-1), torch.ones_like(m[..., 0]))
        return
    on_tokens, on_slots, _ = memory.attention_weights(x, AttentionContext(length))
    assert torch.equal(on_slots, m)
    by_head = m.unflatten(-1, (size["num_attention_heads"], -1)).sum(-1).transpose(1, 2)
    total = on_tokens.sum(-1) + by_head
    assert_close(total, torch.ones_like(total))


@settings(max_examples=25)
@given(sizes(), st.integers(1, 7))
def test_a_static_key_has_a_coefficient_exactly_where_a_token_lies_so_far_in_front(size, length):
    memory = memory_of("lambda", size)
    x = torch.randn(1, length, size["hidden_size"], dtype=torch.float64)
    m = outputs(memory, x)[1][0].unflatten(-1, (size["num_attention_heads"], -1))
    for place in range(length):
        for distance in range(size["distances"]):
            assert bool((m[place, :, distance] != 0).all()) is (distance <= place)
            assert bool((m[place, :, distance] == 0).all()) is (distance > place)


@settings(max_examples=25)
@given(sizes(), st.integers(1, 7))
def test_coefficients_times_values_at_a_place_are_what_the_static_keys_add(size, length):
    memory = memory_of("lambda", size)
    x = torch.randn(1, length, size["hidden_size"], dtype=torch.float64)
    _, m, y = outputs(memory, x)
    for place in range(length):
        values = memory.values_at(x[0], place)
        assert values.shape == (m.shape[-1], size["hidden_size"])
        assert_close(m[0, place] @ values, y[0, place])
        for number, value in enumerate(values):
            assert value.any() or number % size["distances"] > place


def factored_sides(kind, size):
    memory = memory_of(kind, size)
    found = {side: getattr(memory, side) for side in ("keys", "values")}
    return {side: one for side, one in found.items() if isinstance(one, FactoredLinear)}


def test_which_sides_are_factored():
    size = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 3}
    found = {kind: sorted(factored_sides(kind, size)) for kind in KINDS if kind != "moe"}
    assert found == {kind: [] for kind in ("relu", "gelu", "swiglu")} | {
        "softmax": ["values"],
        "persistent": ["keys", "values"],
        "lambda": ["keys"],
    }


@pytest.mark.parametrize("kind", ["softmax", "persistent", "lambda"])
@settings(max_examples=25)
@given(sizes(), st.integers(0, 1000), st.floats(-3, 3))
def test_a_factored_matrix_is_linear_in_each_memorys_row(kind, size, place, factor):
    for side, factored in factored_sides(kind, size).items():
        number = place % len(factored.weight)
        before = factored.matrix() if side == "keys" else factored.matrix().T
        assert tuple(factored.matrix().shape) == (factored.out_features, factored.in_features)
        changed = copy.deepcopy(factored)
        with torch.no_grad():
            step = torch.randn_like(factored.weight[number])
            changed.weight[number] = factor * factored.weight[number] + step
        after = changed.matrix() if side == "keys" else changed.matrix().T
        others = [other for other in range(len(before)) if other != number]
        assert torch.equal(after[others], before[others])

        with torch.no_grad():
            changed.weight[number] = step
        of_step = changed.matrix() if side == "keys" else changed.matrix().T
        assert_close(after[number], factor * before[number] + of_step[number])


@pytest.mark.parametrize("kind", ["softmax", "persistent", "lambda"])
def test_factored_maps_compute_with_their_matrix(kind):
    size = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 3, "distances": 3}
    for side, factored in factored_sides(kind, size).items():
        given = torch.randn(1, 2, factored.in_features, dtype=torch.float64)
        found = factored(given)
        if side == "keys":
            found = found[1]  # behind the queries
            if kind == "persistent":
                found = found.transpose(1, 2).flatten(2)
        assert_close(found, given @ factored.matrix().T)
