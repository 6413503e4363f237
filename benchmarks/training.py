"""How fast the training loop is, beside a bare PyTorch loop over the same modules and batches.

A step of the bare loop is forward, loss, backward, gradient clipping and AdamW, on batches that
lie ready. Both take steps in turn, each on a model of its own; of each the best counts. A second
bare loop adds up gradients over the same passes as ours.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import passes
import torch
from torch import Tensor

LAYERS, WIDTH, MEMORIES, CUTOFFS, VOCABULARY = 16, 128, 512, [4_000, 12_000], 28_004


def training(rounds: int = 8) -> dict[str, Any]:
    """Tokens per second of `ffmem train`'s loop and of bare loops, and the share of peak GEMM."""
    from ffmem.training.config import TrainConfig
    from ffmem.training.data import Blocks
    from ffmem.training.run_dir import RunDir
    from ffmem.training.trainer import Trainer, model_config, new_model

    config = TrainConfig(memory="relu", layers=LAYERS, width=WIDTH, cutoffs=CUTOFFS)
    sizes = model_config(config, VOCABULARY, 2, "relu", MEMORIES)
    stream = _stream()
    blocks = Blocks(stream, config.context, 0)
    device = torch.device("cpu")
    model = new_model(sizes, 0, device).train()
    unwritten = RunDir(Path("unwritten"))  # steps alone write nothing
    trainer = Trainer(model, config, blocks, stream, 10_000, unwritten)
    batches = [blocks.batch(step, config.blocks_per_step) for step in range(rounds + 1)]
    size = config.blocks_per_pass("cpu")
    variants: dict[str, Callable[[int], Any]] = {
        "ffmem train": lambda step: trainer.step(),
        "bare": _bare(new_model(sizes, 0, device).train(), batches, len(batches[0][0])),
        "bare, same passes": _bare(new_model(sizes, 0, device).train(), batches, size),
    }
    seconds = dict.fromkeys(variants, float("inf"))
    gemm = 0.0
    for step in range(rounds + 1):
        for name, run in variants.items():
            begin = time.perf_counter()
            run(step)
            taken = time.perf_counter() - begin
            if step:  # the first one warms up
                seconds[name] = min(seconds[name], taken)
        gemm = max(gemm, passes.peak_gemm(rounds=5))
    tokens = config.tokens_per_step
    speeds = {name: tokens / taken for name, taken in seconds.items()}
    gflops = _flop(sizes, config.context, batches) / seconds["ffmem train"] / 1e9
    return {
        "layers": LAYERS,
        "width": WIDTH,
        "parameters": sum(weight.numel() for weight in trainer.weights),
        "tokens_per_step": tokens,
        "tokens_per_pass": size * config.context,
        "dropout": config.dropout,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "tokens_per_second": speeds,
        "over_bare": speeds["ffmem train"] / speeds["bare"],
        "over_bare_same_passes": speeds["ffmem train"] / speeds["bare, same passes"],
        "least_ratio": 0.85,
        "gflops_in_products": gflops,
        "peak_gemm_gflops": gemm,
        "share_of_peak": gflops / gemm,
    }


def _bare(model: Any, batches: list[tuple[Tensor, Tensor]], n_blocks: int) -> Callable[[int], None]:
    """The loop as everybody writes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1)

    def run(step: int) -> None:
        inputs, targets = batches[step]
        optimizer.zero_grad()
        for tokens, following in zip(inputs.split(n_blocks), targets.split(n_blocks), strict=True):
            loss = model.loss(tokens, following) * (len(tokens) / len(inputs))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        float(loss.detach())

    return run


def _stream() -> np.ndarray:
    """Token ids as frequent as words are: the r-th with a share of about 1/r."""
    weights = 1 / (np.arange(VOCABULARY) + 10)
    drawn = np.random.default_rng(0).choice(VOCABULARY, 300_000, p=weights / weights.sum())
    return drawn.astype(np.int32)


def _flop(config: Any, context: int, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Operations in the matrix products of one step: three times those of its forward pass.

    A cluster's words are only compared where the target is in it; attention is counted as if
    it saw half of the block, for it is causal.
    """
    d = config.hidden_size
    targets = torch.stack([targets for _, targets in batches]).flatten()
    n = targets.numel() / len(batches)
    ends = np.cumsum(config.band_sizes)
    per_token = config.num_hidden_layers * (4 * d * d + 2 * d * config.intermediate_size)
    per_token += config.num_hidden_layers * context * d  # 2 products, half of the block
    total = n * (per_token + d * (config.band_sizes[0] + len(ends) - 1) + d * d)
    for band in range(1, len(ends)):
        share = float(((targets >= ends[band - 1]) & (targets < ends[band])).float().mean())
        width = config.band_widths[band]
        total += n * share * (2 * d * width + width * config.band_sizes[band])
    return 3 * 2 * total
