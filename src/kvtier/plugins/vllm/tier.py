"""`KvtierTier`: a cache server below vLLM's own offloading, as one of its `secondary_tiers`.

vLLM keeps pages in host memory and asks the tiers below for those it lacks. Its scheduler's thread makes all calls, and
all return at once. If the tier cannot identify pages with certainty, it logs one sentence and keeps nothing.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError
from kvtier.plugins.embedded_server import EmbeddedServer
from kvtier.plugins.vllm.compat import (
    TIER_MEDIUM,
    blocks_per_page,
    configs_of,
    has_stable_hashes,
    known_arguments,
    made_with_known,
    rows_of,
)
from kvtier.plugins.vllm.page_identity import PageIdentity, page_identity, why_no_pages
from kvtier.plugins.vllm.releases import ReleaseFit, fit_of, refused, tried
from kvtier.plugins.vllm.server_client import client_of
from kvtier.plugins.vllm.settings import ServerSettings, read_tier_settings
from kvtier.transfer.page_jobs import EndedJob, PageJob, PageJobs
from kvtier.transfer.page_lookups import PageLookups

logger = logging.getLogger("vllm.kvtier")
"""A child of vLLM's logger: other loggers are not shown."""

_YIELD_S = 5e-5
_HELD_PART = 4
_PATIENCE = 2.0
"""A request waits for this many of the server's time-outs: one call finds pages, another leases them."""


@dataclass(frozen=True, slots=True)
class _Pages:
    """The parts that move pages between the engine and the server."""

    client: CacheClient
    jobs: PageJobs
    lookups: PageLookups
    memory: memoryview
    server: EmbeddedServer | None

    def close(self) -> None:
        self.jobs.close()
        self.lookups.close()
        self.client.close()
        self.memory.release()
        if self.server is not None:
            self.server.close()


class KvtierTier(SecondaryTierManager):
    """The tier of one engine. `settings` are the rest of its entry in `secondary_tiers`."""

    medium = TIER_MEDIUM

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Raises `ConfigError` with one sentence for settings that cannot work."""
        named = {
            "offloading_spec": offloading_spec,
            "primary_kv_view": primary_kv_view,
            "tier_type": tier_type,
            "backpressure_detector": backpressure_detector,
        }
        super().__init__(**known_arguments(SecondaryTierManager.__init__, named))
        self._pages: _Pages | None = None
        self._refused: list[EndedJob] = []
        read = read_tier_settings(settings)
        try:
            identity = _identity_of(offloading_spec, primary_kv_view, read)
        except ConfigError as error:
            logger.warning("kvtier keeps nothing of vLLM's offloading: %s", error)
            return
        read.check_room_for(identity.layout)
        self._pages = _open(read, identity, primary_kv_view)
        logger.info("kvtier keeps pages of vLLM's offloading at %s", self._pages.client.address)

    # --- lookups ---------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = False if self._pages is None else self._pages.lookups.find(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any = None) -> None:
        """Send the step's lookups. While answers or loads are awaited, give the GIL to their threads: vLLM polls."""
        pages = self._pages
        if pages is None:
            return
        pages.lookups.send()
        if pages.lookups.is_asking or pages.jobs.is_loading:
            time.sleep(_YIELD_S)

    def on_request_finished(self, req_context: Any) -> None:
        if self._pages is not None:
            self._pages.lookups.forget(req_context.req_id)

    # --- jobs ------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        job = _job_of(job_metadata)
        if self._pages is None:
            self._refused.append(EndedJob(job, False, [False] * len(job.keys), 0.0))
        else:
            self._pages.jobs.store(job)

    def submit_load(self, job_metadata: Any) -> None:
        assert self._pages is not None, "a tier without pages never has a hit"
        self._pages.jobs.load(_job_of(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended, self._refused = self._refused, []
        if self._pages is not None:
            ended = self._pages.jobs.take_ended()
            for one in ended:
                if one.is_load:
                    self._pages.lookups.note_loaded(one.job.owner, one.job.keys, one.missing_keys)
        return [self._result_of(one) for one in ended]

    def drain_jobs(self) -> None:
        if self._pages is not None:
            self._pages.jobs.drain()

    def shutdown(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def _result_of(self, ended: EndedJob) -> JobResult:
        arrived = [key for key, there in zip(ended.job.keys, ended.is_there, strict=True) if there]
        named = {
            "job_id": ended.job.number,
            "success": ended.is_done,
            "successful_keys": tuple(arrived) if ended.is_load and arrived and not ended.is_done else None,
            "transfer_time": ended.seconds,
            "transfer_bytes": len(arrived) * self._block_size_bytes,
        }
        return made_with_known(JobResult, named)


def _job_of(metadata: Any) -> PageJob:
    return PageJob(
        number=metadata.job_id,
        owner=metadata.req_context.req_id,
        keys=list(metadata.keys),
        rows=rows_of(metadata),
    )


def _identity_of(spec: Any, memory: memoryview, settings: ServerSettings) -> PageIdentity:
    """The identity of the engine's pages. Raises `ConfigError` if it is not certain."""
    fit = fit_of(vllm.__version__)
    if fit is ReleaseFit.OLDER:
        raise ConfigError(refused(vllm.__version__))
    if fit is ReleaseFit.NEWER:
        logger.warning("%s", tried(vllm.__version__))
    configs = configs_of(spec)
    if configs is None:
        raise ConfigError(refused(vllm.__version__, "a tier does not receive the engine's config"))
    vllm_config, kv_cache_config = configs
    if reason := why_no_pages(vllm_config):
        raise ConfigError(reason)
    if not has_stable_hashes():
        logger.warning(
            "kvtier: set PYTHONHASHSEED, for example to 0: without it, the hashes of this vLLM change with each start"
        )
    _, page_bytes = _size_of(memory)
    return page_identity(
        vllm_config, kv_cache_config, page_bytes, blocks_per_page(spec), settings.salt, settings.identity
    )


def _open(settings: ServerSettings, identity: PageIdentity, view: memoryview) -> _Pages:
    server = settings.embedded_server()
    try:
        client = client_of(settings, identity, server)
    except BaseException:
        if server is not None:
            server.close()
        raise
    num_pages, page_bytes = _size_of(view)
    memory = view.cast("B")
    jobs = PageJobs(client, memory, page_bytes)
    most_held = functools.partial(_most_held, client, num_pages)
    lookups = PageLookups(client, max_held=most_held, patience_s=_PATIENCE * settings.timeout_s)
    return _Pages(client, jobs, lookups, memory, server)


def _most_held(client: CacheClient, num_pages: int) -> int:
    """Limit on pages leased between lookup and load. A client may hold half of a server's memory."""
    memory_bytes = client.info().get("memory_bytes")
    if not isinstance(memory_bytes, int):
        return 0
    return min(num_pages, memory_bytes // _HELD_PART // client.layout.slot_bytes)


def _size_of(view: memoryview) -> tuple[int, int]:
    """The number of pages in vLLM's host memory, and the size of one."""
    assert view.shape is not None
    assert len(view.shape) == 2
    return view.shape[0], view.shape[1]
