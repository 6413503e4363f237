"""The authors' own code and ffmem find the same triggers on the authors' kind of model."""

import gzip
import json
from pathlib import Path

import ffmem

ORACLE = Path(__file__).parent.parent / "oracle"
NEAR = 1e-5  # equal prefixes in two sentences tie within the noise of batching


def test_the_authors_code_finds_the_same_triggers(tmp_path):
    sentences = json.loads((ORACLE / "expected_tokens.json").read_text())
    texts = [row["text"] for row in sentences]
    corpus = tmp_path / "moses.txt"
    corpus.write_text("".join(" ".join(row["moses_encode"]) + "\n" for row in sentences))
    index = ffmem.index(
        ORACLE / "model.pt",
        ffmem.Corpus(str(corpus), unit="line"),
        tmp_path / "index",
        t=5,
        compat="ff-layers",
    )
    n_compared = n_equal = 0
    with gzip.open(ORACLE / "triggers_top5.jsonl.gz", "rt") as file:
        for line in file:
            row = json.loads(line)
            for layer, authors in enumerate(row["top_values"]):
                ours = index[ffmem.Cell(layer, row["dim"])].triggers
                filled = [trigger for trigger in authors if trigger["fc1_value"] > 0]
                assert len(filled) == len(ours)
                for theirs, mine in zip(filled, ours, strict=True):
                    n_compared += 1
                    assert abs(theirs["fc1_value"] - mine.coefficient) <= NEAR
                    here = (theirs["text"], int(theirs["token_indice"]))
                    n_equal += here == (texts[mine.sentence], mine.length)
                # Ties aside: whatever stands in one list stands in the other at the same value.
                for theirs in filled:
                    near = {
                        (texts[t.sentence], t.length)
                        for t in ours
                        if abs(t.coefficient - theirs["fc1_value"]) <= NEAR
                    }
                    weakest = ours[-1].coefficient
                    is_cut = theirs["fc1_value"] <= weakest + NEAR
                    assert (theirs["text"], int(theirs["token_indice"])) in near or is_cut
    assert n_compared == 2560 - 322
    assert n_equal >= 0.97 * n_compared
