"""The address of an object store, and how much of a prompt is one object. Checked once."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError
from kvtier.stores.objects.blocks import ObjectBlocks, OnLoss
from kvtier.stores.objects.bucket import Bucket

_SEGMENT_BYTES = 32 << 20
DEFAULT_BUFFER = 512 << 20
_SCHEMES = ("s3", "gs", "az", "file")
_MAX_SEGMENT = 4096
_MAX_TIMEOUT_S = 600.0
_MAX_SETTINGS = 64
_ENDPOINTS = frozenset(
    f"{before}{after}"
    for before in ("", "aws_", "azure_", "azure_storage_", "google_")
    for after in ("endpoint", "endpoint_url")
) | {"base_url", "google_base_url", "aws_endpoint_url_s3"}
_BYTES_PER_S = 20e6
"""Assumed for limits: the speed of the slowest store worth using."""


class ObjectsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`url` is `s3://bucket/folder`, `gs://`, `az://` or `file:///folder`; `settings` are those of `obstore`, such as
    `endpoint` and `region`. Keys are best left in the environment, where every such store looks for them.

    `segment` is how many blocks form one object, by default 32 MiB of them, and must be the same for all that share the
    store; `buffer` limits the bytes of blocks that wait for the rest of their segment, or to be written.
    """

    url: str
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    segment: int | None = None
    buffer: int = DEFAULT_BUFFER
    timeout_s: float = 2.0
    plaintext: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not isinstance(self.settings, dict):
            raise ConfigError("url must be text, and settings a mapping of text")
        scheme = self.url.partition("://")[0]
        if scheme not in _SCHEMES or len(self.url) > 2048:
            raise ConfigError(
                f"url must begin with {', '.join(f'{one}://' for one in _SCHEMES)}, not {self.url[:40]!r}"
            )
        if self.segment is not None and not 1 <= self.segment <= _MAX_SEGMENT:
            raise ConfigError(f"segment must be from 1 to {_MAX_SEGMENT} blocks, not {self.segment}")
        if self.buffer < 0:
            raise ConfigError(f"buffer must be a number of bytes, not {self.buffer}")
        if not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise ConfigError(f"timeout_s must be more than 0 and at most {_MAX_TIMEOUT_S:g}, not {self.timeout_s:g}")
        if len(self.settings) > _MAX_SETTINGS:
            raise ConfigError(f"settings must be at most {_MAX_SETTINGS}, not {len(self.settings)}")
        if "@" in urlsplit(self.url).netloc:
            raise ConfigError("url must not hold a key: leave keys to the environment, or to settings")
        endpoint = self._endpoint
        if endpoint.startswith("http://") and not self.plaintext and not _is_loopback(endpoint):
            raise ConfigError(f"{endpoint} is not encrypted: write https://, or plaintext: true if all may read blocks")

    @property
    def allows_http(self) -> bool:
        return self._endpoint.startswith("http://")

    @property
    def _endpoint(self) -> str:
        """In lower case, so that `HTTP://` gets the same checks as `http://`."""
        names = (name for name in self.settings if name.lower() in _ENDPOINTS)
        return next((self.settings[name].lower() for name in names), "")

    def __repr__(self) -> str:
        return f"ObjectsConfig(url={self.url!r}, ...)"  # settings may hold keys


def open_blocks(config: ObjectsConfig, namespace: Namespace, block_bytes: int, on_loss: OnLoss) -> ObjectBlocks:
    """The blocks of `namespace`. The store need not answer now. Raises `ConfigError`."""
    segment = config.segment or max(1, min(_MAX_SEGMENT, _SEGMENT_BYTES // block_bytes))
    segment_bytes = segment * block_bytes
    if config.buffer < 2 * segment_bytes:
        raise ConfigError(
            f"buffer is {config.buffer} bytes, and a segment of {segment} blocks has {segment_bytes}: it must hold two"
        )
    limit_s = config.timeout_s + segment_bytes / _BYTES_PER_S
    bucket = Bucket(config.url, config.settings, limit_s=limit_s, allow_http=config.allows_http)
    return ObjectBlocks(
        bucket, namespace, block_bytes, segment_blocks=segment, buffer_bytes=config.buffer, on_loss=on_loss
    )


def _is_loopback(endpoint: str) -> bool:
    return urlsplit(endpoint).hostname in ("localhost", "127.0.0.1", "::1")
