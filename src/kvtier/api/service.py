"""What the handlers of both APIs share: the engines, who may ask, and what is counted."""

from __future__ import annotations

import secrets
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from starlette.requests import Request

from kvtier.api.access import Access, Tenant
from kvtier.api.body_messages import ModelSnapshot
from kvtier.api.config import ApiConfig
from kvtier.api.engines import Engines
from kvtier.api.http_error import HttpError, unavailable
from kvtier.api.large_bodies import LargeBodies
from kvtier.api.open_bodies import OpenBodies
from kvtier.api.places import Places
from kvtier.api.vllm.model import VllmModels
from kvtier.api.wrong_keys import WrongKeys
from kvtier.engine.answer import Completion
from kvtier.observe.metrics import ApiMetrics


@dataclass(slots=True)
class Service:
    """One per process, in its event loop."""

    config: ApiConfig
    engines: Engines
    metrics: ApiMetrics = field(default_factory=ApiMetrics)
    vllm: VllmModels = field(default_factory=VllmModels)
    is_draining: bool = False
    started_at: float = field(default_factory=time.time)
    access: Access = field(init=False)
    open_bodies: OpenBodies = field(init=False)
    places: Places = field(init=False)
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    wrong_keys: WrongKeys = field(default_factory=WrongKeys)

    def __post_init__(self) -> None:
        self.access = Access(self.config.keys)
        self.places = Places(self.config)
        self.open_bodies = OpenBodies(self.config.max_body_bytes)

    def start(self) -> None:
        """Meet the engines, now and whenever they come back."""
        self.engines.start()
        self.vllm.start()

    @property
    def is_ready(self) -> bool:
        return self.engines.is_ready and all(engine.is_there for engine in self.vllm.engines)

    @property
    def model_names(self) -> list[str]:
        """What lists of models show."""
        own = [name for model in self.engines.models for name in model.listed_names]
        return own + [name for model in self.vllm.models for name in model.listed_names]

    def snapshot(self) -> list[ModelSnapshot]:
        """The models, as bodies name them, for whoever reads one."""
        passed = [ModelSnapshot(list(model.names), {}, None, is_vllm=True) for model in self.vllm.models]
        return [*self.engines.snapshot(), *passed]

    async def close(self) -> None:
        await self.large_bodies.close()
        await self.engines.close()
        await self.vllm.close()

    def tenant(self, request: Request) -> Tenant:
        """Raises a `HttpError` for those who may not ask."""
        tenant = self.access.tenant(request)
        if tenant.name:
            request.state.key = tenant.name
            self.metrics.key_requests.labels(key=tenant.name).inc()
        return tenant

    async def slow_down(self, request: Request, error: HttpError) -> HttpError:
        """A request had a wrong key: what it is told, after a while."""
        self.metrics.wrong_keys.inc()
        return await self.wrong_keys.slow_down("" if request.client is None else request.client.host, error)

    @property
    def num_requests(self) -> int:
        """Requests for answers that are being served."""
        return self.places.num_requests

    def place(self, tenant: Tenant, num_answers: int, prompt_bytes: int) -> AbstractContextManager[None]:
        """A scope for one request for answers. Raises a `HttpError` when the server is full, or about to stop."""
        if self.is_draining:
            raise unavailable("the server is stopping")
        return self.places.take(tenant.name, num_answers, prompt_bytes)

    def count(self, name: str, tenant: Tenant, prompt_tokens: int, completion: Completion) -> None:
        """An answer of the model `name` is complete."""
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


def new_id(prefix: str) -> str:
    """An id that no other request has, here or at another engine of the same cache server."""
    return f"{prefix}-{secrets.token_hex(12)}"
