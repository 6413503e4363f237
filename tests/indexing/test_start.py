import math

import pytest
import torch

from ffmem.errors import FfmemError, ModelError
from ffmem.indexing import start
from ffmem.indexing.start import choose_start
from tests.indexing.folders import memories
from tests.tiny import tiny

SENTENCES = [[3 + (7 * i + j) % 50 for j in range(2 + i % 5)] for i in range(30)] + [[9]]


def plain_loss(model, sentences, token):
    """The mean loss over t₁ … tₙ₋₁, one sentence at a time, as the definition says."""
    total = n = 0
    for ids in sentences:
        front = [] if token is None else [token]
        with torch.no_grad():
            logits = model(torch.tensor([front + ids])).logits[0].log_softmax(-1)
        for place in range(1, len(ids)):
            total -= float(logits[len(front) + place - 1, ids[place]])
            n += 1
    return total / n


def test_the_start_of_lowest_loss_is_taken():
    chosen, perplexity = choose_start(memories(), SENTENCES, "auto")
    model = tiny("llama")
    expected = {
        name: plain_loss(model, SENTENCES, token)
        for name, token in (("none", None), ("<s>", 0), ("</s>", 1))
    }
    assert chosen.losses == pytest.approx(expected, abs=1e-3)
    best = min(expected, key=expected.get)
    assert chosen.token == (None if best == "none" else best)
    assert chosen.chosen_by == "lowest loss"
    assert perplexity.per_token == pytest.approx(math.exp(expected[best]), rel=1e-3)
    assert perplexity.tokens == sum(len(ids) - 1 for ids in SENTENCES)


def test_what_the_tokenizer_puts_in_front_itself_is_not_put_to_the_test():
    model = memories()
    model.tokenizer.own_start = 1
    chosen, _ = choose_start(model, SENTENCES, "auto")
    assert (chosen.id, chosen.chosen_by) == (1, "the tokenizer's own")
    assert set(chosen.losses) == {"</s>"}


@pytest.mark.parametrize(
    ("asked", "id"), [("none", None), ("bos", 0), ("eos", 1), ("w7", 7), ("id:9", 9)]
)
def test_a_start_that_is_asked_for_is_taken(asked, id):
    assert choose_start(memories(), SENTENCES, asked)[0].id == id


def test_a_start_that_is_not_there_is_refused():
    model = memories()
    with pytest.raises(ModelError):
        choose_start(model, SENTENCES, "<nowhere>")
    with pytest.raises(FfmemError, match="the model has ids 0 to 63"):
        choose_start(model, SENTENCES, "id:64")
    with pytest.raises(FfmemError, match="the model has ids 0 to 63"):
        choose_start(model, SENTENCES, "id:" + "9" * 5000)
    model.tokenizer.bos = None
    with pytest.raises(FfmemError, match="has no such token"):
        choose_start(model, SENTENCES, "bos")


def test_one_word_sentences_give_nothing_to_measure():
    chosen, perplexity = choose_start(memories(), [[5], [6]], "auto")
    assert chosen.id == 0
    assert perplexity is None


def test_the_sample_is_spread_over_the_sentences(monkeypatch):
    monkeypatch.setattr(start, "LOSS_TOKENS", 20)
    spread = start._spread_sample([[i] * 2 for i in range(100)])
    assert [ids[0] for ids in spread] == list(range(0, 100, 10))


def test_a_model_that_overflows_on_text_is_refused():
    model = memories()
    with torch.no_grad():
        model.model.get_input_embeddings().weight[5] = torch.inf
    with pytest.raises(ModelError, match="not finite"):
        choose_start(model, [[3, 5, 4]], "none")
