"""Put a trained model into the package as the named model `mini-wiki`.

    python -m ffmem.mini_wiki.publish TRAINED_FOLDER --valid wikitext-2:valid

Weights are stored in float16 and loaded in float32. A model is published only if the paper's
equations hold on it, it is small enough for a package, and rounding keeps its perplexity:

    |perplexity(float16 weights) / perplexity(trained weights) − 1| < 1 %
"""

import shutil
import tempfile
from pathlib import Path

import click
import numpy as np
import torch
from torch import nn

from ffmem.corpus.corpus import Corpus
from ffmem.errors import ModelError
from ffmem.files import check_writable, storage_errors, sync, write_text
from ffmem.mini_wiki import FILES, MODEL, NAME, missing_files
from ffmem.models.checkpoint import silence_transformers
from ffmem.models.load import load
from ffmem.models.memories import Memories
from ffmem.networks.model import AdaptiveLM
from ffmem.training.trainer import perplexity

MAX_BYTES = 12_000_000
MAX_PERPLEXITY_CHANGE = 0.01
CURVE = ("curve.svg", "curve.jsonl")
"""The loss curve that the model card shows, if the run drew it."""


def publish(trained: Path, out: Path = MODEL, valid: Corpus | None = None) -> str:
    """Publish a trained model; return a summary in a few sentences."""
    if missing := missing_files(trained):
        raise ModelError(
            f"{trained} is not a finished run of `ffmem train --tokenizer words`: it lacks"
            f" {missing}. Pass the --out folder of a run that has ended."
        )
    check_writable(out)
    memories = load(trained, device="cpu")
    if not isinstance(memories.model, AdaptiveLM):
        raise ModelError(
            f"{trained} is a {memories.family!r} model. Pass one that `ffmem train` made."
        )
    before = None if valid is None else _perplexity(memories, valid)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".publishing-") as temporary:
        folder = Path(temporary)
        _write_half(memories.model, trained, folder)
        stored = load(folder, device="cpu")  # which checks the paper's equations
        n_bytes = (folder / "model.safetensors").stat().st_size
        summary = f"Weights are stored in float16 ({n_bytes / 1e6:.1f} MB) and loaded in float32."
        if valid is not None and before is not None:
            after = _perplexity(stored, valid)
            _check_change(before, after, valid.source)
            summary += (
                f" Perplexity on `{valid.source}`: {after:,.3f}, and {before:,.3f} before rounding."
            )
        card = (trained / "README.md").read_text(encoding="utf-8").replace("THIS FOLDER", NAME)
        note = f"## As published\n\n`{NAME}` ships with ffmem: it needs no network. {summary}\n"
        write_text(folder / "README.md", f"{card}\n{note}")
        _check_size(folder)
        _move(folder, out)
    return summary


def _write_half(model: AdaptiveLM, trained: Path, folder: Path) -> None:
    """Write the model in float16, and copy the other files of its training run."""
    with storage_errors(folder), silence_transformers():
        nn.Module.to(model, torch.float16)
        model.save_pretrained(folder)
        for name in (*FILES, *CURVE):
            if (trained / name).is_file() and not (folder / name).exists():
                shutil.copyfile(trained / name, folder / name)


def _perplexity(memories: Memories, valid: Corpus) -> float:
    """Return the perplexity on a text, measured as in training."""
    model, start = memories.model, memories.tokenizer.own_start
    assert isinstance(model, AdaptiveLM)
    sentences = valid.sentences(memories.tokenizer)
    tokens = [id for sentence in sentences for id in (start, *sentence.ids)]
    context = int(model.config.max_position_embeddings)
    return perplexity(model, np.array(tokens, np.int32), context, 8 * context)


def _check_change(before: float, after: float, text: str) -> None:
    """Raise if float16 changes the perplexity."""
    if not abs(after / before - 1) < MAX_PERPLEXITY_CHANGE:
        raise ModelError(
            f"The perplexity on {text} is {before:,.2f} as trained and {after:,.2f} in float16:"
            f" more than {MAX_PERPLEXITY_CHANGE:.0%} apart. Nothing was published. Train with more"
            " weight decay to keep the weights small."
        )


def _check_size(folder: Path) -> None:
    n_bytes = sum(path.stat().st_size for path in folder.iterdir())
    if n_bytes > MAX_BYTES:
        raise ModelError(
            f"The folder would take {n_bytes / 1e6:.1f} MB, and a package may carry at most"
            f" {MAX_BYTES / 1e6:.0f} MB. Nothing was published. Train a narrower model."
        )


def _move(folder: Path, out: Path) -> None:
    """Move every file to `out`; delete an earlier model's curve, and leave other files alone."""
    with storage_errors(out):
        names = {path.name for path in folder.iterdir()}
        for name in CURVE:
            if name not in names:
                (out / name).unlink(missing_ok=True)
        for name in sorted(names):
            (folder / name).chmod(0o644)  # safetensors writes for the owner only
            sync(folder / name)
            (folder / name).replace(out / name)
        sync(out)


@click.command()
@click.argument("trained", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--valid", help="Corpus on which float16 must keep the perplexity.")
@click.option("--out", default=MODEL, type=click.Path(path_type=Path), help="Folder to fill.")
def main(trained: Path, valid: str | None, out: Path) -> None:
    """Publish a model of `ffmem train` as the named model mini-wiki."""
    click.echo(publish(trained, out, None if valid is None else Corpus(valid)))


if __name__ == "__main__":
    main()
