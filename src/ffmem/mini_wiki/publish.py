"""Put a trained model into the package as the named model `mini-wiki`.

    python -m ffmem.mini_wiki.publish TRAINED_FOLDER --valid wikitext-2:valid

Weights are stored in float16 and read in float32, as any model is. Nothing is published that does
not keep the paper's equations, that is too large to be carried, or whose perplexity changed:

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
from ffmem.mini_wiki.folder import FILES, MODEL, NAME
from ffmem.models.checkpoint import silence_transformers
from ffmem.models.load import load
from ffmem.models.memories import Memories
from ffmem.networks.model import AdaptiveLM
from ffmem.training.trainer import perplexity

MOST_BYTES = 12_000_000
LARGEST_CHANGE = 0.01
CURVE = ("curve.svg", "curve.jsonl")
"""What the model card shows and names, if the run has drawn it."""


def publish(trained: Path, out: Path = MODEL, valid: Corpus | None = None) -> str:
    """Publish a trained folder; return what was published, in a few sentences."""
    _refuse_unfinished(trained)
    check_writable(out)
    memories = load(trained, device="cpu")
    if not isinstance(memories.model, AdaptiveLM):
        raise ModelError(f"{trained} is a {memories.family!r} model, and none of `ffmem train`.")
    before = None if valid is None else _perplexity(memories, valid)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".publishing-") as made:
        folder = Path(made)
        _write_half(memories.model, trained, folder)
        stored = load(folder, device="cpu")  # which checks the paper's equations
        told = _told(folder)
        if valid is not None and before is not None:
            told += _told_perplexities(before, _perplexity(stored, valid), valid.source)
        write_text(folder / "README.md", _card(trained, told))
        _refuse_large(folder)
        _move(folder, out)
    return told


def _refuse_unfinished(trained: Path) -> None:
    """Refuse a folder that `ffmem train` has not finished."""
    lacking = [name for name in FILES if not (trained / name).is_file()]
    if lacking:
        raise ModelError(
            f"{trained} is no finished run of `ffmem train --tokenizer words`: it lacks"
            f" {', '.join(lacking)}. Give the folder of --out, when the run has ended."
        )


def _write_half(model: AdaptiveLM, trained: Path, folder: Path) -> None:
    """Write the model in float16, with everything that came of its training."""
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


def _told(folder: Path) -> str:
    size = (folder / "model.safetensors").stat().st_size
    return f"The weights are stored in float16 ({size / 1e6:.1f} MB), and read in float32."


def _told_perplexities(before: float, stored: float, text: str) -> str:
    """Return what float16 did to the perplexity; refuse if it did much."""
    if not abs(stored / before - 1) < LARGEST_CHANGE:
        raise ModelError(
            f"In float16 the perplexity on {text} is {stored:,.2f}, and {before:,.2f} as trained:"
            f" more than {LARGEST_CHANGE:.0%} apart. Nothing was published; train with more weight"
            " decay, so that weights stay small."
        )
    return f" Perplexity on `{text}`: {stored:,.3f}, and {before:,.3f} before they were rounded."


def _card(trained: Path, told: str) -> str:
    """Return the model card of the run, with what publishing adds."""
    card = (trained / "README.md").read_text(encoding="utf-8").replace("THIS FOLDER", NAME)
    return f"{card}\n## As published\n\n`{NAME}` comes with ffmem: no network is needed. {told}\n"


def _refuse_large(folder: Path) -> None:
    """Refuse what is too large for a package."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MOST_BYTES:
        raise ModelError(
            f"The folder would have {size / 1e6:.1f} MB, and a package may carry"
            f" {MOST_BYTES / 1e6:.0f} MB. Nothing was published; train a narrower model."
        )


def _move(folder: Path, out: Path) -> None:
    """Put every file in its place; a curve of an earlier model goes, what is not ours stays."""
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
@click.option("--valid", help="A corpus: refuse if float16 changes the perplexity on it.")
@click.option("--out", default=MODEL, type=click.Path(path_type=Path), help="Folder to fill.")
def main(trained: Path, valid: str | None, out: Path) -> None:
    """Publish what `ffmem train` has made as the named model mini-wiki."""
    click.echo(publish(trained, out, None if valid is None else Corpus(valid)))


if __name__ == "__main__":
    main()
