"""The paper's layers, 1 to 16, in a model of another depth."""

PAPER_LAYERS = 16


def first_of(n_layers: int, paper_layer: int) -> int:
    """Return the first layer (from 0) of those that stand for `paper_layer` to 16."""
    return min(-(-(paper_layer - 1) * n_layers // PAPER_LAYERS), n_layers - 1)
