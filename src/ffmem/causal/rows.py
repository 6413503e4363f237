"""The rows of a layer that an edit of coefficients is written into, one for each memory.

    y = Σᵢ mᵢ · vᵢ        values, or what they are computed from row by row (`FactoredLinear`)
    m = q · E             keys, where memories have no static value: in a lambda layer

Law: a memory's row times a is its part of y times a. A value acts so whatever made the coefficient;
a key does where the coefficient is linear in it, as that of a lambda layer is.
"""

from jaxtyping import Float
from torch import Tensor, nn

from ffmem.models.families import Family
from ffmem.models.modules import linear_weight
from ffmem.networks.memories import FactoredLinear


def rows_path(row: Family, layer: int) -> str:
    """Return the path, from the model, of the map that a layer's edits are written into."""
    return f"{row.blocks}.{layer}.{row.keys if row.input_values else row.values}"


def rows(linear: nn.Module) -> Float[Tensor, "memory width"]:
    """Return the rows of such a map: a view, through which they are written."""
    return linear.weight if isinstance(linear, FactoredLinear) else linear_weight(linear).T
