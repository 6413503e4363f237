"""What each value predicts: its top token, how sure it is, how it ranks the top trigger's tokens.

    z = head.folded(sign · v),    p = softmax(z),    rank(w) = #{w′: z(w′) > z(w)}      (§4)

The value is read with coefficient 1 and the sign of the memory's top trigger: in gated models the
sign of a value means nothing without that of its coefficient. Under an adaptive softmax z are
already log-probabilities. Values are projected in rows and each row is reduced at once, without a
sort: nothing of size memories × vocabulary is ever held.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int8, Int32, Int64
from numpy import ndarray

from ffmem.experiments.top_triggers import NO_SIGN, NONE, TopTriggers
from ffmem.models.memories import Memories

_BYTES = 256 << 20  # of logits at a time


class ValueReadings(NamedTuple):
    """Of every memory of a layer: what its value, times the sign that was read, predicts."""

    sign: Int8[ndarray, " memory"]
    """Of the top trigger; +1 where there is none."""
    top: Int32[ndarray, " memory"]
    """The most probable of all tokens, ties to the lower id."""
    probability: Float32[ndarray, " memory"]
    """Of the top token."""
    next_rank: Int32[ndarray, " memory"]
    """Of the top trigger's next token, 0 for the top; NONE where there is no top trigger."""
    last_rank: Int32[ndarray, " memory"]
    """Of the top trigger's last token; NONE where there is none, or no token in it."""


class Readings(NamedTuple):
    """What some values predict, and how they rank any tokens that were asked about."""

    top: Int32[ndarray, " memory"]
    probability: Float32[ndarray, " memory"]
    ranks: Int32[ndarray, "memory target"]


def read_values(memories: Memories, top_triggers: TopTriggers, layer: int) -> ValueReadings:
    """Return the readings of a layer's values under the signs of its top triggers."""
    sign = np.where(top_triggers.sign == NO_SIGN, 1, top_triggers.sign).astype(np.int8)
    targets = np.stack([top_triggers.next_token, top_triggers.last_token], axis=1)
    top, probability, ranks = readings(memories, layer, sign, targets)
    return ValueReadings(sign, top, probability, ranks[:, 0], ranks[:, 1])


def readings(
    memories: Memories,
    layer: int,
    sign: Int8[ndarray, " memory"],
    targets: Int64[ndarray, "memory target"],
) -> Readings:
    """Return the readings of sign · v of a layer, and the ranks of each memory's target tokens."""
    n = len(sign)
    found = Readings(
        np.empty(n, np.int32), np.empty(n, np.float32), np.full(targets.shape, NONE, np.int32)
    )
    for memory, z in enumerate(_rows(memories, layer, sign)):
        # One row at a time, which stays in the processor's cache: three passes over all rows,
        # or bool sums of a whole part, take several times as long.
        top = int(z.argmax())
        found.top[memory] = top
        found.probability[memory] = 1 / np.exp(z - z[top]).sum()
        for target, token in enumerate(targets[memory].tolist()):
            if token != NONE:
                found.ranks[memory, target] = np.count_nonzero(z > z[token])
    return found


@torch.inference_mode()
def _rows(
    memories: Memories, layer: int, sign: Int8[ndarray, " memory"]
) -> Iterator[Float32[ndarray, " vocab"]]:
    """Return the logits of sign · v of every memory, one after the other."""
    values = memories.output_directions(layer)
    signs = torch.from_numpy(sign).to(values.device, values.dtype)[:, None]
    rows = max(1, _BYTES // (4 * memories.vocabulary))
    for part, signed in zip(values.split(rows), signs.split(rows), strict=True):
        yield from memories.head.folded(part * signed).cpu().numpy()
