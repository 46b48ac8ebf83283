"""From the file's `http` section to the HTTP server: its keys, models and listeners."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.api.config import (
    ApiConfig,
    ApiKey,
    CacheAddress,
    EngineAddress,
    PageConfig,
    ServedModelConfig,
    ShownCache,
)
from kvtier.deploy.file.form import read_form
from kvtier.deploy.file.named_file import read_secret, require_file
from kvtier.deploy.file.native import DEFAULT_OLLAMA_PORT, DEFAULT_OPENAI_PORT, Deployment, HttpSection, check_host
from kvtier.deploy.file.origin import Origin
from kvtier.deploy.file.yaml_file import Location
from kvtier.deploy.plan.engines import PlannedModel
from kvtier.deploy.plan.parts import CachePart, EnginePart, HttpPart, Listener, VllmPart
from kvtier.deploy.plan.warm_ups import plan_warm_ups
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import ConfigError
from kvtier.transport.address import parse_host_port

HTTP_NAME = "http"


def plan_http(
    deployment: Deployment, origin: Origin, models: list[PlannedModel], caches: Sequence[CachePart] = ()
) -> HttpPart:
    """Raises `ConfigError`, with lines."""
    http = deployment.http
    served = tuple(
        ServedModelConfig(
            names=model.names,
            listed=model.listed,
            engines=tuple(_engine_address(part) for part in model.parts),
            is_vllm=section.engine == "vllm",
            default_options=_default_options(origin, place),
            tool_format=section.tool_format,
            reasoning_format=section.reasoning_format,
            cache=_cache_address(model.parts[0]),
        )
        for model, section, place in zip(models, deployment.models, origin.models, strict=True)
    )
    keys = _keys(http, origin)
    listeners = _listeners(http, origin)
    page = _page(deployment, origin, caches)
    warm = plan_warm_ups(deployment, origin, served, keys)
    for field in ("tls_cert", "tls_key"):
        require_file(origin, origin.http, field, getattr(http, field))
    folder, key_file = next(
        ((one.server.folder, one.server.key_file) for one in caches if one.server.folder is not None), (None, None)
    )
    try:
        api = ApiConfig(
            models=served,
            keys=keys,
            hosts=tuple(dict.fromkeys(one.host for one in listeners)),
            allow_hosts=http.allow_hosts,
            allow_origins=http.origins,
            tls_certificate=http.tls_cert,
            tls_key=http.tls_key,
            max_body_bytes=int(http.max_body),
            max_requests=http.max_requests,
            drain_s=http.drain_s,
            prefix_folder=None if folder is None else folder / "prefixes",
            prefix_key_file=key_file,
            warm=warm,
            page=page,
            retention_s=http.retention_s,
            retention_priority=http.retention_priority,
        )
    except ConfigError as error:
        raise origin.wrong(origin.http, str(error)) from error
    return HttpPart(name=HTTP_NAME, api=api, listeners=listeners)


def _engine_address(part: EnginePart | VllmPart) -> EngineAddress:
    prompts = part.prompts_socket if isinstance(part, VllmPart) else ""
    return EngineAddress(part.name, part.socket, prompts)


def _cache_address(part: EnginePart | VllmPart) -> CacheAddress | None:
    """The cache server of one of our engines."""
    if not isinstance(part, EnginePart) or not part.engine.cache_server:
        return None
    engine = part.engine
    return CacheAddress(
        address=engine.cache_server,
        token=engine.cache_server_token,
        secret=engine.cache_server_secret,
        ca_file=engine.cache_server_ca_file,
        certificate=engine.cache_server_certificate,
        key=engine.cache_server_key,
    )


def _page(deployment: Deployment, origin: Origin, caches: Sequence[CachePart]) -> PageConfig | None:
    page = deployment.page
    if not page.enabled:
        return None
    addresses = tuple(ShownCache(part.name, str(part.server.unix)) for part in caches if part.server.unix is not None)
    try:
        return PageConfig(caches=addresses, gpu_hour_price=page.gpu_hour_price, currency=page.currency)
    except ConfigError as error:
        raise origin.wrong(("page",), str(error)) from error


def _default_options(origin: Origin, place: Location) -> dict[str, object]:
    """The given options, unchanged; they must make a `SamplingParams`."""
    where = origin.find(place, "default_options")
    if where is None:
        return {}
    read_form(origin.file, where, SamplingParams)
    given = origin.file.at(where)
    assert isinstance(given, dict)
    return given


def _keys(http: HttpSection, origin: Origin) -> tuple[ApiKey, ...]:
    keys: list[ApiKey] = []
    for number, section in enumerate(http.api_keys):
        place: Location = (*origin.http, "api_keys", number)
        if any(section.name == other.name for other in keys):
            raise origin.wrong(place, f"two API keys are called {section.name!r}: give each a name of its own")
        secret = section.key if section.key is not None else read_secret(origin, place, "key_file", section.key_file)
        if any(secret == other.key for other in keys):
            raise origin.wrong(place, f"the API key {section.name!r} is the same as another one", about="key")
        try:
            keys.append(
                ApiKey(
                    name=section.name,
                    key=secret or "",
                    salt=section.salt,
                    share=section.share,
                    metrics=section.metrics,
                    admin=section.admin,
                    retention_s=section.retention_s,
                    retained_bytes=None if section.retained is None else int(section.retained),
                )
            )
        except ConfigError as error:
            raise origin.wrong(place, str(error)) from error
    return tuple(keys)


def _listeners(http: HttpSection, origin: Origin) -> tuple[Listener, ...]:
    listeners = []
    if HttpSection.is_served(http.openai):
        host, port = _place_to_listen(http.openai, http, DEFAULT_OPENAI_PORT, origin, "openai")
        listeners.append(Listener("openai", host, port))
    if HttpSection.is_served(http.ollama):
        host, port = _place_to_listen(http.ollama, http, DEFAULT_OLLAMA_PORT, origin, "ollama")
        listeners.append(Listener("ollama", host, port))
    return tuple(listeners)


def _place_to_listen(
    given: int | str | bool | None, http: HttpSection, usual: int, origin: Origin, name: str
) -> tuple[str, int]:
    if isinstance(given, str):
        try:
            address = parse_host_port(given)
            check_host(address.host)
        except ConfigError as error:
            raise origin.wrong(origin.http, f"{name}: {error}", about=name) from error
        return address.host, address.port
    return http.host, usual if given is None or given is True else given
