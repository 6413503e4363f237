"""Tokenizers: from text to token ids and back.

    "".join(token texts of a text's ids) = the text            (byte-level vocabularies)

A token is displayed as the text that it stands for, with its leading space. A token that is only
part of a character is displayed as bytes, `⟨e2⟩⟨82⟩`, so that nothing is lost.

This module must not import torch or transformers.
"""

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ffmem.errors import ModelError
from ffmem.models.chat import ChatTemplate, no_template

if TYPE_CHECKING:
    import transformers

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MADE_UP = re.compile(r"madeupword\d{4,}")
_WORD = re.compile(r"\S+")
_USE_ITS_DICT = "Use the dict.txt that the model was trained with."

UNKNOWN = 3
"""The id of `<unk>` in fairseq."""


AS_IN_TRAINING = (
    "Tokenize it as in training: for models that read whole words, separate words and punctuation"
    " by spaces."
)
"""Advice about a text with many unknown words."""


class Encoding(NamedTuple):
    """The tokens of one text, without special tokens before or after it."""

    ids: list[int]
    starts: list[int] | None
    """Offset of each token's first character; None if the tokenizer does not know."""
    ends: list[int] | None
    """Offset after each token's last character. Tokens that share a character all include it."""


class Tokenizer(ABC):
    """From text to token ids and back."""

    word_level: bool
    """Whether tokens are the corpus' own white-space tokens, as in the paper's model."""
    own_start: int | None
    """The token that the tokenizer itself adds before a text, if any."""
    bos: int | None
    eos: int | None
    unk: int | None
    """The token for unknown text, if any."""
    controls: frozenset[int]
    """Ids of special tokens that stand for no text, such as end-of-text."""
    unlisted: frozenset[int]
    """Ids that are never listed among a value's tokens."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Return the SHA-256 of the vocabulary and all settings that affect ids."""

    @property
    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, as the vocabulary spells it."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the tokens of each text, without special tokens."""

    @abstractmethod
    def token_texts(self, size: int) -> list[str]:
        """Return the text to display for every id below `size`."""

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template."""
        return False

    @property
    def chat(self) -> ChatTemplate:
        """The tokenizer's chat template; raises if it has none."""
        raise no_template()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        texts = self.token_texts(max(ids, default=-1) + 1)
        return "".join(texts[id] for id in ids)

    def decode_after(self, last: int, ids: Sequence[int]) -> str:
        """Return the text of tokens that follow another one, with the space between them, if any.

        Alone, words have no space in front, nor have the pieces of SentencePiece.
        """
        before, joined = self.decode([last]), self.decode([last, *ids])
        return joined.removeprefix(before) if joined.startswith(before) else self.decode(ids)

    def id_of(self, token: str) -> int:
        """Return the id of a token, given as the vocabulary spells it or as it is displayed."""
        found = self.vocabulary.get(token)
        if found is None:
            found = self._id_by_text.get(token)
        if found is None:
            wanted = token.strip().lower()
            similar = sorted(text for text in self._id_by_text if text.strip().lower() == wanted)
            hint = f" Similar tokens: {', '.join(map(repr, similar[:5]))}." if similar else ""
            raise ModelError(
                f"{token!r} is not a single token of this model's vocabulary.{hint}"
                " Use one token, with its leading space if it has one."
            )
        return found

    def unknown_words(
        self, text: str | None, ids: list[int], starts: list[int] | None, ends: list[int] | None
    ) -> list[str]:
        """Return the words of a text that were read as the unknown token, if the offsets are known.

        The spelling of the unknown token itself is not one of them.
        """
        if self.unk not in ids or self.unk in self.controls:  # GPT-2's is also its end-of-text
            return []
        if text is None or starts is None or ends is None:
            return []
        found = [
            text[start:end]
            for id, start, end in zip(ids, starts, ends, strict=True)
            if id == self.unk
        ]
        return [word for word in found if word != self.unk_text]

    @cached_property
    def unk_text(self) -> str:
        """The displayed form of the unknown token."""
        assert self.unk is not None
        return self.token_texts(self.unk + 1)[self.unk]

    @cached_property
    def _id_by_text(self) -> dict[str, int]:
        """The lowest id of every displayed text."""
        size = max(self.vocabulary.values(), default=-1) + 1
        return {text: id for id, text in reversed(list(enumerate(self.token_texts(size))))}


class WordTokenizer(Tokenizer):
    """fairseq's `dict.txt`: whole white-space tokens; unknown ones become `<unk>`."""

    SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")

    def __init__(self, words: Iterable[str]) -> None:
        self.words = [*self.SPECIAL, *words]
        self._ids = {word: id for id, word in enumerate(self.words)}
        if len(self._ids) < len(self.words):
            twice = next(word for id, word in enumerate(self.words) if self._ids[word] != id)
            raise ModelError(
                f"The dictionary lists {twice!r} twice, so its ids cannot match the model's."
                f" {_USE_ITS_DICT}"
            )
        self.word_level = True
        # fairseq lists `<s>`, but its language models never see it: `</s>` starts a text.
        self.bos = self.own_start = self.eos = 2
        self.unk = UNKNOWN
        self.controls = frozenset((0, 1, 2))
        self.unlisted = frozenset(
            [0, 1, *(id for id, word in enumerate(self.words) if _MADE_UP.fullmatch(word))]
        )

    @classmethod
    def from_file(cls, path: Path, vocab_size: int | None = None) -> "WordTokenizer":
        """Return the tokenizer of a `dict.txt`: one `token count` per line, most frequent first.

        With `vocab_size`, raise unless it has exactly that many words, special ones included.
        """
        words = []
        try:
            with path.open(encoding="utf-8", newline="\n") as lines:
                for number, line in enumerate(lines, start=1):
                    word, _, count = line.rstrip("\r\n").rpartition(" ")
                    if not word or not count.isdecimal():
                        raise ModelError(
                            f"Line {number} of {path} is {line.strip()!r}, not `token count`."
                            f" {_USE_ITS_DICT}"
                        )
                    words.append(word)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"Cannot read the dictionary {path}: {error}. {_USE_ITS_DICT}"
            ) from None
        tokenizer = cls(words)
        if vocab_size not in (None, len(tokenizer.words)):
            raise ModelError(
                f"The model has {vocab_size} words, but {path} has {len(tokenizer.words)},"
                f" including four special ones. {_USE_ITS_DICT}"
            )
        return tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the words in order."""
        return _sha256(["words", self.words])

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return the id of every word."""
        return self._ids

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the ids of each text's white-space tokens."""
        encodings = []
        for text in texts:
            words = list(_WORD.finditer(text))
            encodings.append(
                Encoding(
                    [self._ids.get(word.group(), UNKNOWN) for word in words],
                    [word.start() for word in words],
                    [word.end() for word in words],
                )
            )
        return encodings

    def token_texts(self, size: int) -> list[str]:
        """Return the word of every id below `size`."""
        return [*self.words[:size], *map(_unused_token, range(len(self.words), size))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words, separated by spaces."""
        size = len(self.words)
        return " ".join(self.words[id] if id < size else _unused_token(id) for id in ids)


class SubwordTokenizer(Tokenizer):
    """A Hugging Face tokenizer, fast or slow."""

    def __init__(self, tokenizer: "transformers.PreTrainedTokenizerBase") -> None:
        self.tokenizer: Any = tokenizer
        self.word_level = False
        self.bos, self.eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        self.unk = self.tokenizer.unk_token_id
        special = set(self.tokenizer.all_special_ids) - {self.unk}
        ends = {self.bos, self.eos} - {None}  # in GPT-2's vocabulary, these are <unk> too
        self.controls = frozenset(special | ends)
        self.unlisted = frozenset[int]()
        with_special, without = (
            self.tokenizer("a", add_special_tokens=add)["input_ids"] for add in (True, False)
        )
        self.own_start = None if with_special[:1] == without[:1] else int(with_special[0])

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the vocabulary and all settings that affect ids."""
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        if self.tokenizer.is_fast:
            rules = json.loads(self.tokenizer.backend_tokenizer.to_str())
            del rules["truncation"], rules["padding"]  # settings of the last call
            return _sha256(["fast", rules, special])
        pieces = getattr(self.tokenizer, "sp_model", None)
        merges = getattr(self.tokenizer, "bpe_ranks", None) or {}
        return _sha256(
            [
                type(self.tokenizer).__name__,
                sorted(self.vocabulary.items()),
                sorted(merges.items(), key=lambda item: item[1]),
                pieces.serialized_model_proto().hex() if pieces is not None else None,
                special,
            ]
        )

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @cached_property
    def chat(self) -> ChatTemplate:
        """The tokenizer's chat template; raises if it has none."""
        return ChatTemplate(self.tokenizer, self.controls)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, including added ones."""
        return dict(self.tokenizer.get_vocab())

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the tokens of each text, however long."""
        if not texts:
            return []
        fast = bool(self.tokenizer.is_fast)
        found = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=fast,
            verbose=False,  # no warning about long texts: ffmem truncates them itself
        )
        if not fast:
            return [Encoding(list(ids), None, None) for ids in found["input_ids"]]
        return [
            Encoding(list(ids), [start for start, _ in offsets], [end for _, end in offsets])
            for ids, offsets in zip(found["input_ids"], found["offset_mapping"], strict=True)
        ]

    def token_texts(self, size: int) -> list[str]:
        """Return the text to display for every id below `size`."""
        return [*self._texts[:size], *map(_unused_token, range(len(self._texts), size))]

    @cached_property
    def _texts(self) -> list[str]:
        """The text of every token in the vocabulary; cached, since 50,000 take 0.1 s."""
        # Added tokens, including special ones, are plain text in every vocabulary.
        added = {
            int(id): str(token.content) for id, token in self.tokenizer.added_tokens_decoder.items()
        }
        tokens = {id: token for token, id in self.vocabulary.items()}
        size = max((*added, *tokens), default=-1) + 1
        texts = {id: self._token_text(token) for id, token in tokens.items()} | added
        return [texts[id] if id in texts else _unused_token(id) for id in range(size)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; SentencePiece tokenizers drop the leading space."""
        text: str = self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _token_text(self) -> Callable[[str], str]:
        """The function from a token of this kind of vocabulary to its text."""
        if self.tokenizer.is_fast:
            rules = json.loads(self.tokenizer.backend_tokenizer.to_str())
            steps = json.dumps(
                [rules["normalizer"], rules["pre_tokenizer"], rules["decoder"]], ensure_ascii=False
            )
            byte_level = '"ByteLevel"' in steps
            byte_pieces = '"ByteFallback"' in steps or bool(rules["model"].get("byte_fallback"))
            space = "▁" if "▁" in steps else None
            suffix = rules["model"].get("end_of_word_suffix") or None
        else:
            byte_level = hasattr(self.tokenizer, "byte_decoder")
            byte_pieces = all(f"<0x{byte:02X}>" in self.vocabulary for byte in range(256))
            space = "▁" if any(token.startswith("▁") for token in self.vocabulary) else None
            suffix = "</w>" if "a</w>" in self.vocabulary else None
        if byte_level:
            return _byte_level_text
        return lambda token: _piece_text(token, byte_pieces, space, suffix)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of GPT-2's byte-level alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_text(token: str) -> str:
    """Return the text of a token in GPT-2's byte-level alphabet."""
    if any(character not in _BYTE_ALPHABET for character in token):
        return token
    return _decode_bytes(bytes(_BYTE_ALPHABET[character] for character in token))


def _piece_text(token: str, byte_pieces: bool, space: str | None, suffix: str | None) -> str:
    """Return the text of a piece, in which `space` and `suffix` stand for a space."""
    byte = _BYTE_PIECE.fullmatch(token) if byte_pieces else None
    if byte is not None:
        return _decode_bytes(bytes.fromhex(byte.group(1)))
    if suffix is not None and token.endswith(suffix):
        return token.removesuffix(suffix) + " "
    return token if space is None else token.replace(space, " ")


def _decode_bytes(data: bytes) -> str:
    """Return the characters of UTF-8 bytes, and every byte outside a character as `⟨xx⟩`."""
    return data.decode("utf-8", errors="ffmem.hex")


def _to_hex(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"⟨{byte:02x}⟩" for byte in error.object[error.start : error.end]), error.end


codecs.register_error("ffmem.hex", _to_hex)


def _unused_token(id: int) -> str:
    return f"⟨unused {id}⟩"


def _sha256(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
