"""The training loop: model, optimizer, schedule, evaluation, checkpoints.

    θ ← AdamW(θ, clip(∇ loss, 1)),    loss = mean −log p(next token) + β · load balancing of experts

What a step reads follows from its number, so a checkpoint needs no position in the data. Losses
stay on the device until a row of the curve needs them, so an accelerator never waits. Checkpoints
are written after rows, so they hold no losses.

Law: a run that is stopped anywhere and resumed from its last checkpoint takes the same steps, bit
for bit, as one that was never stopped (on the same machine, with the same number of threads).
"""

import math
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor, nn

from ffmem.errors import FfmemError, ModelError
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.experts import Router, balance_loss, reading_routes
from ffmem.networks.model import AdaptiveLM
from ffmem.progress import Progress
from ffmem.training.config import PATIENCE, TrainConfig
from ffmem.training.data import Blocks
from ffmem.training.run_dir import Curve, RunDir, TrainState

MIN_CLUSTER_WIDTH = 8
MAX_GRADIENT_NORM = 1.0
IGNORE_INDEX = -100

LOG_STEPS = 10
"""Steps per row of the curve; the row has the mean of their losses."""


class DivergenceError(FfmemError):
    """The loss, its gradient or the validation perplexity is no longer finite."""

    def __init__(self, step: int, found: str, last_checkpoint: int) -> None:
        kept = (
            f"The checkpoint after step {last_checkpoint:,} is kept"
            if last_checkpoint
            else "There is no checkpoint"
        )
        super().__init__(
            f"Training diverged at step {step:,}: {found}. {kept}. Train again in a new folder with"
            " a lower --learning-rate or a longer --warmup."
        )


# Model, optimizer, schedule, evaluation


def model_config(
    config: TrainConfig, vocabulary: int, start: int, memory: str, memories: int
) -> AdaptiveConfig:
    """Return the sizes of a model; `memory` and `memories` may be those of a model to match.

    Clusters of the vocabulary end at the cutoffs; cluster b has width max(8, width / 4ᵇ).
    """
    cutoffs = config.cutoffs or []
    if cutoffs and cutoffs[-1] >= vocabulary:
        raise ModelError(
            f"--cutoffs {','.join(map(str, cutoffs))}: the vocabulary has only {vocabulary:,}"
            " tokens, which leaves none for the last cluster. Use lower cutoffs, or none."
        )
    sizes = [end - begin for begin, end in pairwise([0, *cutoffs, vocabulary])]
    tails = [max(MIN_CLUSTER_WIDTH, config.width // 4**number) for number in range(1, len(sizes))]
    return AdaptiveConfig(
        memory=memory,
        band_sizes=sizes,
        band_widths=[config.width, *tails],
        hidden_size=config.width,
        intermediate_size=memories,
        num_hidden_layers=config.layers,
        num_attention_heads=config.n_heads,
        max_position_embeddings=config.context,
        dropout=config.dropout,
        key_width=config.key_width,
        distances=config.n_distances,
        num_experts=config.experts,
        num_experts_per_tok=config.top_experts,
        shared_expert=config.shared_expert,
        bos_token_id=start,
        eos_token_id=start,
        pad_token_id=1 if start == 2 else start,
    )


def new_model(config: AdaptiveConfig, seed: int, device: torch.device) -> AdaptiveLM:
    """Return a model with random weights, the same on every device."""
    torch.manual_seed(seed)
    model = AdaptiveLM(config)
    nn.Module.to(model, device)  # transformers' own `to` is untyped
    return model


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW; matrices decay, but norms, biases and embeddings do not."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for weight in model.parameters():
        (others if weight.ndim < 2 or id(weight) in embeddings else decayed).append(weight)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-8, fused=True)


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Return the learning rate of a step, counted from 0.

    η(n) = η · (n + 1)/w                                          n < w: linear warm-up
    η(n) = η · (0.1 + 0.9 · (1 + cos(π · (n − w)/(N − w)))/2)     else: cosine to a tenth
    """
    if step < warmup:
        return peak * ((step + 1) / warmup)
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


@torch.no_grad()
def perplexity(
    model: AdaptiveLM, stream: Int[ndarray, " token"], context: int, n_blocks: int
) -> float:
    """Return exp(−1/T · Σ log p(token | those before it in its block)) over a stream of T tokens.

    Every token counts, start tokens too; the first one counts as what follows the last. Reads
    `n_blocks` blocks at a time, in float32 whatever the training uses.
    """
    was_training = model.training
    model.train(False)
    n_rows = -(-len(stream) // context)
    tokens = np.zeros(n_rows * context, np.int64)
    targets = np.full(n_rows * context, IGNORE_INDEX, np.int64)
    tokens[: len(stream)] = stream
    targets[: len(stream)] = np.roll(stream, -1)
    total = 0.0
    for first in range(0, n_rows, n_blocks):
        part = slice(first * context, (first + n_blocks) * context)
        inputs, following = (
            torch.from_numpy(ids[part]).view(-1, context).to(model.device)
            for ids in (tokens, targets)
        )
        n_counted = int((following >= 0).sum())
        total += float(model.loss(inputs, following)) * n_counted
    model.train(was_training)
    mean = total / len(stream)
    return math.exp(mean) if mean < 700 else math.inf


# The loop


class Trainer:
    """A model in training, with its curve, evaluations and checkpoints."""

    def __init__(
        self,
        model: AdaptiveLM,
        config: TrainConfig,
        blocks: Blocks,
        valid: Int[ndarray, " token"],
        steps: int,
        run_dir: RunDir,
    ) -> None:
        self.model = model
        self.config = config
        self.blocks = blocks
        self.valid = valid
        self.steps = steps
        self.run_dir = run_dir
        self.curve = Curve(run_dir.path)
        self.state = TrainState()
        self.optimizer = make_optimizer(model, config.weight_decay)
        self.weights = list(model.parameters())
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.warmup = config.warmup_steps(steps)
        self.evaluate_every = config.evaluate_every or blocks.n_steps(1, config.blocks_per_step)
        self._losses: list[Tensor] = []
        """Loss, load-balancing loss and gradient norm of each step since the last row."""
        self._row_seconds = 0.0
        """Spent on these steps."""
        self._last_checkpoint = 0
        self._last_save = time.monotonic()
        self._note = ""

    def start_or_resume(self) -> bool:
        """Load the last checkpoint, if there is one; return whether there was."""
        if not self.run_dir.state_path.is_file():
            self.curve.start()
            return False
        self.state = self.run_dir.read_state(self.model, self.optimizer)
        self._last_checkpoint = self.state.step
        self.curve.resume(self.state.rows)
        return True

    def train(self, progress: Progress) -> None:
        """Train to the end."""
        self.model.train()
        done = self.state.step
        with progress.bar("Training", self.steps, "steps", done, lambda: self._note) as advance:
            while self.state.step < self.steps and not self.state.stopped_early:
                begin = time.perf_counter()
                self.step()
                self._row_seconds += time.perf_counter() - begin
                step = self.state.step
                evaluate = step % self.evaluate_every == 0 or step == self.steps
                if not evaluate and step % LOG_STEPS:
                    continue
                self._add_loss_row()
                advance(step - done)
                done = step
                if evaluate:
                    progress.say(self._evaluate())
                elif time.monotonic() >= self._last_save + 60 * self.config.checkpoint_minutes:
                    self.save()

    def step(self) -> None:
        """Take the next step."""
        number = self.state.step
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(number)
        self.optimizer.zero_grad(set_to_none=True)
        inputs, targets = self.blocks.batch(number, self.config.blocks_per_step)
        losses = self._backward(inputs, targets)
        norm = nn.utils.clip_grad_norm_(self.weights, MAX_GRADIENT_NORM, foreach=True)
        self._losses.append(torch.cat([losses, norm[None]]))
        self.optimizer.step()
        self.state = replace(self.state, step=number + 1)

    def _backward(
        self, inputs: Int[Tensor, "block position"], targets: Int[Tensor, "block position"]
    ) -> Float[Tensor, "2"]:
        """Accumulate the gradient of the mean loss over all passes of a step.

        Return −log p and the load-balancing loss, which is the mean over layers and passes, and 0
        without experts.
        """
        device = self.model.device
        size = self.config.blocks_per_pass(device.type)
        low = self.config.dtype == "bfloat16"
        total = torch.zeros(2, device=device)
        for tokens, following in zip(inputs.split(size), targets.split(size), strict=True):
            with (
                torch.autocast(device.type, torch.bfloat16, enabled=low),
                reading_routes(self.routers) as routes,
            ):
                loss = self.model.loss(tokens.to(device), following.to(device))
            share = len(tokens) / len(inputs)
            balance = torch.stack([balance_loss(one) for one in routes]).mean() if routes else None
            objective = loss if balance is None else loss + self.config.balance * balance
            (objective * share).backward()
            total[0] += loss.detach() * share
            if balance is not None:
                total[1] += balance.detach() * share
        return total

    def _learning_rate(self, step: int) -> float:
        return learning_rate(step, self.steps, self.warmup, self.config.learning_rate)

    def _add_loss_row(self) -> None:
        """Add the mean loss since the last row to the curve; raise if a loss is not finite."""
        losses, balances, norms = torch.stack(self._losses).T.tolist()
        first = self.state.step - len(losses) + 1
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=first):
            if not math.isfinite(loss):
                raise DivergenceError(step, f"the loss is {loss}", self._last_checkpoint)
            if not math.isfinite(norm):
                raise DivergenceError(step, f"the gradient norm is {norm}", self._last_checkpoint)
        n = len(losses)
        loss = math.fsum(losses) / n
        rate = n * self.config.tokens_per_step / self._row_seconds
        self._add_row(
            loss=loss,
            **({"balance_loss": math.fsum(balances) / n} if self.routers else {}),
            learning_rate=self._learning_rate(self.state.step - 1),
            tokens_per_second=round(rate, 1),
        )
        self.state = replace(self.state, seconds=self.state.seconds + self._row_seconds)
        self._losses, self._row_seconds = [], 0.0
        self._note = format_numbers(loss, self.state.best_perplexity, rate)

    def _add_row(self, **values: Any) -> None:
        step = self.state.step
        epoch = step * self.config.blocks_per_step / self.blocks.per_epoch
        tokens = step * self.config.tokens_per_step
        self.curve.add({"step": step, "epoch": epoch, "tokens": tokens, **values})
        self.state = replace(self.state, rows=len(self.curve.rows))

    def _evaluate(self) -> str:
        """Measure validation perplexity, keep the weights if they are the best; return a line."""
        step, best = self.state.step, self.state.best_perplexity
        n_blocks = self.config.blocks_per_pass(self.model.device.type)
        found = perplexity(self.model, self.valid, self.config.context, n_blocks)
        if not math.isfinite(found):
            raise DivergenceError(
                step, f"the validation perplexity is {found}", self._last_checkpoint
            )
        self._add_row(valid_perplexity=found)
        is_best = best is None or found < best
        if is_best:
            self.run_dir.write_best(step, self.model)
            self.state = replace(
                self.state, best_step=step, best_perplexity=found, evaluations_since_best=0
            )
        else:
            since = self.state.evaluations_since_best + 1
            stopped = self.config.stops_early and since >= PATIENCE
            self.state = replace(self.state, evaluations_since_best=since, stopped_early=stopped)
        self.save()
        return (
            f"Step {step:,} of {self.steps:,} (epoch {self.curve.rows[-1]['epoch']:.2f}):"
            f" validation perplexity {found:,.2f}{', the best so far' if is_best else ''}."
        )

    def save(self) -> None:
        """Write a checkpoint."""
        self.curve.flush()
        self.run_dir.write_state(self.state, self.model, self.optimizer)
        self._last_checkpoint = self.state.step
        self._last_save = time.monotonic()


def format_numbers(loss: float, perplexity: float | None, rate: float) -> str:
    """Return loss, perplexities and speed in one line."""
    training = f"{math.exp(loss):,.1f}" if loss < 700 else "∞"
    valid = "" if perplexity is None else f", valid {perplexity:,.1f}"
    return f"loss {loss:.3f}, perplexity {training}{valid}, {rate:,.0f} tokens/s"
