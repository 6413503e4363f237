"""Maps that know with which deviation their weights are drawn at the start."""

from torch import nn


class DrawnLinear(nn.Linear):
    """`nn.Linear` without bias, and its deviation."""

    def __init__(self, inputs: int, outputs: int, deviation: float) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.deviation = deviation


class DrawnEmbedding(nn.Embedding):
    """`nn.Embedding`, and its deviation."""

    def __init__(self, size: int, width: int, deviation: float) -> None:
        super().__init__(size, width)
        self.deviation = deviation
