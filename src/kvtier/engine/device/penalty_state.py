"""The tokens seen by requests with penalties, kept on the device, where tokens are sampled.

Owned by the sampler; one thread calls it. A request without penalties takes no room here. Changes are made in the
current stream's order, so a slot may be closed while a step that reads it is still running.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvtier.engine.device.sampling_batch import Penalties
from kvtier.kernels.upload import upload

_FIRST_SLOTS = 4


class PenaltyState:
    """A table of slots, one per request: its prompt's tokens as a set, its output's tokens as counts.

    A slot takes 5 bytes per token of the vocabulary. The table doubles when it is full and never shrinks.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._free: list[int] = []

    @property
    def num_open(self) -> int:
        return int(self._counts.shape[0]) - len(self._free)

    def open(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> int:
        """A slot that knows these tokens. Tokens outside the vocabulary have no logit and are left out."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        known = [np.asarray(ids, np.int64) for ids in (prompt_token_ids, output_token_ids)]
        prompt, output = upload([ids[(ids >= 0) & (ids < self._vocab_size)] for ids in known], self._device)
        self._in_prompt[slot] = False
        self._in_prompt[slot].index_fill_(0, prompt, True)
        self._counts[slot] = 0
        self._counts[slot].scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return slot

    def close(self, slot: int) -> None:
        """Give the slot back; a batch that names it must not be sampled once it is open again."""
        assert slot not in self._free
        self._free.append(slot)

    def apply(self, logits: torch.Tensor, penalties: Penalties) -> None:
        """Lower, in place, the logits of tokens that were seen: repetition first, then frequency and presence."""
        counts = self._counts[penalties.slots]
        in_output = counts > 0
        scores = logits[penalties.rows]
        repeated = torch.where(scores > 0, scores / penalties.repetition, scores * penalties.repetition)
        scores = torch.where(in_output | self._in_prompt[penalties.slots], repeated, scores)
        scores -= penalties.frequency * counts + penalties.presence * in_output
        logits.index_copy_(0, penalties.rows, scores)

    def record(self, token_ids: torch.Tensor, penalties: Penalties) -> None:
        """Count the tokens just sampled for every row of the batch."""
        tokens = token_ids[penalties.rows]
        self._counts[penalties.slots, tokens] += 1

    def _grow(self) -> None:
        num_slots = self._counts.shape[0]
        added = num_slots or _FIRST_SLOTS
        more = (added, self._vocab_size)
        self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(more)))
        self._counts = torch.cat((self._counts, self._counts.new_zeros(more)))
        self._free.extend(range(num_slots + added - 1, num_slots - 1, -1))
