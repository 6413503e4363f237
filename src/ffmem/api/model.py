"""Models: train one."""

from pathlib import Path
from typing import TYPE_CHECKING

from ffmem.config_fields import from_parameters
from ffmem.models.arguments import require_models
from ffmem.progress import Progress
from ffmem.signatures import check_arguments
from ffmem.training.config import TrainConfig

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.training.run_dir import TrainResult


@check_arguments
def train(
    corpus: "Corpus | str | Path",
    out: str | Path,
    valid: "Corpus | str | Path | None" = None,
    *,
    memory: str,
    layers: int,
    width: int = TrainConfig.width,
    memories: int | None = TrainConfig.memories,
    match: str | None = TrainConfig.match,
    heads: int | None = TrainConfig.heads,
    key_width: int = TrainConfig.key_width,
    distances: int = TrainConfig.distances,
    experts: int = TrainConfig.experts,
    top_experts: int = TrainConfig.top_experts,
    shared_expert: bool = TrainConfig.shared_expert,
    balance: float = TrainConfig.balance,
    context: int = TrainConfig.context,
    tokenizer: str = TrainConfig.tokenizer,
    vocabulary: int | None = TrainConfig.vocabulary,
    cutoffs: list[int] | None = TrainConfig.cutoffs,
    steps: int | None = TrainConfig.steps,
    epochs: int | None = TrainConfig.epochs,
    evaluate_every: int | None = TrainConfig.evaluate_every,
    batch_tokens: int = TrainConfig.batch_tokens,
    pass_tokens: int | None = TrainConfig.pass_tokens,
    learning_rate: float = TrainConfig.learning_rate,
    warmup: int | None = TrainConfig.warmup,
    weight_decay: float = TrainConfig.weight_decay,
    dropout: float = TrainConfig.dropout,
    dtype: str = TrainConfig.dtype,
    seed: int = TrainConfig.seed,
    device: str = TrainConfig.device,
    threads: int | None = TrainConfig.threads,
    checkpoint_minutes: float = TrainConfig.checkpoint_minutes,
    progress: Progress | None = None,
) -> "TrainResult":
    """Train a small language model, or resume an unfinished run; return losses and settings.

    The model is written to `out`. `ffmem train --help` describes every parameter.

    train("wikitext-2:train", "model", "wikitext-2:valid", memory="persistent", layers=4, epochs=1)
    """
    config = from_parameters(TrainConfig, locals())
    require_models()
    from ffmem.training.train import train as run

    validation = None if valid is None else as_corpus(valid)
    return run(config, as_corpus(corpus), Path(out), validation, progress=progress)


def as_corpus(corpus: "Corpus | str | Path") -> "Corpus":
    """Return the corpus of a CORPUS argument; a `Corpus` is returned as it is."""
    from ffmem.corpus.corpus import Corpus

    return corpus if isinstance(corpus, Corpus) else Corpus(str(corpus))
