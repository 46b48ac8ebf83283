"""A plan from the hit curve that a running cache server records of its own traffic."""

from __future__ import annotations

import bisect
from typing import Annotated, Literal

import msgspec

from kvtier.errors import ConfigError, TierUnavailable
from kvtier.planning.plan import Effect, Plan, PlanPoint, advise, enough, format_duration, sizes_for
from kvtier.simulate.costs import Costs
from kvtier.sizes import format_size

_DAY_S = 86_400.0
_MAX_POINTS = 1 << 12
_FEW_REQUESTS = 100
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


_POLICY_NOTES = {
    "lru": ["the server evicts with LRU"],
    "adaptive": [
        "the server runs the adaptive policy, which is designed to hit more than LRU if memory is short, and about as "
        "much otherwise; a curve cannot tell how much more: record a trace and plan from that"
    ],
}


class LiveCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A server's answer (docs/protocol.md)."""

    policy: Literal["lru"]
    """The policy whose hits the points show."""
    runs: Literal["adaptive", "lru"]
    """The server's own policy."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    file_bytes: _Bytes | None
    requests: _Bytes
    asked_tokens: _Bytes
    asked_bytes: _Bytes
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    sampled_share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    points: Annotated[list[tuple[_Bytes, _Share]], msgspec.Meta(max_length=_MAX_POINTS)]

    def share_at(self, num_bytes: int) -> float:
        """The share of hits at a size, interpolated linearly between known sizes."""
        place = bisect.bisect_left(self.points, (num_bytes, 0.0))
        if place == len(self.points):
            return self.points[-1][1]
        (size, share), (before, lower) = self.points[place], self.points[place - 1] if place else (0, 0.0)
        return share if size == num_bytes else lower + (share - lower) * (num_bytes - before) / (size - before)


def read_curve(document: dict[str, object]) -> LiveCurve:
    """Raises `TierUnavailable` for a document that is not a curve, and `ConfigError` for a curve without traffic."""
    try:
        curve = msgspec.convert(document, LiveCurve)
    except msgspec.ValidationError as error:
        raise TierUnavailable(f"the server's description of its traffic is not understood: {error}") from error
    if not curve.points or not curve.asked_tokens:
        raise ConfigError("the server has had no requests for prompts yet: plan again after some traffic")
    return curve


def plan_live(curve: LiveCurve, costs: Costs, *, name: str) -> Plan:
    """Like `plan_trace`, as if all prompts had the average length."""
    mean_tokens = max(1, curve.asked_tokens // max(1, curve.requests))
    bytes_per_token = curve.asked_bytes / curve.asked_tokens
    per_day = curve.requests * _DAY_S / max(1.0, curve.seconds)

    def point(memory_bytes: int, disk_bytes: int) -> PlanPoint:
        in_memory, share = curve.share_at(memory_bytes), curve.share_at(max(memory_bytes, disk_bytes))
        memory_tokens, hit_tokens = (int(mean_tokens * part) for part in (in_memory, share))
        disk_bytes_read = (hit_tokens - memory_tokens) * bytes_per_token
        if not costs.is_worth_loading(memory_tokens, hit_tokens, disk_bytes_read):
            hit_tokens, share, disk_bytes_read = memory_tokens, in_memory, 0.0
        compute_s = costs.rest_s(hit_tokens, mean_tokens)
        load_s = costs.load_s(memory_tokens * bytes_per_token, from_disk=False)
        load_s += costs.load_s(disk_bytes_read, from_disk=True)
        saved_s = (costs.prefill_s(0, mean_tokens) - compute_s) * per_day
        return PlanPoint(memory_bytes, disk_bytes, Effect(share, saved_s, load_s + compute_s, None))

    largest = next(size for size, share in curve.points if share >= curve.points[-1][1] - 1e-4)
    by_memory = [point(size, 0) for size in sizes_for(max(largest, curve.memory_bytes), curve.memory_bytes)]
    now = point(curve.memory_bytes, curve.file_bytes or 0)
    by_disk = [
        point(curve.memory_bytes, size)
        for size in sizes_for(max(largest, curve.memory_bytes), curve.file_bytes)
        if size > curve.memory_bytes
    ]
    return Plan(
        f"{name}: {costs.shape.name} on {costs.gpu.name}",
        costs.gpu.name,
        by_memory,
        by_disk,
        advise(by_memory, by_disk, now, costs.gpu.name),
        _notes(curve, costs, bytes_per_token, now, enough(by_memory, now)),
    )


def _notes(curve: LiveCurve, costs: Costs, bytes_per_token: float, now: PlanPoint, then: PlanPoint) -> list[str]:
    notes = [
        f"{curve.requests:,} requests in {format_duration(curve.seconds)}, {curve.asked_tokens:,} tokens requested; "
        f"the record samples {curve.sampled_share:.1%} of the blocks; the server has "
        f"{format_size(curve.memory_bytes)} of memory"
        + (f" and {format_size(curve.file_bytes)} of disk" if curve.file_bytes else ""),
        "the curve shows LRU on the requests to this server, all namespaces together",
        *_POLICY_NOTES[curve.runs],
        "times are for a prompt of average length; hits in the engines' own GPU caches do not reach the server",
    ]
    if abs(bytes_per_token / costs.shape.kv_bytes - 1) > 0.05:
        notes.append(
            f"the server's blocks have {format_size(int(bytes_per_token))} per token, but {costs.shape.name} has "
            f"{format_size(costs.shape.kv_bytes)}: check --model, or use only the shares of hits"
        )
    if curve.requests < _FEW_REQUESTS:
        notes.append(f"{curve.requests} requests are few: plan again after more")
    if then is not now and then.memory_bytes > 8 * curve.memory_bytes:
        notes.append("the estimate is less accurate for sizes far above the server's own")
    return notes
