"""Train a language model with one kind of memory: from a corpus to a model folder.

    corpus ─► vocabulary, streams ─► plan ─► Trainer ─► best weights ─► FOLDER
                                             curve, checkpoints

Resumes an unfinished run with the same settings, to the same weights, bit for bit, as if it had
never been stopped; refuses one with other settings. Leaves a finished run as it is.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from ffmem.corpus.corpus import Corpus
from ffmem.errors import ModelError, StorageFull, StoreError
from ffmem.files import remove_temporaries, sha256, storage_errors, sync, write_text
from ffmem.models.arguments import use_threads
from ffmem.models.checkpoint import silence_transformers
from ffmem.models.load import find_device
from ffmem.networks.model import AdaptiveLM
from ffmem.progress import Progress
from ffmem.text import pluralize
from ffmem.training.config import MAX_EPOCHS, TrainConfig
from ffmem.training.data import Blocks, TokenStreams, make_streams
from ffmem.training.report import draw_curve, format_plan, model_card
from ffmem.training.run_dir import (
    START_AGAIN,
    TOKENIZER_FILES,
    PreparedRun,
    RunDir,
    TrainPlan,
    TrainResult,
    TrainRunConfig,
)
from ffmem.training.trainer import (
    ProgressDisplay,
    Trainer,
    default_warmup,
    model_config,
    new_model,
)


def train(
    config: TrainConfig,
    corpus: Corpus,
    out: Path,
    valid: Corpus | None = None,
    *,
    progress: Progress | None = None,
) -> TrainResult:
    """Train a model into a folder, or resume an unfinished run there."""
    progress = progress or Progress(quiet=True)
    run_dir = RunDir(out)
    run_dir.check_usable()
    for source in (corpus, valid):
        if source is not None:
            source.check_exists()
    device = find_device(config.device)
    if run_dir.is_finished:
        return _finished_result(config, corpus, valid, device, run_dir, progress)
    with run_dir.lock():
        if run_dir.is_finished:  # by another process, in the meantime
            return _finished_result(config, corpus, valid, device, run_dir, progress)
        prepared = run_dir.read_prepared()
        run = _run_config(config, corpus, valid, device, prepared and prepared.run)
        if prepared is None:
            prepared = _prepare(run, corpus, valid, run_dir, progress)
        else:
            _check_same_run(run, prepared.run, f"{out} holds an unfinished run")
            prepared = prepared._replace(run=run)
        with use_threads(run.threads), torch.random.fork_rng():
            trainer = _make_trainer(prepared, device, run_dir)
            if trainer.start_or_resume():
                progress.say(f"Resuming after step {trainer.state.step:,} of {trainer.steps:,}.")
            with ProgressDisplay(progress, trainer.steps, trainer.state.step) as display:
                trainer.train(display, progress.say)
            result = _finish(prepared, trainer, run_dir)
        if not config.keep_checkpoint:
            shutil.rmtree(run_dir.checkpoint, ignore_errors=True)
    return result


def _run_config(
    config: TrainConfig,
    corpus: Corpus,
    valid: Corpus | None,
    device: torch.device,
    before: TrainRunConfig | None,
) -> TrainRunConfig:
    """Return what decides the weights; without --threads, as many threads as the run had before."""
    n_threads = config.threads or (before.threads if before else torch.get_num_threads())
    return TrainRunConfig.make(config, corpus, valid, n_threads, device.type)


def _check_same_run(run: TrainRunConfig, before: TrainRunConfig, found: str) -> None:
    """Raise if an earlier run in the folder had other settings."""
    differences = run.differences(before)
    if differences:
        raise StoreError(
            f"{found} with other settings: {'; '.join(differences)}. Give the same settings, or"
            " another --out."
        )


def _finished_result(
    config: TrainConfig,
    corpus: Corpus,
    valid: Corpus | None,
    device: torch.device,
    run_dir: RunDir,
    progress: Progress,
) -> TrainResult:
    """Return the result of a finished run; raise if its settings differ or a file is missing."""
    out, result = run_dir.path, run_dir.read_result()
    run = _run_config(config, corpus, valid, device, result.run)
    _check_same_run(run, result.run, f"{out} holds a model trained")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (out / name).is_file():
            raise StoreError(f"{out} holds a trained model, but {name} is missing. {START_AGAIN}")
    progress.say(
        f"{out} is already trained: {pluralize(result.steps, 'steps')}, validation perplexity"
        f" {result.valid_perplexity:,.2f}. Nothing to do."
    )
    return result


# Before the first step


def _prepare(
    run: TrainRunConfig, corpus: Corpus, valid: Corpus | None, run_dir: RunDir, progress: Progress
) -> PreparedRun:
    """Read the corpus, make vocabulary, streams and plan, and write them to the folder."""
    streams = make_streams(run.config, corpus, valid)
    plan = make_plan(run.config, streams)
    for line in format_plan(run.config, plan):
        progress.say(line)
    streams.vocabulary.save(run_dir.checkpoint)
    paths = [run_dir.checkpoint / name for name in TOKENIZER_FILES]
    files = {path.name: sha256(path) for path in paths if path.exists()}
    train_ids, valid_ids = torch.from_numpy(streams.train), torch.from_numpy(streams.valid)
    prepared = PreparedRun(run, replace(plan, tokenizer_files=files), train_ids, valid_ids)
    run_dir.write_prepared(prepared)
    return prepared


def make_plan(config: TrainConfig, streams: TokenStreams) -> TrainPlan:
    """Return the sizes and steps that follow from the config and its streams."""
    vocabulary = streams.vocabulary
    memories, parameters, target = match_parameters(config, vocabulary.size, vocabulary.start)
    blocks = Blocks(streams.train, config.context, config.seed)
    steps = config.steps or blocks.n_steps(config.epochs or MAX_EPOCHS, config.blocks_per_step)
    return TrainPlan(
        vocabulary=vocabulary.size,
        start=vocabulary.start,
        memories=memories,
        parameters=parameters,
        matched_parameters=target,
        steps=steps,
        steps_per_epoch=blocks.n_steps(1, config.blocks_per_step),
        warmup=default_warmup(steps) if config.warmup is None else config.warmup,
        train=streams.train_stats,
        valid=streams.valid_stats,
    )


def match_parameters(
    config: TrainConfig, vocabulary: int, start: int
) -> tuple[int, int, int | None]:
    """Return the memories per layer, the parameters they give, and the parameters to match if any.

    n* = argmin_n |parameters(kind, n) − parameters(match, m)|,   parameters(kind, n) = a + b·n
    """

    def count(memory: str, memories: int) -> int:
        """Count the parameters of a model without allocating it; tied ones count once."""
        sizes = model_config(config, vocabulary, start, memory, memories)
        with torch.device("meta"):
            model = AdaptiveLM(sizes)
        return sum(weight.numel() for weight in model.parameters())

    memories = config.memories or 4 * config.width
    if config.match is None:
        return memories, count(config.memory, memories), None
    target = count(config.match, memories)
    smallest = count(config.memory, 1)
    if smallest > target:
        raise ModelError(
            f"--match {config.match}: that model has {target:,} parameters, but with"
            f" {config.memory} memories it has {smallest:,} even with a single memory per layer."
            " Give more --memories."
        )
    per_memory = count(config.memory, 2) - smallest
    memories = 1 + round((target - smallest) / per_memory)
    return memories, count(config.memory, memories), target


def _make_trainer(prepared: PreparedRun, device: torch.device, run_dir: RunDir) -> Trainer:
    """Return the trainer of a run, with initial weights."""
    config, plan = prepared.run.config, prepared.plan
    sizes = model_config(config, plan.vocabulary, plan.start, config.memory, plan.memories)
    model = new_model(sizes, config.seed, device)
    blocks = Blocks(prepared.train.numpy(), config.context, config.seed)
    return Trainer(model, config, blocks, prepared.valid.numpy(), plan.steps, run_dir)


# After the last step


def _finish(prepared: PreparedRun, trainer: Trainer, run_dir: RunDir) -> TrainResult:
    """Write the model with its best weights, curve and card; training.json last.

    If this fails, the same command finishes the run from its checkpoint.
    """
    state, rows, out = trainer.state, trainer.curve.rows, run_dir.path
    run_dir.read_best(state, trainer.model)
    assert state.best_step is not None
    assert state.best_perplexity is not None
    last = rows[-1]  # every run ends with an evaluation
    result = TrainResult(
        run=prepared.run,
        plan=prepared.plan,
        steps=state.step,
        epochs=last["epoch"],
        tokens=last["tokens"],
        seconds=state.seconds,
        tokens_per_second=last["tokens"] / state.seconds,
        best_step=state.best_step,
        valid_perplexity=state.best_perplexity,
        last_valid_perplexity=last["valid_perplexity"],
        last_loss=[row["loss"] for row in rows if "loss" in row][-1],
        stopped_early=state.stopped_early and state.step < trainer.steps,
    )
    _save_model(trainer.model, run_dir)
    draw_curve(rows, out, result)
    write_text(out / "README.md", model_card(result))
    remove_temporaries(out)
    write_text(run_dir.result_path, result.to_json())
    return result


def _save_model(model: AdaptiveLM, run_dir: RunDir) -> None:
    """Write config, weights and tokenizer; a file is complete before it is moved to the folder."""
    staging = run_dir.checkpoint / "model"
    with storage_errors(run_dir.path), silence_transformers():
        shutil.rmtree(staging, ignore_errors=True)
        try:
            model.save_pretrained(staging)
        except SafetensorError as error:
            raise StorageFull(
                f"The weights cannot be written to {staging}: {error}. The checkpoint is kept: free"
                " some space and run the same command again."
            ) from None
        for name in TOKENIZER_FILES:
            if (run_dir.checkpoint / name).is_file():
                shutil.copyfile(run_dir.checkpoint / name, staging / name)
        mode = (staging / "config.json").stat().st_mode
        for path in staging.iterdir():
            path.chmod(mode)  # safetensors writes for the owner only
            sync(path)
            path.replace(run_dir.path / path.name)
        staging.rmdir()
        sync(run_dir.path)
