"""Train a language model with one kind of memory: from a corpus to a model folder.

    corpus ─► vocabulary, streams ─► plan ─► Trainer ─► best weights ─► FOLDER
                                             curve, checkpoints

Resumes an unfinished run with the same settings, to the same weights, bit for bit, as if it had
never been stopped; refuses one with other settings. Leaves a finished run as it is.
"""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from ffmem.corpus.corpus import Corpus
from ffmem.errors import ModelError, StorageFull
from ffmem.files import remove_temporaries, sha256, storage_errors, sync, write_text
from ffmem.models.arguments import use_threads
from ffmem.models.checkpoint import silence_transformers
from ffmem.models.load import find_device
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.experts import Experts
from ffmem.networks.model import AdaptiveLM
from ffmem.progress import Progress
from ffmem.records import check_same_settings
from ffmem.text import pluralize
from ffmem.training.config import MAX_EPOCHS, TrainConfig
from ffmem.training.data import Blocks, TokenStreams, make_streams
from ffmem.training.report import draw_curve, format_plan, model_card
from ffmem.training.run_dir import (
    TOKENIZER_FILES,
    PreparedRun,
    RunDir,
    TrainPlan,
    TrainResult,
    TrainRunConfig,
)
from ffmem.training.trainer import Trainer, model_config, new_model


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
            source.check()
    device = find_device(config.device)

    def run_config(before: TrainRunConfig | None) -> TrainRunConfig:
        """Return what decides the weights; without --threads, a resumed run keeps its number."""
        n_threads = config.threads or (before.threads if before else torch.get_num_threads())
        return TrainRunConfig.make(config, corpus, valid, n_threads, device.type)

    # Look again once the folder is locked: another process may have finished the run.
    with nullcontext() if run_dir.is_finished else run_dir.lock():
        if run_dir.is_finished:
            result = run_dir.read_result()
            run = run_config(result.run)
            found = f"{out} holds a model trained"
            check_same_settings(found, result.run.settings(), run.settings())
            run_dir.check_model_files()
            progress.say(
                f"{out} is already trained: {pluralize(result.steps, 'steps')}, validation"
                f" perplexity {result.valid_perplexity:,.2f}. Nothing to do."
            )
            return result
        prepared = run_dir.read_prepared()
        run = run_config(prepared and prepared.run)
        if prepared is None:
            prepared = _prepare(run, corpus, valid, run_dir, progress)
        else:
            found = f"{out} holds an unfinished run"
            check_same_settings(found, prepared.run.settings(), run.settings())
            prepared = prepared._replace(run=run)
        with use_threads(run.threads), torch.random.fork_rng():
            trainer = _make_trainer(prepared, device, run_dir)
            if trainer.start_or_resume():
                progress.say(f"Resuming after step {trainer.state.step:,} of {trainer.steps:,}.")
            trainer.train(progress)
            result = _finish(prepared, trainer, run_dir)
        shutil.rmtree(run_dir.checkpoint, ignore_errors=True)
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
    memories, active, target = match_parameters(config, vocabulary.size, vocabulary.start)
    sizes = model_config(config, vocabulary.size, vocabulary.start, config.memory, memories)
    blocks = Blocks(streams.train, config.context, config.seed)
    steps = config.steps or blocks.n_steps(config.epochs or MAX_EPOCHS, config.blocks_per_step)
    return TrainPlan(
        vocabulary=vocabulary.size,
        start=vocabulary.start,
        memories=memories,
        parameters=count_parameters(sizes)[0],
        active_parameters=active,
        matched_parameters=target,
        steps=steps,
        steps_per_epoch=blocks.n_steps(1, config.blocks_per_step),
        warmup=config.warmup_steps(steps),
        train=streams.train_stats,
        valid=streams.valid_stats,
    )


def match_parameters(
    config: TrainConfig, vocabulary: int, start: int
) -> tuple[int, int, int | None]:
    """Return the memories per layer, the parameters they give, and the parameters to match if any.

    n* = argmin_n |parameters(kind, n) − parameters(match, m)|,   parameters(kind, n) = a + b·n

    Of experts, those count that one token reaches.
    """

    def count(memory: str, memories: int) -> int:
        sizes = model_config(config, vocabulary, start, memory, memories)
        return count_parameters(sizes)[1]

    memories = config.memories or 4 * config.width
    if config.match is None:
        return memories, count(config.memory, memories), None
    target = count(config.match, memories)
    smallest = count(config.memory, 1)
    if smallest > target:
        raise ModelError(
            f"--match {config.match}: that model has {target:,} parameters, but with"
            f" {config.memory} memories it has {smallest:,} even with a single memory per layer."
            " Use more --memories."
        )
    per_memory = count(config.memory, 2) - smallest
    memories = 1 + round((target - smallest) / per_memory)
    return memories, count(config.memory, memories), target


def count_parameters(config: AdaptiveConfig) -> tuple[int, int]:
    """Count all parameters of a model and those that one token reaches, without allocating it.

    Tied ones count once. Of E experts a token reaches k, and so k / E of their parameters.
    """
    with torch.device("meta"):
        model = AdaptiveLM(config)
    total = sum(weight.numel() for weight in model.parameters())
    routed = sum(
        weight.numel()
        for module in model.modules()
        if isinstance(module, Experts)
        for weight in module.parameters()
    )
    idle = config.num_experts - config.num_experts_per_tok
    return total, total - (routed // config.num_experts * idle if routed else 0)


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
