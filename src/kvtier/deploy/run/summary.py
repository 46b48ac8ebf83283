"""The summary shown when a deployment is ready: its addresses, its capacity, and how to try it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvtier.deploy.plan.parts import CachePart, DeploymentPlan, EnginePart, VllmPart
from kvtier.sizes import format_size

_ANY_HOST = ("0.0.0.0", "::", "")


def summary(
    plan: DeploymentPlan, ports: Sequence[int], properties: Mapping[str, Mapping[str, object]], seconds: float
) -> str:
    """`properties` are what each part reported, by its name; `ports` are those of the listeners, in order."""
    lines = ["", f"ready after {seconds:.1f} s"]
    urls = urls_of(plan, ports)
    for api, url in urls.items():
        title = {"openai": "OpenAI API", "ollama": "Ollama API"}[api]
        lines.append(f"  {title:12} {url}{'/v1' if api == 'openai' else ''}")
    if plan.http.api.page is not None and "openai" in urls:
        lines.append(f"  {'page':12} {urls['openai']}/")
    for engine in plan.engines:
        lines += _engine_lines(plan, engine, properties.get(engine.name, {}))
    for vllm_engine in plan.vllm_engines:
        lines += _vllm_lines(plan, vllm_engine, properties.get(vllm_engine.name, {}))
    for cache in plan.caches:
        lines += _cache_lines(cache)
    lines += ["  try it", *(f"    {line}" for line in _example(plan, urls)), "  Ctrl-C stops it", ""]
    return "\n".join(lines)


def urls_of(plan: DeploymentPlan, ports: Sequence[int]) -> dict[str, str]:
    """The URL of each API from this host."""
    urls: dict[str, str] = {}
    for listener, port in zip(plan.http.listeners, ports, strict=True):
        host = "127.0.0.1" if listener.host in _ANY_HOST else listener.host
        host = f"[{host}]" if ":" in host else host
        scheme = "http" if plan.http.api.tls_certificate is None else "https"
        urls[listener.api] = f"{scheme}://{host}:{port}"
    return urls


def _engine_lines(plan: DeploymentPlan, part: EnginePart, properties: Mapping[str, object]) -> list[str]:
    block_tokens, slot_bytes = _whole(properties, "block_tokens"), max(1, _whole(properties, "slot_bytes"))
    kind = "+".join(str(properties[name]) for name in ("dtype", "quantization") if properties.get(name))
    tiers = [f"device {_whole(properties, 'num_blocks')} ({format_size(_whole(properties, 'kv_bytes'))})"]
    if part.engine.swap_space:
        tiers.append(f"host {part.engine.swap_space // slot_bytes} ({format_size(part.engine.swap_space)})")
    for cache in plan.caches:
        if str(cache.server.unix) == part.engine.cache_server:
            server = cache.server
            if server.keeps_memory:
                tiers.append(f"{cache.name} {server.memory_bytes // slot_bytes} ({format_size(server.memory_bytes)})")
            if server.file_bytes:
                tiers.append(f"disk {server.file_bytes // slot_bytes} ({format_size(server.file_bytes)})")
            if server.cluster is not None:
                tiers.append(f"cluster {server.cluster.valkey[0]}")
    if part.engine.mooncake is not None:
        tiers.append(f"mooncake {part.engine.mooncake.master}")
    if part.engine.cluster is not None:
        tiers.append(f"cluster {part.engine.cluster.valkey[0]}")
    if part.engine.objects is not None:
        tiers.append(f"objects {part.engine.objects.url}")
    parting = f"  {'':12} where a prompt parted: kvtier explain --engine unix:{part.socket} REQUEST_ID"
    return [
        f"  {'engine':12} {part.name}: {part.served_as}, {properties.get('architecture', '')} {kind} "
        f"on {properties.get('device', '')}, weights {format_size(_whole(properties, 'weights_bytes'))}, "
        f"prompts up to {_whole(properties, 'max_model_len')} tokens",
        f"  {'':12} KV blocks of {block_tokens} tokens: {', '.join(tiers)}",
        *([] if part.engine.cache_server else [parting]),
    ]


def _vllm_lines(plan: DeploymentPlan, part: VllmPart, properties: Mapping[str, object]) -> list[str]:
    names = [cache.name for cache in plan.caches if str(cache.server.unix) == part.cache_server]
    kept = f"KV is kept in {(names or [part.cache_server])[0]}" if part.cache_server else "KV is kept by vLLM alone"
    return [
        f"  {'engine':12} {part.name}: {part.served_as}, vLLM {properties.get('vllm', '')} on {part.device}, "
        f"prompts up to {_whole(properties, 'max_model_len')} tokens",
        f"  {'':12} {kept}",
    ]


def _cache_lines(part: CachePart) -> list[str]:
    server = part.server
    disk = f", {format_size(server.file_bytes)} of disk in {server.folder}" if server.file_bytes else ""
    return [
        f"  {'cache':12} {part.name}: {format_size(server.memory_bytes)} of memory{disk}",
        f"  {'':12} why a request missed: kvtier explain --server {server.unix} REQUEST_ID",
    ]


def _example(plan: DeploymentPlan, urls: Mapping[str, str]) -> list[str]:
    model = (plan.engines or plan.vllm_engines)[0].served_as
    has_keys = bool(plan.http.api.keys)
    messages = [{"role": "user", "content": "Hello!"}]
    if "openai" in urls:
        path, body = f"{urls['openai']}/v1/chat/completions", {"model": model, "messages": messages}
    elif "ollama" in urls:
        path, body = f"{urls['ollama']}/api/chat", {"model": model, "messages": messages}
    else:
        return []
    key = "-H 'Authorization: Bearer YOUR_KEY' " if has_keys else ""
    return [f"curl {path} {key}-H 'Content-Type: application/json' \\", f"  -d '{json.dumps(body)}'"]


def _whole(properties: Mapping[str, object], name: str) -> int:
    found = properties.get(name)
    return found if isinstance(found, int) else 0
