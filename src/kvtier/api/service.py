"""The state that the handlers of all APIs share: engines, access, limits, metrics."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from starlette.requests import Request

from kvtier.api.access import Access, ApiTenant
from kvtier.api.body_messages import ModelSnapshot
from kvtier.api.config import ApiConfig
from kvtier.api.engine_connection import Answers
from kvtier.api.engines import Engines
from kvtier.api.http_error import HttpError, unavailable
from kvtier.api.large_bodies import LargeBodies
from kvtier.api.open_bodies import OpenBodies
from kvtier.api.places import Places
from kvtier.api.prefixes.book import PrefixBook
from kvtier.api.prefixes.cache import PrefixCache
from kvtier.api.prefixes.prefixes import Prefixes
from kvtier.api.request_log import LoggedRequest, RequestLog
from kvtier.api.response_store import ResponseStore
from kvtier.api.retention import RetentionRules
from kvtier.api.token_history import TokenHistory
from kvtier.api.tracing import NoTracing, Tracing, make_tracing
from kvtier.api.vllm.model import VllmModels
from kvtier.api.vllm.response_places import ResponsePlaces
from kvtier.api.wrong_keys import WrongKeys
from kvtier.engine.answer import Completion
from kvtier.errors import ConfigError
from kvtier.observe.metrics import ApiMetrics
from kvtier.observe.recent_warnings import RecentWarnings

logger = logging.getLogger(__name__)

CUT_OFF = "the server stopped before the answer was complete"


@dataclass(slots=True)
class Service:
    """One per process; used in its event loop."""

    config: ApiConfig
    engines: Engines
    metrics: ApiMetrics = field(default_factory=ApiMetrics)
    vllm: VllmModels = field(default_factory=VllmModels)
    tracing: Tracing | NoTracing = field(default_factory=make_tracing)
    is_draining: bool = False
    started_at: float = field(default_factory=time.time)
    access: Access = field(init=False)
    open_bodies: OpenBodies = field(init=False)
    places: Places = field(init=False)
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    wrong_keys: WrongKeys = field(default_factory=WrongKeys)
    responses: ResponseStore = field(init=False)
    placed_responses: ResponsePlaces = field(init=False)
    """Those that engines of vLLM have."""
    prefixes: Prefixes = field(init=False)
    is_warming_up: bool = False
    """Documents of the deployment file are being put into the cache: the server is not ready yet."""
    history: TokenHistory = field(default_factory=TokenHistory)
    log: RequestLog = field(default_factory=RequestLog)
    warnings: RecentWarnings = field(default_factory=RecentWarnings)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when the server begins to drain, and again when it closes: for streams that have no end of their own."""

    def __post_init__(self) -> None:
        usual = RetentionRules(self.config.retention_s, self.config.retention_priority)
        self.access = Access(self.config.keys, usual)
        self.places = Places(self.config)
        self.responses = ResponseStore(len(self.config.keys))
        self.placed_responses = ResponsePlaces(len(self.config.keys))
        self.open_bodies = OpenBodies(self.config.max_body_bytes)
        config = self.config
        caches = {model.names[0]: PrefixCache(model.cache) for model in config.models if model.cache is not None}
        self.prefixes = Prefixes(self.engines, _book(config), caches)

    def start(self) -> None:
        """Connect to the engines, now and whenever they come back."""
        self.engines.start()
        self.vllm.start()
        self.prefixes.start()

    @property
    def is_ready(self) -> bool:
        return not self.is_warming_up and self.engines.is_ready and all(engine.is_up for engine in self.vllm.engines)

    @property
    def model_names(self) -> list[str]:
        """The names that lists of models show."""
        own = [name for model in self.engines.models for name in model.listed_names]
        return own + [name for model in self.vllm.models for name in model.listed_names]

    def snapshot(self) -> list[ModelSnapshot]:
        """What readers of bodies, possibly in another process, need of the models."""
        passed = [ModelSnapshot(list(model.names), {}, None, is_vllm=True) for model in self.vllm.models]
        return [*self.engines.snapshot(), *passed]

    def begin_to_drain(self) -> None:
        """Accept no new requests from now on."""
        self.is_draining = True
        for end in self.at_end:
            end()

    async def close(self) -> None:
        await self.prefixes.close()
        for end in self.at_end:
            end()
        await self.large_bodies.close()
        await self.engines.close()
        await self.vllm.close()

    def cut_off(self) -> None:
        """The time to drain is over: end every answer in flight with an error in its API's form."""
        if self.num_requests:
            logger.warning("the time to drain is over: %d requests are cut off", self.num_requests)
        self.engines.cut_off(CUT_OFF)
        self.vllm.cut_off(CUT_OFF)

    def tenant(self, request: Request) -> ApiTenant:
        """The request's tenant, counted. Raises `HttpError` for a client without a valid key."""
        tenant = self.access.tenant(request)
        if tenant.name:
            request.state.key = tenant.name
            self.metrics.key_requests.labels(key=tenant.name).inc()
        return tenant

    async def slow_down(self, request: Request, error: HttpError) -> HttpError:
        """Delay the answer to a wrong key; returns the error to send."""
        self.metrics.wrong_keys.inc()
        return await self.wrong_keys.slow_down("" if request.client is None else request.client.host, error)

    @property
    def num_requests(self) -> int:
        """Requests for answers in flight."""
        return self.places.num_requests

    def place(self, tenant: ApiTenant, num_answers: int, prompt_bytes: int) -> AbstractContextManager[None]:
        """A scope for one request for answers. Raises `HttpError` if the server is full or stopping."""
        if self.is_draining:
            raise unavailable("the server is stopping")
        return self.places.take(tenant.name, num_answers, prompt_bytes)

    def count(self, name: str, tenant: ApiTenant, answers: Answers, completion: Completion) -> None:
        """Count a complete answer of the model `name`."""
        prompt_tokens = answers.prompt_tokens
        if completion.index == 0:
            self._log(name, tenant, answers, completion)
        metrics = self.metrics
        if tenant.name:
            metrics.key_tokens.labels(key=tenant.name, of="prompts").inc(prompt_tokens)
            metrics.key_tokens.labels(key=tenant.name, of="answers").inc(len(completion.token_ids))
        metrics.prompt_tokens.labels(model=name).inc(prompt_tokens)
        metrics.output_tokens.labels(model=name).inc(len(completion.token_ids))
        metrics.ttft_seconds.labels(model=name).observe(completion.ttft_s)
        if len(completion.token_ids) > 1:
            metrics.tpot_seconds.labels(model=name).observe(completion.time_per_output_token_s)
        for tier, count in completion.cached_tokens.items():
            metrics.cached_tokens.labels(model=name, tier=tier).inc(count)

    def _log(self, name: str, tenant: ApiTenant, answers: Answers, completion: Completion) -> None:
        self.history.add(answers.prompt_tokens, completion.cached_tokens)
        end = completion.prefix_end
        self.log.add(
            LoggedRequest(
                number=self.log.next_number(),
                request_id=answers.request_id,
                at=time.time(),
                model=name,
                engine=answers.engine,
                key=tenant.name,
                prompt_tokens=answers.prompt_tokens,
                output_tokens=len(completion.token_ids),
                cached_tokens={tier: count for tier, count in completion.cached_tokens.items() if count},
                ttft_s=completion.ttft_s,
                finish_reason=completion.finish_reason,
                ended_at_tokens=None if end is None else end.at_tokens,
                reason="" if end is None else end.reason,
                tier="" if end is None else end.tier,
                detail="" if end is None else end.detail,
            )
        )

    def log_passed(self, name: str, tenant: ApiTenant, request_id: str, ttft_s: float | None) -> None:
        """Log a request that vLLM has begun to answer; its token counts are unknown here."""
        self.log.add(
            LoggedRequest(
                number=self.log.next_number(),
                request_id=request_id,
                at=time.time(),
                model=name,
                key=tenant.name,
                ttft_s=ttft_s,
            )
        )


def _book(config: ApiConfig) -> PrefixBook:
    """The book of prefixes; in memory if its folder is unusable, since nothing but the names depends on it."""
    try:
        return PrefixBook(config.prefix_folder, config.prefix_key_file)
    except ConfigError as error:
        logger.error("names of prefixes are kept in memory only: %s", str(error))
        return PrefixBook()


def new_id(prefix: str) -> str:
    """An id that is unique among all requests, including those of other deployments on the same cache server."""
    return f"{prefix}-{secrets.token_hex(12)}"
