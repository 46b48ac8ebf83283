"""Random requests to random hosts, for prompts of unequal popularity."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scale.costs import LAYOUT
from benchmarks.scale.fleet import Fleet, Host, Outcome
from benchmarks.scale.placement import Prompt, make_prompt
from kvtier.stores.valkey.config import DEFAULT_SEGMENT

_MAX_PROMPTS = 10_000
_WARM_REQUESTS = 150
_LOOKED_AT = 8
_AFFINITY_SLACK = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """`skew` 1: the tenth prompt is asked for a tenth as often as the first. `rate` is requests/s of each host."""

    name: str
    num_prompts: int
    prompt_tokens: int
    skew: float
    rate: float
    question_tokens: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.num_prompts <= _MAX_PROMPTS or self.rate <= 0:
            raise ValueError(f"a workload has from 1 to {_MAX_PROMPTS} prompts and a positive rate")

    @functools.cache  # noqa: B019 - a few workloads, kept as long as the module
    def prompts(self, segment_blocks: int = DEFAULT_SEGMENT) -> tuple[Prompt, ...]:
        return tuple(
            make_prompt(self.num_blocks, seed, segment_blocks, self.question_tokens)
            for seed in range(1, self.num_prompts + 1)
        )

    @property
    def num_blocks(self) -> int:
        return self.prompt_tokens // LAYOUT.block_tokens

    def weights(self) -> list[float]:
        return [1 / (place + 1) ** self.skew for place in range(self.num_prompts)]


SYSTEM_PROMPTS = Workload("system prompts", 64, 8192, skew=1.0, rate=1.0)
"""A few, asked for on all hosts: 470 MB each."""
DOCUMENTS = Workload("documents", 300, 30_720, skew=0.8, rate=0.5)
"""Many, asked for now and then: 1.76 GB each, 528 GB in all."""


class Router:
    """Sends a prompt to a host that has its beginning, unless others have far fewer requests."""

    def __init__(self, fleet: Fleet, dice: random.Random) -> None:
        self._fleet = fleet
        self._dice = dice

    def pick(self, prompt: Prompt) -> Host:
        """As the routers of `api/engines` and `api/vllm` do; events would tell this one who has what."""
        hosts = self._fleet.hosts
        idlest = min(self._dice.sample(hosts, min(_LOOKED_AT, len(hosts))), key=lambda host: host.num_requests)
        name = prompt.segments[0].name
        having = [host for host in hosts if name in host.local]
        if not having:
            return idlest
        best = min(having, key=lambda host: host.num_requests)
        return best if best.num_requests <= idlest.num_requests + _AFFINITY_SLACK else idlest


def drive(
    fleet: Fleet,
    workload: Workload,
    prompts: Sequence[Prompt],
    seconds: float,
    seed: int = 1,
    *,
    is_routed: bool = False,
) -> None:
    """Requests for `seconds` from now, for any host or by a router. The clock has to be run."""
    dice = random.Random(seed)
    clock = fleet.clock
    rate = workload.rate * len(fleet.hosts)
    summed = list(itertools.accumulate(workload.weights()))
    ends_at = clock.now + seconds
    router = Router(fleet, random.Random(seed + 1))

    def come() -> None:
        (prompt,) = dice.choices(prompts, cum_weights=summed)
        host = dice.choice(fleet.hosts)
        fleet.ask(router.pick(prompt) if is_routed else host, prompt)
        following_at = clock.now + dice.expovariate(rate)
        if following_at < ends_at:
            clock.at(following_at, come)

    clock.after(dice.expovariate(rate), come)


def warm_up(fleet: Fleet, workload: Workload, prompts: Sequence[Prompt]) -> None:
    """Put all prompts into the cluster, and recent ones into each host's own memory."""
    fleet.fill(prompts)
    warm_hosts(fleet, workload, prompts)


def warm_hosts(fleet: Fleet, workload: Workload, prompts: Sequence[Prompt], seed: int = 2) -> None:
    dice = random.Random(seed)
    for host in fleet.hosts:
        fleet.warm(host, dice.choices(prompts, workload.weights(), k=_WARM_REQUESTS))


def between(outcomes: Sequence[Outcome], begin_s: float, end_s: float) -> list[Outcome]:
    """The outcomes of requests that arrived in that time."""
    return [outcome for outcome in outcomes if begin_s <= outcome.arrived_at < end_s]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ttft_s(outcomes: Sequence[Outcome], share: float) -> float:
    return percentile([outcome.ttft_s for outcome in outcomes], share)


def computed_share(outcomes: Sequence[Outcome], prompt_blocks: int) -> float:
    """The share of requested blocks that were computed."""
    if not outcomes:
        return float("nan")
    return sum(outcome.computed_blocks for outcome in outcomes) / (prompt_blocks * len(outcomes))


def missing_share(outcomes: Sequence[Outcome], prompt_blocks: int) -> float:
    """The share of requested blocks that neither host nor cluster had."""
    if not outcomes:
        return float("nan")
    return sum(outcome.missing_blocks for outcome in outcomes) / (prompt_blocks * len(outcomes))
