"""The conversation that a response continues: the messages of earlier turns, unchanged, before those of this turn.

Earlier messages are kept as encoded for the engine and never encoded again, so a growing prompt keeps its beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvtier.api.chat.answer_blocks import AnswerBlock
from kvtier.api.chat.turns import joined_turns, named_results
from kvtier.api.engines import beginning_of
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import shown
from kvtier.api.limits import MAX_INPUT_ITEMS, MAX_REFERRING_BYTES
from kvtier.api.neutral_fields import invalid
from kvtier.api.response_store import StoredResponse, TenantResponses
from kvtier.api.responses.items import REFERENCE, message_part, read_item, response_of_item
from kvtier.api.responses.record import ResponseRecord
from kvtier.engine.process.messages import ChatMessage, ChatPrompt, EncodedPrompt, Prompt, encode_part
from kvtier.sizes import format_size

_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw])
_message = msgspec.msgpack.Decoder(ChatMessage)
_encode = msgspec.msgpack.encode


@dataclass(frozen=True, slots=True)
class Turn:
    """The messages that a turn adds to a conversation, before its answer."""

    previous: StoredResponse | None
    messages: Sequence[bytes]

    def stored(
        self, response_id: str, document: bytes, record: ResponseRecord, blocks: Sequence[AnswerBlock]
    ) -> StoredResponse:
        """The response to keep: this turn with an answer of these blocks."""
        answer = joined_turns([message_part(block) for block in blocks])
        earlier = [_message.decode(message) for message in self.messages if b"tool_calls" in message]
        calls = [call for message in earlier for call in message.tool_calls]
        calls += [call for message in answer for call in message.tool_calls]
        return StoredResponse(
            response_id,
            document,
            [bytes(item) for item in record.items],
            [*self.messages, *map(_encode, answer)],
            {call.call_id: call.name for call in calls},
            self.previous,
        )


def continued(
    asked: GenerationRequest, record: ResponseRecord, responses: TenantResponses
) -> tuple[GenerationRequest, Turn | None]:
    """`asked` with the conversation that it continues, and its turn, if the response is stored or refers to others."""
    if not record.previous and not record.refers and not record.is_stored:
        return asked, None
    [prompt] = asked.prompts
    messages = _messages_in(prompt)
    leading, own = messages[: record.num_instructions], messages[record.num_instructions :]
    if record.refers:
        own = _with_items(own, responses)
    previous = _previous(record, responses)
    turn = Turn(previous, _named(own, record, previous))
    if previous is None and not record.refers:
        return asked, turn
    history = [] if previous is None else previous.history()
    if len(history) + len(own) > MAX_INPUT_ITEMS:
        raise invalid("previous_response_id", f"the conversation must not have more than {MAX_INPUT_ITEMS} messages")
    whole = _with_messages(prompt, [*leading, *history, *turn.messages])
    return dataclasses.replace(asked, prompts=[whole]), turn


def _previous(record: ResponseRecord, responses: TenantResponses) -> StoredResponse | None:
    if not record.previous:
        return None
    found = responses.find(record.previous)
    if found is None:
        sentence = f"previous_response_id is {shown(record.previous)}, which is unknown or no longer kept"
        raise HttpError(400, sentence, "previous_response_not_found", "previous_response_id")
    return found


def _named(messages: Sequence[bytes], record: ResponseRecord, previous: StoredResponse | None) -> Sequence[bytes]:
    """Tool results with the names of their tools, from the history."""
    if previous is None or not record.unnamed or record.refers:
        return messages
    named = list(messages)
    for number in record.unnamed:
        message = _message.decode(messages[number])
        if message.call_id is not None and (name := previous.name_of_call(message.call_id)):
            named[number] = _encode(msgspec.structs.replace(message, name=name))
    return named


def _with_items(messages: Sequence[bytes], responses: TenantResponses) -> list[bytes]:
    """Replace references by the items of earlier responses that they name."""
    num_bytes = sum(map(len, messages))
    if num_bytes > MAX_REFERRING_BYTES:
        limit = format_size(MAX_REFERRING_BYTES)
        raise invalid("input", f"input must not have more than {limit} in addition to items of type item_reference")
    fragments = []
    for message in map(_message.decode, messages):
        found = _item(message.content, responses) if message.role == REFERENCE else message
        if found is not None:
            fragments.append(found)
    return [_encode(message) for message in named_results(joined_turns(fragments))]


def _item(item_id: str, responses: TenantResponses) -> ChatMessage | None:
    response = responses.find(response_of_item(item_id))
    items = [] if response is None else msgspec.json.decode(response.document)["output"]
    for item in items:
        if item["id"] == item_id:
            return read_item(item, "input")
    sentence = f"input refers to the item {shown(item_id)}, which is unknown or no longer kept"
    raise HttpError(404, sentence, "item_not_found", "input")


def _messages_in(prompt: Prompt | EncodedPrompt) -> list[bytes]:
    """The messages of a chat prompt, each encoded as for an engine."""
    if isinstance(prompt, EncodedPrompt):
        return [bytes(one) for one in _raws.decode(_fields.decode(prompt.encoded)["messages"])]
    assert isinstance(prompt, ChatPrompt)
    return [_encode(message) for message in prompt.messages]


def _with_messages(prompt: Prompt | EncodedPrompt, messages: Sequence[bytes]) -> EncodedPrompt:
    encoded = prompt.encoded if isinstance(prompt, EncodedPrompt) else encode_part(prompt)
    fields = _fields.decode(encoded)
    fields["messages"] = msgspec.Raw(_encode([msgspec.Raw(message) for message in messages]))
    first = ChatPrompt([_message.decode(message) for message in messages[:2]])
    return EncodedPrompt(msgspec.Raw(_encode(fields)), beginning_of(first))
