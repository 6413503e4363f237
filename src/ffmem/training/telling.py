"""What is trained on what, and what is left out, in sentences for people."""

from ffmem.counted import counted
from ffmem.training.record import Prepared, Trained
from ffmem.training.settings import TOKENIZERS, Settings
from ffmem.training.stream import StreamRecord


def told(settings: Settings, prepared: Prepared) -> list[str]:
    """Return what will be trained on what, one sentence each."""
    return [*_data(prepared), *_vocabulary(settings, prepared), _model(settings, prepared)]


def summary(trained: Trained) -> str:
    """Return what came of a run, in two sentences."""
    words = trained.asked.settings.tokenizer == "words"
    unknown = f", {trained.prepared.valid.unknown_share:.2%} of its tokens <unk>" if words else ""
    stopped = ", when validation stopped improving" if trained.stopped_early else ""
    return (
        f"Trained {trained.prepared.parameters:,} parameters with {trained.asked.settings.memory}"
        f" memories for {counted(trained.steps, 'steps')} ({trained.epochs:.2f} epochs,"
        f" {trained.tokens:,} tokens){stopped}, at {trained.tokens_per_second:,.0f} tokens/s."
        f" Validation perplexity {trained.valid_perplexity:,.2f} after step {trained.best_step:,}"
        f"{unknown}."
    )


def matching(settings: Settings, prepared: Prepared) -> str:
    """Return the parameters of the model that was to be matched, if one was."""
    if prepared.matched_parameters is None:
        return ""
    return f" (with {settings.match} memories it would have {prepared.matched_parameters:,})"


def _data(prepared: Prepared) -> list[str]:
    train, valid = prepared.train, prepared.valid
    lines = [f"Training on {_stream(train)}; validation on {_stream(valid)}."]
    if valid.held_out:
        lines.append("No --valid was given: these are the last sentences of the corpus, held out.")
    if train.control or valid.control:
        n = counted(train.control + valid.control, "control tokens")
        lines.append(f"The text itself writes out {n}, such as </s>: each is taken as one.")
    if train.left_out:
        lines.append(f"Left out of the corpus: {train.left_out}.")
    if valid.left_out and not valid.held_out:
        lines.append(f"Left out of the validation corpus: {valid.left_out}.")
    return lines


def _stream(record: StreamRecord) -> str:
    return (
        f"{counted(record.sentences, 'sentences')}, {counted(record.tokens, 'tokens')}"
        f" ({record.unknown_share:.2%} <unk>)"
    )


def _vocabulary(settings: Settings, prepared: Prepared) -> list[str]:
    most = settings.vocabulary or TOKENIZERS[settings.tokenizer]
    found = prepared.vocabulary - (4 if settings.tokenizer == "words" else 0)
    if found == most:
        return []
    what = "words" if settings.tokenizer == "words" else "tokens that can be learned"
    return [f"The corpus has {found:,} {what}, fewer than the {most:,} allowed: all are taken."]


def memories(settings: Settings, prepared: Prepared) -> str:
    """Return how many memories of which kind a layer has."""
    if settings.memory == "persistent":
        return f"{counted(prepared.memories, 'persistent memories')} per head"
    if settings.memory != "lambda":
        return counted(prepared.memories, f"{settings.memory} memories")
    heads, distances = settings.n_heads, min(settings.distances, settings.context)
    cut = f", cut at the context of {settings.context}" if distances < settings.distances else ""
    return (
        f"{counted(heads * distances, 'lambda memories')} ({counted(heads, 'heads')} ×"
        f" {counted(distances, 'distances')}{cut}) beside {prepared.memories:,} relu"
        f" {'one' if prepared.memories == 1 else 'ones'}"
    )


def _model(settings: Settings, prepared: Prepared) -> str:
    tokens = settings.blocks_of_a_step * settings.context
    most = "at most " if settings.stops_early else ""
    return (
        f"{counted(settings.layers, 'layers')} of width {settings.width} with"
        f" {memories(settings, prepared)}, vocabulary {prepared.vocabulary:,}:"
        f" {prepared.parameters:,} parameters{matching(settings, prepared)};"
        f" {most}{counted(prepared.steps, 'steps')} of {tokens:,} tokens,"
        f" {prepared.steps_of_an_epoch:,} an epoch."
    )
