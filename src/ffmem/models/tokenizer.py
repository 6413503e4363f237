"""Text to token ids and back, as ffmem needs it.

    shown(ids of a text), joined = the text            (byte-level vocabularies)

A token is shown as the text it stands for, its leading space kept. A token that is only part of
a character is shown by its bytes, `⟨e2⟩⟨82⟩`, so that nothing is ever dropped.

Neither torch nor transformers is imported here: the tokenizer that is wrapped brings its own.
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

if TYPE_CHECKING:
    import transformers

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MADE_UP = re.compile(r"madeupword\d{4,}")
_WORD = re.compile(r"\S+")

UNKNOWN = 3
"""fairseq's id of `<unk>`."""


class Encoding(NamedTuple):
    """The tokens of one text, without any special token in front or behind."""

    ids: list[int]
    starts: list[int] | None
    """The place in the text where each token begins; None where the tokenizer cannot tell."""
    ends: list[int] | None
    """The place behind each token. Tokens that share a character all reach behind it."""


class Tokenizer(ABC):
    """Text to token ids and back."""

    word_level: bool
    """Whether it takes the corpus' own white-space tokens as they are (the paper's model)."""
    own_start: int | None
    """The token that it puts in front of a text by itself, if it does."""
    bos: int | None
    eos: int | None
    unk: int | None
    """The token that stands for what it does not know, if there is one."""
    controls: frozenset[int]
    """Ids of tokens that mark something and stand for no text, such as the end of one."""
    unlisted: frozenset[int]
    """Ids that are never listed among a value's tokens."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Return the SHA-256 over everything that decides ids."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the tokens of each text, without special tokens around it."""

    @abstractmethod
    def shown(self, size: int) -> list[str]:
        """Return the token of every id below `size` as it is shown to people."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that tokens stand for, special tokens included."""
        shown = self.shown(max(ids, default=-1) + 1)
        return "".join(shown[id] for id in ids)

    @property
    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, by the token as the vocabulary writes it."""

    def id_of(self, token: str) -> int:
        """Return the id of a token, given as the vocabulary writes it or as it is shown."""
        found = self.vocabulary.get(token)
        if found is None:
            found = self._by_shown.get(token)
        if found is None:
            near = sorted(
                shown for shown in self._by_shown if shown.strip().lower() == token.strip().lower()
            )
            hint = f" Near it: {', '.join(map(repr, near[:5]))}." if near else ""
            raise ModelError(
                f"{token!r} is not one token of this model's vocabulary.{hint}"
                " Give a single token, with its leading space if it has one."
            )
        return found

    @cached_property
    def _by_shown(self) -> dict[str, int]:
        """The lowest id of every shown form."""
        size = max(self.vocabulary.values(), default=-1) + 1
        return {token: id for id, token in reversed(list(enumerate(self.shown(size))))}


class WordTokenizer(Tokenizer):
    """fairseq's `dict.txt`: white-space tokens, whole; what it does not know is `<unk>`."""

    SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")

    def __init__(self, words: Iterable[str]) -> None:
        self.words = [*self.SPECIAL, *words]
        self._ids = {word: id for id, word in enumerate(self.words)}
        if len(self._ids) < len(self.words):
            twice = next(word for id, word in enumerate(self.words) if self._ids[word] != id)
            raise ModelError(
                f"The dictionary lists {twice!r} twice, so ids would not be those of the model."
                " Give the dict.txt that the model was trained with."
            )
        self.word_level = True
        # fairseq lists `<s>`, but its language models never read it: `</s>` opens a text.
        self.bos = self.own_start = self.eos = 2
        self.unk = UNKNOWN
        self.controls = frozenset((0, 1, 2))
        self.unlisted = frozenset(
            [0, 1, *(id for id, word in enumerate(self.words) if _MADE_UP.fullmatch(word))]
        )

    @classmethod
    def from_file(cls, path: Path) -> "WordTokenizer":
        """Return the tokenizer of a `dict.txt`: one `token count` per line, most frequent first."""
        words = []
        try:
            with path.open(encoding="utf-8", newline="\n") as lines:
                for number, line in enumerate(lines, start=1):
                    word, _, count = line.rstrip("\r\n").rpartition(" ")
                    if not word or not count.isdecimal():
                        raise ModelError(
                            f"Line {number} of {path} is {line.strip()!r}, not `token count`."
                            " Give the dict.txt that the model was trained with."
                        )
                    words.append(word)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"Cannot read the dictionary {path}: {error}. Give the dict.txt that the model was"
                " trained with."
            ) from None
        return cls(words)

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 over the words in order."""
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

    def shown(self, size: int) -> list[str]:
        """Return the word of every id below `size`."""
        return [*self.words[:size], *map(_unused, range(len(self.words), size))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words with a space between them."""
        size = len(self.words)
        return " ".join(self.words[id] if id < size else _unused(id) for id in ids)


class SubwordTokenizer(Tokenizer):
    """A Hugging Face tokenizer, fast or slow."""

    def __init__(self, tokenizer: "transformers.PreTrainedTokenizerBase") -> None:
        self.tokenizer: Any = tokenizer
        self.word_level = False
        self.bos, self.eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        self.unk = self.tokenizer.unk_token_id
        marks = {self.bos, self.eos}  # in GPT-2's vocabulary they also stand for the unknown
        special = set(self.tokenizer.all_special_ids) - {self.unk}
        self.controls = frozenset(special | (marks - {None}))
        self.unlisted = frozenset[int]()
        self.own_start = self._own_start()

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 over everything that decides ids."""
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        if self.tokenizer.is_fast:
            rules = json.loads(self.tokenizer.backend_tokenizer.to_str())
            del rules["truncation"], rules["padding"]  # the last call's, not the tokenizer's
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

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, added ones included."""
        return dict(self.tokenizer.get_vocab())

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the tokens of each text, however long it is."""
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
            verbose=False,  # "longer than the model's maximum": ffmem cuts by itself
        )
        if not fast:
            return [Encoding(list(ids), None, None) for ids in found["input_ids"]]
        return [
            Encoding(list(ids), [start for start, _ in places], [end for _, end in places])
            for ids, places in zip(found["input_ids"], found["offset_mapping"], strict=True)
        ]

    def shown(self, size: int) -> list[str]:
        """Return the token of every id below `size` as it is shown to people."""
        return [*self._all_shown[:size], *map(_unused, range(len(self._all_shown), size))]

    @cached_property
    def _all_shown(self) -> list[str]:
        """Every token of the vocabulary, worked out once: a tenth of a second for 50,000."""
        # Added tokens (special ones among them) are plain text in every vocabulary.
        added = {
            int(id): str(token.content) for id, token in self.tokenizer.added_tokens_decoder.items()
        }
        tokens = {id: token for token, id in self.vocabulary.items()}
        size = max((*added, *tokens), default=-1) + 1
        return [
            added[id] if id in added else self._shown(tokens[id]) if id in tokens else _unused(id)
            for id in range(size)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; a sentence-piece tokenizer drops the space in front."""
        text: str = self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _shown(self) -> Callable[[str], str]:
        """How this kind of vocabulary turns a token into text."""
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
            return _shown_byte_level
        return lambda token: _shown_piece(token, byte_pieces, space, suffix)

    def _own_start(self) -> int | None:
        """Return the token that the tokenizer puts in front of a text by itself, if any."""
        with_special = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        without = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        if with_special[:1] == without[:1]:
            return None
        return int(with_special[0])


def _alphabet() -> dict[str, int]:
    """Return the byte that each character of GPT-2's byte-level alphabet stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_ALPHABET = _alphabet()


def _shown_byte_level(token: str) -> str:
    """Return the text of a token written in GPT-2's byte-level alphabet."""
    if any(character not in _ALPHABET for character in token):
        return token
    return _shown_bytes(bytes(_ALPHABET[character] for character in token))


def _shown_piece(token: str, byte_pieces: bool, space: str | None, suffix: str | None) -> str:
    """Return the text of a piece, where `space` and `suffix` stand for a space."""
    byte = _BYTE_PIECE.fullmatch(token) if byte_pieces else None
    if byte is not None:
        return _shown_bytes(bytes.fromhex(byte.group(1)))
    if suffix is not None and token.endswith(suffix):
        return token.removesuffix(suffix) + " "
    return token if space is None else token.replace(space, " ")


def _shown_bytes(data: bytes) -> str:
    """Return whole characters as they are and every other byte as `⟨xx⟩`."""
    return data.decode("utf-8", errors="ffmem.shown")


def _in_hex(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"⟨{byte:02x}⟩" for byte in error.object[error.start : error.end]), error.end


codecs.register_error("ffmem.shown", _in_hex)


def _unused(id: int) -> str:
    return f"⟨unused {id}⟩"


def _sha256(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
