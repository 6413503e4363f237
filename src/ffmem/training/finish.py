"""The end of a run: its best weights as a Hugging Face folder, figures, curve and model card.

`training.json` is written last. Whatever happens before, the run can be finished again from its
checkpoint.
"""

import shutil
from pathlib import Path

from safetensors import SafetensorError

from ffmem.errors import StorageFull
from ffmem.files import remove_temporaries, storage_errors, sync, write_text
from ffmem.models.load import quiet
from ffmem.networks.model import AdaptiveLM
from ffmem.training.card import card
from ffmem.training.chart import draw
from ffmem.training.checkpoint import FOLDER, Standing
from ffmem.training.curve import Curve
from ffmem.training.record import Asked, Prepared, Trained

TOKENIZER_FILES = ("dict.txt", "tokenizer.json", "tokenizer_config.json")


def finish(
    asked: Asked,
    prepared: Prepared,
    standing: Standing,
    model: AdaptiveLM,
    curve: Curve,
    out: Path,
) -> Trained:
    """Write a model with its best weights and all that is to be known of it."""
    trained = _trained(asked, prepared, standing, curve)
    _save(model, out)
    draw(curve.rows, out, trained)
    write_text(out / "README.md", card(trained))
    remove_temporaries(out)
    trained.write(out)
    return trained


def _trained(asked: Asked, prepared: Prepared, standing: Standing, curve: Curve) -> Trained:
    last = curve.rows[-1]  # a run ends with an evaluation
    losses = [row["loss"] for row in curve.rows if "loss" in row]
    assert standing.best_step is not None
    assert standing.best_perplexity is not None
    return Trained(
        asked=asked,
        prepared=prepared,
        steps=standing.step,
        epochs=last["epoch"],
        tokens=last["tokens"],
        seconds=standing.seconds,
        tokens_per_second=last["tokens"] / standing.seconds,
        best_step=standing.best_step,
        valid_perplexity=standing.best_perplexity,
        last_valid_perplexity=last["valid_perplexity"],
        last_loss=losses[-1],
        stopped_early=standing.finished and standing.step < prepared.steps,
    )


def _save(model: AdaptiveLM, out: Path) -> None:
    """Write config, weights and tokenizer; each file is whole before it has its place."""
    beside = out / FOLDER / "model"
    with storage_errors(out), quiet():
        shutil.rmtree(beside, ignore_errors=True)
        try:
            model.save_pretrained(beside)
        except SafetensorError as error:
            raise StorageFull(
                f"The weights cannot be written to {beside}: {error}. The checkpoint is kept: free"
                " some space and run the same command again."
            ) from None
        for name in TOKENIZER_FILES:
            if (out / FOLDER / name).is_file():
                shutil.copyfile(out / FOLDER / name, beside / name)
        mode = (beside / "config.json").stat().st_mode
        for path in beside.iterdir():
            path.chmod(mode)  # safetensors writes for the owner only
            sync(path)
            path.replace(out / path.name)
        beside.rmdir()
        sync(out)
