"""The tenants of a server: their credentials, permissions and limits.

Processes of this host, and holders of the server's one token, act as its owner and see everything. A tenant from the
tenants' file sees, matches, drops and pins in its own namespaces only, whatever ids it sends; its credential decides
which namespaces are its own. The file is reloaded when it changes; connections with a revoked credential are closed.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import threading
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtier.blocks.block import Block
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.share import Share
from kvtier.cacheserver.bandwidth import Bandwidth
from kvtier.cacheserver.notes import Notes
from kvtier.errors import ConfigError
from kvtier.sizes import format_size, parse_size
from kvtier.transport.byte_budget import ByteBudget

logger = logging.getLogger(__name__)

MIN_TOKEN_BYTES = 8
DEFAULT_RETAINED_SHARE = 0.25
_MAX_TENANTS = 256
_MAX_CREDENTIALS = 8
_MAX_NAME_CHARS = 32
_MAX_FILE_BYTES = 1 << 20
_MAX_NOTES, _MAX_NOTE_CHARS = 512, 1 << 20
_MAX_BODIES_BYTES = 64 << 20
_NO_LIMIT = 1 << 62
_TAG = "\x1f"
"""Encloses a tenant's name in front of a namespace's name on disk. Names from clients cannot contain it."""
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class TenantSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant in the file. A client with a `read_token` or a `read_certificate` may only match and read.

    An admin may do everything in all namespaces, like a process of the server's host.
    """

    token: str | None = None
    tokens: tuple[str, ...] = ()
    certificate: str | None = None
    read_token: str | None = None
    read_tokens: tuple[str, ...] = ()
    read_certificate: str | None = None
    admin: bool = False
    memory: str | int = 0
    disk: str | int = 0
    leased: str | int | None = None
    bandwidth: str | int | None = None
    connections: int | None = None
    retained_share: float | None = None


class Holds:
    """The blocks that a tenant holds (leased, reserved or being sent), and its limit on their units.

    A block that several of the tenant's clients hold counts once: a worker of vLLM loads what its scheduler has leased.
    Without `max_units`, the tenant shares the limit of a group; without a group there is no limit, and no count.
    """

    __slots__ = ("_num_holders", "group", "held_units", "max_units")

    def __init__(self) -> None:
        self.held_units = 0
        self.max_units: int | None = None
        self.group: HoldGroup | None = None
        self._num_holders: dict[Block, int] = {}

    def add(self, blocks: Iterable[Block]) -> None:
        if self.group is None:
            return
        for block in blocks:
            num_holders = self._num_holders.get(block, 0)
            self._num_holders[block] = num_holders + 1
            if not num_holders:
                self.held_units += block.size

    def remove(self, blocks: Iterable[Block]) -> None:
        if self.group is None:
            return
        for block in blocks:
            num_holders = self._num_holders.pop(block) - 1
            if num_holders:
                self._num_holders[block] = num_holders
            else:
                self.held_units -= block.size

    def num_held(self, blocks: Mapping[BlockHash, Block], hashes: Iterable[BlockHash]) -> int:
        """How many of the first `hashes` are held already, so that holding them once more costs nothing."""
        if not self._num_holders:
            return 0
        return sum(1 for _ in itertools.takewhile(lambda one: blocks.get(one) in self._num_holders, hashes))

    @property
    def left(self) -> int:
        if self.max_units is not None:
            return max(0, self.max_units - self.held_units)
        return _NO_LIMIT if self.group is None else self.group.left

    @property
    def most(self) -> int:
        """What is left when nothing is held."""
        if self.max_units is not None:
            return self.max_units
        return _NO_LIMIT if self.group is None else self.group.max_units


class HoldGroup:
    """Tenants without a quota of memory: together they may hold a part of the memory outside all quotas."""

    def __init__(self) -> None:
        self.max_units = 0
        self.members: list[Holds] = []

    @property
    def left(self) -> int:
        return max(0, self.max_units - sum(member.held_units for member in self.members))


class Credential(NamedTuple):
    """A token or a name in a certificate, and whether its holder may write."""

    token: bytes | None
    certificate: str | None
    may_write: bool


PROCESS_OF_THIS_HOST = Credential(None, None, True)


class Tenant:
    """A tenant. The catalog's lock guards its shares and holds, the lock of `Guests` its `num_connections`."""

    def __init__(self, name: str, notes: Notes | None = None, *, sees_all: bool = False) -> None:
        self.name = name
        self.sees_all = sees_all
        """Whether it may use the namespaces of all tenants, by the server's own ids."""
        self.notes = Notes(_MAX_NOTES, _MAX_NOTE_CHARS) if notes is None else notes
        self.memory = Share(name)
        self.disk = Share(name)
        self.holds = Holds()
        self.bandwidth = Bandwidth(None)
        self.bodies = ByteBudget(_MAX_BODIES_BYTES)
        """A limit on the memory of large requests that are arriving or being answered."""
        self.max_connections: int | None = None
        self.num_connections = 0
        self.credentials: frozenset[Credential] = frozenset()

    def own(self, namespace: Namespace) -> Namespace:
        """The server's id of the namespace that this tenant calls `namespace`."""
        if self.sees_all:
            return namespace
        return Namespace(hashlib.sha256(b"kvtier tenant\0" + self.name.encode() + b"\0" + namespace).digest())

    def tagged(self, label: str) -> str:
        """The name of a namespace on disk, which tells after a restart whose it is."""
        return label if self.sees_all else f"{_TAG}{self.name}{_TAG}{label}"


def split_tagged(name: str) -> tuple[str, str]:
    """The tenant's name (empty for the owner) and the namespace's own name."""
    if not name.startswith(_TAG):
        return "", name
    tenant, _, label = name[1:].partition(_TAG)
    return tenant, label


class Tenants:
    """The owner, and the tenants of a file. Thread-safe."""

    def __init__(
        self,
        *,
        memory_bytes: int,
        file_bytes: int | None,
        file: Path | None,
        token: bytes | None = None,
        pinned_share: float = 0.5,
        retained_share: float = DEFAULT_RETAINED_SHARE,
        unit_bytes: int = SLOT_ALIGN_BYTES,
    ) -> None:
        """Each tenant may pin `pinned_share` of its memory and disk, and retain `retained_share` of them.

        Raises `ConfigError` for an invalid file.
        """
        self.owner = Tenant("", Notes(), sees_all=True)
        self._file = file
        self._memory_bytes = memory_bytes
        self._file_bytes = file_bytes
        self._pinned_share = pinned_share
        self._retained_share = retained_share
        self._unit_bytes = unit_bytes
        self._lock = threading.Lock()
        self._tenants: dict[str, Tenant] = {}
        self._former: dict[str, Tenant] = {}
        """Tenants that are no longer in the file but still have blocks here."""
        self._signature: object = None
        self._rest = HoldGroup()
        self.owner.credentials = frozenset(
            {PROCESS_OF_THIS_HOST} if token is None else {PROCESS_OF_THIS_HOST, Credential(token, None, True)}
        )
        self.owner.memory.max_retained = int(memory_bytes * retained_share) // unit_bytes
        self.owner.disk.max_retained = int((file_bytes or 0) * retained_share) // unit_bytes
        if file is not None:
            self._signature = _signature_of(file)
            self._apply(_read(file))

    @property
    def has_several(self) -> bool:
        """Whether the server may have blocks of several tenants."""
        return self._file is not None

    def tokens(self) -> list[bytes]:
        """The tokens of all tenants."""
        with self._lock:
            return [credential.token for _, credential in self._credentials() if credential.token is not None]

    def holder_of(self, token: bytes) -> tuple[Tenant, Credential] | None:
        with self._lock:
            return next((found for found in self._credentials() if found[1].token == token), None)

    def certified(self, names: Collection[str]) -> tuple[Tenant, Credential] | None:
        """The tenant and credential whose certificate has one of `names`."""
        with self._lock:
            return next((found for found in self._credentials() if found[1].certificate in names), None)

    def still_knows(self, tenant: Tenant, credential: Credential) -> bool:
        """Whether a connection that authenticated with `credential` may stay."""
        with self._lock:
            is_served = tenant is self.owner or self._tenants.get(tenant.name) is tenant
            return is_served and credential in tenant.credentials

    def owner_of(self, stored_name: str) -> Tenant:
        """The tenant of a namespace on disk; the server's owner if the tenant is no longer known."""
        name = split_tagged(stored_name)[0]
        with self._lock:
            return self._tenants.get(name) or self._former.get(name) or self.owner

    def __iter__(self) -> Iterator[Tenant]:
        with self._lock:
            return iter(list(self._all()))

    def reload(self) -> bool:
        """Reload the file if it has changed. Returns whether it was applied; an invalid file changes nothing."""
        if self._file is None:
            return False
        try:
            signature = _signature_of(self._file)
            if signature == self._signature:
                return False
            self._signature = signature
            self._apply(_read(self._file))
        except ConfigError as error:
            logger.warning("the tenants stay as they are: %s", error)
            return False
        logger.info("read %d tenants from %s", len(self._tenants), self._file)
        return True

    def _all(self) -> tuple[Tenant, ...]:
        return (self.owner, *self._tenants.values())

    def _credentials(self) -> Iterator[tuple[Tenant, Credential]]:
        return ((tenant, credential) for tenant in self._all() for credential in tenant.credentials)

    def _apply(self, sections: Mapping[str, TenantSection]) -> None:
        self._check_sums(sections)
        secrets = [(credential.token, credential.certificate) for credential in self.owner.credentials]
        for section in sections.values():
            secrets += [(credential.token, credential.certificate) for credential in _credentials_of(section)]
        if len(set(secrets)) < len(secrets):
            raise ConfigError(f"a token or certificate occurs twice in {self._file}: each must identify one tenant")
        with self._lock:
            rest = self._memory_bytes - sum(_size(section.memory) for section in sections.values())
            disk_rest = (self._file_bytes or 0) - sum(_size(section.disk) for section in sections.values())
            self._rest.max_units = rest // 2 // self._unit_bytes
            self.owner.holds.group = self._rest
            self.owner.memory.max_pinned = int(rest * self._pinned_share) // self._unit_bytes
            self.owner.disk.max_pinned = int(disk_rest * self._pinned_share) // self._unit_bytes
            self.owner.memory.max_retained = int(rest * self._retained_share) // self._unit_bytes
            self.owner.disk.max_retained = int(disk_rest * self._retained_share) // self._unit_bytes
            known = self._former | self._tenants
            self._tenants = {}
            for name, section in sections.items():
                tenant = known.pop(name, None)
                if tenant is not None and tenant.sees_all != section.admin:
                    tenant.memory.quota = tenant.disk.quota = 0  # its blocks stay until room is needed
                    tenant = None
                if tenant is None:
                    tenant = Tenant(name, sees_all=section.admin)
                self._tenants[name] = tenant
                self._set_limits(tenant, section)
            self._former = {name: tenant for name, tenant in known.items() if tenant.memory.used or tenant.disk.used}
            for tenant in self._former.values():
                tenant.memory.quota = tenant.disk.quota = 0
            self._rest.members = [
                tenant.holds for tenant in (*self._all(), *self._former.values()) if not tenant.memory.quota
            ]

    def _set_limits(self, tenant: Tenant, section: TenantSection) -> None:
        memory = _size(section.memory)
        tenant.credentials = frozenset(_credentials_of(section))
        tenant.memory.quota = memory // self._unit_bytes
        tenant.disk.quota = _size(section.disk) // self._unit_bytes
        for share in (tenant.memory, tenant.disk):
            share.max_pinned = int(share.quota * self._pinned_share)
            share.max_retained = int(share.quota * _or(section.retained_share, self._retained_share))
        leased = memory // 2 if section.leased is None else _size(section.leased)
        tenant.holds.max_units = leased // self._unit_bytes if memory else None
        tenant.holds.group = self._rest
        tenant.bandwidth.bytes_per_s = None if section.bandwidth is None else _size(section.bandwidth)
        tenant.max_connections = section.connections

    def _check_sums(self, sections: Mapping[str, TenantSection]) -> None:
        for what, limit in (("memory", self._memory_bytes), ("disk", self._file_bytes or 0)):
            total = sum(_size(getattr(section, what)) for section in sections.values())
            if total > limit:
                raise ConfigError(
                    f"the tenants in {self._file} have quotas of {format_size(total)} of {what}, but the server has "
                    f"{format_size(limit) if limit else 'none'}"
                )


def _read(path: Path) -> dict[str, TenantSection]:
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the tenants in {path}: {error.strerror}") from error
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {format_size(_MAX_FILE_BYTES)}, the limit for a tenants' file")
    try:
        sections = msgspec.convert(tomllib.loads(text.decode()), dict[str, TenantSection])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{path} is not a valid tenants' file: {error}") from error
    if not 0 < len(sections) <= _MAX_TENANTS:
        raise ConfigError(f"{path} must have from 1 to {_MAX_TENANTS} tenants, not {len(sections)}")
    for name, section in sections.items():
        try:
            _check(name, section)
        except ConfigError as error:
            raise ConfigError(f"{path}: tenant {name[:_MAX_NAME_CHARS]!r}: {error}") from error
    return sections


def _check(name: str, section: TenantSection) -> None:
    if not 0 < len(name) <= _MAX_NAME_CHARS or not _NAME_CHARS.issuperset(name):
        raise ConfigError(f"a name has from 1 to {_MAX_NAME_CHARS} of the characters a-z, A-Z, 0-9, '.', '_' and '-'")
    credentials = _credentials_of(section)
    if not credentials:
        raise ConfigError("give the tenant a token, tokens or a certificate")
    if len(credentials) > _MAX_CREDENTIALS:
        raise ConfigError(f"at most {_MAX_CREDENTIALS} tokens and certificates at a time")
    if any(one.token is not None and len(one.token) < MIN_TOKEN_BYTES for one in credentials):
        raise ConfigError(f"a token is too short: use {MIN_TOKEN_BYTES} characters or more")
    if any(one.certificate == "" for one in credentials):
        raise ConfigError("certificate must be the name in the tenant's certificate, not empty")
    for what in ("memory", "disk", "leased", "bandwidth"):
        value = getattr(section, what)
        if value:
            try:
                parse_size(value)
            except ConfigError as error:
                raise ConfigError(f"{what}: {error}") from error
    if section.leased is not None and _size(section.leased) > _size(section.memory):
        raise ConfigError("leased is a part of memory and must not exceed it")
    if section.retained_share is not None and not 0 <= section.retained_share <= 1:
        raise ConfigError("retained_share must be from 0 to 1: the part of the tenant's memory and disk")
    if section.connections is not None and not 0 < section.connections <= 1 << 16:
        raise ConfigError(f"connections must be from 1 to {1 << 16}")


def _credentials_of(section: TenantSection) -> list[Credential]:
    found = []
    for one, several, certificate, may_write in (
        (section.token, section.tokens, section.certificate, True),
        (section.read_token, section.read_tokens, section.read_certificate, False),
    ):
        texts = several if one is None else (one, *several)
        found += [Credential(text.strip().encode(), None, may_write) for text in texts]
        if certificate is not None:
            found.append(Credential(None, certificate, may_write))
    return found


def _or(given: float | None, usual: float) -> float:
    return usual if given is None else given


def _size(value: str | int | None) -> int:
    return parse_size(value) if value else 0


def _signature_of(path: Path) -> object:
    """A value that changes with the file, even if another file replaces it."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"cannot read the tenants in {path}: {error.strerror}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns
