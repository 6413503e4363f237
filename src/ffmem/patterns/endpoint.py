"""A language model behind an address that speaks OpenAI's chat completions.

Only answers of the asked form count. What may pass (a server that is busy, a connection that
breaks, an answer that is cut or of another form) is asked again, a bounded number of times; what
will not pass (a wrong key, a model that is not there) ends the run with a sentence.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ffmem.errors import FfmemError
from ffmem.patterns.prompts import AGAIN, SYSTEM, Question

Answer = TypeVar("Answer")

_PASSES = {408, 409, 425, 429}
"""Refusals that may pass, beside those of 500 and more."""


class NoAnswer(FfmemError):
    """A question was asked as often as it may be, and no answer was of the asked form."""


class Unreachable(NoAnswer):
    """A question was asked as often as it may be, and the endpoint did not answer at all."""


class NotValid(FfmemError):
    """An answer is not of the asked form."""


@dataclass
class Endpoint:
    """Where a model is asked, and how patiently."""

    url: str
    model: str
    seed: int = 0
    timeout: float = 120.0
    """Seconds for one answer."""
    retries: int = 3
    """After the first time."""
    wait: float = 1.0
    """Seconds before the first retry; twice as many before each further one."""
    most_tokens: int = 1200
    """Of an answer."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise FfmemError(
                f"{self.url!r} is not the address of an endpoint."
                " Give one such as http://127.0.0.1:8080/v1."
            )
        self._client = _client(self.url, self.timeout)

    @property
    def host(self) -> str:
        """Where the model is, without anything secret."""
        parts = urlsplit(self.url)
        return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the answers, beside the questions."""
        return {
            "endpoint": self.host,
            "model": self.model,
            "temperature": 0,
            "seed": self.seed,
            "most_tokens": self.most_tokens,
        }

    def ask(self, question: Question, read: Callable[[Any], Answer]) -> Answer:
        """Return what `read` makes of the answer, which raises NotValid if it can make nothing."""
        problem, complaint, kind = "", "", NoAnswer
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.wait * 2 ** (attempt - 1))
            try:
                return read(_json(self._once(question.text + complaint, question.schema)))
            except NotValid as error:
                problem = str(error)
                kind = NoAnswer
                complaint = AGAIN.format(problem=problem)  # the same question has the same answer
            except _Passing as error:
                problem, kind = str(error), Unreachable
        raise kind(f"No usable answer after {self.retries + 1} attempts. The last: {problem}")

    def _once(self, text: str, schema: dict[str, Any]) -> str:
        """Return the text of one answer."""
        import openai

        form = {"name": "answer", "strict": True, "schema": schema}
        try:
            answer = self._client.chat.completions.create(
                model=self.model,
                messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
                response_format={"type": "json_schema", "json_schema": form},
                temperature=0,
                seed=self.seed,
                max_tokens=self.most_tokens,
            )
        except openai.APITimeoutError:
            raise _Passing(f"no answer within {self.timeout:g} seconds.") from None
        except openai.APIConnectionError as error:
            raise _Passing(f"no connection to {self.host} ({error}).") from None
        except openai.APIStatusError as error:
            self._refused(error.status_code, error.message)
        except (openai.APIError, ValueError) as error:  # something else than the endpoint's JSON
            raise _Passing(f"{self.host} answered in no known form ({error}).") from None
        return _text(answer)

    def _refused(self, status: int, message: str) -> None:
        """Raise what a refusal means: to be tried again, or not."""
        said = " ".join(message.split())[:300]
        if status >= 500 or status in _PASSES:
            raise _Passing(f"{self.host} answered {status}: {said}")
        advice = {
            401: "Set OPENAI_API_KEY to a key that it accepts.",
            403: "Set OPENAI_API_KEY to a key that it accepts.",
            404: "Check the address (it often ends in /v1) and the name of the model.",
        }
        raise FfmemError(
            f"{self.host} refused the question to {self.model!r} with {status}: {said}"
            f" {advice.get(status, 'It must accept chat completions with a JSON schema.')}"
        )


class _Passing(FfmemError):
    """Something that may be otherwise next time."""


def _client(url: str, timeout: float) -> Any:
    try:
        import openai
    except ImportError:
        raise FfmemError(
            "A language model is asked through the package `openai`, which is not installed:"
            " pip install 'ffmem[explain]'."
        ) from None
    # A local server wants no key, but the client does not start without one.
    key = os.environ.get("OPENAI_API_KEY") or "none"
    return openai.OpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=0)


def _text(answer: Any) -> str:
    choices = getattr(answer, "choices", None)
    if not choices:
        raise NotValid("there was no answer in it.")
    message = choices[0].message
    if getattr(message, "refusal", None):
        raise NotValid("the model refused to answer.")
    if choices[0].finish_reason == "length":
        raise NotValid("it was too long and was cut. Be brief.")
    if not isinstance(message.content, str):
        raise NotValid("it was empty.")
    return message.content


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise NotValid(f"it was no JSON ({error}).") from None
