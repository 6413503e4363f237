"""Ablations that share forward passes from their layer upward, beside one whole pass for each."""

import time
from collections.abc import Callable
from typing import Any

import torch

import ffmem

MODEL = "smollm2-135m"
TEXT = (
    "The Eiffel Tower, which was finished in 1889 and is visited by millions of people, stands in"
    " the city of"
)
TOKENS = 20


def effect_of_smollm2(
    ablations: int = 200, rounds: int = 3, whole_passes: int = 20
) -> dict[str, Any]:
    """Seconds of exact ablations, ours and one whole hooked forward pass each, interleaved.

    A round runs all ablations our way and only `whole_passes` of them, spread over the layers, as
    whole passes, whose time is scaled up; the best round of each counts. Ours includes the clean
    pass that keeps the residual. How the estimates choose the memories is timed by itself.
    """
    from ffmem.interventions.edits import Edits
    from ffmem.interventions.effect import ablate
    from ffmem.interventions.estimates import choose_candidates, estimate
    from ffmem.interventions.forward import apply_edits
    from ffmem.interventions.partial_forward import PartialForward

    memories = ffmem.load(MODEL)
    (encoding,) = memories.tokenizer.encode([TEXT])
    ids = [memories.tokenizer.eos, *encoding.ids][:TOKENS]
    assert len(ids) == TOKENS, "the prompt is too short"
    tokens = torch.tensor([ids])
    target = int(memories.logits(tokens)[0, -1].argmax())

    def choose() -> Any:
        estimates = estimate(PartialForward(memories, ids, TOKENS - 1), target)
        return choose_candidates(memories.layout, estimates, ablations)

    cells = sorted(choose())
    some = cells[:: len(cells) // whole_passes][:whole_passes]

    def ours() -> Any:
        return ablate(PartialForward(memories, ids, TOKENS - 1), target, cells)

    def whole() -> Any:
        found = []
        for cell in some:
            with apply_edits(memories, Edits.of(off=[cell])):
                found.append(memories.logits(tokens)[0, -1].double().log_softmax(dim=0)[target])
        clean = memories.logits(tokens)[0, -1].double().log_softmax(dim=0)[target]
        return torch.stack(found) - clean

    difference = (ours()[[cells.index(cell) for cell in some]] - whole()).abs().max()
    taken = {"ours": float("inf"), "whole": float("inf"), "choosing": float("inf")}
    for _ in range(rounds):
        for name, run in (("ours", ours), ("whole", whole), ("choosing", choose)):
            taken[name] = min(taken[name], _timed(run))
    whole_seconds = taken["whole"] * len(cells) / (len(some) + 1)  # one of them runs clean
    return {
        "tokens": TOKENS,
        "ablations": len(cells),
        "whole_passes_timed": len(some) + 1,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "mean_layer": sum(cell.layer for cell in cells) / len(cells),
        "seconds": taken["ours"],
        "whole_passes_seconds_scaled_up": whole_seconds,
        "ratio": whole_seconds / taken["ours"],
        "least_ratio": 5,
        "choosing_seconds": taken["choosing"],
        "largest_difference": float(difference),
    }


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
