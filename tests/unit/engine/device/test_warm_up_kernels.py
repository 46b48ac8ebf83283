"""No step makes Triton compile attention after warming up: its kernels are noted, not run, so no GPU is needed.

Graphs run some steps of an engine, and compile what they hold when they are captured; here all are run without.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvtier.blocks.layout import KvLayout
from kvtier.engine.config import EngineConfig
from kvtier.engine.device import warm_up
from kvtier.engine.device.kv_arena import KvArena
from kvtier.engine.device.runner import Runner
from kvtier.engine.schedule.step import StepRow
from kvtier.kernels import attention, gathered_attention, paged_attention
from kvtier.kernels.backend import Backend
from kvtier.models.model import Model

_NUM_STEPS = 60
_HIDDEN = 8
_VOCABULARY = 32


@dataclass(frozen=True)
class _Case:
    """A model's attention, and what steps an engine makes for it."""

    max_num_requests: int
    max_num_batched_tokens: int
    max_model_len: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    window: int | None = None

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            model="noted",
            max_num_requests=self.max_num_requests,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


CASES = [
    _Case(128, 8192, 12_000, heads=28, kv_heads=4),
    _Case(16, 8192, 12_000, heads=28, kv_heads=4),
    _Case(1, 512, 2048, heads=28, kv_heads=4),
    _Case(1, 8192, 12_000, heads=28, kv_heads=4),
    _Case(2, 8192, 32_000, heads=32, kv_heads=8),
    _Case(2, 300, 500, heads=28, kv_heads=4),
    _Case(128, 300, 12_000, heads=28, kv_heads=4),
    _Case(4, 2048, 100_000, heads=32, kv_heads=8),
    _Case(20, 600, 6000, heads=28, kv_heads=4),
    _Case(256, 2048, 4096, heads=32, kv_heads=8),
    _Case(8, 8192, 100_000, heads=32, kv_heads=8),
    _Case(64, 8192, 32_000, heads=16, kv_heads=16),
    _Case(64, 8192, 32_000, heads=32, kv_heads=1),
    _Case(64, 8192, 32_000, heads=96, kv_heads=8),
    _Case(40, 4096, 8192, heads=10, kv_heads=2, head_dim=64),
    _Case(64, 8192, 32_000, heads=28, kv_heads=4, head_dim=256),
    _Case(64, 8192, 32_000, heads=32, kv_heads=8, window=4096),
    _Case(64, 8192, 32_000, heads=32, kv_heads=8, window=200),
    _Case(13, 2048, 900, heads=128, kv_heads=64, head_dim=32, window=250),
    _Case(1, 512, 12_000, heads=384, kv_heads=16, window=200),
    _Case(64, 8192, 2048, heads=72, kv_heads=6, head_dim=32, window=1),
    _Case(40, 8192, 32_000, heads=40, kv_heads=5),
    _Case(32, 8192, 32_000, heads=28, kv_heads=4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_of_attention_is_compiled_before_the_first_request(
    case: _Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = _note_launches(monkeypatch)
    runner = _runner(case)
    warm_up.compile_kernels(runner, case.config, case.max_model_len)
    compiled = set(launched)
    dice = random.Random(0)
    for _ in range(_NUM_STEPS):
        rows = _random_rows(dice, case)
        launched.clear()
        warm_up._run(runner, rows)

        assert launched <= compiled, [(row.start, row.count) for row in rows]


def _random_rows(dice: random.Random, case: _Case) -> list[StepRow]:
    """Decodes and chunks, of few or many requests, with short or long contexts."""
    longest = case.max_model_len - 1
    far = min(dice.choice([1, 20, 200, 600, 2000, 5000, longest]), longest)
    max_decodes = dice.choice([0, 1, 3, 40, case.max_num_requests])
    num_decodes = min(dice.randint(0, max_decodes), case.max_num_requests, case.max_num_batched_tokens)
    spans = [(dice.randrange(far), 1) for _ in range(num_decodes)]
    left = case.max_num_batched_tokens - num_decodes
    num_rows = min(num_decodes + dice.choice([0, 1, 2, case.max_num_requests]), case.max_num_requests)
    size = dice.choice([2, 8, 30, 70, 200, 700, 2000, 8192])
    while (len(spans) < num_rows or not spans) and left > 1:
        count = min(dice.randint(2, size), left, longest)
        spans.append((min(dice.choice([0, far]), longest - count), count))
        left -= count
    return [warm_up._row(slot, start, count, 16) for slot, (start, count) in enumerate(spans)]


def _note_launches(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """What Triton has a compiled kernel for, of all launches from now on."""
    launched: set[object] = set()
    for module, name in (
        (paged_attention, "_attend_kernel"),
        (paged_attention, "join_kernel"),
        (gathered_attention, "_gather_kernel"),
        (gathered_attention, "_attend_kernel"),
    ):
        monkeypatch.setattr(module, name, _Noted(getattr(module, name), launched))
    monkeypatch.setattr(attention, "write_kv_of", lambda backend: lambda *arguments: None)
    return launched


class _Noted:
    """Takes a kernel's place."""

    def __init__(self, kernel: Any, launched: set[object]) -> None:
        self._kernel = kernel
        self._launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: object, **options: object) -> None:
        parameters = self._kernel.params
        given = dict(zip((one.name for one in parameters), arguments, strict=False)) | options
        kind: list[object] = [self._kernel]
        for one in parameters:
            value = given.pop(one.name)
            if one.is_constexpr:
                kind.append(str(value))
            elif isinstance(value, torch.Tensor):
                kind.append((value.dtype, one.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0))
            elif isinstance(value, int) and not one.do_not_specialize:
                kind.append((value == 1, value % 16 == 0))
        self._launched.add((*kind, *sorted((name, str(value)) for name, value in given.items())))


class _NotedModel:
    """A layer of attention and nothing else."""

    def __init__(self, case: _Case) -> None:
        self._case = case
        self.config = SimpleNamespace(
            vocab_size=_VOCABULARY,
            hidden_size=_HIDDEN,
            head_dim=case.head_dim,
            num_heads=case.heads,
            windows=(case.window,),
        )
        self.embed_tokens = SimpleNamespace(weight=torch.zeros(1, _HIDDEN))
        self.rope = SimpleNamespace(rows=lambda positions: positions)
        self.layers = [lambda *arguments: None]

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Callable[..., object]) -> torch.Tensor:
        case, num_tokens = self._case, len(tokens)
        fused = torch.empty(num_tokens, case.heads + 2 * case.kv_heads, case.head_dim, dtype=torch.bfloat16)
        attend(0, *fused.split([case.heads, case.kv_heads, case.kv_heads], 1), None)
        return torch.zeros(num_tokens, _HIDDEN)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(states), _VOCABULARY)


def _runner(case: _Case) -> Runner:
    layout = KvLayout(layers=1, kv_heads=case.kv_heads, head_dim=case.head_dim, block_tokens=16, dtype="bfloat16")
    return Runner(
        cast(Model, _NotedModel(case)),
        KvArena(1, layout, torch.device("cpu")),
        max_num_requests=case.max_num_requests,
        max_model_len=case.max_model_len,
        backend=Backend.TRITON,
    )
