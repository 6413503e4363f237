"""Continuations with a cache against the whole text read anew for every token."""

import pytest
import torch

import ffmem
from ffmem.errors import FfmemError
from ffmem.interventions.edits import Edits
from ffmem.interventions.forward import apply_edits
from ffmem.interventions.prompts import read_prompt
from ffmem.interventions.trace import continue_prompt
from tests.interventions.planted import with_start
from tests.tiny import TINY, tiny, tiny_tokenizer

TEXT = "w5 w9 w2"


@pytest.fixture(scope="module", params=list(TINY))
def memories(request):
    found = ffmem.load(tiny(request.param), tiny_tokenizer())
    found.tokenizer.eos = None
    return found


def plain(memories, ids, n):
    """Greedy, the whole text read anew each time."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(memories.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-n:]


def test_a_cache_changes_nothing(memories):
    prompt = read_prompt(with_start(memories), TEXT)
    assert continue_prompt(memories, prompt, 6).ids == plain(memories, prompt.ids, 6)


@pytest.mark.parametrize("positions", [None, [1], [0, 4]])
def test_edits_act_on_the_same_positions_with_and_without_a_cache(memories, positions):
    prompt = read_prompt(with_start(memories), TEXT)
    many = {f"L0N{memory}": 4.0 for memory in range(0, memories.layout.widths[0], 2)}
    with apply_edits(memories, Edits.of(set=many, positions=positions)):
        assert continue_prompt(memories, prompt, 6).ids == plain(memories, prompt.ids, 6)


def test_the_same_seed_writes_the_same_text_and_another_does_not():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    prompt = read_prompt(with_start(memories), TEXT)
    texts = [continue_prompt(memories, prompt, 20, 2.0, seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_low_temperature_is_greedy():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    prompt = read_prompt(with_start(memories), TEXT)
    assert continue_prompt(memories, prompt, 8, 1e-3) == continue_prompt(memories, prompt, 8)


def test_the_end_of_text_token_ends_it_and_the_context_too():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    prompt = read_prompt(with_start(memories), TEXT)
    written = continue_prompt(memories, prompt, 1000)
    if written.ended == "end":
        memories.tokenizer.eos = None
        written = continue_prompt(memories, prompt, 1000)
    assert written.ended == "context"
    assert len(prompt.ids) + len(written.ids) == memories.context + 1
    memories.tokenizer.eos = written.ids[2]
    stopped = continue_prompt(memories, prompt, 1000)
    assert stopped.ended == "end"
    assert stopped.ids == written.ids[: written.ids.index(written.ids[2])]


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-300, float("nan"), float("inf")])
def test_a_temperature_must_be_one(temperature):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    with pytest.raises(FfmemError, match="Temperature"):
        continue_prompt(memories, read_prompt(with_start(memories), TEXT), 3, temperature)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_must_be_one(seed):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    with pytest.raises(FfmemError, match="Seed"):
        continue_prompt(memories, read_prompt(with_start(memories), TEXT), 3, 1.0, seed)


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_numbers_that_overflow_are_told(temperature):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    prompt = read_prompt(with_start(memories), TEXT)
    with (
        pytest.raises(FfmemError, match="cannot hold"),
        apply_edits(memories, Edits.of(set={"L0N1": 1e39})),
    ):
        continue_prompt(memories, prompt, 3, temperature)
