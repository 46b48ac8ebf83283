"""Wrong blocks in a cache server, under the right keys and with the right checksums, for the tests of the canary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import kvtier
from kvtier import LLM, SamplingParams
from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.observe.metrics import ENGINE_CANARY_CHECKS
from tests.support.tiered_engines import settled
from tests.support.waiting import CALL_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

Alter = Callable[[torch.Tensor], torch.Tensor]
"""Makes a wrong block of a right one, shaped `(layers, kv_heads, tokens, keys then values)`."""


def open_checked(model: object, server: str, **settings: Any) -> LLM:
    """An engine that loads whatever it finds at `server`, and checks all of it when told to."""
    values = {
        "device": "cpu",
        "kv_cache_space": 8 << 20,
        "always_load": True,
        "canary_share": 1.0,
        "cache_server_timeout_s": CALL_S,
    }
    return LLM(str(model), cache_server=server, **{**values, **settings})


def compute(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> int:
    """How many tokens of `prompts` came from the server. All that was computed is stored afterwards."""
    outputs = llm.generate([list(prompt) for prompt in prompts], params, progress=False)
    settled(llm)
    llm.engine.step()  # takes back what was copied
    return sum(one.cached_tokens.get("server", 0) for output in outputs for one in output.outputs)


def check_all(llm: LLM) -> dict[str, int]:
    """Wait until the canary is idle. Returns its checks so far, by result."""
    while llm.engine.has_idle_work:
        llm.engine.idle_step()
    return checks_of(llm)


def checks_of(llm: LLM) -> dict[str, int]:
    return {
        sample.labels["result"]: int(sample.value)
        for family in llm.engine.metrics.registry.collect()
        if family.name == ENGINE_CANARY_CHECKS
        for sample in family.samples
    }


@contextmanager
def vandal(llm: LLM, server: str) -> Iterator[CacheClient]:
    """A client with the engine's own namespace."""
    layout, fields = llm.engine.arena.layout, llm.engine.parts.namespace_fields
    with kvtier.connect(server, layout=layout, namespace=fields, timeout_s=CALL_S) as client:
        yield client


def read_block(llm: LLM, client: CacheClient, block_hash: BlockHash) -> torch.Tensor:
    layout = llm.engine.arena.layout
    payload = bytearray(layout.block_bytes)
    assert client.get([block_hash], [payload]) == 1
    return torch.frombuffer(payload, dtype=getattr(torch, layout.dtype)).reshape(layout.shape)


def write_block(client: CacheClient, block_hash: BlockHash, block: torch.Tensor) -> None:
    """Replace the cached block."""
    assert client.drop([block_hash]) == 1
    payload = block.contiguous().view(torch.uint8).numpy().tobytes()
    assert client.set([block_hash], [payload]) == 1


def plant(llm: LLM, server: str, prompt: Sequence[int], position: int, alter: Alter) -> None:
    """Put a wrong block in place of block `position` of a prompt that the server has."""
    with vandal(llm, server) as client:
        block_hash = client.hashes(prompt)[position]
        write_block(client, block_hash, alter(read_block(llm, client, block_hash).clone()))
