"""A text to run through a model, token by token, behind its start token."""

from typing import NamedTuple

from ffmem.errors import CorpusError, ModelError
from ffmem.models.memories import Memories


class Prompt(NamedTuple):
    """The tokens of a prompt; the start token, if there is one, is the first."""

    text: str
    ids: list[int]
    tokens: list[str]
    """As they are shown."""
    start: int | None


def read_prompt(memories: Memories, text: object, start: int | None) -> Prompt:
    """Return a prompt that the model can read as a whole."""
    if not isinstance(text, str):
        raise CorpusError(f"A prompt is a text; {type(text).__name__} was given.")
    if not text:
        raise CorpusError("The prompt is empty. Give a text of at least one token.")
    (encoding,) = memories.tokenizer.encode([text])
    ids = [*([] if start is None else [start]), *encoding.ids]
    if not encoding.ids:
        raise CorpusError(f"The prompt {text!r} has no token for this model's tokenizer.")
    if memories.context is not None and len(ids) > memories.context:
        included = "" if start is None else ", the start token included"
        raise CorpusError(
            f"The prompt has {len(ids):,} tokens{included}; the model reads"
            f" {memories.context:,}. Shorten it."
        )
    if max(ids) >= memories.vocabulary:
        raise ModelError(
            f"The tokenizer gives the id {max(ids)}; the model knows {memories.vocabulary} tokens."
            " Tokenizer and model do not belong together."
        )
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    return Prompt(text, ids, [shown[id] for id in ids], start)


def target_id(memories: Memories, target: object) -> int:
    """Return the one token that a target is: as the vocabulary writes it, shows it, or as text."""
    if not isinstance(target, str) or not target:
        raise ModelError(f"The target {target!r} is not a token. Give one as text.")
    try:
        return memories.tokenizer.id_of(target)
    except ModelError:
        (encoding,) = memories.tokenizer.encode([target])
        if len(encoding.ids) == 1:
            return encoding.ids[0]
        shown = memories.tokenizer.token_texts(memories.vocabulary)
        pieces = ", ".join(repr(shown[id]) for id in encoding.ids) or "none"
        raise ModelError(
            f"The target {target!r} is not one token: the tokenizer gives {pieces}. Give a single"
            " token, with its leading space if it has one."
        ) from None
