"""Compares every prompt of an engine with recorded ones: where it diverges, and the likely cause. Any thread.

`compare` costs about as much as hashing the prompt once, and runs where prompts are made, not in the engine's thread,
which only reads what was `noted`. Message numbers and text are found on demand (`explain`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvtier.engine.parting.causes import ToolMarks, lacks_reasoning, text_causes, tool_causes, tool_marks
from kvtier.engine.parting.message_place import ChatInput, message_of
from kvtier.engine.parting.record import (
    Nearest,
    PromptRecord,
    RecordBounds,
    SessionPartings,
    TokenArray,
    scope_key,
    segment_keys,
    token_array,
)
from kvtier.models.tokenizer import Tokenizer
from kvtier.observe.metrics import PartingMetrics
from kvtier.tiers.parting import Cause, How, Parting

_MAX_PARTINGS = 1024
_MAX_KEPT_BYTES = 32 << 20
_BEFORE_TOKENS = 48
_AFTER_TOKENS = 48
_SHOWN_TOKENS = 8
_SHOWN_CHARACTERS = 80
_HEAD_TOKENS = 256


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt on its way to the engine. `chat` returns the input of its chat template, if it is a chat."""

    request_id: str
    token_ids: Sequence[int]
    salt: str = ""
    session: str = ""
    tools: Sequence[Mapping[str, object]] = ()
    chat: Callable[[], ChatInput] | None = None


@dataclass(frozen=True, slots=True)
class _Sides:
    """Tokens around the place where two prompts diverge."""

    before: TokenArray
    recorded: TokenArray
    now: TokenArray


@dataclass(slots=True)
class _Known:
    """The record of a prompt for later questions; with `tokens` and the encoded `chat` if it diverged in a chat."""

    parting: Parting
    number: int | None
    sides: _Sides | None = None
    tokens: TokenArray | None = None
    chat: bytes = b""

    @property
    def nbytes(self) -> int:
        return len(self.chat) + (0 if self.tokens is None else self.tokens.nbytes)


class Partings:
    """The partings of one engine. `shows_text` says whether `explain` may show text of prompts.

    `asked_at` is the address at which another process may ask this one for more; empty if there is none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        shows_text: bool = False,
        metrics: PartingMetrics | None = None,
        bounds: RecordBounds | None = None,
    ) -> None:
        self.asked_at = ""
        self._tokenizer = None if tokenizer is None or tokenizer.is_absent else tokenizer
        self._shows_text = shows_text
        self._metrics = metrics
        self._lock = threading.Lock()
        self._record = PromptRecord(bounds)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._kept_bytes = 0

    def compare(self, asked: AskedPrompt) -> Parting | None:
        """Where it diverges from recorded prompts; it is then recorded itself. None if it is not a valid prompt."""
        tokens = token_array(asked.token_ids)
        if tokens is None or not len(tokens):
            return None
        scope = scope_key(asked.salt)
        session = scope_key(asked.salt, asked.session) if asked.session else b""
        keys, marks = segment_keys(scope, tokens), tool_marks(asked.tools)
        with self._lock:
            nearest = self._record.nearest(scope, session, tokens, keys)
            compared_with = None if nearest is None else nearest.prompt.number
            number = self._record.add(scope, session, tokens, keys, marks, compared_with)
        known = _Known(_first_parting(nearest, tokens), number)
        if known.parting.how is How.PARTED:
            assert nearest is not None
            known = self._parted(known, nearest, tokens, marks, asked)
        with self._lock:
            is_counted = known.parting.same_session or not session
            known.parting = _with_history(known.parting, self._record.session(session or scope), is_counted=is_counted)
            self._keep(asked.request_id, known)
        if self._metrics is not None:
            self._metrics.note(known.parting.how.value, _names_of_head(known.parting))
        return known.parting

    def finish(self, request_id: str, answer: Sequence[int]) -> None:
        """The first answer to a prompt is complete, and cached behind it."""
        tokens, known = token_array(answer), self._known.get(request_id)
        if tokens is not None and known is not None and known.number is not None:
            with self._lock:
                self._record.extend(known.number, tokens)

    def forget(self, request_id: str) -> None:
        """The engine has refused the prompt: nothing of it is cached, and no other is compared with it."""
        known = self._known.get(request_id)
        if known is not None and known.number is not None:
            with self._lock:
                self._record.remove(known.number)

    def noted(self, request_id: str) -> Parting | None:
        """The parting of a recent prompt, without message number and text. Never waits."""
        known = self._known.get(request_id)
        return None if known is None else known.parting

    def explain(self, request_id: str) -> Parting | None:
        """The parting with the message's number, and with text if allowed. Takes as long as making the prompt."""
        known = self._known.get(request_id)
        if known is None:
            return None
        parting = known.parting
        encoded, tokens = known.chat, known.tokens  # another thread may drop them
        if self._tokenizer is None or known.sides is None:
            return parting
        if encoded and tokens is not None:
            chat = msgspec.msgpack.decode(encoded, type=ChatInput)
            message = message_of(self._tokenizer, chat, tokens.tolist(), parting.token)
            if message is not None:
                role = str(chat.messages[message].get("role", ""))
                parting = msgspec.structs.replace(parting, message=message + 1, role=role)
        if self._shows_text:
            before, recorded, now = self._texts(known.sides, _SHOWN_TOKENS)
            parting = msgspec.structs.replace(
                parting,
                before=before[-_SHOWN_CHARACTERS:],
                recorded=recorded[:_SHOWN_CHARACTERS],
                now=now[:_SHOWN_CHARACTERS],
            )
        return parting

    def _parted(
        self, known: _Known, nearest: Nearest, tokens: TokenArray, marks: ToolMarks, asked: AskedPrompt
    ) -> _Known:
        """Add the causes, and what is needed to explain it later."""
        start = nearest.num_common
        sides = _Sides(
            tokens[max(0, start - _BEFORE_TOKENS) : start].copy(),
            nearest.tokens[start : start + _AFTER_TOKENS].copy(),
            tokens[start : start + _AFTER_TOKENS].copy(),
        )
        parting = known.parting
        parting = msgspec.structs.replace(parting, causes=self._causes(sides, nearest.prompt.tools, marks))
        chat = b"" if asked.chat is None else msgspec.msgpack.encode(asked.chat())
        return _Known(parting, known.number, sides, tokens if chat else None, chat)

    def _causes(self, sides: _Sides, recorded_tools: ToolMarks, tools: ToolMarks) -> list[Cause]:
        found = tool_causes(recorded_tools, tools)
        if self._tokenizer is None:
            return found
        before, recorded, now = self._texts(sides, _AFTER_TOKENS)
        causes = text_causes(before, recorded, now)
        if lacks_reasoning(recorded, now):
            causes = [Cause.REASONING]
        if Cause.DATE in causes and self._tokenizer.stamps_date:
            causes.insert(0, Cause.TEMPLATE_DATE)
        return causes + found

    def _texts(self, sides: _Sides, num_tokens: int) -> tuple[str, str, str]:
        """The texts before the place, and behind it on both sides, of this many tokens each."""
        before_ids = sides.before.tolist()
        before = self._text(before_ids)

        def behind(side: TokenArray) -> str:
            """Decode with the tokens before: some tokenizers drop the space of a first token."""
            token_ids = side[:num_tokens].tolist()
            whole = self._text(before_ids + token_ids)
            return whole[len(before) :] if whole.startswith(before) else self._text(token_ids)

        return self._text(before_ids[-num_tokens:]), behind(sides.recorded), behind(sides.now)

    def _text(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _keep(self, request_id: str, known: _Known) -> None:
        """Keep the newest. The chats of old ones are dropped first."""
        replaced = self._known.pop(request_id, None)
        self._kept_bytes += known.nbytes - (0 if replaced is None else replaced.nbytes)
        self._known[request_id] = known
        if self._kept_bytes > _MAX_KEPT_BYTES:
            for old in self._known.values():
                self._kept_bytes -= old.nbytes
                old.tokens, old.chat = None, b""
                if self._kept_bytes <= _MAX_KEPT_BYTES:
                    break
        while len(self._known) > _MAX_PARTINGS:
            self._kept_bytes -= self._known.popitem(last=False)[1].nbytes


def _first_parting(nearest: Nearest | None, tokens: TokenArray) -> Parting:
    """Without the details that need a look at the place itself."""
    prompt_tokens = len(tokens)
    if nearest is None:
        return Parting(how=How.NOTHING_RECORDED, token=0, prompt_tokens=prompt_tokens)
    recorded_tokens, num_common = len(nearest.tokens), nearest.num_common
    how = How.PARTED
    if num_common == prompt_tokens:
        how = How.REPEATED
    elif num_common == recorded_tokens:
        how = How.CONTINUED
    return Parting(
        how=how,
        token=num_common,
        prompt_tokens=prompt_tokens,
        recorded_tokens=recorded_tokens,
        same_session=nearest.same_session,
        in_answer=how is How.PARTED and num_common >= nearest.prompt.prompt_tokens,
    )


def _of_head(parting: Parting) -> frozenset[Cause] | None:
    """The causes of a parting near the prompt's head; None for any other. An answer never counts as head."""
    if parting.how is not How.PARTED or parting.in_answer:
        return None
    if parting.token >= max(_HEAD_TOKENS, parting.prompt_tokens // 4):
        return None
    return frozenset(parting.causes)


def _names_of_head(parting: Parting) -> list[str]:
    causes = _of_head(parting)
    if causes is None:
        return []
    return sorted(cause.value for cause in causes) or ["other"]


def _with_history(parting: Parting, history: SessionPartings, *, is_counted: bool) -> Parting:
    """Whether the head changes each time: twice in a row in a session, or for the same cause among other prompts.

    The first prompt of a session does not count: it is compared with those of other sessions.
    """
    causes = _of_head(parting) if is_counted else None
    earlier = list(history.heads)
    history.heads.append(causes)
    if causes is None:
        return parting
    if parting.same_session:
        is_each_time = bool(earlier) and earlier[-1] is not None
    else:
        is_each_time = any(one is not None and one & causes for one in earlier)
    return msgspec.structs.replace(parting, each_time=True) if is_each_time else parting
