"""The tokenizer of an edited model as files: of a word-level model, its dictionary.

    WordTokenizer.from_file(dict.txt) = the model's own tokenizer

fairseq's `dict.txt` says of every word how often it was seen. Those counts are the file's that the
model was loaded with; they decide nothing, and are 0 where that file is gone or another.
"""

from ffmem.errors import ModelError
from ffmem.models.arguments import model_path
from ffmem.models.memories import Memories
from ffmem.models.tokenizer import SubwordTokenizer, WordTokenizer
from ffmem.training.data import WordVocabulary

NO_COUNTS = "How often its words were seen is not known any more: dict.txt says 0 for each."


def tokens_of(memories: Memories) -> SubwordTokenizer | WordVocabulary:
    """Return what writes the files of a model's tokenizer."""
    tokenizer = memories.tokenizer
    if isinstance(tokenizer, SubwordTokenizer):
        return tokenizer
    if not isinstance(tokenizer, WordTokenizer):
        raise ModelError(f"A {type(tokenizer).__name__} cannot be saved beside a model.")
    words = tokenizer.words[len(WordTokenizer.SPECIAL) :]
    counts = _counts(memories.source, tokenizer)
    return WordVocabulary([(word, counts.get(word, 0)) for word in words])


def has_no_counts(tokens: SubwordTokenizer | WordVocabulary) -> bool:
    """Return whether a dictionary says of no word how often it was seen."""
    return isinstance(tokens, WordVocabulary) and not any(count for _, count in tokens.counts)


def _counts(source: str, tokenizer: WordTokenizer) -> dict[str, int]:
    """Return what the dictionary beside a model says; nothing where there is none of its words."""
    place = model_path(source)
    path = (place if place.is_dir() else place.parent) / "dict.txt"
    if not place.exists() or not path.is_file():
        return {}
    if WordTokenizer.from_file(path).fingerprint != tokenizer.fingerprint:
        return {}
    with path.open(encoding="utf-8", newline="\n") as lines:
        rows = [line.rstrip("\r\n").rpartition(" ") for line in lines]
    return {word: int(count) for word, _, count in rows}
