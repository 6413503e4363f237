"""Conversations: messages, through the tokenizer's own chat template, to token ids.

    messages ─► template ─► text ─► ids

The template writes control tokens between the messages, such as `<|im_end|>`. A message that spells
the same characters stays text: it can neither end its turn nor begin another.

    ids of a conversation without such messages = apply_chat_template(messages, tokenize=True)

This module must not import torch or transformers.
"""

import json
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ffmem.errors import CorpusError, ModelError, one_line

Message = dict[str, Any]
"""A role and a content, and whatever else the template reads."""

_DATE = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%b', 'Jul')"
    " | replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024') }}{%- endmacro -%}"
)
"""Put before a template that asks for today's date: its tokens must be the same every day."""

_SECRET = secrets.token_hex(8)  # no text can contain a mark that it cannot guess
_MARK = re.compile(rf"q{_SECRET}([abc])(\d+)z")
"""Marks in a rendered conversation: the begin (a) and end (b) of a message; a control token (c)."""

_JSON = re.compile(r"\s*(\[\s*\{|\{\s*\")")
"""How JSON messages begin, and other texts hardly ever."""

_THOUGHT = re.compile(r".*</think>", re.DOTALL)
"""What templates leave out of earlier answers."""


class ChatEncoding(NamedTuple):
    """The tokens of one conversation, with those of the template."""

    text: str
    ids: list[int]
    starts: list[int] | None
    """Offset of each token's first character; None if the tokenizer does not know."""
    ends: list[int] | None
    is_content: list[bool] | None
    """Whether each token belongs to the text of a message, and not to the template."""
    answer: int
    """Number of tokens before the answer; all of them if the model has yet to answer."""


def as_messages(prompt: object) -> object:
    """Return the messages of a prompt: a list, as it is or as JSON; a text is one user turn.

    Raise on a text that begins as JSON messages do, and is no JSON.
    """
    if not isinstance(prompt, str):
        return prompt
    if prompt.lstrip().startswith(("[", "{")):
        try:
            found = json.loads(prompt)
        except (ValueError, RecursionError) as error:
            if _JSON.match(prompt):
                raise CorpusError(
                    f"The prompt looks like JSON messages but does not parse: {one_line(error)}."
                    ' Write [{"role": "user", "content": "…"}]; if it is a text, put it there as'
                    " the content."
                ) from None
            found = None
        messages = found if isinstance(found, list) else []
        if any(isinstance(one, dict) and "role" in one for one in messages):
            return messages
    return [{"role": "user", "content": prompt}]


def check_messages(messages: object) -> list[Message]:
    """Return the messages of a conversation, without empty fields; raise if they are malformed."""
    if not isinstance(messages, list | tuple):
        raise CorpusError(
            f"A conversation is a list of messages, not {_shown(messages)}."
            ' Write [{"role": "user", "content": "…"}, …].'
        )
    if not messages:
        raise CorpusError("The conversation is empty. Add at least one message.")
    found = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CorpusError(
                f"Message {number} is {_shown(message)}, without a role."
                ' Write {"role": "user", "content": "…"}.'
            )
        # Parquet gives every message all the fields that any message has.
        kept = {key: value for key, value in message.items() if value is not None}
        content = kept.get("content")
        if content is None and any(key for key in kept if key not in ("role", "name")):
            kept["content"] = ""  # tool calls, for example
        elif content is None:
            raise CorpusError(f"Message {number} ({message['role']}) has no content; add text.")
        elif not isinstance(content, str) and not _is_parts(content):
            raise CorpusError(
                f"The content of message {number} ({message['role']}) is {_shown(content)}; use"
                " text."
            )
        found.append(kept)
    return found


def _is_parts(content: object) -> bool:
    """Return whether a content is a list of texts, as models that read images take it."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    )


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '…'}"


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, controls: frozenset[int]) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise no_template()
        self.tokenizer = tokenizer
        template: str = tokenizer.get_chat_template()
        self.template = f"{_DATE}{template}" if "strftime_now" in template else template
        self.is_fast = bool(tokenizer.is_fast)
        added = tokenizer.added_tokens_decoder
        tokens = {str(token.content) for token in added.values() if token.special}
        tokens |= {str(tokenizer.convert_ids_to_tokens(id)) for id in controls}
        self.control_tokens = sorted(tokens - {""}, key=lambda token: (-len(token), token))
        """The texts of control tokens; a longer one comes before those that it contains."""
        self._controls = re.compile("|".join(map(re.escape, self.control_tokens)) or "(?!)")

    def encode(self, messages: object, *, ask: bool = False) -> ChatEncoding:
        """Return the tokens of a conversation.

        With `ask`, the model is to answer: the tokens end where its answer begins, or where the
        last message ends if that is the beginning of an answer (its role is assistant).
        """
        given = check_messages(messages)
        is_begun = ask and given[-1]["role"] == "assistant"
        how = {"add_generation_prompt": ask and not is_begun, "continue_final_message": is_begun}
        # Every control token that a message spells becomes a mark, until the template is done.
        protected = [self._protect(message) for message in given]
        rendered = self._render(protected, how)
        spans = self._find_contents(protected, rendered, how)
        text, places = self._unmark(rendered)
        contents = [span and (places(span[0]), places(span[1])) for span in spans]
        ids, starts, ends = self._tokenize(rendered)
        is_content, answer = None, len(ids)
        if starts is not None and ends is not None:
            is_content = _overlaps(starts, ends, [span for span in contents if span])
            if is_begun and contents[-1]:
                begin = contents[-1][0]
                answer = sum(
                    end <= begin or start < begin for start, end in zip(starts, ends, strict=True)
                )
        if not ids:
            raise CorpusError("The chat template gives no tokens for this conversation.")
        return ChatEncoding(text, ids, starts, ends, is_content, answer)

    @cached_property
    def end_of_turn(self) -> int | None:
        """The control token that the template writes after an answer; None if there is none."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            found = self.encode(probe)
        except CorpusError:  # a template may want other roles
            return None
        if found.is_content is None:
            return None
        last = max((i for i, is_content in enumerate(found.is_content) if is_content), default=-1)
        texts = set(self.control_tokens)
        for id in found.ids[last + 1 :]:
            if str(self.tokenizer.convert_ids_to_tokens(id)) in texts:
                return id
        return None

    # The template

    def _render(self, messages: list[Message], how: dict[str, bool]) -> str:
        """Return what the template writes; raise if it refuses the conversation."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, **how
            )
        except Exception as error:  # a template raises anything
            roles = ", ".join(message["role"] for message in messages)
            reason = f"{one_line(error)}. The conversation has the roles: {roles}."
            raise CorpusError(
                "The model's chat template rejects the conversation:"
                f" {_restore(reason, self.control_tokens)}"
            ) from error
        return text

    def _protect(self, value: Any) -> Any:
        """Return messages in which marks stand for control tokens."""
        if isinstance(value, str):
            return self._controls.sub(
                lambda match: _mark("c", self.control_tokens.index(match[0])), value
            )
        if isinstance(value, dict):
            return {key: self._protect(one) for key, one in value.items()}
        return [self._protect(one) for one in value] if isinstance(value, list) else value

    def _find_contents(
        self, messages: list[Message], rendered: str, how: dict[str, bool]
    ) -> list[tuple[int, int] | None]:
        """Return the begin and end of every text of a message in what the template wrote.

        The template runs a second time, on texts with marks at both ends. None for a blank text,
        and for an answer that the template shortens. Raise if it leaves out another message.
        """
        texts: list[tuple[int, str]] = []

        def mark(message: int, text: str) -> str:
            inner = text.strip()
            texts.append((message, inner))
            if not inner:
                return text
            before, after = text[: text.index(inner)], text[text.index(inner) + len(inner) :]
            number = len(texts) - 1
            return f"{before}{_mark('a', number)}{inner}{_mark('b', number)}{after}"

        marked: list[Message] = []
        for number, message in enumerate(messages):
            content = message["content"]
            if isinstance(content, str):
                content = mark(number, content)
            else:
                content = [part | {"text": mark(number, part["text"])} for part in content]
            marked.append(message | {"content": content})
        ends: dict[tuple[str, int], int] = {}
        bare, at = "", 0
        with_marks = self._render(marked, how)
        for match in _MARK.finditer(with_marks):
            if match[1] != "c":
                bare += with_marks[at : match.start()]
                at = match.end()
                ends.setdefault((match[1], int(match[2])), len(bare))
        bare += with_marks[at:]
        found: list[tuple[int, int] | None] = []
        cursor = 0
        for number, (owner, text) in enumerate(texts):
            begin, end = ends.get(("a", number)), ends.get(("b", number))
            span = None if begin is None or end is None else (begin, end)
            if text and (span is None or bare != rendered):
                span = _search(rendered, text, cursor)
            if span is None and text and messages[owner]["role"] != "assistant":
                role = _restore(messages[owner]["role"], self.control_tokens)
                raise CorpusError(
                    f"The model's chat template drops message {owner + 1}, whose role is"
                    f" {role!r}. Use roles that the template supports."
                )
            cursor = cursor if span is None else span[1]
            found.append(span)
        return found

    # Tokens

    def _unmark(self, rendered: str) -> tuple[str, Any]:
        """Return the text with control tokens in place of marks, and how its offsets follow."""
        shifts = [
            (match.end(), len(self.control_tokens[int(match[2])]) - len(match[0]))
            for match in _MARK.finditer(rendered)
        ]

        def place(offset: int) -> int:
            return offset + sum(shift for end, shift in shifts if end <= offset)

        return _restore(rendered, self.control_tokens), place

    def _tokenize(self, rendered: str) -> tuple[list[int], list[int] | None, list[int] | None]:
        """Return the tokens of what the template wrote: as a whole, or in pieces at the marks."""
        pieces = _MARK.split(rendered)  # text, "c", number, text, "c", number, …, text
        ids: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        base = 0
        for place, piece in enumerate(pieces):
            if place % 3 == 1:
                continue
            is_mark = place % 3 == 2
            text = self.control_tokens[int(piece)] if is_mark else piece
            own, own_starts, own_ends = self._encode_piece(text, is_mark, is_first=place == 0)
            if is_mark and self.tokenizer.convert_tokens_to_ids(text) in own:
                raise CorpusError(
                    f"A message contains {text!r}, which this tokenizer always reads as a control"
                    " token. Remove it from the message."
                )
            ids += own
            starts += [base + start for start in own_starts]
            ends += [base + end for end in own_ends]
            base += len(text)
        return (ids, starts, ends) if self.is_fast else (ids, None, None)

    def _encode_piece(
        self, text: str, is_mark: bool, is_first: bool
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the tokens of a piece of a conversation, and their offsets in it.

        SentencePiece puts a space before a text, so a later piece is read after a line end.
        """
        if not text:
            return [], [], []
        if not is_first:
            newline = self._call("\n", is_mark)[0]
            ids, starts, ends = self._call("\n" + text, is_mark)
            if ids[: len(newline)] == newline:
                n = len(newline)
                return ids[n:], [max(0, s - 1) for s in starts[n:]], [e - 1 for e in ends[n:]]
        return self._call(text, is_mark)

    def _call(self, text: str, as_text: bool) -> tuple[list[int], list[int], list[int]]:
        found = self.tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=as_text,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=self.is_fast,
            verbose=False,
        )
        offsets: Sequence[tuple[int, int]] = found["offset_mapping"] if self.is_fast else []
        return list(found["input_ids"]), [one for one, _ in offsets], [end for _, end in offsets]


def no_template() -> ModelError:
    """Return the error for a tokenizer that has no chat template."""
    return ModelError(
        "The model's tokenizer has no chat template, so ffmem cannot format messages for the"
        " model. Use the model's chat or instruct version; or put its chat_template.jinja"
        " next to the tokenizer; or read plain text, without messages and --chat."
    )


def _mark(kind: str, number: int) -> str:
    return f"q{_SECRET}{kind}{number}z"


def _restore(text: str, control_tokens: Sequence[str]) -> str:
    """Return a text with control tokens in place of their marks."""
    return _MARK.sub(lambda match: control_tokens[int(match[2])], text)


def _search(rendered: str, text: str, cursor: int) -> tuple[int, int] | None:
    """Return where a text stands that the template may have shortened by its thoughts."""
    for wanted in (text, _THOUGHT.sub("", text).strip()):
        begin = rendered.find(wanted, cursor) if wanted else -1
        if begin >= 0:
            return begin, begin + len(wanted)
    return None


def _overlaps(
    starts: Sequence[int], ends: Sequence[int], spans: Sequence[tuple[int, int]]
) -> list[bool]:
    """Return whether each token has a character in one of the spans, which are in order."""
    found, at = [], 0
    for start, end in zip(starts, ends, strict=True):
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        found.append(at < len(spans) and start < spans[at][1] and end > spans[at][0])
    return found
