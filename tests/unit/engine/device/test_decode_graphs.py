"""Decodes whose KV is still arriving, with a stand-in for CUDA graphs that computes on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.engine.config import EngineConfig
from kvtier.engine.device import decode_graphs
from kvtier.engine.device.decode_graphs import DecodeGraphs, Forward
from kvtier.engine.engine import Engine
from kvtier.kernels.paged_batch import PagedArrays, PagedBatch, PagedRow
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.transfer.copiers import cuda_copier
from tests.support.waiting import LIMIT_S

NUM_BLOCKS = 6
WAIT_S = LIMIT_S


class Parts:
    """A forward pass in a thread of its own, which each `replay` lets go on to the next group of layers."""

    def __init__(self, forward: Forward, tokens: torch.Tensor, batch: PagedBatch, part_ends: Sequence[int]) -> None:
        self.hidden = forward(tokens, batch).clone()
        self.graphs: list[Any] = [SimpleNamespace(replay=self._replay) for _ in part_ends]
        self._forward, self._tokens, self._batch = forward, tokens, batch
        self._first_layers = part_ends[:-1]
        self._thread: threading.Thread | None = None
        self._may_go_on = threading.Event()
        self._has_stopped = threading.Event()

    def precede(self, layer: int) -> None:
        if layer in self._first_layers:
            self._has_stopped.set()
            assert self._may_go_on.wait(WAIT_S)
            self._may_go_on.clear()

    def _replay(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run)
            self._thread.start()
        else:
            self._may_go_on.set()
        assert self._has_stopped.wait(WAIT_S)
        self._has_stopped.clear()

    def _run(self) -> None:
        self._batch._plans.clear()
        with torch.inference_mode():
            self.hidden.copy_(self._forward(self._tokens, self._batch, [self]))
        self._has_stopped.set()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(WAIT_S)
            self._thread = None


class Layers:
    """Blocks of an arena, whose layers are taken away and come back when something is put behind them."""

    def __init__(self, engine: Engine) -> None:
        self._blocks = engine.arena.blocks
        self._saved = self._blocks.clone()
        self._blocks.fill_(float("nan"))
        self.preceded: list[int] = []

    def precede(self, layer: int) -> None:
        self.preceded.append(layer)
        self._blocks[:, : layer + 1] = self._saved[:, : layer + 1]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(cuda_copier, "_MIN_PART_BYTES", 1)  # a group for each layer
    save_tiny_model(tmp_path, "qwen2")
    return Engine(EngineConfig(model=str(tmp_path), device="cpu", kv_cache_space=1 << 18))


def test_a_part_waits_for_its_own_layers_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    part_ends = [group.first_layer + group.num_layers for group in cuda_copier.layer_groups(engine.arena.layout)]
    assert len(part_ends) > 1
    made: list[Parts] = []

    def capture_parts(
        forward: Forward, tokens: torch.Tensor, batch: PagedBatch, memory: object, ends: list[int]
    ) -> Any:
        made.append(Parts(forward, tokens, batch, ends))
        return made[-1].graphs, made[-1].hidden

    def capture_graph(forward: Forward, tokens: torch.Tensor, batch: PagedBatch, memory: object) -> Any:
        hidden = forward(tokens, batch).clone()

        def replay() -> None:
            batch._plans.clear()
            hidden.copy_(forward(tokens, batch))

        return SimpleNamespace(replay=replay), hidden

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(decode_graphs, "capture_graph", capture_graph)
    monkeypatch.setattr(decode_graphs, "capture_parts", capture_parts)
    block_tokens = engine.arena.layout.block_tokens
    with torch.inference_mode():
        graphs = DecodeGraphs(
            engine.runner._forward,
            max_rows=24,
            max_blocks=NUM_BLOCKS,
            block_tokens=block_tokens,
            last_tokens=torch.zeros(24, dtype=torch.int64),
            kv_heads=engine.arena.layout.kv_heads,
            part_ends=part_ends,
        )
        graphs.capture_all()
        engine.arena.blocks.normal_(generator=torch.Generator().manual_seed(1))
        rows = [PagedRow([1, 4, 2], 1, 3 * block_tokens, writes=False), PagedRow([0], 1, 5, writes=False)]
        for num_rows in (2, 24):
            batch = PagedArrays.lay_out(rows, block_tokens=block_tokens, num_padding_rows=num_rows - len(rows))
            tokens = np.array([7, 9], np.int64)
            expected = graphs.run(tokens, batch)[:2].clone()
            assert expected.isfinite().all()
            arrival = Layers(engine)

            found = graphs.run(tokens, batch, [arrival])[:2].clone()

            for parts in made:
                parts.join()
            assert torch.equal(found, expected)
            assert arrival.preceded == [end - 1 for end in part_ends]
