"""Where a Mooncake pool is, and what this host lends to it. Checked once."""

from __future__ import annotations

import importlib.util
import socket
from typing import Literal, get_args

import msgspec

from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError
from kvtier.memory.mapped import MappedArena
from kvtier.stores.mooncake.blocks import MooncakeBlocks, OnLoss, value_bytes
from kvtier.stores.mooncake.client import MooncakeClient
from kvtier.stores.mooncake.messages import Setup

DEFAULT_BUFFER = 256 << 20
P2P = "P2PHANDSHAKE"
_MIN_SLOTS = 4
_MAX_BYTES = 1 << 50
_MAX_TEXT = 1024
_MAX_TIMEOUT_S = 600.0
_METADATA = ("http://", "https://", "etcd://", "redis://")

Protocol = Literal["tcp", "rdma"]


class MooncakeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`master` is `host:port` of the pool's master. `memory` is how many bytes an engine lends to the pool.

    `metadata` is where hosts find each other's memory; by default they ask each other. `device` names RDMA devices.
    `host` is this host's name for others; by default its address towards the master. `buffer` limits the bytes of
    blocks in flight. Mooncake has no authentication: `trusted_network` declares that only trusted hosts can reach it.
    """

    master: str
    memory: int
    metadata: str = P2P
    protocol: Protocol = "tcp"
    device: str = ""
    host: str | None = None
    buffer: int = DEFAULT_BUFFER
    timeout_s: float = 1.0
    trusted_network: bool = False

    def __post_init__(self) -> None:
        for name in ("master", "metadata", "protocol", "device"):
            _check_text(name, getattr(self, name))
        if self.host is not None:
            _check_text("host", self.host)
        if self.trusted_network is not True:
            raise ConfigError(
                "Mooncake has no authentication, so any client that can reach its ports can read and alter blocks: "
                "write trusted_network: true if only hosts that you trust can"
            )
        self.master_address()
        if self.metadata != P2P and not self.metadata.startswith(_METADATA):
            raise ConfigError(f"metadata must be {P2P}, or begin with {', '.join(_METADATA)}, not {self.metadata!r}")
        if self.protocol not in get_args(Protocol):
            raise ConfigError(f"protocol must be tcp or rdma, not {self.protocol!r}")
        if self.device and self.protocol != "rdma":
            raise ConfigError("device is only for RDMA: add protocol: rdma")
        for name in ("memory", "buffer"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_BYTES:
                raise ConfigError(f"{name} must be a number of bytes, not {value!r}")
        if not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise ConfigError(f"timeout_s must be more than 0 and at most {_MAX_TIMEOUT_S:g}, not {self.timeout_s:g}")

    def master_address(self) -> tuple[str, int]:
        host, _, port = self.master.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        is_number = port.isascii() and port.isdigit() and len(port) <= 5
        if not host or not is_number or not 0 < int(port) <= 65535:
            raise ConfigError(f"master must be host:port, not {self.master!r}")
        return host, int(port)


def check_is_installed() -> None:
    """Raises `ConfigError` without Mooncake. Does not load it."""
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError("a Mooncake tier needs mooncake-transfer-engine: pip install 'kvtier[mooncake]'")


def open_client(config: MooncakeConfig, arena: MappedArena) -> MooncakeClient:
    """Raises `ConfigError` if Mooncake is not installed. The master need not answer now."""
    check_is_installed()
    host, port = config.master_address()
    setup = Setup(
        host=host,
        port=port,
        metadata=config.metadata,
        protocol=config.protocol,
        device=config.device,
        memory_bytes=config.memory,
        local_host=config.host or _own_address(host, port),
        buffer_bytes=arena.nbytes,
    )
    return MooncakeClient(setup, arena)


def open_blocks(config: MooncakeConfig, namespace: Namespace, block_bytes: int, on_loss: OnLoss) -> MooncakeBlocks:
    """The blocks of `namespace`. The master need not answer now. Raises `ConfigError`."""
    if config.buffer < _MIN_SLOTS * 2 * value_bytes(block_bytes):
        raise ConfigError(
            f"buffer is {config.buffer} bytes, and a block has {block_bytes}: it must hold {2 * _MIN_SLOTS} of them"
        )
    check_is_installed()
    arena = MappedArena.create(config.buffer)
    try:
        client = open_client(config, arena)
    except BaseException:
        arena.close()
        raise
    return MooncakeBlocks(client, arena, namespace, block_bytes, on_loss=on_loss)


def _own_address(host: str, port: int) -> str:
    """This host's address on the way to the master; its name if there is no route yet. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
        raise ConfigError(f"{name} must be text of at most {_MAX_TEXT} characters on one line")
