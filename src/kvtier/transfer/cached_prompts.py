"""How much of each recent prompt an engine's own cache has. No torch, no sockets. Owned by one thread.

The cache is asked again and again, about a sample of each prompt's pages. Pages at the end of a prompt are evicted
first, so a page that is there stands for all those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.wire.prompt_news import MAX_PROMPTS, CachedPrompt

_MAX_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """`samples` are hashes of some of its full pages, each with the number of tokens up to the page's end. The last
    page is one of them.
    """

    prompt_id: str
    samples: Sequence[tuple[bytes, int]]

    @classmethod
    def of(cls, prompt_id: str, pages: Sequence[bytes], page_tokens: int) -> Prompt:
        count = min(len(pages), _MAX_SAMPLES)
        numbers = [len(pages) * (number + 1) // count - 1 for number in range(count)]
        return cls(prompt_id, [(pages[number], (number + 1) * page_tokens) for number in numbers])

    def news(self, num_cached: int) -> CachedPrompt:
        return CachedPrompt(self.prompt_id, num_cached, self.samples[-1][1])


class CachedPrompts:
    """The newest prompts; `is_cached` looks up one page in the engine's cache.

    A prompt is reported once it is computed, and whenever less or more of it is cached; when nothing of it is left, it
    is reported for the last time. Beyond `max_prompts`, the oldest are no longer looked up.
    """

    def __init__(self, is_cached: Callable[[bytes], bool], max_prompts: int = MAX_PROMPTS) -> None:
        self._is_cached = is_cached
        self._max_prompts = max_prompts
        self._in_work: dict[str, tuple[Prompt, Callable[[], bool]]] = {}
        self._prompts: dict[str, Prompt] = {}
        self._reported: dict[str, int] = {}
        self._turns: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._prompts) + len(self._in_work)

    def add(self, prompt: Prompt, is_computed: Callable[[], bool]) -> None:
        """A second prompt with the same id, as of a request for several answers, is not tracked."""
        if not prompt.samples or prompt.prompt_id in self._in_work or prompt.prompt_id in self._prompts:
            return
        self._in_work[prompt.prompt_id] = (prompt, is_computed)
        if len(self._in_work) > self._max_prompts:
            del self._in_work[next(iter(self._in_work))]

    def settle(self) -> None:
        """Let go of what tells whether a prompt is computed, once it is: it may hold all of a request."""
        for prompt, is_computed in list(self._in_work.values()):
            if is_computed():
                del self._in_work[prompt.prompt_id]
                self._prompts[prompt.prompt_id] = prompt
                self._turns.appendleft(prompt.prompt_id)
        while len(self._prompts) > self._max_prompts:
            self._forget(next(iter(self._prompts)))

    def look(self, max_prompts: int) -> list[CachedPrompt]:
        """News of so many prompts: those that are new first, then the others in turn."""
        news: list[CachedPrompt] = []
        for _ in range(min(max_prompts, len(self._turns))):
            prompt = self._prompts.get(self._turns.popleft())
            if prompt is None:
                continue
            self._turns.append(prompt.prompt_id)
            num_cached = self._num_cached(prompt)
            if num_cached != self._reported.get(prompt.prompt_id):
                self._reported[prompt.prompt_id] = num_cached
                news.append(prompt.news(num_cached))
            if not num_cached:
                self._forget(prompt.prompt_id)
        return news

    def reported(self) -> list[CachedPrompt]:
        """What was reported of all prompts that are still tracked."""
        return [self._prompts[prompt_id].news(num_cached) for prompt_id, num_cached in self._reported.items()]

    def _forget(self, prompt_id: str) -> None:
        del self._prompts[prompt_id]
        self._reported.pop(prompt_id, None)

    def _num_cached(self, prompt: Prompt) -> int:
        samples = prompt.samples
        if self._is_cached(samples[-1][0]):
            return samples[-1][1]
        low, high = 0, len(samples) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._is_cached(samples[middle - 1][0]):
                low = middle
            else:
                high = middle - 1
        return samples[low - 1][1] if low else 0
