"""A linear map whose output is added to the residual stream: it starts small in deep models."""

from torch import nn


class IntoStream(nn.Linear):
    """`nn.Linear`, known by its place."""
