"""What a user may choose about a training run; every choice is recorded.

    steps = --steps | --epochs · blocks / blocks of a step | until validation stops improving

A contradiction is told before anything is read or made.
"""

from dataclasses import dataclass

from ffmem.errors import FfmemError, ModelError
from ffmem.records import Record

KINDS = ("relu", "gelu", "swiglu", "softmax", "persistent", "lambda")
"""The kinds of memory, as `ffmem.networks` names them; importing that takes seconds."""

TOKENIZERS = {"words": 28_000, "bpe": 8_000}
"""What a text can be cut into, and how many of these a vocabulary has by default."""

MOST_EPOCHS = 10
"""How long a run without --steps and --epochs lasts at most."""

CPU_PASS = 1024
"""Tokens of a pass on a CPU by default."""

PATIENCE = 2
"""How many evaluations in a row may bring nothing before such a run stops."""

_POSITIVE = (
    *("layers", "width", "heads", "memories", "context", "batch_tokens", "pass_tokens"),
    *("steps", "epochs", "vocabulary", "threads", "evaluate_every", "key_width", "distances"),
)


@dataclass(frozen=True, kw_only=True)
class Settings(Record):
    """The choices of a run, as given; None leaves a choice to ffmem."""

    memory: str
    """The kind of memory."""
    layers: int
    width: int = 128
    memories: int | None = None
    """Per layer (persistent: per head); None: 4 × width. With `match`, those of that kind."""
    match: str | None = None
    """The kind of memory whose number of parameters is to be matched."""
    heads: int | None = None
    """None: one for every 32 of the width, at least one."""
    key_width: int = 16
    """Of a lambda layer's keys."""
    distances: int = 64
    """How far back a lambda layer's static keys reach."""
    context: int = 128
    """Tokens of a block."""
    bands: list[int] | None = None
    """Where the bands of the vocabulary end, as in fairseq; None: one band."""
    tokenizer: str = "words"
    vocabulary: int | None = None
    """How many words, or tokens; None: as `TOKENIZERS` says."""
    steps: int | None = None
    epochs: int | None = None
    evaluate_every: int | None = None
    """Steps; None: after every epoch, and at the end."""
    batch_tokens: int = 4096
    """Tokens of a step."""
    pass_tokens: int | None = None
    """Tokens of one pass at most; gradients of a step add up over its passes. None: on a CPU as
    many as stay in its caches, elsewhere all of a step."""
    learning_rate: float = 2e-3
    """At its highest."""
    warmup: int | None = None
    """Steps; None: a twentieth of all, at most 500."""
    weight_decay: float = 0.1
    dropout: float = 0.1
    dtype: str = "float32"
    seed: int = 0
    threads: int | None = None
    """None: as many as torch takes, or as many as an interrupted run had."""

    def __post_init__(self) -> None:
        self._refuse_unknown()
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FfmemError(
                    f"--{_option(name)} {value} was asked for; give a number of at least 1."
                )
        self._refuse_contradictions()
        self._refuse_bad_numbers()

    def _refuse_unknown(self) -> None:
        for name, given in (("memory", self.memory), ("match", self.match)):
            if given not in KINDS and (given is not None or name == "memory"):
                raise ModelError(
                    f"--{name} {given}: there is no such kind of memory."
                    f" Known kinds: {', '.join(KINDS)}."
                )
        if self.tokenizer not in TOKENIZERS:
            raise FfmemError(f"--tokenizer takes words or bpe; {self.tokenizer!r} was given.")
        if self.dtype not in ("float32", "bfloat16"):
            raise FfmemError(f"--dtype takes float32 or bfloat16; {self.dtype!r} was given.")

    def _refuse_contradictions(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise FfmemError(
                f"--steps {self.steps} and --epochs {self.epochs} were asked for. Give one of"
                " them, or none: then training goes on until validation stops improving."
            )
        if self.width % self.n_heads:
            raise ModelError(
                f"A width of {self.width} cannot be shared by {self.n_heads} heads evenly."
                " Give --width as a multiple of --heads."
            )
        if self.context < 2:
            raise FfmemError(
                f"--context {self.context}: a block of one token shows no prefix. Give 2 or more."
            )
        if self.batch_tokens < self.context:
            raise FfmemError(
                f"--batch-tokens {self.batch_tokens} is less than one block of --context"
                f" {self.context} tokens. Give at least one block."
            )
        ends = self.bands or []
        if any(later <= earlier for earlier, later in zip([0, *ends], ends, strict=False)):
            raise ModelError(
                f"--bands {','.join(map(str, ends))}: the ends of bands must be above 0 and rise."
            )

    def _refuse_bad_numbers(self) -> None:
        if not 0 < self.learning_rate < float("inf"):
            raise FfmemError(f"--learning-rate {self.learning_rate}: give a finite number above 0.")
        if not 0 <= self.dropout < 1:
            raise FfmemError(f"--dropout {self.dropout}: give a share from 0 to less than 1.")
        if not 0 <= self.weight_decay < float("inf"):
            raise FfmemError(
                f"--weight-decay {self.weight_decay}: give a finite number, 0 or more."
            )
        if self.warmup is not None and self.warmup < 0:
            raise FfmemError(f"--warmup {self.warmup}: give 0 steps or more.")
        if not 0 <= self.seed < 2**63:
            raise FfmemError(f"--seed {self.seed}: give a whole number from 0 to 2⁶³ − 1.")

    @property
    def n_heads(self) -> int:
        """How many heads attention has."""
        return self.heads or max(1, self.width // 32)

    def blocks_of_a_pass(self, device: str) -> int:
        """Return how many blocks go through the model at once on a kind of device."""
        tokens = self.pass_tokens or (CPU_PASS if device == "cpu" else self.batch_tokens)
        return max(1, tokens // self.context)

    @property
    def blocks_of_a_step(self) -> int:
        """How many blocks one step reads."""
        return self.batch_tokens // self.context

    @property
    def stops_early(self) -> bool:
        """Whether training ends when validation stops improving."""
        return self.steps is None and self.epochs is None


def _option(name: str) -> str:
    return name.replace("_", "-")
