"""A custom experiment: how many different tokens do the triggers of a memory end in?

python examples/own_experiment.py demo
"""

import sys

import numpy as np

import ffmem

index = ffmem.open(sys.argv[1])
rng = np.random.default_rng(0)
names = ["memory", "sign", "last_token"]


def distinct(table):
    """Return the mean number of different last tokens in a list of ten triggers."""
    lists = table.group_by(["memory", "sign"]).aggregate([("last_token", "count_distinct")])
    return lists["last_token_count_distinct"].to_numpy().mean()


print("distinct last tokens in a memory's first ten triggers; the same, shuffled within the layer")
for layer in index.layout.memory_layers:
    table = index.table("triggers", layer=layer, top=10, columns=names)
    shuffled = table["last_token"].take(rng.permutation(len(table)))
    control = distinct(table.set_column(2, "last_token", shuffled))
    print(f"layer {layer + 1:2}  {distinct(table):4.1f}  {control:4.1f}")
