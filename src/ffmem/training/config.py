"""The configuration of a training run.

    steps = --steps | --epochs · blocks / blocks per step | until validation stops improving

`TrainConfig` is the one place where options are written down. The options of `ffmem train`, the
defaults of `ffmem.train`, what `training.json` records and what is compared on resume follow from
it. Fields with `compare=False` do not decide the weights, so a resumed run may change them.
"""

from dataclasses import dataclass

from ffmem.config_fields import check_options, option
from ffmem.errors import FfmemError, ModelError
from ffmem.models.arguments import MAX_THREADS
from ffmem.records import Record

KINDS = ("relu", "gelu", "swiglu", "softmax", "persistent", "lambda", "moe")
"""The kinds of memory of `ffmem.networks`, which takes seconds to import."""

DEFAULT_VOCABULARY = {"words": 28_000, "bpe": 8_000}
"""How many words or tokens a vocabulary has by default, by kind of tokenizer."""

MAX_EPOCHS = 10
"""Limit of a run without --steps and --epochs."""

PATIENCE = 2
"""Such a run stops after this many evaluations in a row without improvement."""

CPU_PASS_TOKENS = 1024
"""Default tokens per forward pass on a CPU: as many as stay in its caches."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Record):
    """Options of a training run; None lets ffmem choose."""

    memory: str = option(f"Kind of memory: {', '.join(KINDS)}.", metavar="KIND")
    layers: int = option("Number of layers.", minimum=1)
    width: int = option("Width of the model.", 128, minimum=1)
    memories: int | None = option(
        "Memories per layer (persistent: per head, moe: per expert; with --match: of that kind)."
        " Default: 4 × width.",
        None,
        minimum=1,
    )
    match: str | None = option(
        "Choose --memories to match the parameter count of this kind (moe: active parameters).",
        None,
        metavar="KIND",
    )
    heads: int | None = option("Attention heads. Default: width / 32.", None, minimum=1)
    key_width: int = option("Width of the keys of a lambda layer.", 16, minimum=1)
    distances: int = option("Range of lambda memories, in tokens.", 64, minimum=1)
    experts: int = option("Routed experts of a moe layer.", 8, minimum=1)
    top_experts: int = option("Experts that each token is routed to.", 2, minimum=1)
    shared_expert: bool = option("Add an expert that every token reaches.", False)
    balance: float = option("Coefficient of the load-balancing loss of experts.", 0.01, minimum=0)
    context: int = option("Context length, in tokens.", 128, minimum=2)
    tokenizer: str = option(
        "Words separated by spaces, or a byte-level BPE trained on the corpus.",
        "words",
        choices=tuple(DEFAULT_VOCABULARY),
    )
    vocabulary: int | None = option(
        "Size of the vocabulary. Default: 28000 words or 8000 tokens.", None, minimum=1
    )
    cutoffs: list[int] | None = option(
        "Adaptive softmax cutoffs, as in fairseq. Default: a plain softmax.", None
    )
    steps: int | None = option("Training steps.", None, minimum=1)
    epochs: int | None = option(
        f"Epochs. Default: until validation stops improving, at most {MAX_EPOCHS}.",
        None,
        minimum=1,
    )
    evaluate_every: int | None = option(
        "Steps between evaluations. Default: one epoch.", None, minimum=1
    )
    batch_tokens: int = option("Tokens per step.", 4096, minimum=1)
    pass_tokens: int | None = option(
        "Tokens per forward pass; a step accumulates gradients over its passes."
        f" Default: {CPU_PASS_TOKENS} on a CPU, else all.",
        None,
        minimum=1,
    )
    learning_rate: float = option("Peak learning rate.", 2e-3, above=0)
    warmup: int | None = option("Warm-up steps. Default: 5%, at most 500.", None, minimum=0)
    weight_decay: float = option("Weight decay, for matrices only.", 0.1, minimum=0)
    dropout: float = option("Dropout rate.", 0.1, minimum=0, below=1)
    dtype: str = option(
        "Number format of the forward pass.", "float32", choices=("float32", "bfloat16")
    )
    seed: int = option("Random seed.", 0, minimum=0)
    device: str = option("auto, cpu, cuda, cuda:N or mps.", "auto", metavar="DEVICE", compare=False)
    threads: int | None = option(
        "CPU threads. The last bits of the weights depend on it.",
        None,
        minimum=1,
        maximum=MAX_THREADS,
        compare=False,
    )
    checkpoint_minutes: float = option(
        "Minutes between checkpoints; 0: one every 10 steps.", 5.0, minimum=0, compare=False
    )

    def __post_init__(self) -> None:
        for name, kind in (("memory", self.memory), ("match", self.match)):
            if kind not in KINDS and (kind is not None or name == "memory"):
                raise ModelError(
                    f"--{name} {kind}: unknown kind of memory. Known kinds: {', '.join(KINDS)}."
                )
        check_options(self)
        if self.seed >= 2**63:
            raise FfmemError(f"--seed {self.seed}: use a number below 2⁶³.")
        if self.steps is not None and self.epochs is not None:
            raise FfmemError(
                f"--steps {self.steps} and --epochs {self.epochs} are mutually exclusive. Use one,"
                " or none to train until validation stops improving."
            )
        if self.width % self.n_heads:
            raise ModelError(
                f"--width {self.width} is not divisible by {self.n_heads} heads. Use --width as a"
                " multiple of --heads."
            )
        if self.top_experts > self.experts:
            raise ModelError(
                f"--top-experts {self.top_experts} is more than the {self.experts} experts of a"
                " layer. Use at most --experts."
            )
        if self.batch_tokens < self.context:
            raise FfmemError(
                f"--batch-tokens {self.batch_tokens} is less than one block of --context"
                f" {self.context} tokens. Use at least one block."
            )
        cutoffs = self.cutoffs or []
        if any(later <= earlier for earlier, later in zip([0, *cutoffs], cutoffs, strict=False)):
            raise ModelError(
                f"--cutoffs {','.join(map(str, cutoffs))}: cutoffs must be positive and increasing."
            )

    @property
    def n_heads(self) -> int:
        """Number of attention heads."""
        return self.heads or max(1, self.width // 32)

    @property
    def n_distances(self) -> int:
        """How far back static keys reach: never beyond a block."""
        return min(self.distances, self.context)

    @property
    def blocks_per_step(self) -> int:
        """Blocks in one step."""
        return self.batch_tokens // self.context

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one step, in whole blocks."""
        return self.blocks_per_step * self.context

    def blocks_per_pass(self, device_type: str) -> int:
        """Return how many blocks go through the model at once on a type of device."""
        tokens = self.pass_tokens or (
            CPU_PASS_TOKENS if device_type == "cpu" else self.batch_tokens
        )
        return max(1, tokens // self.context)

    def warmup_steps(self, steps: int) -> int:
        """Return the number of warm-up steps of a run."""
        return min(500, steps // 20) if self.warmup is None else self.warmup

    @property
    def vocabulary_size(self) -> int:
        """How many words or tokens the vocabulary may have."""
        return self.vocabulary or DEFAULT_VOCABULARY[self.tokenizer]

    @property
    def stops_early(self) -> bool:
        """Whether training ends when validation stops improving."""
        return self.steps is None and self.epochs is None
