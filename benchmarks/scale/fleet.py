"""Hosts over one cluster: what each request finds, loads, computes and stores. Runs on a virtual clock.

A host has one GPU, which computes one prompt at a time; it loads one prompt at a time and stores one segment at a time.
A load reads segment after segment, as kvtier's units of 64 MiB do, so a host has one flow at a time each way. Hosts
decide between loading, computing, and loading from the back while computing from the front; loads that are late are
abandoned.
"""

from __future__ import annotations

import enum
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.scale.costs import LAYOUT, Costs, bytes_of
from benchmarks.scale.links import Clock, Flow, Link
from benchmarks.scale.placement import Prompt, Segment, shard_of
from kvtier.stores.valkey.slots import NUM_SLOTS

_STAGING_BYTES = 4 << 30
"""The queue of blocks to store on a host. Blocks beyond it are not stored."""
_POLL_S = 0.01
_MEET_POLL_S = 0.02
_NUM_RATES = 5
_WAIT_SLACK_S = 0.1
_GAP_BLOCKS = 0.5
_RETRY_SLOW_S = 10.0
_CLEARLY_FASTER = 0.5
_WORTH_MEETING = 0.85
"""As in `transfer/decision`: the time until a retry, and the shares up to which blocks are loaded alone, or met."""


class Sharing(enum.Enum):
    """What hosts know about blocks that others are computing."""

    NOTHING = enum.auto()
    CLAIM = enum.auto()
    """The first host to compute a segment stores it; others compute and do not store."""
    WAIT = enum.auto()
    """Like CLAIM, and others wait for it, but no longer than computing would take."""


class Way(enum.Enum):
    """How a request gets its blocks from the cluster."""

    COMPUTE = enum.auto()
    LOAD = enum.auto()
    MEET = enum.auto()
    """From the back, while the GPU computes from the front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """`local_bytes` is each host's own memory in front of the cluster; 0: every request asks the cluster."""

    num_hosts: int
    num_shards: int
    host_rate: float = 3.125e9
    shard_rate: float = 3.125e9
    local_bytes: int = 0
    shard_bytes: float = 64e9
    decides: bool = True
    stores: bool = True
    store_rate: float | None = None
    sharing: Sharing = Sharing.NOTHING

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or not 1 <= self.num_shards <= NUM_SLOTS:
            raise ValueError(f"a fleet has hosts, and from 1 to {NUM_SLOTS} shards")
        if min(self.host_rate, self.shard_rate) <= 0:
            raise ValueError("rates must be positive")


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on one host.

    Blocks before `num_ready` are on the device, and those of `edge..found_end` are loaded. `loads` are yet to come.
    """

    host: Host
    prompt: Prompt
    arrived_at: float
    num_ready: int = 0
    missing_blocks: int = 0
    found_end: int = 0
    edge: int = 0
    way: Way = Way.COMPUTE
    loads: deque[Segment] = field(default_factory=deque)
    load_began_at: float = 0.0
    loaded_bytes: float = 0.0
    began_at: float = 0.0
    waited_end: int | None = None
    waits_until: float = 0.0
    flow: Flow | None = None
    link: Link | None = None


@dataclass(slots=True, eq=False)
class Host:
    """`local` are the segments in its own memory, the coldest first. `waiting` is for the GPU."""

    local: OrderedDict[int, int] = field(default_factory=OrderedDict)
    local_bytes: int = 0
    loads: deque[Request] = field(default_factory=deque)
    loading: Request | None = None
    waiting: deque[Request] = field(default_factory=deque)
    computing: Request | None = None
    gpu_busy_s: float = 0.0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_RATES))
    rest_until: float = 0.0
    rest_s: float = 0.0
    slow_since: float | None = None
    known_down: set[int] = field(default_factory=set)
    puts: deque[Segment] = field(default_factory=deque)
    put_bytes: int = 0
    is_putting: bool = False
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request."""

    arrived_at: float
    ttft_s: float
    loaded_bytes: float
    computed_blocks: int
    missing_blocks: int
    """Blocks that neither the host nor the cluster had."""


class Shard:
    """One node: its blocks, the coldest first, and its network each way."""

    def __init__(self, clock: Clock, config: FleetConfig, costs: Costs) -> None:
        self.segments: OrderedDict[int, Segment] = OrderedDict()
        self.held_bytes = 0
        self.is_down = False
        self.up_at = 0.0
        flow_rate = min(config.host_rate, costs.client_rate)
        self.gets = Link(clock, min(config.shard_rate, costs.shard_get_rate), flow_rate)
        put_rate = flow_rate if config.store_rate is None else min(flow_rate, config.store_rate)
        self.puts = Link(clock, min(config.shard_rate, costs.shard_put_rate), put_rate)

    def keep(self, segment: Segment, most_bytes: float) -> None:
        if segment.name not in self.segments:
            self.held_bytes += segment.nbytes
        self.segments[segment.name] = segment
        self.segments.move_to_end(segment.name)
        while self.held_bytes > most_bytes:
            _, gone = self.segments.popitem(last=False)
            self.held_bytes -= gone.nbytes

    def forget(self) -> None:
        self.segments.clear()
        self.held_bytes = 0


class Fleet:
    """All hosts and shards. `outcomes` has every request that is done."""

    def __init__(self, config: FleetConfig, costs: Costs | None = None) -> None:
        self.config = config
        self.costs = costs or Costs()
        self.clock = Clock()
        self.hosts = [Host() for _ in range(config.num_hosts)]
        self.shards = [Shard(self.clock, config, self.costs) for _ in range(config.num_shards)]
        self.owners = [shard_of(slot, config.num_shards) for slot in range(NUM_SLOTS)]
        self.outcomes: list[Outcome] = []
        self.num_puts = 0
        self.num_refused_puts = 0
        self.num_matched_keys = 0
        self._claims: dict[int, Host] = {}

    # --- from outside ----------------------------------------------------------------------------------------------

    def fill(self, prompts: Sequence[Prompt]) -> None:
        """Put `prompts` into the cluster, as far as they fit."""
        for prompt in prompts:
            for segment in prompt.segments:
                self.shard(segment).keep(segment, self.config.shard_bytes)

    def warm(self, host: Host, prompts: Sequence[Prompt]) -> None:
        """The host has been asked for `prompts` before, in this order."""
        for prompt in prompts:
            for segment in prompt.segments:
                self._keep_local(host, segment)

    def ask(self, host: Host, prompt: Prompt) -> None:
        """A request arrives now."""
        request = Request(host, prompt, self.clock.now)
        host.num_requests += 1
        delay_s = 0.0
        for segment in prompt.segments:
            if segment.name not in host.local:
                break
            host.local.move_to_end(segment.name)
            request.num_ready = segment.end_block
            delay_s += segment.nbytes / self.costs.host_memory_rate
        self.clock.after(delay_s, lambda: self._match(request))

    def lose(self, number: int, *, keeps_blocks: bool) -> None:
        """A shard dies; `keeps_blocks` where a replica has them."""
        shard = self.shards[number]
        shard.is_down = True
        if not keeps_blocks:
            shard.forget()
        shard.puts.cut()
        for host in self.hosts:
            if host.is_putting and host.puts and self.shard(host.puts[0]) is shard:
                self._end_put(host, is_stored=False)
        cut = set(map(id, shard.gets.cut()))
        for host in self.hosts:
            request = host.loading
            if request is not None and id(request.flow) in cut:
                self._end_load(request, is_late=False)

    def restore(self, number: int) -> None:
        self.shards[number].is_down = False
        self.shards[number].up_at = self.clock.now + self.costs.keeper_s
        self.clock.after(self.costs.keeper_s, lambda: self._note_up(number))

    def move_slot(self, slot: int, to: int) -> None:
        """A slot has moved, with its blocks."""
        source, target = self.shards[self.owners[slot]], self.shards[to]
        self.owners[slot] = to
        for segment in [segment for segment in source.segments.values() if segment.slot == slot]:
            del source.segments[segment.name]
            source.held_bytes -= segment.nbytes
            target.keep(segment, self.config.shard_bytes)

    def shard(self, segment: Segment) -> Shard:
        return self.shards[self.owners[segment.slot]]

    # --- a request -------------------------------------------------------------------------------------------------

    def _match(self, request: Request) -> None:
        """The blocks in the cluster behind those on the host."""
        host = request.host
        num_keys = request.prompt.num_blocks - request.num_ready
        self.num_matched_keys += num_keys
        delay_s = num_keys * self.costs.match_key_s
        request.loads.clear()
        for segment in request.prompt.segments:
            if segment.first_block < request.num_ready:
                continue
            number = self.owners[segment.slot]
            shard = self.shards[number]
            if shard.is_down or self.clock.now < shard.up_at:
                if number not in host.known_down:
                    host.known_down.add(number)
                    delay_s += self.costs.deadline_s
                break
            if segment.name not in shard.segments:
                break
            shard.segments.move_to_end(segment.name)
            request.loads.append(segment)
        self.clock.after(delay_s, lambda: self._decide(request))

    def _decide(self, request: Request) -> None:
        request.edge = request.found_end = request.loads[-1].end_block if request.loads else request.num_ready
        request.missing_blocks = request.prompt.num_blocks - request.found_end
        if self._waits(request):
            self.clock.after(_POLL_S, lambda: self._match(request))
            return
        request.way = self._way(request) if request.loads else Way.COMPUTE
        if request.way is Way.COMPUTE:
            request.edge = request.found_end = request.num_ready
            request.loads.clear()
        else:
            request.host.loads.append(request)
            self._next_load(request.host)
        if request.way is not Way.LOAD:
            self._want_gpu(request)

    def _waits(self, request: Request) -> bool:
        """Another host is computing what the cluster lacks. No request waits longer than computing would take."""
        if self.config.sharing is not Sharing.WAIT:
            return False
        end = request.found_end
        following = next((one for one in request.prompt.segments if one.first_block >= end), None)
        if following is None or self._claims.get(following.name, request.host) is request.host:
            return False
        if request.waited_end != end:  # anew whenever more has come
            request.waited_end = end
            computing_s = self.costs.blocks_s(end, request.prompt.num_blocks - end)
            request.waits_until = self.clock.now + computing_s + _WAIT_SLACK_S
        return self.clock.now < request.waits_until

    def _way(self, request: Request) -> Way:
        """As `transfer/decision` decides, from the rates of this host's last loads."""
        host = request.host
        if not self.config.decides:
            return Way.LOAD
        if self.clock.now < host.rest_until:
            return Way.COMPUTE
        if not host.rates:
            return Way.LOAD
        num_blocks = request.found_end - request.num_ready
        load_s = bytes_of(num_blocks) / statistics.median(host.rates)
        compute_s = self.costs.blocks_s(request.num_ready, num_blocks)
        meet_s = 1 / (1 / load_s + 1 / compute_s)
        if load_s <= _CLEARLY_FASTER * compute_s:
            host.slow_since = None
            return Way.LOAD
        if meet_s <= _WORTH_MEETING * min(load_s, compute_s):
            host.slow_since = None
            return Way.MEET
        if host.slow_since is None:
            host.slow_since = self.clock.now
        if self.clock.now - host.slow_since < _RETRY_SLOW_S:
            return Way.COMPUTE
        host.slow_since = self.clock.now
        return Way.LOAD

    # --- loads -----------------------------------------------------------------------------------------------------

    def _next_load(self, host: Host) -> None:
        while host.loading is None and host.loads:
            request = host.loads.popleft()
            if not request.loads:  # all of it was computed meanwhile
                continue
            host.loading = request
            request.load_began_at = self.clock.now
            if self.config.decides and request.way is Way.LOAD:
                computing_s = self.costs.blocks_s(request.num_ready, request.found_end - request.num_ready)
                self.clock.after(computing_s, lambda request=request: self._give_up(request))  # type: ignore[misc]
            self._next_segment(request)

    def _next_segment(self, request: Request) -> None:
        """The first missing segment; the last one if the front is computed."""
        if request.loads:
            segment = request.loads[-1 if request.way is Way.MEET else 0]
            shard = self.shard(segment)
            if not shard.is_down and segment.name in shard.segments:  # else it is gone since the match
                request.link = shard.gets
                request.flow = shard.gets.start(segment.nbytes, lambda: self._segment_came(request))
                return
        self._end_load(request, is_late=False)

    def _segment_came(self, request: Request) -> None:
        if request.way is Way.MEET:
            segment = request.loads.pop()
            request.edge = segment.first_block
        else:
            segment = request.loads.popleft()
            request.num_ready = segment.end_block
        request.flow = None
        request.loaded_bytes += segment.nbytes
        self._keep_local(request.host, segment)
        self._next_segment(request)

    def _give_up(self, request: Request) -> None:
        """Computing would be done by now."""
        if request.host.loading is request and request.flow is not None:
            request.num_ready += self._cancel(request)
            self._end_load(request, is_late=True)

    def _cancel(self, request: Request) -> int:
        """End the flow. Returns the blocks that have arrived."""
        if request.flow is None or request.link is None:
            return 0
        came_bytes = request.link.cancel(request.flow)
        request.flow = None
        request.loaded_bytes += came_bytes
        return int(came_bytes // LAYOUT.block_bytes)

    def _end_load(self, request: Request, *, is_late: bool) -> None:
        host = request.host
        request.loads.clear()
        host.loading = None
        elapsed_s = self.clock.now - request.load_began_at
        if is_late:
            host.rest_s = min(max(2 * host.rest_s, self.costs.first_rest_s), self.costs.last_rest_s)
            host.rest_until = self.clock.now + host.rest_s
        elif elapsed_s > 0 and request.loaded_bytes:
            host.rest_s = 0.0
            host.rates.append(request.loaded_bytes / elapsed_s)
        if request.way is Way.LOAD:
            request.edge = request.found_end = request.num_ready
            self._want_gpu(request)
        self._next_load(host)

    # --- computing -------------------------------------------------------------------------------------------------

    def _want_gpu(self, request: Request) -> None:
        if self.config.sharing is not Sharing.NOTHING:
            for segment in request.prompt.segments:
                if segment.end_block > request.found_end:
                    self._claims.setdefault(segment.name, request.host)
        request.host.waiting.append(request)
        self._next_computing(request.host)

    def _next_computing(self, host: Host) -> None:
        if host.computing is None and host.waiting:
            request = host.computing = host.waiting.popleft()
            request.began_at = self.clock.now
            self._meet(request)

    def _meet(self, request: Request) -> None:
        """Go on from the front until what is loaded from the back is reached; then compute what is behind it."""
        now, costs = self.clock.now, self.costs
        front = request.num_ready + costs.blocks_in(request.num_ready, now - request.began_at)
        gap = request.edge - front
        load_rate = 0.0
        if request.flow is not None and request.link is not None:
            gap -= request.link.came_bytes(request.flow) / LAYOUT.block_bytes
            load_rate = request.link.each_rate / LAYOUT.block_bytes
        if gap > _GAP_BLOCKS:
            compute_rate = costs.blocks_in(int(front), _POLL_S) / _POLL_S
            self.clock.after(min(gap / (compute_rate + load_rate), _MEET_POLL_S), lambda: self._meet(request))
            return
        request.edge -= self._cancel(request)
        if request.host.loading is request:
            self._end_load(request, is_late=False)
        request.loads.clear()
        num_tokens = (request.prompt.num_blocks - request.found_end) * LAYOUT.block_tokens
        num_tokens += request.prompt.question_tokens
        rest_s = costs.step_s + costs.prefill_s(request.found_end * LAYOUT.block_tokens, num_tokens)
        self.clock.after(rest_s, lambda: self._end(request))

    def _end(self, request: Request) -> None:
        host, prompt, now = request.host, request.prompt, self.clock.now
        host.computing = None
        host.num_requests -= 1
        host.gpu_busy_s += now - request.began_at
        computed = max(0, request.edge - request.num_ready) + prompt.num_blocks - request.found_end
        ttft_s = now - request.arrived_at
        self.outcomes.append(
            Outcome(request.arrived_at, ttft_s, request.loaded_bytes, computed, request.missing_blocks)
        )
        for segment in prompt.segments:
            self._keep_local(host, segment)
            is_mine = self._claims.get(segment.name, host) is host
            if self.config.stores and is_mine and segment.end_block > request.found_end:
                self._put(host, segment)
        self._next_computing(host)

    # --- storing ---------------------------------------------------------------------------------------------------

    def _keep_local(self, host: Host, segment: Segment) -> None:
        if segment.name in host.local:
            host.local.move_to_end(segment.name)
            return
        host.local[segment.name] = segment.nbytes
        host.local_bytes += segment.nbytes
        while host.local_bytes > self.config.local_bytes:
            _, nbytes = host.local.popitem(last=False)
            host.local_bytes -= nbytes

    def _put(self, host: Host, segment: Segment) -> None:
        if host.put_bytes + segment.nbytes > _STAGING_BYTES:
            self.num_refused_puts += 1
            self._claims.pop(segment.name, None)
            return
        host.puts.append(segment)
        host.put_bytes += segment.nbytes
        if not host.is_putting:
            self._next_put(host)

    def _next_put(self, host: Host) -> None:
        """A segment that another host has stored meanwhile is not stored again."""
        while host.puts:
            segment = host.puts[0]
            shard = self.shard(segment)
            if not shard.is_down and segment.name not in shard.segments:
                host.is_putting = True
                self.num_puts += 1
                shard.puts.start(segment.nbytes, lambda: self._end_put(host, is_stored=True))
                return
            self._take_put(host)

    def _end_put(self, host: Host, *, is_stored: bool) -> None:
        segment = self._take_put(host)
        if is_stored:
            self.shard(segment).keep(segment, self.config.shard_bytes)
        host.is_putting = False
        self._next_put(host)

    def _take_put(self, host: Host) -> Segment:
        segment = host.puts.popleft()
        host.put_bytes -= segment.nbytes
        self._claims.pop(segment.name, None)
        return segment

    def _note_up(self, number: int) -> None:
        for host in self.hosts:
            host.known_down.discard(number)
