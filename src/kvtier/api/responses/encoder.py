"""Encodes answers of the Responses API, as bytes: a response with its items, whole or as stream events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from kvtier.api.chat.answer_blocks import AnswerBlock, AnswerBlocks, BlockBegins, BlockEnds, BlockEvent, BlockGrows
from kvtier.api.chat.input_text import InputText
from kvtier.api.chat.tool import CUSTOM
from kvtier.api.generation import GenerationRequest, Usage, WholeAnswer
from kvtier.api.http_error import HttpError, http_error_of
from kvtier.api.logprobs import EncodedLogprobs, SampledToken, encode_items, joined
from kvtier.api.responses.call_items import CALL_ITEMS
from kvtier.api.responses.items import item_id, output_item, own_names, reasoning_part, text_part
from kvtier.api.responses.record import ResponseRecord
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.errors import KvtierError

_encode = msgspec.json.Encoder().encode
_COMPLETED, _INCOMPLETE, _IN_PROGRESS, _FAILED = "completed", "incomplete", "in_progress", "failed"

Keep = Callable[[bytes, Sequence[AnswerBlock]], None]
"""Called with the document of a complete response and the blocks of its answer."""


class _CachedTokens(msgspec.Struct):
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]
    cache_write_tokens: int
    parted: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    retention: list[dict[str, object]] | msgspec.UnsetType = msgspec.UNSET


class _ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int


class _UsageDocument(msgspec.Struct):
    input_tokens: int
    input_tokens_details: _CachedTokens
    output_tokens: int
    output_tokens_details: _ReasoningTokens
    total_tokens: int


class _Delta(msgspec.Struct, omit_defaults=True):
    """The event for one piece of an answer."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: Sequence[SampledToken] | msgspec.UnsetType = msgspec.UNSET


class ResponseEncoder:
    """Encodes the answer to one request; `keep` is None if the response is not stored."""

    media_type = "text/event-stream"

    def __init__(self, asked: GenerationRequest, response_id: str, record: ResponseRecord, keep: Keep | None) -> None:
        self._asked = asked
        self._response_id = response_id
        self._record = record
        self._keep = keep
        self._created_at = int(time.time())
        self._blocks = AnswerBlocks(asked.form)
        self._num_events = 0
        self._completion: Completion | None = None
        self._logprobs: list[SampledToken] = []
        self._input = InputText()  # of the newest call, if its tool is a custom one

    def begin(self, prompt_ends: Sequence[str]) -> None:
        self._blocks = AnswerBlocks(self._asked.form, prompt_ends[0])

    # --- streams ------------------------------------------------------------------------------------------------------

    def chunk(
        self, choice: int, piece: StreamPiece, logprobs: Sequence[SampledToken] | None, prompt_tokens: int
    ) -> bytes:
        events = [] if self._num_events else [self._life("created"), self._life(_IN_PROGRESS)]
        was_in_text = self._blocks.is_in_text
        grown = self._blocks.push(piece.text, len(piece.token_ids))
        if logprobs and (was_in_text or self._blocks.is_in_text):
            self._logprobs += logprobs
        if piece.completion is not None:
            self._completion = piece.completion
            grown += self._blocks.finish()
        events += [event for one in grown for event in self._shown(one)]
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        document = self._finished(usage, {})
        self._note_end(document)
        return self._event(f"response.{self._status}", response=msgspec.Raw(document))

    def error(self, error: Exception) -> bytes:
        """`response.failed`, and an `error` event for clients that do not handle it: the official client raises an
        `error` that is an object.
        """
        if not isinstance(error, KvtierError):
            raise error
        found = http_error_of(error)
        document = self._document(_FAILED, self._items({}), None, found)
        failed = self._event("response.failed", response=msgspec.Raw(document))
        fields = {"code": found.code or None, "message": found.sentence, "param": found.parameter}
        kind = "invalid_request_error" if found.status < 500 else "server_error"
        return failed + self._event("error", **fields, error={"type": kind, **fields})

    def _shown(self, event: BlockEvent) -> list[bytes]:
        """The stream events for a block event."""
        block = event.block
        place: dict[str, object] = {"item_id": item_id(self._response_id, block), "output_index": block.index}
        if isinstance(event, BlockGrows):
            return self._grown(block, event.text)
        if isinstance(event, BlockBegins):
            self._drop_logprobs(block)
            self._input = InputText()
            item = self._item(block, _IN_PROGRESS)
            added = [self._event("response.output_item.added", output_index=block.index, item=item)]
            if block.kind != "call":
                added.append(
                    self._event("response.content_part.added", **place, content_index=0, part=_part(block, ""))
                )
            return added
        assert isinstance(event, BlockEnds)
        return [*self._ended(block, place), self._item_done(block)]

    def _grown(self, block: AnswerBlock, text: str) -> list[bytes]:
        kind = CALL_ITEMS[block.tool_kind].delta if block.kind == "call" else _DELTAS[block.kind]
        if block.tool_kind == CUSTOM:
            text = self._input.push(text)
        if not kind or not text:
            return []
        delta = _Delta(kind, self._num_events, item_id(self._response_id, block), block.index, text)
        if block.kind != "call":
            delta.content_index = 0
        if block.kind == "text":
            delta.logprobs, self._logprobs = self._logprobs, []
        self._num_events += 1
        return [b"event: " + kind.encode() + b"\ndata: " + _encode(delta) + b"\n\n"]

    def _ended(self, block: AnswerBlock, place: dict[str, object]) -> list[bytes]:
        text = block.text
        if block.kind == "call":
            assert block.call is not None
            item = CALL_ITEMS[block.tool_kind]
            rest = self._input.finish() if block.tool_kind == CUSTOM else ""
            grown = [self._event(item.delta, **place, delta=rest)] if rest else []
            fields = item.done_fields(block.call, text)
            if "name" in fields:
                fields["name"] = own_names(block.call.name, self._record).get("name", block.call.name)
            done = [self._event(item.done, **place, **fields)] if item.done else []
            return [*grown, *done]
        place["content_index"] = 0
        if block.kind == "reasoning":
            whole = self._event("response.reasoning_text.done", **place, text=text)
        else:
            whole = self._event("response.output_text.done", **place, text=text, logprobs=())
        return [whole, self._event("response.content_part.done", **place, part=_part(block, text))]

    def _item_done(self, block: AnswerBlock) -> bytes:
        is_last = block is self._blocks.blocks[-1] and self._completion is not None
        status = self._status if is_last else _COMPLETED
        return self._event("response.output_item.done", output_index=block.index, item=self._item(block, status))

    def _drop_logprobs(self, block: AnswerBlock) -> None:
        if block.kind != "text":
            self._logprobs = []

    def _life(self, stage: str) -> bytes:
        return self._event(f"response.{stage}", response=msgspec.Raw(self._document(_IN_PROGRESS, [], None)))

    def _event(self, kind: str, **fields: object) -> bytes:
        document = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(document) + b"\n\n"

    # --- whole answers ------------------------------------------------------------------------------------------------

    def logprobs(self, choice: int, tokens: Sequence[SampledToken]) -> EncodedLogprobs:
        return (encode_items(tokens),)

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        [answer] = answers
        self._completion = answer.completion
        logprobs = self._read(answer)
        document = self._finished(usage, logprobs)
        self._note_end(document)
        return document

    def _read(self, answer: WholeAnswer) -> dict[int, msgspec.Raw]:
        """Read the answer piece by piece; returns the log-probabilities of each text block."""
        of_pieces = iter(answer.logprobs or ())
        found: dict[int, list[EncodedLogprobs]] = {}
        for text, num_tokens in zip(answer.texts, answer.num_tokens, strict=True):
            self._blocks.push(text, num_tokens)
            encoded = next(of_pieces, None) if num_tokens else None
            if encoded is not None and self._blocks.is_in_text:
                found.setdefault(max(0, len(self._blocks.blocks) - 1), []).append(encoded)
        self._blocks.finish()
        return {index: joined(pieces) for index, pieces in found.items()}

    def incomplete(self, reason: str | None) -> str:
        return "the engine stopped before the answer was complete"

    # --- both ---------------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        is_cut = self._completion is not None and self._completion.finish_reason == "length"
        return _INCOMPLETE if is_cut else _COMPLETED

    def _finished(self, usage: Usage, logprobs: dict[int, msgspec.Raw]) -> bytes:
        return self._document(self._status, self._items(logprobs), self._usage(usage))

    def _note_end(self, document: bytes) -> None:
        if self._keep is not None:
            self._keep(document, self._blocks.blocks)

    def _items(self, logprobs: dict[int, msgspec.Raw]) -> list[dict[str, object]]:
        blocks = self._blocks.blocks
        return [
            self._item(block, self._status if block is blocks[-1] else _COMPLETED, logprobs.get(block.index, ()))
            for block in blocks
        ]

    def _item(self, block: AnswerBlock, status: str, logprobs: object = ()) -> dict[str, object]:
        return output_item(self._response_id, block, status, self._record, logprobs)

    def _document(
        self, status: str, output: list[dict[str, object]], usage: _UsageDocument | None, error: HttpError | None = None
    ) -> bytes:
        return _encode(
            {
                "id": self._response_id,
                "object": "response",
                "created_at": self._created_at,
                "completed_at": int(time.time()) if status == _COMPLETED else None,
                "status": status,
                "background": False,
                "error": None if error is None else {"code": _failure_code(error), "message": error.sentence},
                "incomplete_details": {"reason": "max_output_tokens"} if status == _INCOMPLETE else None,
                "model": self._asked.name,
                **self._record.shown,
                "output": output,
                "usage": usage,
            }
        )

    def _usage(self, usage: Usage) -> _UsageDocument:
        cached = sum(usage.cached_tokens.values())
        written = usage.written_tokens(self._asked.model)
        return _UsageDocument(
            usage.prompt_tokens,
            _CachedTokens(cached, usage.cached_tokens, written, usage.parted, usage.retained),
            usage.completion_tokens,
            _ReasoningTokens(self._blocks.num_reasoning_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )


_DELTAS = {
    "text": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
}


def _failure_code(error: HttpError) -> str:
    """The code of a failed response; OpenAI has none for a request that cannot be served but this one."""
    return "invalid_prompt" if error.status < 500 else "server_error"


def _part(block: AnswerBlock, text: str) -> dict[str, object]:
    return reasoning_part(text) if block.kind == "reasoning" else text_part(text)
