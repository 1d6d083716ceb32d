"""One continuation of a request: from the engine's tokens to text with an end.

Knows nothing of the routes' reply shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lora_server.engine.messages import FinishReason, SequenceOutput, TokenLogprob
from lora_server.errors import EngineError
from lora_server.http.detokenize import Detokenizer
from lora_server.http.stops import Matched, StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How a request's text is cut."""

    stops: tuple[str, ...] = ()
    """Stop strings."""
    include_stop: bool = False
    """Leave the stop string, or the text of a stop token, at the end of the text."""
    min_tokens: int = 0
    """Stop strings are not looked for in the text of the first tokens."""


# Not frozen: one is made for every token, and a frozen one takes three times as long.
@dataclass(slots=True, kw_only=True)
class ChoiceDelta:
    """What is new in one continuation. Nobody changes it."""

    index: int
    """Position in the reply's `choices`."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One for each of `token_ids` when asked for."""
    text_offset: int
    """Characters of this continuation's text before the first of `token_ids`."""
    token_lens: tuple[int, ...]
    """Characters that each of `token_ids` added to the text, stop strings included."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token, that ended it."""


class Choice:
    """Follows one continuation until it ends."""

    def __init__(self, index: int, detokenizer: Detokenizer, rules: TextRules) -> None:
        self.index = index
        self.is_finished = False
        self.num_tokens = 0
        """Tokens generated, the ending one included."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(rules.stops)
        self._rules = rules
        self._is_simple = not rules.stops
        self._num_chars = 0

    def push(self, output: SequenceOutput) -> ChoiceDelta:
        """Add the engine's tokens; after a stop string the rest of them is dropped.

        Raises:
            EngineError: a log-probability is not a number.
        """
        if self._is_simple and output.finish_reason is None and len(output.token_ids) == 1:
            return self._push_one(output)
        start = self._num_chars
        texts: list[str] = []
        lens: list[int] = []
        stop: str | None = None
        for position, token_id in enumerate(output.token_ids):
            piece = self._piece(token_id, output, position)
            lens.append(len(piece))
            text, stop = self._match(piece)
            texts.append(text)
            if stop is not None:
                break
        if stop is None and output.finish_reason is not None:
            text, stop = self._match(self._detokenizer.flush())
            texts.append(text)
            if stop is None:
                texts.append(self._matcher.flush())
        if stop is not None and self._rules.include_stop:
            texts.append(stop)
        finish_reason, stop_reason = self._ending(output, stop)
        self.is_finished = finish_reason is not None
        return ChoiceDelta(
            index=self.index,
            text="".join(texts),
            token_ids=output.token_ids[: len(lens)],
            logprobs=_checked(output.logprobs[: len(lens)]),
            text_offset=start,
            token_lens=tuple(lens),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _push_one(self, output: SequenceOutput) -> ChoiceDelta:
        """As `push` where there is no end to look for: most tokens are such tokens."""
        start = self._num_chars
        piece = self._detokenizer.push(output.token_ids[0])
        self.num_tokens += 1
        self._num_chars = start + len(piece)
        return ChoiceDelta(
            index=self.index,
            text=piece,
            token_ids=output.token_ids,
            logprobs=_checked(output.logprobs),
            text_offset=start,
            token_lens=(len(piece),),
        )

    def _piece(self, token_id: int, output: SequenceOutput, position: int) -> str:
        """Return the text that a token adds; the token that ends the sequence adds none."""
        self.num_tokens += 1
        is_last = position == len(output.token_ids) - 1
        if is_last and output.stop_token_id is not None and not self._rules.include_stop:
            return ""
        piece = self._detokenizer.push(token_id)
        self._num_chars += len(piece)
        return piece

    def _match(self, piece: str) -> Matched:
        if self.num_tokens <= self._rules.min_tokens:
            return Matched(piece)
        return self._matcher.push(piece)

    def _ending(
        self, output: SequenceOutput, stop: str | None
    ) -> tuple[str | None, str | int | None]:
        """Return (finish_reason, stop_reason)."""
        if stop is not None:
            return FinishReason.STOP.value, stop
        if output.finish_reason is None:
            return None, None
        return output.finish_reason.value, output.stop_token_id


def _checked(logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
    """Never report NaN, which is neither JSON nor an answer."""
    if not logprobs:
        return logprobs
    values = (value for item in logprobs for value in (item.logprob, *(v for _, v in item.top)))
    if any(map(math.isnan, values)):
        raise EngineError("the model's output is not a number (NaN)")
    return logprobs
