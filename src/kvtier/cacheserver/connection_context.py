"""The state shared by the connections of one server."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.cacheserver.catalog import Catalog
from kvtier.cacheserver.cluster_below import SharedCluster
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.guests import Guests
from kvtier.cacheserver.persistence import Disk
from kvtier.cacheserver.process_watch import ProcessWatch
from kvtier.cacheserver.sealer import NoSealer, Sealer
from kvtier.cacheserver.tenants import Tenant
from kvtier.cacheserver.traffic import ServerTraffic
from kvtier.memory.mapped import MappedArena
from kvtier.observe.log_limit import LogLimit
from kvtier.observe.metrics import ServerMetrics
from kvtier.observe.recent_warnings import RecentWarnings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ConnectionContext:
    """The objects that every connection of one server uses."""

    config: CacheServerConfig
    catalog: Catalog
    disk: Disk
    cluster: SharedCluster
    arena: MappedArena
    sealer: Sealer | NoSealer
    watch: ProcessWatch
    guests: Guests
    metrics: ServerMetrics
    traffic: ServerTraffic
    describe: Callable[[Tenant], dict[str, object]]
    count_up: Callable[[Tenant], dict[str, object]]
    warnings: RecentWarnings
    server_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    is_stopping: threading.Event = field(default_factory=threading.Event)
    log: LogLimit = field(default_factory=lambda: LogLimit(logger))
    bulk: threading.Lock = field(default_factory=threading.Lock)
    """Held for each piece of a request about many blocks: such requests take turns, piece by piece."""
