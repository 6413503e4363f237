"""Train a language model with memories of one kind: from a corpus to a folder that ffmem reads.

    corpus ─► streams ─► blocks ─► loop ─► best weights ─► FOLDER
              vocabulary           curve, checkpoints

An unfinished folder with the same settings is gone on with, to the same weights, bit for bit, as if
it had never been stopped; with other settings it is refused; a finished one is left as it is.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from numpy import ndarray

from ffmem.corpus.corpus import Corpus
from ffmem.counted import counted
from ffmem.errors import StoreError
from ffmem.files import sha256, write_text
from ffmem.models.load import find_device
from ffmem.models.threads import threads
from ffmem.progress import Progress
from ffmem.training.blocks import Blocks
from ffmem.training.checkpoint import FOLDER, Checkpoint, read_tensors, write_tensors
from ffmem.training.curve import Curve
from ffmem.training.finish import finish
from ffmem.training.live import live
from ffmem.training.loop import Loop
from ffmem.training.matching import matched
from ffmem.training.network import config_of, new_model
from ffmem.training.place import (
    ASKED,
    PREPARED,
    SEAL,
    STREAM,
    TOKENIZER,
    alone,
    clear,
    is_finished,
    refuse_foreign,
)
from ffmem.training.record import TRAINING, Asked, Prepared, Trained, read_record
from ffmem.training.run import Run, Saving
from ffmem.training.schedule import default_warmup
from ffmem.training.settings import MOST_EPOCHS, Settings
from ffmem.training.stream import Streams, streams
from ffmem.training.telling import told


class Work(NamedTuple):
    """What a run needs, made now or found in the folder."""

    asked: Asked
    prepared: Prepared
    train: Int[ndarray, " token"]
    valid: Int[ndarray, " token"]


def train(
    settings: Settings,
    corpus: Corpus,
    out: Path,
    valid: Corpus | None = None,
    *,
    device: str = "auto",
    saving: Saving | None = None,
    keep: bool = False,
    progress: Progress | None = None,
) -> Trained:
    """Train a model, or go on with it, and return what came of it; `keep` keeps the checkpoint."""
    say = progress or Progress(quiet=True)
    refuse_foreign(out)
    for source in filter(None, (corpus, valid)):
        source.refuse_missing()
    asked = _asked(settings, corpus, valid, out, device)
    if is_finished(out):
        return _found(asked, out, say)
    with alone(out):
        if is_finished(out):  # meanwhile, by another process
            return _found(asked, out, say)
        with threads(asked.threads), torch.random.fork_rng():
            work = _work(asked, corpus, valid, out, say)
            trained = _run(work, out, device, saving or Saving(), say)
        if not keep:
            clear(out)
    return trained


def _asked(
    settings: Settings, corpus: Corpus, valid: Corpus | None, out: Path, device: str
) -> Asked:
    """Return what is asked; with as many threads as an interrupted run had, if nothing is said."""
    place = find_device(device).type
    n_threads = settings.threads
    before = _before(out)
    if n_threads is None:
        n_threads = torch.get_num_threads() if before is None else before.threads
    return Asked.of_run(settings, corpus, valid, n_threads, place)


def _before(out: Path) -> Asked | None:
    """Return what was asked of the run in a folder, if there is one."""
    if is_finished(out):
        return read_record(Trained, out / TRAINING).asked
    path = out / FOLDER / ASKED
    return read_record(Asked, path) if path.is_file() else None


def _refuse_other(asked: Asked, out: Path, what: str) -> None:
    before = _before(out)
    differences = [] if before is None else asked.differences(before)
    if differences:
        raise StoreError(
            f"{out} holds {what} with other settings: {'; '.join(differences)}."
            " Give the same settings, or another folder."
        )


def _found(asked: Asked, out: Path, say: Progress) -> Trained:
    """Return what came of a finished run; with other settings, refuse."""
    _refuse_other(asked, out, "a model that was trained")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (out / name).is_file():
            raise StoreError(
                f"{out} holds a model that was trained, but {name} is not there any more. Delete"
                " the folder and train again."
            )
    trained = read_record(Trained, out / TRAINING)
    say.say(
        f"{out} is trained already: {counted(trained.steps, 'steps')}, validation perplexity"
        f" {trained.valid_perplexity:,.2f}. Nothing to do."
    )
    return trained


def _work(asked: Asked, corpus: Corpus, valid: Corpus | None, out: Path, say: Progress) -> Work:
    """Return what the run needs: found in the folder, or made and written there."""
    checkpoint = out / FOLDER
    if (checkpoint / ASKED).is_file():
        _refuse_other(asked, out, "an unfinished run")
        tensors, _ = read_tensors(checkpoint / STREAM)
        prepared = read_record(Prepared, checkpoint / PREPARED)
        _refuse_damaged(checkpoint, {PREPARED: _seal(checkpoint), **prepared.files})
        return Work(asked, prepared, tensors["train"].numpy(), tensors["valid"].numpy())
    made = streams(asked.settings, corpus, valid)
    prepared = _prepared(asked.settings, made)
    for line in told(asked.settings, prepared):
        say.say(line)
    made.vocabulary.save(checkpoint)
    files = {name: sha256(checkpoint / name) for name in TOKENIZER if (checkpoint / name).exists()}
    prepared = replace(prepared, files=files)
    ids = {"train": torch.from_numpy(made.train), "valid": torch.from_numpy(made.valid)}
    write_tensors(checkpoint / STREAM, ids)
    write_text(checkpoint / PREPARED, prepared.to_json())
    write_text(checkpoint / SEAL, f"{sha256(checkpoint / PREPARED)}\n")
    write_text(checkpoint / ASKED, asked.to_json())  # last: with it, the rest is whole
    return Work(asked, prepared, made.train, made.valid)


def _seal(checkpoint: Path) -> str:
    """Return the SHA-256 that was written beside what was prepared; nothing if it is lost."""
    path = checkpoint / SEAL
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _refuse_damaged(checkpoint: Path, files: dict[str, str]) -> None:
    """Raise if a file is not the one that the run began with."""
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file() or sha256(path) != expected:
            raise StoreError(
                f"{path} is {'damaged' if path.is_file() else 'not there any more'}: without it the"
                " run could not go on as it began, and its model could not be read. Delete the"
                " folder and train again."
            )


def _prepared(settings: Settings, made: Streams) -> Prepared:
    """Return the sizes that follow from settings and streams."""
    vocabulary = made.vocabulary
    sizes = matched(settings, vocabulary.size, vocabulary.start)
    blocks = Blocks(made.train, settings.context, settings.seed)
    steps = settings.steps or blocks.steps(
        settings.epochs or MOST_EPOCHS, settings.blocks_of_a_step
    )
    return Prepared(
        vocabulary=vocabulary.size,
        start=vocabulary.start,
        memories=sizes.memories,
        parameters=sizes.parameters,
        matched_parameters=sizes.aim,
        steps=steps,
        steps_of_an_epoch=blocks.steps(1, settings.blocks_of_a_step),
        warmup=default_warmup(steps) if settings.warmup is None else settings.warmup,
        train=made.train_record,
        valid=made.valid_record,
    )


def _run(work: Work, out: Path, device: str, saving: Saving, say: Progress) -> Trained:
    """Train from the beginning or from the last checkpoint, and finish the folder."""
    asked, prepared = work.asked, work.prepared
    settings = asked.settings
    config = config_of(
        settings, prepared.vocabulary, prepared.start, settings.memory, prepared.memories
    )
    model = new_model(config, settings.seed, find_device(device))
    blocks = Blocks(work.train, settings.context, settings.seed)
    checkpoint, curve = Checkpoint(out), Curve(out)
    run = Run(Loop(model, settings, blocks, prepared.steps), work.valid, checkpoint, curve, saving)
    if checkpoint.exists:
        run.take_up()
        say.say(f"Going on after step {run.loop.standing.step:,} of {prepared.steps:,}.")
    else:
        curve.begin()
    with live(say, prepared.steps, run.loop.standing.step) as shown:
        standing = run.go(shown, say.say)
    checkpoint.read_best(standing, model)
    return finish(asked, prepared, standing, model, curve, out)
