"""From the file's caches to cache servers."""

from __future__ import annotations

from pathlib import Path

from kvtier.cacheserver.config import CacheServerConfig
from kvtier.deploy.file.named_file import read_secret, require_file
from kvtier.deploy.file.native import (
    CacheSection,
    ClusterSection,
    Deployment,
    MooncakeSection,
    ObjectsSection,
    check_host,
)
from kvtier.deploy.file.origin import Origin
from kvtier.deploy.file.yaml_file import Location
from kvtier.deploy.plan.parts import CachePart
from kvtier.deploy.plan.runtime_names import RuntimeNames, unix_address
from kvtier.errors import ConfigError
from kvtier.sizes import format_size
from kvtier.stores.folder import MIN_FILE_BYTES
from kvtier.stores.mooncake.config import MooncakeConfig
from kvtier.stores.objects.config import ObjectsConfig
from kvtier.stores.valkey.config import DEFAULT_BELOW_SERVER_TIMEOUT_S, DEFAULT_TIMEOUT_S, ClusterConfig
from kvtier.transport.address import TcpAddress, parse_host_port


def plan_caches(deployment: Deployment, origin: Origin, names: RuntimeNames) -> dict[str, CachePart]:
    """The cache parts, by the name that models use. Raises `ConfigError`, with lines."""
    parts: dict[str, CachePart] = {}
    for cache, place in zip(deployment.caches, origin.caches, strict=True):
        if cache.name in parts:
            raise origin.wrong(place, f"two caches are called {cache.name!r}: give each a name of its own")
        part = _plan_cache(cache, place, origin, names)
        for other in parts.values():
            _check_apart(part, other, place, origin)
        parts[cache.name] = part
    return parts


def _plan_cache(cache: CacheSection, place: Location, origin: Origin, names: RuntimeNames) -> CachePart:
    name = names.take(cache.name)
    if cache.disk and cache.disk < MIN_FILE_BYTES:
        least, given = format_size(MIN_FILE_BYTES), format_size(cache.disk)
        raise origin.wrong(place, f"disk must be at least {least}, not {given}", about="disk")
    token = read_secret(origin, place, "token_file", cache.token_file)
    secret = read_secret(origin, place, "tcp_secret_file", cache.tcp_secret_file)
    for field in ("tenants", "tls_cert", "tls_key", "tls_client_ca", "key_file"):
        require_file(origin, place, field, getattr(cache, field))
    addresses: dict[str, TcpAddress | None] = {
        field: _host_port(getattr(cache, field), field, place, origin) for field in ("tcp", "metrics")
    }
    try:
        unix = names.socket(name) if cache.socket is None else unix_address(cache.socket)
    except ConfigError as error:
        raise origin.wrong(place, str(error), about="socket") from error
    cluster = _plan_cluster(cache.cluster, (*place, "cluster"), origin)
    below_server = cache.cluster if cache.cluster is not None and cache.cluster.below == "server" else None
    try:
        server = CacheServerConfig(
            memory_bytes=int(cache.memory),
            unix=unix,
            tcp=addresses["tcp"],
            token=None if token is None else token.encode(),
            tcp_secret=None if secret is None else secret.encode(),
            tenants_file=cache.tenants,
            tls_certificate=cache.tls_cert,
            tls_key=cache.tls_key,
            tls_client_ca=cache.tls_client_ca,
            metrics=addresses["metrics"],
            max_connections=cache.max_connections,
            max_payload_bytes=int(cache.max_frame),
            max_leased_bytes=None if cache.max_leased is None else int(cache.max_leased),
            lease_timeout_s=cache.lease_timeout_s,
            max_retained_share=cache.retained_share,
            max_retention_s=cache.max_retention_s,
            touches_memory=cache.touch_memory,
            folder=cache.folder,
            file_bytes=int(cache.disk) if cache.disk else None,
            fsync=cache.fsync,
            stores_on=cache.store_on,
            disk_writes_per_day=None if cache.disk_writes_per_day is None else int(cache.disk_writes_per_day),
            keeps_memory=not cache.disk_only,
            eviction=cache.eviction,
            needs_disk=not cache.disk_optional,
            key_file=cache.key_file,
            cluster=None if below_server is None else cluster,
            shares_on="commit" if below_server is None else below_server.store_on,
            share_bytes_per_s=None
            if below_server is None or below_server.write_rate is None
            else int(below_server.write_rate),
        )
    except ConfigError as error:
        raise origin.wrong(place, str(error)) from error
    return CachePart(
        name=name,
        server=server,
        mooncake=_plan_mooncake(cache.mooncake, (*place, "mooncake"), origin),
        cluster=cluster if below_server is None else None,
        objects=_plan_objects(cache.objects, (*place, "objects"), origin),
    )


def _plan_mooncake(mooncake: MooncakeSection | None, place: Location, origin: Origin) -> MooncakeConfig | None:
    if mooncake is None:
        return None
    try:
        return MooncakeConfig(
            master=mooncake.master,
            memory=int(mooncake.memory),
            metadata=mooncake.metadata,
            protocol=mooncake.protocol,
            device=mooncake.device,
            host=mooncake.host,
            buffer=int(mooncake.buffer),
            timeout_s=mooncake.timeout_s,
            trusted_network=mooncake.trusted_network,
        )
    except ConfigError as error:
        raise origin.wrong(place, str(error)) from error


def _plan_cluster(cluster: ClusterSection | None, place: Location, origin: Origin) -> ClusterConfig | None:
    if cluster is None:
        return None
    if cluster.below == "engine" and (cluster.store_on != "commit" or cluster.write_rate is not None):
        raise origin.wrong(place, "store_on and write_rate are for a cluster below a server: leave out below")
    timeout_s = DEFAULT_BELOW_SERVER_TIMEOUT_S if cluster.below == "server" else DEFAULT_TIMEOUT_S
    password = read_secret(origin, place, "password_file", cluster.password_file)
    require_file(origin, place, "ca_file", cluster.ca_file)
    try:
        config = ClusterConfig(
            valkey=cluster.valkey,
            user=cluster.user,
            password=password,
            ca_file=None if cluster.ca_file is None else str(cluster.ca_file),
            ttl_s=cluster.ttl,
            segment=cluster.segment,
            timeout_s=timeout_s if cluster.timeout_s is None else cluster.timeout_s,
            plaintext=cluster.plaintext,
            compute_once=cluster.compute_once,
        )
        config.access()
    except ConfigError as error:
        raise origin.wrong(place, str(error)) from error
    return config


def _host_port(text: str | None, field: str, place: Location, origin: Origin) -> TcpAddress | None:
    if text is None:
        return None
    try:
        address = parse_host_port(text)
        check_host(address.host)
    except ConfigError as error:
        raise origin.wrong(place, f"{field}: {error}", about=field) from error
    return address


def _check_apart(part: CachePart, other: CachePart, place: Location, origin: Origin) -> None:
    assert part.server.unix is not None
    assert other.server.unix is not None
    for field, one, two in (
        ("socket", Path(part.server.unix.path), Path(other.server.unix.path)),
        ("folder", part.server.folder, other.server.folder),
    ):
        if one is not None and two is not None and one.resolve() == two.resolve():
            raise origin.wrong(place, f"{one} is the {field} of the cache {other.name} already", about=field)


def _plan_objects(objects: ObjectsSection | None, place: Location, origin: Origin) -> ObjectsConfig | None:
    if objects is None:
        return None
    try:
        return ObjectsConfig(
            url=objects.url,
            settings=objects.settings,
            segment=objects.segment,
            buffer=int(objects.buffer),
            timeout_s=objects.timeout_s,
            plaintext=objects.plaintext,
        )
    except ConfigError as error:
        raise origin.wrong(place, str(error)) from error
