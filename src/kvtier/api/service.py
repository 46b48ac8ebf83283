"""What the handlers of both APIs share: the engines, who may ask, and what is counted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from kvtier.api.access import Access, Tenant, salt_of
from kvtier.api.config import ApiConfig
from kvtier.api.engine_connection import Answers
from kvtier.api.engines import Engines, ServedModel
from kvtier.api.http_error import unavailable
from kvtier.engine.process.messages import End, Prompt
from kvtier.engine.sampling_params import SamplingParams
from kvtier.observe.metrics import ApiMetrics


@dataclass(slots=True)
class Service:
    """One per process, in its event loop."""

    config: ApiConfig
    engines: Engines
    metrics: ApiMetrics = field(default_factory=ApiMetrics)
    is_draining: bool = False
    num_requests: int = 0
    started_at: float = field(default_factory=time.time)
    access: Access = field(init=False)

    def __post_init__(self) -> None:
        self.access = Access(self.config.keys)

    def tenant(self, request: Request) -> Tenant:
        """Raises a `HttpError` for those who may not ask."""
        return self.access.tenant(request)

    @contextmanager
    def place(self) -> Iterator[None]:
        """A scope for one request for answers. Raises a `HttpError` when the server is full, or about to stop."""
        if self.is_draining:
            raise unavailable("the server is stopping")
        if self.num_requests >= self.config.max_requests:
            raise unavailable(f"{self.num_requests} requests are being served, which is the limit")
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def submit(
        self,
        model: ServedModel,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        tenant: Tenant,
        cache_salt: str = "",
    ) -> Answers:
        """Hand a prompt to an engine. The caller closes what comes back. Raises a `KvtierError`."""
        return await self.engines.submit(model, prompt, params, request_id=request_id, salt=salt_of(tenant, cache_salt))

    def count(self, model: ServedModel, prompt_tokens: int, end: End) -> None:
        """An answer is complete."""
        metrics, name = self.metrics, model.name
        metrics.prompt_tokens.labels(model=name).inc(prompt_tokens)
        metrics.output_tokens.labels(model=name).inc(end.output_tokens)
        metrics.ttft_seconds.labels(model=name).observe(end.ttft_s)
        for tier, count in end.cached_tokens.items():
            metrics.cached_tokens.labels(model=name, tier=tier).inc(count)


def new_id(prefix: str) -> str:
    """An id that no other request has, here or at another engine of the same cache server."""
    return f"{prefix}-{secrets.token_hex(12)}"
