"""Encodes answers of Anthropic's API: a message with its blocks, whole or as stream events, and errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from kvtier.api.anthropic.requests import NO_THREADS, MessageRecord
from kvtier.api.chat.answer_blocks import AnswerBlock, AnswerBlocks, BlockBegins, BlockEvent, BlockGrows
from kvtier.api.chat.inner_json import read_arguments
from kvtier.api.chat.sealed_thoughts import sealed
from kvtier.api.generation import GenerationRequest, Usage, WholeAnswer
from kvtier.api.http_error import HttpError, http_error_of
from kvtier.api.logprobs import EncodedLogprobs, SampledToken
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.errors import KvtierError

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_MAX_SENTENCE_CHARACTERS = 1000
_SIGNATURE = "kvtier"
"""The signature of a thinking block. It proves nothing, but clients drop blocks without one."""

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _UsageDocument(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens_by_tier: dict[str, int]
    output_tokens_details: dict[str, int]
    service_tier: str = "standard"
    parted: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    retention: list[dict[str, object]] | msgspec.UnsetType = msgspec.UNSET


class _BlockDelta(msgspec.Struct):
    index: int
    delta: dict[str, str]
    type: str = "content_block_delta"


class MessageEncoder:
    """Encodes the answer to one request."""

    media_type = "text/event-stream"

    def __init__(self, asked: GenerationRequest, message_id: str, record: MessageRecord) -> None:
        self._asked = asked
        self._message_id = message_id
        self._record = record
        self._blocks = AnswerBlocks(asked.form)
        self._is_begun = False
        self._completion: Completion | None = None

    def begin(self, prompt_ends: Sequence[str]) -> None:
        self._blocks = AnswerBlocks(self._asked.form, prompt_ends[0])

    # --- streams ------------------------------------------------------------------------------------------------------

    def chunk(
        self, choice: int, piece: StreamPiece, logprobs: Sequence[SampledToken] | None, prompt_tokens: int
    ) -> bytes:
        events = []
        if not self._is_begun:
            self._is_begun = True
            usage = Usage(prompt_tokens)
            usage.add_cached(prompt_tokens, piece.cached or {})
            events.append(_event("message_start", message=self._message([], self._usage(usage))))
        grown = self._blocks.push(piece.text, len(piece.token_ids))
        if piece.completion is not None:
            self._completion = piece.completion
            grown += self._blocks.finish()
        return b"".join([*events, *(event for one in grown for event in self._shown(one))])

    def end(self, usage: Usage) -> bytes:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        ended = _event("message_delta", delta=delta, usage=self._usage(usage), **self._applied_edits())
        return ended + _event("message_stop")

    def error(self, error: Exception) -> bytes:
        """An error event, which the official client raises. A bug is logged, and told without its details."""
        if isinstance(error, KvtierError):
            found = http_error_of(error)
        else:
            logger.error("request %s failed", self._message_id, exc_info=error)
            found = HttpError(500, f"the server failed; see its log for {self._message_id}", "internal_error")
        return error_event(found, self._message_id)

    def _shown(self, event: BlockEvent) -> list[bytes]:
        block = event.block
        if isinstance(event, BlockGrows):
            return self._grown(block, event.text)
        if isinstance(event, BlockBegins):
            return [_event("content_block_start", index=block.index, content_block=_empty(block))]
        signing = []
        if block.kind == "reasoning":
            signing = [_delta(block, "signature_delta", signature=self._signature(block))]
        return [*signing, _event("content_block_stop", index=block.index)]

    def _grown(self, block: AnswerBlock, text: str) -> list[bytes]:
        if block.kind == "call":
            return [_delta(block, "input_json_delta", partial_json=text)]
        if block.kind == "text":
            return [_delta(block, "text_delta", text=text)]
        return [] if self._record.hides_thinking else [_delta(block, "thinking_delta", thinking=text)]

    # --- whole answers ------------------------------------------------------------------------------------------------

    def logprobs(self, choice: int, tokens: Sequence[SampledToken]) -> EncodedLogprobs:
        raise AssertionError("this API has no logprobs")

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        [answer] = answers
        self._completion = answer.completion
        for text, num_tokens in zip(answer.texts, answer.num_tokens, strict=True):
            self._blocks.push(text, num_tokens)
        self._blocks.finish()
        message = self._message([self._block(block) for block in self._blocks.blocks], self._usage(usage))
        return _encode({**message, **self._applied_edits()})

    def incomplete(self, reason: str | None) -> str:
        return "the engine stopped before the answer was complete"

    def _block(self, block: AnswerBlock) -> dict[str, object]:
        if block.kind == "call":
            return {**_empty(block), "input": read_arguments(block.text)[0]}
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        thought = "" if self._record.hides_thinking else block.text
        return {"type": "thinking", "thinking": thought, "signature": self._signature(block)}

    # --- both ---------------------------------------------------------------------------------------------------------

    def _message(self, content: list[dict[str, object]], usage: _UsageDocument) -> dict[str, object]:
        reason, sequence = self._stop()
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._asked.name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _applied_edits(self) -> dict[str, object]:
        return {"context_management": {"applied_edits": []}} if self._record.manages_context else {}

    def _stop(self) -> tuple[str | None, str | None]:
        """The stop reason, and the client's stop sequence that ended the message, if one did."""
        completion = self._completion
        if completion is None:
            return None, None
        if completion.finish_reason == "length":
            is_full = len(completion.token_ids) >= (self._asked.params.max_tokens or 0)
            return ("max_tokens" if is_full else "model_context_window_exceeded"), None
        if completion.stop in self._record.stops:
            return "stop_sequence", completion.stop
        return ("tool_use" if self._blocks.num_calls else "end_turn"), None

    def _signature(self, block: AnswerBlock) -> str:
        """For hidden thinking, the signature carries the text: clients send it back with the next turn."""
        return sealed(block.text) if self._record.hides_thinking else _SIGNATURE

    def _usage(self, usage: Usage) -> _UsageDocument:
        read, written = sum(usage.cached_tokens.values()), usage.written_tokens(self._asked.model)
        return _UsageDocument(
            usage.prompt_tokens - read - written,
            usage.completion_tokens,
            read,
            written,
            usage.cached_tokens,
            {"thinking_tokens": self._blocks.num_reasoning_tokens},
            parted=usage.parted,
            retention=usage.retained,
        )


def error_body(error: HttpError, request_id: str) -> bytes:
    sentence = error.sentence
    if len(sentence) > _MAX_SENTENCE_CHARACTERS:
        sentence = sentence[: _MAX_SENTENCE_CHARACTERS - 3] + "..."
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    fields: dict[str, object] = {"type": kind, "message": sentence}
    if error.code == NO_THREADS:  # the official client then goes on without a thread
        fields["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return _encode({"type": "error", "error": fields, "request_id": request_id})


def error_event(error: HttpError, request_id: str) -> bytes:
    """The last event of a stream that failed."""
    return b"event: error\ndata: " + error_body(error, request_id) + b"\n\n"


def count_body(num_tokens: int) -> bytes:
    return _encode({"input_tokens": num_tokens})


def _empty(block: AnswerBlock) -> dict[str, object]:
    """A block without content, for its start event."""
    if block.kind == "call":
        assert block.call is not None
        return {"type": "tool_use", "id": block.call.call_id, "name": block.call.name, "input": {}}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _event(kind: str, **fields: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"


def _delta(block: AnswerBlock, kind: str, **fields: str) -> bytes:
    return b"event: content_block_delta\ndata: " + _encode(_BlockDelta(block.index, {"type": kind, **fields})) + b"\n\n"
