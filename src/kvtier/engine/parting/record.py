"""Token ids of recent prompts and their answers, within bounds, and a search for the longest common beginning.

Only prompts of one scope (a tenant's salt) are compared with each other. Not thread-safe: the owner of a record locks
it. A search costs one hash per segment of the prompt, and at most a look at one segment of each recorded prompt.
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.tiers.parting import Cause

TokenArray = npt.NDArray[np.uint32]

SEGMENT_TOKENS = 256
_FIRST_CHUNK = 1024
_KEY_BYTES = 320
"""Memory that a segment's key takes in the index, including its dictionaries and lists."""
_PROMPT_BYTES = 1024
_PROMPTS_OF_SESSION = 4
_REMEMBERED_PARTINGS = 16


@dataclass(frozen=True, slots=True)
class RecordBounds:
    """Limits of the record: prompts, bytes of all of them, and sessions."""

    num_prompts: int = 256
    num_bytes: int = 32 << 20
    num_sessions: int = 64


@dataclass(slots=True, eq=False)
class RecordedPrompt:
    """`keys` are of its full segments, each of all tokens up to its end. `tools` are digests (`causes.tool_marks`).

    `compared_with` is the number of the prompt that it had most in common with.
    """

    number: int
    scope: bytes
    session: bytes
    tokens: TokenArray
    prompt_tokens: int
    keys: list[bytes]
    tools: tuple[tuple[bytes, bytes], ...] = ()
    compared_with: int | None = None

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + _KEY_BYTES * len(self.keys) + _PROMPT_BYTES


@dataclass(frozen=True, slots=True)
class Nearest:
    """The recorded prompt with the longest common beginning, and its `tokens` at the time of the search."""

    prompt: RecordedPrompt
    tokens: TokenArray
    num_common: int
    same_session: bool


@dataclass(slots=True)
class SessionPartings:
    """Results of the last comparisons of a session: the causes if it diverged near its head, None if it did not.

    Prompts without a session share one for their scope.
    """

    numbers: list[int] = field(default_factory=list)
    heads: deque[frozenset[Cause] | None] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_PARTINGS))


class PromptRecord:
    """The record of one engine."""

    def __init__(self, bounds: RecordBounds | None = None) -> None:
        self._bounds = RecordBounds() if bounds is None else bounds
        self._prompts: OrderedDict[int, RecordedPrompt] = OrderedDict()
        self._index: dict[bytes, dict[int, RecordedPrompt]] = {}
        self._sessions: OrderedDict[bytes, SessionPartings] = OrderedDict()
        self._last_number = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def get(self, number: int | None) -> RecordedPrompt | None:
        return None if number is None else self._prompts.get(number)

    def session(self, key: bytes) -> SessionPartings:
        """The session's record; this makes it the most recent session."""
        found = self._sessions.setdefault(key, SessionPartings())
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._bounds.num_sessions:
            self._sessions.popitem(last=False)
        return found

    def nearest(self, scope: bytes, session: bytes, tokens: TokenArray, keys: Sequence[bytes]) -> Nearest | None:
        """Searches the prompts of `session` if it is not empty and has any; otherwise all of the scope.

        Of several equal ones, the newest. None if there is nothing to compare with.
        """
        if session and session in self._sessions:
            numbers = self._sessions[session].numbers
            own = [self._prompts[number] for number in numbers if number in self._prompts]
            if own:
                return _nearest_of(own, tokens, 0, same_session=True)
        found, num_known = self._index.get(scope), 0
        for key in keys:
            longer = self._index.get(key)
            if longer is None:
                break
            found, num_known = longer, num_known + SEGMENT_TOKENS
        if not found:
            return None
        return _nearest_of(found.values(), tokens, num_known, same_session=False)

    def add(
        self,
        scope: bytes,
        session: bytes,
        tokens: TokenArray,
        keys: list[bytes],
        tools: tuple[tuple[bytes, bytes], ...] = (),
        compared_with: int | None = None,
    ) -> int | None:
        """Returns its number; None if it is too long to be kept. The oldest prompts make room."""
        self._last_number += 1
        prompt = RecordedPrompt(self._last_number, scope, session, tokens, len(tokens), keys, tools, compared_with)
        if not self._put(prompt):
            return None
        if session:
            numbers = self.session(session).numbers
            numbers.append(prompt.number)
            for number in numbers[:-_PROMPTS_OF_SESSION]:
                self.remove(number)
        return prompt.number

    def extend(self, number: int, answer: TokenArray) -> None:
        """A prompt's answer is complete. If a recorded prompt is now the beginning of another, it is dropped."""
        prompt = self._prompts.pop(number, None)
        if prompt is None:
            return
        self._forget_keys(prompt)
        self.num_bytes -= prompt.nbytes
        prompt.tokens = np.concatenate([prompt.tokens, answer])
        prompt.keys = segment_keys(prompt.scope, prompt.tokens, prompt.keys)
        if not self._put(prompt):
            self._leave_session(prompt)
            return
        other = self.get(prompt.compared_with)
        if other is None:
            return
        num_common = common_length(prompt.tokens, other.tokens)
        if num_common == len(other.tokens):
            self.remove(other.number)
        elif num_common == len(prompt.tokens):
            self.remove(prompt.number)

    def remove(self, number: int) -> None:
        prompt = self._prompts.pop(number, None)
        if prompt is None:
            return
        self.num_bytes -= prompt.nbytes
        self._forget_keys(prompt)
        self._leave_session(prompt)

    def _put(self, prompt: RecordedPrompt) -> bool:
        if prompt.nbytes > self._bounds.num_bytes:
            return False
        self._prompts[prompt.number] = prompt
        self.num_bytes += prompt.nbytes
        for key in (prompt.scope, *prompt.keys):
            self._index.setdefault(key, {})[prompt.number] = prompt
        while len(self._prompts) > self._bounds.num_prompts or self.num_bytes > self._bounds.num_bytes:
            self.remove(next(iter(self._prompts)))
        return True

    def _leave_session(self, prompt: RecordedPrompt) -> None:
        session = self._sessions.get(prompt.session)
        if session is not None and prompt.number in session.numbers:
            session.numbers.remove(prompt.number)

    def _forget_keys(self, prompt: RecordedPrompt) -> None:
        for key in (prompt.scope, *prompt.keys):
            users = self._index[key]
            del users[prompt.number]
            if not users:
                del self._index[key]


def token_array(tokens: Sequence[int]) -> TokenArray | None:
    """None if these cannot be token ids: the engine refuses them."""
    try:  # array.array is three times as fast as numpy from a list
        return np.frombuffer(array.array("I", tokens), dtype=np.uint32)
    except (OverflowError, TypeError, ValueError):
        return None


def segment_keys(scope: bytes, tokens: TokenArray, known: Sequence[bytes] = ()) -> list[bytes]:
    """One key for each full segment, of all tokens up to its end; `known` are those of the first segments."""
    keys = list(known)
    data = memoryview(tokens.tobytes())
    nbytes = SEGMENT_TOKENS * tokens.itemsize
    for start in range(len(keys) * nbytes, len(data) - nbytes + 1, nbytes):
        before = keys[-1] if keys else scope
        keys.append(hashlib.blake2b(data[start : start + nbytes], digest_size=16, key=before).digest())
    return keys


def scope_key(salt: str, session: str = "") -> bytes:
    """A digest, since a salt may be a secret."""
    digest = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest()
    if not session:
        return digest
    return hashlib.blake2b(session.encode(errors="surrogatepass"), digest_size=16, key=digest).digest()


def common_length(left: TokenArray, right: TokenArray) -> int:
    """The length of the common beginning, in tokens."""
    size = min(len(left), len(right))
    start, chunk = 0, _FIRST_CHUNK
    while start < size:
        end = min(size, start + chunk)
        differs = left[start:end] != right[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, chunk = end, chunk * 4
    return size


def _nearest_of(
    prompts: Iterable[RecordedPrompt], tokens: TokenArray, num_known: int, *, same_session: bool
) -> Nearest:
    """The first `num_known` tokens are known to be the same in all of `prompts`, of which there is at least one."""
    best: tuple[int, int] = (-1, -1)
    nearest: RecordedPrompt | None = None
    rest = tokens[num_known:]
    for prompt in prompts:
        num_common = num_known + common_length(prompt.tokens[num_known:], rest)
        if (num_common, prompt.number) > best:
            best, nearest = (num_common, prompt.number), prompt
    assert nearest is not None
    return Nearest(nearest, nearest.tokens, best[0], same_session)
