"""The beginnings of prompts that an engine's cache has, as far as this server knows: bounded.

The HTTP server notes which prompts it sends. An engine that reports what its cache has (`prompt_feed`) corrects that:
what it has evicted counts no longer. Prompts that it never reports, such as very short ones, count until they drop out
of the record.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtier.api.limits import MAX_REMEMBERED_PREFIXES
from kvtier.api.vllm.prefix_keys import PrefixKey, num_keys_within


@dataclass(slots=True)
class _Beginning:
    """`num_users` are the prompts that end here, and the known beginnings that continue this one by a piece."""

    parent: PrefixKey | None
    num_users: int = 0


@dataclass(slots=True)
class _Prompt:
    """`num_kept` of its `num_keys` keys count; `end` is the last of these."""

    end: PrefixKey
    num_keys: int
    num_kept: int
    is_reported: bool = False


class SeenPrefixes:
    """The beginnings that one engine has seen, a tree, and the prompts that they belong to; at most `most` of each."""

    def __init__(self, most: int = MAX_REMEMBERED_PREFIXES) -> None:
        self._most = most
        self._beginnings: dict[PrefixKey, _Beginning] = {}
        self._prompts: OrderedDict[str | PrefixKey, _Prompt] = OrderedDict()

    def match(self, keys: Sequence[PrefixKey]) -> int:
        """How many of `keys`, which are ordered by length, the engine has seen, counted up to the longest known one."""
        return next((number for number in range(len(keys), 0, -1) if keys[number - 1] in self._beginnings), 0)

    def note(self, keys: Sequence[PrefixKey], prompt_id: str = "") -> None:
        """The engine gets a prompt. Without an id it cannot be reported, and counts once however often it comes."""
        if not keys:
            return
        name = prompt_id or keys[-1]
        if name in self._prompts:
            self._forget(name)
        parent: PrefixKey | None = None
        for key in keys:
            if key not in self._beginnings:
                self._beginnings[key] = _Beginning(parent)
                if parent is not None:
                    self._beginnings[parent].num_users += 1
            parent = key
        self._beginnings[keys[-1]].num_users += 1
        self._prompts[name] = _Prompt(keys[-1], len(keys), len(keys))
        while self._prompts and max(len(self._beginnings), len(self._prompts)) > self._most:
            self._forget(next(iter(self._prompts)))

    def correct(self, prompt_id: str, share: float) -> None:
        """The engine reports that its cache has this share of a prompt, from its beginning. What does not count any
        more does not count again if the share grows."""
        prompt = self._prompts.get(prompt_id)
        if prompt is None:
            return
        prompt.is_reported = True
        num_kept = num_keys_within(prompt.num_keys, min(share, 1.0))
        end: PrefixKey | None = prompt.end
        for _ in range(prompt.num_kept - num_kept):
            end = None if end is None else self._beginnings[end].parent
        if end is None or not num_kept:
            self._forget(prompt_id)
        elif num_kept < prompt.num_kept:
            self._beginnings[end].num_users += 1
            self._release(prompt.end)
            prompt.end, prompt.num_kept = end, num_kept

    def rename(self, prompt_id: str, new_id: str) -> None:
        """The engine reports a prompt by another id than the one that it was noted with."""
        prompt = self._prompts.pop(prompt_id, None)
        if prompt is not None and new_id not in self._prompts:
            self._prompts[new_id] = prompt
        elif prompt is not None:
            self._release(prompt.end)

    def keep_reported(self, prompt_ids: Collection[str]) -> None:
        """The engine reports these prompts and no others: what it has reported before and no longer does is gone."""
        for name, prompt in list(self._prompts.items()):
            if prompt.is_reported and name not in prompt_ids:
                self._forget(name)

    def clear(self) -> None:
        self._beginnings.clear()
        self._prompts.clear()

    def _forget(self, name: str | PrefixKey) -> None:
        self._release(self._prompts.pop(name).end)

    def _release(self, end: PrefixKey) -> None:
        """A prompt no longer ends here. Beginnings without other users are forgotten."""
        key: PrefixKey | None = end
        while key is not None:
            beginning = self._beginnings[key]
            beginning.num_users -= 1
            if beginning.num_users:
                return
            del self._beginnings[key]
            key = beginning.parent
