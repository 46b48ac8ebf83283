"""Slots are counted, reused and cleared."""

from __future__ import annotations

import torch

from kvtier.engine.device.penalty_state import PenaltyState
from kvtier.engine.device.sampling_batch import SamplingBatch, SamplingRow
from kvtier.engine.sampling_params import SamplingParams

CPU = torch.device("cpu")
PARAMS = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)


def penalised(state: PenaltyState, slot: int) -> list[float]:
    batch = SamplingBatch.build([SamplingRow(PARAMS, 0, slot)], [0], vocab_size=6, device=CPU)
    logits = torch.ones(1, 6)
    assert batch.penalties is not None
    state.apply(logits, batch.penalties)
    return logits[0].tolist()


def test_a_reused_slot_knows_nothing_of_its_last_request() -> None:
    state = PenaltyState(6, CPU)
    first = state.open([0, 1], [2, 2])
    assert penalised(state, first) == [0.5, 0.5, 0.5 - 1 - 2 * 0.5, 1, 1, 1]
    state.close(first)

    assert state.open([5], []) == first
    assert penalised(state, first) == [1, 1, 1, 1, 1, 0.5]


def test_the_table_grows_and_keeps_what_it_knows() -> None:
    state = PenaltyState(6, CPU)

    slots = [state.open([index % 6], []) for index in range(11)]

    assert len(set(slots)) == 11
    assert state.num_open == 11
    for index, slot in enumerate(slots):
        assert penalised(state, slot)[index % 6] == 0.5


def test_tokens_outside_the_vocabulary_are_left_out() -> None:
    state = PenaltyState(6, CPU)

    assert penalised(state, state.open([6, 1000, -1], [99])) == [1.0] * 6
