"""A topic space from sentence embeddings: what a small language model takes for alike.

    vector of a text = mean over its tokens of the model's last layer, to length 1

The model is all-MiniLM-L6-v2, which comes as files inside a package of the registry. Words that are
taken out are taken out of the text before it is read, so that nothing of them is left. Each text
is read once in a run. A transformer reads every text: this space is for thousands of memories, not
for millions; latent semantic analysis is for all.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, Int64
from numpy import ndarray

from ffmem.indexing.sentences import split_text
from ffmem.indexing.store import Index
from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.topics import Arrays, TopicSpace
from ffmem.patterns.vocabulary import Vocabulary
from ffmem.registry import MINILM, fetch

AXES = 384
MOST_TOKENS = 128
"""Of a text that are read: its last ones."""

BATCH = 64
"""Texts that are read at once, of about the same length."""


class Encoder:
    """The sentence model, loaded when the first text is read."""

    def __init__(self) -> None:
        self._loaded: tuple[Any, Any] | None = None

    def __call__(self, texts: Sequence[str]) -> Float32[ndarray, "text axis"]:
        """Return a unit vector for each text; 0 for those that hold nothing."""
        import torch

        tokenizer, model = self._loaded or self._load()
        found = np.zeros((len(texts), AXES), np.float32)
        filled = [place for place, text in enumerate(texts) if text.strip()]
        order = sorted(filled, key=lambda place: (len(texts[place]), place))
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            read = tokenizer.encode_batch([texts[place] for place in places])
            ids = torch.tensor([one.ids for one in read])
            mask = torch.tensor([one.attention_mask for one in read])
            with torch.inference_mode():
                last = model(input_ids=ids, attention_mask=mask).last_hidden_state
            mean = (last * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            found[places] = torch.nn.functional.normalize(mean, dim=1).numpy()
        return found

    def _load(self) -> tuple[Any, Any]:
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoConfig, AutoModel

        from ffmem.models.checkpoint import NO_REMOTE_CODE, silence_transformers

        weights, config, words = (fetch(package) for package in MINILM)
        tokenizer = Tokenizer.from_file(str(words))
        tokenizer.enable_truncation(MOST_TOKENS, direction="left")
        tokenizer.enable_padding()
        with silence_transformers():
            model = AutoModel.from_pretrained(
                weights.parent,
                config=AutoConfig.from_pretrained(config, **NO_REMOTE_CODE),
                dtype=torch.float32,
                use_safetensors=True,
                **NO_REMOTE_CODE,
            )
        self._loaded = (tokenizer, model.eval())
        return self._loaded


class EmbeddingSpace(TopicSpace):
    """Sentence embeddings of prefixes, without the words that a list takes out."""

    name = "minilm"

    def __init__(self, index: Index, words: Sequence[str]) -> None:
        self._index = index
        self._words = words
        self._encode = Encoder()
        self._known: dict[tuple[int, tuple[int, ...]], Float32[ndarray, " axis"]] = {}

    def arrays(self) -> Arrays:
        """Return the words; each process loads the model itself."""
        return {"words": np.array(self._words, np.str_)}

    def vectors(
        self,
        view: CorpusView,
        rows: Int64[ndarray, " prefix"],
        removed: Int32[ndarray, "prefix slot"],
    ) -> Float32[ndarray, "prefix axis"]:
        """Return unit vectors for rows of a view without the words removed."""
        keys = [_key(view, row, out) for row, out in zip(rows.tolist(), removed, strict=True)]
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        texts = [self._text(view, row, out) for row, out in new]
        for key, vector in zip(new, self._encode(texts), strict=True):
            self._known[key] = vector
        found = np.zeros((len(keys), AXES), np.float32)
        for place, key in enumerate(keys):
            found[place] = self._known[key]
        return found

    def _text(self, view: CorpusView, row: int, out: tuple[int, ...]) -> str:
        """Return the text of a prefix without some words; nothing if no content word is left."""
        start, past = view.word_slices[row]
        if not set(view.words[start:past].tolist()) - set(out):
            return ""
        sentence = self._index.sentences.row(int(view.sentence[row]))
        text, _ = split_text(sentence, int(view.length[row]), self._index.token)
        if not out:
            return text
        words = "|".join(re.escape(self._words[word]) for word in out)
        return re.sub(rf"(?<!\w)(?:{words})(?!\w)", " ", text, flags=re.IGNORECASE)


def embedding_space(index: Index, words: Vocabulary) -> EmbeddingSpace:
    """Return the space of sentence embeddings of an index's prefixes."""
    return EmbeddingSpace(index, words.words)


def _key(
    view: CorpusView, row: int, removed: Int32[ndarray, " slot"]
) -> tuple[int, tuple[int, ...]]:
    """Return what decides a vector: a prefix, and which of its own words are taken out."""
    start, past = view.word_slices[row]
    held = set(view.words[start:past].tolist())
    return row, tuple(sorted(held & set(removed.tolist())))
