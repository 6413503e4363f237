"""Do keys predict which tokens trigger a memory? Measured over all memories of an index.

    python own_measure.py DIR

Prints, for each layer, the share of triggers whose last token is one of the 20 input tokens that
the memory's key matches best, and the same with keys shuffled among memories.
"""

import sys

import ffmem

index = ffmem.open(sys.argv[1])
keys = index.table("keys", columns=["cell", "token"]).to_pandas()
triggers = index.table("triggers", columns=["cell", "layer", "last_token"]).to_pandas()

listed = keys.groupby("cell", sort=False)["token"].agg(set)
wrong = dict(zip(listed.index, listed.sample(frac=1, random_state=0), strict=True))

pairs = list(zip(triggers["cell"], triggers["last_token"], strict=True))
triggers["own key"] = [token in listed.get(cell, ()) for cell, token in pairs]
triggers["another key"] = [token in wrong.get(cell, ()) for cell, token in pairs]
print(triggers.groupby("layer")[["own key", "another key"]].mean().round(3))
