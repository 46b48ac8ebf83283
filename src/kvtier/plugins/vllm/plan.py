"""What a scheduler tells its workers with each step: what to load, what to save, whom to wait for. Picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks of one request, from `first_token` on, and the pages of the request from its start."""

    request_id: str
    pages: list[int]
    first_token: int
    hashes: list[bytes]


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """`preempted` requests lose their pages in this step: what is being saved of them must be done before."""

    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
