"""Asks an OpenAI-compatible server for greedy answers with log-probabilities, one at a time.

One at a time, because in half precision an answer may depend on what shares its step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import httpx

from lora_server.smoke.baseline import NUM_TOP, AnswerToken
from lora_server.smoke.compare import FoundAnswer

if TYPE_CHECKING:
    from types import TracebackType

    from lora_server.smoke.baseline import BaselinePrompt

_DIGEST_HEADER = "X-LoRA-Adapter"
_MAX_MESSAGE = 300
"""Characters of a server's answer that are kept as an error."""
_REFUSED_FIELD = (400, 422)


class SmokeClientError(Exception):
    """The server cannot be used for this at all; `problems` says why."""

    def __init__(self, problem: str) -> None:
        self.problems = (problem,)
        super().__init__(problem)


class AnswerFailedError(Exception):
    """One prompt was not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One entry of `/v1/models`."""

    name: str
    is_base: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledAnswer:
    """An answer, and what the server says has answered."""

    answer: FoundAnswer
    answered_by: str | None


class SmokeClient:
    """One connection; use it as a context manager."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        self._with_ids = True
        """Until the server refuses the field that asks for token ids."""
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        try:
            self._http = httpx.Client(
                base_url=self.base_url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(timeout_s, connect=10.0),
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise SmokeClientError(f"--base-url {base_url!r}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def models(self) -> tuple[ServedModel, ...]:
        """List the base, which is the first, and every entry that has a parent.

        Raises:
            SmokeClientError: the server cannot be reached, refuses, or lists nothing.
        """
        try:
            response = self._http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SmokeClientError(f"{self.base_url} cannot be reached: {error}") from error
        if response.status_code != httpx.codes.OK:
            raise SmokeClientError(f"/v1/models: {response.status_code}: {_message(response)}")
        try:
            base, *others = response.json()["data"]
            adapters = [str(card["id"]) for card in others if card.get("parent")]
            return (
                ServedModel(name=str(base["id"]), is_base=not base.get("parent")),
                *(ServedModel(name=name, is_base=False) for name in adapters),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SmokeClientError("/v1/models lists no model") from error

    def knows(self, name: str) -> bool:
        """Whether the server lists a model that is neither the first nor has a parent."""
        try:
            listed = self._http.get("/v1/models").json()["data"]
            return any(card["id"] == name for card in listed)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False

    def ask(self, model: str, prompt: BaselinePrompt, *, max_tokens: int) -> LabelledAnswer:
        """Ask for one greedy answer.

        Raises:
            AnswerFailedError: the server refused it or broke off.
            SmokeClientError: it answers without log-probabilities.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt.prompt if isinstance(prompt.prompt, str) else list(prompt.prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": NUM_TOP,
        }
        response = self._post({**body, "return_token_ids": True} if self._with_ids else body)
        if response.status_code in _REFUSED_FIELD and self._with_ids:
            # OpenAI's own service refuses the field; if that was not it, this is refused as well
            response = self._post(body)
            self._with_ids = response.status_code != httpx.codes.OK
        if response.status_code != httpx.codes.OK:
            raise AnswerFailedError(f"{response.status_code}: {_message(response)}")
        return LabelledAnswer(
            answer=_read_answer(response), answered_by=response.headers.get(_DIGEST_HEADER)
        )

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        try:
            return self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise AnswerFailedError(f"{type(error).__name__}: {error}".rstrip(": ")) from error


def _read_answer(response: httpx.Response) -> FoundAnswer:
    try:
        choice = response.json()["choices"][0]
        lists = choice.get("logprobs")
        if not lists or not isinstance(lists.get("token_logprobs"), list):
            raise SmokeClientError("the server answers without log-probabilities")
        texts, logprobs = lists["tokens"], lists["token_logprobs"]
        tops = lists.get("top_logprobs") or [{}] * len(texts)
        ids = choice.get("token_ids") or []
        if len(ids) != len(texts):
            ids = [None] * len(texts)
        tokens = tuple(
            AnswerToken(text=text, id=id_, logprob=logprob, top=top or {})
            for text, id_, logprob, top in zip(texts, ids, logprobs, tops, strict=True)
        )
        return FoundAnswer(text=str(choice.get("text") or ""), tokens=tokens)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise AnswerFailedError(f"the reply is not a completion: {error}") from error


def _message(response: httpx.Response) -> str:
    """Return the message of an OpenAI-shaped error, or the beginning of the text."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text
    return str(message)[:_MAX_MESSAGE]
